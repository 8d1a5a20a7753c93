"""Dropout of attention weights, with draws that neighbours and packing never shift.

Shape letters: n sequences of a rectangle, L its length, K keys of a part, H heads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from peft_mux.kernels import philox
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.rectangles import LENGTH_STEP, Layout, Rectangle


class AttentionDropout:
    """Dropout of attention weights whose draws depend on the query's place, the head and the key only.

    Heads count as those of the whole model, also where a shard of it has some of them (`head_window`).

    Args:
        attention: the micro-batch in flight.
        module: the attention module whose weights are dropped.
        layout: the rectangles of the micro-batch.
        probability: probability with which a weight is dropped.
    """

    def __init__(self, attention: AttentionStream, module: nn.Module, layout: Layout, probability: float) -> None:
        """Find the task and the place of every row of the rectangles."""
        self.probability = probability
        self.name = attention.module_names[module]
        self.heads: philox.Window | None = getattr(module, "head_window", None)
        batch, stream = attention.batch, attention.stream
        self.places = batch.token_places.new_zeros(layout.num_rows)
        # Draws follow a token's place in its task's batch, so that neighbours and packing never shift them.
        self.places.index_copy_(0, layout.row_of_token, batch.token_places)
        # On the host, which knows the segments: reading them off the device would wait.
        owner = np.full(batch.num_tokens, -1)
        for index, segment in enumerate(stream.segments):
            owner[segment.start : segment.end] = index
        self.segments = stream.segments
        self.parts, self.prefixes = attention.parts, attention.prefixes
        self.owner_of_row = np.full(layout.num_rows, -1)
        self.owner_of_row[layout.row_of_token_on_host] = owner

    def __call__(self, rectangle: Rectangle, weights_nHLL: torch.Tensor) -> torch.Tensor:
        """Return the weights of a rectangle after dropout.

        Args:
            rectangle: one of the layout's.
            weights_nHLL: its attention weights; `[1, H, L, K]` where it is a part of a longer sequence.
        """
        if rectangle.sequence is not None:
            return self._dropped_part(weights_nHLL[0], rectangle)[None]
        owners = self.owner_of_row[rectangle.rows].reshape(rectangle.num_sequences, rectangle.length)[:, 0]
        places = self.places[rectangle.rows].view(rectangle.num_sequences, rectangle.length)
        parts = []
        for sequence, owner in enumerate(owners):
            weights_HLL = weights_nHLL[sequence]
            seed = self.segments[owner].draw_seed(self.name)
            # Draws are by place and column, so a row is a query and its columns are the keys of one head after another.
            by_query = weights_HLL.transpose(0, 1).reshape(rectangle.length, -1)
            window = self._window(weights_HLL.shape[-1])
            dropped = philox.dropout(by_query, places[sequence], self.probability, seed, window)
            parts.append(dropped.view(rectangle.length, weights_HLL.shape[0], -1).transpose(0, 1))
        return torch.stack(parts)

    def _dropped_part(self, weights_HLK: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        """Return `[H, L, K]` with the draws that the whole sequence would have for these queries and keys."""
        # A draw is numbered by query, head and key within the padded width of the whole sequence, so draws of all keys
        # are made, and those of the keys at hand taken.
        assert self.parts is not None, "only parts have rectangles of their own"
        part = self.parts.of_sequence[rectangle.sequence or 0]
        num_heads, _, num_keys = weights_HLK.shape
        before = 0 if self.prefixes is None else self.prefixes.num_keys(rectangle.first)
        width = before + -(-part.num_tokens // LENGTH_STEP) * LENGTH_STEP
        seed = self.segments[self.owner_of_row[rectangle.start]].draw_seed(self.name)
        places, window = self.places[rectangle.rows], self._window(width)
        kept = philox.keep_mask(seed, places, num_heads * width, self.probability, window)
        last = before + part.end
        kept_HLK = kept.view(-1, num_heads, width)[:, :, last - num_keys : last].transpose(0, 1)
        return torch.where(kept_HLK, weights_HLK * philox.keep_scale(self.probability), 0.0)

    def _window(self, width: int) -> philox.Window | None:
        """Return where the draws of these heads lie among those of all, which have `width` of them each."""
        return None if self.heads is None else philox.Window(self.heads.first * width, self.heads.num_columns * width)
