"""The package's own way to compute a group of layers, as contenders of `benchmarks.kernels`.

`MuxGroup` is the path that training takes on a GPU: adapters in the slabs of their tasks (`TaskSlab`), `LoraGroup`
forward and backward, through `LoraGroupFunction`. `mux_slices` is the path without Triton.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.kernels.problem import CannotRunError, Problem, Result, Step
from peft_mux.kernels.lora.group import Adapter, Base, KernelCall, LoraGroup, LoraGroupFunction
from peft_mux.kernels.lora.reference import LinearSlice, LoraSegment, grouped_lora_slices
from peft_mux.kernels.lora.tables import SegmentTables
from peft_mux.modeling.adapters.lora.lora_kind import lora_slot
from peft_mux.modeling.slabs import TaskSlab


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run here: on a GPU, or in the interpreter that TRITON_INTERPRET=1 chose."""
    is_served = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return is_served and importlib.util.find_spec("triton") is not None


def mux(problem: Problem) -> Step:
    """The path of training; on a CPU without Triton's interpreter that without Triton (the row says which)."""
    if has_kernels(problem.device):
        return MuxGroup(problem)
    if problem.device.type == "cuda":
        raise CannotRunError("Triton cannot be imported")
    return mux_slices(problem)


def mux_slices(problem: Problem) -> Step:
    """The package's path without Triton: `grouped_lora_slices`."""
    shape = problem.shape
    segments = [LoraSegment(r.start, r.stop, scale) for r, scale in zip(problem.rows(), problem.scales, strict=True)]
    places = torch.arange(shape.num_tokens, device=problem.device)
    factors = [
        [(a.detach().requires_grad_(), b.detach().requires_grad_()) for a, b in zip(a_GRD, b_GKR, strict=True)]
        for a_GRD, b_GKR in zip(problem.a, problem.b, strict=True)
    ]
    leaves = [[pair[side] for pairs in factors for pair in pairs] for side in (0, 1)]

    def step(call: int) -> Result:
        inputs = problem.inputs(call)
        x = inputs.x.detach().requires_grad_()
        layers = zip(inputs.weights, shape.out_features, factors, strict=True)
        slices = [LinearSlice(weight, None, width, segments, pairs) for weight, width, pairs in layers]
        ys = grouped_lora_slices(x, slices, places)
        dx, *gradients = torch.autograd.grad(ys, [x, *leaves[0], *leaves[1]], inputs.dys)
        half = len(leaves[0])
        return Result([y.detach() for y in ys], dx, gradients[:half], gradients[half:])

    return step


def slab_adapters(
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float, dropout: float, dtype: torch.dtype
) -> tuple[TaskSlab, list[Adapter | None]]:
    """Lay one task's adapters out in a slab, masters and gradients in fp32, as training has them.

    Args:
        factors: A `[R, D]` and B `[K, R]` of each layer; of rank 0 for no adapter there.
        scale: of all its adapters.
        dropout: probability of dropping an input element.
        dtype: of the copies that kernels read.

    Returns:
        The slab, and for each layer where kernels find the adapter.
    """
    parameters = {
        f"layer.{layer}.lora_{letter}.weight": nn.Parameter(factor.detach().float())
        for layer, pair in enumerate(factors)
        for letter, factor in zip("AB", pair, strict=True)
        if factor.numel()
    }
    slab = TaskSlab(parameters, layout=lora_slot)
    slab.bind_gradients()
    adapters: list[Adapter | None] = []
    for layer in range(len(factors)):
        names = [f"layer.{layer}.lora_{letter}.weight" for letter in "AB"]
        a, b = (slab.factor(parameters[name], dtype) if name in parameters else None for name in names)
        has_adapter = a is not None and b is not None
        adapters.append(Adapter(a.values, b.values, a.gradient, b.gradient, scale, dropout) if has_adapter else None)
    return slab, adapters


class MuxGroup:
    """A step through the kernels, in the memory layout of training.

    Tables are built once, as one set serves all layers and steps of the same tasks. Gradients add up in the fp32 slabs,
    as they do over the micro-batches of a step; `clear_gradients` is the optimizer's business.

    Args:
        problem: the layers, adapters and inputs to compute on.

    Attributes:
        adapters: for each layer, the adapter of each task.
    """

    def __init__(self, problem: Problem) -> None:
        """Lay the adapters out, and build the tables."""
        self.problem = problem
        shape = problem.shape
        layers = list(zip(problem.a, problem.b, strict=True))
        tasks = [
            slab_adapters([(a_GRD[task], b_GKR[task]) for a_GRD, b_GKR in layers], scale, 0.0, problem.dtype)
            for task, scale in enumerate(problem.scales)
        ]
        self.slabs = [slab for slab, _ in tasks]
        self.adapters = list(zip(*(adapters for _, adapters in tasks), strict=True))
        self.group = LoraGroup(self.adapters, [f"layer.{index}" for index in range(len(shape.out_features))])
        self.tables = SegmentTables(problem.lengths, range(shape.num_tasks), device=problem.device)
        self.places = torch.arange(shape.num_tokens, device=problem.device)
        self.anchor = torch.zeros((), device=problem.device, requires_grad=True)

    def clear_gradients(self) -> None:
        """Set the gradients to zero, as the optimizer does after a step."""
        for page in (page for slab in self.slabs for page in slab.pages):
            assert page.values.grad is not None, "they were bound"
            page.values.grad.zero_()

    def __call__(self, call: int) -> Result:
        """Run forward and backward; the gradients of the factors are added to what is there."""
        inputs = self.problem.inputs(call)
        bases = [Base(weight, None, len(weight)) for weight in inputs.weights]
        lora_call = KernelCall(self.group, bases, self.tables, self.places)
        x = inputs.x.detach().requires_grad_()
        ys = LoraGroupFunction.apply(x, self.anchor, lora_call, self.problem.dtype)
        (dx,) = torch.autograd.grad(ys, [x], inputs.dys)
        adapters = [adapter for layer in self.adapters for adapter in layer]
        da = [adapter.da_RD for adapter in adapters]
        db = [adapter.db_RK.t() for adapter in adapters]  # type: ignore[union-attr]
        return Result([y.detach() for y in ys], dx, da, db)  # type: ignore[arg-type]
