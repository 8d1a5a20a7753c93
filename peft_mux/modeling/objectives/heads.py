"""The output head of a causal language model: a frozen layer over the words, shared by all tasks.

The logits of the targets are the widest tensor of a pass. So those of all tasks are computed together, in blocks, and
only losses leave a block: by the fused linear cross-entropy for a frozen head, by recomputed blocks for a head that
some task adapts, for rows that name several words for each target, and for losses that read entropies.

All log-probabilities of a task are those of logits divided by the temperature of its loss, mostly 1.

Shape letters: T tokens, L tokens of a sequence, M targets, K words a target, V words of the vocabulary, D hidden
features.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
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
)
from peft_mux.modeling.attention.rows import states_of, take_rows
from peft_mux.modeling.backbone.modules import LANGUAGE_MODEL, frozen_weight
from peft_mux.modeling.objectives.objective import HEADS, WORDS, OutputHead, TokenOutputs, common_fields
from peft_mux.modeling.stream import temporary_attributes


def output_head(backbone: Any) -> tuple[Any, float, float | None]:
    """Return the output module of a causal language model, and the scale and soft-cap of its logits.

    Raises:
        UnsupportedModelError: if the model has no output head.
    """
    module = backbone.get_output_embeddings()
    if module is None:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} has no output embeddings; it must be a language model (AutoModelForCausalLM) "
            "or a classifier (AutoModelForSequenceClassification)."
        )
    config = backbone.config
    # Cohere multiplies its logits, Granite divides them, and Gemma 2 caps them, all outside the output module.
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return module, scale, getattr(config, "final_logit_softcapping", None)


class HeadWeights:
    """Access to the weights of an output head without calling it; there is nothing to do if the process holds them all.

    A frozen head may have an object of a subclass as its attribute `head_weights`.
    """

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which the process holds all weights."""
        return nullcontext()

    def free_after_backward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden`, the input of the head; once its gradient is known, the weights may be freed."""
        return hidden

    def gather_before_backward(self, losses: torch.Tensor) -> torch.Tensor:
        """Return `losses`, computed from the head; before their gradient flows back, the weights are gathered."""
        return losses


WHOLE = HeadWeights()


def weights_of(head: Any) -> HeadWeights:
    """Return how the weights of an output head, plain or adapted, are read."""
    return getattr(_frozen_head(head), "head_weights", WHOLE)


def _vocab_part(head: Any) -> Any:
    """Return which words a head holds, plain or adapted (`parallel.tensor.regions`); `None` for a whole head."""
    return getattr(_frozen_head(head), "vocab_parallel_head", None)


def _frozen_head(head: Any) -> Any:
    # Layers of several types of adapters may be put around one another.
    while hasattr(head, "base_layer"):
        head = head.base_layer
    return head


def head_logits(backbone: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the fp32 logits `[..., V]` of a causal language model, adapters on its head included."""
    module, scale, softcap = output_head(backbone)
    logits = module(hidden).float() * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def target_losses(
    hidden_TD: torch.Tensor, batch: MuxBatch, model: Any, smoothed: Collection[str] = ()
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what the output head gives for the targets of a micro-batch.

    Args:
        hidden_TD: the last hidden states `[T, D]`, or `[U, D]` of computed rows where tokens are shared.
        batch: micro-batch that the hidden states belong to, and that the stream reads.
        model: the `MultiTaskPeftModel`.
        smoothed: tasks that smooth their labels.

    Returns:
        Negative log-likelihoods `[M]` in nats, sorted by task; and their spreads `[M]`
        (`peft_mux.kernels.cross_entropy.linear`), 0 for tasks that do not smooth, `None` if no task does.
    """
    # Rows without a target, such as those of a prompt, never meet the output head: its logits are the widest tensor.
    hidden_MD = states_of(hidden_TD, batch, batch.target_rows)
    targets_M = batch.labels[0].index_select(0, batch.target_rows)
    module: nn.Module
    module, scale, softcap = output_head(model.backbone)
    wanted = [index for index, name in enumerate(batch.task_names) if name in smoothed]
    module = _head_of_tasks(module, batch, model)
    weights = weights_of(module)
    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        # The backward pass makes these logits again, so it needs the head's weights once more.
        hidden_MD = weights.free_after_backward(hidden_MD)
        with weights.gathered():
            losses = _adapted_losses(hidden_MD, targets_M, batch, model, has_spreads=bool(wanted))
        nll_M, *spread_M = weights.gather_before_backward(losses).unbind()
        return nll_M, spread_M[0] if spread_M else None
    with weights.gathered():
        weight, bias = frozen_weight(module)
        if weight is None:
            raise UnsupportedModelError(
                f"the output head of {type(model.backbone).__name__} must be a linear layer, got a "
                f"{type(module).__name__}."
            )
        head, words = Head(weight, bias, scale, softcap), _vocab_part(module)

        def losses_at(temperature: float, own_MD: torch.Tensor, own_M: torch.Tensor) -> torch.Tensor:
            parts: dict[str, Any] = {}
            if words is not None:
                parts = {"first": words.first, "vocab_size": words.vocab_size, "links": words.links}
            # tanh reads the logits divided by the cap, so a cap divided by the temperature leaves that as it is.
            cap = None if softcap is None else softcap / temperature
            scaled = head._replace(scale=scale / temperature, softcap=cap)
            return linear_cross_entropy(own_MD, scaled, own_M, **parts)

        # Neighbours of one temperature are computed together; mostly that is all tasks.
        by_task = zip(_temperatures(batch, model), target_counts(batch), strict=True)
        grouped = groupby(by_task, operator.itemgetter(0))
        runs = [(temperature, sum(count for _, count in run)) for temperature, run in grouped]
        if len(runs) == 1:
            nll_M = losses_at(runs[0][0], hidden_MD, targets_M)
        else:
            temperatures, counts = zip(*runs, strict=True)
            parts = zip(temperatures, hidden_MD.split(counts), targets_M.split(counts), strict=True)
            nll_M = torch.cat([losses_at(*part) for part in parts])
        if not wanted:
            return nll_M, None
        spreads = []
        # By slices, so that the rows of other tasks take no part: 0 * NaN would be NaN.
        for index, (start, end) in enumerate(pairwise(batch.target_offsets)):
            own_MD, own_M = hidden_MD[start:end], targets_M[start:end]
            if index not in wanted:
                exact = torch.promote_types(hidden_MD.dtype, torch.float32)
                spreads.append(hidden_MD.new_zeros(end - start, dtype=exact))
            elif words is None:
                spreads.append(linear_spreads(own_MD, head, own_M))
            else:
                own_MD = words.entering(own_MD)
                part_M = linear_spreads(own_MD, head, own_M, first=words.first, vocab_size=words.vocab_size)
                spreads.append(words.summed(part_M))
        return nll_M, torch.cat(spreads)


def _head_of_tasks(module: Any, batch: MuxBatch, model: Any) -> Any:
    """Return the output module; the frozen layer below its adapters if none of them is of a task of the batch."""
    if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        return module
    # Processes that share its weights gather them equally often, whatever tasks their passes have.
    if weights_of(module) is not WHOLE:
        return module
    held = {part for name, _ in module.named_parameters() for part in name.split(".")}
    if not held.isdisjoint(model.adapters[name] for name in batch.task_names):
        return module
    return module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module.get_base_layer()


def _adapted_losses(
    hidden_MD: torch.Tensor, targets_M: torch.Tensor, batch: MuxBatch, model: Any, *, has_spreads: bool
) -> torch.Tensor:
    """Return the losses `[1, M]`, or losses and spreads `[2, M]`, if some task adapts the head."""
    module, _, _ = output_head(model.backbone)
    stream, adapters, words = model.stream, model.adapters, _vocab_part(module)
    places_M = batch.token_places.index_select(0, batch.target_rows)
    # Rounded up, as parts may differ by a word and all shards must cut the same blocks.
    frozen = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module.base_layer
    num_words = frozen.weight.shape[0] if words is None else -(-words.vocab_size // words.links.size)
    size = block_rows(num_words, hidden_MD.device.type)
    hidden_MD = hidden_MD if words is None else words.entering(hidden_MD)
    temperatures = _temperatures(batch, model)
    pairs = zip(temperatures, target_counts(batch), strict=True)
    by_target = [temperature for temperature, count in pairs for _ in range(count)]
    are_scaled = any(temperature != 1.0 for temperature in temperatures)
    temperatures_M = torch.tensor(by_target, dtype=torch.float32, device=hidden_MD.device) if are_scaled else None

    def block(hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        offsets = tuple(min(max(offset - start, 0), end - start) for offset in batch.target_offsets)
        # Read again: when a block is recomputed in the backward pass, the stream is idle or reads another batch.
        with stream.reading(batch, adapters), stream.selected_rows(offsets, places_M[start:end], adapters):
            if words is None:
                logits = head_logits(model.backbone, hidden)
            else:
                with temporary_attributes(words, is_local=True):
                    logits = head_logits(model.backbone, hidden)
        # A quotient by 1 changes no bit of another task.
        logits_MV = logits if temperatures_M is None else logits / temperatures_M[start:end, None]
        own_M, num_held = targets_M[start:end], logits_MV.shape[1]
        if words is None:
            losses_M, first, vocab_size = F.cross_entropy(logits_MV, own_M, reduction="none"), 0, num_held
        else:
            first, vocab_size = words.first, words.vocab_size
            losses_M = VocabParallelCrossEntropy.apply(logits_MV, own_M, first, words.links)
        if not has_spreads:
            return losses_M[None]
        spread_M = spreads_of_logits(logits_MV, Targets.of(own_M, first, num_held), vocab_size)
        return torch.stack([losses_M, spread_M if words is None else words.summed(spread_M)])

    parts = []
    for start in range(0, len(hidden_MD), size):
        end = min(start + size, len(hidden_MD))
        # Recomputed block by block, so that only the logits of one block are ever held; draws need no state.
        parts.append(checkpoint(block, hidden_MD[start:end], start, end, use_reentrant=False, preserve_rng_state=False))
    # An empty sum keeps the graph if no row has a target.
    return torch.cat(parts, dim=1) if parts else hidden_MD.sum(dim=1)[None].expand(1 + has_spreads, -1)


def outputs_of_words(
    hidden_TD: torch.Tensor, batch: MuxBatch, model: Any, task: int, *, is_smoothed: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the losses of a task's targets, and what its loss reads of other words than these.

    Only the logits of one block of targets are ever held, and made again in the backward pass.

    Args:
        hidden_TD: the last hidden states `[T, D]`.
        batch: micro-batch that the hidden states belong to.
        model: the `MultiTaskPeftModel`.
        task: number of the task in the micro-batch.
        is_smoothed: whether the task smooths its labels.

    Returns:
        Negative log-likelihoods `[M]` of the targets; and by their names in `TokenOutputs` the log-probabilities
        `[M, K]` of words that rows name, the spreads `[M]` of smoothed labels, and the entropies `[M]`; fp32.

    Raises:
        UnsupportedModelError: if tensor parallelism divides the vocabulary.
    """
    module, scale, softcap = output_head(model.backbone)
    module = _head_of_tasks(module, batch, model)
    if _vocab_part(module) is not None:
        raise UnsupportedModelError(
            f"tasks.{batch.task_names[task]} must have one target per token where tensor parallelism divides the "
            "vocabulary, got rows that name several words for each target, or a loss that reads entropies. Set "
            "tensor_parallel_size=1."
        )
    rows_M = batch.target_rows[batch.target_offsets[task] : batch.target_offsets[task + 1]]
    name = batch.task_names[task]
    columns = batch.target_columns[task]
    named = [columns[name] for name in WORDS if name in columns]
    ids_MK = torch.cat([batch.labels[0].index_select(0, rows_M)[:, None], *named], dim=1)
    args = model.objectives.args_of(name)
    temperature, has_entropy = args.temperature, args.entropy_coef != 0
    weights = weights_of(module)
    hidden_MD = weights.free_after_backward(states_of(hidden_TD, batch, rows_M))
    places_M = batch.token_places.index_select(0, rows_M)
    size = block_rows(module.weight.shape[0], hidden_MD.device.type)

    def block(hidden_MD: torch.Tensor, ids_MK: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities `[M, K]` of words; behind them, if read, their mean and their expectation."""
        weight, bias = frozen_weight(module) if not hasattr(module, "base_layer") else (None, None)
        if weight is not None:
            # The dtype follows from the hidden states, as in the loss of one target a token.
            with torch.autocast(hidden_MD.device.type, enabled=False):
                logits_MV = Head(weight, bias, scale, softcap).logits(hidden_MD)
        else:
            # An adapted head sees rows of this task alone, also when a block is recomputed.
            offsets = (0,) * (task + 1) + (len(hidden_MD),) * (len(batch.task_names) - task)
            stream, adapters = model.stream, model.adapters
            with stream.reading(batch, adapters), stream.selected_rows(offsets, places, adapters):
                logits_MV = head_logits(model.backbone, hidden_MD)
        logits_MV = logits_MV if temperature == 1.0 else logits_MV / temperature
        of_words = logits_MV.gather(1, ids_MK)
        if is_smoothed:
            of_words = torch.cat([of_words, logits_MV.mean(dim=1, keepdim=True)], dim=1)
        if has_entropy:
            of_words = torch.cat([of_words, (logits_MV.softmax(dim=1) * logits_MV).sum(dim=1, keepdim=True)], dim=1)
        return of_words - torch.logsumexp(logits_MV, dim=1, keepdim=True)

    parts = []
    with weights.gathered():
        for start in range(0, max(len(hidden_MD), 1), size):
            rows = slice(start, start + size)
            arguments = hidden_MD[rows], ids_MK[rows], places_M[rows]
            parts.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
    logprobs_MK = weights.gather_before_backward(torch.cat(parts))
    sizes = [1, ids_MK.shape[1] - 1, is_smoothed, has_entropy]
    target_M, words_MK, mean_M, expected_M = logprobs_MK.split(sizes, dim=1)
    target_M, others = target_M.squeeze(1), {}
    if named:
        others["word_logprobs_MK"] = words_MK
    if is_smoothed:
        others["spread_M"] = target_M - mean_M.squeeze(1)
    if has_entropy:
        others["entropy_M"] = -expected_M.squeeze(1)
    return -target_M, others


class LanguageHead(OutputHead):
    """One layer from hidden states to logits of words, perhaps with adapters on it."""

    kind = LANGUAGE_MODEL

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> torch.Tensor:
        """Return the negative log-likelihoods `[M]` of the targets of all tasks, whatever their losses."""
        return self._losses(hidden_TD, batch, model)[0]

    def _losses(
        self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any, smoothed: Collection[str] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        pairs = None if batch.shared is None else batch.shared.pairs
        if pairs is None:
            return target_losses(hidden_TD, batch, model, smoothed)
        # Sequences that share a row and its next token share that target, too.
        once = replace(batch, target_rows=batch.target_rows.index_select(0, pairs.first), target_offsets=pairs.offsets)
        nll_P, spread_P = target_losses(hidden_TD, once, model, smoothed)
        spread_M = None if spread_P is None else take_rows(spread_P, pairs.of_target)
        return take_rows(nll_P, pairs.of_target), spread_M

    def outputs(
        self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any, smoothed: Collection[str] = ()
    ) -> list[TokenOutputs]:
        """Return each task's own targets, from one linear cross-entropy over those of all tasks.

        Tasks whose rows name several words for each target, or whose loss reads entropies, have a pass of the head of
        their own instead.
        """
        naming = [
            index
            for index, (name, columns) in enumerate(zip(batch.task_names, batch.target_columns, strict=True))
            if not columns.keys().isdisjoint(WORDS) or model.objectives.args_of(name).entropy_coef != 0
        ]
        counts, rest = target_counts(batch), batch
        if naming:
            counts = [0 if index in naming else count for index, count in enumerate(counts)]
            starts = batch.target_offsets
            rows = [batch.target_rows[start : start + count] for start, count in zip(starts, counts, strict=False)]
            shared = batch.shared and replace(batch.shared, pairs=None)
            rest = replace(batch, target_rows=torch.cat(rows), target_offsets=(0, *accumulate(counts)), shared=shared)
        nll_M, spread_M = self._losses(hidden_TD, rest, model, smoothed)
        nll = list(nll_M.split(counts))
        others: dict[int, dict[str, torch.Tensor]] = {}
        if spread_M is not None:
            parts = enumerate(spread_M.split(counts))
            others = {index: {"spread_M": own_M} for index, own_M in parts if batch.task_names[index] in smoothed}
        for index in naming:
            is_smoothed = batch.task_names[index] in smoothed
            nll[index], others[index] = outputs_of_words(hidden_TD, batch, model, index, is_smoothed=is_smoothed)
        return token_outputs(nll, batch, others)

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> list[torch.Tensor]:
        """Return the `[L, V]` logits of every sequence but its virtual tokens, computed one sequence at a time."""
        module, _, _ = output_head(model.backbone)
        logits, start = [], 0
        with weights_of(module).gathered():
            # One by one, as logits of the whole stream would be the largest tensor of the pass.
            for length, num_virtual in zip(batch.sequence_lengths, virtual_tokens_of_sequences(batch), strict=True):
                end, start = start + length, start + num_virtual
                if batch.shared is None:
                    hidden_LD = hidden_TD[start:end]
                else:
                    hidden_LD = take_rows(hidden_TD, batch.shared.row_of_token[start:end])
                offsets = tuple(min(max(offset - start, 0), end - start) for offset in batch.task_offsets)
                with model.stream.selected_rows(offsets, batch.token_places[start:end], model.adapters):
                    logits.append(head_logits(model.backbone, hidden_LD))
                start = end
        return logits

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels `[L]` of every sequence, not shifted, as Trainer gives them to `compute_metrics`.

        Those of two answers are all of their tokens, as with TRL's `DPOTrainer`.
        """
        by_place, place = {}, 0
        for row in batch.sequences:
            labels = row.input_ids if row.is_one_term and row.starts else row.labels
            for start, end in row.sequence_bounds:
                by_place[place + start] = labels[start + row.num_virtual_tokens : end]
            place += len(row)
        # Packing reorders sequences; the place of the first token within the batch identifies each one.
        for start in micro_batch.cu_seqlens[:-1].tolist():
            yield by_place[int(micro_batch.token_places[start])]


def token_outputs(
    nll: torch.Tensor | Sequence[torch.Tensor],
    batch: MuxBatch,
    others: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
) -> list[TokenOutputs]:
    """Return what the losses of each task of a micro-batch read.

    Args:
        nll: negative log-likelihoods `[M]` of all targets, or `[M_task]` of those of each task.
        batch: the micro-batch.
        others: further fields of `TokenOutputs` by number of the task, as `outputs_of_words` returns them.
    """
    # Split, not masked or scattered: 0 * NaN is NaN, so a sum over all rows would carry one task's NaN to the others.
    by_task = nll.split(target_counts(batch)) if isinstance(nll, torch.Tensor) else nll
    outputs = []
    for index, own_M in enumerate(by_task):
        first, last = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
        bounds = pairwise(batch.sequence_target_offsets[first : last + 1])
        outputs.append(
            TokenOutputs(
                nll_M=own_M,
                batch=batch,
                index=index,
                sequence_counts=tuple(end - start for start, end in bounds),
                row_sequences=batch.row_sequences[batch.row_offsets[index] : batch.row_offsets[index + 1]],
                columns=batch.target_columns[index],
                **(others or {}).get(index, {}),
                **common_fields(batch, index),
            )
        )
    return outputs


def _temperatures(batch: MuxBatch, model: Any) -> list[float]:
    """Return the number by which the logits of each task are divided."""
    return [model.objectives.args_of(name).temperature for name in batch.task_names]


def target_counts(batch: MuxBatch) -> list[int]:
    """Return the number of targets of each task."""
    return [end - start for start, end in pairwise(batch.target_offsets)]


LANGUAGE_HEAD = LanguageHead()
HEADS[LANGUAGE_MODEL.name] = LANGUAGE_HEAD
