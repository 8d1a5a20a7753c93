"""Arrivals, departures and pauses of tasks, asked for by callbacks and other threads while `train()` runs (M §3.2)."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from peft_mux.errors import ConfigError, closest
from peft_mux.task import Task, TaskStatus, check_task_names
from peft_mux.task_run import TaskRun, TaskTable
from peft_mux.task_setup import class_count, make_task_runs

if TYPE_CHECKING:
    from peft_mux.arguments import MultiTaskTrainingArguments
    from peft_mux.backbone import Backbone
    from peft_mux.engine.batches_ahead import BatchesAhead
    from peft_mux.model_part import ModelPart
    from peft_mux.run_log import RunLog
    from peft_mux.saving import Saver


class TaskMembership:
    """The part of `MultiTaskTrainer` by which tasks come and go.

    Commands wait until the step in progress is over, so that no step sees half of a change.
    """

    args: MultiTaskTrainingArguments
    model: Any
    is_in_train: bool
    tasks: list[Task]
    table: TaskTable
    _source: Backbone
    _class_counts: dict[str, int]
    _ahead: BatchesAhead
    _part: ModelPart
    _outline: Any
    _log: RunLog
    _saver: Saver
    _replan: Callable[[], Any]
    _take_note: Callable[[], None]

    def _open_membership(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arriving: set[str] = set()

    def register_tasks(self, tasks: Sequence[Task]) -> None:
        """Add tasks; while `train` runs (this may be called from a callback or another thread) at the next step.

        Their configuration and rows are checked here, in the caller's thread. What PEFT itself refuses only when it
        makes the adapter is told as a warning and in `metrics.jsonl`, if the others train by then.

        Raises:
            ConfigError: naming every setting that cannot be run; then none is added.
            DataError: naming the rows that cannot be trained on.
        """
        check_task_names([task.name for task in tasks], [*(run.name for run in self.table), *self._arriving])
        self._source.check(list(tasks), against=self._outline)
        self._part.check(tasks, self._outline.backbone)
        runs = make_task_runs(list(tasks), self.args, self._source.tokenizer, self._source.config)
        self._arriving.update(run.name for run in runs)
        self._command(lambda: self._arrive(runs))

    def remove_task(self, name: str, *, save: bool = True) -> None:
        """Take a task out at the next step boundary; its adapter is written first unless `save` is `False`."""
        self._run_of(name)
        self._command(lambda: self._depart(name, save))

    def pause_task(self, name: str) -> None:
        """Keep a task's exact state and take no steps of it until `resume_task`."""
        self._run_of(name)
        self._command(lambda: self._switch(name, TaskStatus.RUNNING, TaskStatus.PAUSED))

    def resume_task(self, name: str) -> None:
        """Let a paused task go on where it stopped."""
        self._run_of(name)
        self._command(lambda: self._switch(name, TaskStatus.PAUSED, TaskStatus.RUNNING))

    def _command(self, command: Callable[[], None]) -> None:
        if self.is_in_train:
            self._commands.put(command)
        else:
            command()

    def _obey_commands(self) -> None:
        changed = False
        while not self._commands.empty():
            self._commands.get()()
            changed = True
        if changed:
            self._replan()
            self._take_note()

    def _arrive(self, runs: list[TaskRun]) -> None:
        self._arriving.difference_update(run.name for run in runs)
        counts = {run.name: count for run in runs if (count := class_count(run)) is not None}
        configs, seeds = {run.name: run.task.peft_config for run in runs}, {run.name: run.hyper.seed for run in runs}
        try:
            if self._outline is not self.model:
                self._outline.register_tasks(configs, seeds=seeds, num_labels=counts)
            self._part.register(self.model, configs, seeds, counts)
        except ConfigError as error:
            if not self.is_in_train:
                raise
            # PEFT refused it as late as at its injection: those that train must not end for one that never began.
            self._log.warn(f"not registered: {error}")
            self._log.event("arrival_refused", tasks=[run.name for run in runs], reason=str(error))
            return
        self._class_counts.update(counts)
        self.tasks = [*self.tasks, *(run.task for run in runs)]
        for run in runs:
            self.table.add(run)

    def _depart(self, name: str, save: bool) -> None:
        if name not in self.table:  # removed by a command before this one
            return
        run = self.table[name]
        if not run.status.is_final:
            run.end(TaskStatus.REMOVED, "" if save else "not saved")
        if save:
            self._saver.save_adapter(name)
        self.table.drop(name)
        self._ahead.drop(name)
        self.tasks = [task for task in self.tasks if task.name != name]
        self._log.callbacks.pop(name, None)
        self._class_counts.pop(name, None)
        for model in {id(own): own for own in (self.model, self._outline)}.values():
            model.remove_tasks([name])
        self._log.event("status", task=name, step=run.step, status="removed")

    def _switch(self, name: str, before: TaskStatus, after: TaskStatus) -> None:
        if name in self.table and self.table[name].status is before:
            self.table[name].status = after

    def _run_of(self, name: str) -> TaskRun:
        if name not in self.table:
            names = [run.name for run in self.table]
            raise ConfigError(f'got task "{name}"; allowed: {", ".join(names)}. {closest(name, names)}'.rstrip())
        return self.table[name]
