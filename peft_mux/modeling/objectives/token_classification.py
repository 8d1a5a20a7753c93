"""The loss of classifiers of tokens, and their heads: one small head for each task, on every token.

Shape letters: T tokens, M labelled tokens, D hidden features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.data.rows.tagged_rows import TAGGED_ROWS
from peft_mux.data.task_batch import TaskBatch
from peft_mux.modeling.attention.read_rows import ReadRows, rows_of_targets
from peft_mux.modeling.attention.shared_rows import states_of
from peft_mux.modeling.backbone.head_kinds import TOKEN_CLASSIFICATION
from peft_mux.modeling.objectives.arguments import LossArgs
from peft_mux.modeling.objectives.classification import class_terms
from peft_mux.modeling.objectives.classification_head import head_outputs, prepare_head, without_pooler
from peft_mux.modeling.objectives.head import HeadPass, register_head
from peft_mux.modeling.objectives.language_head import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import SequenceOutputs, TaskLoss, common_fields


class TokenClassificationHead:
    """A small head for each task, on every token."""

    kind = TOKEN_CLASSIFICATION
    example_label = None

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Give the task a head with its own number of classes; see `prepare_head`."""
        prepare_head(backbone, adapter, classes, seed, is_new=is_new)

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Keep the encoder from pooling; see `without_pooler`."""
        return without_pooler(backbone)

    def read_rows(self, batch: MuxBatch, backbone: Any) -> ReadRows:
        """Return the rows that have a target."""
        return rows_of_targets(batch)

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Refuse: no loss of classifiers is captured."""
        raise NotImplementedError("passes of classifiers are not captured.")

    def outputs(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[SequenceOutputs]:
        """Return the logits of each task's own head at its labelled tokens, with their labels."""
        labels_M = batch.labels[0].index_select(0, batch.target_rows)
        logits = token_logits(hidden_TD, batch.target_rows, batch.target_offsets, batch, head)
        return [
            SequenceOutputs(
                logits_SC=own_MC,
                class_labels=labels_M[batch.target_offsets[index] : batch.target_offsets[index + 1]],
                **common_fields(batch, index),
            )
            for index, own_MC in enumerate(logits)
        ]

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
        """Return the logits `[L, C]` of every sequence."""
        rows = torch.arange(batch.num_tokens, device=hidden_TD.device)
        found = []
        for index, own_TC in enumerate(token_logits(hidden_TD, rows, batch.task_offsets, batch, head)):
            first, last = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
            found += own_TC.split(list(batch.sequence_lengths[first:last]))
        return found

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels `[L]` of every sequence."""
        return LANGUAGE_HEAD.labels(batch, micro_batch)


TOKEN_CLASSIFICATION_HEAD = TokenClassificationHead()
register_head(TOKEN_CLASSIFICATION_HEAD)


def token_logits(
    hidden_TD: torch.Tensor, rows: torch.Tensor, offsets: tuple[int, ...], batch: MuxBatch, head: HeadPass
) -> list[torch.Tensor]:
    """Return the `[rows, C]` logits of each task's own rows.

    Args:
        hidden_TD: the last hidden states `[T, D]`.
        rows: positions that the heads shall read, sorted by task.
        offsets: where each task's positions begin among them, `N + 1` numbers.
        batch: the micro-batch that the stream reads.
        head: what the output head is computed with.
    """
    places, states = batch.token_places.index_select(0, rows), states_of(hidden_TD, batch, rows)
    dropout = getattr(head.backbone, "dropout", None)
    if isinstance(dropout, nn.Module):
        with head.stream.selected_rows(offsets, places, head.adapters):
            states = dropout(states)
    return head_outputs(states, offsets, places, batch, head)


class TokenClassificationLoss(BaseObjective):
    """Mean negative log-likelihood of the classes of the labelled tokens."""

    name = "token_classification"
    loss_types = ("nll",)
    head = TOKEN_CLASSIFICATION_HEAD
    row_form = TAGGED_ROWS
    is_default = True
    uses_totals = False
    eager_reason = "a classifier takes the loss of each task on its own"

    def loss(self, outputs: SequenceOutputs, args: LossArgs) -> TaskLoss:
        """Return the mean over the labelled tokens of the global batch."""
        assert outputs.class_labels is not None, "labelled tokens have labels"
        return TaskLoss(class_terms(outputs.logits_SC, outputs.class_labels).sum() * outputs.loss_weight)


register_objective(TokenClassificationLoss())
