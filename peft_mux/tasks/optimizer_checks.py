"""What a task asks of its optimizer and schedule, tried out before any weight is read.

Trainer passes over options that an optimizer does not know, and schedules compute their rates only when they step, so
both are looked at here: a mistake is told at once, and not by the step at which it would show.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from transformers import SchedulerType
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import Fault, closest, raise_faults, shown
from peft_mux.hyper_parameters import HyperParameters
from peft_mux.tasks.optimizer import TaskOptimizer

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
