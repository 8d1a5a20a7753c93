"""Log-probabilities of several given words for each target, from one blocked pass of the output head.

Shape letters: T tokens, M targets of one task, K words a target, V words of the vocabulary, D hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.cross_entropy.linear import Head, block_rows
from peft_mux.modeling.attention.shared_rows import states_of
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.objectives.head import HeadPass
from peft_mux.modeling.objectives.outputs import WORDS
from peft_mux.modeling.objectives.token_losses import output_head
from peft_mux.modeling.sharding.gathering import free_after_backward, gather_before_backward, gathered
from peft_mux.modeling.sharding.vocabulary import vocab_parallel_head


def without_targets(batch: MuxBatch, tasks: Sequence[int]) -> MuxBatch:
    """Return a micro-batch of the same tokens in which some tasks have no targets; `tasks` are their numbers."""
    offsets = batch.target_offsets
    counts = [0 if index in tasks else offsets[index + 1] - offsets[index] for index in range(len(batch.task_names))]
    kept = [batch.target_rows[offsets[index] : offsets[index] + count] for index, count in enumerate(counts)]
    shared = batch.shared and batch.shared.without_pairs()
    return replace(batch, target_rows=torch.cat(kept), target_offsets=(0, *accumulate(counts)), shared=shared)


def target_and_words(
    hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass, task: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return what a task's targets, and the words that its rows name for each of them, have as log-probabilities.

    The logits of one block of targets alone are ever held, and made again in the backward pass.

    Args:
        hidden_TD: the last hidden states `[T, D]`.
        batch: micro-batch that the hidden states are of.
        head: what the output head is computed with.
        task: number of the task in the micro-batch.

    Returns:
        Negative log-likelihoods `[M]` of the targets, log-probabilities `[M, K]` of the words, and, where the task
        smooths its labels, the spreads `[M]` of the targets (`TokenOutputs.spread_M`); fp32.

    Raises:
        UnsupportedModelError: if tensor parallelism divides the vocabulary.
    """
    module, _, _ = output_head(head.backbone)
    if vocab_parallel_head(module) is not None:
        raise UnsupportedModelError(
            f"tasks.{batch.task_names[task]}: got rows that name several words for each target; allowed: one target "
            "for each token where tensor parallelism divides the vocabulary. Set tensor_parallel_size=1."
        )
    rows_M = batch.target_rows[batch.target_offsets[task] : batch.target_offsets[task + 1]]
    columns = batch.target_columns[task]
    ids_MK = next(columns[name] for name in WORDS if name in columns)
    ids_MK = torch.cat([batch.labels[0].index_select(0, rows_M)[:, None], ids_MK], dim=1)
    hidden_MD = free_after_backward(states_of(hidden_TD, batch, rows_M), module)
    places_M = batch.token_places.index_select(0, rows_M)
    size = block_rows(module.weight.shape[0], hidden_MD.device.type)
    parts = []
    with gathered(module):
        for start in range(0, max(len(hidden_MD), 1), size):
            block = _Block(batch, head, task, places_M[start : start + size])
            arguments = hidden_MD[start : start + size], ids_MK[start : start + size]
            parts.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
    logprobs_MK = gather_before_backward(torch.cat(parts), module)
    target_M, words_MK = logprobs_MK[:, 0], logprobs_MK[:, 1:]
    if batch.task_names[task] not in head.smoothed:
        return -target_M, words_MK, None
    return -target_M, words_MK[:, :-1], target_M - words_MK[:, -1]


class _Block:
    """Computes some targets of one task; called again where the backward pass recomputes it."""

    def __init__(self, batch: MuxBatch, head: HeadPass, task: int, places: torch.Tensor) -> None:
        self._batch, self._head, self._task, self._places = batch, head, task, places

    def __call__(self, hidden_MD: torch.Tensor, ids_MK: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities `[M, K]` of words; behind them the mean over all words, where it is read."""
        logits_MV = self._logits(hidden_MD)
        of_words = logits_MV.gather(1, ids_MK)
        if self._batch.task_names[self._task] in self._head.smoothed:
            of_words = torch.cat([of_words, logits_MV.mean(dim=1, keepdim=True)], dim=1)
        return of_words - torch.logsumexp(logits_MV, dim=1, keepdim=True)

    def _logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        module, scale, softcap = output_head(self._head.backbone)
        weight, bias = frozen_weight(module) if not hasattr(module, "base_layer") else (None, None)
        if weight is not None:
            # The dtype follows from the hidden states, as in the loss of one target a token.
            with torch.autocast(hidden_MD.device.type, enabled=False):
                return Head(weight, bias, scale, softcap).logits(hidden_MD)
        with ExitStack() as stack:
            for context in self._reading(len(hidden_MD)):
                stack.enter_context(context)
            logits_MV = module(hidden_MD).float() * scale
        return logits_MV if softcap is None else softcap * torch.tanh(logits_MV / softcap)

    def _reading(self, count: int) -> Sequence[AbstractContextManager[Any]]:
        """Return what lets an adapted head see rows of this task alone, also where a block is recomputed."""
        stream, adapters = self._head.stream, self._head.adapters
        num_tasks = len(self._batch.task_names)
        offsets = (0,) * (self._task + 1) + (count,) * (num_tasks - self._task)
        return stream.reading(self._batch, adapters), stream.selected_rows(offsets, self._places, adapters)
