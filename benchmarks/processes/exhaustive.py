"""The planner's own plan against every other plan, executed: a pipeline of two stages, or two tensor parallel ranks.

    python -m benchmarks.processes.exhaustive                    both layouts, 10 mixes each; about 15 idle minutes
    python -m benchmarks.processes.exhaustive --layouts pp2 --mixes 3
    python -m benchmarks.processes.exhaustive --write            also into benchmarks/results/

For mixes of 2 to 4 tasks (drawn by a seed: 2 to 8 rows of 10 to 70, or 1 or 2 of 100 to 200 tokens a step, ranks 4 to
64) all contiguous partitions of the tasks into hTasks, with hTasks that share buckets and without, 1, 2 or 4
micro-batches and, on tensor parallel ranks, 1 to 4 passes in turns are planned; equal plans count once.
One trainer follows all of them, one after another, step by step, after a profile that two processes measured. Then the
fastest of them and the planner's own run again by turns, as the fastest of many medians is also the luckiest; `own /
best` is of these rounds. Steps are flushed, so that each has a time of its own.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from benchmarks.harness import Table, hand_over, in_own_process
from benchmarks.stored import host_kind, read_result, write_result
from benchmarks.training.mux import trainer_for
from benchmarks.training.workloads import ModelSpec, TaskWorkload, Workload
from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.policies import POLICIES, Partition, Policy, register_policy

LAYOUTS: dict[str, dict[str, Any]] = {"pp2": {"pipeline_parallel_size": 2}, "tp2": {"tensor_parallel_size": 2}}
GOALS = {"median": 1.05, "worst": 1.10}
MICRO_BATCHES = (1, 2, 4)
WIDTHS = {"pp2": (1,), "tp2": (1, 2, 3, 4)}
RANKS = (4, 8, 16, 32, 64)
_NAME = "one partition"
_STEPS = 100_000
"""Steps of a run that is ended before."""


def main() -> None:
    """Run both ranks and print the table; in a rank, measure."""
    options = _parser().parse_args()
    if options.worker:
        result = measure(options)
        if os.environ["RANK"] == "0":
            hand_over(result)
        return
    with tempfile.TemporaryDirectory() as folder:
        given = [argument for argument in sys.argv[1:] if argument != "--write"]
        rows = in_own_process(
            "benchmarks.processes.exhaustive", *given, "--worker", "--folder", folder, processes=2, limit_s=7200
        )
    summary = print_table(rows)
    if options.write:
        # A run of one layout leaves what is stored of the other.
        stored = read_result(f"exhaustive-{host_kind()}")
        result_of_layouts = {
            layout: {"summary": figures, "rows": [row for row in rows if row["layout"] == layout]}
            for layout, figures in summary.items()
        }
        kept = {layout: stored[layout] for layout in LAYOUTS if layout in stored}
        write_result(f"exhaustive-{host_kind()}", {**kept, **result_of_layouts})


def print_table(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Print each mix, and return the median and the worst of own over best for each layout.

    Args:
        rows: what the ranks have measured of each mix.
    """
    table = Table(
        "layout:<6", "tasks:>5", "tokens:>6", "plans:>5", "own ms:>7.1f", "best ms:>7.1f", "own / best:>10.3f",
        "own plan -> best plan:<1",
    )  # fmt: skip
    for row in rows:
        own_ms, best_ms = 1e3 * row["own_s"], 1e3 * row["best_s"]
        numbers = (row[key] for key in ("layout", "num_tasks", "num_tokens", "num_plans"))
        table.row(*numbers, own_ms, best_ms, own_ms / best_ms, f"{row['own']} -> {row['best']}")
    summary = {}
    for layout in dict.fromkeys(row["layout"] for row in rows):
        ratios = [row["own_s"] / row["best_s"] for row in rows if row["layout"] == layout]
        summary[layout] = {"median": statistics.median(ratios), "worst": max(ratios)}
        text = ", ".join(f"{name} {value:.3f} (goal {GOALS[name]:.2f})" for name, value in summary[layout].items())
        print(f"{layout}: own over best: {text}")
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.processes.exhaustive", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    add("--mixes", type=int, default=10, help="how many mixes to draw for each layout")
    add("--only", type=int, nargs="+", help="numbers of the mixes that are run, from 0; by default all")
    add("--steps", type=int, default=3, help="steps of a plan each time that it is followed; the first is not timed")
    add("--rounds", type=int, default=6, help="how often the fastest plans and the planner's own run again")
    add("--finalists", type=int, default=3, help="how many of the fastest plans run again")
    add("--hidden-size", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--profile-s", type=float, default=15.0, help="seconds of measuring the profile")
    add("--seed", type=int, default=0, help="of the mixes")
    add("--write", action="store_true", help="write the JSON into benchmarks/results/")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


# ------------------------------------------------------------------ what a rank does


class OnePartition(Policy):
    """A policy of one partition, whatever it costs."""

    name = _NAME
    words = "one partition"
    search_schedule: Schedule | None = "mux"

    def __init__(self, partition: Partition) -> None:
        self.partition = partition

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        """Return it."""
        return [self.partition]


class _Trial(TrainerCallback):
    """Lets a run follow plan after plan, and times the steps of each."""

    def __init__(self, trainer: Any, layout: str, options: argparse.Namespace) -> None:
        self.trainer, self.layout, self.options = trainer, layout, options
        self.plans: list[Plan] = []
        self.seconds: list[list[float]] = []
        self.turns: Iterator[int] = iter(())
        self.order: list[int] = []
        self.current, self.left, self.begin_s = 0, 0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.plans:
            self.plans = self._all_plans()
            self.seconds = [[] for _ in self.plans]
            self.turns = iter([*range(len(self.plans)), *range(len(self.plans))])
        elif self.left < self.options.steps - 1:  # the first step of a plan is a warm-up
            self.seconds[self.current].append(time.perf_counter() - self.begin_s)
        if self.left:
            self.left -= 1
        else:
            following = next(self.turns, None)
            if following is None and not self.order:
                self.turns = self._finals()
                following = next(self.turns)
            if following is None:
                control.should_training_stop = True
                return
            self.current, self.left = following, self.options.steps - 1
            self.trainer._plans.follow(self.plans[following])
        self.begin_s = time.perf_counter()

    def _finals(self) -> Iterator[int]:
        """Return the turns of the fastest plans and of the planner's own, the same on both ranks."""
        medians = self.trainer._run.processes.gather([statistics.median(seconds) for seconds in self.seconds])
        total = [sum(medians_of_way) for medians_of_way in zip(*medians, strict=True)]
        fastest = sorted(range(len(total)), key=total.__getitem__)[: self.options.finalists]
        self.order = list(dict.fromkeys([0, *fastest]))
        self.seconds = [[] for _ in self.plans]
        return iter([index for turn in range(self.options.rounds) for index in self.order[:: 1 if turn % 2 else -1]])

    def _all_plans(self) -> list[Plan]:
        """Return the planner's own plan, and all others that differ from it and from each other."""
        plans = self.trainer._plans
        plans_by_key = {_key(plans.current): plans.current}
        num_tasks = len(plans.current.shares)
        partitions = [Partition(groups, grouped) for groups in _partitions(num_tasks) for grouped in (False, True)]
        ways = [(grouping, n, width) for grouping in partitions for n in MICRO_BATCHES for width in WIDTHS[self.layout]]
        for partition, count, width in ways:
            plan = self._plan(partition, count, width)
            plans_by_key.setdefault(_key(plan), plan)
        return list(plans_by_key.values())

    def _plan(self, partition: Partition, count: int, width: int) -> Plan:
        planner, before = self.trainer._plans.planner, self.trainer._plans.planner.args
        args = copy.copy(before)
        args.num_micro_batches, args.planner, args.interleaved_passes = count, _NAME, width
        register_policy(OnePartition(partition))
        planner.args = args
        try:
            return self.trainer.plan()
        finally:
            planner.args = before
            POLICIES.pop(_NAME)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each layout and mix.

    Args:
        options: the settings of `benchmarks.processes.exhaustive`.
    """
    torch.set_num_threads(1)
    size = options.hidden_size
    model = ModelSpec(hidden_size=size, num_layers=options.layers, intermediate_size=size * 43 // 16, vocab_size=1024)
    rank, folder, rows = int(os.environ["RANK"]), options.folder, []
    for layout in options.layouts:
        common = {**LAYOUTS[layout], "pipeline_flush": "every_step"}
        first = trainer_for(model.build, _workload(0, options), f"{folder}/profile-{layout}", False, **common)
        measured, profile = first.measure_profile(options.profile_s).to_json(), folder / f"{layout}.json"
        if rank == 0:
            unfinished = folder / "unfinished.json"
            unfinished.write_text(measured, encoding="utf-8")
            unfinished.rename(profile)
        while not profile.exists():
            time.sleep(0.05)
        for number in options.only or range(options.mixes):
            work = _workload(number, options)
            arguments = {**common, "cost_profile": str(profile)}
            trainer = trainer_for(model.build, work, f"{folder}/{layout}-{number}", False, **arguments)
            rows.append(_row(trainer, work, layout, options))
    return rows


def _row(trainer: Any, work: Workload, layout: str, options: argparse.Namespace) -> dict[str, Any]:
    trial = _Trial(trainer, layout, options)
    trainer.add_callback(trial)
    trainer.train()
    medians = {index: statistics.median(trial.seconds[index]) for index in trial.order}
    best = min(medians, key=medians.__getitem__)
    return {
        "layout": layout,
        "num_tasks": len(work.tasks),
        "num_tokens": sum(len(row["input_ids"]) for task in work.tasks for row in task.rows[: task.batch_size]),
        "num_plans": len(trial.plans),
        "own_s": medians[0],
        "best_s": medians[best],
        "own": _words(trial.plans[0]),
        "best": _words(trial.plans[best]),
        "planned_s": {"own": trial.plans[0].step_s, "best": trial.plans[best].step_s},
    }


def _partitions(num_tasks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return all ways to cut so many tasks into consecutive intervals."""
    partitions = []
    for cuts in itertools.product((False, True), repeat=num_tasks - 1):
        bounds = [0, *(index for index, cut in enumerate(cuts, start=1) if cut), num_tasks]
        partitions.append(tuple(itertools.pairwise(bounds)))
    return partitions


def _key(plan: Plan) -> tuple[Any, ...]:
    """Return what the engine follows of a plan."""
    htasks = tuple((htask.tasks, htask.micro_batches) for htask in plan.htasks)
    template = None if plan.template is None else plan.template.actions
    return htasks, str(template), plan.passes_in_turns


def _words(plan: Plan) -> str:
    names = " | ".join(
        f"{'+'.join(name.removeprefix('task-') for name in htask.tasks)} x{htask.micro_batches}"
        for htask in plan.htasks
    )
    return names if plan.passes_in_turns == 1 else f"{names}, {plan.passes_in_turns} in turns"


def _workload(number: int, options: argparse.Namespace) -> Workload:
    """Return the tasks of one mix; every step has the same rows."""
    draw = random.Random(f"exhaustive-{options.seed}-{number}")
    tasks = []
    for index in range(2 + number % 3):
        count, low, high = (draw.randint(2, 8), 10, 70) if draw.random() < 0.6 else (draw.randint(1, 2), 100, 200)
        rows = [[draw.randrange(1024) for _ in range(draw.randint(low, high))] for _ in range(count)]
        token_rows = tuple({"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in rows)
        tasks.append(TaskWorkload(f"task-{index}", "drawn", draw.choice(RANKS), index, count, token_rows))
    return Workload("drawn", tuple(tasks), _STEPS, "drawn", learning_rate=1e-4)


if __name__ == "__main__":
    main()
