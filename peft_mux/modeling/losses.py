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

from peft_mux.data.batch import IGNORE_INDEX, MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.linear_cross_entropy import Head, block_rows, linear_cross_entropy
from peft_mux.modeling.layers import frozen_weight
from peft_mux.modeling.stream import Stream


class TargetRows:
    """Rows of a micro-batch that predict something.

    Attributes:
        rows: int64 `[M]`, places in the stream.
        targets: int64 `[M]`.
        offsets: of the tasks among these rows, `N + 1` numbers.
    """

    def __init__(self, batch: MuxBatch) -> None:
        """Find the target rows of `batch`."""
        labels = batch.labels[0]
        self.rows = torch.nonzero(labels != IGNORE_INDEX).squeeze(1)
        self.targets = labels[self.rows]
        bounds = torch.searchsorted(self.rows, torch.tensor(batch.task_offsets, device=labels.device))
        self.offsets: tuple[int, ...] = tuple(bounds.tolist())

    @property
    def counts(self) -> list[int]:
        """Number of target rows of each task."""
        return [end - start for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


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
) -> tuple[torch.Tensor, TargetRows]:
    """Return the negative log-likelihood of every target of a micro-batch.

    Args:
        hidden_TD: `[T, D]` last hidden states.
        backbone: the causal language model.
        batch: the micro-batch.
        stream: reading `batch`.
        adapters: internal adapter id of each task name.

    Returns:
        `[M]` losses and the rows they belong to.
    """
    target_rows = TargetRows(batch)
    hidden_MD = hidden_TD.index_select(0, target_rows.rows)
    module, scale, softcap = output_head(backbone)
    weight, bias = frozen_weight(module)
    if weight is not None:
        return linear_cross_entropy(hidden_MD, Head(weight, bias, scale, softcap), target_rows.targets), target_rows
    if isinstance(module, BaseTunerLayer):
        return _adapted_losses(hidden_MD, module, target_rows, batch, stream, adapters, (scale, softcap)), target_rows
    raise UnsupportedModelError(
        f"the output head of {type(backbone).__name__} is a {type(module).__name__}; allowed: a linear layer."
    )


def _adapted_losses(
    hidden_MD: torch.Tensor,
    module: Any,
    target_rows: TargetRows,
    batch: MuxBatch,
    stream: Stream,
    adapters: dict[str, str],
    transform: tuple[float, float | None],
) -> torch.Tensor:
    """The same where some task adapts the head: blocks of logits are recomputed in the backward pass."""
    scale, softcap = transform
    places_M = batch.token_places[target_rows.rows]
    size = block_rows(module.base_layer.weight.shape[0], hidden_MD.device.type)

    def block(hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        offsets = tuple(min(max(offset - start, 0), end - start) for offset in target_rows.offsets)
        with stream.reading(batch, adapters), stream.selected_rows(offsets, places_M[start:end], adapters):
            logits = module(hidden).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, target_rows.targets[start:end], reduction="none")

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
