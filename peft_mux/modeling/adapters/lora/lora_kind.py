"""LoRA as a kind of adapters: linear layers through the grouped kernels, embeddings through PEFT's own layer.

A task's slab holds factors as the grouped kernels read them. A of the layers that read the same activations are side
by side, so that they are one matrix without a copy; B lies transposed (`[R, K]`), as it is used::

    page   | q.A | k.A | v.A | o.A | q.B^T | k.B^T | v.B^T | o.B^T | gate.A | ...

Kernels read the columns of S in groups of eight ranks. So A takes whole groups of eight rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from peft_mux.errors import Fault
from peft_mux.modeling.adapters.kind import (
    AdapterKind,
    Category,
    MultiplexedForward,
    TypeEntry,
    register_kind,
)
from peft_mux.modeling.adapters.lora.config import (
    FIELDS,
    REASONS,
    convert,
    parameter_faults,
    setting_faults,
    width_faults,
)
from peft_mux.modeling.adapters.lora.layer import LinearGroup, MultiplexedLinear
from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups
from peft_mux.modeling.adapters.lora.parameters import MultiplexedParameters
from peft_mux.modeling.adapters.lora.row_steps import RowSteps, initial_factors, keep_factors
from peft_mux.modeling.adapters.trained_parts import own_biases
from peft_mux.modeling.backbone.modules import modules_around_adapters
from peft_mux.modeling.slabs import Slot, round_up_to_group
from peft_mux.modeling.stream import Stream

_FACTORS = (("lora_A.weight", 0), ("lora_B.weight", 1))
"""Names of the factors, and the dimension that is the rank."""


class DoubledRank:
    """Converts between an adapter with initial factors and its files: a plain LoRA of twice the rank, as in PEFT.

        W + s (B A - B0 A0) = W + s [B | -B0] [A ; A0]        the scale stays: rank and alpha are both doubled

    So PEFT, vLLM and similar load it on the backbone as it is, and need not decompose weights again. An adapter
    without initial factors is saved as it is.

    Args:
        backbone: the model that holds the adapter.
        adapter: internal id of the adapter, of any kind.

    Attributes:
        layers: PEFT's layers that hold initial factors of the adapter, by the prefix of their keys.
    """

    def __init__(self, backbone: nn.Module, adapter: str) -> None:
        self._adapter = adapter
        self.layers: dict[str, Any] = {
            f"base_model.model.{name}": module
            for name, module in modules_around_adapters(backbone)
            if isinstance(module, LoraLayer) and initial_factors(module, adapter) is not None
        }

    def saved(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the files, for those of the adapter itself."""
        state = dict(state)
        for prefix, layer in self.layers.items():
            for name, dim, initial in self._initial(layer):
                factor = state[f"{prefix}.{name}"]
                state[f"{prefix}.{name}"] = torch.cat([factor, initial.to(factor)], dim=dim)
        return state

    def loaded(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the adapter itself, for those of the files, whose initial factors are adopted."""
        state = dict(state)
        for prefix, layer in self.layers.items():
            initial = []
            for name, dim, current in self._initial(layer):
                state[f"{prefix}.{name}"], other = state[f"{prefix}.{name}"].chunk(2, dim=dim)
                initial.append(other.to(current))
            keep_factors(layer, self._adapter, initial[0], -initial[1])
        return state

    def shape(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a tensor of the adapter has in the files, for its key."""
        for name, dim in _FACTORS:
            if key.removesuffix(f".{name}") in self.layers:
                return tuple(2 * size if number == dim else size for number, size in enumerate(shape))
        return shape

    def write_config(self, config: Any) -> None:
        """Write the rank and the initialisation of the files into a copy of the configuration."""
        if not self.layers:
            return
        # With `use_rslora` the scale is alpha / sqrt(rank).
        alphas = math.sqrt(2) if config.use_rslora else 2
        config.init_lora_weights, config.corda_config, config.lora_ga_config = True, None, None
        config.r *= 2
        config.lora_alpha *= alphas
        config.rank_pattern = {key: 2 * rank for key, rank in (config.rank_pattern or {}).items()}
        config.alpha_pattern = {key: alphas * alpha for key, alpha in (config.alpha_pattern or {}).items()}

    def write_plainly(self) -> None:
        """Give PEFT's layers the factors of the files, for merging; the adapter cannot be trained any more."""
        for layer in self.layers.values():
            for name, dim, initial in self._initial(layer):
                part = getattr(layer, name.removesuffix(".weight"))[self._adapter]
                part.weight = nn.Parameter(torch.cat([part.weight.detach(), initial.to(part.weight)], dim=dim))

    def _initial(self, layer: Any) -> list[tuple[str, int, torch.Tensor]]:
        """Return for A and B: its name, the dimension that is its rank, and what the files add to it."""
        factors = initial_factors(layer, self._adapter)
        assert factors is not None, "only layers with initial factors are held"
        return [(*_FACTORS[0], factors[0]), (*_FACTORS[1], -factors[1])]


def set_alpha(layers: Iterable[Any], adapter: str, config: Any, alpha: float) -> None:
    """Give an adapter another `lora_alpha` in its configuration and in PEFT's layers, as their `update_layer` would."""
    config.lora_alpha = alpha
    for layer in layers:
        if isinstance(layer, LoraLayer) and adapter in layer.scaling:
            rank = layer.r[adapter]
            layer.lora_alpha[adapter] = alpha
            layer.scaling[adapter] = alpha / (math.sqrt(rank) if layer.use_rslora[adapter] else rank)


def lora_slot(name: str, parameter: nn.Parameter) -> Slot:
    """Return how a parameter of a LoRA task is laid out in its slab: A and B as kernels read them, a head as it is.

    Args:
        name: PEFT's own, without the adapter id.
        parameter: A or B of a layer, or a parameter of a classification head.
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


class LoraKind(AdapterKind):
    """LoRA; its `forward_type` is for embeddings."""

    draws_dropout = True
    lies_apart = False
    slot = staticmethod(lora_slot)
    pass_maker = LoraGroups

    # ------------------------------------------------------- configurations

    def setting_faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with scales and initialisations."""
        return setting_faults(config, where)

    def width_faults(self, config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
        """Return which ranks and initialisations do not fit the targets."""
        return width_faults(config, modules, where)

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return what does not fit the backbone, its bare parameters included."""
        return super().backbone_faults(config, backbone, where) + parameter_faults(config, backbone, where)

    def complete(self, config: Any, backbone: Any) -> None:
        """Let a classifier's task train its head, and name the experts of a mixture as PEFT does."""
        super().complete(config, backbone)
        convert(config, backbone)

    # --------------------------------------------------------------- passes

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return the grouped forward of a linear layer, or PEFT's own forward, sliced, of an embedding."""
        if isinstance(module, ParamWrapper):
            return MultiplexedParameters(module, name, stream)
        # PEFT keeps the factors of embeddings under other names, and leaves `lora_A` empty there.
        is_linear = len(getattr(module, "lora_A", ())) > 0
        return MultiplexedLinear(module, name, stream) if is_linear else super().attach(module, name, stream)

    def connect(self, model: nn.Module, stream: Stream) -> None:
        """Group the layers that read the same activations, and count the sizes that their kernels need."""
        # Siblings are attributes of one module, so parents are searched and not names.
        modules = [module for _, module in modules_around_adapters(model)]
        for parent in modules:
            for names in _SIBLING_NAMES:
                # Some are `None`: latent attention has one matrix of queries or two.
                layers = [layer for layer in (getattr(parent, name, None) for name in names) if layer is not None]
                forwards_of_layers = [layer.__dict__.get("forward") for layer in layers]
                members = [
                    forward
                    for forward in forwards_of_layers
                    if isinstance(forward, MultiplexedLinear) and forward.is_plain
                ]
                # Later tasks find their layers grouped; a new group would enroll and build its tables again.
                if len(members) > 1 and members[0].group.members != members:
                    group = LinearGroup(members, stream)
                    for member in members:
                        member.group = group
        forwards = [module.__dict__.get("forward") for module in modules]
        for forward in forwards:
            if isinstance(forward, MultiplexedLinear):
                if any(member.group is not forward.group for member in forward.group.members):
                    # A sibling is called with other activations since an adapter of another type came to its layer.
                    forward.group = LinearGroup([forward], stream)
                layer: Any = forward.module
                adapters = (*layer.lora_A, *own_biases(layer.get_base_layer()))
                steps = {adapter: RowSteps(layer, adapter) for adapter in adapters}
                forward.steps = {
                    adapter: steps_of_adapter for adapter, steps_of_adapter in steps.items() if steps_of_adapter
                }


LORA = register_kind(LoraKind(TypeEntry("LORA", Category.FUSED, REASONS, FIELDS), "LoRA"))
