"""Windows: steps that are taken without a look at the run between them (`peft_mux.engine.pipeline.barriers`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.work import StepResult
from peft_mux.hyper_parameters import steps_of
from peft_mux.scheduler.pipeline.window import MOST_STEPS
from peft_mux.tasks.table import Outcome, TaskTable
from peft_mux.tasks.task_run import TaskRun

LONGEST_WINDOW_S = 10.0
"""Seconds that a window may take: stops, arrivals and departures that are asked for meanwhile wait for its end."""


def steps_until_due(
    runs: Iterable[TaskRun], args: MultiTaskTrainingArguments, global_step: int, *, last_step_s: float
) -> int:
    """Return after how many steps something is due: a log, an evaluation, a file, the end of a task, or a look around.

    Args:
        runs: the tasks that take the steps.
        args: the arguments of the run.
        global_step: steps that the run has taken.
        last_step_s: seconds that the last step took on the slowest process; 0 where that is not known yet.
    """
    # Known on all processes alike, as this number must be.
    patience = int(LONGEST_WINDOW_S / last_step_s) if last_step_s > 0 else 1
    found = [MOST_STEPS, patience]
    runs = list(runs)
    if args.logging_strategy != "no" and args.logging_first_step and global_step == 0:
        found.append(1)
    for strategy, interval in ((args.logging_strategy, args.logging_steps), (args.save_strategy, args.save_steps)):
        if strategy == "steps":
            found.append(_until(run_interval(interval, runs), global_step))
        elif strategy == "epoch":
            found += [_until(run.steps_per_epoch, run.step) for run in runs]
    for run in runs:
        found += [run.num_steps - run.step, _until(run.save_every, run.step), _until(run.eval_every, run.step)]
    return max(1, min(found))


def _until(every: int, step: int) -> int:
    """Return the steps until the next multiple; those of the longest window where there is none."""
    return every - step % every if every > 0 else MOST_STEPS


def run_interval(interval: float, runs: Iterable[TaskRun]) -> int:
    """Return an interval of the run in its steps; a share is one of the steps of the longest task.

    Args:
        interval: number of steps, or their share.
        runs: the tasks of the run.
    """
    return steps_of(interval, max((run.num_steps for run in runs), default=1))


class WindowSteps:
    """The steps of tasks within a window: taken when each bucket is done, counted when the window is over.

    Args:
        table: all tasks of the run.
        num_steps: steps of the window.
    """

    def __init__(self, table: TaskTable, num_steps: int) -> None:
        """Take no step yet."""
        self._table = table
        self._outcomes: Sequence[dict[str, Outcome]] = [{} for _ in range(num_steps)]
        self._dead: set[str] = set()

    def update(
        self, step: int, losses: Mapping[str, torch.Tensor], norms: Mapping[str, torch.Tensor]
    ) -> frozenset[str]:
        """Step the tasks of a bucket whose losses and gradients are finite.

        Args:
            step: number of the step in the window.
            losses: their losses, by name.
            norms: their gradient norms, by name.

        Returns:
            All tasks that take no further step in the window: their weights and states stay what they are.
        """
        alive = {name: loss for name, loss in losses.items() if name not in self._dead}
        found = self._table.update(alive, [norms[name] for name in alive])
        self._outcomes[step].update(found)
        self._dead |= {name for name, one in found.items() if not one.is_stepped or one.rate_failure}
        return frozenset(self._dead)

    def count(self, step: int, result: StepResult) -> None:
        """Count a step of the window, when all of it is over; the first one comes first.

        Args:
            step: number of the step in the window.
            result: what came of it.
        """
        # In stream order, whichever bucket was done first.
        found = self._outcomes[step]
        self._table.count(result, {name: found[name] for name in result.losses if name in found})
