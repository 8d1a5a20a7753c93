"""Times `peft-mux plan --deployment` for many tasks of a large backbone, in CPU seconds of one process.

    python -m benchmarks.planner.large                             64 tasks of a 70B Llama on 64 H100
    python -m benchmarks.planner.large --tasks 8 --devices 8xH100-80GB
    python -m benchmarks.planner.large --before CHECKOUT           another checkout too

The backbone is a config without weights. Tasks have lognormal lengths with medians of 100 to 2,000 tokens, batches of
8 to 64 rows, and LoRA of rank 8 to 64 on all linear layers. CPU seconds include the start of Python and reading the
rows. Parts of the search end after a number of wall-clock seconds, so run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers import LlamaConfig

ROWS = 400
LONGEST = 8192
HEAD = f"""\
model: model
output_dir: out
run:
  use_cpu: true
  report_to: none
  max_steps: 100
  max_length: {LONGEST}
  max_tokens_per_micro_batch: {LONGEST}
  bf16: true
  gradient_checkpointing: true
tasks:
"""


def write_run(folder: Path, num_tasks: int) -> Path:
    """Write a config-only 70B Llama and a tasks.yaml with the rows of its tasks; return the path of the latter."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=LONGEST,
        dtype="bfloat16",
    )
    config.save_pretrained(folder / "model")
    draw = np.random.default_rng(0)
    lines = []
    for number, median in enumerate(np.geomspace(100, 2000, num_tasks)):
        lengths = np.clip(draw.lognormal(np.log(median), 0.8, ROWS), 16, LONGEST).astype(int)
        rows = "".join(json.dumps({"input_ids": [5] * length}) + "\n" for length in lengths.tolist())
        (folder / f"rows{number}.jsonl").write_text(rows, encoding="utf-8")
        batch_size, rank = (8, 16, 32, 64)[number % 4], (8, 16, 32, 64)[number // 4 % 4]
        lines.append(
            f"  task{number}: {{dataset: rows{number}.jsonl, train_batch_size: {batch_size}, "
            f"peft: {{r: {rank}, target_modules: all-linear}}}}\n"
        )
    path = folder / "tasks.yaml"
    path.write_text(HEAD + "".join(lines), encoding="utf-8")
    return path


def plan_seconds(checkout: Path, tasks: Path, devices: str) -> tuple[float, str]:
    """Plan with the code of a checkout; return the CPU seconds of the process, and what it chose with its seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # Each checkout reads the rows itself.
        "HF_DATASETS_CACHE": tempfile.mkdtemp(dir=tasks.parent),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-m", "peft_mux", "plan", str(tasks), "--deployment", "--devices", devices, "--json"]
    printed = subprocess.run(command, env=environment, cwd=tasks.parent, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    plan = json.loads(printed.stdout)
    found = f"{plan['replicas']}, {plan['planned']['step_s']:.2f} s a step by {plan['planned']['num_plans']} plans"
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, found


def main() -> None:
    """Print a line for each checkout."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.large",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--devices", default="64xH100-80GB")
    parser.add_argument("--before", type=Path, help="another checkout to time")
    options = parser.parse_args()
    checkouts = {"here": Path(__file__).parents[2]}
    if options.before is not None:
        checkouts["before"] = options.before.resolve()
    with tempfile.TemporaryDirectory() as folder:
        tasks = write_run(Path(folder), options.tasks)
        for name, checkout in checkouts.items():
            seconds, found = plan_seconds(checkout, tasks, options.devices)
            print(f"{name:<8} {seconds:6.1f} CPU s for {options.tasks} tasks on {options.devices}: {found}", flush=True)


if __name__ == "__main__":
    main()
