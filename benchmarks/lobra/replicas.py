"""Trains tasks of skewed lengths over LobRA's unequal replicas, and over equal ones, in real processes on this machine.

    python -m benchmarks.lobra.replicas [--steps 12] [--replicas "<1,2>, <1,1>"] [--write]    about 3 minutes on 2 cores

Starts as many gloo processes as the replicas take, one thread each (more of them than cores share these, so seconds
here are no measure of what GPUs would do). Printed for each policy of dispatch: seconds of a step, how even the
replicas were by the tokens that they processed, and what dispatching cost: seconds of solving, and how many of them a
step waited for, as the next step is solved on a thread while the present one runs (L section 4.3). The losses of the
policies are compared with one another: where a sequence is trained must not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import RESULTS, ROOT
from benchmarks.training.report import host_kind
from benchmarks.training.workloads import ModelSpec

POLICIES = ("balanced", "length", "uniform")
SPEC = ModelSpec(hidden_size=128, num_layers=4, intermediate_size=344, num_heads=4, vocab_size=1024)
LARGEST_DIFFERENCE = 1e-5
"""Relative; sums over other replicas come in another order."""
LENGTHS = ((40, 0.4, 8), (60, 0.8, 6), (90, 0.6, 4), (30, 1.0, 8), (150, 0.5, 2))
"""Median, deviation of the logarithm, and rows of a global batch of each task."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every policy in processes of its own, and print the table."""
    options = _parser().parse_args(arguments)
    if options.child:
        _child(options)
        return
    from peft_mux.engine.layout import ParallelLayout

    world_size = ParallelLayout.parse(options.replicas).world_size
    with tempfile.TemporaryDirectory() as folder:
        SPEC.build().save_pretrained(Path(folder) / "backbone")
        found = {policy: _launch(policy, world_size, options, Path(folder)) for policy in options.policies}
    _require_equal_losses(found)
    print(f"replicas {options.replicas}, {world_size} processes, {options.steps} steps")
    print("policy      step s   tokens of each process              dispatch: solve s   waited s   hidden")
    for policy, run in found.items():
        clock = run["clock"]
        tokens = ", ".join(f"{count:,}" for count in run["tokens"])
        print(
            f"{policy:<10} {run['step_s']:7.3f}   {tokens:<34}  {clock['solve_s']:17.3f} {clock['waited_s']:10.3f}"
            f" {run['hidden_share']:8.0%}"
        )
    if options.write:
        path = RESULTS / f"replicas-{host_kind()}.json"
        contents = {"replicas": options.replicas, "steps": options.steps, "policies": found}
        path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


def _launch(policy: str, world_size: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train under one policy, and return what rank 0 measured."""
    own = ["-m", "benchmarks.lobra.replicas", "--child", policy, "--folder", str(folder), "--steps", str(options.steps)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += [*own, "--replicas", options.replicas]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"policy {policy} ended with code {result.returncode}:\n{result.stderr[-3000:]}")
    return json.loads((folder / f"{policy}.json").read_text(encoding="utf-8"))


def _child(options: argparse.Namespace) -> None:
    """Train in this process, one of several."""
    import torch

    from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments

    torch.set_num_threads(1)
    root = Path(options.folder) / options.child
    args = MultiTaskTrainingArguments(
        output_dir=str(root),
        replicas=options.replicas,
        dispatch=options.child,
        max_tokens_per_micro_batch=512,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = MultiTaskTrainer(str(Path(options.folder) / "backbone"), args, _tasks(options.steps))
    output = trainer.train()
    if trainer._run.processes.is_main:
        clock = trainer._plans.dispatch_clock
        measured = {
            "step_s": output.metrics["train_runtime"] / options.steps,
            "tokens": [record.tokens for record in trainer._run.records],
            "clock": {"solve_s": clock.solve_s, "waited_s": clock.waited_s, "num_ahead": clock.num_ahead},
            "hidden_share": clock.hidden_share,
            "losses": {
                run.name: [entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in trainer.table
            },
        }
        (Path(options.folder) / f"{options.child}.json").write_text(json.dumps(measured), encoding="utf-8")


def _tasks(steps: int) -> list[Any]:
    """Return five tasks whose lengths are lognormal: many short rows and few long ones, as in L Figure 7."""
    import numpy as np
    from peft import LoraConfig

    from peft_mux import Task

    tasks = []
    for index, (median, deviation, rows) in enumerate(LENGTHS):
        draw = np.random.default_rng(index)
        lengths = np.clip(draw.lognormal(np.log(median), deviation, size=rows * steps), 8, 480).astype(int)
        tasks.append(
            Task(
                name=f"task-{index}",
                peft_config=LoraConfig(r=8 << (index % 3), target_modules="all-linear", task_type="CAUSAL_LM"),
                train_dataset=[{"input_ids": draw.integers(1, SPEC.vocab_size, size=n).tolist()} for n in lengths],
                train_batch_size=rows,
                max_steps=steps,
                shuffle=False,
                learning_rate=1e-3,
            )
        )
    return tasks


def _require_equal_losses(found: dict[str, dict[str, Any]]) -> None:
    """Refuse losses that depend on the policy: where a sequence is trained must not matter."""
    first, *others = found
    for policy in others:
        for name, losses in found[first]["losses"].items():
            worst = max(abs(a - b) / abs(b) for a, b in zip(found[policy]["losses"][name], losses, strict=True))
            if worst > LARGEST_DIFFERENCE:
                raise RuntimeError(f"{name}: losses under {policy} are {worst:.1e} away from those under {first}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lobra.replicas", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--replicas", default="<1,2>, <1,1>")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--write", action="store_true", help="write JSON into benchmarks/results/")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
