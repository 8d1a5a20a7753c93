"""PEFT's tuner of Diff Pruning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import ConfigError
from peft_mux.peft_methods.diff_pruning.config import DIFF_PRUNING, DiffPruningConfig
from peft_mux.peft_methods.diff_pruning.gates import greatest, total
from peft_mux.peft_methods.diff_pruning.layer import DiffPruningLayer, DiffPruningLinear
from peft_mux.peft_methods.registration import register_method


class DiffPruningModel(BaseTuner):
    """Adds gated differences to weights of linear layers of a model; see `DiffPruningConfig`.

    A loop of one's own adds the penalty to the loss: `loss + model.base_model.l0_penalty()`, once a step.
    """

    prefix: str = "diff_pruning_"
    tuner_layer_cls = DiffPruningLayer
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        kept = None if peft_config.kept is None else peft_config.kept.get(current_key, 0)
        if isinstance(target, DiffPruningLayer):
            target.update_layer(adapter_name, peft_config, kept)
            return
        layer = DiffPruningLinear(target, adapter_name, peft_config, _shape(target, current_key), kept)
        if adapter_name not in self.active_adapters:
            # One more adapter beside the active one, which alone is trained.
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _layers(self, adapter: str) -> Iterator[tuple[str, DiffPruningLayer]]:
        for name, module in self.model.named_modules():
            if isinstance(module, DiffPruningLayer) and adapter in module.stretches:
                yield name, module

    def l0_penalty(self, adapter_name: str = "default") -> torch.Tensor:
        """Return what belongs to an adapter's loss, once a step: `l0_weight` for each gate expected to be open.

        Args:
            adapter_name: one that was not pruned.

        Raises:
            ConfigError: if there is no such adapter, or it was pruned.
        """
        counts = [layer.expected_l0(adapter_name) for _, layer in self._layers(adapter_name)]
        found = [count for count in counts if count is not None]
        if not found:
            raise ConfigError(f"l0_penalty: got adapter {adapter_name!r}; allowed: {self._unpruned()}.")
        return self.peft_config[adapter_name].l0_weight * total(found)

    @torch.no_grad()
    def prune(self, adapter_name: str = "default", target_sparsity: float | None = None) -> int:
        """Keep the greatest elements of an adapter's difference, and those alone (the L0-ball projection of the paper).

        Afterwards it has one trainable number for each element that was kept, at a fixed place: it can be saved, which
        writes these alone, merged, or trained further, as the paper does.

        Args:
            adapter_name: one that was not pruned.
            target_sparsity: share of the elements that is kept; that of the configuration by default.

        Returns:
            the number of elements that were kept.

        Raises:
            ConfigError: if there is no such adapter, it was pruned or is merged, or the share is not allowed.
        """
        layers = dict(self._layers(adapter_name))
        if any(layer.parts_of(adapter_name) is None or layer.merged for layer in layers.values()) or not layers:
            raise ConfigError(f"prune: got adapter {adapter_name!r}; allowed: {self._unpruned()}, not merged.")
        config: Any = self.peft_config[adapter_name]
        if target_sparsity is not None:
            fields = {"target_modules": "all-linear", "target_sparsity": target_sparsity}
            config.target_sparsity = DiffPruningConfig(**fields).target_sparsity  # refused there, by name
        places = greatest({name: layer.delta(adapter_name) for name, layer in layers.items()}, config.target_sparsity)
        for name, layer in layers.items():
            delta_KD = layer.delta(adapter_name)
            own = places[name].to(delta_KD.device)
            layer.put_kept(adapter_name, delta_KD.flatten()[own.long()], own)
        config.kept = {name: len(own) for name, own in places.items()}
        return sum(config.kept.values())

    def _check_merge_allowed(self) -> None:
        """Refuse before anything is taken apart."""
        super()._check_merge_allowed()
        for layer in self.model.modules():
            if isinstance(layer, DiffPruningLayer):
                layer.check_mergeable()

    def _unpruned(self) -> str:
        configs: dict[str, Any] = self.peft_config
        return ", ".join(name for name, config in configs.items() if config.kept is None) or "one that was not pruned"


def _shape(target: Any, name: str) -> tuple[int, int]:
    if isinstance(target, nn.Linear):
        return target.out_features, target.in_features
    if isinstance(target, Conv1D):
        return target.nf, target.nx
    raise ConfigError(
        f"DiffPruningConfig.target_modules: got {name} ({type(target).__name__}); allowed: linear layers, to whose"
        " weight a difference can be added."
    )


register_method(DIFF_PRUNING, DiffPruningConfig, DiffPruningModel)
