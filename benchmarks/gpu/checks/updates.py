"""Checks of `benchmarks.gpu`: the joint update of all tasks, by itself and in a run.

`adamw`: pages of several sizes and settings against `torch.optim.AdamW` in float64, alone and together, and the pages
of a task that is not finite. `task table`: `TaskTable.apply` on gradients of a real pass, one task poisoned.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.backbones import llama
from benchmarks.gpu.checks.small import SMALL, TINY, passes_of, small_workload
from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.trainers import started_tasks
from benchmarks.kernels.problem import TOLERANCES, greater, relative_error

NUM_STEPS = 4
UPDATE_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: TOLERANCES[torch.bfloat16]}
"""Relative Frobenius error of weights and moments against float64."""


class UpdateCase(NamedTuple):
    """How one task steps."""

    size: int
    rate: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


CASES = (
    UpdateCase(1, 1e-2, (0.9, 0.999), 0.0, 0.0),
    UpdateCase(2049, 1e-3, (0.9, 0.95), 0.1, 1.0),
    UpdateCase(100_003, 3e-3, (0.5, 0.9), 0.0, 0.5),
    UpdateCase(4096, 1e-2, (0.9, 0.999), 0.3, 1e6),
)
_PARTS = ("values", "exp_avg", "exp_avg_sq")


# ----------------------------------------------------------------------- AdamW


def adamw_rows(settings: Settings) -> Iterator[Row]:
    """Yield the joint step of pages of each dtype that adapters are held in."""
    for dtype in (torch.float32,) if settings.is_rehearsal else (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        together = _stepped(settings, dtype, range(len(CASES)))
        found = dict.fromkeys(_PARTS, 0.0)
        of_torch = 0.0
        for index, own in together.items():
            wanted = _by_torch(settings, dtype, index)
            plain = _by_torch(settings, dtype, index, computed_in=dtype)
            of_torch = greater(relative_error(plain["values"], wanted["values"]), of_torch)
            for part in _PARTS:
                found[part] = greater(relative_error(own[part], wanted[part]), found[part])
        limit = UPDATE_TOLERANCES[dtype]
        # In bf16 the error comes from rounding weights; torch's own AdamW has as much.
        limits = dict.fromkeys(_PARTS, limit) | {"values": max(limit, 1.05 * of_torch)}
        is_right = all(error <= limits[part] for part, error in found.items())
        yield f"adamw {kind}", {**found, "values_of_torch": of_torch, "tolerance": limit, "is_right": is_right}
        alone = {index: _stepped(settings, dtype, [index])[index] for index in together}
        yield f"adamw {kind} co-location", _same(alone, together)
        poisoned = _stepped(settings, dtype, range(len(CASES)), poisoned=2)
        start = _page(settings, dtype, 2)
        found_same = _same({i: poisoned[i] for i in poisoned if i != 2}, together)
        is_kept = torch.equal(poisoned[2]["values"], start["values"])
        yield f"adamw {kind} NaN isolation", {
            **found_same, "is_kept": is_kept, "is_right": found_same["is_right"] and is_kept
        }  # fmt: skip


def _same(own: dict[int, dict[str, torch.Tensor]], wanted: dict[int, dict[str, torch.Tensor]]) -> dict[str, Any]:
    differing = [
        f"task {index} {part}"
        for index, pages in own.items()
        for part in _PARTS
        if not torch.equal(pages[part], wanted[index][part])
    ]
    return {"differing": ", ".join(differing), "is_right": not differing}


def _size(settings: Settings, index: int) -> int:
    return min(CASES[index].size, 2500) if settings.is_rehearsal else CASES[index].size


def _page(settings: Settings, dtype: torch.dtype, index: int) -> dict[str, torch.Tensor]:
    values = torch.randn(_size(settings, index), generator=torch.Generator().manual_seed(300 + index))
    values = values.to(settings.device, dtype)
    blank = {name: torch.zeros_like(values) for name in ("gradient", "exp_avg", "exp_avg_sq", "last_good")}
    return {"values": values, **blank}


def _gradient(settings: Settings, dtype: torch.dtype, index: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * index + step)
    drawn = torch.randn(_size(settings, index), generator=generator) * 10.0 ** (step - 2)  # limits bind at times
    return drawn.to(settings.device, dtype)


def _stepped(
    settings: Settings, dtype: torch.dtype, company: Sequence[int], poisoned: int | None = None
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the pages of each task after its steps together with the others; `poisoned` has a NaN in its loss."""
    from peft_mux.kernels.adamw import PageUpdate, foreach_update, total_norms

    pages = {index: _page(settings, dtype, index) for index in company}
    for step in range(NUM_STEPS):
        for index, page in pages.items():
            page["gradient"].copy_(_gradient(settings, dtype, index, step))
        norms = torch.stack([norm.float() for norm in total_norms([[page["gradient"]] for page in pages.values()])])
        losses = [float("nan") if index == poisoned else 1.0 for index in pages]
        verdicts = torch.stack([torch.tensor(losses, device=settings.device), norms])
        updates = [
            PageUpdate(
                **page,
                task=column,
                step=step + 1,
                rate=CASES[index].rate,
                betas=CASES[index].betas,
                eps=1e-8,
                weight_decay=CASES[index].weight_decay,
                max_grad_norm=CASES[index].max_grad_norm,
            )
            for column, (index, page) in enumerate(pages.items())
        ]
        foreach_update(updates, verdicts)
    return pages


def _by_torch(
    settings: Settings, dtype: torch.dtype, index: int, computed_in: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Return the same by `torch.optim.AdamW`, whose weights and moments have the dtype `computed_in`."""
    case = CASES[index]
    page = torch.nn.Parameter(_page(settings, dtype, index)["values"].to(computed_in))
    optimizer = torch.optim.AdamW([page], lr=case.rate, betas=case.betas, eps=1e-8, weight_decay=case.weight_decay)
    for step in range(NUM_STEPS):
        page.grad = _gradient(settings, dtype, index, step).to(computed_in)
        if case.max_grad_norm:
            torch.nn.utils.clip_grad_norm_([page], case.max_grad_norm)
        optimizer.step()
    state = optimizer.state[page]
    return {"values": page.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


# ------------------------------------------------------------------ TaskTable


def task_table_rows(settings: Settings) -> Iterator[Row]:
    """Yield steps of a run's table against float64 on the same gradients, and what a NaN loss does to the others."""
    from peft_mux.modeling.model import MultiTaskPeftModel

    shape = TINY if settings.is_rehearsal else SMALL
    workload = small_workload(shape, 1)
    configs = {task.name: task.lora_config() for task in workload.tasks}
    model = MultiTaskPeftModel(llama(settings, shape), configs, verify=False).train()
    table = started_tasks(settings, model, workload)
    exact = {name: _ExactTask(model.registry.slab_of(name), table[name]) for name in configs}
    found = {"weights": 0.0}
    for step in range(3):
        result = passes_of(settings, model, workload, step)
        for task in exact.values():
            task.step()
        good = _weights(model, workload.tasks[0].name)
        table.apply(result)
    for task in exact.values():
        found["weights"] = greater(task.error(), found["weights"])
    is_right = found["weights"] <= UPDATE_TOLERANCES[torch.float32]
    yield "task table", {**found, "tolerance": UPDATE_TOLERANCES[torch.float32], "is_right": is_right}
    yield "task table NaN isolation", _poisoned_step(settings, model, workload, table, good)


def _weights(model: Any, name: str) -> list[torch.Tensor]:
    return [page.values.detach().clone() for page in model.registry.slab_of(name).pages]


def _poisoned_step(
    settings: Settings, model: Any, workload: Any, table: Any, good: list[torch.Tensor]
) -> dict[str, Any]:
    """Take a step in which the first task's loss is NaN: it goes back to `good` and fails, the others step."""
    from peft_mux.task import TaskStatus

    names = [task.name for task in workload.tasks]
    before = {name: _weights(model, name) for name in names}
    result = passes_of(settings, model, workload, 3)
    result.losses[names[0]] = result.losses[names[0]] * float("nan")
    table.apply(result)
    has_failed = [name for name in names if table[name].status is TaskStatus.FAILED]
    has_moved = [name for name in names[1:] if not _all_equal(before[name], _weights(model, name))]
    is_good = _all_equal(good, _weights(model, names[0]))
    is_right = has_failed == names[:1] and has_moved == names[1:] and is_good
    return {
        "failed": ", ".join(has_failed), "stepped": ", ".join(has_moved), "is_last_good": is_good, "is_right": is_right
    }  # fmt: skip


def _all_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class _ExactTask:
    """A task's pages in float64, stepped by `torch.optim.AdamW` on the gradients that the real ones have."""

    def __init__(self, slab: Any, run: Any) -> None:
        self._slab, self._max_grad_norm = slab, run.hyper.max_grad_norm
        self._exact = [torch.nn.Parameter(page.values.detach().double()) for page in slab.pages]
        groups = [
            {"params": [own], "weight_decay": 0.0 if page.kind.endswith("stays") else run.hyper.weight_decay}
            for own, page in zip(self._exact, slab.pages, strict=True)
        ]
        settings = run.optimizer.optimizer.param_groups[0]
        betas, eps = copy.copy(settings["betas"]), settings["eps"]
        self._optimizer = torch.optim.AdamW(groups, lr=settings["lr"], betas=betas, eps=eps)

    def step(self) -> None:
        for own, page in zip(self._exact, self._slab.pages, strict=True):
            own.grad = page.values.grad.double()
        torch.nn.utils.clip_grad_norm_(self._exact, self._max_grad_norm)
        self._optimizer.step()

    def error(self) -> float:
        pairs = zip(self._slab.pages, self._exact, strict=True)
        return max(relative_error(page.values.detach(), own.detach()) for page, own in pairs)
