"""PEFT's own layer, task by task on its rows: for any adapted layer without a fused path, and a kind made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn

from peft_mux.errors import Fault
from peft_mux.modeling.adapters.field_types import type_faults
from peft_mux.modeling.adapters.fields import complete_heads, field_faults, task_type_faults
from peft_mux.modeling.adapters.kind import CutLayers, CutOfLayer, ReplicaLayout, Shapes, SlabOf
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.slabs import Slot, plain_slot
from peft_mux.modeling.stream import PassMaker, Stream
from peft_mux.scheduler.costs.loads import AdapterLoad

_COMMON_FIELDS = frozenset({"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"})


class SlicedAdapter(MultiplexedForward):
    """PEFT's own layer, task by task on its rows; for layers that treat every token by itself.

    The layer may lie around a layer of another PEFT type, and dropout may lie in it: while it runs for one task, the
    stream tells them of that task's rows alone.
    """

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all tasks, in stream order: `[1, T, K]` for token ids, else `[..., K]`."""
        layer: Any = self.module
        is_ids = not x.is_floating_point()
        rows = self.rows(x, 1).view(1, -1) if is_ids else self.rows(x, x.shape[-1]).unsqueeze(0)
        segments = self.stream.segments
        here = [not layer.disable_adapters and self._has(segment.adapter) for segment in segments]
        # No task adapts this layer, so it runs once over the stream and nothing is sliced.
        if not any(here):
            return layer.base_layer(rows if is_ids else x)
        before, parts = layer._active_adapter, []
        try:
            for segment, has_adapter in zip(segments, here, strict=True):
                # The attribute, as PEFT's `set_adapter` would switch gradients on and off as well.
                layer._active_adapter = [segment.adapter]
                run = self.original if has_adapter else layer.base_layer
                with self.stream.only(segment):
                    parts.append(run(rows[:, segment.start : segment.end]))
        finally:
            layer._active_adapter = before
        assert segments[-1].end == self.stream.num_rows, "the segments of a stream cover all of its rows"
        # Joined from slices and not masked: 0 * NaN would carry one task's NaN to the others.
        y = torch.cat(parts, dim=1)
        return y if is_ids else y.view(*x.shape[:-1], -1)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured: how many rows a task has differs from pass to pass."""
        is_embedding = isinstance(self.module.get_base_layer(), nn.Embedding)  # type: ignore[operator]
        what = "a task adapts embeddings" if is_embedding else "a task's adapter runs on its own rows"
        return f"{what} ({self.name})"

    def _has(self, adapter: str) -> bool:
        layer: Any = self.module
        return any(adapter in getattr(layer, name) for name in layer.adapter_layer_names)


class SlicedKind:
    """A PEFT type whose layers run as PEFT wrote them, task by task; see `AdapterKind`.

    For types whose layers treat every token by itself, change nothing of the backbone, and can be told apart by an
    adapter id. `register_kind(SlicedKind(PeftType.IA3, fields={"feedforward_modules"}))` is all that such a type needs;
    another check, another load or another way to narrow a configuration is a method of a class of its own.

    Args:
        peft_type: a type for which PEFT has a tuner.
        fields: fields of the configuration that may be set, beside those that name target modules.
        reasons: why some other fields may not be set, by name.
        default_targets: target modules where a configuration names none, by type of the backbone.
    """

    draws_itself: bool = False
    can_be_cut: bool = False
    lies_apart: bool = True

    def __init__(
        self,
        peft_type: PeftType,
        *,
        fields: Sequence[str] | frozenset[str] | set[str] = (),
        reasons: Mapping[str, str] | None = None,
        default_targets: Mapping[str, Any] | None = None,
    ) -> None:
        """Look the type up in PEFT."""
        tuner = PEFT_TYPE_TO_TUNER_MAPPING[peft_type]
        self.peft_type = peft_type
        self.name = self.title = str(peft_type.value)
        self.layer_type = tuner.tuner_layer_cls
        self.default_targets: Mapping[str, Any] = default_targets or {}
        self._mark = f".{tuner.prefix}"
        self._fields, self._reasons = frozenset(fields) | _COMMON_FIELDS, reasons or {}

    # ------------------------------------------------------- configurations

    def is_config(self, config: PeftConfig) -> bool:
        """Return whether a configuration is of the class that PEFT has for this type."""
        return isinstance(config, PEFT_TYPE_TO_CONFIG_MAPPING[self.peft_type])

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return a fault for every field that is set and not supported, for the task type, and for wrong types."""
        known = field_faults(config, where, supported=self._fields, reasons=self._reasons)
        return [*known, *task_type_faults(config, where), *type_faults(config, where, {}, self._fields)]

    def width_faults(self, config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
        """Return nothing: what does not fit, PEFT itself refuses."""
        return []

    def complete(self, config: Any, backbone: Any) -> None:
        """Let a classifier's task train its head."""
        complete_heads(config)

    def narrow(self, config: Any, modules: Sequence[str]) -> None:
        """Let a copy of a configuration adapt the given modules and no others."""
        config.target_modules = list(modules)
        for field in _COMMON_FIELDS - {"target_modules"}:
            if hasattr(config, field):
                setattr(config, field, None)

    def sample_config(self, rank: int) -> PeftConfig | None:
        """Return nothing: profiles measure kinds that have a rank."""
        return None

    # --------------------------------------------------------------- passes

    def pass_maker(self, slab_of: SlabOf) -> PassMaker | None:
        """Return nothing: the stream tells all that these layers need."""
        return None

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return PEFT's own forward, sliced."""
        return SlicedAdapter(module, name, stream)

    def arrange(self, model: nn.Module, stream: Stream) -> None:
        """Do nothing: each layer runs by itself."""

    # ----------------------------------------------------------- parameters

    def owns(self, parameter_name: str) -> bool:
        """Return whether a parameter bears the prefix of PEFT's tuner."""
        return self._mark in parameter_name

    def site_of(self, parameter_name: str) -> str:
        """Return the name of the layer that a parameter sits on."""
        return parameter_name.partition(self._mark)[0]

    def slot(self, name: str, parameter: nn.Parameter) -> Slot:
        """Return how a parameter of a task lies in its slab: as it is."""
        return plain_slot(name, parameter)

    def loads(self, shapes: Shapes, cut: CutLayers) -> list[AdapterLoad]:
        """Return for each layer an adapter of rank 1 that is as wide as the layer's adapter has elements."""
        elements: dict[str, int] = {}
        for name, shape in shapes.items():
            if self.owns(name):
                count = int(torch.Size(shape).numel())
                elements[self.site_of(name)] = elements.get(self.site_of(name), 0) + count
        return [AdapterLoad(1, count) for count in elements.values()]

    # ---------------------------------------------------------- parallelism

    def cut_dim(self, parameter_name: str, *, is_row: bool) -> int | None:
        """Return nothing: these adapters are not cut."""
        return None

    def cut(self, layer: Any, cut: CutOfLayer) -> None:
        """Refuse, as `refusals` says."""
        raise NotImplementedError(f"{self.title} adapters are not cut among processes.")

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Refuse layouts on which a process holds a part of the model."""
        if layout.is_data_parallel:
            return []
        allowed = "another PEFT type with this layout"
        return [
            Fault(
                f"{where}.peft_config",
                f"{self.title} with replicas {layout}",
                allowed,
                "Its layers are not cut; give every process the whole model.",
            )
        ]
