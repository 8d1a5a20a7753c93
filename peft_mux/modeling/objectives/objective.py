"""The loss of a task: `Objective`, its arguments, inputs and outputs, and output heads.

There are two levels. What a pass computes once for all its tasks, whatever their losses, belongs to the `OutputHead`:
for language models one linear cross-entropy over the targets of all tasks. An `Objective` is a pure function of what
that gave for *one* task in *one* micro-batch. A new one is a class in a file of this folder, registered there, and
imported in `__init__.py`::

    class MyLoss(Objective):
        name, loss_types = "my-loss", ("plain",)  # a task asks for it with Task(objective="my-loss")
        head, row_form = LANGUAGE_HEAD, LANGUAGE_ROWS

        def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
            return TaskLoss(outputs.mean_over_tokens(outputs.nll_M**2))

    register_objective(MyLoss())

A loss divides by sums over the task's *global* batch (`outputs.totals`), so no split into micro-batches and no number
of processes changes its gradient (promise 1 of the design).

Shape letters: T tokens, D hidden features; M targets, S sequences and R rows of a task in a micro-batch, C classes, K
numbers.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from peft_mux.data.batch import Columns, MuxBatch
from peft_mux.data.formats import RowForm
from peft_mux.data.task_batch import TaskBatch
from peft_mux.errors import Fault, closest, raise_faults, shown
from peft_mux.modeling.backbone.modules import HeadKind

# ------------------------------------------------------------------ arguments

T = TypeVar("T", bound="LossArgs")

_OF_THE_TASK = ("loss_type", "label_smoothing_factor")
"""Arguments that are fields of `Task` itself."""
_BEYOND_FLOATS = 2**1000
SEVERAL = "+"
"""Between the names of variants that are added up, if a loss may be several at once."""
_TYPE_WORDS = {float: "a finite number", int: "an integer", bool: "True or False", str: "a string", type(None): "None"}


@dataclass(frozen=True, kw_only=True)
class LossArgs:
    """Arguments of a loss, read from `Task.objective_args`; a subclass has a field with its default for each of them.

    Attributes:
        loss_type: which variant of the loss; it is `Task.loss_type`, and not in `Task.objective_args`.
        label_smoothing_factor: share of the loss that is equal for all words of the vocabulary; a field of `Task`, too.
    """

    loss_type: str = ""
    label_smoothing_factor: float = 0.0

    refused: ClassVar[Mapping[str, str]] = {}
    """Arguments that are known from TRL but not supported, with the reason and what to do instead."""
    needs_reference: ClassVar[bool] = False
    """Whether the loss needs the log-probabilities of the backbone without adapters (`TokenOutputs`)."""
    temperature: ClassVar[float] = 1.0
    """The number by which logits are divided before their log-probabilities are taken."""
    entropy_coef: ClassVar[float] = 0.0
    """Not 0 if the loss reads the entropy at each target (`TokenOutputs.entropy_M`)."""

    def faults(self, where: str) -> list[Fault]:
        """Return which arguments do not fit together; `where` is their path, `tasks.a.objective_args`."""
        return []


def argument(default: Any, allowed: str, holds: Callable[[Any], bool]) -> Any:
    """Return a field of `LossArgs`.

    Args:
        default: its value if nothing is set; `None` may always be given if it is the default.
        allowed: what may be given, for messages.
        holds: whether a value of the right type may be given.
    """
    return field(default=default, metadata={"allowed": allowed, "holds": holds})


def at_least(minimum: float, default: float | None) -> Any:
    """Return a field for a number from `minimum` on."""
    return argument(default, f"a finite number of at least {minimum:g}", lambda value: value >= minimum)


def above(minimum: float, default: float | None) -> Any:
    """Return a field for a number above `minimum`."""
    return argument(default, f"a finite number above {minimum:g}", lambda value: value > minimum)


def between(low: float, high: float, default: float | None) -> Any:
    """Return a field for a number from `low` to `high`."""
    return argument(default, f"a number from {low:g} to {high:g}", lambda value: low <= value <= high)


def read_args(args_class: type[T], given: object, loss_type: str, where: str) -> tuple[T | None, list[Fault]]:
    """Read the arguments of a loss.

    Args:
        args_class: the dataclass of the arguments.
        given: the value of `Task.objective_args`: a mapping, or `None` for nothing.
        loss_type: which variant of the loss, one of the loss's own.
        where: path for messages: `tasks.a.objective_args`.

    Returns:
        The arguments, `None` if there is a fault; and all faults.
    """
    if given is not None and (not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given)):
        return None, [Fault(where, shown(given), "a dict of arguments by name")]
    values: Mapping[str, Any] = given or {}
    known = {item.name: item for item in fields(args_class) if item.name not in _OF_THE_TASK and item.init}
    faults = []
    for name in values:
        if name in args_class.refused:
            fix = f"{name} is not supported: {args_class.refused[name]}."
            allowed = f"one of {', '.join(known)}" if known else "left out with this loss"
            faults.append(Fault(f"{where}.{name}", shown(values[name]), allowed, fix))
        elif name not in known:
            fix = f"Set Task.{name}." if name in _OF_THE_TASK else closest(name, list(known))
            allowed = f"one of {', '.join(known)}" if known else "left out with this loss"
            faults.append(Fault(f"{where}.{name}", "an unknown argument", allowed, fix))
    hints = get_type_hints(args_class)
    read = {}
    for name, item in known.items():
        hint = hints[name]
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if name in values:
            value = read[name] = _converted(values[name], kinds)
            holds = item.metadata.get("holds")
            if _fits(value, kinds) and (value is None or holds is None or holds(value)):
                continue
        elif item.default is not MISSING or item.default_factory is not MISSING:
            continue
        words = [
            " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else _TYPE_WORDS.get(kind, "a value")
            for kind in kinds
        ]
        got = shown(values[name]) if name in values else "nothing"
        faults.append(Fault(f"{where}.{name}", got, str(item.metadata.get("allowed", " or ".join(words)))))
    if faults:
        return None, faults
    args = args_class(loss_type=loss_type, **read)
    faults = args.faults(where)
    return (None if faults else args), faults


def _converted(value: Any, kinds: Sequence[Any]) -> Any:
    """Return lists of a file as the tuples that a frozen dataclass holds, and whole numbers as floats."""
    tuples = [kind for kind in kinds if get_origin(kind) is tuple]
    if isinstance(value, (list, tuple)) and tuples:
        return tuple(_converted(item, get_args(tuples[0])[:1]) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value) if abs(value) < _BEYOND_FLOATS else value
    return value


def _fits(value: Any, kinds: Sequence[Any]) -> bool:
    """Return whether a value is of one of some kinds: types, `Literal`s, tuples of one type, or functions."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    for kind in kinds:
        if get_origin(kind) is Literal:
            fits = value in get_args(kind)
        elif get_origin(kind) is tuple:
            fits = isinstance(value, tuple) and all(_fits(item, get_args(kind)[:1]) for item in value)
        elif isinstance(kind, type):
            fits = isinstance(value, kind) and not (kind in (int, float) and isinstance(value, bool))
        else:
            fits = callable(value)
        if fits:
            return True
    return False


# ------------------------------------------------- what losses read and return

REFERENCE = "ref_logprobs"
"""Token column with the log-probability of each target under the backbone without adapters; see `TokenOutputs`."""

WORDS = ("target_ids", "teacher_ids")
"""Token columns that name words whose log-probabilities are wanted in addition to that of the target."""

BATCH_VALUES = "batch_values"
"""Row value that holds sums over the global batch, which a pass before this one has made."""

ROUTER_TOTALS = "router_totals"
"""Row value that holds what routers did with the tokens of the global batch (`peft_mux.modeling.router_loss`)."""


class TaskLoss(NamedTuple):
    """The loss of one task in one micro-batch.

    Attributes:
        loss: fp32 scalar with gradient: this micro-batch's part of the mean over the task's global batch.
        statistics: fp32 `[K]` without gradient, parts of what is logged with the loss; `None` if there is nothing. Like
            the loss they are divided by sums over the global batch already, so that the parts of all micro-batches and
            processes add up to the figures of the step.
    """

    loss: torch.Tensor
    statistics: torch.Tensor | None = None


Statistics = tuple[torch.Tensor | None, ...]
"""Statistics `[K]` of each task of a stream; `None` for those whose loss has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutputs:
    """The fields that outputs of every kind of head have.

    Attributes:
        task: name of the task.
        step: index of the task's optimizer step, from 0.
        loss_weight: 1 / number of loss terms in the task's global batch.
        row_values: values of the rows, float32 `[R]`, by name.
        totals: sums over the task's global batch, by name: see `peft_mux.data.batch.batch_totals`.
        batch_values: `[K]` sums over the global batch of what `Objective.batch_values` returned; `None` if there are
            none.
    """

    task: str
    step: int
    loss_weight: float
    row_values: Columns = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    batch_values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs(TaskOutputs):
    """One task's targets in one micro-batch of a language model, in data order.

    Attributes:
        nll_M: negative log-likelihood of each target in nats, fp32 `[M]` with gradient.
        sequence_counts: number of targets of each of the S sequences.
        row_sequences: number of sequences of each of the R rows.
        columns: token columns of the rows at their targets, `[M]` or `[M, K]`, by name.
        word_logprobs_MK: fp32 `[M, K]` with gradient, log-probabilities of the words that a row names for each target
            (`target_ids`, `teacher_ids`); `None` if it names none.
        spread_M: fp32 `[M]` with gradient, by how many nats the mean over all words of their negative log-likelihood
            exceeds that of the target (`peft_mux.kernels.cross_entropy.linear`); `None` for tasks whose labels are not
            smoothed.
        entropy_M: fp32 `[M]` with gradient, entropy in nats of the distribution that each target is of; `None` for
            losses that do not read it.
        batch: the micro-batch that the targets belong to; `None` if no loss asks for their ids.
        index: number of the task in the micro-batch.
    """

    nll_M: torch.Tensor
    sequence_counts: tuple[int, ...]
    row_sequences: tuple[int, ...]
    batch: MuxBatch | None = None
    index: int = 0
    columns: Columns = field(default_factory=dict)
    word_logprobs_MK: torch.Tensor | None = None
    spread_M: torch.Tensor | None = None
    entropy_M: torch.Tensor | None = None

    @property
    def targets_M(self) -> torch.Tensor:
        """Token id of each target, int64 `[M]`."""
        assert self.batch is not None, "outputs that a pass has made know their micro-batch"
        start, end = self.batch.target_offsets[self.index], self.batch.target_offsets[self.index + 1]
        return self.batch.labels[0].index_select(0, self.batch.target_rows[start:end])

    @property
    def logprobs_M(self) -> torch.Tensor:
        """Log-probability of each target, fp32 `[M]` with gradient."""
        return -self.nll_M

    @property
    def reference_logprobs_M(self) -> torch.Tensor | None:
        """Log-probability of each target under the backbone without adapters, or as the rows bring it; else `None`."""
        return self.columns.get(REFERENCE)

    def by_sequence(self, values_M: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the part of values, one for each target, that belongs to each of the S sequences."""
        return values_M.split(list(self.sequence_counts))

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Number of targets of each of the R rows."""
        bounds = (0, *accumulate(self.row_sequences))
        return tuple(sum(self.sequence_counts[start:end]) for start, end in pairwise(bounds))

    def sequence_sums(self, values_M: torch.Tensor) -> torch.Tensor:
        """Return `[S]`, the sums of `values_M` over the targets of each sequence."""
        return _sums(values_M, self.sequence_counts)

    def row_sums(self, values_M: torch.Tensor) -> torch.Tensor:
        """Return `[R]`, the sums of `values_M` over the targets of each row."""
        return _sums(values_M, self.row_counts)

    def per_row(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return values of sequences as `[R, n]`, if every row has n sequences (2 for chosen and rejected)."""
        return values_S.view(len(self.row_sequences), -1)

    def mean_over_rows(self, terms_R: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's part of the mean of terms, one a row, over the global batch."""
        return terms_R.sum() / max(self.totals["num_rows"], 1.0)

    def mean_over_tokens(self, terms_M: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's part of the mean of terms, one a target, over the global batch."""
        return terms_M.sum() / max(self.totals["num_target_tokens"], 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutputs(TaskOutputs):
    """One task's sequences in one micro-batch of a classifier, in data order.

    Attributes:
        logits_SC: `[S, C]` with gradient.
        class_labels: class (int64) or value (float32) of each sequence, `[S]`.
        problem_type: what the backbone's configuration says of the labels, in the words of transformers; mostly `None`.
    """

    logits_SC: torch.Tensor
    class_labels: torch.Tensor | None
    problem_type: str | None = None


def common_fields(batch: MuxBatch, index: int) -> dict[str, Any]:
    """Return the fields of `TaskOutputs` for a task of a micro-batch, by its number in the stream."""
    values = dict(batch.row_values[index]) if batch.row_values else {}
    values.pop(ROUTER_TOTALS, None)
    return {
        "task": batch.task_names[index],
        "step": batch.task_steps[index],
        "loss_weight": batch.loss_weights[index],
        "batch_values": values.pop(BATCH_VALUES, None),
        "row_values": values,
        "totals": batch.totals[index] if batch.totals else {},
    }


def _sums(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    # Split, not scattered: in a fixed order on every device, and a NaN of one row stays in its own sum.
    parts = values.split(list(counts))
    return torch.stack([part.sum() for part in parts]) if parts else values.new_zeros(0)


# -------------------------------------------------------------- output heads


class OutputHead:
    """One kind of output head: its computation on a packed stream, for any loss.

    Methods get `model`, the `MultiTaskPeftModel` whose stream reads the micro-batch.

    Attributes:
        kind: which backbones end in such a head, and which tasks need one.
        example_label: class label of a made-up sequence; `None` if sequences need none.
    """

    kind: HeadKind
    example_label: int | None = None

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Create the task's trainable part of the head after its adapter was injected; by default nothing.

        Args:
            backbone: transformers model that holds the adapter.
            adapter: internal adapter id of the task.
            classes: number of classes of the task; `None` for the backbone's.
            seed: fixes the weights that are drawn.
            is_new: whether the backbone's own head was made at random rather than loaded.

        Raises:
            ConfigError: if the head cannot have so many classes.
        """

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Keep the backbone's base model from computing a part of the head by itself, during the `with` block."""
        return nullcontext()

    def outputs(
        self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any, smoothed: Collection[str] = ()
    ) -> Sequence[Any]:
        """Return what the losses of each task of a micro-batch read (`TaskOutputs`), computed once for all of them.

        Each depends only on rows of its own task, so that nothing of one task reaches another. Losses of `smoothed`
        tasks also read how likely all other words are (`TokenOutputs.spread_M`).
        """
        raise NotImplementedError

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> torch.Tensor:
        """Return the negative log-likelihoods `[M]` of all targets; only of language models."""
        raise NotImplementedError("passes of classifiers are not captured.")

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> list[torch.Tensor]:
        """Return the logits of every sequence in the order of the stream."""
        raise NotImplementedError

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels of every sequence in the order of the stream, as `compute_metrics` takes them.

        Args:
            batch: the rows of one task.
            micro_batch: the same rows, all of them, as a stream.
        """
        raise NotImplementedError


HEADS: dict[str, OutputHead] = {}
"""Every kind of head by the name of its kind."""


# -------------------------------------------------------------------- losses

OWN = "own"
"""Name of the entry that runs a user's own function."""


class Objective:
    """One loss; an entry of `OBJECTIVES`.

    Attributes:
        name: the `Task.objective` that asks for it.
        loss_types: its variants by their `Task.loss_type`, the default first.
        head: the output head that it reads.
        row_form: the form of the rows that it reads.
        refused_loss_types: variants that are known from TRL but not trained towards, and why.
        other_names: names under which TRL has it, or the names of what is closest to it, each with what to set instead.
        takes_several: whether `Task.loss_type` may be a list of variants, whose losses are added up.
        Args: the dataclass of its arguments.
        reference_columns: token columns or row values that make the pass without adapters needless, if rows bring all
            of them.
        is_default: whether tasks of its kind of head have it if nothing names another one.
        uses_totals: whether it divides by `TaskOutputs.totals`; otherwise by the number of terms (`loss_weight`).
        smoothed_loss_types: its variants with which `label_smoothing_factor` may be set, which its arguments then have.
        has_logits: whether `compute_metrics` may be given the logits and labels of its rows.
        prepass_sequence: which sequence of each row, from 0, is read only by passes without gradient; `None` for none.
        balances_routers: whether TRL adds the balancing loss of routers to it by default.
        statistics: the names of the K statistics of `TaskLoss`, those of TRL if it has them.
    """

    name: str
    loss_types: tuple[str, ...]
    head: OutputHead
    row_form: RowForm
    refused_loss_types: Mapping[str, str] = {}
    other_names: Mapping[str, str] = {}
    takes_several: bool = False
    Args: type[LossArgs] = LossArgs
    reference_columns: tuple[str, ...] = ()
    is_default: bool = False
    uses_totals: bool = True
    smoothed_loss_types: tuple[str, ...] = ()
    has_logits: bool = True
    prepass_sequence: int | None = None
    balances_routers: bool = False
    statistics: tuple[str, ...] = ()

    def rows(self, args: Any) -> RowForm:
        """Return the form of the rows that a variant of it reads."""
        return self.row_form

    def eager_reason(self, args: Any) -> str | None:
        """Return why a pass with it cannot be captured as a CUDA graph, as a clause.

        `None` if it can, because its terms are the negative log-likelihoods of the targets.
        """
        return "a task's loss is more than the sum over its targets"

    def num_batch_values(self, args: Any) -> int:
        """Return how many numbers of the whole global batch a variant of it needs before its loss can be taken.

        Then a pass without gradient comes first, of which `batch_values` makes these.
        """
        return 0

    def statistic_names(self, args: Any) -> tuple[str, ...]:
        """Return the names of the statistics of a variant of it."""
        return self.statistics

    def batch_values(self, outputs: Any, args: Any) -> torch.Tensor:
        """Return `[num_batch_values]`, the part of a micro-batch in numbers of the global batch."""
        raise NotImplementedError("a loss with batch values says what they are.")

    def loss(self, outputs: Any, args: Any) -> TaskLoss:
        """Return the loss of one task in one micro-batch.

        Args:
            outputs: `TokenOutputs` or `SequenceOutputs`, as its head makes them.
            args: its arguments, of class `Args`.
        """
        raise NotImplementedError

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation from its mean loss, and its statistics by name."""
        return {"eval_loss": loss} | {f"eval_{name}": value for name, value in statistics.items()}

    def metric_names(self, args: Any) -> tuple[str, ...]:
        """Return the names of the metrics that `metrics` returns."""
        return ("eval_loss", *(f"eval_{name}" for name in self.statistic_names(args)))


OBJECTIVES: dict[str, Objective] = {}
"""Every loss by its name, in the order in which they were registered."""


def register_objective(objective: Objective) -> None:
    """Add a loss to `OBJECTIVES`; raise `ValueError` if its name is taken."""
    if objective.name in OBJECTIVES:
        raise ValueError(f'the objective "{objective.name}" is already registered. Choose another name.')
    OBJECTIVES[objective.name] = objective


def objectives_of(kind: HeadKind) -> list[Objective]:
    """Return every loss of a kind of head that a task may name, the default first."""
    objectives = [entry for entry in OBJECTIVES.values() if entry.head.kind == kind and entry.name != OWN]
    return sorted(objectives, key=lambda entry: not entry.is_default)


def default_args(objective: Objective) -> LossArgs:
    """Return the arguments of a loss if nothing is set; raise `ConfigError` if one has no default."""
    args, faults = read_args(objective.Args, None, objective.loss_types[0], f"objective_args of {objective.name}")
    raise_faults(faults)
    assert args is not None, "no arguments are a fault"
    return args
