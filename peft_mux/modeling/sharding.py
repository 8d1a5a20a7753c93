"""Sharded frozen weights (FSDP2), as the code that reads them directly sees them.

FSDP2 gathers a module's weights before its `forward` and frees them after. An output head is no such case here: the
loss reads its weight without calling it, in blocks whose number differs from process to process. So whoever reads it
says so, once a pass, and every process gathers equally often.
"""

# MERGED: Modules that stand where a stage of a pipeline holds nothing, and where its hidden states come in and go out.
# MERGED: Model code may do more with embeddings than look them up, and more with the output of the last layer than
# MERGED: normalise it
# MERGED: (Granite scales both). So hidden states neither come in as embeddings nor go out as the model's output: they
# MERGED: take the
# MERGED: place of what the layers before would have given, and are taken from the layer behind the stage's last one.
# MERGED: `Piece`: the part of a task's parameter that lies in one process.
# MERGED: Stages hold some parameters whole and others not at all; tensor parallel ranks hold rows or columns of them.
# MERGED: Whatever
# MERGED: sums gradients, counts norms or writes checkpoints over processes asks pieces, and nothing else, what lies
# MERGED: where::
# MERGED:     column-parallel    W [K/n, D]    A [R, D] whole, adds     B [K/n, R] rows of B
# MERGED:     row-parallel       W [K, D/n]    A [R, D/n] columns of A  B [K, R] whole, adds
# MERGED: The all-reduces of tensor parallelism: of a block's output going forward, of its input's gradient going back.
# MERGED: residual --+-- copy_to_tp_region --> column-parallel --> ... --> row-parallel --> reduce_from_tp_region
# MERGED: --+--
# MERGED: |   backward: all-reduce                                               forward: all-reduce     |
# MERGED: +----------------------------------------------------------------------------------------------+
# MERGED: LoRA asks for no all-reduce of its own: what A and B of a row-parallel layer give is a part of the layer's
# MERGED: partial
# MERGED: output, `y = sum_s (W_s x_s + B (A_s x_s))`, and what those of column-parallel layers give back is a part of
# MERGED: `dx`.
# MERGED: Attention of which each tensor parallel rank has some heads: how many they are, and norms over all of them.
# MERGED: `VocabParallelHead`: an output head of which each tensor parallel rank holds some words (M section 3.4.2).
# MERGED: Called as a module, the head gives the logits of all words, for evaluation and `generate`; losses are
# MERGED: computed from the
# MERGED: parts (`peft_mux.kernels.cross_entropy.linear`).

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


class PassThrough(nn.Module):
    """Stands where a module of another stage was: returns what it is given first.

    Args:
        like: the module whose place it takes; model code reads plain attributes off layers, such as kinds of attention.
    """

    def __init__(self, like: nn.Module | None = None) -> None:
        """Take the plain attributes over."""
        super().__init__()
        for name, value in ({} if like is None else vars(like)).items():
            if isinstance(value, (str, int, float, bool)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `hidden_states`."""
        return hidden_states


class NoPositions(nn.Module):
    """Stands for learned positions behind the first stage, where hidden states hold them already.

    Args:
        dtype: dtype of the hidden states, so that adding zero promotes nothing.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Remember the dtype."""
        super().__init__()
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a scalar zero."""
        # A scalar: it is added to hidden states of any shape.
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
        return torch.zeros((), dtype=self.dtype, device=given[0].device)


class Handover:
    """The hidden states that come into a pass through a stage, and those that go out; each thread has its own."""

    def __init__(self) -> None:
        """Begin without any."""
        self._own = threading.local()  # passes that run in turns are in threads of their own

    @contextmanager
    def of_pass(self, received: torch.Tensor | None) -> Iterator[None]:
        """Hold the hidden states of a pass for the time of the `with` block.

        Args:
            received: `[1, T, D]` output of the layers before; `None` where there are none.
        """
        self._own.received, self._own.given = received, None
        try:
            yield
        finally:
            self._own.received = self._own.given = None

    @property
    def received(self) -> torch.Tensor:
        """`[1, T, D]` output of the layers before."""
        return self._own.received

    @property
    def given(self) -> torch.Tensor | None:
        """`[1, T, D]` output of the stage's last layer; `None` where the model's own output is what counts."""
        return self._own.given

    @given.setter
    def given(self, hidden_states: torch.Tensor) -> None:
        self._own.given = hidden_states


class Entrance(PassThrough):
    """Stands before the first layer of a later stage: returns what the stage before gave.

    Args:
        handover: holds it.
        like: the module whose place it takes.
    """

    def __init__(self, handover: Handover, like: nn.Module) -> None:
        """Remember where hidden states lie."""
        super().__init__(like)
        self._handover = handover

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states of the stage before."""
        return self._handover.received


class Exit(PassThrough):
    """Stands behind the last layer of a stage that others follow: keeps what it is given.

    Args:
        handover: takes it.
        like: the module whose place it takes.
    """

    def __init__(self, handover: Handover, like: nn.Module) -> None:
        """Remember where hidden states go."""
        super().__init__(like)
        self._handover = handover

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep the hidden states, and return them."""
        self._handover.given = hidden_states
        return hidden_states


@dataclass(frozen=True, slots=True)
class Piece:
    """What a process holds of one parameter.

    Attributes:
        shape: shape of the whole parameter.
        dim: dimension along which the parameter is cut; 0 where it is whole.
        ranges: the held indices along `dim`, as ascending (start, end) pairs; their order is that of the piece.
        adds: whether this process's gradient is a summand of the whole one; `False` where another rank computes the
            same gradient, and is the one that counts.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    adds: bool = True

    @classmethod
    def whole(cls, shape: torch.Size | tuple[int, ...], *, adds: bool = True) -> Piece:
        """Return the piece that is all of a parameter.

        Args:
            shape: shape of the parameter.
            adds: whether this process's gradient is a summand of the whole one.
        """
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
        """Return this piece of a whole tensor; a view where it is one range.

        Args:
            whole: the whole tensor, which has the shape `shape`.
        """
        if self.is_whole:
            return whole
        # Several ranges, as fused layers are cut matrix by matrix (GPT-2's q, k and v).
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this piece into a whole tensor.

        Args:
            whole: tensor of `shape`, which is written to.
            part: tensor of `part_shape`, which is read.
        """
        if self.is_whole:
            whole.copy_(part)
            return
        first = 0
        for start, end in self.ranges:
            whole.narrow(self.dim, start, end - start).copy_(part.narrow(self.dim, first, end - start))
            first += end - start


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


_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "split_size")
"""Attributes of attention modules that count heads, or the channels of all of them (GPT-2's `split_size`)."""


class _OwnHeads:
    """A configuration as the attention of one rank reads it: with fewer heads, else as it is at any time."""

    def __init__(self, config: Any, size: int) -> None:
        self._config, self._size = config, size

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return value // self._size if name in _COUNTS and value is not None else value


def count_own_heads(attention: Any, config: Any, links: TensorParallelLinks) -> None:
    """Tell an attention module how many heads it has now, and which of the whole model's they are.

    Args:
        attention: the module, whose layers are cut.
        config: the configuration of the model of language.
        links: all-reduces over the tensor parallel group.
    """
    for count in _COUNTS:
        if isinstance(getattr(attention, count, None), int):
            setattr(attention, count, getattr(attention, count) // links.size)
    if hasattr(attention, "qkv_proj"):
        # Where queries, keys and values lie in one tensor, model code divides it by the numbers of the configuration.
        attention.config = _OwnHeads(attention.config, links.size)
    num_heads = config.num_attention_heads
    # Attention dropout draws by the number of the head in the whole model.
    attention.head_window = Window(num_heads * links.index // links.size, num_heads)


def norm_over_all_ranks(norm: Any, links: TensorParallelLinks) -> None:
    """Let a root mean square norm take the mean over the channels of all ranks.

    Args:
        norm: the norm, whose weights are cut.
        links: all-reduces over the tensor parallel group.
    """
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        own = x.pow(2).mean(-1, keepdim=True) / links.size
        # Summed going forward, and its gradient going back: every rank's channels are divided by it.
        mean = copy_to_tp_region(reduce_from_tp_region(own, links), links)
        return (norm.weight * (x * torch.rsqrt(mean + epsilon))).to(hidden_states.dtype)

    assert isinstance(norm, nn.Module)
    norm.forward = forward
    norm.is_over_all_ranks = True  # type: ignore[assignment]


class VocabParallelHead:
    """Which words of a vocabulary-parallel head this process holds.

    Args:
        links: all-reduces over the tensor parallel group.
        first: first word of this rank.
        end: index behind the last word of this rank.
        vocab_size: number of words over all ranks.
    """

    def __init__(self, links: TensorParallelLinks, first: int, end: int, vocab_size: int) -> None:
        """Remember the range; the head gives the logits of all words at first."""
        self.links = links
        self.first, self.end, self.vocab_size = first, end, vocab_size
        self._is_local = False

    @contextmanager
    def local(self) -> Iterator[None]:
        """Let the head give the logits of this rank's words alone for the time of the `with` block."""
        # Losses put parts together by themselves, with sums of a few numbers a row instead of all logits.
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def outputs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `[..., V]` logits of all words.

        Args:
            logits: logits of this rank's words, `[..., V/n]`.

        Raises:
            UnsupportedModelError: if they shall be differentiated, which only losses of the stream can be.
        """
        if self._is_local:
            return logits
        if torch.is_grad_enabled() and logits.requires_grad:
            raise UnsupportedModelError(
                "logits of a head that is cut for tensor parallelism were asked for with gradients; allowed: losses of"
                " a MuxBatch, or logits under torch.no_grad()."
            )
        # A sum of zero-padded logits, not an all-gather: where n does not divide V, ranks differ by a word.
        whole = logits.new_zeros(*logits.shape[:-1], self.vocab_size)
        whole[..., self.first : self.end] = logits
        self.links.all_reduce(whole).wait()
        return whole


def vocab_parallel_head(head: nn.Module) -> VocabParallelHead | None:
    """Return which words a head holds; `None` for a whole head.

    Args:
        head: the output head, plain or wrapped by an adapter.
    """
    return getattr(getattr(head, "base_layer", head), "vocab_parallel_head", None)


def complete_logits(head: nn.Module, words: VocabParallelHead) -> Any:
    """Let a head give the logits of all words when it is called.

    Args:
        head: the head that model code calls, adapters included.
        words: which words it holds.

    Returns:
        The handle of the hook, whose `remove` takes this back.
    """

    def complete(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        return words.outputs(output)

    return head.register_forward_hook(complete)
