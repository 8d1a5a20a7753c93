"""What keeps a task's numerical failure its own: verdicts before any step, and a way back (promise 2 of the design).

A step is taken only when a task's loss and gradient norm are both finite. The weights that passed this test are kept
aside before the step changes them, so that a task whose step blew it up can be put back to its last good adapter.
"""

# MERGED: One optimizer, schedule and gradient norm per task: nothing of one task's step depends on another's.
# MERGED: Global clipping would couple tasks (one NaN makes every norm NaN), and stepping an idle task would move it
# MERGED: (AdamW's
# MERGED: momentum and decay act on zero gradients), so both are done task by task. On CUDA the AdamW steps of all
# MERGED: tasks are one
# MERGED: launch all the same (`peft_mux.kernels.adamw`): each task's optimizer keeps its settings and its state,
# MERGED: and only the arithmetic is done for it.
# MERGED: What a task asks of its optimizer and schedule, tried out before any weight is read.
# MERGED: Trainer passes over options that an optimizer does not know, and schedules compute their rates only when
# MERGED: they step, so
# MERGED: both are looked at here: a mistake is told at once, and not by the step at which it would show.

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import optimizer as torch_hooks
from transformers import SchedulerType, Trainer, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from peft_mux.arguments import ELEMENTWISE, MultiTaskTrainingArguments
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.kernels import adamw as multi_adamw
from peft_mux.kernels.adamw import DTYPES, PageUpdate
from peft_mux.modeling.slabs import TaskSlab, decays
from peft_mux.task import HyperParameters, task_arguments


class LastGood:
    """A copy of a task's weights from when its loss and gradients were last seen to be finite.

    Args:
        parameters: the task's parameters by name; copied at once when they are finite.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the initial weights."""
        self._parameters = dict(parameters)
        # The initial weights are good: a task that fails at its first step goes back to them.
        self._copy = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def keep(self) -> None:
        """Take over the present weights, which have just proven good."""
        # In place, as updates and checkpoints hold these very tensors.
        torch._foreach_copy_(list(self._copy.values()), [p.detach() for p in self._parameters.values()])

    @torch.no_grad()
    def restore(self) -> None:
        """Put the kept weights back."""
        torch._foreach_copy_([p.detach() for p in self._parameters.values()], list(self._copy.values()))

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the kept copy of a parameter, for an update that keeps and steps in one pass.

        Raises:
            KeyError: if the parameter is not among those that are kept.
        """
        for name, own in self._parameters.items():
            if own is parameter:
                return self._copy[name]
        raise KeyError("the parameter is not among those of this task")

    def state(self) -> dict[str, torch.Tensor]:
        """Return the kept weights by name."""
        return self._copy

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over weights that `state` returned."""
        for name, tensor in self._copy.items():
            tensor.copy_(state[name])


def non_finite_reason(loss: float, gradient_norm: float) -> str | None:
    """Return why a task must not step, or `None` when its loss and gradient norm are finite."""
    for what, value in (("loss", loss), ("gradient norm", gradient_norm)):
        if value != value or value in (float("inf"), float("-inf")):
            return f"non_finite: {what} is {value}"
    return None


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


_ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
_LOW_BIT = ("block_size", "bf16_stochastic_round")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    # Without weight_decay, which Trainer would read here and its parameter groups override.
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
    "ademamix": _ADEMAMIX,
    "ademamix_8bit": _ADEMAMIX,
    "paged_ademamix_32bit": _ADEMAMIX,
    "paged_ademamix_8bit": _ADEMAMIX,
    "adamw_anyprecision": (
        "use_kahan_summation",
        "momentum_dtype",
        "variance_dtype",
        "compensation_buffer_dtype",
    ),
    "adamw_torch_4bit": _LOW_BIT,
    "adamw_torch_8bit": _LOW_BIT,
    "grokadamw": ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"),
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
}
"""What Trainer reads of `optim_args`, by optimizer; nothing for those that are not named."""

_SWITCHES = ("nesterov", "centered", "use_kahan_summation", "bf16_stochastic_round")
_WITHOUT_OPTIONS = ("constant", "constant_with_warmup")
_GIVEN_BY_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
_NUM_PROBES = 256


def check_optimizer(name: str, hyper: HyperParameters, num_steps: int, args: MultiTaskTrainingArguments) -> None:
    """Build a task's optimizer and schedule in trial, and look at the rates of the whole run.

    Args:
        name: the name of the task.
        hyper: the complete settings of the task.
        num_steps: optimizer steps that the task will take.
        args: the run's arguments, read as Trainer reads them.

    Raises:
        ConfigError: naming options that are not known, what cannot be built, and rates that cannot be trained with.
    """
    where = f"tasks.{name}"
    raise_faults([*_option_faults(hyper, where), *_schedule_option_faults(hyper, where)])
    trial = TaskOptimizer(name, {"trial": nn.Parameter(torch.zeros(1, 1))}, hyper, num_steps, args)
    raise_faults(_rate_faults(trial, hyper, num_steps, where))


def _option_faults(hyper: HyperParameters, where: str) -> list[Fault]:
    """Return what is wrong with `optim_args`."""
    where, known = f"{where}.optim_args", OPTIONS.get(hyper.optim, ())
    faults, seen = [], set()
    for pair in (hyper.optim_args or "").replace(" ", "").split(",") if hyper.optim_args else ():
        key, separator, value = pair.partition("=")
        if not separator or not key or not value or "=" in value or key in seen:
            faults.append(Fault(where, shown(pair), 'options as "key=value,key=value", each once'))
        elif key not in known:
            faults.append(_unknown(where, key, known, f'optim="{hyper.optim}"', hyper))
        elif not _is_valid(key, value):
            allowed = "true or false" if key in _SWITCHES else "a finite number"
            faults.append(Fault(f"{where}.{key}", shown(value), allowed))
        seen.add(key)
    return faults


def _is_valid(key: str, value: str) -> bool:
    """Whether a value is one of those that Trainer would not take for another."""
    if key in _SWITCHES:
        return value.lower() in ("true", "false", "1", "0", "yes", "no")
    try:
        return math.isfinite(float(value))
    except ValueError:
        # Types of numbers, and words: whoever makes the optimizer knows them.
        return key.endswith("dtype") or value.lower() in ("true", "false", "none")


def _schedule_option_faults(hyper: HyperParameters, where: str) -> list[Fault]:
    """Return what is wrong with the names in `lr_scheduler_kwargs`, and numbers that some schedules take for 0."""
    where, known = f"{where}.lr_scheduler_kwargs", schedule_options(hyper.lr_scheduler_type)
    given = hyper.lr_scheduler_kwargs or {}
    whose = f'lr_scheduler_type="{hyper.lr_scheduler_type}"'
    return [
        *(_unknown(where, key, known, whose, hyper) for key in given if key not in known),
        *(
            Fault(f"{where}.{key}", repr(value), "a finite number")
            for key, value in given.items()
            if isinstance(value, float) and not math.isfinite(value)
        ),
    ]


def schedule_options(lr_scheduler_type: str) -> tuple[str, ...]:
    """Return which options a schedule takes beside the numbers of steps.

    Args:
        lr_scheduler_type: Trainer's name of the schedule.
    """
    if lr_scheduler_type in _WITHOUT_OPTIONS:  # Trainer hands none on to these
        return ()
    parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(lr_scheduler_type)]).parameters
    return tuple(name for name in parameters if name not in _GIVEN_BY_TRAINER)


def _unknown(where: str, key: object, known: Collection[str], whose: str, hyper: HyperParameters) -> Fault:
    allowed = f"{', '.join(known)} for {whose}" if known else f"none for {whose}"
    is_field = isinstance(key, str) and hasattr(hyper, key)
    return Fault(where, shown(key), allowed, f"Set {key} itself." if is_field else closest(str(key), known))


def _rate_faults(trial: TaskOptimizer, hyper: HyperParameters, num_steps: int, where: str) -> list[Fault]:
    """Return a fault for the first step whose rate cannot be computed, is not finite, or is negative."""
    for step in _probed_steps(num_steps):
        reason = trial.reason_against_rate(step)
        if reason:
            got = f"{shown(hyper.lr_scheduler_kwargs or {})} for lr_scheduler_type={hyper.lr_scheduler_type!r}"
            allowed = "options whose learning rate is finite and at least 0 at every step"
            return [Fault(f"{where}.lr_scheduler_kwargs", got, allowed, f"At step {step} of {num_steps} {reason}.")]
    return []


def _probed_steps(num_steps: int) -> Iterator[int]:
    """Yield the first steps, the last one, and some evenly in between; all of them in a short run."""
    # Not the rate after the last step, which the schedule computes too: nothing is trained with it.
    yield from sorted({0, min(1, num_steps - 1), num_steps - 1, *range(0, num_steps, max(1, num_steps // _NUM_PROBES))})
