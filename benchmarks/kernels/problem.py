"""What the contenders of `benchmarks.kernels` compute, and how their results are judged: against float64.

A problem is a group of frozen linear layers that read the same activations (one layer; q, k and v; gate and up) with
the LoRA adapters of many tasks. Not here: any way to compute it but the formulas.

Shape letters: T tokens, D input features, K output features of a layer, R rank, G tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative Frobenius error against float64 on the same inputs."""
_MAX_COPIES = 8


class Result(NamedTuple):
    """What a contender computes.

    Attributes:
        y: output of each layer, `[T, K]`.
        dx: gradient of the activations, `[T, D]`.
        da: gradients of the factors A, `[R, D]`, of each task in the first layer, then in the next.
        db: gradients of the factors B, `[K, R]`, in the same order.
    """

    y: Sequence[torch.Tensor]
    dx: torch.Tensor
    da: Sequence[torch.Tensor]
    db: Sequence[torch.Tensor]


Step = Callable[[int], Result]
"""Computes everything once, on the inputs of a call."""


class CannotRunError(Exception):
    """A contender has nothing to offer for this shape or on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One point of the table.

    Attributes:
        in_features: number of input features, D.
        out_features: number of output features of each layer of the group, K.
        num_tokens: number of tokens of all tasks, T.
        num_tasks: number of tasks, G.
        rank: rank of all adapters, R.
    """

    in_features: int
    out_features: tuple[int, ...]
    num_tokens: int
    num_tasks: int
    rank: int

    def __str__(self) -> str:
        """Return such as `4096->4096+1024+1024 T4096 G8 r16`."""
        widths = "+".join(map(str, self.out_features))
        return f"{self.in_features}->{widths} T{self.num_tokens} G{self.num_tasks} r{self.rank}"


class Inputs(NamedTuple):
    """One of the copies that calls rotate through."""

    x: torch.Tensor
    dys: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]


class Problem:
    """Inputs of one shape, on the device.

    Attributes:
        lengths: number of tokens of each task, multiples of 8 as `grouped_mm` needs them; the last takes the rest.
        bounds: first row of each task, and last the number of rows.
        copies: inputs that calls rotate through, together larger than twice the L2.
        a: factors A of each layer, `[G, R, D]`, leaves of autograd.
        b: factors B of each layer, `[G, K, R]`, leaves of autograd.
        scales: scale of each task's adapters, the same in every layer.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        """Draw inputs and factors.

        Raises:
            ValueError: if there are fewer than 8 tokens a task.
        """
        share = shape.num_tokens // shape.num_tasks // 8 * 8
        if share < 8:
            raise ValueError(
                f"{shape} must have at least 8 tokens per task, got {shape.num_tokens} tokens. Give more --tokens."
            )
        self.shape, self.device, self.dtype = shape, device, dtype
        self.lengths = [share] * (shape.num_tasks - 1) + [shape.num_tokens - share * (shape.num_tasks - 1)]
        self.bounds = [0]
        for length in self.lengths:
            self.bounds.append(self.bounds[-1] + length)
        self._generator = torch.Generator(device).manual_seed(seed)
        self.copies = [self._draw_inputs() for _ in range(self._num_copies())]
        d, r, g = shape.in_features, shape.rank, shape.num_tasks
        self.a = [(self._normal(g, r, d) / d**0.5).to(dtype).requires_grad_() for _ in shape.out_features]
        self.b = [(self._normal(g, k, r) / r**0.5).to(dtype).requires_grad_() for k in shape.out_features]
        self.scales = [0.5 + 0.25 * (index % 4) for index in range(g)]

    def inputs(self, call: int) -> Inputs:
        """Return the inputs of a call."""
        return self.copies[call % len(self.copies)]

    def rows(self) -> list[slice]:
        """Return the rows of each task."""
        return [slice(start, end) for start, end in zip(self.bounds[:-1], self.bounds[1:], strict=True)]

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self._generator, device=self.device)

    def _num_copies(self) -> int:
        widths, d, t = sum(self.shape.out_features), self.shape.in_features, self.shape.num_tokens
        copy_bytes = torch.empty((), dtype=self.dtype).element_size() * (t * (d + widths) + d * widths)
        return min(_MAX_COPIES, max(2, -(-2 * l2_bytes(self.device) // copy_bytes)))

    def _draw_inputs(self) -> Inputs:
        d, t, dtype = self.shape.in_features, self.shape.num_tokens, self.dtype
        return Inputs(
            self._normal(t, d).to(dtype),
            tuple(self._normal(t, k).to(dtype) for k in self.shape.out_features),
            tuple((self._normal(k, d) / d**0.5).to(dtype) for k in self.shape.out_features),
        )


def l2_bytes(device: torch.device) -> int:
    """Return the size of the L2; a token size without a GPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**10


def reference(problem: Problem, call: int) -> Result:
    """Return the same by the formulas, in float64."""
    inputs = problem.inputs(call)
    x, ys, da, db = inputs.x.double(), [], [], []
    dx = torch.zeros_like(x)
    for layer, (dy_TK, weight_KD) in enumerate(zip(inputs.dys, inputs.weights, strict=True)):
        dy, weight = dy_TK.double(), weight_KD.double()
        y = x @ weight.t()
        dx += dy @ weight
        a, b = problem.a[layer].detach().double(), problem.b[layer].detach().double()
        for index, (rows, scale) in enumerate(zip(problem.rows(), problem.scales, strict=True)):
            s, ds = x[rows] @ a[index].t(), scale * dy[rows] @ b[index]
            y[rows] += scale * s @ b[index].t()
            dx[rows] += ds @ a[index]
            da.append(ds.t() @ x[rows])
            db.append(scale * dy[rows].t() @ s)
        ys.append(y)
    return Result(ys, dx, da, db)


def errors(problem: Problem, step: Step) -> dict[str, float]:
    """Return the greatest relative Frobenius error of each quantity over two calls; NaN where a result has one."""
    worst: dict[str, float] = {}
    for call in range(2):
        # Buffers are used again by the next call, so everything is compared before it.
        found, wanted = step(call), reference(problem, call)
        for name, mine, theirs in zip(Result._fields, found, wanted, strict=True):
            mine, theirs = ([tensor] if isinstance(tensor, torch.Tensor) else tensor for tensor in (mine, theirs))
            if len(mine) != len(theirs):
                raise RuntimeError(
                    f"{name} must have one tensor for each layer and task ({len(theirs)}), got {len(mine)}."
                )
            for left, right in zip(mine, theirs, strict=True):
                worst[name] = greater(relative_error(left, right), worst.get(name, 0.0))
    return worst


def greater(value: float, other: float) -> float:
    """Return the greater of two; NaN where one is NaN, which `max` may lose."""
    return value if value != value or value > other else other  # a NaN in `other` is returned, as no value exceeds it


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of `wanted`."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
