"""Where shards speak during a pass: sums of a block's output going forward, of its input's gradient going back.

    residual --+-- to_shards --> column-parallel --> ... --> row-parallel --> over_shards --+--
               |   backward: sum                                             forward: sum   |
               +----------------------------------------------------------------------------+

LoRA asks for no sum of its own: what A and B of a row-parallel layer give is a part of the layer's partial output,
`y = sum_s (W_s x_s + B (A_s x_s))`, and what those of column-parallel layers give back is a part of `dx`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peft_mux.kernels.sharded_cross_entropy import ShardLinks


class _ToShards(torch.autograd.Function):
    """What all shards hold alike goes into what each computes a part of: the gradient is a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, links: ShardLinks) -> torch.Tensor:
        ctx.links = links
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[Any, ...]:
        return _summed(dx, ctx.links), None


class _OverShards(torch.autograd.Function):
    """Parts of each shard become a sum that all hold alike: the gradient is the same for all of them."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, links: ShardLinks) -> torch.Tensor:
        return _summed(y, links)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return dy, None


def _summed(x: torch.Tensor, links: ShardLinks) -> torch.Tensor:
    """Return the sum over the shards, in memory of its own: autograd may share `x` with others."""
    total = x.clone(memory_format=torch.contiguous_format)
    links.sum(total).wait()
    return total


def to_shards(x: torch.Tensor, links: ShardLinks) -> torch.Tensor:
    """Return `x`, whose gradient will be added up over the shards."""
    return _ToShards.apply(x, links)


def over_shards(y: torch.Tensor, links: ShardLinks) -> torch.Tensor:
    """Return the sum of `y` over the shards."""
    return _OverShards.apply(y, links)


def read_by_shards(block: nn.Module, links: ShardLinks) -> None:
    """Let a block, whose first argument is the residual stream, add the gradient of it up over the shards."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if args:
            return (to_shards(args[0], links), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": to_shards(kwargs["hidden_states"], links)}

    block.register_forward_pre_hook(enter, with_kwargs=True)


def sum_output(layer: nn.Module, links: ShardLinks) -> Any:
    """Let a row-parallel layer return the sum over the shards; return the handle that takes this back."""

    def add_up(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        return over_shards(output, links)

    return layer.register_forward_hook(add_up)
