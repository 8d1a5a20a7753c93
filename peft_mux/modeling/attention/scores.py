"""How attention sees parts of long sequences: which keys come before a part's own, and where its scores lie.

The queries of a part are the last tokens that its keys are of, so causality is a triangle moved to the right::

    part of tokens 4 to 6          keys    0 1 2 3 | 4 5 6
                         query 4           x x x x | x . .
                         query 5           x x x x | x x .
                         query 6           x x x x | x x x

Shape letters: T tokens, G key-value heads, L tokens of a part, K keys of a part, C channels of a head.
"""

# MERGED: Attention within one rectangle: by torch's fused attention, or with the weights written out.
# MERGED: Shape letters: n sequences of a rectangle, L its length, K keys of each, H heads, G key-value heads, C
# MERGED: channels of a
# MERGED: head.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch, SequencePart
from peft_mux.modeling.stream import KeyValueStore


class PartsInFlight:
    """The parts of long sequences in one micro-batch.

    Args:
        batch: the micro-batch, some of whose sequences are parts of longer ones.
        store: holds the keys and values of earlier parts, and takes those that later ones will read.

    Attributes:
        of_sequence: the parts by index of their sequence in the stream; whole sequences are absent.
    """

    def __init__(self, batch: MuxBatch, store: KeyValueStore) -> None:
        """Find which sequences are parts."""
        self._store = store
        self._lengths = batch.sequence_lengths
        self.of_sequence: dict[int, SequencePart] = {
            index: part for index, part in enumerate(batch.parts) if not part.is_whole
        }

    def keep(self, layer: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the keys and values that later parts will read.

        Args:
            layer: name of the attention module.
            key: `[1, G, T, C]`.
            value: `[1, G, T, C']`.
        """
        starts = np.cumsum(self._lengths) - self._lengths
        for index, part in self.of_sequence.items():
            # Nothing reads the keys of a last part after its own pass.
            if part.has_more:
                rows = slice(int(starts[index]), int(starts[index]) + self._lengths[index])
                self._store.keep(layer, part, key[0, :, rows], value[0, :, rows])

    def release_finished(self, layer: str) -> None:
        """Free the keys and values of sequences that end here, where there is no backward pass to wait for.

        Args:
            layer: name of the attention module.
        """
        # With gradients, the backward may read them again, and `release` frees them after it.
        if not torch.is_grad_enabled():
            for part in self.of_sequence.values():
                if not part.has_more:
                    self._store.forget(layer, part)

    def joined(
        self, layer: str, index: int, keys_GLC: torch.Tensor, values_GLC: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a part's keys and values behind those of the parts before it, `[G, K, C]`.

        Args:
            layer: name of the attention module.
            index: number of the part among the sequences of the stream.
            keys_GLC: the part's own keys `[G, L, C]`.
            values_GLC: the part's own values `[G, L, C']`.
            window: a query sees this many tokens, itself included; keys that none sees are left out.
        """
        part = self.of_sequence[index]
        pairs = [*self._store.earlier(layer, part, window), (keys_GLC, values_GLC)]
        if len(pairs) == 1:
            # A first part has nothing before it, and needs no copy.
            return pairs[0]
        return torch.cat([keys for keys, _ in pairs], dim=1), torch.cat([values for _, values in pairs], dim=1)

    def joined_stream(
        self, layer: str, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Return keys and values of all sequences, each behind those before it, and how many keys each one has.

        Args:
            layer: name of the attention module.
            key: `[1, G, T, C]`.
            value: `[1, G, T, C']`.
            window: a query sees this many tokens, itself included; keys that none sees are left out.
        """
        pairs = []
        own = zip(key[0].split(self._lengths, dim=1), value[0].split(self._lengths, dim=1), strict=True)
        for index, (keys_GLC, values_GLC) in enumerate(own):
            is_part = index in self.of_sequence
            pairs.append(self.joined(layer, index, keys_GLC, values_GLC, window) if is_part else (keys_GLC, values_GLC))
        keys, values = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
        return keys, values, tuple(keys_GLC.shape[1] for keys_GLC, _ in pairs)


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return bool `[L, K]`, true where a query sees a key, or `None` where plain causality says it all.

    Args:
        num_queries: number L of queries.
        num_keys: number K of keys; the last L of them are of the queries' own tokens.
        window: a query sees this many tokens, itself included; `None` for all.
        device: where the mask is made.
    """
    # Without a mask torch takes its fused kernels, whose own triangle is right where there are as many keys as queries.
    if num_keys == num_queries and (window is None or num_keys <= window):
        return None
    rows = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = rows[:, None] - torch.arange(num_keys, device=device)[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class Scores(NamedTuple):
    """What attention does to scores before their softmax; `window` counts the query itself, `sinks` is `[H]`."""

    scaling: float
    is_causal: bool
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    dropped: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attend within one rectangle, whose queries are the last of the tokens that there are keys of.

    Args:
        q: queries `[n, H, L, C]`.
        k: keys `[n, G, K, C]`.
        v: values `[n, G, K, C']`.
        scores: what is done to scores.
        dropped: returns weights `[n, H, L, K]` after dropout; `None` for no dropout.

    Returns:
        Outputs `[n * L, H, C']`.
    """
    mask = causal_mask(q.shape[2], k.shape[2], scores.window, q.device)
    if scores.softcap is None and scores.sinks is None and dropped is None:
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            # Torch takes a mask or the flag, never both.
            is_causal=scores.is_causal and mask is None,
            scale=scores.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        out = _attend_by_weights(q, k, v, scores, mask, dropped)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


def _attend_by_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    mask: torch.Tensor | None,
    dropped: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Return `[n, H, L, C']` with the weights written out: fused attention knows no soft-caps, sinks or our dropout."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        # Written out for the plain product; fused attention shares key-value heads without a copy.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = (q @ k.transpose(-1, -2)) * scores.scaling
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if mask is None and scores.is_causal:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    # In fp32 as the eager attention of transformers: the sum over long rows loses bits in half precision.
    if scores.sinks is not None:
        sinks = scores.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1].to(q.dtype)
    else:
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
    if dropped is not None:
        weights = dropped(weights)
    return weights @ v
