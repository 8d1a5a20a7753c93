"""Contenders of one comparison, each in processes of its own: held to equal losses, then timed by turns."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import in_own_process, rotated
from benchmarks.training.throughput import check_equal_work
from benchmarks.training.workloads import Case

_AUDITED_STEPS = 2
"""The second step is the first that an update has changed."""
_LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train the tasks of a case.

    Attributes:
        name: what tables call it.
        processes: processes that train together, one thread each.
        arguments: arguments of `MultiTaskTrainingArguments` in addition to those that all have.
        padded: whether rows are filled up to the longest of all tasks.
        is_hf: whether it is transformers' Trainer with PEFT, in one process with as many threads.
        parts: names of the tasks of each run, one run after another; `()` for one run of all.
        part_arguments: further arguments of each of these runs.
    """

    name: str
    processes: int
    arguments: dict[str, Any] = field(default_factory=dict)
    padded: bool = False
    is_hf: bool = False
    parts: tuple[tuple[str, ...], ...] = ()
    part_arguments: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What a contender took.

    Attributes:
        seconds: seconds of all steps but each task's first, by round.
        processes: processes that it ran in.
        steps: by round, measured and predicted seconds of each of these steps; the latter 0 where rows are not
            dispatched.
    """

    seconds: list[float]
    processes: int
    steps: list[list[tuple[float, float]]]

    @property
    def median_s(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.seconds)


def measure(contenders: Sequence[Contender], case: Case, rounds: int, backbone: Path) -> dict[str, Measured]:
    """Hold all contenders to the same losses, then time them by turns.

    Args:
        contenders: whom to compare.
        case: the rows and model that all train on.
        rounds: timed runs of each.
        backbone: folder of the saved backbone of the case.

    Raises:
        UnequalWorkError: if the losses of two contenders differ.
        RuntimeError: with the end of its output, where a run fails.
    """
    short = dataclasses.replace(case, num_steps=_AUDITED_STEPS)
    check_equal_work({contender.name: _run(contender, short, backbone, True)[2] for contender in contenders})
    measured = {contender.name: Measured([], contender.processes, []) for contender in contenders}
    for turn in range(rounds):
        for contender in rotated(contenders, turn):
            print(f"  round {turn + 1} of {rounds}: {contender.name}", file=sys.stderr, flush=True)
            seconds, steps, _ = _run(contender, case, backbone, False)
            measured[contender.name].seconds.append(seconds)
            measured[contender.name].steps.append(steps)
    return measured


def launch(job: dict[str, Any], processes: int) -> dict[str, Any]:
    """Run a job of `worker.py` to its end, and return what its first process found.

    Args:
        job: what to do; see `worker.py`.
        processes: processes that do it together.

    Raises:
        RuntimeError: with the end of its output, where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps({"records_losses": False, **job, "folder": folder})
        threads = str(job.get("threads", 1))
        return in_own_process(
            "benchmarks.papers.worker", given, processes=processes, limit_s=_LIMIT_S, OMP_NUM_THREADS=threads
        )


def _run(
    contender: Contender, case: Case, backbone: Path, records_losses: bool
) -> tuple[float, list[tuple[float, float]], dict[str, list[float]]]:
    """Return seconds of all steps but each task's first, those of each, and the losses of each task."""
    seconds, steps, losses = 0.0, [], {}
    shared = {"case": case.to_json(), "backbone": str(backbone), "records_losses": records_losses}
    if contender.is_hf:
        output = launch({**shared, "kind": "hf", "threads": contender.processes}, 1)
        return output["steps_s"], [], output["losses"]
    parts, further = contender.parts or ((),), contender.part_arguments or ({},) * max(1, len(contender.parts))
    for tasks, arguments in zip(parts, further, strict=True):
        job = {**shared, "kind": "train", "tasks": tasks, "padded": contender.padded}
        output = launch({**job, "arguments": {**contender.arguments, **arguments}}, contender.processes)
        timed_steps = steps_of(output)
        seconds += sum(measured for measured, _ in timed_steps)
        steps += timed_steps
        losses |= output["losses"]
    # In the order of the tasks, as the other contenders have them.
    return seconds, steps, {task.name: losses[task.name] for task in case.workload().tasks}


def steps_of(output: dict[str, Any]) -> list[tuple[float, float]]:
    """Return measured and predicted seconds of all steps of a run but those in which some task took its first.

    Args:
        output: what a worker wrote: when each step of the run ended, what was predicted for it, and how many steps
            each task had taken by then. Tasks need not step together.
    """
    ends, planned, counts = output["ends_s"], output["planned_s"], output["counts"]
    if set(counts[-1]) != {output["steps"]}:
        raise RuntimeError(f"a run of {output['steps']} steps ended with {counts[-1]} steps of its tasks.")
    counted = []
    for i in range(1, len(ends)):
        if not any(now == 1 and before == 0 for before, now in zip(counts[i - 1], counts[i], strict=True)):
            counted.append((ends[i] - ends[i - 1], planned[i]))
    return counted


def spread(times: dict[str, Measured]) -> str:
    """Return the seconds of every round, which show how far a ratio may be trusted."""
    return "; ".join(
        f"{name} " + "/".join(f"{s:.2f}" for s in measured.seconds) + " s" for name, measured in times.items()
    )
