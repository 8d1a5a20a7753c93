"""Sequence classification: pooling a packed stream and running one head a task.

Model code pools by batch row (`hidden[:, 0]`, last token), which a packed stream does not have; so the pooled rows are
picked by sequence offsets here, and the model's own pooler, dropout and head modules run on them. `probe` holds the
result against the model's own forward, and refuses architectures whose head does anything else.

Shape letters: T tokens, S sequences, D hidden features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.stream import Stream
from peft_mux.modeling.support import HEAD_NAMES


def head_module(backbone: Any) -> tuple[str, Any]:
    """Return the name and the module of the classification head (PEFT's wrapper once adapters are injected).

    Raises:
        UnsupportedModelError: if there is none under a name that PEFT knows.
    """
    for name in HEAD_NAMES:
        if isinstance(getattr(backbone, name, None), nn.Module):
            return name, getattr(backbone, name)
    raise UnsupportedModelError(
        f"{type(backbone).__name__} has no classification head; allowed: models with a module named "
        f"{' or '.join(HEAD_NAMES)}. Load the backbone with AutoModelForSequenceClassification for SEQ_CLS tasks."
    )


@contextmanager
def without_pooler(backbone: Any) -> Iterator[None]:
    """Keep the encoder from pooling the packed stream, whose first row is one task's first token."""
    encoder = backbone.base_model
    pooler = getattr(encoder, "pooler", None)
    if pooler is None:
        yield
        return
    encoder.pooler = None
    try:
        yield
    finally:
        encoder.pooler = pooler


def pooled_states(hidden_TD: torch.Tensor, backbone: Any, batch: MuxBatch) -> torch.Tensor:
    """Return `[S, D]`: the first token of each sequence for encoders, the last for decoders, through the pooler."""
    name, _ = head_module(backbone)
    starts = batch.cu_seqlens[:-1].to(torch.int64)
    rows = _last_tokens(batch, backbone.config.get_text_config().pad_token_id) if name == "score" else starts
    pooled = hidden_TD.index_select(0, rows)
    pooler = getattr(backbone.base_model, "pooler", None)
    return pooled if pooler is None else pooler(pooled.unsqueeze(1))


def _last_tokens(batch: MuxBatch, pad_token_id: int | None) -> torch.Tensor:
    """Return `[S]` rows: the last token of each sequence that is not the padding token, as transformers picks it."""
    bounds = batch.cu_seqlens.to(torch.int64)
    rows = torch.arange(batch.num_tokens, device=bounds.device)
    if pad_token_id is not None:
        rows = torch.where(batch.input_ids[0] != pad_token_id, rows, -1)
    return torch.maximum(torch.cummax(rows, dim=0).values[bounds[1:] - 1], bounds[:-1])


def task_logits(
    hidden_TD: torch.Tensor, backbone: Any, batch: MuxBatch, stream: Stream, adapters: dict[str, str]
) -> list[torch.Tensor]:
    """Return the `[S_task, C_task]` logits of each task of a micro-batch.

    Args:
        hidden_TD: `[T, D]` last hidden states.
        backbone: the classifier.
        batch: the micro-batch.
        stream: reading `batch`.
        adapters: internal adapter id of each task name.
    """
    places = batch.token_places[batch.cu_seqlens[:-1].to(torch.int64)]
    _, wrapper = head_module(backbone)
    with stream.selected_rows(batch.sequence_offsets, places, adapters):
        pooled = pooled_states(hidden_TD, backbone, batch)
        takes_features = _takes_features(wrapper)
        dropout = getattr(backbone, "dropout", None)
        if isinstance(dropout, nn.Module) and not takes_features:
            pooled = dropout(pooled)
    logits = []
    offsets = batch.sequence_offsets
    for index, name in enumerate(batch.task_names):
        rows = (0,) * (index + 1) + (offsets[index + 1] - offsets[index],) * (len(offsets) - index - 1)
        start, end = offsets[index], offsets[index + 1]
        head = _head_of(wrapper, adapters[name])
        with stream.selected_rows(rows, places[start:end], adapters):
            states = pooled[start:end]
            logits.append(head(states.unsqueeze(1) if takes_features else states))
    return logits


def _head_of(wrapper: Any, adapter: str) -> Any:
    if not hasattr(wrapper, "modules_to_save"):
        return wrapper
    return wrapper.original_module if wrapper.disable_adapters else wrapper.modules_to_save[adapter]


def _takes_features(wrapper: Any) -> bool:
    """Whether the head is a module of its own kind that takes `[S, L, D]` and pools by itself (RoBERTa)."""
    head = getattr(wrapper, "original_module", wrapper)
    return not isinstance(head, nn.Linear)


def task_losses(logits: list[torch.Tensor], batch: MuxBatch) -> torch.Tensor:
    """Return the `[S]` losses: cross-entropy for classes, squared error for values.

    Args:
        logits: of each task, from `task_logits`.
        batch: with `class_labels`.
    """
    assert batch.class_labels is not None, "a classification batch carries class labels"
    losses = []
    for index, task_logits_SC in enumerate(logits):
        labels = batch.class_labels[batch.sequence_offsets[index] : batch.sequence_offsets[index + 1]]
        scores = task_logits_SC.float()
        if scores.shape[1] == 1:
            losses.append((scores[:, 0] - labels.float()) ** 2)
        else:
            losses.append(F.cross_entropy(scores, labels.long(), reduction="none"))
    return torch.cat(losses)
