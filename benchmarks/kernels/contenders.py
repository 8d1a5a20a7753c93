"""Ways to compute frozen linear layers with the LoRA adapters of many tasks: ours, and those of others.

Others compute the layers of a group one by one. Each returns a step, or raises `CannotRunError`.

Shape letters: T tokens, D input features, K output features of a layer, R rank, G tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from benchmarks.kernels.mux import mux, mux_slices
from benchmarks.kernels.problem import CannotRunError, Problem, Result, Step

MAX_COMPILED_TASKS = 8
"""Compilation unrolls the loop over tasks; beyond this it takes longer than all other measurements."""

Factors = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""A and B of one layer: of each task, or one stack of all tasks."""

Layer = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]
"""Returns y of one layer from x, the frozen weight, and its factors."""


def frozen(problem: Problem) -> Step:
    """The products of the frozen layers, no adapters: what no method can beat."""

    def step(call: int) -> Result:
        inputs = problem.inputs(call)
        ys = [inputs.x @ weight.t() for weight in inputs.weights]
        return Result(ys, _frozen_dx(inputs.dys, inputs.weights), (), ())

    return step


def _frozen_dx(dys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    dx = dys[0] @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        torch.addmm(dx, dy, weight, out=dx)
    return dx


def peft_eager(problem: Problem) -> Step:
    """PEFT's formula under autograd, in a loop over the adapters: `base(x) + B(A(x)) * scaling`."""
    return _autograd_step(problem, _peft_layer(problem), _by_task(problem))


def peft_compiled(problem: Problem) -> Step:
    """The same through `torch.compile`, each layer a graph; on a CPU it is traced only."""
    if problem.shape.num_tasks > MAX_COMPILED_TASKS:
        raise CannotRunError(f"more than {MAX_COMPILED_TASKS} tasks take too long to compile")
    backend = "inductor" if problem.device.type == "cuda" else "aot_eager"
    torch._dynamo.reset()
    layer = torch.compile(_peft_layer(problem), backend=backend, dynamic=False)
    return _autograd_step(problem, layer, _by_task(problem))


def _peft_layer(problem: Problem) -> Layer:
    lengths, scales = problem.lengths, problem.scales

    def layer(
        x: torch.Tensor, weight: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        parts = zip(x.split(lengths), F.linear(x, weight).split(lengths), scales, a, b, strict=True)
        return torch.cat([y_g + F.linear(F.linear(x_g, a_g), b_g) * scale for x_g, y_g, scale, a_g, b_g in parts])

    return layer


def unsloth_style(problem: Problem) -> Step:
    """Hand-written passes of `addmm_` for each task, keeping X and recomputing X A^T, after Unsloth's method."""
    a = [stack.detach() for stack in problem.a]
    bt = [stack.detach().transpose(1, 2).contiguous() for stack in problem.b]

    def step(call: int) -> Result:
        x, dys, weights = problem.inputs(call)
        ys, dx = [x @ weight.t() for weight in weights], _frozen_dx(dys, weights)
        da, db = [], []
        for layer, (y, dy) in enumerate(zip(ys, dys, strict=True)):
            for index, (rows, scale) in enumerate(zip(problem.rows(), problem.scales, strict=True)):
                x_g, dy_g, a_g, bt_g = x[rows], dy[rows], a[layer][index], bt[layer][index]
                y[rows].addmm_(x_g @ a_g.t(), bt_g, alpha=scale)
                ds = dy_g @ bt_g.t()
                dx[rows].addmm_(ds, a_g, alpha=scale)
                da.append((ds.t() @ x_g).mul_(scale))
                db.append((dy_g.t() @ (x_g @ a_g.t())).mul_(scale))
        return Result(ys, dx, da, db)

    return step


def grouped_mm(problem: Problem) -> Step:
    """`torch.nn.functional.grouped_mm`; ranks and lengths must be multiples of 8 (16 bytes in bf16)."""
    function = getattr(F, "grouped_mm", None)
    if function is None:
        raise CannotRunError("this torch has no grouped_mm")
    if problem.shape.rank % 8 or any(length % 8 for length in problem.lengths):
        raise CannotRunError("ranks and lengths that are no multiples of 8")
    if problem.device.type == "cuda" and problem.dtype != torch.bfloat16:
        raise CannotRunError("on a GPU it is taken in bf16 only")
    offsets = torch.tensor(problem.bounds[1:], device=problem.device, dtype=torch.int32)
    # The scale rides on B, which is small.
    scale_G11 = torch.tensor(problem.scales, device=problem.device, dtype=problem.dtype)[:, None, None]

    def layer(
        x: torch.Tensor, weight: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        s = function(x, a[0].transpose(1, 2), offs=offsets)
        return F.linear(x, weight) + function(s, (b[0] * scale_G11).transpose(1, 2), offs=offsets)

    return _autograd_step(problem, layer, _stacked(problem))


CONTENDERS: dict[str, Callable[[Problem], Step]] = {
    "frozen": frozen,
    "mux": mux,
    "mux_slices": mux_slices,
    "peft_eager": peft_eager,
    "peft_compiled": peft_compiled,
    "unsloth_style": unsloth_style,
    "grouped_mm": grouped_mm,
}


def _by_task(problem: Problem) -> list[Factors]:
    """Return the factors of each task as parameters of their own, as separate adapters have them."""

    def leaves(stack: torch.Tensor) -> list[torch.Tensor]:
        return [part.detach().requires_grad_() for part in stack.unbind()]

    return [(leaves(a_GRD), leaves(b_GKR)) for a_GRD, b_GKR in zip(problem.a, problem.b, strict=True)]


def _stacked(problem: Problem) -> list[Factors]:
    return [([a_GRD], [b_GKR]) for a_GRD, b_GKR in zip(problem.a, problem.b, strict=True)]


def _autograd_step(problem: Problem, layer: Layer, factors: Sequence[Factors]) -> Step:
    """Return a step that computes the layers one by one, and leaves the backward pass to autograd."""
    leaves = [part for a, b in factors for part in (*a, *b)]

    def step(call: int) -> Result:
        inputs = problem.inputs(call)
        x = inputs.x.detach().requires_grad_()
        ys = [layer(x, weight, a, b) for weight, (a, b) in zip(inputs.weights, factors, strict=True)]
        dx, *gradients = torch.autograd.grad(ys, [x, *leaves], inputs.dys)
        left, da, db = iter(gradients), [], []
        for a, b in factors:
            da += _of_tasks([next(left) for _ in a])
            db += _of_tasks([next(left) for _ in b])
        return Result([y.detach() for y in ys], dx, da, db)

    return step


def _of_tasks(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the gradient of each task, also where a stack of all tasks has one gradient."""
    return gradients[0].unbind() if gradients[0].dim() == 3 else gradients
