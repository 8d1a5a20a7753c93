"""`CommandQueue`: what other threads ask of a run, carried out by the one thread that owns it.

A run has one owner at a time: the thread that trains, or else whoever asks for something. Commands that are given while
it trains wait until the step in progress is over, so that no step sees half of a change.
"""

# MERGED: `Lifecycle`: what a change in the life of a task brings about: a line, a record, its adapter on disk, a new
# MERGED: plan.
# MERGED: `Membership`: tasks that arrive, leave and pause, asked for by callbacks and other threads (M §3.2).

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from peft_mux.engine.tasks.resolved import resolve_tasks
from peft_mux.engine.tasks.setup import make_task_runs
from peft_mux.engine.tasks.task_run import TaskEvent, TaskRun
from peft_mux.errors import CheckpointError, ConfigError, PeftMuxError, ProcessError, closest
from peft_mux.storage import check_task_names
from peft_mux.task import Task, TaskStatus
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run, write_task_files
from peft_mux.trainer.world import World


class Answer(Future[Any]):
    """Tells when a command was done, or why it was not.

    Args:
        label: the command in words.
        is_owner: whether the calling thread is the one that carries commands out, which must not wait for itself.
    """

    def __init__(self, label: str, is_owner: Callable[[], bool]) -> None:
        """Wait for the command."""
        super().__init__()
        self._label, self._is_owner = label, is_owner

    def _check(self) -> None:
        if not self.done() and self._is_owner():
            raise ConfigError(
                f"{self._label}: got a wait for it in the thread that trains; allowed: done(), or add_done_callback(). "
                "It is done after the step in progress, which would wait for ever."
            )

    def result(self, timeout: float | None = None) -> Any:
        """Return what the command gave, once it is done.

        Args:
            timeout: seconds to wait at most; `None` for as long as it takes.

        Raises:
            ConfigError: in a callback, which runs in the thread that would have to carry the command out.
            TimeoutError: if it was not done in time.
        """
        self._check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why the command was not done, or `None`; as `result` otherwise."""
        self._check()
        return super().exception(timeout)


class Command(NamedTuple):
    """Something that was asked for.

    Attributes:
        label: what it is in words, such as `remove a`; equal commands of several processes have equal labels.
        action: does it; what it returns is the answer.
        answer: tells whoever asked when it was done, or why it was not.
        is_of_callback: whether a callback asked, which every process calls at the same step; other threads of several
            processes ask at any time.
    """

    label: str
    action: Callable[[], Any]
    answer: Answer
    is_of_callback: bool

    def carry_out(self) -> Exception | None:
        """Do it and answer; return what it raised, if anything."""
        try:
            result = self.action()
        except Exception as error:
            self.answer.set_exception(error)
            return error
        self.answer.set_result(result)
        return None


class CommandQueue:
    """Takes commands from any thread.

    Example:
        >>> queue = CommandQueue()
        >>> queue.give("count", lambda: 3).result()  # nobody trains, so it is done at once
        3
    """

    def __init__(self) -> None:
        """Start without an owner and without commands."""
        self._free = threading.Condition()
        self._owner: int | None = None
        self._trains = False
        self._commands: deque[Command] = deque()

    @property
    def labels(self) -> list[str]:
        """What other threads have asked for and waits to be done, in the order in which it was given."""
        with self._free:
            return [command.label for command in self._commands if not command.is_of_callback]

    @property
    def is_owner(self) -> bool:
        """Whether the calling thread is the one that carries commands out now."""
        return self._owner == threading.get_ident()

    def give(self, label: str, action: Callable[[], Any]) -> Answer:
        """Have something done: at the next step boundary while a run trains, else at once in the calling thread.

        Args:
            label: what it is in words, the same on every process that asks for the same.
            action: does it; what it returns becomes the result of the future.

        Returns:
            A future that tells when it was done, or why it was not. It is complete where nobody trains.

        Raises:
            Exception: what `action` raises, where nobody trains.
        """
        answer = Answer(label, lambda: self.is_owner)
        me = threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._trains or self._owner in (None, me))
            if self._trains:
                self._commands.append(Command(label, action, answer, self.is_owner))
                return answer
            # A command that gives another one owns the run already.
            owner_before, self._owner = self._owner, me
        try:
            answer.set_result(action())
        finally:
            with self._free:
                self._owner = owner_before
                self._free.notify_all()
        return answer

    def ask(self, label: str, action: Callable[[], Any]) -> Any:
        """Return what an action gives: at once where the caller owns the run, else after the step in progress.

        Args:
            label: what it is in words, the same on every process that asks for the same.
            action: does what was asked for.
        """
        return action() if self.is_owner else self.give(label, action).result()

    @contextmanager
    def training(self, finish: Callable[[bool], bool]) -> Iterator[None]:
        """Let the calling thread own the run and train in the `with` block.

        Args:
            finish: carries out what still waits at the end. It is told whether the block has failed, and returns
                whether to call it again where something waits by then.

        Raises:
            ConfigError: if another thread trains.
        """
        me = threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._trains or self._owner in (None, me))
            if self._trains:
                raise ConfigError("train: got a call while the run trains; allowed: one at a time. Wait for the other.")
            owner_before, self._owner, self._trains = self._owner, me, True
        failed = True
        try:
            yield
            failed = False
        finally:
            try:
                self._finish(finish, failed)
            finally:
                with self._free:
                    left, self._trains, self._owner = list(self._commands), False, owner_before
                    self._commands.clear()
                    self._free.notify_all()
                for command in left:
                    command.answer.set_exception(ProcessError(f"{command.label}: not done, as the run has ended."))

    def _finish(self, finish: Callable[[bool], bool], failed: bool) -> None:
        """Carry out what still waits, and what comes meanwhile; from then on commands are done at once."""
        while finish(failed):
            with self._free:
                # In one breath: a command between the question and the end would never be done.
                if not self._commands:
                    self._trains = False
                    return

    def take(self, labels: Sequence[str] | None = None) -> list[Command]:
        """Take commands out of the queue, to be carried out.

        Args:
            labels: which of those that other threads gave, in this order; by default all, in the order in which they
                were given.
        """
        with self._free:
            own = [command for command in self._commands if command.is_of_callback]
            if labels is None:
                own = list(self._commands)
            for label in labels or ():
                # The first of its label that is not taken yet: equal commands are done as often as they were given.
                own.append(next(one for one in self._commands if one.label == label and one not in own))
            for command in own:
                self._commands.remove(command)
            return own


class Gathers(Protocol):
    """Passes values between the processes of a run."""

    def gather(self, value: Any) -> list[Any]:
        """Return what every process has given, by rank."""
        ...


class Lifecycle:
    """Logs which tasks start, end, fail or pause, and saves the adapters of those that ended.

    A task has succeeded when its adapter is on the disk and was read back. Until then it has failed, and says why; it
    is saved again after the next state of the run that the disk takes, and at the end of the run.

    Args:
        run: the run under way.
        placement: the model of this process, which holds the adapters.
        plans: the plan, made anew without the tasks that have ended.
    """

    def __init__(self, run: Run, placement: Placement, plans: PlanFollower) -> None:
        """Remember the parts; the first call looks for changes."""
        self._run, self._placement, self._plans = run, placement, plans
        # How the tasks would have ended whose adapters could not be written.
        self._endings: dict[str, tuple[TaskStatus, str]] = {}
        self._tried_at = 0

    def handle_changes(self) -> None:
        """Log every change since the last call, save the tasks that have ended, and plan anew without them.

        A task that has taken all its steps ends here. Every process calls this at the same point of a step, as saving
        may take all of them.
        """
        if self._endings and self._run.saver.num_states != self._tried_at:
            self._save_again()
        events = self._run.table.collect()
        for event in events:
            self._handle_event(event)
        # What has ended makes room for tasks that wait; whatever else changes does not.
        if any(event.status.is_final for event in events):
            self._plans.replan()

    def settle(self, processes: Gathers) -> None:
        """Save once more what could not be saved, at the end of a run; all processes agree on what has failed.

        Args:
            processes: all processes of the run, which call this alike.
        """
        self._save_again()
        # Where each holds all of every task, only the one that writes knows.
        failures = {name: self._run.table[name].reason for name in self._endings}
        for name, reason in processes.gather(failures)[0].items():
            if name not in failures and name in self._run.table:
                self._run.saver.unsaved.add(name)
                self._run.table[name].end(TaskStatus.FAILED, reason)
                self._run.table.note_told(name)

    def _handle_event(self, event: TaskEvent) -> None:
        """Log a change; save a task that has ended, and ask the run to stop where the failure of a task ends it."""
        run = self._run.table[event.task]
        if not event.status.is_final:
            self._run.log.status(event, run.step)
            self._run.callbacks.note_status(run, self._run.saver.place(run))
            return
        # No log need come after this one, so the losses since the last one are logged now.
        if self._run.args.logging_strategy != "no":
            self._run.log.losses([run])
        # Before it is saved, as the best adapter is the one to keep; a failed task keeps its last good one.
        if run.best.value is not None and event.status is not TaskStatus.FAILED:
            run.restore_best(self._placement.placed.model.task_parameters(event.task))
        if failure := self._run.saver.save_ended(run):
            self._endings[run.name] = run.status, run.reason
            self._fail(run, failure)
        self._tell(run)
        if self._run.saver.is_writer and run.status in (TaskStatus.SUCCEEDED, TaskStatus.STOPPED_EARLY):
            # With the card and the picture that lie beside it by now.
            self._run.hub.push(run)
        if event.status is TaskStatus.FAILED and self._run.args.quarantine_policy == "stop":
            self._run.request_stop()

    def _save_again(self) -> None:
        """Save the tasks whose adapters could not be written; those that now are have ended as they would have."""
        saver, table = self._run.saver, self._run.table
        self._tried_at = saver.num_states
        for name in list(self._endings):
            # It may have been removed, and another one of its name have come.
            if name not in table or name not in saver.unsaved:
                del self._endings[name]
                continue
            run = table[name]
            # As it ended, which is what its state shall say.
            run.status, run.reason = self._endings[name]
            if failure := saver.save_ended(run):
                self._fail(run, failure)
            else:
                del self._endings[name]
                self._tell(run)

    def _fail(self, run: TaskRun, failure: str) -> None:
        """Let a task have failed, as there is no adapter of it, and say where what there is lies."""
        status, reason = self._endings[run.name]
        before = f"{reason}; " if status is TaskStatus.FAILED else ""
        copy = self._run.saver.newest_copy(run.name)
        run.status = TaskStatus.FAILED
        run.reason = f"{before}its adapter could not be written: {failure.rstrip('.')}. {copy}"
        self._tried_at = self._run.saver.num_states
        self._run.table.note_told(run.name)

    def _tell(self, run: TaskRun) -> None:
        """Log how a task has ended; once."""
        self._run.log.status(TaskEvent(run.name, run.status, run.reason), run.step)
        self._run.table.note_told(run.name)
        self._run.callbacks.note_status(run, self._run.saver.place(run))
        write_task_files(self._run, run)


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
            resolved = resolve_tasks(tasks, self._run.args)
            self._placement.check(resolved)
            # Taken from here on: another caller may ask for the same name while these rows are read.
            self._arriving.update(names)
        try:
            source = self._placement.source
            with self._reading:
                runs = make_task_runs(resolved, self._run.args, source.tokenizer, source.config)
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
                self._run.callbacks.note_event("on_task_register", run)
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
        self._run.callbacks.note_event("on_task_remove", run, place)
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
