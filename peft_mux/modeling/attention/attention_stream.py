"""`AttentionStream`: what attention reads of a micro-batch, handed through the model call to every layer.

Shape letters: T tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.attention.parts import PartsInFlight
from peft_mux.modeling.attention.prefix_tree.layouts import TreeLayouts
from peft_mux.modeling.attention.prefixes import Prefixes
from peft_mux.modeling.attention.read_rows import LayerCalls, ReadRows
from peft_mux.modeling.attention.rectangles import LENGTH_STEP, Layout, build_layout, copied_to
from peft_mux.modeling.attention.rows import KeyValueRows
from peft_mux.modeling.stream import Stream


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
