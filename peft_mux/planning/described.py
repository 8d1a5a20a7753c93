"""What the planner found, as the `Plan` that users see: with tasks' shares, bounds, and notes on how it came about."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.kernels.availability import has_triton, reason_against_kernels
from peft_mux.planning.loads import ParameterShapes, task_share
from peft_mux.planning.targets import Target, target_notes
from peft_mux.scheduler.costs.memory import MemoryModel, ModelShape
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.planner import Outcome
from peft_mux.scheduler.planner.values import PlannedPass
from peft_mux.tasks.task_run import TaskRun


def described_plan(
    outcome: Outcome,
    runs: Sequence[TaskRun],
    *,
    parameters: dict[str, ParameterShapes],
    memory: MemoryModel,
    target: Target,
    shape: ModelShape,
    chunk_size: int,
    args: MultiTaskTrainingArguments,
    passes: tuple[tuple[PlannedPass, ...], ...] = (),
) -> Plan:
    """Return what the planner found as a plan that prints, travels as JSON, and can be followed.

    Args:
        outcome: what the planner found.
        runs: the tasks that it was asked about.
        parameters: shapes of the adapters of each task, by its name.
        memory: predicts the bytes of each stage.
        target: the devices that the plan is for.
        shape: the shape of the whole backbone.
        chunk_size: tokens of a chunk of a sequence (M section 3.5).
        args: the arguments of the run, with what the user asked for.
        passes: for each replica the passes of a typical step.
    """
    layers_per_stage = memory.layers_per_stage or (shape.num_layers,)
    # Tasks that wait for memory have no share of a step.
    in_plan = {name for htask in outcome.htasks for name in htask.tasks}
    notes = target_notes(target, layers_per_stage, shape, outcome.turns)
    return Plan(
        htasks=outcome.htasks,
        shares=tuple(task_share(run, parameters[run.name]) for run in runs if run.name in in_plan),
        max_tokens_per_micro_batch=outcome.max_tokens,
        chunk_size=chunk_size,
        pad_to_chunks=args.pad_to_chunks,
        memory=outcome.memory or memory.estimate((), 0),
        device=target.device,
        policy=args.planner,
        buckets=outcome.buckets,
        template=outcome.template,
        bucket_loads=outcome.bucket_loads,
        step_s=outcome.step_s,
        peak_bytes=outcome.peak_bytes,
        limit_bytes=target.limit_bytes,
        profile_source=target.profile.source,
        waiting=outcome.waiting,
        notes=(*target.notes, *notes, *_notes(outcome, runs, target, args)),
        num_replicas=target.num_replicas,
        layers_per_stage=layers_per_stage,
        link=target.stage_link,
        devices_per_stage=target.devices_per_stage,
        passes=passes or (outcome.passes,),
        turns=outcome.turns,
        device_bytes=target.device_bytes,
    )


def _notes(
    outcome: Outcome, runs: Sequence[TaskRun], target: Target, args: MultiTaskTrainingArguments
) -> tuple[str, ...]:
    return (
        *_bound_notes(outcome, args.max_tokens_per_micro_batch),
        *_run_notes(runs, target.device_type),
        *_graph_notes(target, args),
    )


def _bound_notes(outcome: Outcome, asked: int) -> tuple[str, ...]:
    """Say that passes hold fewer tokens than were asked for."""
    if outcome.max_tokens >= asked:
        return ()
    return (f"passes hold at most {outcome.max_tokens:,} tokens instead of {asked:,}, as no more fit into memory",)


def _run_notes(runs: Sequence[TaskRun], device_type: str) -> tuple[str, ...]:
    """Say which path adapters take, and what became of rows when they were tokenised."""
    device_notes = ()
    # A plan may be of a GPU that is not here.
    is_here = device_type == "cuda" and torch.cuda.is_available()
    reason = reason_against_kernels(torch.device(device_type)) if is_here else None
    if device_type == "cuda" and not has_triton():
        reason = "Triton is absent"
    if reason is not None:
        device_notes = (f"adapters are computed task by task with torch, as {reason}",)
    sharing_notes = tuple(run.sharing_remark for run in runs if run.sharing_remark)
    return device_notes + tuple(remark for run in runs for remark in run.loader.report.remarks) + sharing_notes


def _graph_notes(target: Target, args: MultiTaskTrainingArguments) -> tuple[str, ...]:
    """Say that passes are not replayed as CUDA graphs where they would be on one device."""
    is_apart = target.num_stages * target.devices_per_stage * target.backbone_shards > 1
    if args.cuda_graphs != "auto" or target.device_type != "cuda" or not is_apart:
        return ()
    return ("passes are launched one by one, without CUDA graphs, as they wait for other processes on the way",)
