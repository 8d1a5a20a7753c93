"""Checks of `benchmarks.gpu`: a captured pass is the eager pass, in losses and in every gradient, step after step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig

from benchmarks.gpu.backbones import llama
from benchmarks.gpu.checks.small import SMALL, TINY, small_workload, work_of
from benchmarks.gpu.rehearsal import graphs_here, stand_ins
from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.problem import greater, relative_error

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Relative error against the eager pass, whose base products are of another height and may round differently."""
NUM_STEPS = 3


def captured_rows(settings: Settings) -> Iterator[Row]:
    """Yield steps of other lengths and draws, replayed and eager, and a task of NaN among replays."""
    if not settings.wants_kernels:
        yield "captured pass", {"skipped": "no GPU, and TRITON_INTERPRET is not 1"}
        return
    shape = TINY if settings.is_rehearsal else SMALL
    workload = small_workload(shape)
    eager, replayed = (_executor(settings, shape, workload, is_captured) for is_captured in (False, True))
    found = {"losses": 0.0, "gradients": 0.0}
    with stand_ins(settings, with_attention=True):
        for step in range(NUM_STEPS):
            wanted, own = (_step(executor, workload, step) for executor in (eager, replayed))
            for part in found:
                for name, value in own[part].items():
                    found[part] = greater(relative_error(value, wanted[part][name]), found[part])
        captures = replayed.runner.num_captures
        limit = TOLERANCES[settings.dtype]
        is_right = captures > 0 and all(error <= limit for error in found.values())
        yield "captured pass", {**found, "num_captures": captures, "tolerance": limit, "is_right": is_right}
        yield "captured pass NaN isolation", _nan_isolation(replayed, workload)


def _executor(settings: Settings, shape: Any, workload: Any, is_captured: bool) -> Any:
    """Return an executor over a model of its own; both models hold the same numbers."""
    from peft_mux.engine.executor import Executor
    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.parallel.cuda_graphs import CapturedPasses

    dropouts = (0.0, 0.1, 0.0)
    configs = {
        task.name: LoraConfig(r=task.rank, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
        for task, dropout in zip(workload.tasks, dropouts, strict=True)
    }
    model = MultiTaskPeftModel(
        llama(settings, shape), configs, seeds={task.name: task.seed for task in workload.tasks}, verify=False
    ).train()
    for name in configs:
        model.registry.slab_of(name).bind_gradients()
    executor = Executor(model, bf16=not settings.is_rehearsal)
    if is_captured:
        executor.runner = CapturedPasses(model, executor.precision, graphs_here(settings))
    return executor


def _step(executor: Any, workload: Any, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return losses and gradients of a step, and set the gradients to zero."""
    result = executor.run(work_of(workload, step))
    gradients = {}
    for task in workload.tasks:
        for number, page in enumerate(executor.model.registry.slab_of(task.name).pages):
            gradients[f"{task.name}.{number}"] = page.values.grad.clone()
            page.values.grad.zero_()
    return {"losses": {name: loss.detach() for name, loss in result.losses.items()}, "gradients": gradients}


def _nan_isolation(executor: Any, workload: Any) -> dict[str, Any]:
    """Replay a step with one task's weights NaN: its loss shows it, and nothing else changes."""
    poisoned = workload.tasks[1].name
    for page in executor.model.registry.slab_of(poisoned).pages:
        page.values.data.fill_(float("nan"))
    found = _step(executor, workload, 0)
    finite = {name: bool(loss.isfinite()) for name, loss in found["losses"].items()}
    leaks = [
        name
        for name, gradient in found["gradients"].items()
        if not name.startswith(f"{poisoned}.") and not bool(gradient.isfinite().all())
    ]
    is_right = finite == {name: name != poisoned for name in finite} and not leaks
    return {"finite_losses": ", ".join(n for n, ok in finite.items() if ok), "leaks": ", ".join(leaks),
            "is_right": is_right}  # fmt: skip
