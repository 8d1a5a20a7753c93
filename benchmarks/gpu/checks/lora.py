"""Checks of `benchmarks.gpu`: each LoRA kernel by itself, against float64, and against itself in other company."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.problem import TOLERANCES, greater, relative_error

LORA_TASKS = ((37, 8, 0.0), (0, 16, 0.0), (150, 24, 0.1), (1, 3, 0.5), (620, 200, 0.0), (97, 64, 0.05), (9, 4, 0.0))
"""Length, rank and dropout; a segment that is empty, one of a single token, ranks 3 to 200."""


def lora_rows(settings: Settings, dtype: torch.dtype) -> Iterator[Row]:
    """Yield how far from float64 each quantity is, and which differ between alone and together."""
    widths = (40, 56) if settings.is_rehearsal else (4096, 1024)
    tasks = (
        [(min(length, 40), rank, p) for length, rank, p in LORA_TASKS] if settings.is_rehearsal else list(LORA_TASKS)
    )
    kind = str(dtype).removeprefix("torch.")
    together = _lora_pass(settings.device, tasks, widths, dtype, range(len(tasks)))
    found: dict[str, float] = dict.fromkeys(("y", "dx", "da", "db"), 0.0)
    for index, result in together.items():
        wanted = _lora_wanted(settings.device, tasks, widths, dtype, index)
        for name, value in result.items():
            found[name] = greater(relative_error(value, wanted[name]), found[name])
    is_right = all(error <= TOLERANCES[dtype] for error in found.values())
    yield f"lora {kind}", {**found, "tolerance": TOLERANCES[dtype], "is_right": is_right}
    differing = []
    companies = [[index] for index in range(len(tasks))] + [[2, 4, 6], [0, 3, 5]]
    for company in companies[:4:2] + companies[-1:] if settings.is_rehearsal else companies:
        alone = _lora_pass(settings.device, tasks, widths, dtype, company)
        differing += [
            f"task {index} {name} among {company}"
            for index, result in alone.items()
            for name, value in result.items()
            if not torch.equal(value, together[index][name])
        ]
    yield f"lora {kind} co-location", {"differing": ", ".join(differing), "is_right": not differing}


def _lora_task(
    device: torch.device, task: tuple[int, int, float], widths: tuple[int, int], dtype: torch.dtype, index: int
) -> dict[str, torch.Tensor]:
    """Return one task's own tensors, the same in any company."""
    length, rank, _ = task
    generator = torch.Generator().manual_seed(100 + index)
    sizes = {"x": (length, widths[0]), "dy": (length, widths[1]), "a": (rank, widths[0]), "bt": (rank, widths[1])}
    drawn = {name: torch.randn(*size, generator=generator) for name, size in sizes.items()}
    drawn["a"] /= widths[0] ** 0.5
    drawn["bt"] /= rank**0.5
    return {name: value.to(device, dtype) for name, value in drawn.items()}


def _lora_seeds(index: int) -> tuple[int, int]:
    from peft_mux.kernels import philox

    return philox.hash_seed("task", index, 7), philox.hash_seed("layers.0.q_proj")


def _lora_pass(
    device: torch.device, tasks: list[Any], widths: tuple[int, int], dtype: torch.dtype, company: Any
) -> dict[int, dict[str, torch.Tensor]]:
    """Return y, dx (adapters' part), da and db of each task of `company`, from memory that was NaN."""
    from peft_mux.kernels.lora import launch as lora
    from peft_mux.kernels.lora.tables import Factors, RankTable, SegmentTables

    company = list(company)
    data = [_lora_task(device, tasks[index], widths, dtype, index) for index in company]
    lengths, ranks = [tasks[index][0] for index in company], [tasks[index][1] for index in company]
    tables = SegmentTables(lengths, [_lora_seeds(index)[0] for index in company], device=device)
    scales, dropouts = [0.5 + index for index in company], [tasks[index][2] for index in company]
    table = RankTable(ranks, scales, dropouts=dropouts, device=device)
    x, dy, a, bt = (torch.cat([one[name] for one in data]) for name in ("x", "dy", "a", "bt"))
    places = torch.cat([torch.arange(length, device=device) for length in lengths])

    def blank(like: torch.Tensor, columns: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.full((len(like), columns), float("nan"), device=device, dtype=kind)

    s, ds = blank(x, table.num_columns), blank(x, table.num_columns)
    y, dx = torch.full_like(dy, float("nan")), torch.full_like(x, float("nan"))
    da, db = blank(a, widths[0], torch.float32), blank(bt, widths[1], torch.float32)
    drop: dict[str, Any] = {"places": places, "module_seed": _lora_seeds(0)[1]}
    of_a, of_b, of_da, of_db = (
        Factors([part if len(part) else None for part in slab.split(ranks)], slab.shape[1]) for slab in (a, bt, da, db)
    )
    lora.shrink(x, of_a, s, tables, table, scaled=False, **drop)
    lora.expand(s, of_b, y, tables, table, scaled=True)
    lora.shrink(dy, of_b, ds, tables, table, scaled=True)
    lora.expand(ds, of_a, dx, tables, table, scaled=False, **drop)
    lora.wgrad(ds, x, of_da, tables, table, scaled=False, **drop)
    lora.wgrad(s, dy, of_db, tables, table, scaled=True)
    parts = [y.split(lengths), dx.split(lengths), da.split(ranks), db.split(ranks)]
    names = ("y", "dx", "da", "db")
    return {index: dict(zip(names, of_task, strict=True)) for index, *of_task in zip(company, *parts, strict=True)}


def _lora_wanted(
    device: torch.device, tasks: list[Any], widths: tuple[int, int], dtype: torch.dtype, index: int
) -> dict[str, torch.Tensor]:
    from peft_mux.kernels import philox

    x, dy, a, bt = (value.double() for value in _lora_task(device, tasks[index], widths, dtype, index).values())
    scale, probability = 0.5 + index, tasks[index][2]
    mask = torch.ones_like(x)
    if probability:
        step_seed, module_seed = _lora_seeds(index)
        keep = philox.keep_mask(step_seed ^ module_seed, torch.arange(len(x), device=device), x.shape[1], probability)
        mask = keep.double() * philox.keep_scale(probability)
    s, ds = (x * mask) @ a.t(), scale * (dy @ bt.t())
    return {"y": scale * (s @ bt), "dx": mask * (ds @ a), "da": ds.t() @ (x * mask), "db": scale * (s.t() @ dy)}
