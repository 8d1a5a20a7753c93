"""`Membership`: tasks that arrive, leave and pause, asked for by callbacks and other threads (M §3.2)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from peft_mux.engine.processes.commands import Answer, Command, CommandQueue
from peft_mux.errors import CheckpointError, ConfigError, PeftMuxError, ProcessError, closest
from peft_mux.task import Task, TaskStatus
from peft_mux.task_names import check_task_names
from peft_mux.tasks.setup import make_task_runs
from peft_mux.tasks.task_run import TaskRun
from peft_mux.trainer.lifecycle import Lifecycle
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run
from peft_mux.trainer.world import World


class Membership:
    """Lets tasks come and go while a run trains.

    What is asked for is checked in the thread that asks, and done by the one that trains, between two steps. Where no
    run trains, it is done at once.

    Args:
        run: the run under way.
        world: all processes of the run, which do the same things at the same step.
        placement: the model of this process, which takes adapters in and drops them.
        plans: the plan, made anew after a change.
        lifecycle: tells of the changes.

    Attributes:
        queue: what was asked for and is not done yet.
    """

    def __init__(self, run: Run, world: World, placement: Placement, plans: PlanFollower, lifecycle: Lifecycle) -> None:
        """Open an empty queue."""
        self._run, self._world, self._placement, self._plans = run, world, placement, plans
        self._lifecycle = lifecycle
        self.queue = CommandQueue()
        self._arriving: set[str] = set()
        # A tokenizer is changed by its calls, so one caller's rows are read after another's.
        self._reading = threading.Lock()

    # ------------------------------------------------------------------ what is asked for

    def register(self, tasks: Sequence[Task]) -> Answer:
        """Check tasks here, in the caller's thread, and add them at the next step boundary.

        Args:
            tasks: the tasks to add, whose names no task of the run has.

        Raises:
            ConfigError: naming every setting that cannot be run; then none is added.
            DataError: naming the rows that cannot be trained on.
        """
        names = [task.name for task in tasks]
        with self._placement.lock:
            # A resumed run still shows tasks that were removed before; their names are free.
            standing = [run.name for run in self._run.table if run.status is not TaskStatus.REMOVED]
            check_task_names(names, [*standing, *self._arriving])
            self._placement.check(tasks)
            # Taken from here on: another caller may ask for the same name while these rows are read.
            self._arriving.update(names)
        try:
            source = self._placement.source
            with self._reading:
                runs = make_task_runs(list(tasks), self._run.args, source.tokenizer, source.config)
        except BaseException:
            self._free_names(names)
            raise
        return self.queue.give(f"register {', '.join(names)}", lambda: self._arrive(runs))

    def remove(self, name: str, *, save: bool) -> Answer:
        """Take a task out at the next step boundary.

        Args:
            name: a task of the run, or one that is on its way.
            save: whether its adapter is written first.

        Raises:
            ConfigError: for a name that no task has.
        """
        self._require_known(name)
        return self.queue.give(f"remove {name}", lambda: self._depart(name, save))

    def pause(self, name: str) -> Answer:
        """Let a task take no steps from the next step boundary on; one that waits then is not started.

        Raises:
            ConfigError: for a name that no task has; and, as the answer, for a task that has ended by then.
        """
        self._require_known(name)
        return self.queue.give(f"pause {name}", lambda: self._pause(name))

    def resume(self, name: str) -> Answer:
        """Let a paused task go on from the next step boundary; one that is not paused then stays as it is.

        Raises:
            ConfigError: for a name that no task has; and, as the answer, for a task that has ended by then.
        """
        self._require_known(name)
        return self.queue.give(f"resume {name}", lambda: self._resume(name))

    def run_of(self, name: str) -> TaskRun:
        """Return a task by name.

        Raises:
            ConfigError: for a name that no task has, with the closest one.
        """
        self._require_known(name, others=())
        return self._run.table[name]

    def _require_known(self, name: str, others: Iterable[str] | None = None) -> None:
        """Refuse a name that no task has, among those of the run and those that are on their way."""
        names = [run.name for run in self._run.table]
        names += sorted(self._arriving) if others is None else others
        if name not in names:
            raise ConfigError(f'got task "{name}"; allowed: {", ".join(names)}. {closest(name, names)}'.rstrip())

    # ------------------------------------------------------------------ between two steps

    def apply_commands(self) -> None:
        """Do what was asked for since the last step; of several processes, what their callbacks asked for."""
        self._carry_out(self.queue.take(None if self._world.processes.is_alone else ()))

    def apply_shared_commands(self) -> None:
        """Do what other threads have asked for on every process; to be called after `World.agree_on_tasks`."""
        self._carry_out(self.queue.take(self._world.shared_commands(self.queue.labels)))

    def finish_commands(self, failed: bool) -> bool:
        """Do what still waits when a run ends; return whether there may be more to do.

        Args:
            failed: whether the run has ended by an error.
        """
        is_alone = self._world.processes.is_alone
        # Others may be stuck in the step that failed here, and answer nothing.
        if is_alone or not failed:
            self.apply_commands()
        return is_alone

    def _carry_out(self, commands: Sequence[Command]) -> None:
        """Carry commands out, and plan anew."""
        for command in commands:
            error = command.carry_out()
            # Whoever asked is told, and the others go on; but without the other processes nobody does.
            if isinstance(error, ProcessError):
                raise error
            if error is not None:
                self._run.log.warn(f"{command.label}: not done: {_text(error)}")
                self._run.log.event("command_refused", command=command.label, reason=_text(error))
        if commands:
            self._run.saver.note_change()
            # Planned first, so that a new task which fits is told of as running, not as waiting before that.
            self._plans.replan()
            self._lifecycle.handle_changes()

    def _arrive(self, runs: list[TaskRun]) -> None:
        """Take checked tasks into the model and the table; they wait there until a plan admits them."""
        for run in runs:
            if run.name in self._run.table:  # removed before this run was resumed
                self._drop(run.name)
        try:
            # What PEFT refuses as late as at its injection is told to who asked: the others train on.
            self._placement.register(runs)
            for run in runs:
                self._run.table.add(run)
                self._run.saver.note_arrival(run.name)
                self._run.callbacks.news.registered(run)
            if self._run.is_in_train:  # else what there is then is described when training begins
                self._run.saver.describe_arrivals(self._run.root)
        finally:
            self._free_names([run.name for run in runs])

    def _free_names(self, names: Iterable[str]) -> None:
        with self._placement.lock:
            self._arriving.difference_update(names)

    def _depart(self, name: str, save: bool) -> None:
        """Take a task out of every part that holds something of it, saving its adapter first where asked to."""
        run = self.run_of(name)
        if run.status is TaskStatus.REMOVED:  # before this run was resumed; its adapter is on the disk as it was
            self._drop(name)
            return
        # Saved before it is dropped: the saver reads the table and the model.
        if save and self._run.saver.folder is not None:
            self._require_saved(name)
        if not run.status.is_final:
            run.end(TaskStatus.REMOVED, "" if save else "not saved")
        place = self._run.saver.place(run)
        self._run.log.note_removed(run, place)
        self._drop(name)
        self._run.saver.note_removed(run)
        self._run.callbacks.news.removed(run, place)
        self._run.log.event("status", task=name, step=run.step, status="removed")

    def _require_saved(self, name: str) -> None:
        """Write a task's adapter; every process calls this alike.

        Raises:
            CheckpointError: on every process, if it could not be written.
        """
        if not all(self._world.processes.gather(self._run.saver.save_adapter(name))):
            raise CheckpointError(
                f'got task "{name}", whose adapter could not be written, so that it stays; allowed: a folder that can '
                f'be written to, or remove_task("{name}", save=False), which gives the adapter up.'
            )

    def _drop(self, name: str) -> None:
        """Take a task out of every part that holds something of it."""
        self._run.table.drop(name)
        # Rows that were read ahead for it would be held for the rest of the run.
        self._plans.drop_read_ahead(name)
        self._run.log.drop_callbacks(name)
        self._placement.remove(name)

    def _pause(self, name: str) -> None:
        """Let a task rest, which goes on from where it is or starts from where it waits."""
        run = self._require_unended(name)
        if run.status is not TaskStatus.PAUSED:
            run.status, run.reason = TaskStatus.PAUSED, ""

    def _resume(self, name: str) -> None:
        """Let a task that rests go on; one that has never been started waits for a plan to admit it."""
        run = self._require_unended(name)
        if run.status is TaskStatus.PAUSED:
            run.status = TaskStatus.WAITING if run.optimizer is None else TaskStatus.RUNNING

    def _require_unended(self, name: str) -> TaskRun:
        """Return a task that may take further steps.

        Raises:
            ConfigError: if it has ended or was removed since it was asked for.
        """
        run = self.run_of(name)
        if run.status.is_final:
            raise ConfigError(f'got task "{name}", which has ended ({run.status}); allowed: one that has not.')
        return run


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PeftMuxError) else f"{type(error).__name__}: {error}"
