"""Learnt keys and values in front of the sequences of a task (prefix tuning), in every layer.

A prefix is no token: it has no queries, and stands before the first token of each of its task's sequences::

    prefix of 2 keys     keys    p p | 0 1 2
                  query 0        x x | x . .
                  query 1        x x | x x .
                  query 2        x x | x x x

Shape letters: S sequences, n sequences of a rectangle, G key-value heads, V keys of a prefix, L keys of a sequence, C
channels of a head.
"""

# MERGED: `PromptPass`: what learnt prompts bring into one pass, as the embeddings and attention read it.
# MERGED: Shape letters: T tokens of the stream, R rows of virtual tokens, D hidden features.
# MERGED: `AttentionStream`: what attention reads of a micro-batch, handed through the model call to every layer.
# MERGED: Shape letters: T tokens, S sequences.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.attention.prefix_tree import TreeLayouts
from peft_mux.modeling.attention.rows import (
    LENGTH_STEP,
    KeyValueRows,
    LayerCalls,
    Layout,
    ReadRows,
    build_layout,
    copied_to,
)
from peft_mux.modeling.attention.scores import PartsInFlight
from peft_mux.modeling.stream import Stream


class Prefixes:
    """The prefixes of one pass.

    Args:
        of_sequence: number of the prefix of each of the S sequences of the stream; `None` for those without.
        key_values: of each prefix, the keys and values of all layers, `[2 * layers, G, V, C]`: keys of a layer before
            its values.
    """

    def __init__(self, of_sequence: Sequence[int | None], key_values: Sequence[torch.Tensor]) -> None:
        """Take the layers apart, once for all of them."""
        self.of_sequence = tuple(of_sequence)
        self._layers = [stacked.unbind() for stacked in key_values]

    def num_keys(self, index: int) -> int:
        """Return the number V of keys before the first token of a sequence, by its number in the stream."""
        number = self.of_sequence[index]
        return 0 if number is None else self._layers[number][0].shape[1]

    def before(
        self, module: nn.Module, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values behind those of their prefix, `[n, G, V + L, C]`.

        Where attention slides a window, a later part of a long row has only the keys of earlier ones that it sees; then
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
        layer = 2 * self._layer_of(module, number)
        pair = []
        for prefix_GVC, own in zip(self._layers[number][layer : layer + 2], (keys, values), strict=True):
            self._check(module, prefix_GVC, own)
            # Expanded, so that the backward is one sum over the sequences, in their order.
            shared = prefix_GVC.to(own.dtype).expand(own.shape[0], -1, -1, -1)
            pair.append(torch.cat([shared, own], dim=2))
        return pair[0], pair[1]

    def before_all(
        self,
        module: nn.Module,
        keys_GKC: torch.Tensor,
        values_GKC: torch.Tensor,
        num_keys: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Return keys and values of a whole stream, those of each sequence behind its prefix, and how many each has.

        Args:
            module: the attention module that attends.
            keys_GKC: keys of all sequences one after another, with those of earlier parts.
            values_GKC: their values.
            num_keys: number of keys of each of the S sequences.
        """
        own = zip(keys_GKC.split(num_keys, dim=1), values_GKC.split(num_keys, dim=1), strict=True)
        pairs = [self.before(module, index, k[None], v[None]) for index, (k, v) in enumerate(own)]
        keys, values = (torch.cat(side, dim=2)[0] for side in zip(*pairs, strict=True))
        return keys, values, tuple(pair[0].shape[2] for pair in pairs)

    def _layer_of(self, module: nn.Module, number: int) -> int:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not 0 <= 2 * layer < len(self._layers[number]):
            raise UnsupportedModelError(
                f"{type(module).__name__} has layer number {layer}, for which a prefix has no keys; allowed: models"
                " whose attention modules are numbered from 0. Use PROMPT_TUNING, which needs no layers."
            )
        return layer

    def _check(self, module: nn.Module, prefix_GVC: torch.Tensor, own: torch.Tensor) -> None:
        heads, channels = prefix_GVC.shape[0], prefix_GVC.shape[2]
        if (heads, channels) != (own.shape[1], own.shape[3]):
            raise UnsupportedModelError(
                f"{type(module).__name__} (layer {module.layer_idx}) has {own.shape[1]} heads of {own.shape[3]}"
                f" channels, and the prefix {heads} of {channels}; allowed: models whose layers all have the heads that"
                " their configuration tells. Use PROMPT_TUNING, which needs no layers."
            )


@dataclass(frozen=True, slots=True)
class PromptPass:
    """The prompts of the tasks of one micro-batch; each was computed once, whatever the number of its sequences.

    Attributes:
        rows: int64 `[R]`, rows of the stream that are virtual tokens; `None` where there are none.
        embeddings: `[R, D]`, what stands in those rows in place of embeddings of words.
        prefixes: learnt keys and values in front of sequences; `None` where there are none.
        position_shift: int64 `[1, T]`, by how much prefixes move each token's position; `None` for not at all.
    """

    rows: torch.Tensor | None
    embeddings: torch.Tensor | None
    prefixes: Prefixes | None
    position_shift: torch.Tensor | None

    def embedded(self, words_1TD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings of words with those of virtual tokens in their rows.

        Args:
            words_1TD: embeddings `[1, T, D]`, of placeholders in the rows of virtual tokens.
            rows: int64 `[R]`, the rows of virtual tokens among them.
        """
        assert self.embeddings is not None, "there are virtual tokens"
        # Copied, not masked: a task's NaN stays in its rows, and the backward takes each row's gradient as it is.
        return words_1TD[0].index_copy(0, rows, self.embeddings.to(words_1TD.dtype)).unsqueeze(0)


class AttentionStream:
    """Carries the stream and its layouts into the attention function, as an argument of the model call.

    Layouts are built once per micro-batch and shared by all layers.
    """

    def __init__(
        self,
        stream: Stream,
        batch: MuxBatch,
        module_names: dict[nn.Module, str],
        prefixes: Prefixes | None = None,
        rows: KeyValueRows | None = None,
        read: ReadRows | None = None,
    ) -> None:
        """Bind a micro-batch.

        Args:
            stream: the model's stream, which counts the calls and holds keys and values of long sequences.
            batch: the micro-batch in flight.
            module_names: name of every attention module, for dropout draws and messages.
            prefixes: learnt keys and values in front of some of the sequences.
            rows: keys and values of rows that are being completed, of which the batch is prompts or newest tokens.
            read: the rows whose outputs of the last layer are read; `None` for all.
        """
        self.rows = rows
        self.read = read
        self.calls: LayerCalls | None = None
        self.stream = stream
        self.batch = batch
        self.module_names = module_names
        self.max_length = max(batch.sequence_lengths, default=0)
        self.parts = PartsInFlight(batch, stream.key_values) if batch.parts else None
        self.prefixes = prefixes
        self._tree: TreeLayouts | None = None
        # By causality, as a model may have layers of both kinds.
        self._layouts: dict[bool, Layout] = {}
        self._key_bounds: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def tree(self) -> TreeLayouts | None:
        """The layouts of the prefix tree; `None` where there is none, or where all tokens have to be laid out."""
        shared = self.batch.shared
        if shared is None or self.parts is not None or self.prefixes is not None:
            return None
        if self._tree is None:
            self._tree = TreeLayouts(shared.tree, self.batch.input_ids.device)
        return self._tree

    @contextmanager
    def in_calls(self, calls: LayerCalls) -> Iterator[None]:
        """Let attention in the `with` block be that of a layer which computes some of its rows alone."""
        self.calls = calls
        try:
            yield
        finally:
            self.calls = None

    def layout(self, *, is_causal: bool) -> Layout:
        """Return the rectangles for causal or full attention."""
        if is_causal not in self._layouts:
            # Without causality every query would see the padded keys.
            step = LENGTH_STEP if is_causal else 1
            device = self.batch.input_ids.device
            apart = () if self.parts is None else tuple(self.parts.of_sequence)
            owners = () if self.prefixes is None else self.prefixes.of_sequence
            self._layouts[is_causal] = build_layout(self.batch.sequence_lengths, step, device, apart, owners)
        return self._layouts[is_causal]

    def key_bounds(self, num_keys: tuple[int, ...]) -> torch.Tensor:
        """Return int32 `[S + 1]`, where the keys of each sequence begin and end, on the device.

        Args:
            num_keys: number of keys of each sequence; a part has more of them than queries.
        """
        # By number of keys, as layers with and without a window need not agree.
        if num_keys not in self._key_bounds:
            bounds = torch.tensor([0, *np.cumsum(num_keys)], dtype=torch.int32)
            self._key_bounds[num_keys] = copied_to(bounds, self.batch.input_ids.device)
        return self._key_bounds[num_keys]
