"""The part `default run` of `benchmarks.gpu`: `MultiTaskTrainer.train()` as users call it, on rows of unequal lengths.

For comparison, the same rows go through the frozen backbone alone (the floor), and PEFT trains them task by task
without padding, with Liger if it is installed: what is gained over the best that one task at a time can do. With the
fewest rows also PEFT with padding, and all tasks in one padded batch (the SL-PEFT of MuxTune). Steps are timed with
everything that a user waits for: packing, callbacks and updates; `host_s` is the host's part, until all passes of a
step are launched. The last steps are traced, for the share of time in which the GPU has nothing to do and the time of
each group of kernels, and the predicted peak of memory is compared with the measured one. Settings are then changed one
by one: CUDA graphs in small steps, short passes and no Liger in large ones. The part `trl` is TRL with its defaults.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

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
BASELINES = {
    "floor": "the frozen backbone",
    "packed": "PEFT, packed",
    "hf": "PEFT, padded",
    "padded": "padded joint batch",
}
BATCH_SIZES = {"1K": 3, "2K": 5, "8K": 20, "24K": 60}
"""Rows of a step of each of 8 tasks, by tokens of their step together; with most of them only the default run."""
SHORT_PASSES = 4096
"""Tokens of a pass, for comparison with those that memory allows."""


def default_part(settings: Settings, deadline: Deadline, backbones: Backbones) -> Iterator[Row]:
    """Yield for each number of tokens the baselines, the default run, and what other settings change."""
    if settings.device.type == "cuda":
        yield "Liger's kernels", {"is_right": has_liger(), "fix": "pip install liger-kernel"}
    for tokens in ("tiny",) if settings.is_rehearsal else BATCH_SIZES:
        if not deadline.has():
            yield f"{tokens} tokens a step", {"skipped": "the time budget is spent"}
            continue
        shape, workload = _workload(settings, tokens)
        baselines: dict[str, dict[str, Any]] = {}
        for contender, title in BASELINES.items() if tokens != "24K" else ():
            # The padded ones fit into memory with the fewest rows alone.
            if contender in ("floor", "packed") or tokens in ("1K", "tiny"):
                baselines[contender] = _baseline(settings, backbones, shape, workload, contender, baselines)
                yield f"{tokens} tokens a step: {title}", baselines[contender]
        row = _measured(settings, backbones, shape, workload)
        row |= _compared(settings, shape, workload, row, baselines)
        yield f"{tokens} tokens a step: default run", row
        for title, changed in _changes(settings, tokens, row).items():
            if deadline.has():
                try:
                    other = _measured(settings, backbones, shape, workload, **changed)
                    other["tokens_per_s_over_default"] = other["tokens_per_s"] / row["tokens_per_s"]
                except Exception as error:  # the larger steps are still measured
                    other = {"failed": f"{type(error).__name__}: {error}"[:300], "is_right": False}
                if "failed" in other:
                    backbones.drop()
                yield f"{tokens} tokens a step: {title}", other


def _changes(settings: Settings, tokens: str, row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings that are compared with the default run, by their names."""
    changes: dict[str, dict[str, Any]] = {}
    if tokens in ("1K", "2K") and settings.device.type == "cuda":
        has_graphs = row["num_captures"] > 0
        changes["without CUDA graphs" if has_graphs else "with CUDA graphs"] = {"cuda_graphs": not has_graphs}
    if tokens in ("8K", "24K", "tiny"):
        most = 64 if settings.is_rehearsal else SHORT_PASSES
        changes[f"passes of {most} tokens"] = {"max_tokens_per_micro_batch": most}
    if tokens == "8K":
        changes["without Liger"] = {"use_liger_kernel": False}
    return changes


def trl_part(settings: Settings, deadline: Deadline, backbones: Backbones) -> Iterator[Row]:
    """Yield what TRL takes with its defaults for steps of 2K tokens, and the default run on the same rows."""
    del deadline
    if any(importlib.util.find_spec(name) is None for name in ("trl", "datasets")):
        yield "TRL", {"skipped": "trl or datasets is not installed"}
        return
    shape, workload = _workload(settings, "tiny" if settings.is_rehearsal else "2K")
    default = _measured(settings, backbones, shape, workload)
    yield "default run", default
    row = _baseline(settings, backbones, shape, workload, "trl", {})
    backbones.drop()
    if "losses" in row:
        row["loss_difference"] = loss_difference(row["losses"], default["losses"])
        row["is_right"] = row["loss_difference"] <= loss_tolerance(settings)
        row["gain_of_default_run"] = default["tokens_per_s"] / row["tokens_per_s"]
    yield "TRL", row


def _workload(settings: Settings, tokens: str) -> tuple[Backbone, Any]:
    """Return the shape of the backbone, and the tasks with steps of so many tokens."""
    from benchmarks.training.workloads import make_workload

    shape = Backbone(32, 2, 48, 4, 64) if settings.is_rehearsal else roofline.LLAMA_8B.of_layers(settings.num_layers)
    num_tasks, batch_size = (3, 4) if settings.is_rehearsal else (8, BATCH_SIZES[tokens])
    options = {"num_tasks": num_tasks, "num_steps": NUM_STEPS, "batch_size": batch_size}
    return shape, make_workload("nonuniform", vocab_size=shape.vocab_size, **options)


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
    verdicts = [row["is_right"], *path_verdicts(settings, {"path": row["path"]})]
    if settings.device.type == "cuda":
        verdicts.append(row["has_fused_layers"])
    if (peak := peak_flops(settings.device)) is not None:
        found["mfu"] = flops_per_token(shape, workload) * row["tokens_per_s"] / peak
    for contender, baseline in baselines.items():
        if "losses" in baseline:
            found[f"gain_over_{contender}"] = row["tokens_per_s"] / baseline["tokens_per_s"]
            found["loss_difference"] = loss_difference(row["losses"], baseline["losses"])
            verdicts.append(found["loss_difference"] <= loss_tolerance(settings))
    return {**found, "is_right": all(verdicts)}


def _num_tokens(workload: Any) -> list[int]:
    steps = range(workload.num_steps)
    return [sum(len(row["input_ids"]) for task in workload.tasks for row in task.batches[step]) for step in steps]


def _measured(
    settings: Settings, backbones: Backbones, shape: Backbone, workload: Any, **changed: Any
) -> dict[str, Any]:
    """Return what `MultiTaskTrainer.train()` takes, with some of its arguments changed."""
    from benchmarks.training.mux import quiet_arguments
    from peft_mux import MultiTaskTrainer
    from peft_mux.modeling.adapters.injection import detach

    tasks = workload.to_tasks()
    free(settings.device)
    is_cuda, backbone = settings.device.type == "cuda", backbones.of(shape)
    recorder = StepWatch(settings.device, NUM_STEPS, NUM_TRACED)
    with (
        tempfile.TemporaryDirectory() as folder,
        stand_ins(settings),
        counted_paths() as calls,
        _host_times() as host_s,
    ):
        args = quiet_arguments(
            folder,
            use_cpu=not is_cuda,
            bf16=not settings.is_rehearsal,
            lr_scheduler_type="constant",
            logging_strategy="steps",
            **changed,
        )
        trainer = recorder.trainer = MultiTaskTrainer(backbone, args, tasks, callbacks=[recorder])
        plan = trainer.plan()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(settings.device)
        trainer.train()
        events = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        shortages = [event for event in events if event.get("event") == "out_of_memory"]
        num_captures = getattr(trainer._placement.executor.runner, "num_captures", 0)
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
        "host_s": statistics.median(host_s[timed]),
        "num_captures": num_captures,
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


@contextlib.contextmanager
def _host_times() -> Iterator[list[float]]:
    """Note for each step the seconds until the executor has launched its passes; nothing in them waits for a GPU."""
    from peft_mux.engine.executor import Executor

    plain, seconds = Executor.run, []

    def timed(executor: Executor, *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return plain(executor, *args)
        finally:
            seconds.append(time.perf_counter() - started)

    with mock.patch.object(Executor, "run", timed):
        yield seconds
