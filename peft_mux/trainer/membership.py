"""`Membership`: tasks that arrive, leave and pause, asked for by callbacks and other threads (M §3.2)."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

from peft_mux.errors import ConfigError, closest
from peft_mux.task import Task, TaskStatus
from peft_mux.task_names import check_task_names
from peft_mux.tasks.setup import make_task_runs
from peft_mux.tasks.task_run import TaskRun
from peft_mux.trainer.lifecycle import Lifecycle
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run


class Membership:
    """The queue through which tasks come and go while a run trains.

    Commands wait until the step in progress is over, so that no step sees half of a change. Where no step is in
    progress, as `train` does not run, they act at once.

    Args:
        run: the run under way.
        placement: the model of this process, which takes adapters in and drops them.
        plans: the plan, made anew after a change.
        lifecycle: tells of the changes.
    """

    def __init__(self, run: Run, placement: Placement, plans: PlanFollower, lifecycle: Lifecycle) -> None:
        """Open an empty queue."""
        self._run, self._placement, self._plans, self._lifecycle = run, placement, plans, lifecycle
        # Other threads put commands in; the thread that trains takes them out.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arriving: set[str] = set()

    def register(self, tasks: Sequence[Task]) -> None:
        """Check tasks here, in the caller's thread, and add them at the next step boundary.

        Args:
            tasks: the tasks to add, whose names no task of the run has.

        Raises:
            ConfigError: naming every setting that cannot be run; then none is added.
            DataError: naming the rows that cannot be trained on.
        """
        taken = [*(run.name for run in self._run.table), *self._arriving]
        check_task_names([task.name for task in tasks], taken)
        self._placement.check(tasks)
        source = self._placement.source
        runs = make_task_runs(list(tasks), self._run.args, source.tokenizer, source.config)
        # Names are taken from here on: another task of the same name may be registered before the step is over.
        self._arriving.update(run.name for run in runs)
        self._submit(lambda: self._arrive(runs))

    def remove(self, name: str, *, save: bool) -> None:
        """Take a task out at the next step boundary.

        Args:
            name: a task of the run.
            save: whether its adapter is written first.

        Raises:
            ConfigError: for a name that no task has.
        """
        self.run_of(name)
        self._submit(lambda: self._depart(name, save))

    def pause(self, name: str) -> None:
        """Let a task take no steps from the next step boundary on; one that does not run then stays as it is.

        Raises:
            ConfigError: for a name that no task has.
        """
        self.run_of(name)
        self._submit(lambda: self._change_status(name, TaskStatus.RUNNING, TaskStatus.PAUSED))

    def resume(self, name: str) -> None:
        """Let a paused task go on from the next step boundary; one that is not paused then stays as it is.

        Raises:
            ConfigError: for a name that no task has.
        """
        self.run_of(name)
        self._submit(lambda: self._change_status(name, TaskStatus.PAUSED, TaskStatus.RUNNING))

    def run_of(self, name: str) -> TaskRun:
        """Return a task by name.

        Raises:
            ConfigError: for a name that no task has, with the closest one.
        """
        table = self._run.table
        if name not in table:
            names = [run.name for run in table]
            raise ConfigError(f'got task "{name}"; allowed: {", ".join(names)}. {closest(name, names)}'.rstrip())
        return table[name]

    def apply_commands(self) -> None:
        """Do what was asked for since the last step, and plan anew where that has changed anything."""
        changed = False
        while not self._commands.empty():
            self._commands.get()()
            changed = True
        if changed:
            # Planned first, so that a new task which fits is told of as running, not as waiting before that.
            self._plans.replan()
            self._lifecycle.handle_changes()

    def _submit(self, command: Callable[[], None]) -> None:
        """Carry a command out at the next step boundary, or at once where the run does not train."""
        if self._run.is_in_train:
            self._commands.put(command)
        else:
            command()

    def _arrive(self, runs: list[TaskRun]) -> None:
        """Take checked tasks into the model and the table; they wait there until a plan admits them."""
        self._arriving.difference_update(run.name for run in runs)
        try:
            self._placement.register(runs)
        except ConfigError as error:
            if not self._run.is_in_train:
                raise
            # PEFT refused it as late as at its injection: those that train must not end for one that never began.
            self._run.log.warn(f"not registered: {error}")
            self._run.log.event("arrival_refused", tasks=[run.name for run in runs], reason=str(error))
            return
        for run in runs:
            self._run.table.add(run)

    def _depart(self, name: str, save: bool) -> None:
        """Take a task out of every part that holds something of it, saving its adapter first where asked to."""
        if name not in self._run.table:  # removed by a command before this one
            return
        run = self._run.table[name]
        if not run.status.is_final:
            run.end(TaskStatus.REMOVED, "" if save else "not saved")
        # Saved before it is dropped: the saver reads the table and the model.
        if save:
            self._run.saver.save_adapter(name)
        self._run.table.drop(name)
        # Rows that were read ahead for it would be held for the rest of the run.
        self._plans.drop_read_ahead(name)
        self._run.log.drop_callbacks(name)
        self._placement.remove(name)
        self._run.log.event("status", task=name, step=run.step, status="removed")

    def _change_status(self, name: str, before: TaskStatus, after: TaskStatus) -> None:
        """Give a task another status if it has the one before it."""
        table = self._run.table
        # It may have ended or been removed since it was asked for.
        if name in table and table[name].status is before:
            table[name].status = after
