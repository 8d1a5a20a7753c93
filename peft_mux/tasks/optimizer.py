"""One optimizer, schedule and gradient norm per task: nothing of one task's step depends on another's.

Global clipping would couple tasks (one NaN makes every norm NaN), and stepping an idle task would move it (AdamW's
momentum and decay act on zero gradients), so both are done task by task. On CUDA the AdamW steps of all tasks are one
launch all the same (`peft_mux.kernels.adamw.update`): each task's optimizer keeps its settings and its state,
and only the arithmetic is done for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import optimizer as torch_hooks
from transformers import Trainer, get_scheduler

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.hyper_parameters import ELEMENTWISE, HyperParameters
from peft_mux.kernels.adamw import update as multi_adamw
from peft_mux.kernels.adamw.pages import DTYPES, PageUpdate
from peft_mux.modeling.slabs import TaskSlab, decays
from peft_mux.task_settings import task_arguments
from peft_mux.tasks.isolation import LastGood


class TaskOptimizer:
    """The optimizer and schedule of one task, over its own parameters alone.

    Args:
        name: the name of the task, for messages.
        parameters: the task's parameters by name.
        slab: the pages that the parameters are views of; element-wise optimizers step these instead, each in one
            operation.
        hyper: the complete settings of the task.
        num_steps: optimizer steps that the task will take, for the schedule.
        args: the run's arguments, read as Trainer reads them.

    Attributes:
        failure: why no further step can be taken, as the schedule gives no rate for it; empty while it does.

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
        # An optimizer that looks at a parameter as a matrix, or at its norm, would see a page of many.
        self.slab = slab if hyper.optim in ELEMENTWISE else None
        groups = _parameter_groups(parameters, hyper.weight_decay, self.slab)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.max_grad_norm = hyper.max_grad_norm
        self.failure = ""
        self._counts: dict[nn.Parameter, _Count] = {}
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
        # Only libraries run in there, and what each of them raises of settings that it does not take is its own.
        except Exception as error:
            raise ConfigError(
                f"tasks.{name}: optim={hyper.optim!r} with lr_scheduler_type={hyper.lr_scheduler_type!r} cannot be "
                f"built: {error}"
            ) from error

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        return float(self.schedule.get_last_lr()[0])

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Those of the parameters that took part in the step."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients of the task, without waiting for the device."""
        return nn.utils.get_total_norm(self.gradients)

    def step(self, gradient_norm: torch.Tensor) -> None:
        """Clip to `max_grad_norm` (0 for not at all), update the parameters, and advance the schedule."""
        if self.max_grad_norm > 0 and not self._is_short(gradient_norm):
            # With the norm that was given: where processes hold parts, it is that of the whole gradient.
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, gradient_norm)
        self.optimizer.step()
        self._advance_schedule()
        self.zero_gradients()

    def _is_short(self, gradient_norm: torch.Tensor) -> bool:
        """Whether the clip factor is known to be 1, which spares a pass; on other devices asking would be waiting."""
        return gradient_norm.is_cpu and bool(self.max_grad_norm / (gradient_norm + 1e-6) >= 1)

    def page_updates(self, task: int, last_good: LastGood) -> list[PageUpdate]:
        """Return what a joint step of many tasks needs to know of this one; nothing if the task must step by itself.

        The state of the optimizer is made where it is not there yet.

        Args:
            task: column of the task among the verdicts.
            last_good: takes the weights as they are before the update.
        """
        if not self._can_join():
            return []
        updates = []
        for group in self.optimizer.param_groups:
            values, gradients, exp_avgs, exp_avg_sqs, counters = [], [], [], [], []
            new = [page for page in group["params"] if not self.optimizer.state.get(page)]
            # Torch's own way to make state and gather it: the state stays what a step of torch's own would leave.
            self.optimizer._init_group(group, values, gradients, exp_avgs, exp_avg_sqs, [], counters)
            for page in new:  # a counter that was made just now is 0, and asking the device would wait
                counter = self.optimizer.state[page]["step"]
                self._counts[page] = _Count(counter, counter._version, 0)
            columns = zip(values, gradients, exp_avgs, exp_avg_sqs, counters, strict=True)
            for page, gradient, exp_avg, exp_avg_sq, counter in columns:
                update = PageUpdate(
                    page,
                    gradient,
                    exp_avg,
                    exp_avg_sq,
                    last_good.copy_of(page),
                    task=task,
                    # As a number of the host: reading the counter would wait for the device at each step.
                    step=self._count(page, counter) + 1,
                    rate=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    max_grad_norm=self.max_grad_norm,
                )
                updates.append(update)
        return updates

    def joint_step_counted(self) -> None:
        """Take note that a joint update did the arithmetic of a step and that it is counted; advance the schedule."""
        for page, counter in self.counters.items():
            # Any write to the counter changes its version, which tells a later one of somebody else from ours.
            self._counts[page] = _Count(counter, counter._version, self._counts[page].value + 1)
        self.optimizer._opt_called = True  # what the schedule looks for, so as to warn of a wrong order
        self._advance_schedule()

    def _advance_schedule(self) -> None:
        """Set the rate of the next step; one that cannot be trained with is this task's failure, not the run's."""
        try:
            self.schedule.step()
        except Exception as error:  # a formula of the schedule's, at numbers that the task's owner chose
            self.failure = f"learning_rate: the schedule raises {type(error).__name__}: {error}"
            return
        reason = _reason_against(self.schedule.get_last_lr())
        self.failure = f"learning_rate: {reason}" if reason else ""

    def go_on_from(self, step: int) -> None:
        """Set the rate to that of this schedule after a number of steps, whoever took them.

        Args:
            step: number of steps taken.
        """
        schedule = self.schedule
        schedule.last_epoch, schedule._step_count = step, step + 1
        rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates
        reason = _reason_against(rates)
        self.failure = f"learning_rate: {reason}" if reason else ""

    def reason_against_rate(self, step: int) -> str:
        """Return why the rate of a step cannot be trained with, or an empty string; the schedule stays where it is.

        Args:
            step: number of steps taken before it.
        """
        try:
            factors = [factor(step) for factor in self.schedule.lr_lambdas]
            rates = [base * factor for base, factor in zip(self.schedule.base_lrs, factors, strict=True)]
        except Exception as error:  # as in `_advance_schedule`
            return f"the schedule raises {type(error).__name__}: {error}"
        return _reason_against(rates)

    @property
    def counters(self) -> dict[nn.Parameter, torch.Tensor]:
        """Torch's count of the steps of each page; on the device for fused optimizers."""
        return {page: self.optimizer.state[page]["step"] for page in self.parameters}

    def _can_join(self) -> bool:
        """Whether the next step is one of plain AdamW over the pages of a slab, that nobody listens to."""
        if self.slab is None or type(self.optimizer) is not torch.optim.AdamW or _has_step_hooks(self.optimizer):
            return False
        if any(page.grad is None or page.dtype not in DTYPES for page in self.parameters):
            return False
        return all(_is_plain(group) for group in self.optimizer.param_groups)

    def _count(self, page: nn.Parameter, counter: torch.Tensor) -> int:
        """Return the steps taken, for which a counter on the device is read only after somebody else changed it."""
        known = self._counts.get(page)
        if known is None or known.counter is not counter or known.version != counter._version:
            known = self._counts[page] = _Count(counter, counter._version, int(counter.item()))
        return known.value

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        # Zeroed in place in a slab, where they are views of one buffer that sums and graphs refer to.
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


class _Count(NamedTuple):
    """What was last known of a step counter.

    Attributes:
        counter: the step counter of torch's optimizer.
        version: version of the counter's content, which every write to it changes.
        value: number of steps taken.
    """

    counter: torch.Tensor
    version: int
    value: int


def gradient_norms(optimizers: Sequence[TaskOptimizer]) -> list[torch.Tensor]:
    """Return the gradient norm of every task, in one call for all where the device has such a one."""
    if any(multi_adamw.joint_update(optimizer.parameters[0].device) is None for optimizer in optimizers):
        return [optimizer.gradient_norm() for optimizer in optimizers]
    return multi_adamw.total_norms([optimizer.gradients for optimizer in optimizers])


@torch.no_grad()
def joint_steps_taken(optimizers: Sequence[TaskOptimizer]) -> None:
    """Count a step in the state of these optimizers, whose arithmetic a joint update has done."""
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for optimizer in optimizers:
        for counter in optimizer.counters.values():
            by_device[counter.device].append(counter)
    for counters in by_device.values():
        # One launch for all counters of a device, instead of one each.
        torch._foreach_add_(counters, 1)


def _reason_against(rates: Sequence[Any]) -> str:
    # A power of a negative number with a fraction is complex.
    wrong = [rate for rate in rates if not isinstance(rate, (int, float)) or not 0 <= rate < float("inf")]
    return f"the learning rate is {wrong[0]}" if wrong else ""


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_hooks._global_optimizer_pre_hooks,
        torch_hooks._global_optimizer_post_hooks,
    )
    return any(hooks)


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether a parameter group of AdamW has numbers for settings, and none of the variants."""
    numbers = (group["lr"], group["eps"], group["weight_decay"], *group["betas"])
    variants = ("amsgrad", "maximize", "capturable", "differentiable")
    return not any(isinstance(number, torch.Tensor) for number in numbers) and not any(group[key] for key in variants)


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
