"""Reads off a transformers model what the planner needs to know of it, without touching its weights."""

# MERGED: A digest of the frozen weights, equal however they are laid out over processes.

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from peft_mux.modeling.backbone.modules import frozen_parameters
from peft_mux.modeling.backbone.quantized import quantized_layers, scales, weight_bytes
from peft_mux.scheduler.costs.model_shape import ModelShape

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""What configurations call the number of experts that a token goes to."""


def model_shape(backbone: nn.Module, config: Any, *, dtype: torch.dtype, activation_dtype: torch.dtype) -> ModelShape:
    """Return the shape of a backbone.

    Args:
        backbone: possibly on the meta device, possibly with adapters (whose parameters are not counted).
        config: the configuration of the backbone.
        dtype: the dtype in which weights are (or will be) held that are not quantised.
        activation_dtype: the dtype in which the backbone computes.
    """
    text = config.get_text_config()
    hidden = _first(text, "hidden_size", "n_embd", "dim", default=1)
    mlp = _mlp_widths(backbone, text, hidden)
    heads = _first(text, "num_attention_heads", "n_head", default=1)
    channels = getattr(text, "head_dim", None) or hidden // heads
    frozen = {id(parameter): parameter for _, parameter in frozen_parameters(backbone)}
    quantized = {id(layer.weight): weight_bytes(layer, bits) for _, layer, bits in quantized_layers(backbone)}
    # A quantised weight counts packed words, not elements; its bytes come from its layer.
    plain = sum(parameter.numel() for key, parameter in frozen.items() if key not in quantized)
    return ModelShape(
        num_layers=_first(text, *_LAYERS, default=1),
        hidden_size=hidden,
        intermediate_size=mlp.used,
        attention_size=heads * channels,
        key_value_size=_first(text, "num_key_value_heads", default=heads) * channels,
        vocab_size=text.vocab_size,
        backbone_bytes=plain * dtype.itemsize + sum(quantized.values()),
        activation_bytes=activation_dtype.itemsize,
        held_intermediate_size=None if mlp.used == mlp.held else mlp.held,
        routed_share=mlp.routed_share,
        caps_logits=getattr(config, "final_logit_softcapping", None) is not None,
    )


class _MlpWidths(NamedTuple):
    """Widths inside the MLPs of a mean layer: what a token passes through, and what there is."""

    used: int
    held: int
    routed_share: float


def _mlp_widths(backbone: nn.Module, text: Any, hidden: int) -> _MlpWidths:
    dense = _first(text, "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", default=4 * hidden)
    names = {name: module for name, module in backbone.named_modules() if _inner_width(module, hidden) is not None}
    if not names:
        return _MlpWidths(dense, dense, 1.0)
    chosen = _first(text, *_CHOSEN_EXPERTS, default=1)
    used = held = 0
    for name, experts in names.items():
        width, shared = _inner_width(experts, hidden) or 0, _shared_width(backbone, name)
        count = len(_matrix(experts))
        # Experts that are not sorted by token all see every token (Llama 4).
        used += width * (chosen if hasattr(experts, "is_transposed") else count) + shared
        held += width * count + shared
    num_layers = max(_first(text, *_LAYERS, default=1), len(names))
    others = dense * (num_layers - len(names))
    count = max(len(_matrix(experts)) for experts in names.values())
    return _MlpWidths((used + others) // num_layers, (held + others) // num_layers, min(1.0, chosen / count))


def _matrix(experts: Any) -> torch.Tensor:
    """Return `[E, ...]`, the second matrices of all experts, seen through adapters."""
    return experts.down_proj


def _inner_width(module: nn.Module, hidden: int) -> int | None:
    """Return the width inside one expert of a module that holds several; `None` for any other module."""
    matrix = module._parameters.get("down_proj")
    if matrix is None or matrix.dim() != 3:
        return None
    # One of the two is the width of the residual stream, whichever way the matrices lie.
    return matrix.shape[2] if matrix.shape[1] == hidden else matrix.shape[1]


def _shared_width(backbone: nn.Module, experts: str) -> int:
    """Return the width of the experts that every token passes through beside those of a mixture."""
    parent = experts.replace(".base_layer", "").rpartition(".")[0]
    linears = (
        module
        for name, module in backbone.get_submodule(parent).named_modules()
        if "shared" in name and name.endswith("down_proj") and hasattr(module, "in_features")
    )
    return sum(int(module.in_features) for module in linears)  # type: ignore[arg-type]


def _first(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return default


_SAMPLE_BYTES = 256


@torch.no_grad()
def weight_samples(backbone: Any) -> dict[str, str]:
    """Return what tells each frozen tensor from another: shape, type, and a digest of its first 256 bytes.

    Formats and scales of quantised layers take part. Task heads are left out, and so is what lies outside the base
    model. Of a backbone that is cut into stages, each process has the names of its own layers; taken before weights are
    sharded, as the first bytes of a shard are others.

    Args:
        backbone: the transformers model, with its weights.
    """
    samples = {}
    for name, parameter in frozen_parameters(backbone.base_model):
        form = f"{tuple(parameter.shape)} {parameter.dtype}"
        samples[name] = f"{form} {_digest(parameter)}"
    for name, layer, bits in quantized_layers(backbone.base_model):
        form, tensors = scales(layer, bits)
        samples[f"{name} format"] = f"{form} {' '.join(map(_digest, tensors))}"
    return samples


def fingerprint(kind: str, samples: Mapping[str, str]) -> str:
    """Return one digest for a whole backbone.

    It tells another model, another size, another dtype or other weights of the same model; a few changed values deep
    inside a tensor it does not see.

    Args:
        kind: name of the backbone's class.
        samples: what `weight_samples` returned for all of its weights.
    """
    digest = hashlib.sha256(kind.encode())
    for name in sorted(samples):
        digest.update(f"{name} {samples[name]}\n".encode())
    return digest.hexdigest()[:32]


def backbone_fingerprint(backbone: Any) -> str:
    """Return the digest of a backbone that lies whole in this process."""
    return fingerprint(type(backbone).__name__, weight_samples(backbone))


def _digest(tensor: torch.Tensor) -> str:
    # As bytes, since numpy has no bf16.
    first = tensor.flatten()[: _SAMPLE_BYTES // tensor.element_size()].contiguous().view(torch.uint8)
    return hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest()[:16]
