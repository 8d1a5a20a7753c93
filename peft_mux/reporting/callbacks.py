"""HF `TrainerCallback`s for a run of many tasks.

Callbacks given to the trainer see the run: its state counts run steps, and logs have `task/metric` keys. Callbacks of a
`Task` see that task alone, under the plain keys they would see in a run of its own (`loss`, `eval_loss`); asking for
`should_training_stop` there stops that task and no other.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import DefaultFlowCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.tasks.task_run import TaskRun

_logger = logging.getLogger(__name__)


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

    def call(self, event: str, *facts: Any) -> None:
        """Call one event of every callback.

        Args:
            event: name of the event, such as `on_step_end`.
            *facts: what the handler passes on with it: the numbers of `on_log`, the metrics of `on_evaluate`.
        """
        answer = getattr(self.handler, event)(self.args, self.state, self.control, *facts)
        # Copied into the one control, as other parts of the run hold it too.
        if answer is not self.control:
            vars(self.control).update(vars(answer))

    def log(self, logs: dict[str, float]) -> None:
        """Keep `task/metric` numbers in the state of the run, and hand them to its callbacks and integrations."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs)


class TaskCallbacks:
    """Calls one task's own callbacks with its own state and arguments.

    Args:
        run: the task whose callbacks are called.
        args: a copy of the run's arguments with the task's settings.
        model: the multi-task model, handed to the callbacks.
        processing_class: the tokenizer, handed to the callbacks.
    """

    def __init__(self, run: TaskRun, args: MultiTaskTrainingArguments, model: Any, processing_class: Any) -> None:
        """Build the handler; a task without callbacks costs nothing."""
        self.run = run
        self.args = args
        self.control = TrainerControl()
        # The handler of transformers warns where no flow callback is in it, and the usual one would decide about
        # saving.
        self.handler = CallbackHandler([TaskFlowCallback(), *run.task.callbacks], model, processing_class, None, None)

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

        What a callback of a task raises fails that task and no other.
        """
        if not self.run.task.callbacks:
            return self.control
        optimizer = self.run.optimizer
        # Set at each call, as the optimizer comes when the task starts and goes when it ends.
        self.handler.optimizer = None if optimizer is None else optimizer.optimizer
        self.handler.lr_scheduler = None if optimizer is None else optimizer.schedule
        try:
            self.control = self.handler.call_event(event, self.args, self.run.state, self.control, **kwargs)
        except Exception as error:
            _logger.warning('a callback of task "%s" failed in %s', self.run.name, event, exc_info=True)
            if not self.run.status.is_final:
                self.run.quarantine(f"a callback failed in {event}: {type(error).__name__}: {error}")
        return self.control
