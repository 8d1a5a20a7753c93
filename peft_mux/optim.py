"""One optimizer, schedule and gradient norm per task: nothing of one task's step depends on another's.

Global clipping would couple tasks (one NaN makes every norm NaN), and stepping an idle task would move it (AdamW's
momentum and decay act on zero gradients), so both are done task by task.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, get_scheduler

from peft_mux.arguments import HyperParameters, MultiTaskTrainingArguments, task_arguments
from peft_mux.errors import ConfigError
from peft_mux.modeling.slabs import TaskSlab, decays

_ELEMENTWISE = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
"""Optimizers that treat every element alike, so that it does not matter how weights are cut into tensors."""


class TaskOptimizer:
    """The optimizer and schedule of one task, over its own parameters alone.

    Args:
        name: of the task, for messages.
        parameters: the task's parameters by name.
        slab: that they are views of; element-wise optimizers step its pages instead, each in one operation.
        hyper: the task's settings.
        num_steps: optimizer steps that the task will take, for the schedule.
        args: the run's arguments, read as Trainer reads them.

    Raises:
        ConfigError: if the optimizer or schedule cannot be built from these settings.
    """

    def __init__(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        hyper: HyperParameters,
        num_steps: int,
        args: MultiTaskTrainingArguments,
        slab: TaskSlab | None = None,
    ) -> None:
        """Build both, as Trainer would for this task alone."""
        own_args = task_arguments(hyper, args)
        self.slab = slab if hyper.optim in _ELEMENTWISE else None
        groups = _parameter_groups(parameters, hyper.weight_decay, self.slab)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.max_grad_norm = hyper.max_grad_norm
        try:
            optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(own_args)
            self.optimizer = optimizer_class(groups, **options)
            self.schedule = get_scheduler(
                hyper.lr_scheduler_type,
                optimizer=self.optimizer,
                num_warmup_steps=own_args.get_warmup_steps(num_steps),
                num_training_steps=num_steps,
                scheduler_specific_kwargs=hyper.lr_scheduler_kwargs,
            )
        except (ImportError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"tasks.{name}: optim={hyper.optim!r} with lr_scheduler_type={hyper.lr_scheduler_type!r} cannot be "
                f"built: {error}"
            ) from error

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        return float(self.schedule.get_last_lr()[0])

    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients of the task, without waiting for the device."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def step(self, gradient_norm: torch.Tensor) -> None:
        """Clip to `max_grad_norm` (0 for not at all), update the parameters, and advance the schedule."""
        if self.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, gradient_norm)
        self.optimizer.step()
        self.schedule.step()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self.optimizer.zero_grad(set_to_none=self.slab is None)

    def release(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.slab is not None:
            self.slab.drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer and schedule."""
        return {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that `state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def check_optimizer(name: str, hyper: HyperParameters, num_steps: int, args: MultiTaskTrainingArguments) -> None:
    """Build a task's optimizer and schedule in trial, so that what cannot be built is told before any weight is read.

    Raises:
        ConfigError: as for `TaskOptimizer`.
    """
    TaskOptimizer(name, {"trial": nn.Parameter(torch.zeros(1, 1))}, hyper, num_steps, args)


def _parameter_groups(
    parameters: dict[str, nn.Parameter], weight_decay: float, slab: TaskSlab | None
) -> list[dict[str, Any]]:
    """Split as Trainer does: biases and norms do not decay."""
    if slab is not None:
        split = [[page.values for page in slab.pages if page.decays is does] for does in (True, False)]
    else:
        split = [[p for key, p in parameters.items() if decays(key) is does] for does in (True, False)]
    groups = [{"params": split[0], "weight_decay": weight_decay}, {"params": split[1], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
