"""Adapter Tuning as a kind of adapters: bottlenecks behind frozen layers, those of all tasks in one pass."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from peft_mux.errors import Fault
from peft_mux.modeling.adapters.bottleneck.layer import MultiplexedBottleneck
from peft_mux.modeling.adapters.kind import CutLayers, ReplicaLayout, Shapes, SlabOf, register_kind
from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.adapters.sliced import SlicedKind
from peft_mux.modeling.slabs import Slot, plain_slot
from peft_mux.modeling.stream import PassMaker, Stream
from peft_mux.peft_methods.bottleneck.config import BOTTLENECK, BottleneckConfig, bottleneck_faults
from peft_mux.peft_methods.bottleneck.model import DEFAULT_TARGETS
from peft_mux.scheduler.costs.loads import AdapterLoad

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
