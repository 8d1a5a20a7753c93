"""Clients as they are published, each in an environment of its own: three versions, and two loops of the cookbook.

They are installed from the package registry; without one the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.paths import SHARED_DATA
from tests.serve.lab import Server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

LIFE = """
import os, sys, tinker
from tinker import types

def result(value):
    return value.result() if hasattr(value, "result") else value  # older clients wait themselves

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
client = result(service.create_lora_training_client(base_model="tiny/random", rank=4, seed=1))
inputs = {"target_tokens": [4, 5, 6, 7], "weights": [1.0] * 4}
row = types.Datum(model_input=types.ModelInput.from_ints([3, 4, 5, 6]), loss_fn_inputs=inputs)
losses = []
for _ in range(4):
    call = client.forward_backward([row], "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(call.result().metrics["loss:sum"])
    step.result()
assert losses == sorted(losses, reverse=True), losses
state = client.save_state("state").result().path
sampler = result(client.save_weights_and_get_sampling_client())
params = types.SamplingParams(max_tokens=5, temperature=0.0)
drawn = sampler.sample(types.ModelInput.from_ints([5, 6]), 2, params).result().sequences
assert drawn[0].tokens == drawn[1].tokens
again = result(service.create_training_client_from_state(state))
loss = again.forward([row], "cross_entropy").result().metrics["loss:sum"]
assert loss == client.forward([row], "cross_entropy").result().metrics["loss:sum"]
print("tinker", tinker.__version__, flush=True)
os._exit(0)  # the threads of some clients abort an interpreter that ends by itself
"""
# Data sets and a tokenizer in place of those of the hub.
RECIPE = """
import runpy, sys, datasets
model = sys.argv.pop(2)
from tinker_cookbook import tokenizer_utils
from transformers import AutoTokenizer

tokenizer_utils.register_tokenizer("meta-llama/Llama-3.2-1B", lambda: AutoTokenizer.from_pretrained(model))
chat = [{"role": "user", "content": "tell a story"}, {"role": "assistant", "content": "once upon a time ."}]
row = {"messages": chat, "question": "what is 1 + 1 ?", "answer": "so #### 2"}
rows = datasets.Dataset.from_list([row] * 16)
split = datasets.DatasetDict(train=rows, test=rows)
datasets.load_dataset = lambda *names, **options: split[options["split"]] if options.get("split") else split
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def environment(folder: Path, *packages: str) -> Path:
    """Return the Python of a new environment with some packages, and behind them those of this one."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "this.pth").write_text(sysconfig.get_path("purelib"))
    words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", *packages]
    installed = subprocess.run(words, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    return python


def run(python: Path, folder: Path, script: str, *arguments: str, **variables: str) -> str:
    variables |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [str(python), "-c", script, *arguments]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("package", ["tinker==0.25.0", "tinker==0.30.4", "tinker"])
def test_a_version_of_the_client_trains_saves_and_samples(package: str, tmp_path: Path) -> None:
    python = environment(tmp_path / "client", package)
    server = Server(tmp_path / "store")
    printed = run(python, tmp_path, LIFE, server.url, server.keys["alice"])
    assert package.partition("==")[2] in printed
    server.close()


@pytest.mark.skipif(not (SHARED_DATA / "stories260K").exists(), reason="needs ../shared/data")
def test_loops_of_the_cookbook_come_to_their_end(tmp_path: Path) -> None:
    python = environment(tmp_path / "cookbook", "tinker-cookbook==0.5.8", "sympy", "pylatexenc", "math-verify")
    model, name = str(SHARED_DATA / "stories260K"), "meta-llama/Llama-3.2-1B"
    server = Server(tmp_path / "store", model=model, name=name)
    for recipe, options in (
        ("sl_loop", ("batch_size=4", "max_steps=3", "max_length=128")),
        ("rl_loop", ("batch_size=8", "group_size=4", "max_tokens=16")),
    ):
        common = f"base_url={server.url}", f"model_name={name}", "lora_rank=4", f"log_path={tmp_path / recipe}"
        words = f"tinker_cookbook.recipes.{recipe}", model, *common, *options
        assert "Training completed" in run(python, tmp_path, RECIPE, *words, TINKER_API_KEY=server.keys["alice"])
    server.close()
