"""The multiplexed layers: Dispatch, BaseOp, grouped Adapters and Aggregate around a PEFT layer (M §3.2, §3.4.3).

`attach` replaces the `forward` of the layers that PEFT injected and of the backbone's own dropout layers, on the
instance: modules, parameters and their names stay PEFT's and the model's code is untouched. While the stream is idle
the original `forward` runs, so `generate`, merging and saving work as ever.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from peft_mux.kernels import philox
from peft_mux.kernels.availability import runs_kernels
from peft_mux.kernels.lora.group import Base, LoraGroup
from peft_mux.kernels.lora.reference import grouped_lora_slices
from peft_mux.kernels.lora.slices import LinearSlice, LoraSegment, Rows
from peft_mux.modeling.adapters.lora.depth import rows_needed
from peft_mux.modeling.adapters.lora.dora import is_apart
from peft_mux.modeling.adapters.lora.lora_pass import linear_tables
from peft_mux.modeling.adapters.lora.row_steps import InitialPart, OwnBias, RowStep, is_block_diagonal, steps_of
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.adapters.own.biases import own_biases
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.slabs import round_up_to_group
from peft_mux.modeling.stream import RowSegment, Stream

NAME = "LORA"
"""By which streams know the passes of LoRA layers."""


class MultiplexedLinear(MultiplexedForward):
    """The frozen linear layer once over the stream, and each task's LoRA on its own rows."""

    adds_own_biases = True

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self.group = LinearGroup([self], stream)
        self._steps: dict[str, tuple[RowStep, ...]] = {}

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output; outside of a pass PEFT's own, for the adapter that is selected."""
        if self.stream.batch is not None:
            return self.multiplexed(x)
        y = self.original(x, *args, **kwargs)
        return self._selected_output(x, y) if self._steps else y

    def find_steps(self) -> None:
        """Look anew at which adapters do more than the grouped product; needed whenever one came."""
        layer: Any = self.module
        adapters = {*layer.lora_A, *own_biases(layer.get_base_layer())}
        found = {adapter: steps_of(layer, adapter) for adapter in adapters}
        self._steps = {adapter: steps for adapter, steps in found.items() if steps}

    def is_grouped(self, adapter: str) -> bool:
        """Whether the grouped product computes an adapter; otherwise its steps do."""
        layer: Any = self.module
        if adapter not in layer.lora_A or adapter not in self._steps:
            return adapter in layer.lora_A
        return not is_apart(layer, adapter) and not is_block_diagonal(layer, adapter)

    def has(self, adapter: str) -> bool:
        """Whether an adapter does anything here."""
        layer: Any = self.module
        return adapter in layer.lora_A or adapter in self._steps

    def weights_of(self, adapter: str) -> list[nn.Parameter]:
        """Return the weights of an adapter that only this layer reads."""
        layer: Any = self.module
        parts = [getattr(layer, name, {}) for name in ("lora_A", "lora_B", "lora_magnitude_vector")]
        return [weight for part in parts if adapter in part for weight in part[adapter].parameters()]

    @property
    def is_plain(self) -> bool:
        """Whether the frozen layer is a matrix that we multiply with ourselves."""
        return frozen_weight(self.base_layer)[0] is not None

    @property
    def base_layer(self) -> Any:
        """The frozen layer under the adapters."""
        # Asked for several times a layer and pass: PyTorch's `__getattr__` would look everywhere else first.
        return self.module._modules["base_layer"]

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        y = self.group.shared_output(self, x) if len(self.group.members) > 1 else self.product(x)
        return self._stepped(x, y) if self._steps else y

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]` of the layer computed by itself, before the steps of its adapters."""
        layer: Any = self.module
        (y,) = self.group.outputs(x)
        return y if self.is_plain else base_output(layer.base_layer, x, self.name) + y

    @torch.compiler.disable()
    def _stepped(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the outputs `[..., K]` after each task's own steps on its rows."""
        layer: Any = self.module
        segments = self.stream.segments
        if layer.disable_adapters or not any(segment.adapter in self._steps for segment in segments):
            return y
        x_TD, y_TK, parts = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), []
        for segment, x_ND, y_NK in zip(segments, self.by_segment(x_TD), self.by_segment(y_TK), strict=True):
            for step in self._steps.get(segment.adapter, ()):
                y_NK = step(x_ND, y_NK, functools.partial(self._dropped, segment))
            parts.append(y_NK)
        # Joined from slices and not masked: 0 * NaN would carry one task's NaN to the others.
        return torch.cat(parts).view_as(y)

    def _dropped(self, segment: RowSegment, x_ND: torch.Tensor) -> torch.Tensor:
        """Return rows of a task after its dropout in this layer, which is drawn as the grouped product draws it."""
        dropout = self.dropout_of(segment.adapter)
        if dropout == 0.0:
            return x_ND
        places = self.stream.places[segment.start : segment.end]
        return philox.dropout(x_ND, places, dropout, segment.draw_seed(self.name), self._window)

    def _selected_output(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return PEFT's own output, with what it does not know of: the initial part of the weight, own biases."""
        layer: Any = self.module
        if layer.disable_adapters or layer.merged:
            return y
        for adapter in layer.active_adapters:
            for step in self._steps.get(adapter, ()):
                y = step(x, y, lambda rows: rows) if isinstance(step, InitialPart | OwnBias) else y
        return y

    def base(self) -> Base:
        """Return the frozen part of the layer, as it lies now."""
        layer: Any = self.module
        return Base(*frozen_weight(self.base_layer), layer.out_features)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured: its frozen weight is quantised."""
        if self._steps:
            return f"a task's adapter does more on its own rows than the grouped product ({self.name})"
        return None if self.is_plain else f"layers are quantised ({self.name})"

    def slice(self) -> LinearSlice:
        """Return the layer and the adapters that the tasks of the stream have here."""
        return self.slice_of(self.stream.segments)

    def slice_of(self, rows: Sequence[RowSegment]) -> LinearSlice:
        """Return the layer and the adapters that the tasks of given rows have here."""
        layer: Any = self.module
        segments, factors, window = [], [], self._window
        for segment in rows:
            if self.is_grouped(segment.adapter) and not layer.disable_adapters:
                segments.append(self._segment(segment, window))
                factors.append((layer.lora_A[segment.adapter].weight, layer.lora_B[segment.adapter].weight))
        weight, bias = frozen_weight(layer.base_layer)
        return LinearSlice(weight, bias, layer.out_features, segments, factors)

    def dropout_of(self, adapter: str) -> float:
        """Return the probability with which an adapter drops its input now."""
        layer: Any = self.module
        # PEFT puts an `Identity`, which has no `p`, where nothing is dropped.
        return getattr(layer.lora_dropout[adapter], "p", 0.0) if layer.training else 0.0

    def _segment(self, rows: RowSegment, window: philox.Window | None) -> LoraSegment:
        layer: Any = self.module
        dropout = self.dropout_of(rows.adapter)
        # A seed is a hash over names, so it is made only where it is drawn from.
        seed = rows.draw_seed(self.name) if dropout > 0.0 else 0
        return LoraSegment(rows.start, rows.end, layer.scaling[rows.adapter], dropout, seed, window)

    @property
    def _window(self) -> philox.Window | None:
        """Which columns of the whole input lie here, in row-parallel layers (`peft_mux.engine.tensor.parallel`)."""
        return self.base_layer.__dict__.get("input_window")  # getattr would raise and catch in every pass

    @property
    def has_window(self) -> bool:
        """Whether some columns of the whole input lie here alone."""
        return "input_window" in self.base_layer.__dict__

    def draws_in_window(self, rows: Sequence[RowSegment]) -> bool:
        """Whether some adapter drops elements of an input of which only some columns lie here."""
        if not self.has_window:
            return False
        adapters = [segment.adapter for segment in rows]
        return any(self.is_grouped(adapter) and self.dropout_of(adapter) > 0.0 for adapter in adapters)


class LinearGroup:
    """Linear layers that read the same activations: the first one called computes all of them (M §3.4.3).

    Model code calls them one after another with one tensor; the others find their outputs ready. Where a model calls
    only some of them with a tensor, they are computed one by one from then on.

    Args:
        members: the layers; often one.
        stream: the model's, which tells which rows are whose.

    Attributes:
        number: the number by which compiled graphs find the group.
        num_columns: columns of S that any tasks may need; kept up to date by `attach`.
        are_apart: whether the model has called only some of them with a tensor.
    """

    def __init__(self, members: list[MultiplexedLinear], stream: Stream) -> None:
        self.members = members
        self.stream = stream
        self.number = stream.maker_of(NAME).enroll(self)
        self.num_columns = 0
        self.are_apart = False
        self._x: torch.Tensor | None = None
        self._pass = -1
        self._parts: dict[tuple[int, ...], LinearGroup] = {}
        self._ready: dict[int, torch.Tensor] = {}

    @property
    def is_training(self) -> bool:
        """Whether adapters drop out."""
        return self.members[0].module.training

    @property
    def widths(self) -> list[int]:
        """Output features of each layer."""
        return [member.module.out_features for member in self.members]  # type: ignore[misc]

    def _usable_pass(self, x: torch.Tensor) -> Any:
        """Return the `LoraPass` that is to compute the layers; `None` where slices shall."""
        lora_pass = self.stream.pass_of(NAME)
        # A loop and no generators, which cost as much as a launch: this is asked in every pass of every layer.
        for member in self.members:
            layer: Any = member.module
            if layer.disable_adapters:
                return None
            # Kernels number draws by the columns that they see, which here are not those of the whole input.
            if member.has_window and member.draws_in_window(self.stream.segments):
                if runs_kernels(x.device):
                    _say_windows()
                return None
        return lora_pass

    def bases(self) -> list[Base]:
        """Return the frozen part of each layer."""
        return [member.base() for member in self.members]

    def tables(self, *of_tasks: Any) -> LoraGroup | None:
        """Return what launches need to know for a set of tasks; see `KernelGroup` of `lora_pass`."""
        return linear_tables(self.members, *of_tasks)

    def _part(self, members: list[MultiplexedLinear]) -> LinearGroup:
        """Return the group of some of the members, which are computed without the others."""
        key = tuple(map(id, members))
        if key not in self._parts:
            self._parts[key] = LinearGroup(members, self.stream)
            self._parts[key].count_columns()
        return self._parts[key]

    def count_columns(self) -> None:
        """Count anew what S needs: whole groups of eight ranks of each layer's greatest adapter."""
        layers: list[Any] = [member.module for member in self.members]
        self.num_columns = sum(round_up_to_group(max(map(int, layer.r.values()), default=0)) for layer in layers)

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `[..., K]` of each layer, for `x [..., D]`."""
        self.members[0].check_rows(x, x.shape[-1])
        needed = self._meet() if self.stream.unmet else None
        lora_pass, lead = self._usable_pass(x), x.shape[:-1]
        if lora_pass is not None:
            device_type = x.device.type
            autocast = torch.is_autocast_enabled(device_type)
            dtype = torch.get_autocast_dtype(device_type) if autocast else x.dtype
            if torch.compiler.is_compiling():
                # The dtype is settled above; autocast would cast each product by itself.
                with torch.autocast(device_type, enabled=False):
                    ys = lora_pass.compiled_outputs(self, x.reshape(-1, x.shape[-1]), dtype)
                return tuple(y.view(*lead, -1) for y in ys)
            ys = lora_pass.outputs(self, x, dtype, needed)
            if ys is not None:
                return ys
        x_TD = x.reshape(-1, x.shape[-1])
        ys = grouped_lora_slices(x_TD, [member.slice() for member in self.members], self.stream.places, needed)
        return tuple(y.view(*lead, -1) for y in ys)

    def _meet(self) -> tuple[Rows, ...] | None:
        """Return which rows need the gradient of `x`, and note that the adapters of these layers are met now."""
        stream = self.stream
        layers: list[Any] = [member.module for member in self.members]
        if torch.compiler.is_compiling() or any(layer.disable_adapters for layer in layers):
            # A compiled graph must not depend on who was met, and a frozen pass may ask for gradients of its input.
            stream.unmet = frozenset()
            return None
        needed = rows_needed(stream.segments, stream.unmet)
        stream.unmet = frozenset(a for a in stream.unmet if not any(member.has(a) for member in self.members))
        return needed

    def shared_output(self, member: MultiplexedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return one member's output for `x`."""
        if self.stream.left_out:
            kept = [one for one in self.members if one.module not in self.stream.left_out]
            if len(kept) == 1:
                return self._part(kept).outputs(x)[0]
            if len(kept) < len(self.members):
                return self._part(kept).shared_output(member, x)
        # The same object and not equal numbers: siblings are called with one tensor, and comparing would wait.
        if x is self._x and id(member) in self._ready:
            # Given out once, so that no activation outlives its last reader here.
            y = self._ready.pop(id(member))
            if not self._ready:
                self._x = None
            return y
        # What is left over from another pass was cut off there: a recomputation ends where nothing more is needed.
        # A compiled graph must not depend on the number of the pass.
        this_pass = 0 if torch.compiler.is_compiling() else self.stream.num_passes
        if self._ready and self._pass == this_pass:
            self.are_apart = True
        # Outputs of other activations are of no use, and would be held on to.
        self._ready.clear()
        self._x = None
        if self.are_apart:
            member.group = LinearGroup([member], self.stream)
            member.group.count_columns()
            return member.product(x)
        ys = self.outputs(x)
        outputs = {id(item): y for item, y in zip(self.members, ys, strict=True)}
        y = outputs.pop(id(member))
        self._x, self._pass, self._ready = x, this_pass, outputs
        return y


@functools.cache
def _say_windows() -> None:
    warnings.warn(
        "adapters with dropout on row-parallel layers are computed task by task: kernels draw for whole inputs only.",
        stacklevel=2,
    )
