"""Checks of `benchmarks.gpu`: q, k and v as training computes them, one group of adapters.

The adapters' part alone, as the base product is the library's: against float64, and each task alone against itself with
others. Tasks with dropout draw a mask for each layer, so their factors A are launched apart from those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.mux import slab_adapters
from benchmarks.kernels.problem import TOLERANCES, greater, relative_error

MODULES = ("layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj")


class GroupTask(NamedTuple):
    """A task of the check.

    Attributes:
        length: number of the task's tokens in the stream.
        ranks: rank of its adapter in each layer, 0 for no adapter there.
        dropout: probability of dropping an input element.
    """

    length: int
    ranks: tuple[int, int, int]
    dropout: float


TASKS = (
    GroupTask(37, (16, 16, 16), 0.0),
    GroupTask(150, (64, 0, 24), 0.1),
    GroupTask(1, (3, 3, 3), 0.0),
    GroupTask(420, (8, 4, 8), 0.0),
    GroupTask(97, (200, 16, 64), 0.5),
    GroupTask(64, (0, 128, 64), 0.0),
    GroupTask(0, (16, 8, 16), 0.0),
)

Tensors = dict[str, torch.Tensor]
"""Tensors by quantity and layer: x, dy0, a0, b0 (transposed), dy1, ...; in a result dx, y0, da0, db0, y1, ..."""


def group_rows(settings: Settings, dtype: torch.dtype) -> Iterator[Row]:
    """Yield how far from float64 each quantity is, and which differ between alone and together."""
    kind = str(dtype).removeprefix("torch.")
    together = _computed(settings, dtype, range(len(TASKS)))
    found: dict[str, float] = {}
    for index, result in together.items():
        wanted = _wanted(settings, dtype, index)
        for name, value in result.items():
            quantity = name.rstrip("012")
            found[quantity] = greater(relative_error(value, wanted[name]), found.get(quantity, 0.0))
    is_right = all(error <= TOLERANCES[dtype] for error in found.values())
    yield f"lora {kind}", {**found, "tolerance": TOLERANCES[dtype], "is_right": is_right}
    companies = (
        [[1], [3, 0]] if settings.is_rehearsal else [*([index] for index in range(len(TASKS))), [4, 0], [3, 5, 1]]
    )
    differing = [
        f"task {index} {name} among {company}"
        for company in companies
        for index, result in _computed(settings, dtype, company).items()
        for name, value in result.items()
        if not torch.equal(value, together[index][name])
    ]
    yield f"lora {kind} co-location", {"differing": ", ".join(differing), "is_right": not differing}


def _widths(settings: Settings) -> tuple[int, tuple[int, int, int]]:
    return (40, (40, 24, 24)) if settings.is_rehearsal else (4096, (4096, 1024, 1024))


def _length(settings: Settings, index: int) -> int:
    return min(TASKS[index].length, 30) if settings.is_rehearsal else TASKS[index].length


def _drawn(settings: Settings, dtype: torch.dtype, index: int) -> Tensors:
    """Return one task's own tensors, the same in any company."""
    generator = torch.Generator().manual_seed(200 + index)
    width, outputs = _widths(settings)
    length = _length(settings, index)
    drawn = {"x": torch.randn(length, width, generator=generator)}
    for layer, (rank, out_features) in enumerate(zip(TASKS[index].ranks, outputs, strict=True)):
        drawn[f"dy{layer}"] = torch.randn(length, out_features, generator=generator)
        drawn[f"a{layer}"] = torch.randn(rank, width, generator=generator) / width**0.5
        drawn[f"b{layer}"] = torch.randn(rank, out_features, generator=generator) / max(rank, 1) ** 0.5
    return {name: value.to(settings.device, dtype) for name, value in drawn.items()}


def _adapters(index: int, drawn: Tensors, dtype: torch.dtype) -> list[Any]:
    """Return the adapter of each layer, or `None`."""
    factors = [(drawn[f"a{layer}"], drawn[f"b{layer}"].t()) for layer in range(len(MODULES))]
    return slab_adapters(factors, 0.5 + index, TASKS[index].dropout, dtype)[1]


def _step_seed(index: int) -> int:
    from peft_mux.kernels import philox

    return philox.hash_seed("task", index, 7)


def _computed(settings: Settings, dtype: torch.dtype, company: Sequence[int]) -> dict[int, Tensors]:
    """Return what the kernels compute for each task of `company`, in one stream."""
    from peft_mux.kernels.lora.group import Base, KernelCall, LoraGroup
    from peft_mux.kernels.lora.tables import SegmentTables

    drawn = [_drawn(settings, dtype, index) for index in company]
    adapters = [_adapters(index, own, dtype) for index, own in zip(company, drawn, strict=True)]
    lengths = [_length(settings, index) for index in company]
    layers = list(zip(*adapters, strict=True))
    group = LoraGroup(layers, MODULES)
    bases = [Base(None, None, width) for width in _widths(settings)[1]]
    tables = SegmentTables(lengths, [_step_seed(index) for index in company], device=settings.device)
    places = torch.cat([torch.arange(length, device=settings.device) for length in lengths])
    x = torch.cat([own["x"] for own in drawn])
    dys = [torch.cat([own[f"dy{layer}"] for own in drawn]) for layer in range(len(MODULES))]
    call = KernelCall(group, bases, tables, places)
    ys, s = call.forward(x)
    dx = call.backward(dys, x, s, needs_dx=True)
    assert dx is not None, "it was asked for"
    found: dict[int, Tensors] = {index: {"dx": part} for index, part in zip(company, dx.split(lengths), strict=True)}
    for layer, (y, of_tasks) in enumerate(zip(ys, layers, strict=True)):
        for index, part, adapter in zip(company, y.split(lengths), of_tasks, strict=True):
            if adapter is not None:
                found[index] |= {f"y{layer}": part, f"da{layer}": adapter.da_RD, f"db{layer}": adapter.db_RK}
    return found


def _wanted(settings: Settings, dtype: torch.dtype, index: int) -> Tensors:
    """Return the same by the formulas, in float64."""
    from peft_mux.kernels import philox

    drawn = {name: value.double() for name, value in _drawn(settings, dtype, index).items()}
    x, scale, probability = drawn["x"], 0.5 + index, TASKS[index].dropout
    found = {"dx": torch.zeros_like(x)}
    places = torch.arange(len(x), device=settings.device)
    for layer, module in enumerate(MODULES):
        dy, a, b = (drawn[f"{name}{layer}"] for name in ("dy", "a", "b"))
        mask = torch.ones_like(x)
        if probability:
            key = _step_seed(index) ^ philox.hash_seed(module)
            mask = philox.keep_mask(key, places, x.shape[1], probability).double() * philox.keep_scale(probability)
        s, ds = (x * mask) @ a.t(), scale * (dy @ b.t())
        found["dx"] += mask * (ds @ a)
        found |= {f"y{layer}": scale * (s @ b), f"da{layer}": ds.t() @ (x * mask), f"db{layer}": scale * (s.t() @ dy)}
    return found
