"""`TaskNews`: tells the callbacks of a run what has become of its tasks, and which plan its steps follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from peft_mux.scheduler.plan import Plan
from peft_mux.task import TaskStatus
from peft_mux.tasks.task_run import TaskRun


class TaskNews:
    """Keeps what is to be told of tasks until it is told, in the order in which it happened.

    Told apart from the change itself: whatever a callback raises or asks for finds every task settled and saved.

    Args:
        call: calls one event of `peft_mux.task_events.EVENTS` of every callback that has it, with the facts that go
            with it, and returns whether there was one.
    """

    def __init__(self, call: Callable[..., bool]) -> None:
        """Have nothing to tell."""
        self._call = call
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self._begun: set[str] = set()
        self._paused: set[str] = set()
        self._plan: Plan | None = None
        self._told: Plan | None = None

    def begin(self, runs: Iterable[TaskRun]) -> None:
        """Begin a training: the tasks that run are about to take their first step of it, and follow their first plan.

        Args:
            runs: all tasks.
        """
        self._waiting.clear()
        self._begun, self._paused, self._told = set(), set(), None
        for run in runs:
            self.changed(run, None)
        # Those that rested before are no news.
        self._waiting = deque(news for news in self._waiting if news[0] == "on_task_begin")

    def registered(self, run: TaskRun) -> None:
        """Take note of a task that has come."""
        self._begun.discard(run.name)
        self._paused.discard(run.name)
        self._note("on_task_register", run, None)

    def removed(self, run: TaskRun, folder: Path | None) -> None:
        """Take note of a task that has left.

        Args:
            run: the task.
            folder: folder of its adapter; `None` where it was not saved.
        """
        self._note("on_task_remove", run, folder)

    def changed(self, run: TaskRun, folder: Path | None) -> None:
        """Take note of the status that a task has now.

        Args:
            run: the task.
            folder: folder of its adapter as it is now; `None` where there is none.
        """
        if run.status is TaskStatus.PAUSED:
            self._paused.add(run.name)
            self._note("on_task_pause", run, folder)
            return
        if run.name in self._paused and not run.status.is_final:
            self._note("on_task_resume", run, folder)
        self._paused.discard(run.name)
        if run.status is TaskStatus.RUNNING and run.name not in self._begun:
            self._begun.add(run.name)
            self._note("on_task_begin", run, folder)
        elif run.status is TaskStatus.FAILED:
            self._note("on_task_fail", run, folder)
        elif run.status in (TaskStatus.SUCCEEDED, TaskStatus.STOPPED_EARLY):
            self._note("on_task_end", run, folder)

    def planned(self, plan: Plan) -> None:
        """Take note of the plan that the next steps follow."""
        self._plan = plan

    def tell(self) -> bool:
        """Tell all that was noted; return whether anybody heard of it, who may ask for something now."""
        is_heard = False
        # One after another, as what is told may bring about more.
        while self._waiting:
            event, facts = self._waiting.popleft()
            is_heard |= self._call(event, **facts)
        plan, before = self._plan, self._told
        # Where nothing is left to run, there is no step that would follow it.
        if plan is not None and plan.htasks and plan != before:
            self._told = plan
            is_heard |= self._call("on_plan", plan=plan, before=before)
        return is_heard

    def _note(self, event: str, run: TaskRun, folder: Path | None) -> None:
        facts = {"task": run.name, "task_state": run.state, "status": run.status, "reason": run.reason}
        self._waiting.append((event, {**facts, "adapter_folder": folder}))
