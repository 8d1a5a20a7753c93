"""The multiplexed layers: Dispatch, BaseOp, grouped Adapters and Aggregate around a PEFT layer (M §3.2, §3.4.3).

`attach` replaces the `forward` of the layers that PEFT injected and of the backbone's own dropout layers, on the
instance: modules, parameters and their names stay PEFT's and the model's code is untouched. While the stream is idle
the original `forward` runs, so `generate`, merging and saving work as ever.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels import philox
from peft_mux.kernels.grouped_lora import LinearSlice, LoraSegment, grouped_lora_slices
from peft_mux.kernels.lora_group import Base
from peft_mux.modeling.gathering import plain_type
from peft_mux.modeling.lora_pass import runs_kernels
from peft_mux.modeling.quantized import base_output
from peft_mux.modeling.slabs import round_up
from peft_mux.modeling.stream import RowSegment, Stream

_HEAD_COPY = re.compile(r"\.modules_to_save\.[^.]+")
"""Part of a task's head's name that holds its internal id, on which no draw may depend."""

_SIBLING_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))
"""Layers that read the same activations, under the names that transformers gives them."""


def attach(model: nn.Module, stream: Stream) -> None:
    """Multiplex every adapted layer and every dropout layer of a PEFT-injected model that is not yet so.

    Args:
        model: with tuner layers injected by PEFT.
        stream: that tells the layers which rows are whose.
    """
    tuned = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    inside_tuner = tuple(f"{name}." for name in tuned)
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), _Multiplexed) or ".original_module" in name:
            continue
        if isinstance(module, LoraLayer) and isinstance(module, nn.Module):
            kind = MultiplexedLinear if hasattr(module, "lora_A") and len(module.lora_A) else SlicedAdapter
            module.forward = kind(module, name, stream)
        elif isinstance(module, nn.Dropout) and not name.startswith(inside_tuner):
            module.forward = MultiplexedDropout(module, name, stream)
    for parent in model.modules():
        for names in _SIBLING_NAMES:
            _group_siblings(parent, names, stream)
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, MultiplexedLinear):
            forward.group.count_columns()


def _group_siblings(parent: nn.Module, names: tuple[str, ...], stream: Stream) -> None:
    """Let the linear layers of these names, which read the same activations, be computed together."""
    forwards = [getattr(parent, name).__dict__.get("forward") for name in names if hasattr(parent, name)]
    members = [item for item in forwards if isinstance(item, MultiplexedLinear) and item.is_plain]
    if len(members) > 1 and members[0].group.members != members:
        group = LinearGroup(members, stream)
        for member in members:
            member.group = group


def detach(model: nn.Module) -> None:
    """Take adapters and multiplexed forwards out again, so that the model is as it was before PEFT's injection."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Multiplexed):
            del module.forward
    for name, module in list(model.named_modules()):
        original = getattr(module, "original_module", None) if isinstance(module, ModulesToSaveWrapper) else None
        if isinstance(module, BaseTunerLayer):
            original = module.get_base_layer()
        if original is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, original)
    model.__dict__.pop("peft_config", None)


class _Multiplexed:
    """A `forward` that reads the stream, and gives way to the module's own while the stream is idle."""

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        self.module = module
        self.name = _HEAD_COPY.sub("", name)
        self.stream = stream
        self.original = module.forward

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.stream.is_idle:
            return self.original(x, *args, **kwargs)
        return self.multiplexed(x)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def rows(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return `x` as `[rows, width]`, having checked that its rows are the stream's."""
        if x.numel() != self.stream.num_rows * width:
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) was called with a tensor of shape {list(x.shape)}, which "
                f"is not one row for each of the {self.stream.num_rows} rows of the stream; allowed: layers that see "
                "every token once, in order. Take this module out of target_modules (experts of a mixture, for one, "
                "see tokens that were regrouped), or set the dropout to 0."
            )
        return x.reshape(-1, width)


class MultiplexedLinear(_Multiplexed):
    """The frozen linear layer once over the stream, and each task's LoRA on its own rows."""

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self.group = LinearGroup([self], stream)

    @property
    def is_plain(self) -> bool:
        """Whether the frozen layer is a matrix that we multiply with ourselves."""
        layer: Any = self.module
        return frozen_weight(layer.base_layer)[0] is not None

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        if len(self.group.members) > 1:
            return self.group.shared_output(self, x)
        layer: Any = self.module
        (y_TK,) = self.group.outputs(x)
        y = y_TK.view(*x.shape[:-1], -1)
        return y if self.is_plain else base_output(layer.base_layer, x, self.name) + y

    def slice(self) -> LinearSlice:
        """Return the layer and the adapters that the tasks of the stream have here."""
        return self.slice_of(self.stream.segments)

    def slice_of(self, rows: Sequence[RowSegment]) -> LinearSlice:
        """Return the layer and the adapters that the tasks of given rows have here."""
        layer: Any = self.module
        segments, factors, window = [], [], self._window
        for segment in rows:
            if segment.adapter in layer.lora_A and not layer.disable_adapters:
                segments.append(self._segment(segment, window))
                factors.append((layer.lora_A[segment.adapter].weight, layer.lora_B[segment.adapter].weight))
        weight, bias = frozen_weight(layer.base_layer)
        return LinearSlice(weight, bias, layer.out_features, segments, factors)

    def dropout_of(self, adapter: str) -> float:
        """Return the probability with which an adapter drops its input now."""
        layer: Any = self.module
        return getattr(layer.lora_dropout[adapter], "p", 0.0) if layer.training else 0.0

    def _segment(self, rows: RowSegment, window: philox.Window | None) -> LoraSegment:
        layer: Any = self.module
        dropout = self.dropout_of(rows.adapter)
        seed = rows.draw_seed(self.name) if dropout > 0.0 else 0
        return LoraSegment(rows.start, rows.end, layer.scaling[rows.adapter], dropout, seed, window)

    @property
    def _window(self) -> philox.Window | None:
        """Which columns of the whole input lie here, in row-parallel layers (`peft_mux.modeling.tensor_parallel`)."""
        layer: Any = self.module
        return layer.base_layer.__dict__.get("input_window")  # getattr would raise and catch in every pass

    def draws_in_window(self, rows: Sequence[RowSegment]) -> bool:
        """Whether some adapter drops elements of an input of which only some columns lie here."""
        layer: Any = self.module
        adapters = [segment.adapter for segment in rows] if self._window is not None else []
        return any(adapter in layer.lora_A and self.dropout_of(adapter) > 0.0 for adapter in adapters)


class LinearGroup:
    """Linear layers that read the same activations: the first one called computes all of them (M §3.4.3).

    Model code calls them one after another with one tensor; the others find their outputs ready. Where a model calls
    only some of them with a tensor, they are computed one by one from then on.

    Args:
        members: the layers; often one.
        stream: of the model.

    Attributes:
        number: by which compiled graphs find the group.
        num_columns: columns of S that any tasks may need; kept up to date by `attach`.
        are_apart: whether the model has called only some of them with a tensor.
    """

    def __init__(self, members: list[MultiplexedLinear], stream: Stream) -> None:
        self.members = members
        self.stream = stream
        self.number = stream.groups.enroll(self)
        self.num_columns = 0
        self.are_apart = False
        self._x: torch.Tensor | None = None
        self._pass = -1
        self._ready: dict[int, torch.Tensor] = {}

    @property
    def is_training(self) -> bool:
        """Whether adapters drop out."""
        return self.members[0].module.training

    @property
    def widths(self) -> list[int]:
        """Output features of each layer."""
        return [member.module.out_features for member in self.members]  # type: ignore[misc]

    def bases(self) -> list[Base]:
        """Return the frozen part of each layer."""
        layers: list[Any] = [member.module for member in self.members]
        return [Base(*frozen_weight(layer.base_layer), layer.out_features) for layer in layers]

    def count_columns(self) -> None:
        """Count anew what S needs: whole groups of eight ranks of each layer's greatest adapter."""
        layers: list[Any] = [member.module for member in self.members]
        self.num_columns = sum(round_up(max(map(int, layer.r.values()), default=0)) for layer in layers)

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `[T, K]` of each layer."""
        x_TD = self.members[0].rows(x, x.shape[-1])
        lora_pass = self.stream.lora_pass
        if any(member.draws_in_window(self.stream.segments) for member in self.members):
            if runs_kernels(x_TD.device):
                _say_windows()
            lora_pass = None
        if lora_pass is not None and not any(member.module.disable_adapters for member in self.members):
            device_type = x_TD.device.type
            autocast = torch.is_autocast_enabled(device_type)
            dtype = torch.get_autocast_dtype(device_type) if autocast else x_TD.dtype
            with torch.autocast(device_type, enabled=False):
                if torch.compiler.is_compiling():
                    return lora_pass.compiled_outputs(self, x_TD, dtype)
                ys = lora_pass.outputs(self, x_TD, dtype)
            if ys is not None:
                return ys
        return grouped_lora_slices(x_TD, [member.slice() for member in self.members], self.stream.places)

    def shared_output(self, member: MultiplexedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return one member's output for `x`."""
        if x is self._x and id(member) in self._ready:
            y = self._ready.pop(id(member))
            if not self._ready:
                self._x = None
            return y
        # What is left over from another pass was cut off there: a recomputation ends where nothing more is needed.
        # A compiled graph must not depend on the number of the pass.
        this_pass = 0 if torch.compiler.is_compiling() else self.stream.num_passes
        if self._ready and self._pass == this_pass:
            self.are_apart = True
        self._ready.clear()
        self._x = None
        if self.are_apart:
            member.group = LinearGroup([member], self.stream)
            member.group.count_columns()
            return member.multiplexed(x)
        ys = self.outputs(x)
        outputs = {id(item): y.view(*x.shape[:-1], -1) for item, y in zip(self.members, ys, strict=True)}
        y = outputs.pop(id(member))
        self._x, self._pass, self._ready = x, this_pass, outputs
        return y


@functools.cache
def _say_windows() -> None:
    warnings.warn(
        "adapters with dropout on row-parallel layers are computed task by task: kernels draw for whole inputs only.",
        stacklevel=2,
    )


class SlicedAdapter(_Multiplexed):
    """PEFT's own layer, task by task on its rows: for layers without a grouped path (embeddings)."""

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all tasks, in stream order."""
        layer: Any = self.module
        token_ids = self.rows(x, 1).view(1, -1)
        before, parts, end = layer._active_adapter, [], 0
        try:
            for segment in self.stream.segments:
                has_adapter = segment.adapter in layer.lora_embedding_A and not layer.disable_adapters
                layer._active_adapter = [segment.adapter]
                rows = token_ids[:, segment.start : segment.end]
                parts.append(self.original(rows) if has_adapter else layer.base_layer(rows))
                end = segment.end
        finally:
            layer._active_adapter = before
        assert end == self.stream.num_rows, "the segments of a stream cover all of its rows"
        return torch.cat(parts, dim=1)


class MultiplexedDropout(_Multiplexed):
    """The backbone's own dropout with draws that belong to each task, so that neighbours never shift them."""

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, dropped in training."""
        dropout: Any = self.module
        if not dropout.training or dropout.p == 0.0:
            return x
        x_TK = self.rows(x, x.shape[-1])
        parts = [
            philox.dropout(
                x_TK[segment.start : segment.end],
                self.stream.places[segment.start : segment.end],
                dropout.p,
                segment.draw_seed(self.name),
            )
            for segment in self.stream.segments
        ]
        return torch.cat(parts).view_as(x)


def frozen_weight(base_layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `(weight [K, D], bias [K])` of a plain linear layer; `(None, None)` for any other (quantised) kind."""
    kind = plain_type(base_layer)
    if kind is nn.Linear:
        return base_layer.weight, base_layer.bias
    if kind is Conv1D:
        return base_layer.weight.t(), base_layer.bias
    return None, None
