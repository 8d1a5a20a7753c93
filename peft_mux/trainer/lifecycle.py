"""`Lifecycle`: what a change in the life of a task brings about: a line, a record, its adapter on disk, a new plan."""

from __future__ import annotations

from peft_mux.task import TaskStatus
from peft_mux.tasks.table import TaskEvent
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run


class Lifecycle:
    """Logs which tasks start, end, fail or pause, and saves the adapters of those that ended.

    Args:
        run: the run under way.
        placement: the model of this process, which holds the adapters.
        plans: the plan, made anew without the tasks that have ended.
    """

    def __init__(self, run: Run, placement: Placement, plans: PlanFollower) -> None:
        """Remember the parts; the first call looks for changes."""
        self._run, self._placement, self._plans = run, placement, plans

    def handle_changes(self) -> None:
        """Log every change since the last call, save the tasks that have ended, and plan anew without them.

        A task that has taken all its steps ends here. Every process calls this at the same point of a step, as saving
        may take all of them.
        """
        events = self._run.table.collect()
        for event in events:
            self._handle_event(event)
        # What has ended makes room for tasks that wait; whatever else changes does not.
        if any(event.status.is_final for event in events):
            self._plans.replan()

    def _handle_event(self, event: TaskEvent) -> None:
        """Log a change; save a task that has ended, and ask the run to stop where the failure of a task ends it."""
        run = self._run.table[event.task]
        self._run.log.status(event, run.step)
        if not event.status.is_final:
            return
        # No log need come after this one, so the losses since the last one are logged now.
        if self._run.args.logging_strategy != "no":
            self._run.log.losses([run])
        # Before it is saved, as the best adapter is the one to keep; a failed task keeps its last good one.
        if run.best.value is not None and event.status is not TaskStatus.FAILED:
            run.restore_best(self._placement.placed.model.task_parameters(event.task))
        self._run.saver.save_ended(run)
        if event.status is TaskStatus.FAILED and self._run.args.quarantine_policy == "stop":
            self._run.request_stop()
