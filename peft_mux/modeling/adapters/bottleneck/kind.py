"""The bottlenecks of many tasks behind one frozen layer, over one packed stream.

    P_g = down_g drop(y_g)^T + b_g          H_g = f(P_g)          out_g = y_g + H_g^T up_g^T + c_g
    dH_g = up_g^T dout_g^T                  dP_g = f'(P_g) dH_g   dy_g = dout_g + mask_g * (dP_g^T down_g)
    dup_g = dout_g^T H_g^T                  ddown_g = dP_g drop(y_g)

The frozen layer has run once over all rows; each task touches only its own, by slices and never by masks that
multiply, so that a NaN of one task reaches no other. As in `peft_mux.kernels.lora.reference`, skinny products are
written with the bottleneck as their first dimension, which takes a fraction of the time on CPUs.

Shape letters: T rows of the stream, K features of the frozen layer's output, M of a bottleneck.
"""

# MERGED: The multiplexed layer of Adapter Tuning: the frozen layer once over the stream, each task's bottleneck
# MERGED: behind it.
# MERGED: On a GPU the bottlenecks of all tasks are a few launches (`peft_mux.kernels.bottleneck`), whose tables the
# MERGED: passes of
# MERGED: `peft_mux.modeling.adapters.lora.lora_pass` keep; anywhere else, and for bottlenecks that kernels cannot
# MERGED: serve, products
# MERGED: on each task's rows give the same.
# MERGED: Adapter Tuning as a kind of adapters: bottlenecks behind frozen layers, those of all tasks in one pass.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import nn

from peft_mux.errors import Fault
from peft_mux.kernels import philox
from peft_mux.kernels.availability import runs_kernels
from peft_mux.kernels.bottleneck.group import Adapter, BottleneckGroup, Trained
from peft_mux.kernels.lora.group import Base
from peft_mux.kernels.lora.launch import DTYPES
from peft_mux.modeling.adapters.bottleneck.peft_tuner import (
    ACTIVATIONS,
    BOTTLENECK,
    DEFAULT_TARGETS,
    BottleneckConfig,
    bottleneck_faults,
)
from peft_mux.modeling.adapters.kind import CutLayers, MultiplexedForward, ReplicaLayout, Shapes, SlabOf, register_kind
from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups, say_once
from peft_mux.modeling.adapters.sliced import SlicedKind
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.slabs import Slot, TaskSlab, plain_slot
from peft_mux.modeling.stream import PassMaker, RowSegment, Stream
from peft_mux.scheduler.costs.loads import AdapterLoad

_Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_GRADIENTS: dict[str, _Gradient] = {
    "relu": lambda gradient, before: torch.ops.aten.threshold_backward(gradient, before, 0),
    "gelu": lambda gradient, before: torch.ops.aten.gelu_backward(gradient, before),
    "silu": lambda gradient, before: torch.ops.aten.silu_backward(gradient, before),
    "tanh": lambda gradient, before: torch.ops.aten.tanh_backward(gradient, before.tanh()),
}
"""Gradient before a nonlinearity, from that behind it and what it read."""


class BottleneckSegment(NamedTuple):
    """Rows of one task behind one layer, and how its bottleneck acts on them.

    Attributes:
        start: first row of the task in the stream.
        end: one past the task's last row.
        non_linearity: name of f.
        dropout: probability of dropping an element that `down` reads; 0 for none.
        seed: 64-bit key of the dropout draws, from `philox.draw_seed`.
    """

    start: int
    end: int
    non_linearity: str
    dropout: float
    seed: int


class Bottleneck(NamedTuple):
    """The trained tensors of one adapter behind one layer; no bias is `None`."""

    down_MK: torch.Tensor
    down_bias_M: torch.Tensor | None
    up_KM: torch.Tensor
    up_bias_K: torch.Tensor | None


def grouped_bottlenecks(
    y_TK: torch.Tensor,
    places: torch.Tensor,
    segments: Sequence[BottleneckSegment],
    bottlenecks: Sequence[Bottleneck],
) -> torch.Tensor:
    """Return `[T, K]`, a frozen layer's output with every task's bottleneck behind its own rows.

    Args:
        y_TK: the frozen layer's output, sorted by task.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        segments: rows of the tasks that have an adapter here; rows of no segment stay as they are.
        bottlenecks: the adapter of each segment.
    """
    flat = [tensor for bottleneck in bottlenecks for tensor in bottleneck]
    # The frozen layer has settled the dtype; autocast would cast each product by itself.
    with torch.autocast(y_TK.device.type, enabled=False):
        return BottleneckFunction.apply(y_TK, places, tuple(segments), *flat)


class BottleneckFunction(torch.autograd.Function):
    """Manual forward and backward of `grouped_bottlenecks`: in-place products on row slices."""

    @staticmethod
    def forward(
        ctx: Any,
        y_TK: torch.Tensor,
        places: torch.Tensor,
        segments: tuple[BottleneckSegment, ...],
        *flat: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the output; save `y` and each P."""
        out, befores = y_TK.clone(), []
        for segment, own in zip(segments, _bottlenecks(flat, y_TK.dtype), strict=True):
            rows = slice(segment.start, segment.end)
            read_TK = _dropped(y_TK[rows], segment, places[rows])
            before_MT = own.down_MK @ read_TK.t()
            if own.down_bias_M is not None:
                before_MT += own.down_bias_M[:, None]
            hidden_MT = ACTIVATIONS[segment.non_linearity](before_MT)
            out[rows].addmm_(hidden_MT.t(), own.up_KM.t())
            if own.up_bias_K is not None:
                out[rows] += own.up_bias_K
            befores.append(before_MT)
        ctx.save_for_backward(y_TK, places, *befores)
        ctx.segments, ctx.flat = segments, flat
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TK: torch.Tensor) -> tuple[Any, ...]:
        """Compute `dy` and the gradient of each trained tensor."""
        y_TK, places, *befores = ctx.saved_tensors
        # Below the lowest adapter nothing trains, and no dy is needed.
        dy_TK = dout_TK.clone() if ctx.needs_input_grad[0] else None
        gradients: list[torch.Tensor | None] = []
        for segment, own, before_MT in zip(ctx.segments, _bottlenecks(ctx.flat, y_TK.dtype), befores, strict=True):
            rows = slice(segment.start, segment.end)
            dout_g = dout_TK[rows]
            hidden_MT = ACTIVATIONS[segment.non_linearity](before_MT)
            dhidden_MT = own.up_KM.t().contiguous() @ dout_g.t()
            dbefore_MT = _GRADIENTS[segment.non_linearity](dhidden_MT, before_MT)
            # Drawn once more, from seed and place: a mask that was kept would take memory for every layer.
            read_TK = _dropped(y_TK[rows], segment, places[rows])
            gradients += [
                dbefore_MT @ read_TK,
                None if own.down_bias_M is None else dbefore_MT.sum(1),
                (hidden_MT @ dout_g).t(),
                None if own.up_bias_K is None else dout_g.sum(0),
            ]
            if dy_TK is not None:
                _add_input_gradient(dy_TK[rows], dbefore_MT, own.down_MK, segment, places[rows])
        cast = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, ctx.flat, strict=True)
        ]
        return dy_TK, None, None, *cast


def _bottlenecks(flat: Sequence[torch.Tensor | None], dtype: torch.dtype) -> list[Bottleneck]:
    """Return the adapters that tensors lie one after another of, in the dtype to compute in."""
    cast: list[Any] = [None if tensor is None else tensor.to(dtype) for tensor in flat]
    size = len(Bottleneck._fields)
    return [Bottleneck(*cast[start : start + size]) for start in range(0, len(cast), size)]


def _dropped(y_TK: torch.Tensor, segment: BottleneckSegment, places: torch.Tensor) -> torch.Tensor:
    return y_TK if segment.dropout == 0.0 else philox.dropout(y_TK, places, segment.dropout, segment.seed)


def _add_input_gradient(
    dy_TK: torch.Tensor,
    dbefore_MT: torch.Tensor,
    down_MK: torch.Tensor,
    segment: BottleneckSegment,
    places: torch.Tensor,
) -> None:
    """Add what a bottleneck gives to `dy`, in its own rows."""
    if segment.dropout == 0.0:
        dy_TK.addmm_(dbefore_MT.t(), down_MK)
    else:
        dy_TK += philox.dropout(dbefore_MT.t() @ down_MK, places, segment.dropout, segment.seed)


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


_UNSUPPORTED = {"modules_to_save": "it trains a copy of a backbone module; classification heads are added without it"}


class BottleneckKind(SlicedKind):
    """What the product asks of Adapter Tuning; see `peft_mux.modeling.adapters.kind.AdapterKind`."""

    draws_itself = True
    lies_apart = False

    def __init__(self) -> None:
        """Read the fields off the configuration."""
        names = {field.name for field in fields(BottleneckConfig)} - _UNSUPPORTED.keys()
        super().__init__(BOTTLENECK, fields=names, reasons=_UNSUPPORTED, default_targets=DEFAULT_TARGETS)
        self.title = "Adapter Tuning"

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with the fields of a configuration, whatever the backbone."""
        return [*super().faults(config, where), *bottleneck_faults(config, where)]

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return the forward of all tasks' bottlenecks."""
        return MultiplexedBottleneck(module, name, stream)

    def pass_maker(self, slab_of: SlabOf) -> PassMaker | None:
        """Return what keeps the tables of one model's layers, as for LoRA."""
        return LoraGroups(slab_of)

    def slot(self, name: str, parameter: nn.Parameter) -> Slot:
        """Return how a parameter of a task lies in its slab: `up` transposed, as kernels read it."""
        return plain_slot(name, parameter)._replace(is_transposed=name.endswith(".bottleneck_up.weight"))

    def loads(self, shapes: Shapes, cut: CutLayers) -> list[AdapterLoad]:
        """Return for each layer an adapter as wide as `down` and `up` are; biases take no time to speak of."""
        found = []
        for name, shape in shapes.items():
            if ".bottleneck_down." in name and len(shape) == 2:
                found.append(AdapterLoad(shape[0], 2 * shape[1]))
        return found

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Refuse layers that are cut; on stages of a pipeline each has its own bottlenecks."""
        return super().refusals(layout, where) if layout.is_tensor_parallel else []


register_kind(BottleneckKind())
