"""Checks of `benchmarks.gpu`: tasks together against plain PEFT in fp32, by gradients and by trained adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.backbones import llama
from benchmarks.gpu.checks.small import SMALL, TINY, small_workload, work_of
from benchmarks.gpu.checks.trainer import EPSILON
from benchmarks.gpu.rehearsal import stand_ins
from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.problem import greater, relative_error

GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 1e-4
"""Relative Frobenius error of each parameter's gradient and of each adapter after all steps."""
NUM_STEPS = 20


def plain_peft_rows(settings: Settings) -> Iterator[Row]:
    """Yield the errors of the first gradients and of the adapters after 20 steps, over three tasks of other ranks."""
    shape = TINY if settings.is_rehearsal else SMALL
    workload = small_workload(shape, NUM_STEPS - 4)
    ours, ours_trained = _together(settings, shape, workload)
    gradients, weights = 0.0, 0.0
    worst = ""
    for index, task in enumerate(workload.tasks):
        theirs, theirs_trained = _alone(settings, shape, workload, index)
        for name, wanted in theirs.items():
            error = relative_error(ours[task.name][name], wanted)
            if not error <= gradients:  # NaN too
                gradients, worst = error, f"{task.name}: {name}"
        own, wanted = (torch.cat([one.flatten() for one in found.values()])
                       for found in (ours_trained[task.name], theirs_trained))  # fmt: skip
        weights = greater(relative_error(own, wanted), weights)
    yield "gradients by parameter", {
        "error": gradients, "worst": worst, "tolerance": GRADIENT_TOLERANCE, "is_right": gradients <= GRADIENT_TOLERANCE
    }  # fmt: skip
    yield f"adapters after {NUM_STEPS} steps", {
        "error": weights, "tolerance": WEIGHT_TOLERANCE, "is_right": weights <= WEIGHT_TOLERANCE
    }  # fmt: skip


Tensors = dict[str, torch.Tensor]


def _together(settings: Settings, shape: Any, workload: Any) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Return the first gradients and the last weights of each task by PEFT's names, trained in one stream."""
    from peft_mux.engine.executor import Executor
    from peft_mux.modeling.model import MultiTaskPeftModel

    backbone = llama(settings, shape).float()
    configs = {task.name: task.lora_config() for task in workload.tasks}
    seeds = {task.name: task.seed for task in workload.tasks}
    model = MultiTaskPeftModel(backbone, configs, seeds=seeds, verify=False).train()
    parameters = {name: model.task_parameters(name) for name in configs}
    for name in configs:
        model.registry.slab_of(name).bind_gradients()
    optimizers = [_adamw(list(own.values()), workload) for own in parameters.values()]
    executor, first = Executor(model), {}
    with stand_ins(settings):
        for step in range(NUM_STEPS):
            executor.run(work_of(workload, step))
            if step == 0:
                first = {task: {name: p.grad.clone() for name, p in own.items()} for task, own in parameters.items()}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            for name in configs:
                model.registry.slab_of(name).refresh_copies()
    return first, {task: {name: p.detach() for name, p in own.items()} for task, own in parameters.items()}


def _alone(settings: Settings, shape: Any, workload: Any, index: int) -> tuple[Tensors, Tensors]:
    """Return the same of one task by plain PEFT, a row at a time."""
    from peft import get_peft_model

    task = workload.tasks[index]
    backbone = llama(settings, shape).float()
    torch.manual_seed(task.seed)
    model = get_peft_model(backbone, task.lora_config())
    model.train()
    parameters = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, first = _adamw(list(parameters.values()), workload), {}
    for step in range(NUM_STEPS):
        rows = task.batches[step]
        num_targets = sum(label >= 0 for row in rows for label in row["labels"][1:])
        for row in rows:
            ids, labels = (torch.tensor([row[key]], device=settings.device) for key in ("input_ids", "labels"))
            logits = model(input_ids=ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
            (loss / num_targets).backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
    return first, {name: p.detach() for name, p in parameters.items()}


def _adamw(parameters: list[Any], workload: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=workload.learning_rate, weight_decay=0.0, eps=EPSILON)
