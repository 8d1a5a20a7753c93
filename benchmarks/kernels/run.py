"""Times frozen linear layers with the LoRA adapters of many tasks, forward and backward, on a GPU.

    python -m benchmarks.gpu --parts kernels              the Llama-3-8B layers; minutes, much of it torch.compile

A shape is a group of layers that read the same activations: `mux` (the path that training takes) computes it as one,
the others layer by layer. Every contender gets the same packed rows and returns y, dx and each dA and dB; each is
compared with float64 before it is timed. Rounds of all contenders are interleaved, inputs and weights rotate so that
they do not stay in the L2, and the median is reported, launched one by one ("eager") and as a CUDA graph ("graph").
The overhead is over `frozen`, the products of the frozen layers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.report import Deadline, Row
from benchmarks.gpu.settings import Settings, free
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.mux import MuxGroup
from benchmarks.kernels.problem import TOLERANCES, CannotRunError, Problem, Shape, Step, errors
from benchmarks.kernels.timing import captured, interleaved_us

LLAMA_QKV = (4096, (4096, 1024, 1024))
LLAMA_GATE_UP = (4096, (14336, 14336))
LLAMA_O = (4096, (4096,))
LLAMA_DOWN = (14336, (4096,))
LLAMA_LAYER = (LLAMA_QKV, LLAMA_GATE_UP, LLAMA_O, LLAMA_DOWN)
"""Input and output features of the groups that make up a layer of Llama-3-8B."""

LLAMA_SINGLE = ((4096, (1024,)), (4096, (14336,)))
"""Layers of these groups, each by itself."""

DRY_SHAPES = (Shape(48, (64,), 80, 3, 16), Shape(40, (40, 24, 24), 72, 2, 8), Shape(32, (32,), 64, 1, 24))


def kernel_part(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """The most telling shapes first."""
    groups, others = kernel_shapes(settings)
    results = []
    for shape in [*groups, *others]:
        # Compilation takes the longest; without it a shape takes a few seconds.
        names = [name for name in CONTENDERS if name != "peft_compiled" or deadline.has(60) or settings.is_rehearsal]
        if not deadline.has(5):
            yield "note", "time is up: the remaining shapes were not measured"
            return
        rounds = 1 if settings.is_rehearsal else 7
        found = measure(shape, settings.device, settings.dtype, names=names, rounds=rounds)
        found["is_right"] = not wrong_contenders(found)
        yield str(shape), found
        results.append(found)
        if len(results) == len(groups):
            yield "all linear layers of a block", layer_totals(results)
        free(settings.device)


def kernel_shapes(settings: Settings) -> tuple[list[Shape], list[Shape]]:
    """Return the groups that make up one block of the model, and what else is measured."""
    if settings.is_rehearsal:
        return list(DRY_SHAPES[:2]), []
    groups = [Shape(*layer, 4096, 8, 16) for layer in LLAMA_LAYER]
    more = [Shape(*LLAMA_O, t, 8, 16) for t in (1024, 16384)]
    more += [Shape(*LLAMA_QKV, 4096, g, 16) for g in (32, 1)]
    more += [Shape(*LLAMA_QKV, 4096, 8, r) for r in (64, 8)]
    more += [Shape(*LLAMA_QKV, t, 32, 64) for t in (4096, 16384, 1024)]
    more += [Shape(*layer, 4096, 8, 16) for layer in LLAMA_SINGLE]
    return groups, [*more, Shape(*LLAMA_O, 4096, 4, 16)]


def measure(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    names: Sequence[str] = tuple(CONTENDERS),
    rounds: int = 7,
) -> dict[str, Any]:
    """Check and time all contenders on one shape.

    Args:
        shape: sizes of the layers and of the stream.
        device: the device to run on.
        dtype: the dtype of activations and weights.
        names: names of the contenders; `frozen` is always added.
        rounds: number of rounds of timing.

    Returns:
        Plain values for JSON: `contenders`, with microseconds, overhead in percent, and errors.
    """
    problem = Problem(shape, device, dtype)
    calls = len(problem.copies)
    steps, rows = _checked(problem, names)
    times = {"eager": interleaved_us(steps, device, calls=calls, rounds=rounds)}
    if device.type == "cuda":
        times["graph"] = _graph_us(steps, rows, device, calls, rounds)
    for way, us_of in times.items():
        for name, us in us_of.items():
            rows[name][f"{way}_us"] = us
            rows[name][f"{way}_overhead_percent"] = 100 * (us / us_of["frozen"] - 1) if "frozen" in us_of else None
    return {"shape": asdict(shape), "contenders": rows}


def _checked(problem: Problem, names: Sequence[str]) -> tuple[dict[str, Step], dict[str, Any]]:
    """Return the steps of the contenders that can run, and a row for each that says how exact it is."""
    rows: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for name in dict.fromkeys(("frozen", *names)):
        try:
            step = CONTENDERS[name](problem)
            found = {} if name == "frozen" else errors(problem, _from_zero(step))
        except (CannotRunError, torch.cuda.OutOfMemoryError) as reason:
            rows[name] = {"skipped": str(reason).splitlines()[0]}
            continue
        is_right = all(error <= _tolerance(name, problem.dtype) for error in found.values())
        rows[name] = {"errors": found, "is_right": is_right}
        if name == "mux":
            rows[name]["path"] = "kernels" if isinstance(step, MuxGroup) else "slices"
        steps[name] = step
    return steps, rows


def _from_zero(step: Step) -> Step:
    """Return a step whose gradients are those of one call."""
    if not isinstance(step, MuxGroup):
        return step

    def cleared(call: int) -> Any:
        step.clear_gradients()
        return step(call)

    return cleared


def _tolerance(name: str, dtype: torch.dtype) -> float:
    """Return the error allowed: baselines that round more often are less exact, not wrong."""
    return TOLERANCES[dtype] * (1 if name.startswith("mux") else 5)


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


def layer_totals(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the groups of a layer: microseconds and overhead of each contender that ran in all of them."""
    found: dict[str, Any] = {}
    for way in ("eager", "graph"):
        total: dict[str, float] = {}
        for name in CONTENDERS:
            times = [result["contenders"].get(name, {}).get(f"{way}_us") for result in results]
            if all(us is not None for us in times):
                total[name] = sum(times)
        for name, us in total.items() if "frozen" in total else ():
            found |= {f"{name} {way}_us": us, f"{name} {way}_overhead_percent": 100 * (us / total["frozen"] - 1)}
    return found


def wrong_contenders(result: dict[str, Any]) -> list[str]:
    """Return the contenders that differ from float64 by more than is allowed, and any of ours that did not run."""
    rows = result["contenders"].items()
    return [name for name, row in rows if not row.get("is_right", not name.startswith("mux"))]
