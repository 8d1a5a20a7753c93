"""The multiplexed layer of Adapter Tuning: the frozen layer once over the stream, each task's bottleneck behind it.

On a GPU the bottlenecks of all tasks are a few launches (`peft_mux.kernels.bottleneck`), whose tables the passes of
`peft_mux.modeling.adapters.lora.lora_pass` keep; anywhere else, and for bottlenecks that kernels cannot serve, products
on each task's rows give the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from peft_mux.kernels.availability import runs_kernels
from peft_mux.kernels.bottleneck.group import Adapter, BottleneckGroup, Trained
from peft_mux.kernels.lora.factors import DTYPES
from peft_mux.kernels.lora.group import Base
from peft_mux.modeling.adapters.bottleneck.function import Bottleneck, BottleneckSegment, grouped_bottlenecks
from peft_mux.modeling.adapters.lora.lora_pass import say_once
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.slabs import TaskSlab
from peft_mux.modeling.stream import RowSegment, Stream
from peft_mux.peft_methods.bottleneck.config import BOTTLENECK

NAME = str(BOTTLENECK.value)
"""By which streams know the passes of bottlenecks."""


class MultiplexedBottleneck(MultiplexedForward):
    """The frozen layer once over the stream, and each task's bottleneck behind its own rows."""

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self._of_kernels = _OfKernels(self)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        layer: Any = self.module
        self.check_rows(x, x.shape[-1])
        y = base_output(layer.base_layer, x, self.name)
        if layer.disable_adapters:
            return y
        outputs = self._of_kernels.output(y)
        if outputs is not None:
            return outputs
        here = [rows for rows in self.stream.segments if rows.adapter in layer.bottleneck_down]
        if not here:
            return y
        segments = [self._segment(rows) for rows in here]
        bottlenecks = [self._bottleneck(rows.adapter) for rows in here]
        y_TK = y.reshape(-1, y.shape[-1])
        return grouped_bottlenecks(y_TK, self.stream.places, segments, bottlenecks).view_as(y)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured: how many rows a task has differs from pass to pass."""
        if runs_kernels(next(self.module.parameters()).device):
            return None
        return f"bottlenecks run behind each task's own rows ({self.name})"

    def dropout_of(self, adapter: str) -> float:
        """Return the probability with which an adapter drops its input now."""
        layer: Any = self.module
        return layer.bottleneck_dropout[adapter].p if layer.training else 0.0

    def _segment(self, rows: RowSegment) -> BottleneckSegment:
        layer: Any = self.module
        dropout = self.dropout_of(rows.adapter)
        # A seed is a hash over names, so it is made only where it is drawn from.
        seed = rows.draw_seed(self.name) if dropout > 0.0 else 0
        return BottleneckSegment(rows.start, rows.end, layer.non_linearity[rows.adapter], dropout, seed)

    def _bottleneck(self, adapter: str) -> Bottleneck:
        layer: Any = self.module
        down, up = layer.bottleneck_down[adapter], layer.bottleneck_up[adapter]
        return Bottleneck(down.weight, down.bias, up.weight, up.bias)


class _OfKernels:
    """One layer's bottlenecks as the passes of kernels know them: see `KernelGroup` of `lora_pass`."""

    num_columns = 0  # of compiled graphs, in which bottlenecks are products on slices

    def __init__(self, forward: MultiplexedBottleneck) -> None:
        self.members = (forward,)
        self.number = forward.stream.maker_of(NAME).enroll(self)

    @property
    def is_training(self) -> bool:
        """Whether adapters drop out."""
        return self.members[0].module.training

    @property
    def widths(self) -> list[int]:
        """Output features of the layer."""
        return [self.members[0].module.out_features]  # type: ignore[list-item]

    def bases(self) -> list[Base]:
        """Return nothing: the frozen layer has run."""
        return []

    def output(self, y: torch.Tensor) -> torch.Tensor | None:
        """Return `[..., K]`, the frozen layer's output with the bottlenecks behind it; `None` where slices shall."""
        own_pass = self.members[0].stream.pass_of(NAME)
        if own_pass is None or torch.compiler.is_compiling():
            return None
        tables = own_pass.tables_of(self, y.dtype)
        if tables is None:
            return None
        return y if tables.is_empty else own_pass.outputs(self, y, y.dtype)[0]

    def tables(
        self,
        adapters: tuple[str, ...],
        slabs: Sequence[TaskSlab | None],
        dtype: torch.dtype,
        watched: frozenset[int],
    ) -> BottleneckGroup | None:
        """Return what launches need to know for a set of tasks, or `None` where kernels cannot serve it."""
        forward, found = self.members[0], []
        layer: Any = forward.module
        for name, slab in zip(adapters, slabs, strict=True):
            if name not in layer.bottleneck_down:
                found.append(None)
                continue
            parts = [_trained(parameter, slab, dtype, watched) for parameter in forward._bottleneck(name)]
            if any(part is _UNSERVED for part in parts):
                return None
            down, down_bias, up, up_bias = parts
            found.append(Adapter(down, up, down_bias, up_bias, layer.non_linearity[name], forward.dropout_of(name)))
        try:
            return BottleneckGroup(found, forward.name)
        except ValueError as error:
            say_once(str(error))
            return None


_UNSERVED: Any = object()


def _trained(parameter: torch.Tensor | None, slab: TaskSlab | None, dtype: torch.dtype, watched: frozenset[int]) -> Any:
    """Return where kernels find a tensor, `None` where there is none, or `_UNSERVED`."""
    if parameter is None:
        return None
    # Kernels write gradients in place, which a hook on the parameter would not see.
    if slab is None or dtype not in DTYPES or id(parameter) in watched:
        return _UNSERVED
    found = slab.factor(parameter, dtype)  # type: ignore[arg-type]
    # Kernels add gradients up in fp32 only.
    if found is None or (found.gradient is not None and found.gradient.dtype != torch.float32):
        return _UNSERVED
    return Trained(found.values, found.gradient)
