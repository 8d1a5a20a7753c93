"""Diff Pruning as a kind of adapters: differences on frozen layers, those of all tasks in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn

from peft_mux.errors import Fault
from peft_mux.modeling.adapters.diff_pruning.layer import MultiplexedDiff
from peft_mux.modeling.adapters.kind import ReplicaLayout, register_kind
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.adapters.sliced import SlicedKind
from peft_mux.modeling.stream import Stream
from peft_mux.peft_methods.diff_pruning.config import DIFF_PRUNING, DiffPruningConfig, diff_pruning_faults
from peft_mux.peft_methods.diff_pruning.gates import Relaxed, Stretch, expected_l0, total

_UNSUPPORTED = {
    "modules_to_save": "it trains a copy of a backbone module; classification heads are added without it",
    "kept": "the adapter was pruned, which is for serving: load it with PeftModel.from_pretrained, or train the one"
    " that it was pruned from",
}


class DiffPruningKind(SlicedKind):
    """What the product asks of Diff Pruning; see `peft_mux.modeling.adapters.kind.AdapterKind`."""

    draws_itself = True
    lies_apart = False

    def __init__(self) -> None:
        """Read the fields off the configuration."""
        names = {field.name for field in fields(DiffPruningConfig)} - _UNSUPPORTED.keys()
        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        super().__init__(DIFF_PRUNING, fields=names, reasons=_UNSUPPORTED, default_targets=targets)
        self.title = "Diff Pruning"

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with the fields of a configuration, whatever the backbone."""
        return [*super().faults(config, where), *diff_pruning_faults(config, where)]

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return the forward of all tasks' differences."""
        return MultiplexedDiff(module, name, stream)

    def penalty(self, config: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the penalty on gates that are expected to be open.

        Args:
            config: the adapter configuration of the task.
            parameters: the task's parameters, by their PEFT names without the adapter id.
        """
        stretch = Stretch(config.concrete_lower, config.concrete_upper)
        counts = []
        for name, delta_KD in parameters.items():
            site, mark, part = name.partition(self._mark)
            if mark and part == "delta":
                rows = parameters.get(f"{site}{mark}row_alpha")
                counts.append(expected_l0(Relaxed(delta_KD, parameters[f"{site}{mark}alpha"], rows), stretch))
        return config.l0_weight * total(counts)

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Refuse layouts on which a process holds a part of the model."""
        if layout.is_data_parallel or layout.is_tensor_parallel:
            return super().refusals(layout, where)
        return [
            Fault(
                f"{where}.peft_config",
                f"{self.title} with replicas {layout}",
                "another PEFT type with this layout",
                "The penalty of layers on one stage does not reach the loss on another; give every process the whole"
                " model.",
            )
        ]


register_kind(DiffPruningKind())
