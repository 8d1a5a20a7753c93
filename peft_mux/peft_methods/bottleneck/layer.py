"""A linear layer with bottlenecks behind it, as PEFT runs it: one task at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional as F

from peft_mux.errors import ConfigError
from peft_mux.peft_methods.bottleneck.config import BottleneckConfig

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class BottleneckLayer(BaseTunerLayer):
    """What a layer with bottlenecks holds of each adapter.

    Attributes:
        bottleneck_down: `[M, K]` weight and bias by adapter, for K output features and M of the bottleneck.
        bottleneck_up: `[K, M]` weight and bias by adapter.
    """

    adapter_layer_names: tuple[str, ...] = ("bottleneck_down", "bottleneck_up")
    other_param_names: tuple[str, ...] = ("bottleneck_dropout", "non_linearity")

    def __init__(self, base_layer: nn.Module, out_features: int) -> None:
        """Begin without adapters."""
        self.base_layer, self.out_features = base_layer, out_features
        self.bottleneck_down, self.bottleneck_up = nn.ModuleDict(), nn.ModuleDict()
        self.bottleneck_dropout = nn.ModuleDict()
        self.non_linearity: dict[str, str] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def update_layer(self, adapter_name: str, config: BottleneckConfig) -> None:
        """Add an adapter."""
        size, width = config.size_for(self.out_features), self.out_features
        self.bottleneck_down[adapter_name] = nn.Linear(width, size, bias=config.down_bias)
        self.bottleneck_up[adapter_name] = nn.Linear(size, width, bias=config.up_bias)
        self.bottleneck_dropout[adapter_name] = nn.Dropout(config.adapter_dropout)
        self.non_linearity[adapter_name] = config.non_linearity
        if config.init_weights:
            # Near-identity, as in the paper: exactly the frozen model before the first step.
            for parameter in self.bottleneck_up[adapter_name].parameters():
                nn.init.zeros_(parameter)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse, as a nonlinearity is no part of a weight.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(MERGE_REFUSAL)

    def unmerge(self) -> None:
        """Do nothing: no bottleneck was ever merged."""


MERGE_REFUSAL = (
    "merge: got a BOTTLENECK adapter (Adapter Tuning); allowed: adapters that add to a weight, such as LORA or "
    "DIFF_PRUNING. A bottleneck has a nonlinearity: keep it beside the backbone, or take it out with unload()."
)


class BottleneckLinear(nn.Module, BottleneckLayer):
    """A linear layer whose output each active adapter adds `up(f(down(y)))` to."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: BottleneckConfig, out_features: int) -> None:
        """Wrap a layer, with a first adapter."""
        super().__init__()
        BottleneckLayer.__init__(self, base_layer, out_features)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `[..., K]`: the frozen layer's output, and what its active adapters make of it."""
        y = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return y
        # All read the frozen layer's output, so that no order of the adapters counts.
        return y + sum(self._added(y, name).to(y.dtype) for name in self.active_adapters if name in self.non_linearity)

    def _added(self, y: torch.Tensor, adapter: str) -> torch.Tensor:
        down: Any = self.bottleneck_down[adapter]
        up = self.bottleneck_up[adapter]
        read = self.bottleneck_dropout[adapter](self._cast_input_dtype(y, down.weight.dtype))
        return up(ACTIVATIONS[self.non_linearity[adapter]](down(read)))
