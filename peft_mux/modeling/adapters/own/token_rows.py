"""`trainable_token_indices`: every task has its own rows of an embedding for some tokens, and of a head that is tied.

PEFT writes a task's rows into a copy of the whole embedding in every pass. Here the embedding is read once for all
tasks, and a task's own rows take the place of what it gave, at the task's places alone.

Shape letters: N rows of one task, D features, V words, I tokens whose rows are trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from torch.nn import functional as F

from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.backbone.modules import modules_around_adapters, put_module


class MultiplexedTokenRows(MultiplexedForward):
    """PEFT's wrapper around an embedding, or around the head that is tied to one, with the rows of each task."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the module's output; outside of a pass PEFT's own, which fails for adapters without rows here."""
        tokens: Any = self.module.token_adapter
        if self.stream.is_idle and not all(adapter in tokens.token_indices for adapter in tokens.active_adapters):
            return tokens.base_layer(x, *args, **kwargs)
        return super().__call__(x, *args, **kwargs)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[1, T, D]` of token ids, or the logits `[..., V]` of hidden states."""
        wrapper: Any = self.module
        tokens = wrapper.token_adapter
        base, segments = tokens.base_layer, self.stream.segments
        is_ids = not x.is_floating_point()
        self.check_rows(x, 1 if is_ids else x.shape[-1])
        y = base(x)
        if wrapper.disable_adapters or not any(segment.adapter in tokens.token_indices for segment in segments):
            return y
        rows, outputs, parts = x.reshape(-1) if is_ids else x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), []
        for segment, read, part in zip(segments, self.by_segment(rows), self.by_segment(outputs), strict=True):
            if segment.adapter in tokens.token_indices:
                own = _own_embeddings if is_ids else _own_logits
                parts.append(own(tokens, segment.adapter, read, part))
            else:
                parts.append(part)
        # Joined from slices and not masked: 0 * NaN would carry one task's NaN to the others.
        return torch.cat(parts).view_as(y)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this module can be captured: the numbers of rows differ from pass to pass."""
        return f"a task trains its own rows of {self.name}"


def _own_embeddings(tokens: Any, adapter: str, ids_N: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
    indices_I, rows_ID = _indices(tokens, adapter, ids_N.device), tokens.trainable_tokens_delta[adapter]
    is_own_NI = ids_N[:, None] == indices_I[None, :]
    own_ND = rows_ID[is_own_NI.int().argmax(dim=1)].to(y_ND.dtype)
    scale = tokens._get_embed_scale()
    if scale is not None:
        own_ND = own_ND * scale.to(y_ND.dtype)
    base: nn.Embedding = tokens.base_layer
    if base.padding_idx is not None:  # which an embedding gives no gradient
        own_ND = torch.where((ids_N == base.padding_idx)[:, None], own_ND.detach(), own_ND)
    return torch.where(is_own_NI.any(dim=1)[:, None], own_ND, y_ND)


def _own_logits(tokens: Any, adapter: str, x_ND: torch.Tensor, y_NV: torch.Tensor) -> torch.Tensor:
    own_NI = F.linear(x_ND, tokens.trainable_tokens_delta[adapter].to(x_ND.dtype))
    return y_NV.index_copy(1, _indices(tokens, adapter, x_ND.device), own_NI.to(y_NV.dtype))


def _indices(tokens: Any, adapter: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(tokens.token_indices[adapter], device=device)


@contextmanager
def only_rows_of(backbone: nn.Module, adapter: str) -> Iterator[None]:
    """Show PEFT those embeddings alone as trained of which an adapter trains rows, in the `with` block.

    PEFT asks every wrapper for the rows of the adapter that it saves or loads, and fails where there are none.

    Args:
        backbone: the model, with the adapters of all tasks.
        adapter: internal id of the adapter.
    """
    others: dict[str, Any] = {
        name: module
        for name, module in modules_around_adapters(backbone)
        if isinstance(module, TrainableTokensWrapper) and adapter not in module._adapters
    }
    for name, wrapper in others.items():
        put_module(backbone, name, wrapper.original_module)
    try:
        yield
    finally:
        for name, wrapper in others.items():
            put_module(backbone, name, wrapper)
