"""What the losses of one task read of one micro-batch: `TokenOutputs` and `SequenceOutputs`, and what they return.

Shape letters: M targets, S sequences and R rows of this task in this micro-batch, C classes, K numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from peft_mux.data.batch import Columns, MuxBatch

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
