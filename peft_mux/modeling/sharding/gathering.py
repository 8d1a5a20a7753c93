"""Sharded frozen weights (FSDP2), as the code that reads them directly sees them.

FSDP2 gathers a module's weights before its `forward` and frees them after. An output head is no such case here: the
loss reads its weight without calling it, in blocks whose number differs from process to process. So whoever reads it
says so, once a pass, and every process gathers equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before FSDP2 sharded its weights."""
    if isinstance(module, FSDPModule):
        # FSDP2 swaps the class for one that inherits from `FSDPModule` and from what it was before.
        return type(module).__mro__[type(module).__mro__.index(FSDPModule) + 1]
    return type(module)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather the weights of a layer for the time of the `with` block; a layer that is not sharded is left as it is.

    Gathering is collective: every process must come here equally often.

    Args:
        module: the layer, plain or wrapped by an adapter.
    """
    layer = _innermost(module)
    # A plain weight is gathered already, and whoever did so will free it.
    if not isinstance(layer, FSDPModule) or not isinstance(layer.weight, DTensor):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def free_after_backward(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return `x`; once its gradient is known, the layer is sharded again.

    Args:
        x: input of the layer.
        module: the layer, plain or wrapped by an adapter.
    """
    layer = _innermost(module)
    return _FreeInBackward.apply(x, layer) if isinstance(layer, FSDPModule) else x


def gather_before_backward(y: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return `y`; before its gradient flows back into the layer, the layer is gathered.

    Args:
        y: what was computed from the layer.
        module: the layer, plain or wrapped by an adapter.
    """
    layer = _innermost(module)
    return _GatherInBackward.apply(y, layer) if isinstance(layer, FSDPModule) else y


def _innermost(module: Any) -> Any:
    """Return the frozen layer within adapted ones, which may lie around one another."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


class _GatherInBackward(torch.autograd.Function):
    """The identity; its backward gathers a layer."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, layer: FSDPModule) -> torch.Tensor:
        ctx.layer = layer
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.layer.unshard()
        return dy, None


class _FreeInBackward(torch.autograd.Function):
    """The identity; its backward shards a layer again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FSDPModule) -> torch.Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.layer.reshard()
        return dx, None
