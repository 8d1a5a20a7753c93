"""From hidden states to one loss a task: causal language models, with a frozen or an adapted output head.

A task's loss is the sum over its target tokens divided by their number in the task's *global* batch, so no split into
micro-batches changes its gradient (promise 1 of the design).

Shape letters: T tokens, M rows that have a target, N tasks, D hidden features.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.linear_cross_entropy import Head, block_rows, linear_cross_entropy
from peft_mux.kernels.sharded_cross_entropy import ShardedCrossEntropy, sharded_linear_cross_entropy
from peft_mux.modeling.gathering import free_after_backward, gather_before_backward, gathered
from peft_mux.modeling.layers import frozen_weight
from peft_mux.modeling.stream import Stream
from peft_mux.modeling.tensor_layers import to_shards
from peft_mux.modeling.vocabulary import vocabulary_shard


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
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return module, scale, getattr(config, "final_logit_softcapping", None)


def token_losses(
    hidden_TD: torch.Tensor, backbone: Any, batch: MuxBatch, stream: Stream, adapters: dict[str, str]
) -> torch.Tensor:
    """Return the negative log-likelihood of every target of a micro-batch, sorted by task.

    Args:
        hidden_TD: `[T, D]` last hidden states.
        backbone: the causal language model.
        batch: the micro-batch.
        stream: reading `batch`.
        adapters: internal adapter id of each task name.

    Returns:
        `[M]`.
    """
    hidden_MD = hidden_TD.index_select(0, batch.target_rows)
    targets_M = batch.labels[0].index_select(0, batch.target_rows)
    module, scale, softcap = output_head(backbone)
    if _is_adapted(module):
        hidden_MD = free_after_backward(hidden_MD, module)
        with gathered(module):
            losses_M = _adapted_losses(hidden_MD, targets_M, module, batch, stream, adapters, (scale, softcap))
        return gather_before_backward(losses_M, module)
    with gathered(module):
        weight, bias = frozen_weight(module)
        if weight is not None:
            head, words = Head(weight, bias, scale, softcap), vocabulary_shard(module)
            if words is None:
                return linear_cross_entropy(hidden_MD, head, targets_M)
            return sharded_linear_cross_entropy(
                hidden_MD, head, targets_M, first=words.first, vocab_size=words.vocab_size, links=words.links
            )
    raise UnsupportedModelError(
        f"the output head of {type(backbone).__name__} is a {type(module).__name__}; allowed: a linear layer."
    )


def _is_adapted(module: Any) -> bool:
    return isinstance(module, BaseTunerLayer)


def _adapted_losses(
    hidden_MD: torch.Tensor,
    targets_M: torch.Tensor,
    module: Any,
    batch: MuxBatch,
    stream: Stream,
    adapters: dict[str, str],
    transform: tuple[float, float | None],
) -> torch.Tensor:
    """The same where some task adapts the head: blocks of logits are recomputed in the backward pass."""
    scale, softcap = transform
    places_M = batch.token_places.index_select(0, batch.target_rows)
    words = vocabulary_shard(module)
    num_words = module.base_layer.weight.shape[0] if words is None else -(-words.vocab_size // words.links.size)
    size = block_rows(num_words, hidden_MD.device.type)
    hidden_MD = hidden_MD if words is None else to_shards(hidden_MD, words.links)

    def block(hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        offsets = tuple(min(max(offset - start, 0), end - start) for offset in batch.target_offsets)
        alone = nullcontext() if words is None else words.local()
        with stream.reading(batch, adapters), stream.selected_rows(offsets, places_M[start:end], adapters), alone:
            logits = module(hidden).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if words is not None:
            return ShardedCrossEntropy.apply(logits, targets_M[start:end], words.first, words.links)
        return F.cross_entropy(logits, targets_M[start:end], reduction="none")

    parts = []
    for start in range(0, len(hidden_MD), size):
        end = min(start + size, len(hidden_MD))
        parts.append(checkpoint(block, hidden_MD[start:end], start, end, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts) if parts else hidden_MD.sum(dim=1)


def per_task(losses: torch.Tensor, counts: list[int], weights: tuple[float, ...]) -> torch.Tensor:
    """Return the weighted sum of each task's own losses.

    Args:
        losses: `[M]`, sorted by task.
        counts: number of losses of each task.
        weights: 1 / number of loss terms in the task's global batch.

    Returns:
        `[N]`. A non-finite loss of one task leaves every other task's entry, and its gradient, untouched.
    """
    parts = losses.split(counts)
    return torch.stack([part.sum() * weight for part, weight in zip(parts, weights, strict=True)])


def stream_logits(
    hidden_TD: torch.Tensor, backbone: Any, batch: MuxBatch, stream: Stream, adapters: dict[str, str]
) -> list[torch.Tensor]:
    """Return the `[L, V]` logits of every sequence, computed one sequence at a time.

    Args:
        hidden_TD: `[T, D]` last hidden states.
        backbone: the causal language model.
        batch: the micro-batch.
        stream: reading `batch`.
        adapters: internal adapter id of each task name.
    """
    module, scale, softcap = output_head(backbone)
    logits, start = [], 0
    with gathered(module):
        for length in batch.sequence_lengths:
            end = start + length
            offsets = tuple(min(max(offset - start, 0), length) for offset in batch.task_offsets)
            with stream.selected_rows(offsets, batch.token_places[start:end], adapters):
                rows = module(hidden_TD[start:end]).float() * scale
            logits.append(rows if softcap is None else softcap * torch.tanh(rows / softcap))
            start = end
    return logits
