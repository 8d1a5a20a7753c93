"""Every way to start several processes, from the command that a user types to adapters that plain PEFT loads."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from peft_mux.cli.main import main
from tests.invariants.mux_lab import rows, tiny_llama
from tests.paths import ROOT
from tests.records import run_records

pytestmark = pytest.mark.distributed
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly  # interpreters of their own, which import for long

TASKS = ("one", "two")
NUM_STEPS = 3
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
TRAIN = ("-m", "peft_mux", "train")


@dataclass(frozen=True)
class Printed:
    """What a command gave."""

    code: int
    out: str
    error: str


def write_tasks(folder: Path, *, num_steps: int, run: str) -> Path:
    """Write a backbone, rows, and a file of two tasks with settings of the run into a folder, and return it."""
    tiny_llama().save_pretrained(folder / "backbone")
    lines = "".join(json.dumps(row) + "\n" for row in rows(1, 12, 5, 9))
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    (folder / "tasks.yaml").write_text(
        f"model: {folder}/backbone\n"
        f"output_dir: {folder}/out\n"
        f"run: {{use_cpu: true, report_to: none, ddp_timeout: 60, learning_rate: 1e-2, {run}}}\n"
        f"defaults: {{dataset: {folder}/rows.jsonl, train_batch_size: 4, max_steps: {num_steps}}}\n"
        "tasks:\n"
        "  one: {peft: {r: 4, target_modules: all-linear, lora_dropout: 0.1}}\n"
        "  two: {peft: {r: 2, target_modules: [q_proj, v_proj]}}\n",
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of two tasks that run over two stages."""
    return write_tasks(tmp_path_factory.mktemp("launches"), num_steps=NUM_STEPS, run="pipeline_parallel_size: 2")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The folder of the run of one process."""
    out = folder / "alone"
    settings = (f"output_dir={out}", "run.pipeline_parallel_size=1")
    arguments = [part for item in settings for part in ("--set", item)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        assert main(["train", str(folder / "tasks.yaml"), *arguments]) == 0
    return out


def child_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a child process that uses this checkout, one thread and no network."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return environment | {"HF_HOME": str(folder / "cache"), "HF_DATASETS_CACHE": str(folder / "cache")}


def call(folder: Path, *command: str) -> Printed:
    """Run `python command`, as a user would, outside of the repository."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=child_environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return Printed(done.returncode, done.stdout, done.stderr)


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def assert_trained(out: Path, alone: Path, backbone: Path) -> None:
    """Assert that both ranks took part, and that plain PEFT loads the adapters that one process would have trained."""
    ranks = run_records(out, "rank")
    assert [record["rank"] for record in ranks] == [0, 1]
    assert all(record["tokens"] > 0 and record["seconds"] > record["waited_seconds"] > 0 for record in ranks)
    ids = torch.arange(1, 9)[None]
    for name in TASKS:
        adapter, wanted = (load_file(root / name / "adapter_model.safetensors") for root in (out, alone))
        assert adapter.keys() == wanted.keys()
        for key, weight in wanted.items():
            assert (adapter[key] - weight).norm() <= 1e-4 * weight.norm(), f"{name} {key}"
        plain = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(backbone), out / name).eval()
        with torch.no_grad(), plain.disable_adapter():
            before = plain(ids).logits
        with torch.no_grad():
            assert (plain(ids).logits - before).norm() > 1e-3 * before.norm(), f"{name} has learned nothing"


def assert_printed_once(printed: Printed) -> None:
    """Assert that one process alone printed the report, with a line for each rank."""
    assert printed.code == 0, printed.error[-3000:]
    for name in TASKS:
        assert len(re.findall(rf"^{name} +succeeded +{NUM_STEPS}/{NUM_STEPS} ", printed.out, re.MULTILINE)) == 1
        assert printed.out.count(f"{name}: succeeded") == 1
    assert len(re.findall(r"seconds +waiting", printed.out)) == 1
    ranks = re.findall(
        r"^ +([01]) +[\d,]+ +[\d.]+ +[\d.]+ +[\d,]+  replica 1 of 1, stage ([12]) of 2$", printed.out, re.M
    )
    assert ranks == [("0", "1"), ("1", "2")]


LAUNCHERS = [
    pytest.param(("-m", *TORCHRUN), id="torchrun", marks=NIGHTLY),
    # On a machine without GPUs, or with use_cpu in the file, this starts processes on CPUs.
    pytest.param(
        ("-m", *ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "PORT"),
        id="accelerate",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launched_file_trains_over_two_stages_and_prints_once(
    launcher: tuple[str, ...], folder: Path, alone: Path, request: pytest.FixtureRequest
) -> None:
    out = folder / request.node.callspec.id
    command = [free_port() if part == "PORT" else part for part in launcher]
    printed = call(folder, *command, *TRAIN, "tasks.yaml", "--set", f"output_dir={out}")
    assert_printed_once(printed)
    assert printed.out.count("plan  2 tasks") == 1
    assert_trained(out, alone, folder / "backbone")


@NIGHTLY
def test_a_notebook_trains_over_two_stages(folder: Path, alone: Path) -> None:
    printed = call(folder, str(Path(__file__).parent / "notebook_launch.py"), str(folder), free_port())
    assert_printed_once(printed)
    assert_trained(folder / "notebook", alone, folder / "backbone")


@NIGHTLY
@pytest.mark.parametrize("way", [("--cpu", "--num_processes", "2"), ("--config_file", "accelerate.yaml")])
def test_accelerate_on_cpus_starts_one_process_and_is_shown_what_to_type(way: tuple[str, ...], folder: Path) -> None:
    (folder / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\n"
        "num_processes: 2\nmixed_precision: 'no'\n",
        encoding="utf-8",
    )
    printed = call(folder, "-m", *ACCELERATE, *way, *TRAIN, "tasks.yaml", "--set", f"output_dir={folder}/none")
    assert printed.code != 0
    assert "processes must be the several that the launcher was asked for, got 1" in printed.error
    assert "torchrun --nproc-per-node N script.py" in printed.error
    assert not (folder / "none").exists()
