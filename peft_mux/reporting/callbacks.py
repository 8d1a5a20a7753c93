"""`TaskNews`: tells the callbacks of a run what has become of its tasks, and which plan its steps follow."""

# MERGED: HF `TrainerCallback`s for a run of many tasks.
# MERGED: Callbacks given to the trainer see the run: its state counts run steps, and logs have `task/metric` keys;
# MERGED: they are told
# MERGED: of its tasks, too (`peft_mux.task`). Callbacks of a `Task` see that task alone, under the plain keys they
# MERGED: would
# MERGED: see in a run of its own (`loss`, `eval_loss`); asking for `should_training_stop` there stops that task and
# MERGED: no other.

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.reporting.trackers import NamedLogs, TaskTrackers, keys_as_they_are
from peft_mux.scheduler.plan import Plan
from peft_mux.task import TaskStatus, hears
from peft_mux.user_code import Listener, UserCodeError, guard_user_code, ignore_timing, user_traceback


class TaskNews:
    """Keeps what is to be told of tasks until it is told, in the order in which it happened.

    Told apart from the change itself: whatever a callback raises or asks for finds every task settled and saved.

    Args:
        call: calls one event of `peft_mux.task.EVENTS` of every callback that has it, with the facts that go
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


_logger = logging.getLogger(__name__)


_STEP_EVENTS = (
    "on_step_begin on_step_end on_substep_end on_pre_optimizer_step on_optimizer_step on_epoch_begin on_epoch_end"
).split()


def hears_steps(callback: Any) -> bool:
    """Return whether a callback is told of single steps, at which it may look at the run or ask for something."""
    if isinstance(callback, TaskFlowCallback):
        return False
    # As they are called: a callback may have been given a method of its own after it was made.
    own = {event: getattr(getattr(callback, event, None), "__func__", None) for event in _STEP_EVENTS}
    return any(method is not getattr(TrainerCallback, event) for event, method in own.items())


class TaskFlowCallback(DefaultFlowCallback):
    """Leaves it to the trainer when to log, evaluate, save and stop: tasks differ in all four."""

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Ask for nothing."""
        return control

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Ask for nothing."""
        return control


class RunCallbacks:
    """Calls the callbacks of the run, with its one state and its one control.

    Args:
        handler: the trainer's own handler, to which users add their callbacks.
        args: the arguments of the run.
        state: the state of the run, which counts its steps and keeps its log history.
        control: what callbacks ask of the run; they may change it or return another one.

    Attributes:
        news: what they are told of tasks and plans.
    """

    def __init__(
        self,
        handler: CallbackHandler,
        args: MultiTaskTrainingArguments,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        """Call nobody yet."""
        self.handler, self.args, self.state, self.control = handler, args, state, control
        self.news = TaskNews(self._call_own)

    def call(self, event: str, *facts: Any) -> None:
        """Call one event of every callback.

        Args:
            event: name of the event, such as `on_step_end`.
            *facts: what the handler passes on with it: the numbers of `on_log`, the metrics of `on_evaluate`.
        """
        self._take(getattr(self.handler, event)(self.args, self.state, self.control, *facts))

    def _call_own(self, event: str, **facts: Any) -> bool:
        """Call an event that transformers does not have; return whether any callback has it."""
        facts = {"model": self.handler.model, "processing_class": self.handler.processing_class, **facts}
        listening = [callback for callback in self.handler.callbacks if hears(callback, event)]
        for callback in listening:
            answer = getattr(callback, event)(self.args, self.state, self.control, **facts)
            self._take(self.control if answer is None else answer)
        return bool(listening)

    def _take(self, answer: TrainerControl) -> None:
        # Copied into the one control, as other parts of the run hold it too.
        if answer is not self.control:
            vars(self.control).update(vars(answer))

    def log(self, logs: dict[str, float]) -> None:
        """Keep `task/metric` numbers in the state of the run, and hand them to its callbacks and integrations."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        with keys_as_they_are():
            self.call("on_log", NamedLogs(logs))


class TaskCallbacks:
    """Calls one task's own callbacks with its own state and arguments.

    What they are given is a copy, or is put right again after each call: whatever they do to state, arguments, control
    and modes of the model reaches no other task. The weights of others they could still write to.

    Args:
        run: the task whose callbacks are called.
        args: a copy of the run's arguments with the task's settings.
        model: the multi-task model, handed to the callbacks.
        processing_class: the tokenizer, handed to the callbacks.

    Attributes:
        control: what the callbacks ask of the task.
        listener: told how long they took.
        trackers: the runs of the task in loggers, which are told after its callbacks.
    """

    def __init__(self, run: TaskRun, args: MultiTaskTrainingArguments, model: Any, processing_class: Any) -> None:
        """Build the handler; a task without callbacks costs nothing."""
        self.run = run
        self.args = args
        self.control = TrainerControl()
        self.listener: Listener = ignore_timing
        self._state, self._handed = TrainerState(), TrainerControl()
        self._num_shown = 0
        # The handler of transformers warns where no flow callback is in it, and the usual one would decide about
        # saving.
        own = [TaskFlowCallback(), *run.task.callbacks]
        self.handler = CallbackHandler(own, model, processing_class, None, None)
        self.trackers = TaskTrackers(run, args)

    def use_model(self, model: Any) -> None:
        """Hand another model to the callbacks from now on; `None` while there is none."""
        self.handler.model = model

    def step_begins(self) -> None:
        """Tell of a step, and of an epoch where one begins with it."""
        if self._is_at_epoch_boundary:
            self.call("on_epoch_begin")
        self.call("on_step_begin")

    def step_ends(self) -> None:
        """Tell of a step, and of an epoch where one ends with it."""
        self.call("on_step_end")
        if self._is_at_epoch_boundary:
            self.call("on_epoch_end")

    @property
    def _is_at_epoch_boundary(self) -> bool:
        per_epoch = self.run.loader.steps_per_epoch
        return per_epoch is not None and self.run.step % per_epoch == 0

    def call(self, event: str, **kwargs: Any) -> TrainerControl:
        """Call `event` (`on_step_end`, ...) of every callback and return what they ask for.

        What a callback of a task raises fails that task and no other, and so does an answer that is no control.
        """
        if self.run.task.callbacks:
            self._call_own(event, kwargs)
        self.trackers.hear(event, self.handler.model, **kwargs)
        return self.control

    def _call_own(self, event: str, facts: dict[str, Any]) -> None:
        optimizer = self.run.optimizer
        # Set at each call, as the optimizer comes when the task starts and goes when it ends.
        self.handler.optimizer = None if optimizer is None else optimizer.optimizer
        self.handler.lr_scheduler = None if optimizer is None else optimizer.schedule
        try:
            with _unchanged_mode(self.handler.model), guard_user_code(self.run.name, "callback", self.listener):
                self._show_state()
                self._take(self.handler.call_event(event, self.args, self._state, self._handed, **facts))
        except UserCodeError as error:
            raised = error.__cause__ or error
            found = (type(raised), raised, user_traceback(raised))
            _logger.warning('a callback of task "%s" failed in %s', self.run.name, event, exc_info=found)
            if not self.run.status.is_final:
                self.run.quarantine(f"a callback failed in {event}: {error}")

    def _show_state(self) -> None:
        """Bring the state that callbacks are given up to that of the task; what they have written to it stays."""
        own = self.run.state
        for name in _SHOWN:
            setattr(self._state, name, getattr(own, name))
        # A resumed task has another state, with a history of its own.
        if self._num_shown > len(own.log_history):
            self._num_shown = 0
        self._state.log_history += [dict(entry) for entry in own.log_history[self._num_shown :]]
        self._num_shown = len(own.log_history)

    def _take(self, answer: object) -> None:
        """Take over what the callbacks ask for, as plain truth values.

        Raises:
            TypeError: if the answer is no control.
            KeyError: if something is missing of it.
        """
        if not isinstance(answer, TrainerControl):
            raise TypeError(f"got {type(answer).__name__} as its answer; allowed: the TrainerControl, or None")
        # Its own, not those of its class: a control that was emptied asks for nothing that could be meant.
        asked = {item.name: bool(vars(answer)[item.name]) for item in fields(TrainerControl)}
        vars(self.control).update(asked)
        self._handed = answer


_SHOWN = (
    "global_step epoch max_steps is_local_process_zero is_world_process_zero best_metric best_global_step "
    "best_model_checkpoint"
).split()
"""What the state of a task tells its callbacks, beside the history of its logs."""


@contextmanager
def _unchanged_mode(model: Any) -> Iterator[None]:
    """Put back the mode that all tasks share: whether the model trains.

    Code that generates text in a callback leaves a model in evaluation, which would end the dropout of every task.
    """
    was_training = getattr(model, "training", None)
    try:
        yield
    finally:
        if was_training is not None and model.training != was_training:
            model.train(was_training)
