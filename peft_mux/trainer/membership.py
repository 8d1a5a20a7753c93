"""Tasks that come, pause, end and leave while a run trains (M §3.2).

`CommandQueue` receives requests from callbacks and other threads. One thread at a time carries them out: the one that
trains, or else the caller. Commands that are given while the run trains wait until the step in progress is over, so
that no step sees half of a change. `Membership` carries them out, and handles every change of a task's status: a line,
a record, its adapter on the disk, a new plan.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from peft_mux.checkpoint.saver import describe_tasks
from peft_mux.engine.tasks.active_task import ActiveTask, ResolvedTask
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.errors import CheckpointError, ConfigError, PeftMuxError, ProcessError, closest
from peft_mux.storage import check_task_names
from peft_mux.task import Task, TaskStatus
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run, RunPlans
from peft_mux.user_code import UserCodeError, describe_error, guard_user_code, log_warning

_logger = logging.getLogger(__name__)
_LOOK_S = 0.2
"""Seconds between two looks whether the thread that trains waits for the one that waits for a command."""
_WAITS = (threading.Thread.join.__code__, Future.result.__code__, Future.exception.__code__)


class Command(Future[Any]):
    """A request to a run, and the future of its answer.

    `result` and `exception` raise a `ConfigError` in the thread that carries commands out, such as in a callback, and
    in a thread that it has joined: it would wait for itself.

    Args:
        label: what it is in words, such as `remove a`; equal commands of several processes have equal labels.
        action: does it; its return value is the answer.
        queue: the queue that the command is given to.

    Attributes:
        is_of_callback: whether a callback asked, which every process calls at the same step; other threads of several
            processes ask at any time.
    """

    def __init__(self, label: str, action: Callable[[], Any], queue: CommandQueue) -> None:
        super().__init__()
        self.label, self._queue = label, queue
        self._action: Callable[[], Any] | None = action
        self.is_of_callback = queue.is_owner

        def drop_action(_: object) -> None:
            self._action = None

        # The caller may keep the future for long, and the action holds tasks with their rows.
        self.add_done_callback(drop_action)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call a function when the command is done; what it raises is logged, and ends neither the run nor a thread."""

        def call(future: Future[Any]) -> None:
            try:
                with guard_user_code("", "done_callback"):
                    fn(future)
            except UserCodeError as error:
                log_warning(_logger, f"{self.label}: a callback of its future failed", error.__cause__)

        super().add_done_callback(call)

    def carry_out(self) -> Exception | None:
        """Do it and answer, unless it was cancelled; return what it raised, if anything."""
        if not self.set_running_or_notify_cancel():
            return None
        assert self._action is not None, "it is dropped when the future is done"
        try:
            self.set_result(self._action())
        except Exception as error:
            self.set_exception(error)
            return error
        return None

    def _await(self, timeout: float | None) -> None:
        """Wait until it is done, or the time is over.

        Raises:
            ConfigError: if the thread that trains waits for this one.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done():
            if self._queue.waits_for_caller():
                raise ConfigError(
                    f"{self.label} must not be waited for in the thread that trains, or in one that it joins, because "
                    "it is done after the step in progress. Use done(), add_done_callback(), or join the thread later."
                )
            if (left_s := until - time.monotonic()) <= 0:
                return
            wait([self], min(left_s, _LOOK_S))

    def result(self, timeout: float | None = None) -> Any:
        """Return what the command returned; raises `TimeoutError` if it is not done within `timeout` seconds."""
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why the command was not done, or `None`; waits as `result` does."""
        self._await(timeout)
        return super().exception(0)


class CommandQueue:
    """Takes commands from any thread.

    Example:
        >>> queue = CommandQueue()
        >>> queue.give("count", lambda: 3).result()  # the run does not train, so it is done at once
        3
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: int | None = None
        self._trains = False
        self._commands: deque[Command] = deque()

    def labels(self, *, of_callbacks: bool = False) -> list[str]:
        """Return the waiting commands of other threads, or of callbacks, in the order in which they were given."""
        with self._free:
            waiting = [command for command in self._commands if not command.cancelled()]
        return [command.label for command in waiting if command.is_of_callback is of_callbacks]

    @property
    def is_owner(self) -> bool:
        """Whether the calling thread is the one that carries commands out now."""
        return self._owner == threading.get_ident()

    def waits_for_caller(self) -> bool:
        """Whether the thread that carries commands out is the calling one, or waits for it or its future."""
        callers: list[Any] = [threading.current_thread()]
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # the future of a thread of a pool
            callers.append(getattr(frame.f_locals.get("self"), "future", None))
            frame = frame.f_back
        frame = sys._current_frames().get(self._owner or 0)
        while frame is not None and not self.is_owner:
            waits_for = frame.f_locals.get("self") if frame.f_code in _WAITS else None
            if waits_for is not None and any(waits_for is caller for caller in callers):
                return True
            frame = frame.f_back
        return self.is_owner

    def give(self, label: str, action: Callable[[], Any]) -> Command:
        """Have something done: at the next step boundary while the run trains, else at once in the calling thread.

        Args:
            label: what it is in words, the same on every process that asks for the same.
            action: does it; what it returns becomes the result of the future.

        Returns:
            A future that is complete when it was done or refused; complete already if the run does not train.

        Raises:
            Exception: what `action` raises, if the run does not train.
        """
        command, me = Command(label, action, self), threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._trains or self._owner in (None, me))
            if self._trains:
                self._commands.append(command)
                return command
            # A command may give another one: this thread carries commands out already.
            owner_before, self._owner = self._owner, me
        try:
            command.set_result(action())
        finally:
            with self._free:
                self._owner = owner_before
                self._free.notify_all()
        return command

    def ask(self, label: str, action: Callable[[], Any]) -> Any:
        """Return the result of an action: at once in the thread that trains, else after the step in progress."""
        if self.is_owner:
            return action()
        command = self.give(label, action)
        try:
            return command.result()
        finally:
            command.cancel()  # one that could not be waited for is not done later

    @contextmanager
    def training(self, finish: Callable[[bool], bool]) -> Iterator[None]:
        """Let the calling thread train in the `with` block, and carry out all commands meanwhile.

        Args:
            finish: carries out what still waits at the end. Its argument says whether the block has failed; it returns
                whether to call it again if something waits by then.

        Raises:
            ConfigError: if another thread trains.
        """
        me = threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._trains or self._owner in (None, me))
            if self._trains:
                raise ConfigError(
                    "train must be called once at a time, got a call while the run trains. Wait for the other call."
                )
            owner_before, self._owner, self._trains = self._owner, me, True
        failed = True
        try:
            yield
            failed = False
        finally:
            try:
                while self._trains and finish(failed):
                    with self._free:
                        # Under one lock: a command between the question and the end would never be done.
                        self._trains = bool(self._commands)
            finally:
                with self._free:
                    left, self._trains, self._owner = list(self._commands), False, owner_before
                    self._commands.clear()
                    self._free.notify_all()
                for command in left:
                    if command.set_running_or_notify_cancel():
                        command.set_exception(ProcessError(f"{command.label}: not done, as the run has ended."))

    def take(self, labels: Sequence[str] | None = None) -> list[Command]:
        """Take commands out of the queue, to be carried out.

        Args:
            labels: which of those that other threads gave, in this order, in addition to those of callbacks; by default
                all, in the order in which they were given.
        """
        with self._free:
            taken = [command for command in self._commands if labels is None or command.is_of_callback]
            for label in labels or ():
                # The first of its label that is not taken yet: equal commands are done as often as they were given. One
                # that is cancelled comes last; it is taken only if that happened after the processes had agreed.
                equal = (command for command in self._commands if command.label == label and command not in taken)
                taken.append(min(equal, key=Command.cancelled))
            for command in taken:
                self._commands.remove(command)
            return taken


class Membership:
    """Adds, pauses and removes tasks, and handles those that end.

    Requests are checked in the thread that asks, and carried out by the one that trains, between two steps; at once if
    the run does not train.

    A task has succeeded when its adapter is on the disk and was read back. Until then it counts as failed, with the
    reason. It is saved again after the next state of the run that the disk takes, and at the end of the run.

    Args:
        run: the present run.
        placement: the model of this process, which takes adapters in and drops them.
        plans: the plan, which changes with the tasks.
        make_tasks: reads the rows of checked tasks.

    Attributes:
        queue: commands that wait.
    """

    def __init__(
        self,
        run: Run,
        placement: Placement,
        plans: RunPlans,
        make_tasks: Callable[[Sequence[ResolvedTask]], list[ActiveTask]],
    ) -> None:
        self._run, self._placement, self._plans, self._make_tasks = run, placement, plans, make_tasks
        self.queue = CommandQueue()
        self._arriving: set[str] = set()
        self._num_states_at_last_try = 0

    # ------------------------------------------------------------------ requests

    def register(self, tasks: Sequence[Task]) -> Command:
        """Check tasks here, in the caller's thread, and add them at the next step boundary.

        Args:
            tasks: the tasks to add, with names that no task of the run has.

        Raises:
            ConfigError: naming every setting that cannot be run; then none is added.
            DataError: naming the rows that cannot be trained on.
        """
        names = {task.name: None for task in tasks}
        with self._placement.lock:
            # A resumed run still shows tasks that were removed before; their names are free.
            standing = [task.name for task in self._run.table if task.status is not TaskStatus.REMOVED]
            check_task_names([task.name for task in tasks], [*standing, *self._arriving])
            resolved = resolve_tasks(tasks, self._run.args)
            self._placement.check(resolved)
            # Reserved from here on: another caller may ask for the same name while these rows are read.
            self._arriving.update(names)

        def free_names(_: object = None) -> None:
            with self._placement.lock:
                self._arriving.difference_update(names)

        try:
            runs = self._make_tasks(resolved)
            command = self.queue.give(f"register {', '.join(names)}", lambda: self._add(runs))
        except BaseException:
            free_names()
            raise
        # Done, refused, cancelled, or left when the run ends.
        command.add_done_callback(free_names)
        return command

    def remove(self, name: str, *, save: bool) -> Command:
        """Take a task out at the next step boundary; its adapter is written first if `save` is true.

        Raises:
            ConfigError: for a name that no task has.
        """
        self._require_known(name)
        return self.queue.give(f"remove {name}", lambda: self._remove(name, save))

    def set_paused(self, name: str, is_paused: bool) -> Command:
        """Pause or resume a task at the next step boundary.

        A paused task takes no steps, and is not started if it waits. A resumed one continues from the same step.

        Raises:
            ConfigError: for a name that no task has. The command raises one if the task has ended by then.
        """
        self._require_known(name)

        def act() -> None:
            task = self.task_of(name)
            if task.status.is_final:
                raise ConfigError(f'task "{name}" has already ended ({task.status}).')
            if is_paused and task.status is not TaskStatus.PAUSED:
                task.status, task.reason = TaskStatus.PAUSED, ""
            elif not is_paused and task.status is TaskStatus.PAUSED:
                # One that was never started waits for a plan to admit it.
                task.status = TaskStatus.WAITING if task.optimizer is None else TaskStatus.RUNNING

        return self.queue.give(f"{'pause' if is_paused else 'resume'} {name}", act)

    def task_of(self, name: str) -> ActiveTask:
        """Return a task by name; a `ConfigError` with the closest one if there is none."""
        self._require_known(name, arriving=False)
        return self._run.table[name]

    def _require_known(self, name: str, *, arriving: bool = True) -> None:
        names = [task.name for task in self._run.table] + (sorted(self._arriving) if arriving else [])
        if name not in names:
            raise ConfigError(
                f'the task must be one of {", ".join(names)}, got "{name}". {closest(name, names)}'.rstrip()
            )

    # ------------------------------------------------------------------ between two steps

    def apply_commands(self) -> None:
        """Carry out what was asked for since the last step; with several processes, only what their callbacks asked."""
        self._carry_out(self.queue.take(None if self._run.processes.is_alone else ()))

    def apply_shared_commands(self, *, has_commands: bool) -> None:
        """Carry out what other threads have asked for on every process, in the order of the first one.

        Other threads ask at their own time on each process. What has not come to all of them yet waits. All processes
        call this at the same point.

        Args:
            has_commands: whether commands wait on any process.
        """
        shared: list[str] = []
        if has_commands:
            everywhere = self._run.processes.gather(self.queue.labels())
            counts = Counter(everywhere[0])
            for labels in everywhere[1:]:
                counts &= Counter(labels)
            for label in everywhere[0]:
                if counts[label] > 0:
                    counts[label] -= 1
                    shared.append(label)
        self._carry_out(self.queue.take(shared))

    def finish_commands(self, failed: bool) -> bool:
        """Carry out what still waits when a run ends; return whether there may be more to do.

        Args:
            failed: whether the run has ended by an error.
        """
        is_alone = self._run.processes.is_alone
        # Others may be stuck in the step that failed here, and answer nothing.
        if is_alone or not failed:
            self.apply_commands()
        return is_alone

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            error = command.carry_out()
            # The caller gets the error and the other tasks continue. Without the other processes none can.
            if isinstance(error, ProcessError):
                raise error
            if error is not None:
                text = str(error) if isinstance(error, PeftMuxError) else describe_error(error)
                self._run.log.warn(f"{command.label}: not done: {text}")
                self._run.log.event("command_refused", command=command.label, reason=text)
        if commands:
            self._run.saver.saved_step = None  # within the same step, the saved state is outdated
            # Planned first, so that a new task which fits is reported as running, not as waiting before that.
            self._plans.replan()
            self.handle_changes()

    def _add(self, runs: list[ActiveTask]) -> None:
        """Add checked tasks to the model and the table; they wait there until a plan admits them."""
        run = self._run
        for task in runs:
            if task.name in run.table:  # removed before this run was resumed
                self._drop(task.name)
        # PEFT refuses some configurations only when it injects the adapter; then the others train on.
        self._placement.register(runs)
        for task in runs:
            run.table.runs[task.name] = task
            run.saver.note_arrival(task.name)
            run.callbacks.note_event("on_task_register", task)
        if run.is_in_train:  # otherwise the tasks are described when training begins
            run.saver.attempt(lambda: describe_tasks(run.root, run.args, run.table, keeps=True))

    def _remove(self, name: str, save: bool) -> None:
        """Take a task out of every part that holds something of it, saving its adapter first if asked to."""
        run, task = self._run, self.task_of(name)
        if task.status is TaskStatus.REMOVED:  # before this run was resumed; its adapter is on the disk as it was
            self._drop(name)
            return
        # Saved before it is dropped: the saver reads the table and the model. Every process gets here.
        if save and run.saver.folder is not None and not all(run.processes.gather(run.saver.save_adapter(name))):
            raise CheckpointError(
                f'the adapter of task "{name}" could not be written, so the task stays. Make its folder writable, or '
                f'call remove_task("{name}", save=False), which discards the adapter.'
            )
        if not task.status.is_final:
            task.end(TaskStatus.REMOVED, "" if save else "not saved")
        place = run.saver.place(task)
        for observer in run.log.observers:
            observer.on_task_remove(task, place)
        self._drop(name)
        run.saver.note_removed(task)
        run.callbacks.note_event("on_task_remove", task, place)
        run.log.event("status", task=name, step=task.step, status="removed")

    def _drop(self, name: str) -> None:
        del self._run.table.runs[name]
        self._run.log.drop_callbacks(name)
        self._placement.remove(name)

    # ------------------------------------------------------------------ tasks whose status has changed

    def handle_changes(self) -> None:
        """Report every change since the last call, save the tasks that have ended, and plan again without them.

        A task that has taken all its steps ends here. Every process calls this at the same point of a step, as saving
        may take all of them.
        """
        run = self._run
        if run.saver.unsaved and run.saver.num_states != self._num_states_at_last_try:
            self._save_again()
        changed = [(task, task.status) for task in run.table.collect()]
        for task, status in changed:
            if not status.is_final:
                run.log.status(task)
                run.callbacks.note_status(task, run.saver.place(task))
                continue
            # No log may come after this one, so the losses since the last one are logged now.
            if run.args.logging_strategy != "no":
                run.log.losses([task])
            # Before it is saved, as the best adapter is the one to keep; a failed task keeps its last good one.
            if task.best.value is not None and status is not TaskStatus.FAILED:
                parameters = self._placement.model.task_parameters(task.name)
                with torch.no_grad():
                    for key, weight in task.best_weights.items():
                        parameters[key].copy_(weight)
            if failure := run.saver.save_ended(task):
                self._fail_unsaved(task, failure)
            elif run.saver.folder is not None and status is not TaskStatus.FAILED:
                run.log.callbacks[task.name].call("on_save")
            self._report_ending(task)
            if status is TaskStatus.FAILED and run.args.quarantine_policy == "stop":
                run.control.should_training_stop = True
        # A task that has ended makes room for tasks that wait; other changes do not.
        if any(status.is_final for _, status in changed):
            self._plans.replan()

    def settle(self) -> None:
        """Save once more what could not be saved, at the end of a run; all processes agree on what has failed."""
        self._save_again()
        # If each process holds all of every task, only the one that writes knows.
        unsaved, table = self._run.saver.unsaved, self._run.table
        failures = {name: table[name].reason for name, ending in unsaved.items() if ending is not None}
        for name, reason in self._run.processes.gather(failures)[0].items():
            if name not in failures and name in table:
                unsaved[name] = None
                task = table[name]
                task.end(TaskStatus.FAILED, reason)
                task.reported = task.status

    def _save_again(self) -> None:
        """Save the tasks whose adapters could not be written; those that now are have ended as they would have."""
        saver, table = self._run.saver, self._run.table
        self._num_states_at_last_try = saver.num_states
        for name, ending in list(saver.unsaved.items()):
            if ending is not None:
                task = table[name]
                task.status, task.reason = ending  # its state is saved with these
                if failure := saver.save_ended(task):
                    self._fail_unsaved(task, failure)
                else:
                    self._report_ending(task)

    def _fail_unsaved(self, task: ActiveTask, failure: str) -> None:
        """Mark a task as failed because its adapter could not be written, and report where its newest copy is."""
        before = f"{task.reason}; " if task.status is TaskStatus.FAILED else ""
        folder = self._run.saver.folder
        newest = None if folder is None else folder.newest_checkpoint(task.name)
        copy = "There is no copy of it on the disk." if newest is None else f"Its newest copy is {newest}."
        task.status = TaskStatus.FAILED
        task.reason = f"{before}its adapter could not be written: {failure.rstrip('.')}. {copy}"
        self._num_states_at_last_try = self._run.saver.num_states
        task.reported = task.status

    def _report_ending(self, task: ActiveTask) -> None:
        self._run.log.status(task)
        task.reported = task.status
        self._run.callbacks.note_status(task, self._run.saver.place(task))
        for observer in self._run.log.observers:
            observer.on_task_end(task)
