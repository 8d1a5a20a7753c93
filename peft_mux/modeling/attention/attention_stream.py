"""`AttentionStream`: the part of a micro-batch that attention reads, passed through the model call to every layer.

In addition to the batch that is

* parts of long sequences, whose keys and values later passes read (`KeyValueStore`),
* `Prefixes`: learnt keys and values in front of the sequences of a task (prefix tuning), in every layer. A prefix is no
  token: it has no queries, and stands before the first token of each of its task's sequences::

    prefix of 2 keys     keys    p p | 0 1 2
                  query 0        x x | x . .
                  query 1        x x | x x .
                  query 2        x x | x x x

* `KeyValueRows`: keys and values of rows that `generate` completes token by token.

Shape letters: T tokens, S sequences, n sequences of a rectangle, G key-value heads, V keys of a prefix, L keys of a
sequence, K keys of all sequences, C channels of a head; B rows that are completed; D hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from peft_mux.data.batch import MuxBatch, SequencePart
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.attention import MAX_TOKENS
from peft_mux.modeling.attention.prefix_tree import TreeLayouts
from peft_mux.modeling.attention.rows import LENGTH_STEP, Layout, build_layout, copied_to
from peft_mux.modeling.attention.scores import QKV, Scores, attend
from peft_mux.modeling.stream import Stream

# -------------------------------------------------------------- learnt prompts


class Prefixes:
    """The prefixes of one pass.

    Args:
        of_sequence: number of the prefix of each of the S sequences of the stream; `None` for those without.
        key_values: of each prefix, the keys and values of all layers, `[2 * layers, G, V, C]`: keys of a layer before
            its values.
    """

    def __init__(self, of_sequence: Sequence[int | None], key_values: Sequence[torch.Tensor]) -> None:
        """Split the prompt into layers, once for all of them."""
        self.of_sequence = tuple(of_sequence)
        self._layers = [stacked.unbind() for stacked in key_values]

    def num_keys(self, index: int) -> int:
        """Return the number V of keys before the first token of a sequence, by its number in the stream."""
        number = self.of_sequence[index]
        return 0 if number is None else self._layers[number][0].shape[1]

    def before(
        self, module: Any, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values behind those of their prefix, `[n, G, V + L, C]`.

        If attention slides a window, a later part of a long row has only the keys of earlier ones that it sees; then
        the prefix is beyond the window, and stays so.

        Args:
            module: the attention module that attends.
            index: number in the stream of one of the n sequences, which have one prefix.
            keys: keys `[n, G, L, C]`, of earlier parts of the sequence too.
            values: values `[n, G, L, C']`.

        Raises:
            UnsupportedModelError: if the layer has other heads than the prefix.
        """
        number = self.of_sequence[index]
        if number is None:
            return keys, values
        name, layer = type(module).__name__, getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= 2 * layer < len(self._layers[number]):
            raise UnsupportedModelError(
                f"{name} has layer number {layer}, for which a prefix has no keys: attention modules must be "
                "numbered from 0. Use PROMPT_TUNING, which needs no layers."
            )
        pair = []
        for prefix_GVC, own in zip(self._layers[number][2 * layer : 2 * layer + 2], (keys, values), strict=True):
            heads, _, channels = prefix_GVC.shape
            if (heads, channels) != (own.shape[1], own.shape[3]):
                raise UnsupportedModelError(
                    f"{name} (layer {layer}) must have the heads of the configuration, {heads} of {channels} "
                    f"channels, got {own.shape[1]} of {own.shape[3]}. Use PROMPT_TUNING, which needs no layers."
                )
            # Expanded, so that the backward is one sum over the sequences, in their order.
            shared = prefix_GVC.to(own.dtype).expand(own.shape[0], -1, -1, -1)
            pair.append(torch.cat([shared, own], dim=2))
        return pair[0], pair[1]


@dataclass(frozen=True, slots=True)
class PromptPass:
    """The prompts of the tasks of one micro-batch; each was computed once, whatever the number of its sequences.

    Attributes:
        rows: int64 `[R]`, rows of the stream that are virtual tokens; `None` if there are none.
        embeddings: `[R, D]`, what replaces the embeddings of words in those rows.
        prefixes: learnt keys and values in front of sequences; `None` if there are none.
        position_shift: int64 `[1, T]`, by how much prefixes move each token's position; `None` for not at all.
    """

    rows: torch.Tensor | None
    embeddings: torch.Tensor | None
    prefixes: Prefixes | None
    position_shift: torch.Tensor | None


# ------------------------------------------------------------------- generation

_GROWTH = 64
"""Columns by which memory grows at a time, so that a pass writes in place and copies nothing."""


class KeyValueRows:
    """Keeps the keys and values of every layer, by row, while rows are completed token by token.

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
        width = max(one._num_columns - int(one._first_B.min()) for one in (self, other))
        layers: dict[str, list[list[torch.Tensor]]] = {name: [[], []] for name in self._layers}
        for one in (self, other):
            num_columns = min(width, one._num_columns)
            for name, kept in one._layers.items():
                for parts, x in zip(layers[name], kept, strict=True):
                    wide = x.new_zeros(*x.shape[:2], width + _GROWTH, x.shape[3])
                    wide[:, :, width - num_columns : width] = x[:, :, one._num_columns - num_columns : one._num_columns]
                    parts.append(wide)
        self._first_B = torch.cat([one._first_B + (width - one._num_columns) for one in (self, other)])
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
            for first, own in groupby(self._first_B.tolist()):
                rows = slice(start, start := start + len(list(own)))
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


# ----------------------------------------------------------------------- a pass


class LongRows(NamedTuple):
    """The rows of a stream that are too long for the kernels of short ones.

    Attributes:
        tokens: int64, numbers of their tokens in the stream.
        bounds: int32, where they begin and end among these.
        max_length: tokens of the longest.
    """

    tokens: torch.Tensor
    bounds: torch.Tensor
    max_length: int


class AttentionStream:
    """Carries a micro-batch and its layouts into the attention function, as an argument of the model call.

    Layouts are built once per micro-batch and shared by all layers.

    Args:
        stream: the model's stream, which counts the calls and holds keys and values of long sequences.
        batch: the micro-batch in flight.
        module_names: name of every attention module, for dropout draws and messages.
        prefixes: learnt keys and values in front of some of the sequences.
        rows: keys and values of rows that are being completed; the batch is their prompts or newest tokens.

    Attributes:
        max_length: tokens of the longest sequence.
        parts: the sequences that are parts of longer ones, by their number in the stream; `None` for a batch without.
    """

    def __init__(
        self,
        stream: Stream,
        batch: MuxBatch,
        module_names: dict[nn.Module, str],
        prefixes: Prefixes | None = None,
        rows: KeyValueRows | None = None,
    ) -> None:
        self.stream, self.batch, self.module_names = stream, batch, module_names
        self.prefixes, self.rows = prefixes, rows
        self.max_length = max(batch.sequence_lengths, default=0)
        self.parts: dict[int, SequencePart] | None = None
        if batch.parts:
            self.parts = {index: part for index, part in enumerate(batch.parts) if not part.is_whole}
        # By causality, as a model may have layers of both kinds; by number of keys, as layers with and without a window
        # need not agree.
        self._layouts: dict[bool, Layout] = {}
        self._key_bounds: dict[tuple[int, ...], torch.Tensor] = {}

    @cached_property
    def tree(self) -> TreeLayouts | None:
        """The layouts of the prefix tree; `None` if there is none, or if all tokens have to be laid out."""
        shared = self.batch.shared
        if shared is None or self.parts is not None or self.prefixes is not None:
            return None
        return TreeLayouts(shared.tree, self.batch.input_ids.device)

    @cached_property
    def has_short_rows(self) -> bool:
        """Whether rows are short enough for `peft_mux.kernels.attention`."""
        return min(self.batch.sequence_lengths, default=MAX_TOKENS + 1) <= MAX_TOKENS

    @cached_property
    def long_rows(self) -> LongRows | None:
        """The rows that are not; `None` if there is none."""
        lengths = np.array(self.batch.sequence_lengths)
        is_long = lengths > MAX_TOKENS
        if not is_long.any():
            return None
        tokens = torch.from_numpy(np.flatnonzero(np.repeat(is_long, lengths)))
        bounds = torch.from_numpy(np.cumsum([0, *lengths[is_long]]).astype(np.int32))
        device = self.batch.input_ids.device
        return LongRows(copied_to(tokens, device), copied_to(bounds, device), self.max_length)

    def layout(self, *, is_causal: bool) -> Layout:
        """Return the rectangles for causal or full attention."""
        if is_causal not in self._layouts:
            # Without causality every query would see the padded keys.
            step = LENGTH_STEP if is_causal else 1
            apart = () if self.parts is None else tuple(self.parts)
            kinds = () if self.prefixes is None else self.prefixes.of_sequence
            device = self.batch.input_ids.device
            self._layouts[is_causal] = build_layout(self.batch.sequence_lengths, step, device, apart, kinds)
        return self._layouts[is_causal]

    def key_bounds(self, num_keys: tuple[int, ...]) -> torch.Tensor:
        """Return int32 `[S + 1]`, where the keys of each sequence begin and end, on the device.

        Args:
            num_keys: number of keys of each sequence; a part has more of them than queries.
        """
        if num_keys not in self._key_bounds:
            bounds = torch.tensor([0, *np.cumsum(num_keys)], dtype=torch.int32)
            self._key_bounds[num_keys] = copied_to(bounds, self.batch.input_ids.device)
        return self._key_bounds[num_keys]

    def keep_parts(self, layer: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the keys and values `[1, G, T, C]` that later parts will read; after rotary embedding (M §3.5)."""
        lengths = self.batch.sequence_lengths
        starts = np.cumsum(lengths) - lengths
        for index, part in (self.parts or {}).items():
            # Nothing reads the keys of a last part after its own pass.
            if part.has_more:
                rows = slice(int(starts[index]), int(starts[index]) + lengths[index])
                self.stream.key_values.keep(layer, part, key[0, :, rows], value[0, :, rows])

    def with_context(
        self, module: nn.Module, index: int, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[n, G, L, C]` behind those of earlier parts and behind their prefix.

        Args:
            module: the attention module that attends.
            index: number in the stream of one of the n sequences, which have one prefix; a part comes alone.
            keys: keys of the sequences' own tokens.
            values: their values.
            window: a query sees this many tokens, itself included; keys that none sees are left out.
        """
        part = None if self.parts is None else self.parts.get(index)
        if part is not None:
            earlier = self.stream.key_values.earlier(self.module_names[module], part, window)
            if earlier:
                keys = torch.cat([*(pair[0] for pair in earlier), keys[0]], dim=1)[None]
                values = torch.cat([*(pair[1] for pair in earlier), values[0]], dim=1)[None]
        return (keys, values) if self.prefixes is None else self.prefixes.before(module, index, keys, values)

    def stream_with_context(
        self, module: nn.Module, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Return `with_context` of all sequences of a stream, `[1, G, K, C]`, and how many keys each of them has."""
        lengths = self.batch.sequence_lengths
        if self.parts is None and self.prefixes is None:
            return key, value, lengths
        own = enumerate(zip(key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True))
        pairs = [self.with_context(module, index, k, v, window) for index, (k, v) in own]
        keys, values = (torch.cat(side, dim=2) for side in zip(*pairs, strict=True))
        return keys, values, tuple(pair[0].shape[2] for pair in pairs)
