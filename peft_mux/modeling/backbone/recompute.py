"""Selective recomputation: inputs of linear layers that the backward pass computes again instead of keeping them.

The gradient of a LoRA factor A needs what its layer has read: the normed states before attention and MLP, and the
product of activated gate and up states before `down_proj`. Norms and MLPs keep their own inputs for their backward
passes, so these follow from what is kept, by elementwise operators with the same bits. That is the selective activation
recomputation of Korthikanti et al. (2022), for the inputs of adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from peft_mux.kernels.lora.reference import Recomputed
from peft_mux.modeling.backbone.modules import find_layers
from peft_mux.modeling.stream import temporary_attributes

_GATED = {"gate_proj", "up_proj", "down_proj"}


def recompute_inputs(backbone: Any) -> list[nn.Module]:
    """Mark what norms and gated MLPs hand to linear layers, so that these keep no copy for the backward pass.

    Norms and MLPs that tasks adapt themselves, and MLPs with other parts than gate, up and down, stay as they are.

    Args:
        backbone: the backbone, with Liger's kernels if it will compute by them.

    Returns:
        The modules that changed: their `forward` is now an attribute of their own.
    """
    changed: list[nn.Module] = []
    for forward, modules in zip((_normed, _gated), norms_and_gated_mlps(backbone), strict=True):
        for module in modules:
            if "forward" not in vars(module):
                module.forward = functools.partial(forward, module)
                changed.append(module)
    return changed


def norms_and_gated_mlps(backbone: Any) -> tuple[list[Any], list[Any]]:
    """Return the norms that layers hand to linear layers, and the MLPs of gate, up and down alone."""
    found = find_layers(backbone)
    layers = () if found is None else found.layers
    norms = [module for layer in layers for module in layer.children() if "norm" in type(module).__name__.lower()]
    modules = [module for layer in layers for module in layer.modules()]
    return norms, [module for module in modules if _GATED <= module._modules.keys() <= {*_GATED, "act_fn"}]


def keep_inputs(backbone: Any) -> None:
    """Undo `recompute_inputs`, which an earlier run on the same backbone may have called."""
    for module in backbone.modules():
        if getattr(vars(module).get("forward"), "func", None) in (_normed, _gated):
            del module.forward


@contextmanager
def recomputing(backbone: Any, *, wanted: bool) -> Iterator[None]:
    """Mark inputs as `recompute_inputs` does in the `with` block, if that is wanted."""
    if not wanted:
        keep_inputs(backbone)
    changed = recompute_inputs(backbone) if wanted else []
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _normed(norm: Any, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    compute = functools.partial(type(norm).forward, norm, **kwargs)
    return _marked(compute(*args), compute, *args)


def _gated(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up, compute = mlp.gate_proj(x), mlp.up_proj(x), functools.partial(gated_product, mlp)
    return mlp.down_proj(_marked(compute(gate, up), compute, gate, up))


def gated_product(mlp: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return what `down_proj` reads, by the code of the MLP itself."""
    with temporary_attributes(mlp, gate_proj=lambda x: gate, up_proj=lambda x: up, down_proj=lambda product: product):
        return type(mlp).forward(mlp, gate)


def _marked(y: Any, compute: Callable[..., torch.Tensor], *sources: torch.Tensor) -> torch.Tensor:
    """Return `y` with a note of how it is computed again, in the same autocast."""
    if torch.is_grad_enabled():
        device_type = y.device.type
        if torch.is_autocast_enabled(device_type):
            compute = functools.partial(_in_autocast, device_type, torch.get_autocast_dtype(device_type), compute)
        y.recomputed = Recomputed(compute, tuple(source.detach() for source in sources))
    return y


def _in_autocast(device_type: str, dtype: torch.dtype, compute: Callable[..., Any], *sources: torch.Tensor) -> Any:
    with torch.autocast(device_type, dtype=dtype):
        return compute(*sources)
