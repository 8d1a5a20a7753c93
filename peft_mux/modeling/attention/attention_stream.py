"""`AttentionStream`: the part of a micro-batch that attention reads, passed through the model call to every layer.

In addition to the batch that is

* parts of long sequences, whose keys and values later passes read (`KeyValueStore`),
* `Prefixes`: learnt keys and values in front of the sequences of a task (prefix tuning), in every layer. A prefix is no
  token: it has no queries, and stands before the first token of each of its task's sequences::

    prefix of 2 keys     keys    p p | 0 1 2
                  query 0        x x | x . .
                  query 1        x x | x x .
                  query 2        x x | x x x

* keys and values of rows that `generate` completes token by token (`peft_mux.generation.key_value_rows`).

Shape letters: T tokens, S sequences, n sequences of a rectangle, G key-value heads, V keys of a prefix, L keys of a
sequence, K keys of all sequences, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from peft_mux.data.batch import MuxBatch, SequencePart
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.attention import MAX_TOKENS
from peft_mux.modeling.attention.prefix_tree import TreeLayouts
from peft_mux.modeling.attention.rows import LENGTH_STEP, Layout, build_layout, copied_to
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
        for prefix_GVC, x_nGLC in zip(self._layers[number][2 * layer : 2 * layer + 2], (keys, values), strict=True):
            heads, _, channels = prefix_GVC.shape
            if (heads, channels) != (x_nGLC.shape[1], x_nGLC.shape[3]):
                raise UnsupportedModelError(
                    f"{name} (layer {layer}) must have the heads of the configuration, {heads} of {channels} "
                    f"channels, got {x_nGLC.shape[1]} of {x_nGLC.shape[3]}. Use PROMPT_TUNING, which needs no layers."
                )
            # Expanded, so that the backward is one sum over the sequences, in their order.
            prefix_nGVC = prefix_GVC.to(x_nGLC.dtype).expand(x_nGLC.shape[0], -1, -1, -1)
            pair.append(torch.cat([prefix_nGVC, x_nGLC], dim=2))
        return pair[0], pair[1]


# ----------------------------------------------------------------------- a pass


class AttentionStream:
    """Carries a micro-batch and its layouts into the attention function, as an argument of the model call.

    Layouts are built once per micro-batch and shared by all layers.

    Args:
        stream: the model's stream, which counts the calls and holds keys and values of long sequences.
        batch: the micro-batch in flight.
        module_names: name of every attention module, for dropout draws and messages.
        prefixes: learnt keys and values in front of some of the sequences.
        rows: keys and values of rows that are being completed (`peft_mux.generation.key_value_rows.KeyValueRows`); the
            batch is their prompts or newest tokens.

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
        rows: Any = None,
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
    def long_rows(self) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """The rows that are not short: their tokens, int64, where they begin and end among these, and the longest.

        `None` if there is none.
        """
        lengths = np.array(self.batch.sequence_lengths)
        is_long = lengths > MAX_TOKENS
        if not is_long.any():
            return None
        tokens = torch.from_numpy(np.flatnonzero(np.repeat(is_long, lengths)))
        bounds = torch.from_numpy(np.cumsum([0, *lengths[is_long]]).astype(np.int32))
        device = self.batch.input_ids.device
        return copied_to(tokens, device), copied_to(bounds, device), self.max_length

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
        sequences = enumerate(zip(key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True))
        pairs = [self.with_context(module, index, k, v, window) for index, (k, v) in sequences]
        keys, values = (torch.cat(side, dim=2) for side in zip(*pairs, strict=True))
        return keys, values, tuple(pair[0].shape[2] for pair in pairs)
