"""The multiplexed linear layers: Dispatch, BaseOp, grouped Adapters and Aggregate around a PEFT layer (M §3.2, §3.4.3).

Layers that read the same activations (q, k and v; gate and up) are one `LinearGroup`, whose frozen and low-rank
products are computed together over the whole stream.

The backward pass of a task's rows ends at the task's lowest adapter. A pass meets adapters from the bottom to the top,
and what a layer reads depends on the weights of a task only if an adapter of the task was computed before. So the rows
of tasks whose adapters a pass has not reached (`Stream.adapters_not_reached`) need no gradient there, and the products
with frozen weights, which take most of a backward pass, are made for the others alone.

Shape letters: T rows of the stream, N of one task, D input features, K output features.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from peft_mux.kernels import philox
from peft_mux.kernels.availability import runs_kernels
from peft_mux.kernels.lora.group import Base
from peft_mux.kernels.lora.reference import LinearSlice, LoraSegment, Rows, grouped_lora_slices, num_rows_in
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.adapters.lora.lora_pass import GroupedAdapter, say_once
from peft_mux.modeling.adapters.lora.row_steps import RowSteps, dropout_of
from peft_mux.modeling.adapters.trained_parts import own_bias_added
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.stream import RowSegment, Stream

NAME = "LORA"
"""The key under which streams hold the passes of LoRA layers."""

_LAYER_OF_FACTOR = re.compile(r"^(?!.*\.experts\.)(?:[^.0-9][^.]*\.)+?(\d+)\..*\.lora_(?:A|B|magnitude_vector)\b")
"""The number of a layer in the name of a factor, as the first number among the names of modules."""
_LEAST_SHARE = 8
"""Less than one row in so many is not left out, because taking rows apart costs a copy if they are not contiguous."""


def lowest_layer(parameters: Iterable[str]) -> int:
    """Return the number of the lowest layer, from 0, that a task has weights in, by the names of its parameters.

    It is 0 if rows need gradients all the way down, as for weights in embeddings, experts and heads: see
    `Stream.adapters_not_reached`.
    """
    matches = [_LAYER_OF_FACTOR.search(name) for name in parameters]
    return min((int(match.group(1)) if match is not None else 0 for match in matches), default=0)


def rows_needed(segments: Sequence[RowSegment], unmet: frozenset[str]) -> tuple[Rows, ...] | None:
    """Return the rows whose gradients a layer below needs, as ranges in order; `None` for all.

    Args:
        segments: rows of each task, in order.
        unmet: adapters that the pass has not come to yet.
    """
    needed: list[Rows] = []
    for segment in segments:
        if segment.adapter not in unmet:
            # Neighbours are one range, so that mostly nothing is copied.
            joined = bool(needed) and needed[-1].end == segment.start
            start = needed.pop().start if joined else segment.start
            needed.append(Rows(start, segment.end))
    num_rows = sum(segment.end - segment.start for segment in segments)
    num_left_out = num_rows - num_rows_in(needed)
    return None if num_left_out * _LEAST_SHARE < num_rows else tuple(needed)


def rows_needed_now(stream: Stream, num_rows: int) -> tuple[Rows, ...] | None:
    """Return the rows whose gradients are needed below the pass in flight; `None` for all.

    Args:
        stream: the pass in flight.
        num_rows: rows of the tensor in question; if they are not the stream's, it is unknown whose they are.
    """
    if not stream.adapters_not_reached or num_rows != stream.num_rows:
        return None
    return rows_needed(stream.segments, stream.adapters_not_reached)


class MultiplexedLinear(MultiplexedForward):
    """The frozen linear layer once over the stream, and each task's LoRA on its own rows.

    Attributes:
        group: the layers that are computed together with this one.
        steps: what adapters do beyond the grouped product, if anything; kept up to date by `LoraKind.connect`.
    """

    adds_own_biases = True

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self.group = LinearGroup([self], stream)
        self.steps: dict[str, RowSteps] = {}

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output; outside of a pass PEFT's own, for the adapter that is selected."""
        if self.stream.batch is not None:
            return self.multiplexed(x)
        y, layer = self.original(x, *args, **kwargs), self.module
        if self.steps and not layer.disable_adapters and not layer.merged:
            for adapter in layer.active_adapters:  # type: ignore[union-attr]
                if adapter in self.steps:  # what PEFT does not know of: initial factors, and the task's own bias
                    y = self.steps[adapter].without_initial(x, y)
                    y = own_bias_added(layer.get_base_layer(), adapter, y)  # type: ignore[operator]
        return y

    # ------------------------------------------------------- its adapters

    def grouped(self, adapter: str) -> GroupedAdapter | None:
        """Return an adapter that the grouped product computes; `None` for others, which steps compute, if any."""
        layer: Any = self.module
        if adapter not in layer.lora_A or (adapter in self.steps and not self.steps[adapter].is_grouped()):
            return None
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        return GroupedAdapter(a, b, layer.scaling[adapter], dropout_of(layer, adapter))

    # ---------------------------------------------------- its frozen layer

    @property
    def base_layer(self) -> Any:
        """The frozen layer under the adapters."""
        # Read several times a layer and pass: PyTorch's `__getattr__` would look everywhere else first.
        return self.module._modules["base_layer"]

    @property
    def is_plain(self) -> bool:
        """Whether the frozen layer is a matrix that we multiply with ourselves."""
        return frozen_weight(self.base_layer)[0] is not None

    @property
    def window(self) -> philox.Window | None:
        """The columns of the whole input that lie here, in row-parallel layers (`parallel.tensor.parallel`)."""
        return self.base_layer.__dict__.get("input_window")  # getattr would raise and catch in every pass

    # -------------------------------------------------------------- passes

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        y = self.group.shared_output(self, x) if len(self.group.members) > 1 else self.product(x)
        return self._stepped(x, y) if self.steps else y

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]` of the layer computed by itself, before the steps of its adapters."""
        (y,) = self.group.outputs(x)
        return y if self.is_plain else base_output(self.base_layer, x, self.name) + y

    def _stepped(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the outputs `[..., K]` after each task's own steps on its rows."""

        def stepped(segment: RowSegment, y_NK: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
            return self.steps[segment.adapter](x_ND, y_NK, functools.partial(self._dropped, segment))

        own = {} if self.module.disable_adapters else self.steps
        return self.by_task(own, y, stepped, x.reshape(-1, x.shape[-1]))

    def _dropped(self, segment: RowSegment, x_ND: torch.Tensor) -> torch.Tensor:
        """Return rows of a task after its dropout in this layer, which is drawn as the grouped product draws it."""
        dropout = dropout_of(self.module, segment.adapter)
        if dropout == 0.0:
            return x_ND
        places = self.stream.places[segment.start : segment.end]
        return philox.dropout(x_ND, places, dropout, segment.draw_seed(self.name), self.window)

    def slice_of(self, rows: Sequence[RowSegment]) -> LinearSlice:
        """Return the layer and the adapters that the tasks of given rows have here."""
        layer: Any = self.module
        segments, factors, window = [], [], self.window
        for row in rows if not layer.disable_adapters else ():
            if (own := self.grouped(row.adapter)) is not None:
                # A seed is a hash over names, so it is made only if it is drawn from.
                seed = row.draw_seed(self.name) if own.dropout > 0.0 else 0
                segments.append(LoraSegment(row.start, row.end, own.scale, own.dropout, seed, window))
                factors.append((own.a, own.b))
        return LinearSlice(*frozen_weight(self.base_layer), layer.out_features, segments, factors)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured; `None` if it can."""
        if self.steps:
            return f"a task's adapter does more on its own rows than the grouped product ({self.name})"
        return None if self.is_plain else f"layers are quantised ({self.name})"


class LinearGroup:
    """Linear layers that read the same activations: the first one called computes all of them (M §3.4.3).

    Model code calls them one after another with one tensor; the others find their outputs ready. If a model calls only
    some of them with a tensor, they are computed one by one from then on.

    Args:
        members: the layers; often one.
        stream: the model's, which knows which rows belong to which task.

    Attributes:
        number: number of the group within the model.
        are_apart: whether the model has called only some of them with a tensor.
    """

    def __init__(self, members: list[MultiplexedLinear], stream: Stream) -> None:
        self.members = members
        self.stream = stream
        self.number = stream.makers[NAME].enroll(self)
        self.are_apart = False
        self._x: torch.Tensor | None = None
        self._pass = -1
        self._ready: dict[int, torch.Tensor] = {}

    def bases(self) -> list[Base]:
        """Return the frozen part of each layer, as it lies now."""
        return [Base(*frozen_weight(one.base_layer), one.module.out_features) for one in self.members]  # type: ignore[arg-type]

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `[..., K]` of each layer, for `x [..., D]`."""
        self.members[0].check_rows(x, x.shape[-1])
        needed = self._meet() if self.stream.adapters_not_reached else None
        lead, is_sliced = x.shape[:-1], False
        # A loop and no generators, which cost as much as a launch: this runs in every pass of every layer.
        for member in self.members:
            if member.module.disable_adapters:
                is_sliced = True
            # Kernels number draws by the columns that they see, which here are not those of the whole input.
            elif member.window is not None:
                grouped = [member.grouped(segment.adapter) for segment in self.stream.segments]
                if any(own is not None and own.dropout > 0.0 for own in grouped):
                    is_sliced = True
                    if runs_kernels(x.device):
                        say_once("kernels draw dropout for whole inputs only, not on row-parallel layers.")
        lora_pass: Any = None if is_sliced else self.stream.passes.get(NAME)
        if lora_pass is not None:
            device_type = x.device.type
            dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
            ys = lora_pass.outputs(self, x, dtype, needed)
            if ys is not None:
                return ys
        slices = [member.slice_of(self.stream.segments) for member in self.members]
        x_TD = x.reshape(-1, x.shape[-1])
        if (recomputed := vars(x).get("recomputed")) is not None:
            x_TD.recomputed = recomputed  # type: ignore[attr-defined]
        ys = grouped_lora_slices(x_TD, slices, self.stream.places, needed)
        return tuple(y.view(*lead, -1) for y in ys)

    def _meet(self) -> tuple[Rows, ...] | None:
        """Return which rows need the gradient of `x`, and mark the adapters of these layers as applied in this pass."""
        stream = self.stream
        if any(member.module.disable_adapters for member in self.members):
            # A frozen pass may need input gradients.
            stream.adapters_not_reached = frozenset()
            return None
        needed = rows_needed(stream.segments, stream.adapters_not_reached)
        layers: list[Any] = [member.module for member in self.members]
        met = {a for a in stream.adapters_not_reached if any(a in layer.lora_A for layer in layers)}
        met |= {a for member in self.members for a in member.steps}
        stream.adapters_not_reached = stream.adapters_not_reached - met
        return needed

    def shared_output(self, member: MultiplexedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return one member's output for `x`."""
        # The same object and not equal numbers: siblings are called with one tensor, and comparing would wait.
        if x is self._x and id(member) in self._ready:
            # Handed out once, so that no activation outlives its last reader here.
            y = self._ready.pop(id(member))
            if not self._ready:
                self._x = None
            return y
        # What is left over from another pass was cut off there: a recomputation ends as soon as nothing more is needed.
        if self._ready and self._pass == self.stream.num_passes:
            self.are_apart = True
        # Outputs of other activations are of no use, and would be kept alive.
        self._ready.clear()
        self._x = None
        if self.are_apart:
            member.group = LinearGroup([member], self.stream)
            return member.product(x)
        outputs = dict(zip(map(id, self.members), self.outputs(x), strict=True))
        y = outputs.pop(id(member))
        self._x, self._pass, self._ready = x, self.stream.num_passes, outputs
        return y
