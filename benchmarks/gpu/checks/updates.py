"""Checks of `benchmarks.gpu`: the joint update of all tasks on gradients of real passes, and one task poisoned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.backbones import llama
from benchmarks.gpu.checks.small import SMALL, TINY, passes_of, small_workload
from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.trainers import started_tasks
from benchmarks.kernels.problem import greater, relative_error

TOLERANCE = 1e-5
"""Relative Frobenius error of weights against float64."""


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
    is_right = found["weights"] <= TOLERANCE
    yield "task table", {**found, "tolerance": TOLERANCE, "is_right": is_right}
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
