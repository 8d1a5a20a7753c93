"""One optimizer, schedule and gradient norm per task, and checks of their settings before any weight is read.

Global clipping would couple tasks, because one NaN makes every norm NaN. Stepping an idle task would change its weights
even with zero gradients, because of momentum and weight decay. Therefore each task is clipped and stepped separately.
On CUDA the AdamW steps of all tasks are one call (`peft_mux.kernels.adamw`): each task's optimizer keeps its settings
and state, and only the arithmetic is done jointly.

A task steps only if its loss and gradient norm are both finite (promise 2 of the design). `LastFiniteWeights` keeps the
weights that passed this test, so that a task whose step produced NaN weights is restored to its last good adapter.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import optimizer as torch_hooks
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import SchedulerType, Trainer, get_constant_schedule, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from peft_mux.arguments import ELEMENTWISE, PLATEAU, MultiTaskTrainingArguments
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.kernels import adamw
from peft_mux.kernels.adamw import DTYPES, PageUpdate
from peft_mux.modeling.slabs import PAGE_KINDS, PageKind, TaskSlab, loraplus_kind, plain_kind
from peft_mux.task import HyperParameters, task_arguments


class LastFiniteWeights:
    """A copy of a task's weights from when its loss and gradients were last finite.

    Args:
        parameters: the task's parameters by name; copied immediately, because a task that fails at its first step is
            restored to its initial weights.

    Attributes:
        weights: the copies by name; updates and checkpoints hold references to these tensors.
        copies: the same copies, by parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.copies = dict(zip(parameters.values(), self.weights.values(), strict=True))

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current weights, which have given a finite loss and gradients."""
        torch._foreach_copy_(list(self.copies.values()), [p.detach() for p in self.copies])

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copies."""
        torch._foreach_copy_([p.detach() for p in self.copies], list(self.copies.values()))


def non_finite_reason(loss: float, gradient_norm: float) -> str | None:
    """Return why a task must not step, or `None` if its loss and gradient norm are finite."""
    for what, value in (("loss", loss), ("gradient norm", gradient_norm)):
        if not math.isfinite(value):
            return f"non_finite: {what} is {value}"
    return None


LORAPLUS_EMBEDDING_RATE = 1e-6
"""Learning rate of embedding factors in LoRA+ (PEFT's default), independent of the task's learning rate."""


def page_kind_of(hyper: HyperParameters) -> PageKind:
    """Return how the parameters of a task are divided into groups with one learning rate and one weight decay."""
    return plain_kind if hyper.loraplus_lr_ratio is None else loraplus_kind


class _Count(NamedTuple):
    """Host copy of a step counter: the tensor, its version (which every write changes), and its value."""

    counter: torch.Tensor
    version: int
    value: int


class TaskOptimizer:
    """The optimizer and schedule of one task, for its own parameters only.

    Args:
        name: the name of the task, for messages.
        parameters: the task's parameters by name.
        hyper: the complete settings of the task.
        num_steps: optimizer steps that the task will take, for the schedule.
        args: the run's arguments, interpreted as in Trainer.
        slab: the pages that contain the parameters. Element-wise optimizers step whole pages instead of parameters.

    Attributes:
        optimizer: torch's optimizer.
        schedule: torch's schedule of the learning rate.
        parameters: the tensors that the optimizer steps: parameters or pages.
        kinds: for each parameter group one of `PAGE_KINDS`.
        keeper: rank of the process that keeps the state and takes the steps (`OptimizerShards`).
        steps_here: whether this process does; it does by default.
        failure: why no further step is possible, if the schedule has no valid learning rate for it; else empty.

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
        """Build both as Trainer would for this task."""
        own_args = task_arguments(hyper, args)
        # Optimizers that use the shape or norm of a parameter cannot step pages of several parameters.
        self.slab = slab if hyper.optim in ELEMENTWISE else None
        if self.slab is not None:
            by_kind = [(page.values, page.kind) for page in self.slab.pages]
        else:
            kinds = {id(parameter): page.kind for page in (slab.pages if slab else ()) for parameter in page.parameters}
            by_kind = [(parameter, kinds.get(id(parameter), PAGE_KINDS[0])) for parameter in parameters.values()]
        # As in Trainer, biases and norms do not decay.
        multiplied = hyper.learning_rate * (hyper.loraplus_lr_ratio or 1.0)
        rates = {"lora_embedding": LORAPLUS_EMBEDDING_RATE, "lora_B": multiplied, "lora_B_stays": multiplied}
        self.kinds = [kind for kind in PAGE_KINDS if any(kind_of_item == kind for _, kind_of_item in by_kind)]
        groups: list[dict[str, Any]] = [
            {
                "params": [item for item, kind_of_item in by_kind if kind_of_item == kind],
                "weight_decay": 0.0 if kind.endswith("stays") else hyper.weight_decay,
                **({"lr": rates[kind]} if kind in rates else {}),
            }
            for kind in self.kinds
        ]
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self.max_grad_norm = hyper.max_grad_norm
        self.keeper, self.steps_here = 0, True
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
        # Each library raises different errors for unsupported settings.
        except Exception as error:
            raise ConfigError(
                f"tasks.{name}: optim={hyper.optim!r} with lr_scheduler_type={hyper.lr_scheduler_type!r} cannot be "
                f"built: {error}"
            ) from error

    @classmethod
    def adamw(cls, slab: TaskSlab) -> TaskOptimizer:
        """Return AdamW over the pages of a slab, for settings that are given before every step (`use`)."""
        made = cls.__new__(cls)
        made.slab, made.max_grad_norm = slab, 0.0
        made.keeper, made.steps_here, made.failure, made._counts = 0, True, "", {}
        made.kinds = [kind for kind in PAGE_KINDS if any(page.kind == kind for page in slab.pages)]
        groups = [[page.values for page in slab.pages if page.kind == kind] for kind in made.kinds]
        made.parameters = [values for group in groups for values in group]
        made.optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        made.schedule = get_constant_schedule(made.optimizer)
        return made

    def use(
        self, *, learning_rate: float, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float
    ) -> None:
        """Set what the next step of AdamW reads; biases and norms do not decay."""
        self.max_grad_norm = max_grad_norm
        for kind, group in zip(self.kinds, self.optimizer.param_groups, strict=True):
            decay = 0.0 if kind.endswith("stays") else weight_decay
            group.update(lr=learning_rate, betas=betas, eps=eps, weight_decay=decay)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.schedule.get_last_lr()[0])

    def require_own_parameters(self) -> None:
        """Raise a `ConfigError` if the optimizer holds other tensors than the task's, as after `add_param_group`."""
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not held.issubset(map(id, self.parameters)):
            raise ConfigError(
                "the optimizer must hold the weights of its task only, got others too. Leave its param_groups as they "
                "are, and name all modules to train in peft_config."
            )

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Gradients of the parameters that took part in the step."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def gradient_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients of the task, without waiting for the device."""
        return nn.utils.get_total_norm(self.gradients)

    def step(self, gradient_norm: torch.Tensor) -> None:
        """Clip to `max_grad_norm` (unless it is 0), update the parameters, and advance the schedule.

        Args:
            gradient_norm: norm of the whole gradient, which may be spread over processes.
        """
        # On a CPU, skip a factor of 1, which saves a pass over the gradients. On other devices the check would wait.
        is_short = gradient_norm.is_cpu and bool(self.max_grad_norm / (gradient_norm + 1e-6) >= 1)
        if self.max_grad_norm > 0 and not is_short:
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, gradient_norm)
        self.optimizer.step()
        self.advance_schedule()
        self.zero_gradients()

    def skip_step(self) -> None:
        """Advance the schedule for a step that another process takes."""
        self.optimizer._opt_called = True  # otherwise the schedule warns about a wrong order
        self.advance_schedule()
        self.zero_gradients()

    def advance_schedule(self) -> None:
        """Set the learning rate of the next step; an invalid rate fails this task, not the run."""
        if self.follows_metric:
            return
        try:
            self.schedule.step()
            fault = _rate_fault(self.schedule.get_last_lr())
        except Exception as error:  # the schedule's formula with the user's numbers
            fault = f"the schedule raises {type(error).__name__}: {error}"
        self.failure = f"learning_rate: {fault}" if fault else ""

    @property
    def follows_metric(self) -> bool:
        """Whether evaluations, rather than steps, change the learning rate."""
        return isinstance(self.schedule, ReduceLROnPlateau)

    def follow(self, value: float) -> None:
        """Set the learning rate by the metric of an evaluation, if the schedule follows one."""
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(value)

    def rates_at(self, step: int) -> list[float]:
        """Return the learning rate of each parameter group after a number of steps, without advancing the schedule.

        One that follows a metric has the rates that its evaluations have given.
        """
        if self.follows_metric:
            return [float(group["lr"]) for group in self.optimizer.param_groups]
        factors = [factor(step) for factor in self.schedule.lr_lambdas]
        return [base * factor for base, factor in zip(self.schedule.base_lrs, factors, strict=True)]

    def go_on_from(self, step: int) -> None:
        """Set the learning rate to that of this schedule after a number of steps, even if another one was used."""
        self.schedule.last_epoch, self.schedule._step_count = step, step + 1
        self.schedule._last_lr = rates = self.rates_at(step)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        fault = _rate_fault(rates)
        self.failure = f"learning_rate: {fault}" if fault else ""

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        # In place if there is a slab, because sums and graphs refer to its buffer.
        self.optimizer.zero_grad(set_to_none=self.slab is None)

    def release(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.slab is not None:
            self.slab.drop_gradients()

    # ------------------------------------------------------------------ joint steps of many tasks

    def page_updates(self, task: int, last_finite: LastFiniteWeights | None) -> list[PageUpdate]:
        """Return the page updates of this task for a joint step; an empty list if the task must step by itself.

        The state of the optimizer is created if necessary.

        Args:
            task: column of the task among the verdicts.
            last_finite: receives the weights before the update; `None` to keep none.
        """
        if not self.steps_here or not self._can_join():
            return []
        updates = []
        for group in self.optimizer.param_groups:
            values, gradients, exp_avgs, exp_avg_sqs, counters = [], [], [], [], []
            new = [page for page in group["params"] if not self.optimizer.state.get(page)]
            # Uses torch's own method to create and collect state, so that it is the same as after a torch step.
            self.optimizer._init_group(group, values, gradients, exp_avgs, exp_avg_sqs, [], counters)
            for page in new:  # a new counter is 0; reading it would wait for the device
                counter = self.optimizer.state[page]["step"]
                self._counts[page] = _Count(counter, counter._version, 0)
            columns = zip(values, gradients, exp_avgs, exp_avg_sqs, counters, strict=True)
            for page, gradient, exp_avg, exp_avg_sq, counter in columns:
                known = self._counts.get(page)
                if known is None or known.counter is not counter or known.version != counter._version:
                    # Other code has changed the counter, so it is read, which waits for the device.
                    known = self._counts[page] = _Count(counter, counter._version, int(counter.item()))
                update = PageUpdate(
                    page,
                    gradient,
                    exp_avg,
                    exp_avg_sq,
                    page if last_finite is None else last_finite.copies[page],
                    task=task,
                    step=known.value + 1,
                    rate=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    max_grad_norm=self.max_grad_norm,
                )
                updates.append(update)
        return updates

    def _can_join(self) -> bool:
        """Whether the next step is a plain AdamW step over the pages of a slab, and no hook listens to it."""
        if self.slab is None or type(self.optimizer) is not torch.optim.AdamW:
            return False
        own_hooks = self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks
        if own_hooks or torch_hooks._global_optimizer_pre_hooks or torch_hooks._global_optimizer_post_hooks:
            return False
        if any(page.grad is None or page.dtype not in DTYPES for page in self.parameters):
            return False
        for group in self.optimizer.param_groups:
            numbers = (group["lr"], group["eps"], group["weight_decay"], *group["betas"])
            if any(isinstance(number, torch.Tensor) for number in numbers):
                return False
            if any(group[variant] for variant in ("amsgrad", "maximize", "capturable", "differentiable")):
                return False
        return True


@torch.no_grad()
def count_joint_steps(optimizers: Sequence[TaskOptimizer]) -> None:
    """Increment the step counters of these optimizers after a joint update."""
    counters = {
        (optimizer, page): optimizer.optimizer.state[page]["step"]
        for optimizer in optimizers
        for page in optimizer.parameters
    }
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for counter in counters.values():
        by_device[counter.device].append(counter)
    for device_counters in by_device.values():  # one launch for all counters of a device
        torch._foreach_add_(device_counters, 1)
    for (optimizer, page), counter in counters.items():
        # A later write by other code changes the version again.
        optimizer._counts[page] = _Count(counter, counter._version, optimizer._counts[page].value + 1)
        optimizer.optimizer._opt_called = True  # otherwise the schedule warns about a wrong order


def gradient_norms(optimizers: Sequence[TaskOptimizer]) -> list[torch.Tensor]:
    """Return the gradient norm of every task, in one call for all tasks if the device supports it."""
    if any(adamw.joint_update(optimizer.parameters[0].device) is None for optimizer in optimizers):
        return [optimizer.gradient_norm() for optimizer in optimizers]
    return adamw.total_norms([optimizer.gradients for optimizer in optimizers])


def _rate_fault(rates: Sequence[Any]) -> str:
    """Return why learning rates are invalid, or an empty string."""
    # A fractional power of a negative number is complex.
    wrong = [rate for rate in rates if not isinstance(rate, (int, float)) or not 0 <= rate < float("inf")]
    return f"the learning rate is {wrong[0]}" if wrong else ""


# ---------------------------------------------------------------------- checks

_ADEMAMIX = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
_LOW_BIT = ("block_size", "bf16_stochastic_round")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    # Without weight_decay, which Trainer parses here although its parameter groups override it.
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
"""The options that Trainer reads from `optim_args`, by optimizer; none for optimizers that are not listed."""

_SWITCHES = ("nesterov", "centered", "use_kahan_summation", "bf16_stochastic_round")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_NUM_PROBES = 256


def check_optimizer(name: str, hyper: HyperParameters, num_steps: int, args: MultiTaskTrainingArguments) -> None:
    """Build a task's optimizer and schedule as a trial, and compute the learning rates of some steps.

    Trainer ignores options that an optimizer does not know, and schedules compute learning rates only when they step.
    Both are checked here, so that mistakes are reported before training.

    Args:
        name: the name of the task.
        hyper: the complete settings of the task.
        num_steps: optimizer steps that the task will take.
        args: the run's arguments, interpreted as in Trainer.

    Raises:
        ConfigError: if options are unknown, the optimizer or schedule cannot be built, or learning rates are invalid.
    """
    where = f"tasks.{name}"
    raise_faults(_option_faults(hyper, where))
    trial = TaskOptimizer(name, {"trial": nn.Parameter(torch.zeros(1, 1))}, hyper, num_steps, args)
    # The first steps, the last one, and some evenly in between. The rate after the last step is never used.
    some = range(0, num_steps, max(1, num_steps // _NUM_PROBES))
    for step in sorted({0, min(1, num_steps - 1), num_steps - 1, *some}):
        try:
            fault = _rate_fault(trial.rates_at(step))
        except Exception as error:  # as in `advance_schedule`
            fault = f"the schedule raises {type(error).__name__}: {error}"
        if fault:
            got = f"{shown(hyper.lr_scheduler_kwargs or {})} for lr_scheduler_type={hyper.lr_scheduler_type!r}"
            allowed = "options whose learning rate is finite and at least 0 at every step"
            fix = f"At step {step} of {num_steps} {fault}."
            raise_faults([Fault(f"{where}.lr_scheduler_kwargs", got, allowed, fix)])


def _option_faults(hyper: HyperParameters, where: str) -> list[Fault]:
    """Return the errors in the names and values of `optim_args` and `lr_scheduler_kwargs`."""
    args_where, known = f"{where}.optim_args", OPTIONS.get(hyper.optim, ())
    faults, seen = [], set()
    for pair in (hyper.optim_args or "").replace(" ", "").split(",") if hyper.optim_args else ():
        key, separator, value = pair.partition("=")
        words, allowed = ("true", "false", "none"), "a finite number"
        if key in _SWITCHES:  # Trainer parses any other word as false
            words, allowed = ("true", "false", "1", "0", "yes", "no"), "true or false"
        if not separator or not key or not value or "=" in value or key in seen:
            faults.append(Fault(args_where, shown(pair), 'options as "key=value,key=value", each once'))
        elif key not in known:
            faults.append(_unknown_option(args_where, key, known, f'optim="{hyper.optim}"', hyper))
        elif value.lower() not in words and (key in _SWITCHES or not (_NUMBER.fullmatch(value) or "dtype" in key)):
            faults.append(Fault(f"{args_where}.{key}", shown(value), allowed))
        seen.add(key)
    if hyper.lr_scheduler_type == PLATEAU and not hyper.eval_steps:
        allowed = f"held-out rows that are evaluated, because lr_scheduler_type is {PLATEAU}"
        faults.append(Fault(f"{where}.eval_dataset", "none", allowed))
    kwargs_where, schedule, known = f"{where}.lr_scheduler_kwargs", hyper.lr_scheduler_type, ()
    if schedule not in ("constant", "constant_with_warmup"):  # Trainer passes no options to these
        makes = ReduceLROnPlateau if schedule == PLATEAU else TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(schedule)]
        parameters = inspect.signature(makes).parameters
        given_by_trainer = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
        known = tuple(option for option in parameters if option not in given_by_trainer)
    for key, value in (hyper.lr_scheduler_kwargs or {}).items():
        if key not in known:
            faults.append(_unknown_option(kwargs_where, key, known, f'lr_scheduler_type="{schedule}"', hyper))
        elif isinstance(value, float) and not math.isfinite(value):  # some schedules would treat it as 0
            faults.append(Fault(f"{kwargs_where}.{key}", repr(value), "a finite number"))
    return faults


def _unknown_option(where: str, key: object, known: Collection[str], whose: str, hyper: HyperParameters) -> Fault:
    allowed = f"one of {', '.join(known)} for {whose}" if known else f"left out for {whose}"
    is_field = isinstance(key, str) and hasattr(hyper, key)
    return Fault(where, shown(key), allowed, f"Set {key} itself." if is_field else closest(str(key), known))
