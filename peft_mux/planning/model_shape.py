"""A backbone as the planner needs it: its configuration, its shape, and the parts that are divided; reads no weights.

`frozen_parts` and `cut_layers` say which bytes and layers tensor parallelism, stages and shards divide. The engine
decides that (`parallel.tensor.cut`, `parallel.pipeline.stage`, `parallel.fsdp`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.modules import frozen_parameters, language_model
from peft_mux.modeling.backbone.quantized import quantized_layers, weight_bytes
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.families import family_of
from peft_mux.parallel.tensor.cut import blocks_of
from peft_mux.scheduler.costs.loads import FrozenParts, ModelShape

_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""What configurations call the number of experts that a token goes to."""

CutLayers = Mapping[str, bool]
"""Layers that tensor parallelism cuts, by the end of their names: whether by their inputs, else by their outputs."""


def plain_backbone(model: Any) -> Any:
    """Return the transformers model of a `MultiTaskPeftModel`, or the model itself."""
    return model.backbone if isinstance(model, MultiTaskPeftModel) else model


def config_of(model: Any) -> Any:
    """Return the configuration of the backbone."""
    return plain_backbone(model).config


def shortened_config(config: Any, num_layers: int | None) -> Any:
    """Return a copy of a configuration with `num_layers` layers, without quantisation; `None` for all layers."""
    config = copy.deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    text = config.get_text_config()
    if num_layers is not None:
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = text.layer_types[:num_layers]
        text.num_hidden_layers = num_layers
    # The only one that every architecture has: attention is ours in the passes that are run.
    config._attn_implementation = "eager"
    return config


def model_shape(backbone: nn.Module, config: Any, *, dtype: torch.dtype, activation_dtype: torch.dtype) -> ModelShape:
    """Return the shape of a backbone.

    Args:
        backbone: possibly on the meta device, possibly with adapters (whose parameters are not counted).
        config: the configuration of the backbone.
        dtype: the dtype in which weights are (or will be) held that are not quantised.
        activation_dtype: the dtype in which the backbone computes.
    """
    text = config.get_text_config()
    num_layers = _first(text, "num_hidden_layers", "n_layer", "n_layers", default=1)
    hidden = _first(text, "hidden_size", "n_embd", "dim", default=1)
    heads = _first(text, "num_attention_heads", "n_head", default=1)
    channels = getattr(text, "head_dim", None) or hidden // heads
    frozen = {id(parameter): parameter for _, parameter in frozen_parameters(backbone)}
    quantized = {id(layer.weight): weight_bytes(layer, bits) for _, layer, bits in quantized_layers(backbone)}
    # A quantised weight counts packed words, not elements; its bytes come from its layer.
    plain = sum(parameter.numel() for key, parameter in frozen.items() if key not in quantized)
    used, held, routed_share = _mlp_widths(backbone, text, hidden, num_layers)
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=used,
        attention_size=heads * channels,
        key_value_size=_first(text, "num_key_value_heads", default=heads) * channels,
        vocab_size=text.vocab_size,
        backbone_bytes=plain * dtype.itemsize + sum(quantized.values()),
        activation_bytes=activation_dtype.itemsize,
        held_intermediate_size=None if used == held else held,
        routed_share=routed_share,
        caps_logits=getattr(config, "final_logit_softcapping", None) is not None,
        head_dim=channels,
    )


def _mlp_widths(backbone: nn.Module, text: Any, hidden: int, num_layers: int) -> tuple[int, int, float]:
    """Return the widths inside the MLPs of a mean layer: what a token passes through, and what there is.

    The third number is the share of the routed experts that a token goes to.
    """
    dense = _first(text, "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", default=4 * hidden)
    chosen = _first(text, *_CHOSEN_EXPERTS, default=1)
    used = held = num_mixtures = most_experts = 0
    for name, experts in backbone.named_modules():
        # The second matrices of all experts, `[E, ...]`.
        matrix = experts._parameters.get("down_proj")
        if matrix is None or matrix.dim() != 3:
            continue
        # One of the two is the width of the residual stream, whichever way the matrices lie.
        count, width = len(matrix), matrix.shape[2] if matrix.shape[1] == hidden else matrix.shape[1]
        # Experts that every token passes through in addition to those of the mixture.
        parent = backbone.get_submodule(name.replace(".base_layer", "").rpartition(".")[0])
        shared = sum(
            int(linear.in_features)  # type: ignore[arg-type]
            for path, linear in parent.named_modules()
            if "shared" in path and path.endswith("down_proj") and hasattr(linear, "in_features")
        )
        # Experts that are not sorted by token all see every token (Llama 4).
        used += width * (chosen if hasattr(experts, "is_transposed") else count) + shared
        held += width * count + shared
        num_mixtures, most_experts = num_mixtures + 1, max(most_experts, count)
    if not num_mixtures:
        return dense, dense, 1.0
    num_layers = max(num_layers, num_mixtures)
    others = dense * (num_layers - num_mixtures)
    return (used + others) // num_layers, (held + others) // num_layers, min(1.0, chosen / most_experts)


def _first(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return default


def _blocks(backbone: Any) -> tuple[Any, ...]:
    """Return the blocks that tensor parallelism cuts; none if the backbone cannot be cut."""
    try:
        return blocks_of(backbone, 1)
    except UnsupportedModelError:
        return ()


def cut_layers(backbone: Any) -> CutLayers:
    """Return which layers are divided among the devices of a stage; none if the backbone cannot be cut."""
    cuts_rows: dict[str, bool] = {}
    for block in _blocks(backbone):
        cuts_rows |= {block.inner(leaf): False for leaf in block.columns}
        cuts_rows[block.inner(block.row)] = True
    head = backbone.get_output_embeddings() if cuts_rows else None
    return cuts_rows | {name: False for name, module in backbone.named_modules() if module is head}


def frozen_parts(backbone: Any, num_layers: int, dtype: torch.dtype) -> FrozenParts | None:
    """Return where the bytes of a backbone are; `None` if its list of layers is not found.

    Args:
        backbone: the transformers model, possibly without weights, possibly with adapters, which do not count.
        num_layers: number of decoder layers of the backbone.
        dtype: the dtype in which its weights are (or will be) held, except quantised ones.
    """
    text = set(language_model(backbone).modules())
    lists = (
        (name, block) for name, block in backbone.named_modules() if isinstance(block, nn.ModuleList) and block in text
    )
    prefix = next((f"{name}." for name, layers in lists if len(layers) == num_layers), None)
    if prefix is None:
        return None
    cut_names = set()
    for block in _blocks(backbone):
        kinds = ("",) if block.has_experts else (".weight", ".bias")
        cut_names |= {block.inner(leaf) + kind for leaf in block.columns for kind in kinds}
        # A row-parallel layer keeps its bias whole: outputs are summed, and only one rank adds it.
        cut_names |= {block.inner(block.row) + kinds[0], *(block.inner(name) for name in block.vectors)}
    embeddings = [backbone.get_input_embeddings()]
    try:
        modules = dict(backbone.get_submodule(backbone.base_model_prefix).named_modules())
        embeddings += [modules.get(name) for name in family_of(backbone).embeddings]
    except UnsupportedModelError:
        pass
    before = {id(parameter) for module in embeddings if module is not None for parameter in module.parameters()}
    head = backbone.get_output_embeddings()
    head_weight = None if head is None else getattr(head, "base_layer", head).weight
    quantized = {id(layer.weight): weight_bytes(layer, bits) for _, layer, bits in quantized_layers(backbone)}
    sizes = {"before": 0, "layers": 0, "cut": 0, "after": 0, "head": 0}
    for adapted_name, parameter in frozen_parameters(backbone):
        name = adapted_name.replace(".original_module.", ".")
        num_bytes = quantized.get(id(parameter), parameter.numel() * dtype.itemsize)
        if name.startswith(prefix):
            sizes["layers"] += num_bytes
            sizes["cut"] += num_bytes if name.removeprefix(prefix).partition(".")[2] in cut_names else 0
        elif id(parameter) in before:
            sizes["before"] += num_bytes
        else:
            sizes["head" if parameter is head_weight else "after"] += num_bytes
    is_tied = head_weight is not None and id(head_weight) in before
    if is_tied and head_weight is not None:
        # Counted with the embedding already; the last stage of a pipeline needs its own copy.
        sizes["head"] = head_weight.numel() * dtype.itemsize
    return FrozenParts(
        before_bytes=sizes["before"],
        layer_bytes=sizes["layers"] // num_layers,
        cut_bytes=sizes["cut"] // num_layers,
        after_bytes=sizes["after"],
        head_bytes=sizes["head"],
        is_tied=is_tied,
    )
