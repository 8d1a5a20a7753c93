"""Times one frozen linear layer with the LoRA adapters of many tasks, forward and backward, on a GPU.

    python -m benchmarks.kernels                          the Llama-3-8B layers; minutes, much of it torch.compile
    python -m benchmarks.kernels --tokens 4096 --tasks 8 --ranks 16
    python -m benchmarks.kernels --dry-run                any machine: tiny shapes, every contender against float64

Every contender gets the same packed rows and returns y, dx and each dA and dB; each is held against float64 before
it is timed. Rounds of all contenders are interleaved, inputs and weights rotate so that they do not stay in the L2,
and the median is told, launched one by one ("eager") and as a CUDA graph ("graph"). The overhead is over `frozen`, the
two products of the frozen layer alone.

Shape letters: T tokens, D input and K output features, R rank, G tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

LLAMA_LAYERS = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
TOKENS, TASKS, RANKS = (1024, 4096, 16384), (1, 4, 8, 32), (8, 16, 64)
MAX_GATHERED_BYTES = 4 * 2**30
MAX_COMPILED_TASKS = 8
"""Compilation unrolls the loop over tasks; beyond this it takes longer than all other measurements."""
_MAX_COPIES = 8
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative Frobenius error against float64 on the same inputs."""


class Result(NamedTuple):
    """What a contender computes; `da` and `db` by task, `[R, D]` and `[K, R]`."""

    y: torch.Tensor
    dx: torch.Tensor
    da: Sequence[torch.Tensor]
    db: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """One point of the table."""

    in_features: int
    out_features: int
    num_tokens: int
    num_tasks: int
    rank: int


class Inputs(NamedTuple):
    """One of the copies that calls rotate through."""

    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor


class Problem:
    """Inputs of one shape, on the device.

    Attributes:
        lengths: tokens of each task, multiples of 8 as `grouped_mm` needs them; the last takes the rest.
        bounds: first row of each task, and T.
        copies: rotated inputs, together larger than twice the L2.
        a: `[G, R, D]`, `b`: `[G, K, R]`, leaves; `bt` is the transposed slab that the Triton kernels read.
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        """Draw everything.

        Raises:
            ValueError: if there are fewer than 8 tokens a task.
        """
        share = shape.num_tokens // shape.num_tasks // 8 * 8
        if share < 8:
            raise ValueError(f"{shape}: {shape.num_tokens} tokens; allowed: at least 8 a task. Give more --tokens.")
        self.shape, self.device, self.dtype = shape, device, dtype
        self.lengths = [share] * (shape.num_tasks - 1) + [shape.num_tokens - share * (shape.num_tasks - 1)]
        self.bounds = [0]
        for length in self.lengths:
            self.bounds.append(self.bounds[-1] + length)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device)

        d, k, r, g = shape.in_features, shape.out_features, shape.rank, shape.num_tasks
        t = shape.num_tokens
        copy_bytes = torch.empty((), dtype=dtype).element_size() * (t * (d + k) + d * k)
        num_copies = min(_MAX_COPIES, max(2, -(-2 * l2_bytes(device) // copy_bytes)))
        self.copies = [
            Inputs(normal(t, d).to(dtype), normal(t, k).to(dtype), (normal(k, d) / d**0.5).to(dtype))
            for _ in range(num_copies)
        ]
        self.a = (normal(g, r, d) / d**0.5).to(dtype).requires_grad_()
        self.b = (normal(g, k, r) / r**0.5).to(dtype).requires_grad_()
        self.bt = self.b.detach().transpose(1, 2).contiguous()
        self.scales = [0.5 + 0.25 * (index % 4) for index in range(g)]

    def inputs(self, call: int) -> Inputs:
        """Return the inputs of a call."""
        return self.copies[call % len(self.copies)]

    def rows(self) -> list[slice]:
        """Return the rows of each task."""
        return [slice(start, end) for start, end in zip(self.bounds[:-1], self.bounds[1:], strict=True)]


Step = Callable[[int], Result]


class CannotRunError(Exception):
    """A contender has nothing to offer for this shape or on this machine; the message says why."""


# ------------------------------------------------------------------ contenders


def frozen(problem: Problem) -> Step:
    """The two products of the frozen layer, no adapters: what no method can beat."""

    def step(call: int) -> Result:
        x, dy, weight = problem.inputs(call)
        return Result(x @ weight.t(), dy @ weight, (), ())

    return step


class TritonLora:
    """The package's Triton kernels, in the order in which a pass launches them.

    The tables are built once, as one set serves all layers of a step; gradients go to fp32 slabs.
    """

    def __init__(self, problem: Problem) -> None:
        """Build tables and buffers."""
        try:
            from peft_mux.kernels import grouped_lora_triton as kernels
        except ImportError as error:
            raise CannotRunError(f"Triton cannot be imported: {error}") from error
        from peft_mux.kernels.tables import RankTable, SegmentTables

        if problem.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise CannotRunError("Triton kernels need a GPU, or its interpreter (TRITON_INTERPRET=1)")
        self.kernels, self.problem = kernels, problem
        shape = problem.shape
        self.tables = SegmentTables(problem.lengths, range(shape.num_tasks), device=problem.device)
        first_rows = range(0, shape.num_tasks * shape.rank, shape.rank)
        ranks = [shape.rank] * shape.num_tasks
        self.ranks = RankTable(ranks, problem.scales, first_rows, device=problem.device)
        self.a, self.bt = problem.a.detach().flatten(0, 1), problem.bt.flatten(0, 1)
        self.s, self.ds = (problem.a.new_empty(shape.num_tokens, self.ranks.num_columns) for _ in range(2))
        self.s, self.ds = self.s.detach(), self.ds.detach()
        self.da = torch.zeros(self.a.shape, device=problem.device)
        self.dbt = torch.zeros(self.bt.shape, device=problem.device)
        self.y = self.a.new_empty(shape.num_tokens, shape.out_features)
        self.dx = self.a.new_empty(shape.num_tokens, shape.in_features)

    def parts(self) -> dict[str, Callable[[int], Any]]:
        """Return the six launches (wgrad with its reduction) by name, in order."""
        k, tables, ranks = self.kernels, self.tables, self.ranks
        at = self.problem.inputs
        return {
            "shrink x": lambda call: k.shrink(at(call).x, self.a, self.s, tables, ranks, scaled=False),
            "expand y": lambda call: k.expand(self.s, self.bt, self.y, tables, ranks, scaled=True),
            "shrink dy": lambda call: k.shrink(at(call).dy, self.bt, self.ds, tables, ranks, scaled=True),
            "expand dx": lambda call: k.expand(self.ds, self.a, self.dx, tables, ranks, scaled=False),
            "wgrad A": lambda call: k.wgrad(self.ds, at(call).x, self.da, tables, ranks, scaled=False),
            "wgrad B": lambda call: k.wgrad(self.s, at(call).dy, self.dbt, tables, ranks, scaled=True),
        }

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes that each part has to move: activation, S and factor or gradient, once each.

        The partial sums of wgrad are not counted, so that a rate says what is achieved, not what is spent.
        """
        shape, size = self.problem.shape, self.a.element_size()
        found = {}
        for name in self.parts():
            width = shape.in_features if name in ("shrink x", "expand dx", "wgrad A") else shape.out_features
            factor_size = 4 if name.startswith("wgrad") else size
            activations = shape.num_tokens * (width + self.ranks.num_columns) * size
            found[name] = activations + shape.num_tasks * shape.rank * width * factor_size
        return found

    def step(self, call: int) -> Result:
        """Run forward and backward."""
        x, dy, weight = self.problem.inputs(call)
        parts = self.parts()
        parts["shrink x"](call)
        parts["expand y"](call)
        torch.addmm(self.y, x, weight.t(), out=self.y)
        parts["shrink dy"](call)
        parts["expand dx"](call)
        torch.addmm(self.dx, dy, weight, out=self.dx)
        parts["wgrad A"](call)
        parts["wgrad B"](call)
        rank = self.problem.shape.rank
        return Result(self.y, self.dx, self.da.split(rank), [part.t() for part in self.dbt.split(rank)])


def mux_triton(problem: Problem) -> Step:
    """The package's Triton kernels around cuBLAS."""
    return TritonLora(problem).step


def mux_torch(problem: Problem) -> Step:
    """The package's own path without Triton: `grouped_lora`."""
    from peft_mux.kernels.grouped_lora import LoraSegment, grouped_lora

    segments = [LoraSegment(r.start, r.stop, scale) for r, scale in zip(problem.rows(), problem.scales, strict=True)]
    places = torch.arange(problem.shape.num_tokens, device=problem.device)
    a, b = _leaves(problem)

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        factors = list(zip(a, b, strict=True))
        return grouped_lora(x, weight, None, segments, factors, places=places, out_features=problem.shape.out_features)

    return _autograd_step(problem, forward, a, b)


def _peft_forward(problem: Problem, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> Callable[..., Any]:
    rows, scales = problem.rows(), problem.scales

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, weight)
        parts = [
            y[part] + F.linear(F.linear(x[part], a_g), b_g) * scale
            for part, scale, a_g, b_g in zip(rows, scales, a, b, strict=True)
        ]
        return torch.cat(parts)

    return forward


def peft_eager(problem: Problem) -> Step:
    """PEFT's formula under autograd, in a loop over the adapters: `base(x) + B(A(x)) * scaling`."""
    a, b = _leaves(problem)
    return _autograd_step(problem, _peft_forward(problem, a, b), a, b)


def peft_compiled(problem: Problem) -> Step:
    """The same through `torch.compile`; on a CPU it is traced only."""
    if problem.shape.num_tasks > MAX_COMPILED_TASKS:
        raise CannotRunError(f"more than {MAX_COMPILED_TASKS} tasks take too long to compile")
    backend = "inductor" if problem.device.type == "cuda" else "aot_eager"
    torch._dynamo.reset()
    a, b = _leaves(problem)
    return _autograd_step(problem, torch.compile(_peft_forward(problem, a, b), backend=backend, dynamic=False), a, b)


def unsloth_style(problem: Problem) -> Step:
    """Hand-written passes of `addmm_` for each task, keeping X and recomputing X A^T, after Unsloth's method."""
    a, bt = problem.a.detach(), problem.bt

    def step(call: int) -> Result:
        x, dy, weight = problem.inputs(call)
        y, dx = x @ weight.t(), dy @ weight
        da, db = [], []
        for index, (rows, scale) in enumerate(zip(problem.rows(), problem.scales, strict=True)):
            x_g, dy_g = x[rows], dy[rows]
            y[rows].addmm_(x_g @ a[index].t(), bt[index], alpha=scale)
            ds = dy_g @ bt[index].t()
            dx[rows].addmm_(ds, a[index], alpha=scale)
            da.append((ds.t() @ x_g).mul_(scale))
            db.append((dy_g.t() @ (x_g @ a[index].t())).mul_(scale))
        return Result(y, dx, da, db)

    return step


def gather_bmm(problem: Problem) -> Step:
    """A copy of its adapter for every token, and `bmm`, after S-LoRA; refused where the copies get too large."""
    shape = problem.shape
    needed = shape.num_tokens * shape.rank * (shape.in_features + shape.out_features) * problem.a.element_size()
    if needed > MAX_GATHERED_BYTES:
        raise CannotRunError(f"the gathered factors take {needed / 2**30:.1f} GiB of {MAX_GATHERED_BYTES / 2**30:.0f}")
    lengths = torch.tensor(problem.lengths, device=problem.device)
    task_T = torch.arange(shape.num_tasks, device=problem.device).repeat_interleave(lengths)
    scale_T1 = torch.tensor(problem.scales, device=problem.device, dtype=problem.dtype)[task_T, None]

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        s = torch.bmm(problem.a[task_T], x[:, :, None])
        return F.linear(x, weight) + torch.bmm(problem.b[task_T], s)[:, :, 0] * scale_T1

    return _autograd_step(problem, forward, [problem.a], [problem.b])


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

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        s = function(x, problem.a.transpose(1, 2), offs=offsets)
        return F.linear(x, weight) + function(s, (problem.b * scale_G11).transpose(1, 2), offs=offsets)

    return _autograd_step(problem, forward, [problem.a], [problem.b])


CONTENDERS: dict[str, Callable[[Problem], Step]] = {
    "frozen": frozen,
    "mux_triton": mux_triton,
    "mux_torch": mux_torch,
    "peft_eager": peft_eager,
    "peft_compiled": peft_compiled,
    "unsloth_style": unsloth_style,
    "gather_bmm": gather_bmm,
    "grouped_mm": grouped_mm,
}


def _leaves(problem: Problem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the factors of each task as parameters of their own, as separate adapters have them."""
    return tuple([part.detach().requires_grad_() for part in stack.unbind()] for stack in (problem.a, problem.b))  # type: ignore[return-value]


def _autograd_step(
    problem: Problem,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
) -> Step:
    def step(call: int) -> Result:
        x, dy, weight = problem.inputs(call)
        x = x.detach().requires_grad_()
        y = forward(x, weight)
        dx, *gradients = torch.autograd.grad(y, [x, *a, *b], dy)
        da, db = gradients[: len(a)], gradients[len(a) :]
        return Result(y.detach(), dx, _by_task(da), _by_task(db))

    return step


def _by_task(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the gradient of each task, also where a stack of all tasks has one gradient."""
    return gradients[0].unbind() if gradients[0].dim() == 3 else gradients


# -------------------------------------------------------------------- checking


def reference(problem: Problem, call: int) -> Result:
    """Return the same by the formulas, in float64."""
    x, dy, weight = (tensor.double() for tensor in problem.inputs(call))
    a, b = problem.a.detach().double(), problem.b.detach().double()
    y, dx, da, db = x @ weight.t(), dy @ weight, [], []
    for index, (rows, scale) in enumerate(zip(problem.rows(), problem.scales, strict=True)):
        s, ds = x[rows] @ a[index].t(), scale * dy[rows] @ b[index]
        y[rows] += scale * s @ b[index].t()
        dx[rows] += ds @ a[index]
        da.append(ds.t() @ x[rows])
        db.append(scale * dy[rows].t() @ s)
    return Result(y, dx, da, db)


def errors(problem: Problem, step: Step) -> dict[str, float]:
    """Return the greatest relative Frobenius error of each quantity over two calls; NaN where a result has one."""
    worst: dict[str, float] = {}
    for call in range(2):
        # Buffers are used again by the next call, so everything is compared before it.
        found, wanted = step(call), reference(problem, call)
        for name, mine, theirs in zip(Result._fields, found, wanted, strict=True):
            mine, theirs = ([tensor] if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 else tensor
                            for tensor in (mine, theirs))  # fmt: skip
            if len(mine) != len(theirs):
                raise RuntimeError(f"{name}: {len(mine)} tensors; allowed: one for each of {len(theirs)} tasks.")
            for left, right in zip(mine, theirs, strict=True):
                worst[name] = greater(relative_error(left, right), worst.get(name, 0.0))
    return worst


def _tolerance(name: str, dtype: torch.dtype) -> float:
    """Return the error allowed: baselines that round more often are less exact, not wrong."""
    if name == "gather_bmm":
        return 50 * TOLERANCES[dtype]  # adds up the gradients of all tokens of a task in the dtype itself
    return TOLERANCES[dtype] * (1 if name.startswith("mux") else 5)


def greater(value: float, other: float) -> float:
    """Return the greater of two; NaN where one is NaN, which `max` may lose."""
    return value if value != value or value > other else other  # a NaN in `other` is returned, as no value exceeds it


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of `wanted`."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


# ---------------------------------------------------------------------- timing


def l2_bytes(device: torch.device) -> int:
    """Return the size of the L2; a token size without a GPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**10


def interleaved_us(
    steps: dict[str, Callable[[int], Any]], device: torch.device, *, calls: int, rounds: int
) -> dict[str, float]:
    """Return the median microseconds of a call of each, over interleaved rounds of `calls` calls."""
    for step in steps.values():
        step(0)
    spent: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent[name].append(_elapsed_us(steps[name], device, calls) / calls)
    return {name: statistics.median(values) for name, values in spent.items()}


def _elapsed_us(step: Callable[[int], Any], device: torch.device, calls: int) -> float:
    if device.type != "cuda":
        start_s = time.perf_counter()
        for call in range(calls):
            step(call)
        return (time.perf_counter() - start_s) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in range(calls):
        step(call)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def captured(step: Callable[[int], Any], calls: int) -> Callable[[int], None]:
    """Return a function that replays `calls` calls as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in range(3):
            step(call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            step(call)
    return lambda _: graph.replay()


def copy_rate(device: torch.device, num_bytes: int = 2**30) -> float:
    """Return the bytes per second of a device-to-device copy, read and written bytes both counted."""
    source = torch.zeros(num_bytes if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = interleaved_us({"copy": lambda _: target.copy_(source)}, device, calls=5, rounds=5)["copy"]
    return 2 * source.numel() / us * 1e6


def measure(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    names: Sequence[str] = tuple(CONTENDERS),
    rounds: int = 7,
    bytes_per_s: float | None = None,
) -> dict[str, Any]:
    """Check and time all contenders on one shape.

    Args:
        shape: of the layer and the stream.
        device: where to.
        dtype: of activations and weights.
        names: contenders, `frozen` is always added.
        rounds: of timing.
        bytes_per_s: the device's copy rate, from `copy_rate`; measured here by default.

    Returns:
        Plain values for JSON: `contenders` (microseconds, overhead in percent, errors) and `kernels` (of ours).
    """
    problem = Problem(shape, device, dtype)
    calls = len(problem.copies)
    rows: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for name in dict.fromkeys(("frozen", *names)):
        try:
            steps[name] = CONTENDERS[name](problem)
            found = {} if name == "frozen" else errors(problem, steps[name])
        except (CannotRunError, torch.cuda.OutOfMemoryError) as reason:
            steps.pop(name, None)
            rows[name] = {"skipped": str(reason).splitlines()[0]}
            continue
        rows[name] = {"errors": found, "is_right": all(error <= _tolerance(name, dtype) for error in found.values())}
    times = {"eager": interleaved_us(steps, device, calls=calls, rounds=rounds)}
    if device.type == "cuda":
        times["graph"] = _graph_us(steps, rows, device, calls, rounds)
    for way, us_of in times.items():
        for name, us in us_of.items():
            rows[name][f"{way}_us"] = us
            rows[name][f"{way}_overhead_percent"] = 100 * (us / us_of["frozen"] - 1) if "frozen" in us_of else None
    rate = bytes_per_s or copy_rate(device)
    found = {"shape": asdict(shape), "contenders": rows, "copy_bytes_per_s": rate}
    if "mux_triton" in steps:
        found["kernels"] = kernel_rates(TritonLora(problem), device, calls, rounds, rate)
    return found


def _graph_us(
    steps: dict[str, Step], rows: dict[str, Any], device: torch.device, calls: int, rounds: int
) -> dict[str, float]:
    graphs = {}
    for name, step in steps.items():
        try:
            graphs[name] = captured(step, calls)
        except RuntimeError as error:  # a synchronisation inside, most often
            rows[name]["graph_skipped"] = str(error).splitlines()[0]
    return {name: us / calls for name, us in interleaved_us(graphs, device, calls=1, rounds=rounds).items()}


def kernel_rates(
    lora: TritonLora, device: torch.device, calls: int, rounds: int, copy_bytes_per_s: float
) -> dict[str, dict[str, float]]:
    """Return microseconds, bytes per second and share of the copy rate of each of our kernels."""
    parts: dict[str, Callable[[int], Any]] = lora.parts()
    if device.type == "cuda":
        # Launched from Python they would take the time of Python; a graph shows the kernels.
        parts = {name: captured(part, calls) for name, part in parts.items()}
    is_graph = device.type == "cuda"
    times = interleaved_us(parts, device, calls=1 if is_graph else calls, rounds=rounds)
    found = {}
    for name, num_bytes in lora.bytes_moved().items():
        us = times[name] / (calls if is_graph else 1)
        rate = num_bytes / us * 1e6
        found[name] = {"us": us, "bytes_per_s": rate, "share_of_copy_rate": rate / copy_bytes_per_s}
    return found


def describe(result: dict[str, Any]) -> str:
    """Return one shape's table for reading."""
    shape = result["shape"]
    lines = [
        f"\n{shape['in_features']}->{shape['out_features']}  T {shape['num_tokens']}  G {shape['num_tasks']}  "
        f"r {shape['rank']}",
        f"  {'contender':14s} {'eager us':>10s} {'over':>8s} {'graph us':>10s} {'over':>8s}  worst error",
    ]
    for name, row in result["contenders"].items():
        if "skipped" in row:
            lines.append(f"  {name:14s} skipped: {row['skipped']}")
            continue
        columns = ""
        for way in ("eager", "graph"):
            us, over = row.get(f"{way}_us"), row.get(f"{way}_overhead_percent")
            columns += f" {us:10.1f} {over:7.1f}%" if us is not None and over is not None else f" {'-':>10s} {'-':>8s}"
        worst = max(row["errors"].values(), default=0.0)
        lines.append(f"  {name:14s}{columns}  {worst:.1e}{'' if row['is_right'] else '  WRONG'}")
    for name, row in result.get("kernels", {}).items():
        lines.append(
            f"    {name:10s} {row['us']:8.1f} us {row['bytes_per_s'] / 1e9:8.0f} GB/s "
            f"{100 * row['share_of_copy_rate']:5.0f}% of the copy rate"
        )
    return "\n".join(lines)


def wrong_contenders(result: dict[str, Any]) -> list[str]:
    """Return the contenders that differ from float64 by more than is allowed, and any of ours that did not run."""
    rows = result["contenders"].items()
    return [name for name, row in rows if not row.get("is_right", not name.startswith("mux"))]


DRY_SHAPES = (Shape(64, 48, 64, 1, 8), Shape(48, 64, 80, 3, 16), Shape(32, 32, 72, 2, 24))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line names; prints tables, and JSON to `--output`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--layers", nargs="+", default=[f"{d}x{k}" for d, k in LLAMA_LAYERS], help="such as 4096x1024")
    add("--tokens", type=int, nargs="+", default=list(TOKENS))
    add("--tasks", type=int, nargs="+", default=list(TASKS))
    add("--ranks", type=int, nargs="+", default=list(RANKS))
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--rounds", type=int, default=7)
    add("--dry-run", action="store_true", help="tiny shapes in fp32, on any machine")
    add("--output", help="JSON file to write")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.dry_run:
        raise SystemExit("no GPU here; allowed without one: --dry-run")
    shapes: Sequence[Shape] = [
        Shape(int(layer.split("x")[0]), int(layer.split("x")[1]), num_tokens, num_tasks, rank)
        for layer in options.layers
        for num_tokens in options.tokens
        for num_tasks in options.tasks
        for rank in options.ranks
    ]
    dtype = getattr(torch, options.dtype)
    if options.dry_run:
        shapes, dtype = DRY_SHAPES, torch.float32
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    rate, results = copy_rate(device), []
    for shape in shapes:
        rounds = 1 if options.dry_run else options.rounds
        results.append(measure(shape, device, dtype, names=options.contenders, rounds=rounds, bytes_per_s=rate))
        print(describe(results[-1]), flush=True)
        if options.output:
            with open(options.output, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
    wrong = [name for result in results for name in wrong_contenders(result)]
    if wrong:
        raise SystemExit(f"these differ from float64: {', '.join(sorted(set(wrong)))}")


if __name__ == "__main__":
    main()
