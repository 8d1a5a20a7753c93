"""`Referee`: a callback of the run that compares the tasks of sweeps at their rungs, and ends the losers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainerCallback

from peft_mux.errors import ConfigError
from peft_mux.hyper_parameters import EarlyStopping
from peft_mux.reporting.views import curve_of
from peft_mux.sweeps.grid import Contest
from peft_mux.sweeps.halving import losers, rungs
from peft_mux.sweeps.ranking import RankedTask
from peft_mux.task import TaskStatus
from peft_mux.tasks.task_run import TaskRun
from peft_mux.trainer.trainer import MultiTaskTrainer


class Referee(TrainerCallback):
    """Has tasks evaluated at their rungs and at their end, and ends those that lose.

    What it knows it reads from the logs of the tasks, so that a resumed run goes on as the first one would have.

    Args:
        trainer: trains the tasks.
        contests: the sweeps, each a contest of its own.
        metric: name of the metric by which tasks are ranked.
        halves: whether losers end at rungs; else all tasks train to their end.
    """

    def __init__(self, trainer: MultiTaskTrainer, contests: Iterable[Contest], *, metric: str, halves: bool) -> None:
        """Tell the tasks at which of their steps they are evaluated."""
        self.trainer, self.contests = trainer, tuple(contests)
        self.metric, self.maximise = metric, EarlyStopping(metric=metric).maximise
        self._rungs: dict[str, tuple[int, ...]] = {}
        self._due: dict[str, set[str]] = {}
        for contest in self.contests:
            for name in contest.members:
                run = trainer.table[name]
                if run.hyper.load_best_model_at_end:
                    raise ConfigError(
                        f"tasks.{contest.name}.load_best_model_at_end: got True in a sweep, whose evaluations decide "
                        "which adapter is kept; allowed: False. Take the best of the ranking."
                    )
                self._rungs[name] = rungs(run.num_steps, len(contest.members)) if halves else ()
                run.own_eval_steps = frozenset({*self._rungs[name], run.num_steps})
                # Or a folder of another sweep would be ranked by settings that nothing was trained with.
                run.swept = _swept(contest.members[name])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note which tasks have come to a rung; they are evaluated now."""
        for contest in self.contests:
            running = [run for run in self._runs(contest) if run.status is TaskStatus.RUNNING]
            self._due[contest.name] = {run.name for run in running if run.step in self._rungs[run.name]}

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide as soon as the last of the tasks that came to a rung was evaluated."""
        for contest in self.contests:
            due = [run for run in self._runs(contest) if run.name in self._due.get(contest.name, ())]
            # One whose evaluation failed is out already.
            alive = [run for run in due if run.status is TaskStatus.RUNNING]
            if alive and all(self.value(run, run.step) is not None for run in alive):
                self._due[contest.name] = set()
                self._decide(contest, alive)

    def _decide(self, contest: Contest, alive: list[TaskRun]) -> None:
        # By the number of the rung: tasks of a contest may have unlike numbers of steps.
        for number in sorted({self._rungs[run.name].index(run.step) for run in alive}):
            here = {run.name for run in alive if self._rungs[run.name].index(run.step) == number}
            values = self.values_at(contest, number)
            out = losers(values, here, maximise=self.maximise)
            for name in out:
                run = self.trainer.table[name]
                run.end(TaskStatus.STOPPED_EARLY, f"halving: {self.metric} {values[name]:.6g} at step {run.step}")
            shown = sorted(here - set(out), key=lambda name: values[name], reverse=self.maximise)
            line = ", ".join(f"{name} {values[name]:.4f}" for name in shown[:8])
            self.trainer.tell(f"sweep {contest.name}: {len(shown)} of {len(here)} go on: {line}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the run suggest the adapter that won, of several sweeps that of the first."""
        rankings = [self.ranking(contest) for contest in self.contests]
        best = [ranking[0].name for ranking in rankings if ranking and ranking[0].value is not None]
        self.trainer.prefer(best[0] if best else "")

    def ranking(self, contest: Contest) -> list[RankedTask]:
        """Return the tasks of a sweep, best first: those that came further stand before those that ended earlier.

        Args:
            contest: the sweep.
        """
        rows = []
        for run in self._runs(contest):
            curve = curve_of(run.state.log_history, self.metric)
            step, value = curve[-1] if curve else (run.step, None)
            place, settings = self.trainer.adapter_folder(run.name), contest.members[run.name]
            rows.append(RankedTask(run.name, settings, value, step, run.num_steps, run.status.value, curve, place))

        def order(row: RankedTask) -> tuple[bool, float, float]:
            value = float("inf") if row.value is None else -row.value if self.maximise else row.value
            # A loss of fewer steps is no match for one of more.
            return row.status == TaskStatus.FAILED, -row.step / max(row.num_steps, 1), value

        return sorted(rows, key=order)

    def values_at(self, contest: Contest, number: int) -> dict[str, float]:
        """Return the metric of each task at one of its rungs, as far as it has come to it.

        Args:
            contest: the sweep.
            number: which of its rungs, counted from 0.
        """
        found = {}
        for run in self._runs(contest):
            steps = self._rungs[run.name]
            if number < len(steps) and (value := self.value(run, steps[number])) is not None:
                found[run.name] = value
        return found

    def value(self, run: TaskRun, step: int) -> float | None:
        """Return the metric of a task at one of its steps; `None` where it was not evaluated there."""
        entries: list[Mapping[str, Any]] = [entry for entry in run.state.log_history if entry.get("step") == step]
        if points := curve_of(entries, self.metric):
            return points[-1][1]
        return float("nan") if any(self.metric in entry for entry in entries) else None

    def _runs(self, contest: Contest) -> list[TaskRun]:
        # A task may have been removed meanwhile.
        return [self.trainer.table[name] for name in contest.members if name in self.trainer.table]


def _swept(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return what a checkpoint calls the settings of a sweep; those of the adapter may never change."""
    length = {"num_steps"} if settings.keys() & {"max_steps", "num_train_epochs"} else set()
    return frozenset({*settings, *length})
