"""Log-probabilities of the targets of a stream under the output head, for all tasks at once.

Shape letters: T tokens, M rows that have a target, D hidden features.
"""

# MERGED: Log-probabilities of several given words for each target, from one blocked pass of the output head.
# MERGED: Shape letters: T tokens, M targets of one task, K words a target, V words of the vocabulary, D hidden
# MERGED: features.
# MERGED: The output head of a causal language model: a frozen layer over the words, shared by all tasks.
# MERGED: Shape letters: T tokens, L tokens of a sequence, V words, D hidden features.

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import TaskBatch, virtual_tokens_of_sequences
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.cross_entropy.linear import (
    Head,
    Targets,
    VocabParallelCrossEntropy,
    block_rows,
    linear_cross_entropy,
    linear_spreads,
    spreads_of_logits,
    vocab_parallel_linear_cross_entropy,
)
from peft_mux.modeling.attention.rows import ReadRows, rows_of_targets, states_of, take_rows
from peft_mux.modeling.backbone.modules import LANGUAGE_MODEL, frozen_weight
from peft_mux.modeling.objectives.objective import WORDS, HeadPass, TokenOutputs, common_fields, register_head
from peft_mux.modeling.sharding import (
    VocabParallelHead,
    copy_to_tp_region,
    free_after_backward,
    gather_before_backward,
    gathered,
    reduce_from_tp_region,
    vocab_parallel_head,
)
from peft_mux.modeling.stream import Stream


def output_head(backbone: Any) -> tuple[Any, float, float | None]:
    """Return the output module of a causal language model, and the scale and soft-cap of its logits.

    Raises:
        UnsupportedModelError: if the model has no output head.
    """
    module = backbone.get_output_embeddings()
    if module is None:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} has no output embeddings; allowed: language models (AutoModelForCausalLM) "
            "and classifiers (AutoModelForSequenceClassification)."
        )
    config = backbone.config
    # Cohere multiplies its logits, Granite divides them, and Gemma 2 caps them, all outside the output module.
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return module, scale, getattr(config, "final_logit_softcapping", None)


class TargetLosses(NamedTuple):
    """What the output head gives for the targets of a micro-batch, sorted by task.

    Attributes:
        nll_M: negative log-likelihoods `[M]` of the M targets, in nats.
        spread_M: their spreads `[M]` (`peft_mux.kernels.cross_entropy.linear`); 0 for tasks that do not smooth their
            labels, and `None` where no task does.
    """

    nll_M: torch.Tensor
    spread_M: torch.Tensor | None = None


def target_losses(
    hidden_TD: torch.Tensor,
    backbone: Any,
    batch: MuxBatch,
    stream: Stream,
    adapters: Mapping[str, str],
    smoothed: Collection[str] = (),
) -> TargetLosses:
    """Return the negative log-likelihood of every target of a micro-batch, and the spreads of some tasks.

    Args:
        hidden_TD: the last hidden states `[T, D]`, or `[U, D]` of computed rows where tokens are shared.
        backbone: the causal language model.
        batch: micro-batch that the hidden states are of.
        stream: the stream of the adapted layers, which holds `batch` as the micro-batch in flight.
        adapters: internal adapter id of each task name.
        smoothed: tasks that smooth their labels.
    """
    # Rows without a target, such as those of a prompt, never meet the output head: its logits are the widest tensor.
    hidden_MD = states_of(hidden_TD, batch, batch.target_rows)
    targets_M = batch.labels[0].index_select(0, batch.target_rows)
    module, scale, softcap = output_head(backbone)
    wanted = [index for index, name in enumerate(batch.task_names) if name in smoothed]
    # The backward pass makes these logits again, so it needs the head's weights once more.
    if _is_adapted(module):
        hidden_MD = free_after_backward(hidden_MD, module)
        with gathered(module):
            reads = (batch, stream, adapters)
            losses = _adapted_losses(hidden_MD, targets_M, module, reads, (scale, softcap), has_spreads=bool(wanted))
        # One column where spreads are not wanted: a single gathering serves both.
        nll_M, *spread_M = gather_before_backward(losses, module).unbind()
        return TargetLosses(nll_M, *spread_M)
    with gathered(module):
        weight, bias = frozen_weight(module)
        if weight is not None:
            head, words = Head(weight, bias, scale, softcap), vocab_parallel_head(module)
            if words is None:
                nll_M = linear_cross_entropy(hidden_MD, head, targets_M)
            else:
                nll_M = vocab_parallel_linear_cross_entropy(
                    hidden_MD, head, targets_M, first=words.first, vocab_size=words.vocab_size, links=words.links
                )
            if not wanted:
                return TargetLosses(nll_M)
            return TargetLosses(nll_M, _task_spreads(hidden_MD, targets_M, batch.target_offsets, wanted, head, words))
    raise UnsupportedModelError(
        f"the output head of {type(backbone).__name__} is a {type(module).__name__}; allowed: a linear layer."
    )


def _task_spreads(
    hidden_MD: torch.Tensor,
    targets_M: torch.Tensor,
    offsets: Sequence[int],
    wanted: Collection[int],
    head: Head,
    words: VocabParallelHead | None,
) -> torch.Tensor:
    """Return the spreads `[M]` of the targets of the tasks of some numbers, and 0 for those of the others."""
    exact = torch.promote_types(hidden_MD.dtype, torch.float32)
    parts = []
    # By slices, so that the rows of other tasks take no part: 0 * NaN would be NaN.
    for index, (start, end) in enumerate(pairwise(offsets)):
        own_MD, own_M = hidden_MD[start:end], targets_M[start:end]
        if index not in wanted:
            parts.append(hidden_MD.new_zeros(end - start, dtype=exact))
        elif words is None:
            parts.append(linear_spreads(own_MD, head, own_M))
        else:
            copied_MD = copy_to_tp_region(own_MD, words.links)
            spreads_M = linear_spreads(copied_MD, head, own_M, first=words.first, vocab_size=words.vocab_size)
            parts.append(reduce_from_tp_region(spreads_M, words.links))
    return torch.cat(parts)


def _is_adapted(module: Any) -> bool:
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _adapted_losses(
    hidden_MD: torch.Tensor,
    targets_M: torch.Tensor,
    module: Any,
    reads: tuple[MuxBatch, Stream, Mapping[str, str]],
    transform: tuple[float, float | None],
    *,
    has_spreads: bool,
) -> torch.Tensor:
    """Return the losses `[1, M]`, or losses and spreads `[2, M]`, where some task adapts the head.

    Logits are made in blocks, and again in the backward pass.
    """
    batch, stream, adapters = reads
    scale, softcap = transform
    places_M = batch.token_places.index_select(0, batch.target_rows)
    words = vocab_parallel_head(module)
    # Rounded up, as parts may differ by a word and all shards must cut the same blocks.
    frozen = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module.base_layer
    num_words = frozen.weight.shape[0] if words is None else -(-words.vocab_size // words.links.size)
    size = block_rows(num_words, hidden_MD.device.type)
    hidden_MD = hidden_MD if words is None else copy_to_tp_region(hidden_MD, words.links)

    def block(hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        offsets = tuple(min(max(offset - start, 0), end - start) for offset in batch.target_offsets)
        alone = nullcontext() if words is None else words.local()
        # Read anew: where a block is computed again, in the backward pass, the stream is idle or reads another batch.
        with stream.reading(batch, adapters), stream.selected_rows(offsets, places_M[start:end], adapters), alone:
            logits = module(hidden).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        targets, found = targets_M[start:end], []
        if words is not None:
            found.append(VocabParallelCrossEntropy.apply(logits, targets, words.first, words.links))
        else:
            found.append(F.cross_entropy(logits, targets, reduction="none"))
        if has_spreads:
            found.append(_spreads_of_logits(logits, targets, words))
        return torch.stack(found)

    parts = []
    for start in range(0, len(hidden_MD), size):
        end = min(start + size, len(hidden_MD))
        # Recomputed block by block, so that the logits of one block alone are ever held; draws need no state.
        parts.append(checkpoint(block, hidden_MD[start:end], start, end, use_reentrant=False, preserve_rng_state=False))
    # An empty sum keeps the graph where no row has a target.
    empty = hidden_MD.sum(dim=1)[None]
    return torch.cat(parts, dim=1) if parts else empty.expand(1 + has_spreads, -1)


def _spreads_of_logits(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, words: VocabParallelHead | None
) -> torch.Tensor:
    """Return the spreads `[M]` of targets under an adapted head."""
    if words is None:
        num_words = logits_MV.shape[1]
        return spreads_of_logits(logits_MV, Targets.of(targets_M, 0, num_words), num_words)
    own = Targets.of(targets_M, words.first, logits_MV.shape[1])
    return reduce_from_tp_region(spreads_of_logits(logits_MV, own, words.vocab_size), words.links)


def without_targets(batch: MuxBatch, tasks: Sequence[int]) -> MuxBatch:
    """Return a micro-batch of the same tokens in which some tasks have no targets; `tasks` are their numbers."""
    offsets = batch.target_offsets
    counts = [0 if index in tasks else offsets[index + 1] - offsets[index] for index in range(len(batch.task_names))]
    kept = [batch.target_rows[offsets[index] : offsets[index] + count] for index, count in enumerate(counts)]
    shared = batch.shared and replace(batch.shared, pairs=None)
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
