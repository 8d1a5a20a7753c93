"""Grouped LoRA in autograd: a function for eager passes, and opaque operators for compiled ones.

Both call a `GroupCall`: the adapters of all tasks in a group of linear layers, bound to the rows of one pass. Gradients
of the factors are added in place to the tasks' gradient buffers, not through autograd. A scalar that requires gradients
(the anchor) makes outputs differentiable even if the activations are not.

`peft_mux::lora_group` and `peft_mux::lora_group_backward` are opaque to `torch.compile`: tasks, rows, ranks and seeds
are looked up by number at run time, so that changing them does not trigger recompilation.

Shape letters: T rows of the stream, D features read, K features of a layer.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from peft_mux.kernels.lora.group import KernelCall, SliceCall

GroupCall = KernelCall | SliceCall
"""A group of linear layers in one pass."""


class LoraGroupFunction(torch.autograd.Function):
    """One group of layers, forward and backward, in an eager pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, call: GroupCall, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Compute each `y [..., K]` of `x [..., D]`; save `x` and the tensors that the call needs."""
        ctx.call, ctx.dtype, ctx.input_dtype = call, dtype, x.dtype
        # x may have any shape, because a view outside this function would add two autograd nodes per layer.
        x, device_type = x if x.dtype is dtype else x.to(dtype), x.device.type
        # The dtype is already chosen; autocast would cast each product separately. These two calls do the same as
        # `torch.autocast`, which would cost as much as several launches.
        autocast = torch.is_autocast_enabled(device_type)
        torch.set_autocast_enabled(device_type, False)
        try:
            outputs, saved = call.forward(x)
        finally:
            torch.set_autocast_enabled(device_type, autocast)
        ctx.save_for_backward(x, saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        """Return `dx`, and add to the gradients of the factors."""
        # Checked here, because `once_differentiable` uses a context that costs as much as a launch in every layer.
        return (_once_differentiable if torch.is_grad_enabled() else _gradients)(ctx, *dys)


def _gradients(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
    x, saved = ctx.saved_tensors
    dtype, input_dtype = ctx.dtype, ctx.input_dtype
    dys = tuple(dy if dy.dtype is dtype else dy.to(dtype) for dy in dys)
    dx = ctx.call.backward(dys, x, saved, needs_dx=ctx.needs_input_grad[0])
    # None for the anchor: the gradients of the factors are already in their buffers.
    return dx if dx is None or input_dtype is dtype else dx.to(input_dtype), None, None, None


_once_differentiable = torch.autograd.function.once_differentiable(_gradients)


class PassRegistry:
    """Maps numbers to passes, because a compiled graph can only hold numbers; the passes belong to their models."""

    def __init__(self) -> None:
        """Start without any pass."""
        self._passes: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._number = 0

    @torch.compiler.disable()
    def add(self, one: Any) -> torch.Tensor:
        """Register a pass, which the registry does not keep alive.

        Args:
            one: has `call_of`, which returns the call of a group, from its number and the dtype of its activations.

        Returns:
            int64 scalar on the CPU, the number of the pass.
        """
        self._number += 1
        self._passes[self._number] = one
        # A tensor, because `torch.compile` would guard on the value of an int and recompile for each pass.
        return torch.tensor(self._number)

    def call(self, handle: torch.Tensor, group: int, dtype: torch.dtype) -> GroupCall:
        """Return the call of a group in a pass."""
        return self._passes[int(handle)].call_of(group, dtype)


PASSES = PassRegistry()


@torch.library.custom_op("peft_mux::lora_group", mutates_args=())
def lora_group(
    x: torch.Tensor, anchor: torch.Tensor, handle: torch.Tensor, group: int, widths: list[int], num_columns: int
) -> list[torch.Tensor]:
    """Return the outputs of a group, followed by the tensor that its backward pass needs.

    Args:
        x: `[T, D]` activations that all layers of the group read.
        anchor: scalar that requires gradients.
        handle: number of the pass, from `PassRegistry.add`.
        group: number of the group of layers.
        widths: number of features of each layer's output.
        num_columns: number of elements that the backward pass needs for each row.
    """
    outputs, saved = PASSES.call(handle, group, x.dtype).forward(x)
    return [*outputs, saved.reshape(len(x), num_columns)]


@lora_group.register_fake
def _(
    x: torch.Tensor, anchor: torch.Tensor, handle: torch.Tensor, group: int, widths: list[int], num_columns: int
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape[0], width) for width in (*widths, num_columns)]


@torch.library.custom_op("peft_mux::lora_group_backward", mutates_args=())
def lora_group_backward(
    dys: list[torch.Tensor], x: torch.Tensor, saved: torch.Tensor, handle: torch.Tensor, group: int
) -> torch.Tensor:
    """Add to the gradients of the factors, and return the gradient of `x`."""
    dx = PASSES.call(handle, group, x.dtype).backward(dys, x, saved, needs_dx=True)
    assert dx is not None, "it was asked for"
    return dx


@lora_group_backward.register_fake
def _(dys: list[torch.Tensor], x: torch.Tensor, saved: torch.Tensor, handle: torch.Tensor, group: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, _, handle, group, widths, _ = inputs
    ctx.save_for_backward(x, output[-1], handle)
    ctx.group, ctx.num_outputs, ctx.mark_saved = group, len(widths), output[-1]
    # Zeros for unused outputs, because the backward operator takes a gradient for every layer.
    ctx.set_materialize_grads(True)


def _backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    x, saved, handle = ctx.saved_tensors
    dys = [gradient.contiguous() for gradient in gradients[: ctx.num_outputs]]
    dx = torch.ops.peft_mux.lora_group_backward(dys, x, saved, handle, ctx.group)
    # The anchor's gradient, which is always zero, keeps the operator in graphs in which no layer below needs dx.
    return dx, dx.flatten()[:1].sum() * 0, None, None, None, None


lora_group.register_autograd(_backward, setup_context=_save_for_backward)
