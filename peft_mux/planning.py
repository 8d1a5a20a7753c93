"""Gathers the facts of a run and makes its `Plan`: for one device, all tasks in one hTask."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.backbone import Backbone
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.kernels.linear_cross_entropy import block_rows
from peft_mux.modeling.lora_pass import runs_kernels
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.shape import model_shape
from peft_mux.scheduler.memory import estimate_memory
from peft_mux.scheduler.plan import HTask, Plan, TaskShare
from peft_mux.task_run import TaskRun


def make_plan(
    runs: Sequence[TaskRun],
    model: MultiTaskPeftModel,
    source: Backbone,
    args: MultiTaskTrainingArguments,
    collator: ChunkPackingCollator,
) -> Plan:
    """Return the plan for the given tasks on one device; reads shapes and lengths, no weights."""
    shares = tuple(_share(run, model) for run in runs)
    tokens = sum(share.tokens_per_step for share in shares)
    lengths = [length for run in runs for length in run.loader.sample_lengths]
    budget = args.max_tokens_per_micro_batch
    largest_pass = max([min(budget, math.ceil(tokens)), *lengths], default=budget)
    dtype = source.dtype
    activation_dtype = torch.bfloat16 if args.bf16 else dtype
    shape = model_shape(model.backbone, source.config, dtype=dtype, activation_dtype=activation_dtype)
    rows = min(block_rows(shape.vocab_size, args.device.type), largest_pass)
    memory = estimate_memory(
        shape,
        [share.adapter_parameters for share in shares],
        max_tokens=largest_pass,
        checkpointing=args.uses_checkpointing,
        block_bytes=rows * shape.vocab_size * 4,
    )
    htasks = (HTask(tuple(share.name for share in shares), max(1, math.ceil(tokens / budget))),) if shares else ()
    return Plan(
        htasks=htasks,
        shares=shares,
        max_tokens_per_micro_batch=budget,
        chunk_size=collator.size(lengths),
        pad_to_chunks=args.pad_to_chunks,
        memory=memory,
        device=str(args.device),
        notes=_notes(runs, args.device.type),
    )


def _share(run: TaskRun, model: MultiTaskPeftModel) -> TaskShare:
    return TaskShare(
        name=run.name,
        batch_size=run.hyper.train_batch_size,
        tokens_per_step=run.loader.tokens_per_step,
        num_steps=run.num_steps,
        adapter_parameters=sum(parameter.numel() for parameter in model.task_parameters(run.name).values()),
    )


def _notes(runs: Sequence[TaskRun], device_type: str) -> tuple[str, ...]:
    device_notes = ()
    if device_type == "cuda" and not runs_kernels(torch.device(device_type)):
        device_notes = ("adapters are computed task by task with torch, as Triton is absent",)
    reports = [getattr(getattr(run.loader, "dataset", None), "report", None) for run in runs]
    return device_notes + tuple(remark for report in reports if report is not None for remark in report.remarks)
