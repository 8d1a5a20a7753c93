"""Tensor parallelism inside a model: sums over the ranks at the edges of blocks, and a head that is cut by words.

The output of a block is summed going forward, and the gradient of its input going back::

    residual --+-- copy_to_tp_region --> column-parallel --> ... --> row-parallel --> reduce_from_tp_region --+--
               |   backward: all-reduce                                               forward: all-reduce     |
               +----------------------------------------------------------------------------------------------+

LoRA asks for no all-reduce of its own: what A and B of a row-parallel layer give is a part of the layer's partial
output, `y = sum_s (W_s x_s + B (A_s x_s))`, and what those of column-parallel layers give back is a part of `dx`.

`VocabParallelHead` describes an output head of which each rank holds some words (M section 3.4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.cross_entropy.linear import TensorParallelLinks
from peft_mux.kernels.lora.reference import Rows, spread_rows, take_rows
from peft_mux.kernels.philox import Window

NeededRows = Callable[[int], tuple[Rows, ...] | None]
"""Of the number of rows that a block reads now, returns those whose gradients a layer below needs; `None` for all."""


class _CopyToRegion(torch.autograd.Function):
    """The identity on a tensor that is equal on all ranks, before each computes its part; the gradient is a sum."""

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
    """The sum of what each rank computed: its gradient is the same on all of them."""

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
    """Return the sum of `y` over the tensor parallel group; its shape is the same on all ranks."""
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
    """Let a row-parallel layer return the sum over the tensor parallel group; return the handle of the hook.

    Args:
        layer: the layer that model code calls, adapters included.
        links: all-reduces over the tensor parallel group.
    """
    return layer.register_forward_hook(lambda *call: reduce_from_tp_region(call[-1], links))


_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "split_size")
"""Attributes of attention modules that count heads, or the channels of all of them (GPT-2's `split_size`)."""


class _OwnHeads:
    """A configuration as the attention of one rank reads it: with fewer heads, otherwise as it is at any time."""

    def __init__(self, config: Any, size: int) -> None:
        self._config, self._size = config, size

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return value // self._size if name in _COUNTS and value is not None else value


def count_own_heads(attention: Any, config: Any, links: TensorParallelLinks) -> None:
    """Set how many heads an attention module has after its layers were cut, and which of the whole model's these are.

    Args:
        attention: the module.
        config: the configuration of the language model.
        links: all-reduces over the tensor parallel group.
    """
    for count in _COUNTS:
        if isinstance(getattr(attention, count, None), int):
            setattr(attention, count, getattr(attention, count) // links.size)
    if hasattr(attention, "qkv_proj"):
        # If queries, keys and values are in one tensor, model code divides it by the numbers of the configuration.
        attention.config = _OwnHeads(attention.config, links.size)
    num_heads = config.num_attention_heads
    # Attention dropout draws by the number of the head in the whole model.
    attention.head_window = Window(num_heads * links.index // links.size, num_heads)


def norm_over_all_ranks(norm: Any, links: TensorParallelLinks) -> None:
    """Let a root mean square norm, whose weights are cut, take the mean over the channels of all ranks."""
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        part = x.pow(2).mean(-1, keepdim=True) / links.size
        # Summed going forward, and its gradient going back: every rank's channels are divided by it.
        mean = copy_to_tp_region(reduce_from_tp_region(part, links), links)
        return (norm.weight * (x * torch.rsqrt(mean + epsilon))).to(hidden_states.dtype)

    assert isinstance(norm, nn.Module)
    norm.forward = forward


@dataclass(eq=False)
class VocabParallelHead:
    """Which words of an output head this process holds.

    Called as a module, the head gives the logits of all words, for evaluation and `generate`; losses are computed from
    the parts (`peft_mux.kernels.cross_entropy.linear`).

    Attributes:
        links: all-reduces over the tensor parallel group.
        first: first word of this rank.
        end: index behind the last word of this rank.
        vocab_size: number of words over all ranks.
        is_local: whether the head gives the logits of this rank's words only, which losses put together with sums of a
            few numbers a row.
    """

    links: TensorParallelLinks
    first: int
    end: int
    vocab_size: int
    is_local: bool = False

    def complete_logits(self, head: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        """Return `[..., V]` logits of all words from `[..., V/n]` of this rank's; a forward hook of the head.

        Raises:
            UnsupportedModelError: if they are to be differentiated, which only losses of the stream can be.
        """
        if self.is_local:
            return logits
        if torch.is_grad_enabled() and logits.requires_grad:
            raise UnsupportedModelError(
                "logits of a head that is cut for tensor parallelism cannot have gradients. Use losses of a "
                "MuxBatch, or logits under torch.no_grad()."
            )
        # A sum of zero-padded logits, not an all-gather: if n does not divide V, ranks differ by a word.
        whole = logits.new_zeros(*logits.shape[:-1], self.vocab_size)
        whole[..., self.first : self.end] = logits
        self.links.all_reduce(whole).wait()
        return whole

    def entering(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden [..., D]`, which this rank's logits are computed of; its gradient is a sum over the ranks."""
        return copy_to_tp_region(hidden, self.links)

    def summed(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks have computed of their own words."""
        return reduce_from_tp_region(parts, self.links)
