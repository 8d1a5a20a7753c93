"""What a process holds of a model that is divided among several, and the autograd edges between the parts.

Weights that FSDP2 shards are gathered before a module's `forward` and freed after it. An output head is different: the
loss reads its weight without calling it, in blocks whose number differs between processes. So code that reads it
directly gathers it explicitly, once a pass, and every process gathers equally often.

Pipeline stages keep `PassThrough` modules in the place of modules of other stages. Model code may do more with
embeddings than look them up, and more with the output of the last layer than normalise it (Granite scales both). So
hidden states neither come in as embeddings nor go out as the model's output: `Entrance` returns what the layers before
gave, and `Exit`, behind the stage's last layer, keeps what goes out.

Tensor parallelism sums a block's output going forward and the gradient of its input going back::

    residual --+-- copy_to_tp_region --> column-parallel --> ... --> row-parallel --> reduce_from_tp_region --+--
               |   backward: all-reduce                                               forward: all-reduce     |
               +----------------------------------------------------------------------------------------------+

LoRA asks for no all-reduce of its own: what A and B of a row-parallel layer give is a part of the layer's partial
output, `y = sum_s (W_s x_s + B (A_s x_s))`, and what those of column-parallel layers give back is a part of `dx`.

A `Piece` says which part of a task's parameter a process holds: stages hold some parameters whole and others not at
all, tensor parallel ranks hold rows or columns of them. Sums of gradients, norms and checkpoints over processes read
pieces and nothing else::

    column-parallel    W [K/n, D]    A [R, D] whole, adds     B [K/n, R] rows of B
    row-parallel       W [K, D/n]    A [R, D/n] columns of A  B [K, R] whole, adds

`VocabParallelHead` describes an output head of which each tensor parallel rank holds some words (M section 3.4.2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.cross_entropy.linear import TensorParallelLinks
from peft_mux.kernels.lora.reference import Rows, spread_rows, take_rows
from peft_mux.kernels.philox import Window

# ------------------------------------------------------- sharded weights (FSDP2)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before FSDP2 sharded its weights."""
    if isinstance(module, FSDPModule):
        # FSDP2 swaps the class for one that inherits from `FSDPModule` and from what it was before.
        return type(module).__mro__[type(module).__mro__.index(FSDPModule) + 1]
    return type(module)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather the weights of a layer, plain or adapted, for the time of the `with` block, if it is sharded.

    Gathering is collective: every process must come here equally often.
    """
    layer = _innermost(module)
    # A plain weight is gathered already, by code that will free it.
    if not isinstance(layer, FSDPModule) or not isinstance(layer.weight, DTensor):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()


def free_after_backward(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return `x`, the input of a layer; once its gradient is known, the layer is sharded again."""
    layer = _innermost(module)
    return _CallInBackward.apply(x, layer.reshard) if isinstance(layer, FSDPModule) else x


def gather_before_backward(y: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return `y`, computed from a layer; before its gradient flows back into the layer, the layer is gathered."""
    layer = _innermost(module)
    return _CallInBackward.apply(y, layer.unshard) if isinstance(layer, FSDPModule) else y


def _innermost(module: Any) -> Any:
    """Return the frozen layer within adapted ones, which may be put around one another."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


class _CallInBackward(torch.autograd.Function):
    """The identity; its backward calls a function before it passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.call()
        return dx, None


# ------------------------------------------------------------- pipeline stages


class Handover(threading.local):
    """The hidden states that come into a pass through a stage, and those that go out.

    Each thread has its own, as passes that run in turns are in threads of their own.

    Attributes:
        received: `[1, T, D]` output of the layers before; `None` if there are none.
        given: `[1, T, D]` output of the stage's last layer; `None` if the model's own output counts.
    """

    received: torch.Tensor | None = None
    given: torch.Tensor | None = None


class PassThrough(nn.Module):
    """Takes the place of a module of another stage: returns its first argument.

    Args:
        like: the module whose place it takes; model code reads plain attributes of layers, such as kinds of attention.
        handover: hidden states that come into the stage and go out, for `Entrance` and `Exit`.
    """

    def __init__(self, like: nn.Module | None = None, handover: Handover | None = None) -> None:
        super().__init__()
        self._handover = handover
        for name, value in ({} if like is None else vars(like)).items():
            if isinstance(value, (str, int, float, bool)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `hidden_states`."""
        return hidden_states


class Entrance(PassThrough):
    """Replaces the embedding in a later stage: returns the hidden states of the previous stage."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states of the stage before."""
        assert self._handover is not None, "an entrance has a handover"
        assert self._handover.received is not None, "a later stage receives its input"
        return self._handover.received


class Exit(PassThrough):
    """Follows the last layer of a stage that is not the last one: keeps its input."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep the hidden states, and return them."""
        assert self._handover is not None, "an exit has a handover"
        self._handover.given = hidden_states
        return hidden_states


class NoPositions(nn.Module):
    """Takes the place of learned positions behind the first stage, where hidden states include them already.

    Args:
        dtype: dtype of the hidden states, so that adding zero promotes nothing.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a scalar zero."""
        # A scalar: it is added to hidden states of any shape.
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
        return torch.zeros((), dtype=self.dtype, device=given[0].device)


# ---------------------------------------------------------- parts of parameters


@dataclass(frozen=True, slots=True)
class Piece:
    """What a process holds of one parameter.

    Attributes:
        shape: shape of the whole parameter.
        dim: dimension along which the parameter is cut; 0 if it is whole.
        ranges: the held indices along `dim`, as ascending (start, end) pairs, in the order of the piece.
        adds: whether this process's gradient is a summand of the whole one; `False` if another rank computes the same
            gradient, which is then counted once.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    adds: bool = True

    @classmethod
    def whole(cls, shape: torch.Size | tuple[int, ...], *, adds: bool = True) -> Piece:
        """Return the piece that is all of a parameter."""
        return cls(tuple(shape), 0, ((0, shape[0] if shape else 1),), adds)

    @property
    def is_whole(self) -> bool:
        """Whether the process holds all of the parameter."""
        return self.ranges == ((0, self.shape[self.dim] if self.shape else 1),)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what the process holds."""
        if self.is_whole:
            return self.shape
        size = sum(end - start for start, end in self.ranges)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this piece of a whole tensor of `shape`; a view if it is one range."""
        if self.is_whole:
            return whole
        # Several ranges, as fused layers are cut matrix by matrix (GPT-2's q, k and v).
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this piece, a tensor of `part_shape`, into a whole tensor of `shape`."""
        if self.is_whole:
            whole.copy_(part)
            return
        first = 0
        for start, end in self.ranges:
            whole.narrow(self.dim, start, end - start).copy_(part.narrow(self.dim, first, end - start))
            first += end - start


# ------------------------------------------------------------ tensor parallelism


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
        own = x.pow(2).mean(-1, keepdim=True) / links.size
        # Summed going forward, and its gradient going back: every rank's channels are divided by it.
        mean = copy_to_tp_region(reduce_from_tp_region(own, links), links)
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


def vocab_parallel_head(head: nn.Module) -> VocabParallelHead | None:
    """Return which words an output head, plain or adapted, holds; `None` for a whole head."""
    return getattr(getattr(head, "base_layer", head), "vocab_parallel_head", None)
