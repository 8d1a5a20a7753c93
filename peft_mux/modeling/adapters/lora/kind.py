"""Adapters with initial factors as files: a plain LoRA of twice the rank, as PEFT converts them.

    W + s (B A - B0 A0) = W + s [B | -B0] [A ; A0]        the scale stays: rank and alpha are both doubled

So any PEFT, vLLM and the like load it on the backbone as it is, and nobody has to decompose weights again.
"""

# MERGED: How LoRA's factors lie in a slab: as the grouped kernels read them.
# MERGED: A of the layers that read the same activations lie side by side, so that they are one matrix without a copy;
# MERGED: B lies
# MERGED: transposed (`[R, K]`), as it is used::
# MERGED:     page   | q.A | k.A | v.A | o.A | q.B^T | k.B^T | v.B^T | o.B^T | gate.A | ...
# MERGED: Kernels read the columns of S in groups of eight ranks. So A takes whole groups of eight rows.
# MERGED: LoRA as a kind of adapters: linear layers through the grouped kernels, embeddings through PEFT's own layer.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn

from peft_mux.errors import Fault, raise_faults
from peft_mux.modeling.adapters.fields import complete_heads, field_faults, task_type_faults, type_faults
from peft_mux.modeling.adapters.kind import (
    CutLayers,
    CutOfLayer,
    MultiplexedForward,
    ReplicaLayout,
    SavedForm,
    Shapes,
    SlabOf,
    register_kind,
)
from peft_mux.modeling.adapters.lora import config as lora_config
from peft_mux.modeling.adapters.lora import config as target_parameters
from peft_mux.modeling.adapters.lora.layer import (
    NAME,
    LinearGroup,
    MultiplexedLinear,
    backbone_kept,
    initial_factors,
    keep_factors,
)
from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups
from peft_mux.modeling.adapters.lora.parameters import MultiplexedParameters
from peft_mux.modeling.adapters.sliced import SlicedAdapter
from peft_mux.modeling.backbone.modules import adaptable_modules, modules_around_adapters
from peft_mux.modeling.slabs import Slot, round_up_to_group
from peft_mux.modeling.stream import PassMaker, Stream
from peft_mux.scheduler.costs.loads import AdapterLoad

_FACTORS = (("lora_A.weight", 0), ("lora_B.weight", 1))
"""Names of the factors, and the dimension that is the rank."""


class DoubledRank:
    """Between an adapter with initial factors and its saved form; see `peft_mux.modeling.adapters.kind.SavedForm`.

    Args:
        layers: PEFT's layers that hold initial factors of the adapter, by the prefix of their keys.
        adapter: internal id of the adapter.
    """

    def __init__(self, layers: Mapping[str, Any], adapter: str) -> None:
        """Remember the layers."""
        self._layers, self._adapter = layers, adapter

    def saved(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the saved form, for those of the adapter itself."""
        state = dict(state)
        for prefix, layer in self._layers.items():
            a0, b0 = self._initial(layer)
            for (name, dim), initial in zip(_FACTORS, (a0, -b0), strict=True):
                own = state[f"{prefix}.{name}"]
                state[f"{prefix}.{name}"] = torch.cat([own, initial.to(own)], dim=dim)
        return state

    def loaded(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the adapter itself, for those of the saved form, whose initial factors are taken on."""
        state = dict(state)
        for prefix, layer in self._layers.items():
            halves = [state[f"{prefix}.{name}"].chunk(2, dim=dim) for name, dim in _FACTORS]
            a0, b0 = self._initial(layer)
            keep_factors(layer, self._adapter, halves[0][1].to(a0), -halves[1][1].to(b0))
            for (name, _), (own, _) in zip(_FACTORS, halves, strict=True):
                state[f"{prefix}.{name}"] = own
        return state

    def shape(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a tensor has in the saved form."""
        for prefix in self._layers:
            for name, dim in _FACTORS:
                if key == f"{prefix}.{name}":
                    return tuple(2 * size if number == dim else size for number, size in enumerate(shape))
        return shape

    def write_config(self, config: Any) -> None:
        """Write the saved form's rank and initialisation into a copy of the configuration."""
        # With `use_rslora` the scale is alpha / sqrt(rank).
        alphas = math.sqrt(2) if config.use_rslora else 2
        config.init_lora_weights, config.corda_config, config.lora_ga_config = True, None, None
        config.r *= 2
        config.lora_alpha *= alphas
        config.rank_pattern = {key: 2 * rank for key, rank in (config.rank_pattern or {}).items()}
        config.alpha_pattern = {key: alphas * alpha for key, alpha in (config.alpha_pattern or {}).items()}

    def write_plainly(self) -> None:
        """Let PEFT's layers hold the saved form, for merging; the adapter cannot be trained any more."""
        for layer in self._layers.values():
            a0, b0 = self._initial(layer)
            for part, initial, dim in ((layer.lora_A, a0, 0), (layer.lora_B, -b0, 1)):
                own = part[self._adapter].weight
                part[self._adapter].weight = nn.Parameter(torch.cat([own.detach(), initial.to(own)], dim=dim))

    def _initial(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = initial_factors(layer, self._adapter)
        assert found is not None, "only layers with initial factors are held"
        return found


def doubled_rank(backbone: nn.Module, adapter: str) -> DoubledRank | None:
    """Return the way between an adapter and its saved form; `None` where it is saved as it is.

    Args:
        backbone: the model, as PEFT made it for adapters of this type.
        adapter: internal id of the adapter.
    """
    layers = {
        f"base_model.model.{name}": module
        for name, module in modules_around_adapters(backbone)
        if isinstance(module, LoraLayer) and initial_factors(module, adapter) is not None
    }
    return DoubledRank(layers, adapter) if layers else None


def lora_slot(name: str, parameter: nn.Parameter) -> Slot:
    """Return how a parameter of a LoRA task lies; see `peft_mux.modeling.slabs.SlabLayout`.

    Args:
        name: PEFT's own, without the adapter id.
        parameter: A or B of a layer, or a parameter of a classification head, which lies as it is.
    """
    is_matrix = parameter.dim() == 2
    is_a, is_b = (f".{factor}." in f".{name}" for factor in ("lora_A", "lora_B"))
    # Whole groups of rows, so that the next layer's A follows at a multiple of eight ranks.
    rows_of_a = round_up_to_group(len(parameter)) * parameter.shape[1] if is_a and is_matrix else None
    return Slot(
        block=name.split(".lora_")[0].rpartition(".")[0],
        order=int(".lora_B." in name),
        num_elements=round_up_to_group(parameter.numel()) if rows_of_a is None else rows_of_a,
        is_transposed=is_b and is_matrix,
    )


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
