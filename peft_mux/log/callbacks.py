"""HF `TrainerCallback`s for a run of many tasks.

Callbacks of the trainer (`RunCallbacks`) see the run: its state counts run steps, logs have `task/metric` keys, and
they receive the events of `peft_mux.task.EVENTS` about tasks and plans. Callbacks of a `Task`
(`TaskCallbacks`) see only that task, with plain keys (`loss`, `eval_loss`). If they ask for
`should_training_stop`, that task stops and no other.

`Observer` is for what this package itself does with a run next to training: reports, cards, loggers, uploads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.scheduler.plan import Plan
from peft_mux.task import TaskStatus, hears
from peft_mux.user_code import Listener, UserCodeError, guard_user_code, ignore_timing, log_warning

_logger = logging.getLogger(__name__)
_STEP_EVENTS = (
    "on_step_begin on_step_end on_substep_end on_pre_optimizer_step on_optimizer_step on_epoch_begin on_epoch_end"
).split()
_SHOWN = (
    "global_step epoch max_steps num_train_epochs logging_steps eval_steps save_steps is_local_process_zero "
    "is_world_process_zero best_metric best_global_step best_model_checkpoint"
).split()
"""What the state of a task shows its callbacks, in addition to the history of its logs."""


class TaskFlowCallback(DefaultFlowCallback):
    """Leaves it to the trainer when to log, evaluate, save and stop: tasks differ in all four."""

    on_step_end = TrainerCallback.on_step_end  # type: ignore[assignment]
    on_epoch_end = TrainerCallback.on_epoch_end  # type: ignore[assignment]


def hears_steps(callback: Any) -> bool:
    """Return whether a callback is called at single steps, when it may look at the run or ask for something."""
    if isinstance(callback, TaskFlowCallback):
        return False
    # Methods of the instance, not of its class: a callback may get a method after it was made.
    methods = {event: getattr(getattr(callback, event, None), "__func__", None) for event in _STEP_EVENTS}
    return any(method is not getattr(TrainerCallback, event) for event, method in methods.items())


class Observer:
    """Is called at what happens in a run, and does nothing by default; `MultiTaskTrainer` lists the observers.

    Each event is first logged, and what it writes is on the disk. Every process calls its observers, in their order.
    """

    def holds_run(self) -> bool:
        """Return whether it keeps a copy of a run, which `fetch` can put into the run folder.

        Raises:
            ConfigError: if that cannot be found out.
        """
        return False

    def fetch(self) -> None:
        """Copy the run that it keeps into the run folder, which has no state of a run."""

    def on_begin(self) -> None:
        """Called when a training is about to take its first step."""

    def on_task_event(self, callbacks: TaskCallbacks, event: str, facts: Mapping[str, Any]) -> None:
        """Called after an event of the callbacks of a task, with what belongs to it."""

    def on_task_end(self, task: ActiveTask) -> None:
        """Called when a task has ended."""

    def on_task_remove(self, task: ActiveTask, folder: Path | None) -> None:
        """Called when a task is taken out of the run; `folder` has its adapter, `None` if there is none."""

    def on_saving(self) -> None:
        """Called when a state of the run is about to be written, and old ones deleted."""

    def on_saved(self, tasks: Sequence[ActiveTask]) -> None:
        """Called when a state of the run was written, with the tasks that still run."""

    def on_end(self) -> None:
        """Called when the last step is taken and saved, before the reports."""

    def on_close(self) -> None:
        """Called when all files of the run are written."""

    def on_failure(self) -> None:
        """Called when an error ends the training."""


class RunCallbacks:
    """Calls the callbacks of the run, with its one state and its one control.

    Events of tasks are collected and passed on later, in the order in which they happened: every task is settled and
    saved by then, even if callbacks raise or stop the run.

    Args:
        handler: the trainer's own handler, to which users add their callbacks.
        args: the arguments of the run.
        state: the state of the run, which counts its steps and keeps its log history.
        control: what callbacks ask of the run; they may change it or return another one.

    Attributes:
        plan: the plan that the next steps follow; `None` if there is none yet.
    """

    def __init__(
        self,
        handler: CallbackHandler,
        args: MultiTaskTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        self.handler, self.args, self.state, self.control = handler, args, state, control
        self.plan: Plan | None = None
        self._reported_plan: Plan | None = None
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self._begun: set[str] = set()
        self._paused: set[str] = set()

    def call(self, event: str, *facts: Any) -> None:
        """Call an event of every callback, with what belongs to it: the numbers of `on_log`, or of `on_evaluate`."""
        answer = getattr(self.handler, event)(self.args, self.state, self.control, *facts)
        # Copied, because other parts of the run hold the control too.
        vars(self.control).update(vars(answer))

    def log(self, logs: dict[str, float]) -> None:
        """Keep `task/metric` numbers in the state of the run, and hand them to its callbacks and integrations."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        # The callbacks of transformers would put `train/` before every key that does not begin with `eval_`, and file
        # the held-out loss of a task under `train/sql/eval_loss`.
        rewrite: Callable[[Any], Any] = integration_utils.rewrite_logs
        # W&B passes a part of the numbers; other trainers of the process keep their keys.
        integration_utils.rewrite_logs = lambda given: dict(given) if given.keys() <= logs.keys() else rewrite(given)
        try:
            self.call("on_log", logs)
        finally:
            integration_utils.rewrite_logs = rewrite

    def begin_training(self, tasks: Iterable[ActiveTask]) -> None:
        """Forget what earlier trainings reported: running tasks take their first step, and follow their first plan."""
        self._waiting.clear()
        self._begun, self._paused, self._reported_plan = set(), set(), None
        for task in tasks:
            self.note_status(task, None)
        # Tasks that were paused before are not reported.
        self._waiting = deque(news for news in self._waiting if news[0] == "on_task_begin")

    def note_event(self, event: str, task: ActiveTask, folder: Path | None = None) -> None:
        """Collect an event of a task; `folder` holds its present adapter, `None` if there is none."""
        if event == "on_task_register":
            self._begun.discard(task.name)
            self._paused.discard(task.name)
        facts = {"task": task.name, "task_state": task.state, "status": task.status, "reason": task.reason}
        self._waiting.append((event, {**facts, "adapter_folder": folder}))

    def note_status(self, task: ActiveTask, folder: Path | None) -> None:
        """Collect the events that follow from the present status of a task."""
        if task.status is TaskStatus.PAUSED:
            self._paused.add(task.name)
            self.note_event("on_task_pause", task, folder)
            return
        if task.name in self._paused and not task.status.is_final:
            self.note_event("on_task_resume", task, folder)
        self._paused.discard(task.name)
        if task.status is TaskStatus.RUNNING and task.name not in self._begun:
            self._begun.add(task.name)
            self.note_event("on_task_begin", task, folder)
        elif task.status is TaskStatus.FAILED:
            self.note_event("on_task_fail", task, folder)
        elif task.status in (TaskStatus.SUCCEEDED, TaskStatus.STOPPED_EARLY):
            self.note_event("on_task_end", task, folder)

    def call_task_events(self) -> bool:
        """Call callbacks with all collected events; return whether any of them has one, and may ask for something."""
        is_heard = False
        # One after another, because a callback may cause more events.
        while self._waiting:
            event, facts = self._waiting.popleft()
            is_heard |= self._call_task_event(event, **facts)
        plan, before = self.plan, self._reported_plan
        # If no task runs, no step will follow the plan.
        if plan is not None and plan.htasks and plan != before:
            self._reported_plan = plan
            is_heard |= self._call_task_event("on_plan", plan=plan, before=before)
        return is_heard

    def _call_task_event(self, event: str, **facts: Any) -> bool:
        """Call an event that transformers does not have; return whether any callback has it."""
        facts = {"model": self.handler.model, "processing_class": self.handler.processing_class, **facts}
        listening = [callback for callback in self.handler.callbacks if hears(callback, event)]
        for callback in listening:
            answer = getattr(callback, event)(self.args, self.state, self.control, **facts)
            vars(self.control).update({} if answer is None else vars(answer))
        return bool(listening)


class TaskCallbacks:
    """Calls one task's own callbacks with its own state and arguments.

    They get copies, or objects that are restored after each call, so nothing that they do to state, arguments, control
    and the mode of the model affects other tasks. They could still write to the weights of other tasks.

    Args:
        task: the task whose callbacks are called.
        args: a copy of the run's arguments with the task's settings.
        model: the multi-task model, handed to the callbacks.
        processing_class: the tokenizer, handed to the callbacks.

    Attributes:
        control: what the callbacks ask of the task.
        listener: called with the seconds that they took.
        observers: called after the callbacks.
    """

    def __init__(self, task: ActiveTask, args: MultiTaskTrainingArguments, model: Any, processing_class: Any) -> None:
        self.task, self.args = task, args
        self.control = TrainerControl()
        self.listener: Listener = ignore_timing
        self.observers: Sequence[Observer] = ()
        self._state, self._handed = TrainerState(), TrainerControl()
        self._num_shown = 0
        # Without a flow callback the handler of transformers warns, and its own one would decide about saving.
        callbacks = [TaskFlowCallback(), *task.task.callbacks]
        self.handler = CallbackHandler(callbacks, model, processing_class, None, None)

    def step_begins(self) -> None:
        """Call the events at the beginning of a step, and of an epoch if one begins with it."""
        if self._is_at_epoch_boundary:
            self.call("on_epoch_begin")
        self.call("on_step_begin")

    def step_ends(self) -> None:
        """Call the events at the end of a step, and of an epoch if one ends with it."""
        self.call("on_step_end")
        if self._is_at_epoch_boundary:
            self.call("on_epoch_end")

    @property
    def _is_at_epoch_boundary(self) -> bool:
        per_epoch = self.task.loader.steps_per_epoch  # `None` for streams
        return per_epoch is not None and self.task.step % per_epoch == 0

    def call(self, event: str, **facts: Any) -> TrainerControl:
        """Call `event` (`on_step_end`, ...) of every callback and return what they ask for.

        If a callback raises, or returns something other than a control, its task fails, and no other.
        """
        if self.task.task.callbacks:
            is_heard = any(hears(callback, event) for callback in self.task.task.callbacks)
            try:
                # Around the optimizer step tasks hold gradients, which `SharedModel` must not take away.
                what = "optimizer" if "optimizer" in event else "callback"
                with guard_user_code(self.task.name, what, self.listener, watches_model=is_heard):
                    self._call_callbacks(event, facts)
            except UserCodeError as error:
                log_warning(_logger, f'a callback of task "{self.task.name}" failed in {event}', error.__cause__)
                if not self.task.status.is_final:
                    self.task.quarantine(f"a callback failed in {event}: {error}")
        for observer in self.observers:
            observer.on_task_event(self, event, facts)
        return self.control

    def _call_callbacks(self, event: str, facts: dict[str, Any]) -> None:
        """Call the callbacks with the present state of the task, and apply what they ask for.

        Raises:
            ConfigError: if the optimizer of the task holds weights of others.
            TypeError: if the answer is not a control.
            KeyError: if a field of it is missing.
        """
        task, handler = self.task, self.handler
        # Set at each call, because the optimizer is made when the task starts, and dropped when it ends.
        handler.optimizer = None if task.optimizer is None else task.optimizer.optimizer
        handler.lr_scheduler = None if task.optimizer is None else task.optimizer.schedule
        # Only fields of the task are updated; what callbacks have written to others stays.
        for name in _SHOWN:
            setattr(self._state, name, getattr(task.state, name))
        # A resumed task has another state, with another history.
        if self._num_shown > len(task.state.log_history):
            self._num_shown = 0
        self._state.log_history += [dict(entry) for entry in task.state.log_history[self._num_shown :]]
        self._num_shown = len(task.state.log_history)
        # Its own method of the event takes back what was asked for before.
        answer = getattr(handler, event)(self.args, self._state, self._handed, **facts)
        if task.optimizer is not None:
            task.optimizer.require_own_parameters()
        if not isinstance(answer, TrainerControl):
            raise TypeError(f"it must return the TrainerControl or None, got {type(answer).__name__}")
        # Its own fields, not those of its class: a control that was emptied is invalid.
        vars(self.control).update({item.name: bool(vars(answer)[item.name]) for item in fields(TrainerControl)})
        self._handed = answer
