"""Checks of `benchmarks.gpu`: whole runs of `MultiTaskTrainer.train()`, each task alone and all together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.backbones import llama
from benchmarks.gpu.checks.small import SMALL, TINY, small_workload
from benchmarks.gpu.profiler import StepWatch
from benchmarks.gpu.rehearsal import stand_ins
from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings, free
from benchmarks.gpu.trainers import counted_paths
from benchmarks.kernels.problem import greater

TOLERANCES = {"float32": {"losses": 1e-5, "weights": 1e-4}, "bfloat16": {"losses": 2e-2, "weights": 5e-2}}
"""Greatest relative difference of a loss of any step, and relative Frobenius difference of a final adapter."""
NUM_STEPS = 8
EPSILON = 1e-4
"""Of AdamW. With 1e-8 the first steps turn the rounding of small gradients into steps of full size: on an H100 the
weights of one task differed by 1.1e-4 in fp32, almost all of it in 0.1 % of the weights."""


class Outcome(NamedTuple):
    """What a run has left.

    Attributes:
        losses: of each task at each of its steps.
        weights: final adapter of each task, all parameters in one vector.
        statuses: how each task has ended.
        calls: how often groups of layers were computed through "kernels" and through "slices".
    """

    losses: dict[str, list[float]]
    weights: dict[str, torch.Tensor]
    statuses: dict[str, str]
    calls: dict[str, int]


def trainer_rows(settings: Settings, dtype: torch.dtype) -> Iterator[Row]:
    """Yield how far runs of each task alone are from the run of all, and whether the adapters load as plain PEFT."""
    kind = str(dtype).removeprefix("torch.")
    shape = TINY if settings.is_rehearsal else SMALL
    tasks = _tasks(shape)
    with tempfile.TemporaryDirectory() as folder:
        together = _run(settings, shape, tasks, dtype, Path(folder) / "together")
        found = {"losses": 0.0, "weights": 0.0}
        for task in tasks:
            alone = _run(settings, shape, [task], dtype, Path(folder) / f"alone-{task.name}")
            for mine, theirs in zip(alone.losses[task.name], together.losses[task.name], strict=True):
                found["losses"] = greater(abs(mine - theirs) / abs(mine), found["losses"])
            one, other = alone.weights[task.name], together.weights[task.name]
            found["weights"] = greater(float((one - other).norm() / one.norm()), found["weights"])
        limits = TOLERANCES[kind]
        statuses = sorted(set(together.statuses.values()))
        # In addition to the steps, what plans count on the meta device goes through slices.
        path = "kernels" if together.calls["kernels"] else "slices"
        is_right = statuses == ["succeeded"] and all(found[part] <= limits[part] for part in limits)
        is_right = is_right and path == ("kernels" if settings.wants_kernels else "slices")
        yield f"trainer {kind}", {
            **found, "tolerance_losses": limits["losses"], "tolerance_weights": limits["weights"],
            "statuses": ", ".join(statuses), "path": path, "is_right": is_right,
        }  # fmt: skip
        yield f"trainer {kind} adapters", _loads(settings, shape, Path(folder) / "together", together)


def _tasks(shape: Any) -> list[Any]:
    """Return three tasks of other ranks, rates and lengths, one with dropout."""
    from peft import LoraConfig

    from peft_mux import Task

    own = zip(small_workload(shape).tasks, (0.0, 0.1, 0.0), (1e-3, 3e-4, 3e-3), strict=True)
    return [
        Task(
            name=task.name,
            peft_config=LoraConfig(r=task.rank, lora_dropout=dropout, target_modules="all-linear"),
            train_dataset=list(task.rows),
            train_batch_size=task.batch_size,
            learning_rate=rate,
            adam_epsilon=EPSILON,
            max_steps=NUM_STEPS,
            seed=task.seed,
        )
        for task, dropout, rate in own
    ]


def _run(settings: Settings, shape: Any, tasks: Sequence[Any], dtype: torch.dtype, folder: Path) -> Outcome:
    """Train on a new backbone, as a user would."""
    from benchmarks.training.mux import quiet_arguments
    from peft_mux import MultiTaskTrainer

    is_bf16 = dtype is torch.bfloat16
    args = quiet_arguments(str(folder), use_cpu=settings.device.type == "cpu", bf16=is_bf16)
    recorder = StepWatch(settings.device, NUM_STEPS, 0)
    with counted_paths() as calls, stand_ins(settings):
        # In fp32 as Trainer's users hand it over: bf16 is autocast's part.
        backbone = llama(settings, shape).float()
        trainer = MultiTaskTrainer(backbone, args, list(tasks), callbacks=[recorder])
        recorder.trainer = trainer
        trainer.train()
        trainer.save_model()
    weights = {
        task.name: torch.cat([p.detach().double().flatten() for p in trainer.model.task_parameters(task.name).values()])
        for task in tasks
    }
    statuses = {task.name: trainer.table[task.name].status.value for task in tasks}
    trainer = recorder.trainer = None
    free(settings.device)
    losses = {task.name: list(own) for task, own in zip(tasks, zip(*recorder.losses, strict=True), strict=True)}
    return Outcome(losses, weights, statuses, dict(calls))


def _loads(settings: Settings, shape: Any, folder: Path, outcome: Outcome) -> dict[str, Any]:
    """Whether plain PEFT loads each saved adapter, with the weights that training ended with."""
    from peft import PeftModel

    missing = []
    for name, wanted in outcome.weights.items():
        model = PeftModel.from_pretrained(llama(settings, shape).float(), str(folder / name))
        loaded = [p.detach().double().norm() ** 2 for key, p in model.named_parameters() if "lora_" in key]
        norm = torch.stack(loaded).sum().sqrt()
        if abs(float(norm / wanted.norm()) - 1) > 1e-6:
            missing.append(name)
    return {"wrong": ", ".join(missing), "is_right": not missing}
