"""What tensor parallelism, stages and shards of the backbone make of a model, read off its description.

The engine decides it (`modeling.tensor_plan`, `modeling.stages`, `engine.sharded_backbone`); the planner only has to
know which bytes and which layers are where.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def cut_layers(backbone: Any) -> CutLayers:
    """Return which layers are divided among the devices of a stage; none where the backbone cannot be cut.

    Args:
        backbone: the transformers model, possibly without weights.
    """
    found: dict[str, bool] = {}
    for block in _blocks(backbone):
        found |= {block.inner(leaf): False for leaf in block.columns}
        found[block.inner(block.row)] = True
    head = backbone.get_output_embeddings() if found else None
    return found | {name: False for name, module in backbone.named_modules() if module is head}


def sums_before_attention(backbone: Any) -> bool:
    """Return whether devices that share a layer sum before attention, for a norm over all heads.

    Args:
        backbone: the transformers model, possibly without weights.
    """
    return any(block.norms for block in _blocks(backbone))


def frozen_parts(backbone: Any, num_layers: int, dtype: torch.dtype) -> FrozenParts | None:
    """Return where the bytes of a backbone lie; `None` where its layers cannot be told.

    Args:
        backbone: the transformers model, possibly without weights, possibly with adapters, which do not count.
        num_layers: number of decoder layers of the backbone.
        dtype: the dtype in which its weights are (or will be) held, those that are not quantised.
    """
    prefix = _layers_prefix(backbone, num_layers)
    if prefix is None:
        return None
    sizes = dict(_frozen_bytes(backbone, dtype))
    head = backbone.get_output_embeddings()
    head_weight = None if head is None else getattr(head, "base_layer", head).weight
    before = _embedding_weights(backbone)
    parts = {"before": 0, "layers": 0, "cut": 0, "after": 0, "head": 0}
    cut_names = _cut_names(backbone)
    for name, (parameter, num_bytes) in sizes.items():
        if name.startswith(prefix):
            parts["layers"] += num_bytes
            parts["cut"] += num_bytes if name.removeprefix(prefix).partition(".")[2] in cut_names else 0
        elif id(parameter) in before:
            parts["before"] += num_bytes
        else:
            parts["head" if parameter is head_weight else "after"] += num_bytes
    is_tied = head_weight is not None and id(head_weight) in before
    if is_tied and head_weight is not None:
        # Counted with the embedding already; the last stage of a pipeline needs a copy of its own.
        parts["head"] = head_weight.numel() * dtype.itemsize
    return FrozenParts(
        before_bytes=parts["before"],
        layer_bytes=parts["layers"] // num_layers,
        cut_bytes=parts["cut"] // num_layers,
        after_bytes=parts["after"],
        head_bytes=parts["head"],
        is_tied=is_tied,
    )


def _blocks(backbone: Any) -> tuple[Any, ...]:
    try:
        return blocks_of(backbone, 1)
    except UnsupportedModelError:
        return ()


def _cut_names(backbone: Any) -> set[str]:
    """Return the parameters that tensor parallelism divides, by name within a layer."""
    names = set()
    for block in _blocks(backbone):
        kinds = ("",) if block.has_experts else (".weight", ".bias")
        names |= {block.inner(leaf) + kind for leaf in block.columns for kind in kinds}
        # A row-parallel layer keeps its bias whole: outputs are summed, and only one rank adds it.
        names |= {block.inner(block.row) + kinds[0], *(block.inner(name) for name in block.vectors)}
    return names


def _layers_prefix(backbone: Any, num_layers: int) -> str | None:
    """Return how the names of all layers begin."""
    text = set(language_model(backbone).modules())
    lists = (
        f"{name}."
        for name, module in backbone.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and module in text
    )
    return next(lists, None)


def _embedding_weights(backbone: Any) -> set[int]:
    """Return the weights that lie before the layers, by `id`."""
    modules = [backbone.get_input_embeddings()]
    try:
        base = backbone.get_submodule(backbone.base_model_prefix)
        modules += [base.get_submodule(name) for name in family_of(backbone).embeddings]
    except UnsupportedModelError:
        pass
    return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}


def _frozen_bytes(backbone: Any, dtype: torch.dtype) -> Iterator[tuple[str, tuple[nn.Parameter, int]]]:
    """Yield each frozen parameter once, under its name without adapters, with its bytes."""
    quantized = {id(layer.weight): weight_bytes(layer, bits) for _, layer, bits in quantized_layers(backbone)}
    for name, parameter in frozen_parameters(backbone):
        held = quantized.get(id(parameter))
        num_bytes = parameter.numel() * dtype.itemsize if held is None else held
        yield name.replace(".original_module.", "."), (parameter, num_bytes)
