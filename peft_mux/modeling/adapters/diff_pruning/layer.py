"""The multiplexed layer of Diff Pruning: the frozen layer once over the stream, each task's difference on its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peft_mux.kernels import philox
from peft_mux.modeling.adapters.diff_pruning.function import DiffSegment, grouped_deltas
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.stream import RowSegment, Stream
from peft_mux.peft_methods.diff_pruning.gates import Noise, Relaxed, gated_delta


class MultiplexedDiff(MultiplexedForward):
    """The frozen layer once over the stream, and each task's difference applied to its own rows.

    In training the gates are drawn once for a task's step and layer: all micro-batches of a global batch, on all
    processes, see the same ones, and neighbours do not come into it.
    """

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self._drawn: dict[str, tuple[int, Noise]] = {}

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

    def noise(self, rows: RowSegment) -> Noise:
        """Return what a task's gates are drawn with in this step."""
        seed = rows.draw_seed(self.name)
        drawn_for, noise = self._drawn.get(rows.adapter, (None, None))
        layer: Any = self.module
        device = layer.diff_pruning_delta[rows.adapter].device
        # Of this step, and here: a model may be moved between two passes.
        if noise is None or drawn_for != seed or noise.noise_KD.device != device:
            # Kept for the step, in 2 bytes an element, beside the 32 that AdamW holds of it.
            noise = self._draw(rows, seed, device)
            self._drawn[rows.adapter] = seed, noise
            self._drawn = {adapter: own for adapter, own in self._drawn.items() if adapter in layer.diff_pruning_delta}
        return noise

    def _draw(self, rows: RowSegment, seed: int, device: torch.device) -> Noise:
        layer: Any = self.module
        num_rows, num_columns = layer.shape
        uniform_KD = philox.uniform(seed, num_rows, num_columns, device)
        if rows.adapter not in layer.diff_pruning_row_alpha:
            return Noise(uniform_KD.logit_().half())
        uniform_K = philox.uniform(rows.draw_seed(f"{self.name}.rows"), 1, num_rows, device)[0]
        return Noise(uniform_KD.logit_().half(), uniform_K.logit_().half())

    def _segment(self, rows: RowSegment) -> DiffSegment:
        layer: Any = self.module
        parts, stretch = layer.parts_of(rows.adapter), layer.stretches[rows.adapter]
        noise = self.noise(rows) if layer.training else None

        def delta(*tensors: torch.Tensor) -> torch.Tensor:
            return gated_delta(Relaxed(*tensors), stretch, noise)

        return DiffSegment(rows.start, rows.end, delta, tuple(part for part in parts if part is not None))
