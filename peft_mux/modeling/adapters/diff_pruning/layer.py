"""The multiplexed layer of Diff Pruning: the frozen layer once over the stream, each task's difference on its rows."""

from __future__ import annotations

from typing import Any

import torch

from peft_mux.kernels import philox
from peft_mux.modeling.adapters.diff_pruning.function import DiffSegment, grouped_deltas
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.stream import RowSegment
from peft_mux.peft_methods.diff_pruning.gates import Draws, Relaxed, gated_delta


class MultiplexedDiff(MultiplexedForward):
    """The frozen layer once over the stream, and each task's difference applied to its own rows.

    In training the gates are drawn once for a task's step and layer: all micro-batches of a global batch, on all
    processes, see the same ones, and neighbours do not come into it.
    """

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        layer: Any = self.module
        self.check_rows(x, x.shape[-1])
        y = base_output(layer.base_layer, x, self.name)
        segments = [self._segment(rows) for rows in self.stream.segments if rows.adapter in layer.diff_pruning_delta]
        if layer.disable_adapters or not segments:
            return y
        y_TK, x_TD = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (y, x))
        return grouped_deltas(y_TK, x_TD, segments).view_as(y)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured: how many rows a task has differs from pass to pass."""
        return f"differences are applied to each task's own rows ({self.name})"

    def draws(self, rows: RowSegment) -> Draws:
        """Return the numbers that a task's gates are drawn with in this step."""
        layer: Any = self.module
        device, (num_rows, num_columns) = layer.diff_pruning_delta[rows.adapter].device, layer.shape
        uniform_KD = philox.uniform(rows.draw_seed(self.name), num_rows, num_columns, device)
        if rows.adapter not in layer.diff_pruning_row_alpha:
            return Draws(uniform_KD)
        return Draws(uniform_KD, philox.uniform(rows.draw_seed(f"{self.name}.rows"), 1, num_rows, device)[0])

    def _segment(self, rows: RowSegment) -> DiffSegment:
        layer: Any = self.module
        parts, stretch = layer.parts_of(rows.adapter), layer.stretches[rows.adapter]
        is_drawn = layer.training

        def delta(*tensors: torch.Tensor) -> torch.Tensor:
            # Drawn once more in the backward pass: what was kept would take as much as a weight for every layer.
            return gated_delta(Relaxed(*tensors), stretch, self.draws(rows) if is_drawn else None)

        return DiffSegment(rows.start, rows.end, delta, tuple(part for part in parts if part is not None))
