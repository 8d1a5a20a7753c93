"""Adapters with initial factors as files: a plain LoRA of twice the rank, as PEFT converts them.

    W + s (B A - B0 A0) = W + s [B | -B0] [A ; A0]        the scale stays: rank and alpha are both doubled

So any PEFT, vLLM and the like load it on the backbone as it is, and nobody has to decompose weights again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from peft_mux.modeling.adapters.lora.initial_factors import initial_factors, keep_factors
from peft_mux.modeling.backbone.modules import modules_around_adapters

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
