"""The part `kernels` of `benchmarks.gpu`: the table of `benchmarks.kernels` for the main shapes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.report import Deadline, Row
from benchmarks.gpu.settings import Settings, free
from benchmarks.kernels import run as kernels
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.problem import Shape


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
        found = kernels.measure(shape, settings.device, settings.dtype, names=names, rounds=rounds)
        found["is_right"] = not kernels.wrong_contenders(found)
        yield str(shape), found
        results.append(found)
        if len(results) == len(groups):
            yield "all linear layers of a block", kernels.layer_totals(results)
        free(settings.device)


def kernel_shapes(settings: Settings) -> tuple[list[Shape], list[Shape]]:
    """Return the groups that make up one block of the model, and what else is measured."""
    if settings.is_rehearsal:
        return list(kernels.DRY_SHAPES[:2]), []
    groups = [Shape(*layer, 4096, 8, 16) for layer in kernels.LLAMA_LAYER]
    more = [Shape(*kernels.LLAMA_O, t, 8, 16) for t in (1024, 16384)]
    more += [Shape(*kernels.LLAMA_QKV, 4096, g, 16) for g in (32, 1)]
    more += [Shape(*kernels.LLAMA_QKV, 4096, 8, r) for r in (64, 8)]
    more += [Shape(*kernels.LLAMA_QKV, t, 32, 64) for t in (4096, 16384, 1024)]
    more += [Shape(*layer, 4096, 8, 16) for layer in kernels.LLAMA_SINGLE]
    return groups, [*more, Shape(*kernels.LLAMA_O, 4096, 4, 16)]
