"""PEFT's tuner of Adapter Tuning."""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import ConfigError
from peft_mux.peft_methods.bottleneck.config import BOTTLENECK, BottleneckConfig
from peft_mux.peft_methods.bottleneck.layer import MERGE_REFUSAL, BottleneckLayer, BottleneckLinear
from peft_mux.peft_methods.registration import register_method

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
