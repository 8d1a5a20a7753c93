"""Keys and values of rows that are completed token by token, between the passes that attend to them.

Prompts come as one packed stream, and attend as any stream does; what their tokens leave is laid out by row, shorter
rows behind zeros. After that every pass brings one token of each row, which attends to its own row alone. Rows share a
call but no arithmetic, so a row with NaN harms no other.

Shape letters: B rows, T tokens of all prompts, L columns (tokens of the longest row so far), H heads, G key-value
heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

_GROWTH = 64
"""Columns by which memory grows at a time, so that a pass writes in place and copies nothing."""


class KeyValueRows:
    """Keeps the keys and values of every layer, by row.

    Args:
        lengths: how many tokens of each row come in the packed stream, in which rows follow one another.
        device: where keys and values are.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Keep nothing yet."""
        self._num_columns = max(lengths)
        columns = torch.arange(self._num_columns, device=device)
        self._first_B = self._num_columns - torch.tensor(list(lengths), device=device)
        self._is_padded = len(set(lengths)) > 1
        # Row by row, which is the order of the stream.
        self._places = (columns >= self._first_B[:, None]).nonzero(as_tuple=True)
        self._is_reading = True
        self._layers: dict[str, list[torch.Tensor]] = {}
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def next_column(self) -> None:
        """Expect one token of every row in the next pass."""
        self._is_reading = False
        self._num_columns += 1
        self._masks.clear()

    def select(self, rows: Sequence[int]) -> None:
        """Keep some of the rows, and forget the others.

        Args:
            rows: numbers of the rows that stay, in their order from now on.
        """
        numbers = torch.tensor(list(rows), device=self._first_B.device)
        self._first_B = self._first_B[numbers]
        self._layers = {name: [x[numbers] for x in kept] for name, kept in self._layers.items()}

    def attend(
        self,
        layer: str,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Keep the keys and values of a pass, and return what its queries attend to; `None` while prompts are read.

        Args:
            layer: name of the attention module.
            qkv: queries `[1, H, B, C]`, keys and values `[1, G, B, C]`; of prompts T in place of B.
            scaling: factor of the scores.
            window: a query sees this many tokens, itself included; `None` for all before it.
            softcap: bound of the scores; `None` for none.
            sinks: `[H]`, a score of each head that takes part in the softmax and leads to no value; `None` for none.

        Returns:
            Outputs `[1, B, H, C]`.
        """
        query, key, value = qkv
        if self._is_reading:
            self._layers[layer] = [self._by_row(key), self._by_row(value)]
            return None
        k_BGLC, v_BGLC = self._appended(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        q_BH1C = query[0].transpose(0, 1)[:, :, None]
        mask = self._mask(window)
        if softcap is None and sinks is None:
            is_grouped = q_BH1C.shape[1] != k_BGLC.shape[1]
            out = F.scaled_dot_product_attention(
                q_BH1C, k_BGLC, v_BGLC, attn_mask=mask, scale=scaling, enable_gqa=is_grouped
            )
        else:
            out = _attend_by_weights(q_BH1C, k_BGLC, v_BGLC, mask, scaling, softcap, sinks)
        return out[:, :, 0][None]

    def _by_row(self, x_1GTC: torch.Tensor) -> torch.Tensor:
        """Return `[B, G, L + room, C]` of a stream's keys or values."""
        x_TGC = x_1GTC[0].transpose(0, 1)
        x_BLGC = x_TGC.new_zeros(len(self._first_B), self._num_columns + _GROWTH, *x_TGC.shape[1:])
        x_BLGC[self._places] = x_TGC
        return x_BLGC.transpose(1, 2).contiguous()

    def _appended(self, layer: str, *new: torch.Tensor) -> list[torch.Tensor]:
        """Write the `[B, G, C]` keys and values of each row's newest token; return `[B, G, L, C]`, those of all."""
        last = self._num_columns - 1
        kept = self._layers[layer]
        if kept[0].shape[2] <= last:
            kept = [torch.cat([x, x.new_zeros(*x.shape[:2], _GROWTH, x.shape[3])], dim=2) for x in kept]
        for x, newest in zip(kept, new, strict=True):
            x[:, :, last] = newest
        self._layers[layer] = kept
        return [x[:, :, : self._num_columns] for x in kept]

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """Return which columns each row sees, `[B, 1, 1, L]`; `None` where it is all of them. Layers share it."""
        if window not in self._masks:
            begin = 0 if window is None else max(self._num_columns - window, 0)
            mask = None
            if self._is_padded or begin > 0:
                columns = torch.arange(self._num_columns, device=self._first_B.device)
                mask = (columns >= self._first_B.clamp(min=begin)[:, None])[:, None, None]
            self._masks[window] = mask
        return self._masks[window]


def _attend_by_weights(
    q_BH1C: torch.Tensor,
    k_BGLC: torch.Tensor,
    v_BGLC: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return `[B, H, 1, C]` with the weights written out: fused attention knows no soft-caps and no sinks."""
    groups = q_BH1C.shape[1] // k_BGLC.shape[1]
    k_BHLC, v_BHLC = (x.repeat_interleave(groups, dim=1) for x in (k_BGLC, v_BGLC))
    scores = (q_BH1C @ k_BHLC.transpose(-1, -2)) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        of_rows = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, of_rows], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BH1C.dtype)
    return weights[..., : v_BHLC.shape[2]] @ v_BHLC
