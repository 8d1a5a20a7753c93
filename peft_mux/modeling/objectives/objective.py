"""`LossArgs`: the arguments of a loss as a frozen dataclass, read from `Task.objective_args`, all faults at once."""

# MERGED: What the losses of one task read of one micro-batch: `TokenOutputs` and `SequenceOutputs`, and what they
# MERGED: return.
# MERGED: Shape letters: M targets, S sequences and R rows of this task in this micro-batch, C classes, K numbers.
# MERGED: `OutputHead`: what a kind of output head computes on a packed stream, whatever loss is taken of it.
# MERGED: `Objective`: one loss that a task may be trained towards, and all of them by name.
# MERGED: Two levels. What a pass computes once for all its tasks, whatever their losses, is the `OutputHead`'s: for
# MERGED: language
# MERGED: models one linear cross-entropy over the targets of all tasks. A loss is a pure function of what that gave
# MERGED: for *one*
# MERGED: task in *one* micro-batch. A new one is a class in a file of this folder, registered there, and imported in
# MERGED: `__init__.py`::
# MERGED:     class MyLoss(TokenObjective):
# MERGED:         name, loss_types = "my-loss", ("plain",)  # a task asks for it with Task(objective="my-loss")
# MERGED:         def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
# MERGED:             return TaskLoss(outputs.mean_over_tokens(outputs.nll_M**2))
# MERGED:     register_objective(MyLoss())
# MERGED: A loss divides by sums over the task's *global* batch (`outputs.totals`), so no split into micro-batches and
# MERGED: no number
# MERGED: of processes changes its gradient (promise 1 of the design).

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from peft_mux.data.batch import Columns, MuxBatch
from peft_mux.data.formats import RowForm
from peft_mux.data.task_batch import TaskBatch
from peft_mux.errors import Fault, closest, raise_faults, shown
from peft_mux.modeling.attention.rows import ReadRows
from peft_mux.modeling.backbone.modules import HeadKind, head_kind_of
from peft_mux.modeling.stream import Stream

T = TypeVar("T", bound="LossArgs")

_OF_THE_TASK = ("loss_type", "label_smoothing_factor")
"""Arguments that are fields of `Task` itself."""

_BEYOND_FLOATS = 2**1000
SEVERAL = "+"
"""Between the names of variants that are added up, where a loss may be several at once."""


@dataclass(frozen=True, kw_only=True)
class LossArgs:
    """Arguments of a loss; a subclass has a field, with its default, for each that may be set.

    Attributes:
        loss_type: which variant of the loss; it is `Task.loss_type`, and none of `Task.objective_args`.
        label_smoothing_factor: share of the loss that all words of the vocabulary have alike; a field of `Task`, too.
    """

    loss_type: str = ""
    label_smoothing_factor: float = 0.0

    refused: ClassVar[Mapping[str, str]] = {}
    """Arguments that are known from TRL but not honoured, with the reason and what to do instead."""

    def faults(self, where: str) -> list[Fault]:
        """Return what is wrong with arguments beside one another; `where` is their path, `tasks.a.objective_args`."""
        return []


def argument(default: Any, allowed: str, holds: Callable[[Any], bool]) -> Any:
    """Return a field of `LossArgs`.

    Args:
        default: what stands where nothing is set; `None` may always be given where it is the default.
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


def read_args(kind: type[T], given: object, loss_type: str, where: str) -> tuple[T | None, list[Fault]]:
    """Read the arguments of a loss.

    Args:
        kind: the dataclass of the arguments.
        given: what stands in `Task.objective_args`: a mapping, or `None` for nothing.
        loss_type: which variant of the loss, one of the loss's own.
        where: path for messages: `tasks.a.objective_args`.

    Returns:
        The arguments, `None` where there is a fault; and all faults.
    """
    if given is not None and (not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given)):
        return None, [Fault(where, shown(given), "a dict of arguments by name")]
    values: Mapping[str, Any] = given or {}
    known = {item.name: item for item in fields(kind) if item.name not in _OF_THE_TASK and item.init}
    faults = [_unknown(name, values[name], kind, list(known), where) for name in values if name not in known]
    hints = get_type_hints(kind)
    read = {}
    for name, item in known.items():
        if name not in values:
            if item.default is MISSING and item.default_factory is MISSING:
                faults.append(Fault(f"{where}.{name}", "nothing", _allowed(item, hints[name])))
            continue
        read[name] = _converted(values[name], hints[name])
        if not _fits(read[name], item, hints[name]):
            faults.append(Fault(f"{where}.{name}", shown(values[name]), _allowed(item, hints[name])))
    if faults:
        return None, faults
    args = kind(loss_type=loss_type, **read)
    faults = args.faults(where)
    return (None if faults else args), faults


def _unknown(name: str, value: object, kind: type[LossArgs], known: list[str], where: str) -> Fault:
    allowed = ", ".join(known) or "none with this loss"
    if name in kind.refused:
        return Fault(f"{where}.{name}", shown(value), allowed, f"{name} is not supported: {kind.refused[name]}.")
    hint = f"Set Task.{name}." if name in _OF_THE_TASK else closest(name, known)
    return Fault(f"{where}.{name}", "an unknown argument", allowed, hint)


def _converted(value: Any, hint: Any) -> Any:
    """Return lists of a file as the tuples that a frozen dataclass holds, and whole numbers as floats."""
    tuples = [kind for kind in _kinds(hint) if get_origin(kind) is tuple]
    if isinstance(value, (list, tuple)) and tuples:
        return tuple(_converted(one, get_args(tuples[0])[0]) for one in value)
    if isinstance(value, int) and not isinstance(value, bool) and float in _kinds(hint) and int not in _kinds(hint):
        return float(value) if abs(value) < _BEYOND_FLOATS else value
    return value


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, item: Field[Any], hint: Any) -> bool:
    if value is None:
        return type(None) in _kinds(hint)
    if not any(_is_of(value, kind) for kind in _kinds(hint)):
        return False
    if not _is_finite(value):
        return False
    return bool(item.metadata.get("holds", lambda value: True)(value))


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(one, get_args(kind)[0]) and _is_finite(one) for one in value)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, kind) if isinstance(kind, type) else callable(value)


def _allowed(item: Field[Any], hint: Any) -> str:
    words = {float: "a finite number", int: "an integer", bool: "True or False", str: "a string", type(None): "None"}
    kinds = [
        " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else words.get(kind, "a value")
        for kind in _kinds(hint)
    ]
    return str(item.metadata.get("allowed", " or ".join(kinds)))


REFERENCE = "ref_logprobs"
"""Token column with the log-probability of each target under the backbone without adapters; see `TokenOutputs`."""

WORDS = ("target_ids", "teacher_ids")
"""Token columns that name words whose log-probabilities are wanted beside that of the target."""

BATCH_VALUES = "batch_values"
"""Row value under which sums over the global batch lie, which a pass before this one has made."""


class TaskLoss(NamedTuple):
    """What a loss gives for one task and one micro-batch.

    Attributes:
        loss: fp32 scalar with gradient: this micro-batch's part of the mean over the task's global batch.
        statistics: fp32 `[K]` without gradient, parts of what is logged beside the loss; `None` where there is nothing.
            Like the loss they are divided by sums over the global batch already, so that the parts of all micro-batches
            and processes add up to the figures of the step.
    """

    loss: torch.Tensor
    statistics: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutputs:
    """What the outputs of every kind of head have in common.

    Attributes:
        task: name of the task.
        step: index of the task's optimizer step, from 0.
        loss_weight: 1 / number of loss terms in the task's global batch.
        row_values: values of the rows, float32 `[R]`, by name.
        totals: sums over the task's global batch, by name: see `peft_mux.data.batch.batch_totals`.
        batch_values: `[K]` sums over the global batch of what `Objective.batch_values` returned; `None` where there
            are none.
    """

    task: str
    step: int
    loss_weight: float
    row_values: Columns = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    batch_values: torch.Tensor | None = None

    @property
    def anchor(self) -> torch.Tensor:
        """A scalar that depends on all outputs of the task: the loss of what has failed hangs on it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs(TaskOutputs):
    """One task's targets in one micro-batch of a language model, in data order.

    Attributes:
        nll_M: negative log-likelihood of each target in nats, fp32 `[M]` with gradient.
        sequence_counts: number of targets of each of the S sequences.
        row_sequences: number of sequences of each of the R rows.
        columns: token columns of the rows at their targets, `[M]` or `[M, K]`, by name.
        word_logprobs_MK: fp32 `[M, K]` with gradient, log-probabilities of the words that a row names for each target
            (`target_ids`, `teacher_ids`); `None` where it names none.
        spread_M: fp32 `[M]` with gradient, by how many nats the mean over all words of their negative log-likelihood
            exceeds that of the target (`cross_entropy/spreads.py`); `None` for tasks whose labels are not smoothed.
        batch: the micro-batch that the targets are of; `None` where no loss asks for their ids.
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

    @property
    def anchor(self) -> torch.Tensor:
        """The sum over the targets."""
        return self.nll_M.sum()

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
        """Return values of sequences as `[R, n]`, where every row has n sequences (2 for chosen and rejected)."""
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
        row_sequences: number of sequences of each row.
        problem_type: what the backbone's configuration says of the labels, in the words of transformers; mostly `None`.
    """

    logits_SC: torch.Tensor
    class_labels: torch.Tensor | None
    row_sequences: tuple[int, ...] = ()
    problem_type: str | None = None

    @property
    def anchor(self) -> torch.Tensor:
        """The sum of the logits."""
        return self.logits_SC.float().sum()


def common_fields(batch: MuxBatch, index: int) -> dict[str, Any]:
    """Return the fields of `TaskOutputs` for a task of a micro-batch, by its number in the stream."""
    values = dict(batch.row_values[index]) if batch.row_values else {}
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


@dataclass(frozen=True, slots=True)
class HeadPass:
    """What the output head of a pass is computed with, once the hidden states are there.

    Attributes:
        backbone: the transformers model whose last module or modules are the head.
        stream: reads the micro-batch of the pass.
        adapters: internal adapter id of each task name.
        smoothed: tasks whose losses also read how likely all other words are (`TokenOutputs.spread_M`).
    """

    backbone: Any
    stream: Stream
    adapters: Mapping[str, str]
    smoothed: frozenset[str] = frozenset()


class OutputHead(Protocol):
    """One kind of output head; an entry of `HEADS`."""

    @property
    def kind(self) -> HeadKind:
        """Which backbones end in such a head, and which tasks need one."""
        ...

    @property
    def example_label(self) -> int | None:
        """Class label of a made-up sequence; `None` where sequences need none."""
        ...

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Make what a task trains of the head, after its adapter was injected.

        Args:
            backbone: transformers model that holds the adapter.
            adapter: internal adapter id of the task.
            classes: number of classes of the task; `None` for that of the backbone.
            seed: fixes the weights that are drawn.
            is_new: whether the backbone's own head was made at random rather than loaded.
        """
        ...

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Keep the backbone's base model from computing a part of the head by itself, during the `with` block."""
        ...

    def read_rows(self, batch: MuxBatch, backbone: Any) -> ReadRows | None:
        """Return the rows whose hidden states `outputs` and `terms` read; `None` where that is not known."""
        ...

    def outputs(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> Sequence[TaskOutputs]:
        """Return what the losses of each task of a micro-batch read, computed once for all of them.

        Each depends on rows of its own task only, so that nothing of one task reaches another.

        Args:
            hidden_TD: the last hidden states `[T, D]`.
            batch: the micro-batch, its tensors on the device of the hidden states.
            head: what the output head is computed with.
        """
        ...

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Return the negative log-likelihoods `[M]` of all targets, for passes that are captured as CUDA graphs."""
        ...

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
        """Return the logits of every sequence in the order of the stream, from the `[T, D]` last hidden states."""
        ...

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels of every sequence in the order of the stream, as `compute_metrics` takes them.

        Args:
            batch: the rows of one task.
            micro_batch: the same rows, all of them, as a stream.
        """
        ...


HEADS: dict[str, OutputHead] = {}
"""Every kind of head by the name of its kind."""


def register_head(head: OutputHead) -> None:
    """Add a kind of head to `HEADS`.

    Raises:
        ValueError: if one is registered for this kind already.
    """
    if head.kind.name in HEADS:
        raise ValueError(f'the head "{head.kind.name}" is registered already; allowed: one entry a kind.')
    HEADS[head.kind.name] = head


def head_of(backbone: Any) -> OutputHead:
    """Return the head that a backbone ends in."""
    return HEADS[head_kind_of(backbone).name]


OWN = "own"
"""Name of the entry that runs a user's own function."""

Statistics = tuple[torch.Tensor | None, ...]
"""Statistics `[K]` of each task of a stream; `None` for those whose loss has none."""


class Objective(Protocol):
    """One loss; an entry of `OBJECTIVES`."""

    @property
    def name(self) -> str:
        """The `Task.objective` that asks for it."""
        ...

    @property
    def loss_types(self) -> tuple[str, ...]:
        """Its variants by their `Task.loss_type`, the default first."""
        ...

    @property
    def refused_loss_types(self) -> Mapping[str, str]:
        """Variants that are known from TRL but not trained towards, and why."""
        ...

    @property
    def takes_several(self) -> bool:
        """Whether `Task.loss_type` may be a list of variants, whose losses are added up."""
        ...

    @property
    def Args(self) -> type[LossArgs]:
        """The dataclass of its arguments."""
        ...

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """Token columns or row values that make the pass without adapters needless, where rows bring all of them."""
        ...

    @property
    def num_batch_values(self) -> int:
        """How many numbers of the whole global batch it needs before its loss can be taken.

        Then a pass without gradient comes first, of which `batch_values` makes these.
        """
        ...

    @property
    def is_default(self) -> bool:
        """Whether tasks of its kind of head have it where nothing tells another one."""
        ...

    @property
    def uses_totals(self) -> bool:
        """Whether it divides by `TaskOutputs.totals`; otherwise by the number of terms (`loss_weight`)."""
        ...

    @property
    def takes_smoothing(self) -> bool:
        """Whether `label_smoothing_factor` may be set, which its arguments then have."""
        ...

    @property
    def has_logits(self) -> bool:
        """Whether `compute_metrics` may be given the logits and labels of its rows."""
        ...

    @property
    def eager_reason(self) -> str | None:
        """Why a pass with it cannot be captured as a CUDA graph, as a clause; `None` where it can.

        Then its terms are the negative log-likelihoods of the targets.
        """
        ...

    @property
    def head(self) -> OutputHead:
        """The output head that it reads."""
        ...

    @property
    def row_form(self) -> RowForm:
        """The form of the rows that it reads."""
        ...

    @property
    def prepass_sequence(self) -> int | None:
        """Which sequence of each row, from 0, passes without gradient read alone; `None` for none."""
        ...

    def rows(self, args: Any) -> RowForm:
        """Return the form of the rows that a variant of it reads."""
        ...

    def needs_batch_values(self, args: Any) -> bool:
        """Whether a variant of it needs numbers of the whole global batch beforehand."""
        ...

    def needs_reference(self, args: Any) -> bool:
        """Whether it needs the log-probabilities of the backbone without adapters (`TokenOutputs`)."""
        ...

    def statistic_names(self, args: Any) -> tuple[str, ...]:
        """Return the names of the K statistics of `TaskLoss`, those of TRL where it has them."""
        ...

    def batch_values(self, outputs: Any, args: Any) -> torch.Tensor:
        """Return `[num_batch_values]`, the part of a micro-batch in numbers of the global batch."""
        ...

    def loss(self, outputs: Any, args: Any) -> TaskLoss:
        """Return the loss of one task in one micro-batch.

        Args:
            outputs: `TokenOutputs` or `SequenceOutputs`, as its head has it.
            args: its arguments, of class `Args`.
        """
        ...

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation from its mean loss, and its statistics by name."""
        ...

    def metric_names(self, args: Any) -> tuple[str, ...]:
        """Return the names of the metrics that `metrics` returns."""
        ...


class BaseObjective:
    """What most losses have in common; see `Objective`."""

    row_form: RowForm
    refused_loss_types: Mapping[str, str] = {}
    takes_several: bool = False
    Args: type[LossArgs] = LossArgs
    reference_columns: tuple[str, ...] = ()
    num_batch_values: int = 0
    is_default: bool = False
    uses_totals: bool = True
    takes_smoothing: bool = False
    has_logits: bool = True
    eager_reason: str | None = "a task's loss is more than the sum over its targets"

    prepass_sequence: int | None = None

    def rows(self, args: Any) -> RowForm:
        """Return one form for all variants."""
        return self.row_form

    def needs_reference(self, args: Any) -> bool:
        """Return that it needs none."""
        return False

    def needs_batch_values(self, args: Any) -> bool:
        """Return whether it has any."""
        return bool(self.num_batch_values)

    def statistic_names(self, args: Any) -> tuple[str, ...]:
        """Return that there are none."""
        return ()

    def batch_values(self, outputs: Any, args: Any) -> torch.Tensor:
        """Refuse: there are none."""
        raise NotImplementedError("a loss with batch values says what they are.")

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss, and the statistics as they are."""
        return {"eval_loss": loss} | {f"eval_{name}": value for name, value in statistics.items()}

    def metric_names(self, args: Any) -> tuple[str, ...]:
        """Return those of the loss and of the statistics."""
        return ("eval_loss", *(f"eval_{name}" for name in self.statistic_names(args)))


OBJECTIVES: dict[str, Objective] = {}
"""Every loss by its name, in the order in which they were registered."""


def register_objective(objective: Objective) -> None:
    """Add a loss to `OBJECTIVES`.

    Raises:
        ValueError: if its name is taken.
    """
    if objective.name in OBJECTIVES:
        raise ValueError(f'the objective "{objective.name}" is registered already; allowed: a name of its own.')
    OBJECTIVES[objective.name] = objective


def unregister_objective(name: str) -> None:
    """Take a loss out of `OBJECTIVES`; models must no longer hold tasks with it."""
    del OBJECTIVES[name]


def objectives_of(kind: HeadKind) -> list[Objective]:
    """Return every loss of a kind of head that a task may name, the default first."""
    found = [entry for entry in OBJECTIVES.values() if entry.head.kind == kind and entry.name != OWN]
    return sorted(found, key=lambda entry: not entry.is_default)


def objective_for(kind: HeadKind) -> Objective:
    """Return the loss of a kind of head where a task says nothing of it."""
    return objectives_of(kind)[0]


def default_args(objective: Objective) -> LossArgs:
    """Return the arguments of a loss where nothing is set.

    Raises:
        ConfigError: if one has no default.
    """
    args, faults = read_args(objective.Args, None, objective.loss_types[0], f"objective_args of {objective.name}")
    raise_faults(faults)
    assert args is not None, "no arguments are a fault"
    return args
