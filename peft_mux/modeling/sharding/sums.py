"""The all-reduces of tensor parallelism: of a block's output going forward, of its input's gradient going back.

    residual --+-- copy_to_tp_region --> column-parallel --> ... --> row-parallel --> reduce_from_tp_region --+--
               |   backward: all-reduce                                               forward: all-reduce     |
               +----------------------------------------------------------------------------------------------+

LoRA asks for no all-reduce of its own: what A and B of a row-parallel layer give is a part of the layer's partial
output, `y = sum_s (W_s x_s + B (A_s x_s))`, and what those of column-parallel layers give back is a part of `dx`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from peft_mux.kernels.cross_entropy.vocab_parallel import TensorParallelLinks
from peft_mux.kernels.lora.slices import Rows, spread_rows, take_rows

NeededRows = Callable[[int], tuple[Rows, ...] | None]
"""Of a number of rows that a block reads now, those whose gradients a layer below needs; `None` for all."""


class _CopyToRegion(torch.autograd.Function):
    """The identity on what all ranks hold alike, before each computes a part of the block: its gradient is a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, links: TensorParallelLinks, needed: tuple[Rows, ...] | None) -> torch.Tensor:
        ctx.links, ctx.needed = links, needed
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[Any, ...]:
        if ctx.needed is None:
            return _summed(dx, ctx.links), None, None
        if not ctx.needed:
            return torch.zeros_like(dx), None, None
        dx_TD = dx.reshape(-1, dx.shape[-1])
        total = _summed(take_rows(dx_TD, ctx.needed), ctx.links)
        return spread_rows(total, ctx.needed, len(dx_TD)).view(dx.shape), None, None


class _ReduceFromRegion(torch.autograd.Function):
    """The sum of what each rank computed, which all hold alike: its gradient is the same for all of them."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, links: TensorParallelLinks) -> torch.Tensor:
        return _summed(y, links)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return dy, None


def _summed(x: torch.Tensor, links: TensorParallelLinks) -> torch.Tensor:
    """Return the sum of `x` over the tensor parallel group."""
    # In memory of its own: autograd may share `x` with others, and all-reduces are in place.
    total = x.clone(memory_format=torch.contiguous_format)
    links.all_reduce(total).wait()
    return total


def copy_to_tp_region(
    x: torch.Tensor, links: TensorParallelLinks, needed: tuple[Rows, ...] | None = None
) -> torch.Tensor:
    """Return `x`, whose gradient will be summed over the tensor parallel group.

    Args:
        x: tensor `[..., D]` that is the same on all ranks.
        links: all-reduces over the tensor parallel group.
        needed: the rows whose gradients a layer below needs, those of others being 0; all by default.
    """
    return _CopyToRegion.apply(x, links, needed)


def reduce_from_tp_region(y: torch.Tensor, links: TensorParallelLinks) -> torch.Tensor:
    """Return the sum of `y` over the tensor parallel group.

    Args:
        y: summand of this rank; its shape is the same on all ranks.
        links: all-reduces over the tensor parallel group.
    """
    return _ReduceFromRegion.apply(y, links)


def reduce_input_gradient(block: nn.Module, links: TensorParallelLinks, needed_rows: NeededRows) -> Any:
    """Let a block sum the gradients of what flows into it over the tensor parallel group.

    Args:
        block: attention, an MLP, or experts, which also read how much each of them counts.
        links: all-reduces over the tensor parallel group.
        needed_rows: says in each pass which rows the sum is made for, the same on all ranks.

    Returns:
        The handle of the hook, whose `remove` takes this back.
    """

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        # Model code passes the hidden states by position or by name, by family.
        return tuple(map(copied, args)), {name: copied(item) for name, item in kwargs.items()}

    def copied(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or not item.requires_grad:
            return item
        return copy_to_tp_region(item, links, needed_rows(item.shape[:-1].numel()))

    # At the block's entrance: one sum serves all of its column-parallel layers.
    return block.register_forward_pre_hook(enter, with_kwargs=True)


def reduce_output(layer: nn.Module, links: TensorParallelLinks) -> Any:
    """Let a row-parallel layer return the sum over the tensor parallel group.

    Args:
        layer: the layer that model code calls, adapters included.
        links: all-reduces over the tensor parallel group.

    Returns:
        The handle of the hook, whose `remove` takes this back.
    """

    def add_up(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        return reduce_from_tp_region(output, links)

    return layer.register_forward_hook(add_up)
