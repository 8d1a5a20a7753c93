"""`BottleneckConfig`: what an adapter of Adapter Tuning is like."""

# MERGED: A linear layer with bottlenecks behind it, as PEFT runs it: one task at a time.
# MERGED: PEFT's tuner of Adapter Tuning.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import ConfigError, Fault, raise_faults, shown
from peft_mux.modeling.adapters.registration import (
    flag_faults,
    is_number,
    own_peft_type,
    regex_clash_faults,
    register_method,
    whole_number_faults,
)

BOTTLENECK = own_peft_type("BOTTLENECK")

NON_LINEARITIES = ("relu", "gelu", "silu", "tanh")

DEFAULT_SIZE = 64
"""Features of a bottleneck where neither field says it: the middle one of the sizes that the paper tries for GLUE."""


@dataclass
class BottleneckConfig(PeftConfig):
    """Configuration of Adapter Tuning (Houlsby et al., 2019, "Parameter-Efficient Transfer Learning for NLP").

    A bottleneck stands behind the output `y` of each targeted linear layer: `y + up(f(down(y)))`. In the paper that is
    the projection behind the attention and that behind the feed-forward layer of every block, as in
    `target_modules=["o_proj", "down_proj"]`, which is also the default for known architectures.

    Args:
        bottleneck_size: features between `down` and `up`; 64 where `reduction_factor` does not say it either.
        reduction_factor: the layer's output features divided by those of the bottleneck, in place of a size.
        non_linearity: "relu", "gelu", "silu" or "tanh".
        adapter_dropout: probability of dropping an element of what `down` reads.
        down_bias: whether `down` has a bias.
        up_bias: whether `up` has a bias.
        init_weights: begin with `up` at zero, so that an untrained adapter changes nothing; `False` draws it.
        target_modules: names of linear layers, a regular expression over full names, or "all-linear".
        exclude_modules: names of layers, or a regular expression, that are left out.
        layers_to_transform: numbers of the blocks that are adapted; all by default.
        layers_pattern: name of the list of blocks, where it has an unusual one.
        modules_to_save: modules of which a trained copy is saved beside the adapter, such as a new head.

    Raises:
        ConfigError: naming each field with what it may hold.

    Example:
        >>> from peft_mux import BottleneckConfig
        >>> BottleneckConfig(bottleneck_size=32, target_modules=["o_proj", "down_proj"]).size_for(4096)
        32
    """

    bottleneck_size: int | None = None
    reduction_factor: float | None = None
    non_linearity: str = "gelu"
    adapter_dropout: float = 0.0
    down_bias: bool = True
    up_bias: bool = True
    init_weights: bool = True
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = field(default=None)

    def __post_init__(self) -> None:
        """Check the fields, and name the type."""
        super().__post_init__()
        self.peft_type = BOTTLENECK
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)
        raise_faults(bottleneck_faults(self, type(self).__name__))

    def size_for(self, out_features: int) -> int:
        """Return the features of the bottleneck behind a layer.

        Args:
            out_features: output features of the layer.
        """
        if self.reduction_factor is not None:
            return max(1, int(out_features / self.reduction_factor))
        return DEFAULT_SIZE if self.bottleneck_size is None else self.bottleneck_size


def bottleneck_faults(config: BottleneckConfig, where: str) -> list[Fault]:
    """Return what is wrong with the fields of a configuration, whatever the backbone.

    Args:
        config: an adapter configuration, whose fields may have been set to anything.
        where: prefix of the fields.
    """
    faults, size, factor = [], config.bottleneck_size, config.reduction_factor
    if size is not None:
        faults += whole_number_faults(size, f"{where}.bottleneck_size")
    if factor is not None and (not is_number(factor) or factor < 1):
        faults.append(Fault(f"{where}.reduction_factor", shown(factor), "a finite number of at least 1, or None"))
    if size is not None and factor is not None:
        faults.append(Fault(f"{where}.reduction_factor", shown(factor), "None where bottleneck_size is set"))
    if not isinstance(config.non_linearity, str) or config.non_linearity not in NON_LINEARITIES:
        names = ", ".join(map(repr, NON_LINEARITIES))
        faults.append(Fault(f"{where}.non_linearity", shown(config.non_linearity), names))
    if not is_number(config.adapter_dropout) or not 0 <= config.adapter_dropout < 1:
        faults.append(Fault(f"{where}.adapter_dropout", shown(config.adapter_dropout), "a number in [0, 1)"))
    flags = [(name, getattr(config, name)) for name in ("down_bias", "up_bias", "init_weights")]
    return [*faults, *flag_faults(flags, where), *regex_clash_faults(config, where)]


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


_LLAMA_LIKE = ["o_proj", "down_proj"]

DEFAULT_TARGETS: dict[str, list[str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "smollm3"), _LLAMA_LIKE),
    "gpt2": ["attn.c_proj", "mlp.c_proj"],
    "gpt_neox": ["attention.dense", "dense_4h_to_h"],
    "opt": ["out_proj", "fc2"],
    "bert": ["output.dense"],
    "roberta": ["output.dense"],
}
"""Where the paper puts adapters, by type of the backbone: behind the attention and behind the feed-forward layer."""


class BottleneckModel(BaseTuner):
    """Puts bottlenecks behind linear layers of a model; see `BottleneckConfig`."""

    prefix: str = "bottleneck_"
    tuner_layer_cls = BottleneckLayer
    target_module_mapping = DEFAULT_TARGETS

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
        if isinstance(target, BottleneckLayer):
            target.update_layer(adapter_name, peft_config)
            return
        layer = BottleneckLinear(target, adapter_name, peft_config, _out_features(target, current_key))
        if adapter_name not in self.active_adapters:
            # One more adapter beside the active one, which alone is trained.
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _check_merge_allowed(self) -> None:
        """Refuse before anything is taken apart."""
        raise ConfigError(MERGE_REFUSAL)


def _out_features(target: Any, name: str) -> int:
    if isinstance(target, nn.Linear):
        return target.out_features
    if isinstance(target, Conv1D):
        return target.nf
    raise ConfigError(
        f"BottleneckConfig.target_modules: got {name} ({type(target).__name__}); allowed: linear layers, whose output"
        " a bottleneck reads."
    )


register_method(BOTTLENECK, BottleneckConfig, BottleneckModel)
