"""The output head of a causal language model: a frozen layer over the words, shared by all tasks.

Shape letters: T tokens, L tokens of a sequence, V words, D hidden features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.rows.virtual_tokens import virtual_tokens_of_sequences
from peft_mux.data.task_batch import TaskBatch
from peft_mux.modeling.attention.read_rows import ReadRows, rows_of_targets
from peft_mux.modeling.attention.shared_rows import take_rows
from peft_mux.modeling.backbone.head_kinds import LANGUAGE_MODEL
from peft_mux.modeling.objectives.head import HeadPass, register_head
from peft_mux.modeling.objectives.outputs import WORDS, TokenOutputs, common_fields
from peft_mux.modeling.objectives.token_losses import TargetLosses, output_head, target_losses
from peft_mux.modeling.objectives.word_losses import target_and_words, without_targets
from peft_mux.modeling.sharding.gathering import gathered


class LanguageHead:
    """One layer from hidden states to logits of words, perhaps with adapters on it."""

    kind = LANGUAGE_MODEL
    example_label = None

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Do nothing: the head is the backbone's own, and frozen."""

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Do nothing: base models end before the head."""
        return nullcontext()

    def read_rows(self, batch: MuxBatch, backbone: Any) -> ReadRows:
        """Return the rows that have a target."""
        return rows_of_targets(batch)

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Return the negative log-likelihoods `[M]` of the targets of all tasks, whatever their losses."""
        return self._losses(hidden_TD, batch, head).nll_M

    def _losses(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> TargetLosses:
        pairs = None if batch.shared is None else batch.shared.pairs
        if pairs is None:
            return target_losses(hidden_TD, head.backbone, batch, head.stream, head.adapters, head.smoothed)
        # Sequences that have a row and its next token in common have that target in common, too.
        once = replace(batch, target_rows=batch.target_rows.index_select(0, pairs.first), target_offsets=pairs.offsets)
        found = target_losses(hidden_TD, head.backbone, once, head.stream, head.adapters, head.smoothed)
        spread_M = None if found.spread_M is None else take_rows(found.spread_M, pairs.of_target)
        return TargetLosses(take_rows(found.nll_M, pairs.of_target), spread_M)

    def outputs(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[TokenOutputs]:
        """Return each task's own targets, from one linear cross-entropy over those of all tasks.

        Tasks whose rows name several words for each target have a pass of the head of their own instead.
        """
        naming = [index for index, columns in enumerate(batch.target_columns) if not columns.keys().isdisjoint(WORDS)]
        rest = without_targets(batch, naming) if naming else batch
        found = self._losses(hidden_TD, rest, head)
        nll = list(found.nll_M.split(_counts(rest)))
        spreads: dict[int, torch.Tensor] = {}
        if found.spread_M is not None:
            own = enumerate(found.spread_M.split(_counts(rest)))
            spreads = {index: own_M for index, own_M in own if batch.task_names[index] in head.smoothed}
        words: dict[int, torch.Tensor] = {}
        for index in naming:
            nll[index], words[index], spread_M = target_and_words(hidden_TD, batch, head, index)
            spreads |= {} if spread_M is None else {index: spread_M}
        return token_outputs(nll, batch, words, spreads)

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
        """Return the logits `[L, V]` of every sequence."""
        return stream_logits(hidden_TD, batch, head)

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels `[L]` of every sequence, not shifted, as Trainer gives them to `compute_metrics`."""
        by_place, place = {}, 0
        for sequence in batch.sequences:
            by_place[place] = sequence.labels[sequence.num_virtual_tokens :]
            place += len(sequence)
        # Packing reorders sequences; the place of the first token within the batch tells which one it is.
        for start in micro_batch.cu_seqlens[:-1].tolist():
            yield by_place[int(micro_batch.token_places[start])]


def stream_logits(hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
    """Return the `[L, V]` logits of every sequence but its virtual tokens, computed one sequence at a time.

    Args:
        hidden_TD: the last hidden states `[T, D]`.
        batch: the micro-batch that the stream reads.
        head: what the output head is computed with.
    """
    module, scale, softcap = output_head(head.backbone)
    logits, start = [], 0
    with gathered(module):
        # One by one, as logits of the whole stream would be the largest tensor of the pass.
        for length, num_virtual in zip(batch.sequence_lengths, virtual_tokens_of_sequences(batch), strict=True):
            end, start = start + length, start + num_virtual
            offsets = tuple(min(max(offset - start, 0), end - start) for offset in batch.task_offsets)
            with head.stream.selected_rows(offsets, batch.token_places[start:end], head.adapters):
                rows = module(_between(hidden_TD, batch, start, end)).float() * scale
            logits.append(rows if softcap is None else softcap * torch.tanh(rows / softcap))
            start = end
    return logits


def _between(hidden_TD: torch.Tensor, batch: MuxBatch, start: int, end: int) -> torch.Tensor:
    """Return the hidden states of tokens of the stream, from one to before another."""
    if batch.shared is None:
        return hidden_TD[start:end]
    return take_rows(hidden_TD, batch.shared.row_of_token[start:end])


def token_outputs(
    nll: torch.Tensor | Sequence[torch.Tensor],
    batch: MuxBatch,
    words: Mapping[int, torch.Tensor] | None = None,
    spreads: Mapping[int, torch.Tensor] | None = None,
) -> list[TokenOutputs]:
    """Return what the losses of each task of a micro-batch read.

    Args:
        nll: negative log-likelihoods `[M]` of all targets, or `[M_task]` of those of each task.
        batch: the micro-batch.
        words: `[M_task, K]` log-probabilities of the words that rows name, by number of the task.
        spreads: `[M_task]` of the tasks that smooth their labels, by number of the task.
    """
    # Split, not masked or scattered: 0 * NaN is NaN, so a sum over all rows would carry one task's NaN to the others.
    return [
        TokenOutputs(
            nll_M=own_M,
            batch=batch,
            index=index,
            sequence_counts=_differences(batch, index),
            row_sequences=batch.row_sequences[batch.row_offsets[index] : batch.row_offsets[index + 1]],
            columns=batch.target_columns[index],
            word_logprobs_MK=None if words is None else words.get(index),
            spread_M=None if spreads is None else spreads.get(index),
            **common_fields(batch, index),
        )
        for index, own_M in enumerate(nll.split(_counts(batch)) if isinstance(nll, torch.Tensor) else nll)
    ]


def _counts(batch: MuxBatch) -> list[int]:
    """Return the number of targets of each task."""
    return [end - start for start, end in pairwise(batch.target_offsets)]


def _differences(batch: MuxBatch, index: int) -> tuple[int, ...]:
    """Return the number of targets of each sequence of a task."""
    first, last = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
    return tuple(end - start for start, end in pairwise(batch.sequence_target_offsets[first : last + 1]))


LANGUAGE_HEAD = LanguageHead()
register_head(LANGUAGE_HEAD)
