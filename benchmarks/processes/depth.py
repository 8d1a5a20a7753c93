"""A pipeline of two stages whose tasks adapt upper layers alone: layers cut by what each stage has to do, or evenly.

    python -m benchmarks.processes.depth                  3 minutes on two idle cores

A stage below all adapters has no backward, so that plans give it more layers. The other plan is that of tasks which
have adapters in all layers; the tasks that are trained, and what their backwards leave out, are the same. Each rank
computes on one thread; runs with both plans alternate, and the ratio is that of the medians of their steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.processes.workers import run_ranks, written_once

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Run both ranks and print the table; in a rank, measure."""
    options = _parser().parse_args()
    if options.worker is not None:
        found = measure(options)
        if options.worker == 0:
            Path(options.found).write_text(json.dumps(found), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        run_ranks("benchmarks.processes.depth", 2, path)
        rows = json.loads(path.read_text(encoding="utf-8"))
    print("lowest adapter cut by work   planned ms   ms a step   cut evenly   ms a step   times as fast")
    for row in rows:
        own, even = row["own"], row["even"]
        print(
            f"{row['lowest']:>14} {own['layers']!s:>11} {row['planned_s'] * 1e3:>12.1f} {own['step_s'] * 1e3:>11.1f}"
            f" {even['layers']!s:>12} {even['step_s'] * 1e3:>11.1f} {even['step_s'] / own['step_s']:>15.2f}"
        )


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each part of the layers that is adapted."""
    import torch

    from benchmarks.training.workloads import ModelSpec

    torch.set_num_threads(1)
    folder = Path(options.found).parent
    spec = ModelSpec(num_layers=options.layers)
    backbone = written_once(options.worker, folder / "backbone", spec.build().save_pretrained)
    first = trainer_for(options, folder, backbone, 0)
    measured = first.measure_profile(options.profile_s).to_json()
    profile = written_once(
        options.worker, folder / "profile.json", partial(Path.write_text, data=measured, encoding="utf-8")
    )
    rows = []
    for lowest in (0, options.layers // 2, options.layers * 7 // 8):
        steps: dict[str, list[float]] = {"own": [], "even": []}
        plans: dict[str, Any] = {}
        for turn in range(2 * options.rounds):
            arm = ("own", "even")[(turn + turn // 2) % 2]
            with nullcontext() if arm == "own" else mock.patch("peft_mux.planning.loads.lowest_layer", return_value=0):
                plans[arm], seconds = _train(options, folder, backbone, lowest, cost_profile=str(profile))
            steps[arm] += seconds
        row: dict[str, Any] = {
            arm: {"layers": plans[arm].layers_per_stage, "step_s": statistics.median(own)} for arm, own in steps.items()
        }
        rows.append({"lowest": lowest, "planned_s": plans["own"].step_s, **row})
    return rows


def _train(
    options: argparse.Namespace, folder: Path, backbone: Path, lowest: int, **arguments: Any
) -> tuple[Any, list[float]]:
    """Return the plan of a run, and the seconds of its steps but the first ones."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends_s: list[float] = []
            self.plans: list[Any] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends_s.append(time.perf_counter())
            self.plans.append(trainer._plans.current)

    trainer, clock = trainer_for(options, folder, backbone, lowest, **arguments), Clock()
    trainer.add_callback(clock)
    trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(clock.ends_s[1:])]
    return clock.plans[0], seconds


def trainer_for(options: argparse.Namespace, folder: Path, backbone: Path, lowest: int, **arguments: Any) -> Any:
    """Return the trainer of a run whose tasks have adapters from one layer on."""
    from peft import LoraConfig

    from benchmarks.training.workloads import ModelSpec, make_workload
    from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

    work = make_workload("nonuniform", num_tasks=4, num_steps=options.steps, vocab_size=ModelSpec().vocab_size)
    layers = list(range(lowest, options.layers))
    tasks = [
        Task(
            name=task.name,
            peft_config=LoraConfig(r=task.rank, target_modules=LINEAR, layers_to_transform=layers),
            train_dataset=list(task.rows),
            train_batch_size=task.batch_size,
            max_steps=options.steps,
            shuffle=False,
        )
        for task in work.tasks
    ]
    args = MultiTaskTrainingArguments(
        output_dir=str(folder / "runs"),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        pipeline_parallel_size=2,
        pipeline_flush="every_step",
        **arguments,
    )
    return MultiTaskTrainer(model=str(backbone), tasks=tasks, args=args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.processes.depth", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--layers", type=int, default=8, help="layers of the backbone")
    add("--steps", type=int, default=8, help="steps of a run; the first two are not timed")
    add("--rounds", type=int, default=3, help="runs with each plan")
    add("--profile-s", type=float, default=15.0, help="seconds of measuring the profile")
    add("--worker", type=int, help=argparse.SUPPRESS)
    add("--found", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
