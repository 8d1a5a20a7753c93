"""`KeyValueRows`: the keys and values of every layer, while rows are completed token by token.

Shape letters: T tokens, B rows that are completed, L columns of a row, H heads, G key-value heads, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import nn

from peft_mux.modeling.attention.rows import QKV, Scores, attend

_GROWTH = 64
"""Columns by which memory grows at a time, so that a pass writes in place and copies nothing."""


class KeyValueRows:
    """The keys and values of every layer, by row.

    Prompts come as one packed stream, and attend as any stream does; their keys and values are then laid out by row,
    shorter rows behind zeros. After that every pass brings one token of each row, which attends only to its own row.
    Rows share a call but no arithmetic, so a row with NaN harms no other. Rows of padding behind them are not kept.

    Args:
        lengths: how many tokens of each row come in the packed stream, in which rows follow one another.
        device: where keys and values are.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
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
        """Keep the rows of these numbers, in their order from now on, and forget the others."""
        numbers = torch.tensor(list(rows), device=self._first_B.device)
        self._first_B = self._first_B[numbers]
        self._layers = {name: [x[numbers] for x in kept] for name, kept in self._layers.items()}

    def join(self, other: KeyValueRows) -> None:
        """Take over the rows of another memory, behind these; columns that no row needs any more are left out."""
        width = max(memory._num_columns - int(memory._first_B.min()) for memory in (self, other))
        layers: dict[str, list[list[torch.Tensor]]] = {name: [[], []] for name in self._layers}
        for memory in (self, other):
            num_columns, end = min(width, memory._num_columns), memory._num_columns
            for name, kept in memory._layers.items():
                for parts, x in zip(layers[name], kept, strict=True):
                    wide = x.new_zeros(*x.shape[:2], width + _GROWTH, x.shape[3])
                    wide[:, :, width - num_columns : width] = x[:, :, end - num_columns : end]
                    parts.append(wide)
        self._first_B = torch.cat([memory._first_B + (width - memory._num_columns) for memory in (self, other)])
        self._layers = {name: [torch.cat(parts) for parts in pair] for name, pair in layers.items()}
        self._num_columns, self._is_padded, self._is_reading = width, True, False
        self._masks.clear()

    def attend(self, layer: str, qkv: QKV, scores: Scores) -> torch.Tensor | None:
        """Keep the keys and values of a pass, and attend; return `None` while prompts are read.

        Args:
            layer: name of the attention module.
            qkv: queries `[1, H, B, C]`, keys and values `[1, G, B, C]`; of prompts T in place of B.
            scores: what is done to scores.

        Returns:
            Outputs `[1, B, H, C]`.
        """
        query, *new = (x[0].transpose(0, 1) for x in qkv)
        num_rows = len(self._first_B)
        if self._is_reading:
            self._layers[layer] = []
            for x_TGC in new:
                num_columns = self._num_columns + _GROWTH
                x_BLGC = x_TGC.new_zeros(num_rows, num_columns, *x_TGC.shape[1:])
                x_BLGC[self._places] = x_TGC[: len(self._places[0])]
                self._layers[layer].append(x_BLGC.transpose(1, 2).contiguous())
            return None
        last, kept = self._num_columns - 1, self._layers[layer]
        if kept[0].shape[2] <= last:
            kept = [torch.cat([x, x.new_zeros(*x.shape[:2], _GROWTH, x.shape[3])], dim=2) for x in kept]
            self._layers[layer] = kept
        for x, newest_BGC in zip(kept, new, strict=True):
            x[:, :, last] = newest_BGC[:num_rows]
        padding, query = len(query) - num_rows, query[:num_rows, :, None]
        window, scores = scores.window, scores._replace(is_causal=False)
        begin = 0 if window is None else max(self._num_columns - window, 0)
        if query.device.type == "cpu":
            # Rows of a length at a time: how a row rounds depends on the number of its keys, and on where they begin.
            outs, start = [], 0
            for first, equals in groupby(self._first_B.tolist()):
                rows = slice(start, start := start + len(list(equals)))
                keys, values = (x[rows, :, max(first, begin) : self._num_columns] for x in kept)
                outs.append(attend(query[rows], keys, values, scores, None))
            out = torch.cat(outs)
        else:
            k_BGLC, v_BGLC = (x[:, :, : self._num_columns] for x in kept)
            # A query comes last in its row, so what it sees is a matter of columns: layers with one window share it.
            if window not in self._masks:
                self._masks[window] = None  # each row sees all columns
                if self._is_padded or begin > 0:
                    columns = torch.arange(self._num_columns, device=self._first_B.device)
                    self._masks[window] = (columns >= self._first_B.clamp(min=begin)[:, None])[:, None, None]
            out = attend(query, k_BGLC, v_BGLC, scores, self._masks[window])
        return nn.functional.pad(out[:, :, 0], (0, 0, 0, 0, 0, padding))[None]
