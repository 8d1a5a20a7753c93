"""Which layers and bytes of a backbone tensor parallelism, stages and shards divide, read off its description.

The engine decides it (`engine.tensor.cut`, `engine.pipeline.stage`, `engine.fsdp`); the planner only has to
know which bytes and which layers are where.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peft_mux.engine.tensor.cut import blocks_of
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.kind import CutLayers
from peft_mux.modeling.backbone.families import family_of
from peft_mux.modeling.backbone.modules import frozen_parameters, language_model
from peft_mux.modeling.backbone.quantized import quantized_layers, weight_bytes
from peft_mux.scheduler.costs.model_shape import FrozenParts


def _blocks(backbone: Any) -> tuple[Any, ...]:
    """Return the blocks that tensor parallelism cuts; none if the backbone cannot be cut."""
    try:
        return blocks_of(backbone, 1)
    except UnsupportedModelError:
        return ()


def cut_layers(backbone: Any) -> CutLayers:
    """Return which layers are divided among the devices of a stage; none if the backbone cannot be cut."""
    found: dict[str, bool] = {}
    for block in _blocks(backbone):
        found |= {block.inner(leaf): False for leaf in block.columns}
        found[block.inner(block.row)] = True
    head = backbone.get_output_embeddings() if found else None
    return found | {name: False for name, module in backbone.named_modules() if module is head}


def frozen_parts(backbone: Any, num_layers: int, dtype: torch.dtype) -> FrozenParts | None:
    """Return where the bytes of a backbone lie; `None` if its list of layers is not found.

    Args:
        backbone: the transformers model, possibly without weights, possibly with adapters, which do not count.
        num_layers: number of decoder layers of the backbone.
        dtype: the dtype in which its weights are (or will be) held, except quantised ones.
    """
    text = set(language_model(backbone).modules())
    prefix = None
    for name, module in backbone.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and module in text:
            prefix = f"{name}."
            break
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
        base = backbone.get_submodule(backbone.base_model_prefix)
        embeddings += [base.get_submodule(name) for name in family_of(backbone).embeddings]
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
        # Counted with the embedding already; the last stage of a pipeline needs a copy of its own.
        sizes["head"] = head_weight.numel() * dtype.itemsize
    return FrozenParts(
        before_bytes=sizes["before"],
        layer_bytes=sizes["layers"] // num_layers,
        cut_bytes=sizes["cut"] // num_layers,
        after_bytes=sizes["after"],
        head_bytes=sizes["head"],
        is_tied=is_tied,
    )
