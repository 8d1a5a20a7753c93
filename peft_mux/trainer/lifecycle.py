"""`Lifecycle`: what a change in the life of a task brings about: a line, a record, its adapter on disk, a new plan."""

from __future__ import annotations

from typing import Any, Protocol

from peft_mux.task import TaskStatus
from peft_mux.tasks.table import TaskEvent
from peft_mux.tasks.task_run import TaskRun
from peft_mux.trainer.files.task_files import write_task_files
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run


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
            self._run.callbacks.news.changed(run, self._run.saver.place(run))
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
            self._run.hub.ended(run)
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
        self._run.callbacks.news.changed(run, self._run.saver.place(run))
        write_task_files(self._run, run)
