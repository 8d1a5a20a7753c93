"""LoRA as a kind of adapters: linear layers through the grouped kernels, embeddings through PEFT's own layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn

from peft_mux.errors import Fault, raise_faults
from peft_mux.modeling.adapters.field_types import type_faults
from peft_mux.modeling.adapters.fields import complete_heads, field_faults, task_type_faults
from peft_mux.modeling.adapters.kind import (
    CutLayers,
    CutOfLayer,
    ReplicaLayout,
    SavedForm,
    Shapes,
    SlabOf,
    register_kind,
)
from peft_mux.modeling.adapters.lora import config as lora_config
from peft_mux.modeling.adapters.lora import target_parameters
from peft_mux.modeling.adapters.lora.initial_factors import backbone_kept
from peft_mux.modeling.adapters.lora.layer import NAME, LinearGroup, MultiplexedLinear
from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups
from peft_mux.modeling.adapters.lora.parameters import MultiplexedParameters
from peft_mux.modeling.adapters.lora.saved_form import doubled_rank
from peft_mux.modeling.adapters.lora.slab_layout import lora_slot
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.adapters.sliced import SlicedAdapter
from peft_mux.modeling.backbone.modules import adaptable_modules, modules_around_adapters
from peft_mux.modeling.slabs import Slot
from peft_mux.modeling.stream import PassMaker, Stream
from peft_mux.scheduler.costs.loads import AdapterLoad

_SIBLING_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))
"""Layers that read the same activations, under the names that transformers gives them."""


class LoraKind:
    """What the product asks of LoRA; see `peft_mux.modeling.adapters.kind.AdapterKind`."""

    peft_type: PeftType = PeftType.LORA
    name: str = NAME
    title: str = "LoRA"
    layer_type: type[BaseTunerLayer] = LoraLayer
    default_targets: Mapping[str, Any] = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    draws_itself: bool = True
    can_be_cut: bool = True
    lies_apart: bool = False

    # ------------------------------------------------------- configurations

    def is_config(self, config: PeftConfig) -> bool:
        """Return whether a configuration is a `LoraConfig`."""
        return isinstance(config, LoraConfig)

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with the fields of a configuration, whatever the backbone."""
        supported = lora_config.FIELDS
        return [
            *field_faults(config, where, supported=supported, reasons=lora_config.REASONS),
            *type_faults(config, where, lora_config.TYPES, supported),
            *lora_config.number_faults(config, where),
            *task_type_faults(config, where),
            *lora_config.initialiser_faults(config, where),
        ]

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return nothing: what a backbone lacks shows in the modules that are targets."""
        return []

    def adaptable(self, backbone: nn.Module) -> Mapping[str, nn.Module]:
        """Return the linear layers and embeddings of a backbone, by name."""
        return adaptable_modules(backbone)

    def width_faults(self, config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
        """Return a fault for a rank above the width of every layer, and for weights that nothing can be taken from."""
        faults = lora_config.rank_faults(config, modules, where)
        return faults or lora_config.weight_faults(config, modules, where)

    def complete(self, config: Any, backbone: Any) -> None:
        """Let a classifier's task train its head, and name the experts of a mixture as PEFT does."""
        complete_heads(config)
        target_parameters.convert(config, backbone)
        raise_faults(target_parameters.parameter_faults(config, backbone))

    def injecting(self) -> AbstractContextManager[None]:
        """Keep initialisations from writing into the backbone's weights."""
        return backbone_kept()

    def narrow(self, config: Any, modules: Sequence[str]) -> None:
        """Let a copy of a configuration adapt the given modules and no others."""
        config.target_modules, config.exclude_modules = list(modules), None
        config.layers_to_transform = config.layers_pattern = None  # the names are those of single layers
        config.target_parameters = None

    def sample_config(self, rank: int) -> PeftConfig | None:
        """Return an adapter of a rank on all linear layers."""
        return LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules="all-linear")

    # --------------------------------------------------------------- passes

    def pass_maker(self, slab_of: SlabOf) -> PassMaker | None:
        """Return the tables of one model's groups of layers."""
        return LoraGroups(slab_of)

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return the grouped forward of a linear layer, or PEFT's own forward, sliced, of an embedding."""
        if isinstance(module, ParamWrapper):
            return MultiplexedParameters(module, name, stream)
        # PEFT keeps the factors of embeddings under other names, and leaves `lora_A` empty there.
        is_linear = len(getattr(module, "lora_A", ())) > 0
        return MultiplexedLinear(module, name, stream) if is_linear else SlicedAdapter(module, name, stream)

    def arrange(self, model: nn.Module, stream: Stream) -> None:
        """Let the layers that read the same activations be computed together, and count what their kernels need."""
        # Siblings are attributes of one module, so parents are searched and not names.
        modules = [module for _, module in modules_around_adapters(model)]
        for parent in modules:
            for names in _SIBLING_NAMES:
                _group_siblings(parent, names, stream)
        forwards = [module.__dict__.get("forward") for module in modules]
        for forward in forwards:
            if isinstance(forward, MultiplexedLinear):
                if any(member.group is not forward.group for member in forward.group.members):
                    # A sibling is called with other activations since an adapter of another type came to its layer.
                    forward.group = LinearGroup([forward], stream)
                forward.group.count_columns()
                forward.find_steps()

    # ----------------------------------------------------------- parameters

    def owns(self, parameter_name: str) -> bool:
        """Return whether a parameter is a factor of LoRA."""
        return ".lora_" in parameter_name

    def site_of(self, parameter_name: str) -> str:
        """Return the name of the layer that a factor sits on."""
        return parameter_name.partition(".lora_")[0]

    def slot(self, name: str, parameter: nn.Parameter) -> Slot:
        """Return how a parameter of a task lies in its slab: as kernels read it."""
        return lora_slot(name, parameter)

    def saved_form(self, backbone: nn.Module, adapter: str) -> SavedForm | None:
        """Return how an adapter with initial factors is saved: with twice the rank."""
        return doubled_rank(backbone, adapter)

    def loads(self, shapes: Shapes, cut: CutLayers) -> list[AdapterLoad]:
        """Return the rank and the width of every linear layer's adapter; embeddings only look rows up."""
        found = []
        for name, a in shapes.items():
            if ".lora_A." in name:
                is_row = next((rows for end, rows in cut.items() if self.site_of(name).endswith(f".{end}")), None)
                b = shapes[name.replace(".lora_A.", ".lora_B.")]
                # Of each pair one factor is cut, and the other lies whole on every shard.
                cut_width = 0 if is_row is None else a[1] if is_row else b[0]
                is_routed = self.site_of(name).replace(".base_layer", "").endswith(".experts")
                found.append(AdapterLoad(a[0], a[1] + b[0], cut_width, is_routed))
        return found

    # ---------------------------------------------------------- parallelism

    def cut_dim(self, parameter_name: str, *, is_row: bool) -> int | None:
        """Return the input dimension of A for layers that are cut by their inputs, else the output dimension of B."""
        factor, dim = (".lora_A.", 1) if is_row else (".lora_B.", 0)
        return dim if factor in parameter_name and parameter_name.endswith(".weight") else None

    def cut(self, layer: Any, cut: CutOfLayer) -> None:
        """Cut A or B of every adapter of a layer."""
        for linear in (layer.lora_A if cut.is_row else layer.lora_B).values():
            linear.weight.data = cut.take(linear.weight.data, 1 if cut.is_row else 0)
            # One of the whole shape would not fit any more.
            linear.weight.grad = None
            setattr(linear, "in_features" if cut.is_row else "out_features", cut.num_held)

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Return nothing: LoRA is trained on every layout of processes."""
        return []


def _group_siblings(parent: nn.Module, names: tuple[str, ...], stream: Stream) -> None:
    """Let the linear layers of these names, which read the same activations, be computed together."""
    # Some are `None`: latent attention has one matrix of queries or two.
    layers = [layer for layer in (getattr(parent, name, None) for name in names) if layer is not None]
    forwards = [layer.__dict__.get("forward") for layer in layers]
    members = [item for item in forwards if isinstance(item, MultiplexedLinear) and item.is_plain]
    # Later tasks find their layers grouped; a new group would enroll and build its tables anew.
    if len(members) > 1 and members[0].group.members != members:
        group = LinearGroup(members, stream)
        for member in members:
            member.group = group


register_kind(LoraKind())
