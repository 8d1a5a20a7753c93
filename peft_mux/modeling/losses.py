"""From hidden states to one loss a task: causal language models, with a frozen or an adapted output head.

A task's loss is the sum over its target tokens divided by their number in the task's *global* batch, so no split into
micro-batches changes its gradient (promise 1 of the design).

Shape letters: T tokens, M rows that have a target, N tasks, D hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.linear_cross_entropy import Head, block_rows, linear_cross_entropy
from peft_mux.modeling.layers import frozen_weight
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
    weight, bias = frozen_weight(module)
    if weight is not None:
        return linear_cross_entropy(hidden_MD, Head(weight, bias, scale, softcap), targets_M)
    if isinstance(module, BaseTunerLayer):
        return _adapted_losses(hidden_MD, targets_M, module, batch, stream, adapters, (scale, softcap))
    raise UnsupportedModelError(
        f"the output head of {type(backbone).__name__} is a {type(module).__name__}; allowed: a linear layer."
    )


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
    size = block_rows(module.base_layer.weight.shape[0], hidden_MD.device.type)

    def block(hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        offsets = tuple(min(max(offset - start, 0), end - start) for offset in batch.target_offsets)
        with stream.reading(batch, adapters), stream.selected_rows(offsets, places_M[start:end], adapters):
            logits = module(hidden).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
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
    for length in batch.sequence_lengths:
        end = start + length
        offsets = tuple(min(max(offset - start, 0), length) for offset in batch.task_offsets)
        with stream.selected_rows(offsets, batch.token_places[start:end], adapters):
            rows = module(hidden_TD[start:end]).float() * scale
        logits.append(rows if softcap is None else softcap * torch.tanh(rows / softcap))
        start = end
    return logits
