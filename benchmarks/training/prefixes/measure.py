"""Steps with and without sharing in one process, in turns, and those of HF's Trainer and TRL's next to them.

Seconds are those of the processor on one thread, which others on the machine hardly change. Losses of all contenders
are compared before anything is timed.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import in_own_process, in_turns, require_equal_losses
from benchmarks.training.audit import measured_peak
from benchmarks.training.baselines import Contender
from benchmarks.training.baselines.hf_trainer import run_hf_trainer
from benchmarks.training.baselines.trl_packing import run_trl_packing
from benchmarks.training.mux import trainer_for
from benchmarks.training.prefixes.rows import Batches, SetUp, batches
from benchmarks.training.timing import now_s
from benchmarks.training.workloads import ModelSpec, TaskWorkload, Workload
from peft_mux.data.packing.prefixes import sort_rows

WARM_STEPS = 2
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of one set-up.

    Attributes:
        name: the set-up.
        num_tasks: tasks that train together.
        tokens: tokens of the rows of a step, on average.
        ideal: tokens of the rows over different ones, each beginning counted once.
        computed: tokens of the rows over those that went through the backbone.
        gain: seconds of a step without sharing over those with it, median over the steps.
        gains: the same of each step.
        share_s: seconds of a step with sharing, median.
        hf_s: seconds of a step of all tasks, one after another, by HF's Trainer; `None` where it has no such loss.
        trl_s: the same by TRL's trainer, a step's rows packed into one stream; `None` where HF's is.
        peak_bytes: what training takes at most above the memory in use before it, with sharing and without.
    """

    name: str
    num_tasks: int
    tokens: float
    ideal: float
    computed: float
    gain: float
    gains: list[float]
    share_s: float
    hf_s: float | None
    trl_s: float | None
    peak_bytes: tuple[int, int] | None

    @property
    def realised(self) -> float:
        """The share of the ideal gain that was reached; of nothing that could be gained, all."""
        return self.gain / self.ideal


class Steps:
    """A run whose steps are taken one by one."""

    def __init__(self, model: ModelSpec, workload: Workload, folder: str, share_prefixes: bool | str) -> None:
        """Build the model and get ready for the first step."""
        self.trainer = trainer_for(model.build, workload, folder, False, share_prefixes=share_prefixes)
        self.trainer._opening.open(None)

    def take(self) -> dict[str, float]:
        """Take a step; return the losses before its update."""
        self.trainer._loop.train_step()
        return {run.name: run.last_loss for run in self.trainer.table}

    @property
    def computed(self) -> float:
        """Tokens of the rows so far over those that went through the backbone."""
        report = self.trainer._plans.measured.pass_report
        return sum(report.asked_tokens.values()) / sum(report.computed_tokens.values())


def workload_of(set_up: SetUp, num_tasks: int, num_steps: int) -> tuple[Workload, list[Batches]]:
    """Return the tasks of a set-up, and their rows by step."""
    batches_of_tasks = batches(set_up, num_tasks, num_steps)
    tasks = tuple(
        TaskWorkload(
            name=f"task{number}",
            source=set_up.name,
            rank=(8, 16)[number % 2],
            seed=100 + number,
            batch_size=set_up.batch_size,
            rows=tuple(row for step in task_batches.steps for row in step),
            objective=set_up.objective,
        )
        for number, task_batches in enumerate(batches_of_tasks)
    )
    return Workload(set_up.name, tasks, num_steps, "texts", learning_rate=1e-3), batches_of_tasks


def ideal_gain(batches_of_tasks: Sequence[Batches]) -> tuple[float, float]:
    """Return the tokens of a step of all tasks, and how many times fewer are different."""
    steps = [[np.array(token_ids) for token_ids in step] for task in batches_of_tasks for step in task.sequences]
    tokens = sum(len(row) for rows in steps for row in rows)
    alike = sum(sum(sort_rows(rows).common) for rows in steps)
    return tokens / len(batches_of_tasks[0].steps), tokens / (tokens - alike)


def measure(set_up: SetUp, model: ModelSpec, num_tasks: int, rounds: int, *, with_hf: bool, with_memory: bool) -> Found:
    """Take steps with and without sharing in turns, and those of HF's Trainer and of TRL's.

    Raises:
        UnequalWorkError: if the losses of two of them differ.
    """
    num_tasks = set_up.num_tasks or num_tasks
    workload, batches_of_tasks = workload_of(set_up, num_tasks, WARM_STEPS + rounds)
    tokens, ideal = ideal_gain(batches_of_tasks)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other_folder:
        runs = Steps(model, workload, folder, "auto"), Steps(model, workload, other_folder, False)
        losses = [[run.take() for _ in range(WARM_STEPS)] for run in runs]
        _compare(set_up.name, "share_prefixes=False", losses[0], losses[1])
        others = _OTHERS if with_hf and set_up.objective == "sft" else {}
        in_turn = {name: _in_turn_s(name, set_up, model, num_tasks, losses[0]) for name in others}
        gc.collect()
        times = in_turns({"shared": runs[0].take, "not": runs[1].take}, rounds, now_s, num_warm=0)
        computed = runs[0].computed
    del runs
    gains = [unshared / shared for shared, unshared in zip(times["shared"], times["not"], strict=True)]
    peaks = None
    if with_memory:
        peaks = _peak(set_up.name, model, num_tasks, "auto"), _peak(set_up.name, model, num_tasks, False)
    return Found(
        set_up.name, num_tasks, tokens, ideal, computed, median(gains), gains,
        median(times["shared"]), in_turn.get("HF's Trainer"), in_turn.get("TRL's"), peaks,
    )  # fmt: skip


def _compare(name: str, other: str, losses: Sequence[dict[str, float]], others: Sequence[dict[str, float]]) -> None:
    for step, (mine, theirs) in enumerate(zip(losses, others, strict=True)):
        require_equal_losses(
            f"{name}, step {step}, and {other}", list(mine.values()), [theirs[task] for task in mine], LOSS_TOLERANCE
        )


_OTHERS: dict[str, Contender] = {"HF's Trainer": run_hf_trainer, "TRL's": run_trl_packing}


def _in_turn_s(name: str, set_up: SetUp, model: ModelSpec, num_tasks: int, losses: Sequence[dict[str, float]]) -> float:
    """Return the seconds of a step of all tasks by another trainer, whose first losses have to be those of `losses`."""
    workload, _ = workload_of(set_up, num_tasks, WARM_STEPS)
    run = _OTHERS[name](model.build, workload, True)
    losses_of_run = [{task: by_step[step] for task, by_step in run.losses.items()} for step in range(len(losses))]
    _compare(set_up.name, name, losses[:1], losses_of_run[:1])
    return run.steps_s / (WARM_STEPS - 1)


def _peak(name: str, model: ModelSpec, num_tasks: int, share: bool | str) -> int:
    """Return the peak of a process of its own that takes two steps."""
    given = json.dumps({"name": name, "model": asdict(model), "num_tasks": num_tasks, "share": share})
    return in_own_process("benchmarks.training.prefixes", "--memory-of", given)


def peak_bytes(set_up: SetUp, model: ModelSpec, num_tasks: int, share: bool | str) -> int:
    """Return how far two steps raise the resident set of this process, which must be a fresh one."""

    def train(spec: ModelSpec) -> Any:
        workload, _ = workload_of(set_up, num_tasks, WARM_STEPS)
        with tempfile.TemporaryDirectory() as folder:
            steps = Steps(spec, workload, folder, share)
            return [steps.take() for _ in range(WARM_STEPS)]

    tiny = ModelSpec(hidden_size=32, num_layers=1, intermediate_size=32, num_heads=2, vocab_size=model.vocab_size)
    train(tiny)
    return measured_peak(lambda: train(model))[1]
