"""The multiplexed layer of Adapter Tuning: the frozen layer once over the stream, each task's bottleneck behind it."""

from __future__ import annotations

from typing import Any

import torch

from peft_mux.modeling.adapters.bottleneck.function import Bottleneck, BottleneckSegment, grouped_bottlenecks
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.stream import RowSegment


class MultiplexedBottleneck(MultiplexedForward):
    """The frozen layer once over the stream, and each task's bottleneck behind its own rows."""

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        layer: Any = self.module
        self.check_rows(x, x.shape[-1])
        y = base_output(layer.base_layer, x, self.name)
        here = [rows for rows in self.stream.segments if rows.adapter in layer.bottleneck_down]
        if layer.disable_adapters or not here:
            return y
        segments = [self._segment(rows) for rows in here]
        bottlenecks = [self._bottleneck(rows.adapter) for rows in here]
        y_TK = y.reshape(-1, y.shape[-1])
        return grouped_bottlenecks(y_TK, self.stream.places, segments, bottlenecks).view_as(y)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured: how many rows a task has differs from pass to pass."""
        return f"bottlenecks run behind each task's own rows ({self.name})"

    def _segment(self, rows: RowSegment) -> BottleneckSegment:
        layer: Any = self.module
        dropout = layer.bottleneck_dropout[rows.adapter].p if layer.training else 0.0
        # A seed is a hash over names, so it is made only where it is drawn from.
        seed = rows.draw_seed(self.name) if dropout > 0.0 else 0
        return BottleneckSegment(rows.start, rows.end, layer.non_linearity[rows.adapter], dropout, seed)

    def _bottleneck(self, adapter: str) -> Bottleneck:
        layer: Any = self.module
        down, up = layer.bottleneck_down[adapter], layer.bottleneck_up[adapter]
        return Bottleneck(down.weight, down.bias, up.weight, up.bias)
