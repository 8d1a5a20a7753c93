"""The part `default run` of `benchmarks.gpu`: `MultiTaskTrainer.train()` as users call it, on rows of unequal lengths.

For comparison, the same rows go through the frozen backbone alone (the floor), and PEFT trains them task by task
without padding, with Liger if it is installed: what is gained over the best that one task at a time can do. With the
fewest rows also PEFT with padding, and all tasks in one padded batch (the SL-PEFT of MuxTune). Steps are timed with
everything that a user waits for: packing, callbacks and updates. The last steps are traced, for the share of time in
which the GPU has nothing to do, and the predicted peak of memory is compared with the measured one. TRL with its
defaults follows once, if it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import roofline
from benchmarks.gpu.backbones import Backbones
from benchmarks.gpu.profiler import StepWatch
from benchmarks.gpu.rehearsal import stand_ins
from benchmarks.gpu.report import Deadline, Row
from benchmarks.gpu.roofline import Backbone
from benchmarks.gpu.settings import Settings, free
from benchmarks.gpu.train import (
    MOST_PASS_TOKENS,
    flops_per_token,
    loss_difference,
    loss_tolerance,
    path_verdicts,
    peak_flops,
    too_large,
    train_safely,
)
from benchmarks.gpu.trainers import counted_paths
from peft_mux.modeling.backbone.liger import has_liger, is_fused, unfuse

NUM_STEPS, NUM_WARM_UP, NUM_TRACED = 8, 2, 2
"""The first ones compile and allocate; the last ones are traced, and not timed."""
BASELINE_STEPS = 4
TRL_S = 60
"""Seconds that must be left in the part: 25 for TRL, the rest for the steps of 8K tokens."""
BASELINES = {
    "floor": "the frozen backbone",
    "packed": "PEFT, packed",
    "hf": "PEFT, padded",
    "padded": "padded joint batch",
}
BATCH_SIZES = {"1K": 2, "4K": 10, "8K": 20}
"""Rows of a step of each of 8 tasks, by tokens of their step together."""


def default_part(settings: Settings, deadline: Deadline, backbones: Backbones) -> Iterator[Row]:
    """Yield for each batch size the baseline and the default run; for the largest one also the run without Liger."""
    from benchmarks.training.workloads import make_workload

    shape = Backbone(32, 2, 48, 4, 64) if settings.is_rehearsal else roofline.LLAMA_8B.of_layers(settings.num_layers)
    num_tasks = 3 if settings.is_rehearsal else 8
    for tokens, batch_size in {"tiny": 4}.items() if settings.is_rehearsal else BATCH_SIZES.items():
        if not deadline.has():
            yield f"{tokens} tokens a step", {"skipped": "the time budget is spent"}
            continue
        workload = make_workload(
            "nonuniform", num_tasks=num_tasks, num_steps=NUM_STEPS, vocab_size=shape.vocab_size, batch_size=batch_size
        )
        baselines: dict[str, dict[str, Any]] = {}
        for contender, title in BASELINES.items():
            # The padded ones fit into memory with the fewest rows alone.
            if contender in ("floor", "packed") or tokens in ("1K", "tiny"):
                baselines[contender] = _baseline(settings, backbones, shape, workload, contender, baselines)
                yield f"{tokens} tokens a step: {title}", baselines[contender]
        row = _measured(settings, backbones, shape, workload, use_liger="auto")
        row |= _compared(settings, shape, workload, row, baselines)
        yield f"{tokens} tokens a step: default run", row
        if tokens == list(BATCH_SIZES)[-1] and has_liger() and deadline.has():
            yield (
                f"{tokens} tokens a step: without Liger",
                _measured(settings, backbones, shape, workload, use_liger=False),
            )
        if tokens in ("4K", "tiny"):
            yield f"{tokens} tokens a step: TRL", _trl(settings, deadline, backbones, shape, workload, row)


def _baseline(
    settings: Settings,
    backbones: Backbones,
    shape: Backbone,
    workload: Any,
    contender: str,
    others: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return what a contender takes for the first steps of a workload, and how far its losses are from another's."""
    first = [replace(task, rows=task.rows[: BASELINE_STEPS * task.batch_size]) for task in workload.tasks]
    steps = replace(workload, tasks=tuple(first), num_steps=BASELINE_STEPS)
    ranks = [0] if contender == "floor" else [task.rank for task in workload.tasks]
    trained = (sum(ranks) if contender == "padded" else max(ranks)) * shape.rank_weights
    kept = contender if contender in roofline.KEPT else "hf"
    if contender == "padded":
        longest = max(len(row["input_ids"]) for task in workload.tasks for row in task.rows)
        num_tokens = longest * sum(task.batch_size for task in workload.tasks)
        if reason := too_large(settings, shape, contender, num_tokens, trained):
            return {"skipped": reason}
    pass_tokens = roofline.pass_tokens(shape, kept, trained, settings.device_bytes, MOST_PASS_TOKENS)
    row = train_safely(settings, backbones, shape, contender, steps, pass_tokens)
    if "steps_s" in row:
        timed = zip(_num_tokens(steps)[NUM_WARM_UP:], row["steps_s"][NUM_WARM_UP:], strict=True)
        row |= {"pass_tokens": pass_tokens, "tokens_per_s": statistics.median(tokens / s for tokens, s in timed)}
        reference = next((other["losses"] for other in others.values() if "losses" in other), row["losses"])
        row["loss_difference"] = loss_difference(row["losses"], reference)
        row["is_right"] = row["loss_difference"] <= loss_tolerance(settings)
    return row


def _compared(
    settings: Settings, shape: Backbone, workload: Any, row: dict[str, Any], baselines: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return how the default run compares with the baselines that ran, and whether it is right."""
    found: dict[str, Any] = {"mfu": None}
    verdicts = [row["is_right"], *path_verdicts(settings, row)]
    if (peak := peak_flops(settings.device)) is not None:
        found["mfu"] = flops_per_token(shape, workload) * row["tokens_per_s"] / peak
    for contender, baseline in baselines.items():
        if "losses" in baseline:
            found[f"gain_over_{contender}"] = row["tokens_per_s"] / baseline["tokens_per_s"]
            found["loss_difference"] = loss_difference(row["losses"], baseline["losses"])
            verdicts.append(found["loss_difference"] <= loss_tolerance(settings))
    return {**found, "is_right": all(verdicts)}


def _trl(
    settings: Settings,
    deadline: Deadline,
    backbones: Backbones,
    shape: Backbone,
    workload: Any,
    default: dict[str, Any],
) -> dict[str, Any]:
    """Return what TRL takes with its defaults, if it is installed and the later parts leave time for it."""
    if any(importlib.util.find_spec(name) is None for name in ("trl", "datasets")):
        return {"skipped": "trl or datasets is not installed"}
    if not deadline.has(TRL_S):
        return {"skipped": f"the time budget is spent: needs {TRL_S} s, and what follows"}
    row = _baseline(settings, backbones, shape, workload, "trl", {})
    backbones.drop()
    if "losses" in row:
        row["loss_difference"] = loss_difference(row["losses"], default["losses"])
        row["is_right"] = row["loss_difference"] <= loss_tolerance(settings)
        row["gain_of_default_run"] = default["tokens_per_s"] / row["tokens_per_s"]
    return row


def _num_tokens(workload: Any) -> list[int]:
    steps = range(workload.num_steps)
    return [sum(len(row["input_ids"]) for task in workload.tasks for row in task.batches[step]) for step in steps]


def _measured(
    settings: Settings, backbones: Backbones, shape: Backbone, workload: Any, *, use_liger: bool | str
) -> dict[str, Any]:
    from benchmarks.training.mux import quiet_arguments
    from peft_mux import MultiTaskTrainer
    from peft_mux.modeling.adapters.injection import detach

    tasks = workload.to_tasks()
    free(settings.device)
    is_cuda, backbone = settings.device.type == "cuda", backbones.of(shape)
    recorder = StepWatch(settings.device, NUM_STEPS, NUM_TRACED)
    with tempfile.TemporaryDirectory() as folder, stand_ins(settings), counted_paths() as calls:
        args = quiet_arguments(
            folder,
            use_cpu=not is_cuda,
            bf16=not settings.is_rehearsal,
            use_liger_kernel=use_liger,
            lr_scheduler_type="constant",
            logging_strategy="steps",
        )
        trainer = recorder.trainer = MultiTaskTrainer(backbone, args, tasks, callbacks=[recorder])
        plan = trainer.plan()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(settings.device)
        trainer.train()
        events = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        shortages = [event for event in events if event.get("event") == "out_of_memory"]
        statuses = sorted({trainer.table[task.name].status.value for task in tasks})
    trainer = recorder.trainer = None
    has_fused_layers = is_fused(backbone)
    unfuse(backbone)
    detach(backbone)
    steps_s, num_tokens = recorder.steps_s, _num_tokens(workload)
    timed = slice(NUM_WARM_UP, NUM_STEPS - NUM_TRACED)
    found = {
        "steps_s": steps_s,
        "losses": recorder.losses,
        "tokens_per_step": num_tokens,
        "tokens_per_s": statistics.median(n / s for n, s in zip(num_tokens[timed], steps_s[timed], strict=True)),
        "gpu_idle_share": recorder.profile.get("idle_share"),
        "profile": recorder.profile,
        "has_fused_layers": has_fused_layers,
        "planned_passes": sum(htask.micro_batches for htask in plan.htasks),
        "planned_step_s": plan.step_s,
        "predicted_peak_bytes": max(plan.peak_bytes),
        "limit_bytes": plan.limit_bytes,
        "out_of_memory": shortages,
        # What plans count on the meta device goes through slices.
        "path": "kernels" if calls["kernels"] else "slices",
        "is_right": statuses == ["succeeded"],
    }
    if is_cuda:
        found |= {
            "peak_bytes": torch.cuda.max_memory_allocated(settings.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(settings.device),
        }
        found["peak_over_predicted"] = found["peak_bytes"] / found["predicted_peak_bytes"]
        found["reserved_over_predicted"] = found["reserved_bytes"] / found["predicted_peak_bytes"]
    return found
