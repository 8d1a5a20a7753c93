"""The eight lines that a run prints first: what is trained, on what, how, and where it is written."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.errors import installed_version
from peft_mux.kernels.availability import reason_against_kernels
from peft_mux.modeling.backbone.liger import is_fused
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.units import MEMORY, bytes_text, step_time_text


def banner_lines(
    args: MultiTaskTrainingArguments,
    model: MultiTaskPeftModel,
    source: BackboneSource,
    runs: Sequence[TaskRun],
    plan: Plan,
    *,
    attention: str,
    processes: str,
    root: Path,
) -> list[str]:
    """Return the lines.

    Args:
        args: the arguments of the run.
        model: the whole model with the adapters of all tasks, possibly without weights.
        source: where its backbone comes from.
        runs: its tasks.
        plan: what runs together at first.
        attention: how packed sequences attend to themselves.
        processes: the processes and what each holds, in words; "" for a single one.
        root: folder of the run.
    """
    kind, dtype = type(model.backbone).__name__, str(source.dtype).removeprefix("torch.")
    name = source.model if isinstance(source.model, str) else getattr(source.config, "_name_or_path", "") or kind
    if processes:
        processes += ", optimizer states divided by task" if args.shard_optimizer else ""
        processes += ", gradients added in bf16" if args.reduce_dtype == "bfloat16" else ""
    notes = ", bf16 autocast" if args.bf16 and dtype != "bfloat16" else ""
    if any(coefficients := sorted({run.router_coefficient for run in runs})):
        notes += f", router_aux_loss_coef {_range(coefficients)}"
    elif hasattr(source.config.get_text_config(), "router_aux_loss_coef"):
        notes += ", routers without a balancing loss"
    adapter_parameters = [sum(own.numel() for own in model.task_parameters(name).values()) for name in model.tasks]
    num_parameters = model.backbone.num_parameters() - sum(adapter_parameters)
    kernels = reason_against_kernels(args.device)
    fused = "; norms, RoPE and MLPs by Liger" if is_fused(model.backbone) else ""
    saved = "nothing is saved" if args.save_strategy == "no" else "Ctrl-C ends the run with everything saved"
    versions = {name: installed_version(name) or "(checkout)" for name in ("peft-mux", "transformers", "peft")}

    ranks = [rank for run in runs if isinstance(rank := getattr(run.task.peft_config, "r", None), int)]
    rows = [len(run.task.train_dataset) for run in runs if hasattr(run.task.train_dataset, "__len__")]
    shares = [100 * count / max(num_parameters + count, 1) for count in adapter_parameters]
    num_streams, steps = len(runs) - len(rows), [run.num_steps for run in runs]
    tasks = [f"{len(runs)}"]
    tasks += [f"rank {_range(ranks)}"] if ranks else []
    tasks += [f"{_range([round(share, 3) for share in shares])} % trainable each"] if shares else []
    tasks += [f"{sum(rows):,} rows"] if rows else []
    tasks += [f"{num_streams} stream{'s' if num_streams > 1 else ''}"] if num_streams else []
    tasks += [f"{_range(steps)} step{'' if max(steps) == 1 else 's'}"]

    passes = sum(htask.micro_batches for htask in plan.htasks)
    planned = [f"{len(plan.htasks)} hTask{'' if len(plan.htasks) == 1 else 's'}"]
    planned += [f"{passes} pass{'' if passes == 1 else 'es'} a step"]
    planned += [f"{len(plan.waiting)} tasks wait"] if plan.waiting else []
    if plan.step_s:
        step = step_time_text(plan.step_s, plan.profile_source)
        planned.append(f"{step}, predicted ({plan.profile_source} profile)")
    if not plan.htasks and not plan.waiting:
        planned = ["no task has steps to take: all have ended or are paused"]
    peak = max(plan.peak_bytes, default=plan.memory.peak_bytes)
    starts = []
    for run in [run for run in runs if run.task.init_adapter is not None]:
        reference = "this adapter" if run.resolved.has_adapter_reference else "the backbone"
        compared = f", reference: {reference}" if run.resolved.needs_reference else ""
        starts.append(f"{run.name} from {run.task.init_adapter}{compared}")
    limit = "" if plan.limit_bytes is None else f" of {bytes_text(plan.limit_bytes)} that a device may use"
    return [
        f"peft_mux {versions['peft-mux']}  torch {torch.__version__}  transformers {versions['transformers']}  "
        f"peft {versions['peft']}  Python {platform.python_version()}",
        f"device   {device_words(args.device)}{processes and f'; {processes}'}",
        f"model    {kind if name == kind else f'{name}: {kind}'}, {num_parameters:,} parameters, {dtype}{notes}",
        f"tasks    {', '.join(tasks)}",
        *([f"begins   {'; '.join(starts)}"] if starts else []),
        f"kernels  {'Triton' if kernels is None else f'torch, not Triton: {kernels}'}{fused}; attention {attention}",
        f"plan     {', '.join(planned)}",
        f"memory   {bytes_text(peak)} {MEMORY.words} at its peak, predicted{limit}",
        f"output   {root}; {saved}",
    ]


def device_words(device: torch.device) -> str:
    """Return the device of this process in words."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {bytes_text(total)}"
    return f"{device.type}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def _range(numbers: Sequence[Any]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
