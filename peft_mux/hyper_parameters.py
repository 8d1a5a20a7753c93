"""Hyper-parameters of a task, and the rules that their values keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from peft_mux.errors import Fault, is_integer, is_real, raise_faults, shown
from peft_mux.moved_names import refuse_unknown
from peft_mux.user_code import printable


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperParameters:
    """A task's settings with the gaps filled from the run's arguments.

    Names are those of `Task`; those that it has in common with `transformers.TrainingArguments` mean the same as there.
    Steps are optimizer steps of this task.

    Attributes:
        train_batch_size: number of sequences of a global batch, over all processes.
        learning_rate: learning rate after the warm-up.
        num_train_epochs: number of passes over the rows; counts where `max_steps` is -1.
        max_steps: number of steps of the task, or -1 for as many as the epochs have.
        weight_decay: weight decay of the optimizer.
        lr_scheduler_type: Trainer's name of the schedule of the learning rate.
        lr_scheduler_kwargs: further options of the schedule; `None` for none.
        warmup_steps: number of steps of the warm-up, or their share of all steps where it is below 1.
        max_grad_norm: norm to which the gradient of the task is clipped; 0 for no clipping.
        optim: Trainer's name of the optimizer.
        optim_args: further options of the optimizer as "key=value,key=value"; `None` for none.
        adam_beta1: decay of Adam's mean of gradients.
        adam_beta2: decay of Adam's mean of squared gradients.
        adam_epsilon: what Adam adds to the root in its denominator.
        seed: fixes the adapter's initial weights, the order of the rows and the dropout.
        max_length: number of tokens of a row after which `overlong_policy` applies.
        eval_steps: evaluate every so many steps; 0 for never, -1 for at the end of each epoch, below 1 for a share of
            all steps of the task.
        save_steps: write a checkpoint of this task alone every so many steps; 0 for never, below 1 for such a share.
        data_timeout_s: seconds for which the others wait for a stream of this task before it fails.
        eval_delay: steps, or epochs where it evaluates at their ends, before the first evaluation.
        eval_on_start: whether it is evaluated before its first step as well.
        load_best_model_at_end: whether it ends with the adapter of its best evaluation.
        metric_for_best_model: the metric that tells the best evaluation; `None` where nobody asks.
        greater_is_better: whether a greater one is better; `None` for what the name of the metric tells.
        label_smoothing_factor: share of the loss that all words of the vocabulary have alike.
        neftune_noise_alpha: strength of the noise on the embeddings of its tokens in training; 0 for none.
    """

    train_batch_size: int
    learning_rate: float
    num_train_epochs: float
    max_steps: int
    weight_decay: float
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, Any] | None
    warmup_steps: float
    max_grad_norm: float
    optim: str
    optim_args: str | None
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    seed: int
    max_length: int
    eval_steps: float
    save_steps: float
    data_timeout_s: float
    eval_delay: float = 0
    eval_on_start: bool = False
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float = 0.0


def hyper_parameter_faults(values: Any, where: str, *, but: Iterable[str] = ()) -> list[Fault]:
    """Return what is wrong with the numbers of a task or of the run's arguments.

    Args:
        values: object whose attributes carry `TrainingArguments` names; `None` and absent are skipped.
        where: prefix of the fields in messages, such as `tasks.sql`.
        but: names that mean something else in `values`; they are not read.
    """
    faults = []
    for name, (is_valid, allowed) in _NUMBER_RULES.items():
        if name in but:
            continue
        value = getattr(values, name, None)
        if value is not None and not is_valid(value):
            faults.append(Fault(f"{where}.{name}", shown(value), allowed))
    return faults


def supported_optimizers() -> list[str]:
    """Return the `optim` names of Trainer that can be held per task.

    Left out are optimizers that step inside the backward pass or layer by layer (LOMO, layer-wise kinds), that project
    modules named for the whole model (GaLore, APOLLO), and that swap weights for evaluation (schedule-free).
    """
    from transformers.training_args import OptimizerNames

    names = [str(option.value) for option in OptimizerNames]
    refused = ("lomo", "galore", "apollo", "layerwise", "schedule_free")
    return [name for name in names if not any(part in name for part in refused)]


def supported_schedules() -> list[str]:
    """Return the `lr_scheduler_type` names of Trainer that depend on the step alone."""
    from transformers import SchedulerType

    refused = ("reduce_lr_on_plateau", "greedy")
    return [str(kind.value) for kind in SchedulerType if str(kind.value) not in refused]


MOST_STEPS = 10**9
"""Steps of a task, and the greatest count that is taken anywhere: beyond it is a slip, or more than memory holds."""


def _integer(minimum: int, maximum: int = MOST_STEPS) -> tuple[Callable[[Any], bool], str]:
    return lambda value: is_integer(value) and minimum <= value <= maximum, f"an integer from {minimum} to {maximum}"


def _real(minimum: float) -> tuple[Callable[[Any], bool], str]:
    return lambda value: is_real(value) and value >= minimum, f"a finite number of at least {minimum:g}"


def is_interval(value: object, minimum: int = 1) -> bool:
    """Whether a value is a number of steps of at least `minimum`, or a share of all steps, as in Trainer."""
    if is_integer(value):
        return minimum <= value <= MOST_STEPS  # type: ignore[operator]
    return is_real(value) and (0 < value < 1 or (value == int(value) and is_interval(int(value), minimum)))  # type: ignore[operator, arg-type]


def _interval(minimum: int) -> tuple[Callable[[Any], bool], str]:
    allowed = f"an integer from {minimum} to {MOST_STEPS}, or a share of all steps above 0 and below 1"
    return lambda value: is_interval(value, minimum), allowed


def metric_key(name: str) -> str:
    """Return the key of a metric among those of an evaluation, as Trainer has it: with its prefix.

    Args:
        name: the metric, with or without that prefix, as own code calls it: it becomes one line that may be printed.
    """
    name = " ".join(printable(name).split())
    return name if name.startswith("eval_") else f"eval_{name}"


def greater_is_better(metric: str) -> bool:
    """Return whether a greater metric is the better one, as Trainer guesses by its name, and of the perplexity."""
    return not metric.endswith(("loss", "perplexity"))


def steps_of(interval: float, num_steps: int) -> int:
    """Return an interval in steps, as Trainer reads it: below 1 it is a share of all steps, rounded up.

    Args:
        interval: number of steps, or their share.
        num_steps: number of all steps.
    """
    return max(1, math.ceil(interval * num_steps)) if 0 < interval < 1 else int(interval)


_NUMBER_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "train_batch_size": _integer(1, 2**20),
    "learning_rate": (lambda value: is_real(value) and value > 0, "a finite number above 0"),
    "num_train_epochs": (
        lambda value: is_real(value) and 0 < value <= MOST_STEPS,
        f"a number above 0, at most {MOST_STEPS}",
    ),
    "max_steps": (
        lambda value: is_integer(value) and (1 <= value <= MOST_STEPS or value == -1),
        f"an integer from 1 to {MOST_STEPS}, or -1 for num_train_epochs",
    ),
    "weight_decay": _real(0),
    "warmup_steps": (
        lambda value: is_real(value) and 0 <= value <= MOST_STEPS,
        f"a number from 0 to {MOST_STEPS}",
    ),
    "max_grad_norm": _real(0),
    "adam_beta1": (lambda value: is_real(value) and 0 <= value < 1, "a number in [0, 1)"),
    "adam_beta2": (lambda value: is_real(value) and 0 <= value < 1, "a number in [0, 1)"),
    "adam_epsilon": _real(0),
    "seed": (lambda value: is_integer(value) and 0 <= value < 2**63, "an integer in [0, 2**63)"),
    "max_length": _integer(2),
    "num_labels": _integer(1, 2**20),
    "eval_steps": _interval(0),
    "save_steps": _interval(0),
    "eval_delay": _real(0),
    "data_timeout_s": (
        lambda value: is_real(value) and 0 < value <= 1e6,
        "a finite number of seconds above 0, at most 1,000,000",
    ),
    "label_smoothing_factor": (lambda value: is_real(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "neftune_noise_alpha": (
        lambda value: is_real(value) and 0 <= value <= MOST_STEPS,
        f"a number from 0 to {MOST_STEPS}, or None",
    ),
    "priority": _integer(-MOST_STEPS),
}


ELEMENTWISE = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
"""Optimizers that treat every element alike, so that it does not matter how weights are cut into tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStopping:
    """Stop a task when its metric has not improved for a while, and go back to its best adapter.

    Attributes:
        metric: key of an evaluation metric, `eval_loss` or one that `compute_metrics` returns.
        patience: evaluations without improvement after which the task stops.
        min_delta: change that counts as an improvement.
        greater_is_better: direction; by default `False` for names that end with `loss` or `perplexity`, else `True`.
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    greater_is_better: bool | None = None

    def __new__(cls, *args: Any, **settings: Any) -> EarlyStopping:
        """Refuse settings that there are not with the one that was meant, which Python would not."""
        refuse_unknown(settings, cls.__dataclass_fields__, "early_stopping")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: if the patience is not at least 1, the delta is negative, or a field is of a wrong type.
        """
        faults = []
        if not is_integer(self.patience, 1):
            faults.append(Fault("early_stopping.patience", shown(self.patience), "an integer of at least 1"))
        if not is_real(self.min_delta) or self.min_delta < 0:
            faults.append(Fault("early_stopping.min_delta", shown(self.min_delta), "a number of at least 0"))
        if not isinstance(self.metric, str) or not self.metric:
            faults.append(Fault("early_stopping.metric", shown(self.metric), "the name of a metric"))
        if self.greater_is_better is not None and not isinstance(self.greater_is_better, bool):
            faults.append(
                Fault("early_stopping.greater_is_better", shown(self.greater_is_better), "True, False or None")
            )
        raise_faults(faults)

    @property
    def maximise(self) -> bool:
        """Whether a greater metric is the better one."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return greater_is_better(self.metric)
