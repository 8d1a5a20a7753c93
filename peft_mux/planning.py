"""Gathers the facts of a run (lengths, adapters, shapes, memory, profile) and has the planner make its `Plan`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.backbone import Backbone
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import ConfigError
from peft_mux.modeling.lora_pass import runs_kernels
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.quantized import quantization_method
from peft_mux.modeling.shape import model_shape
from peft_mux.planning_fixes import fixes_for
from peft_mux.profiling_memory import activation_bytes_per_token
from peft_mux.scheduler.admission import DoesNotFitError
from peft_mux.scheduler.cost_model import CostModel
from peft_mux.scheduler.hardware import DEVICES, Cluster, parse_devices
from peft_mux.scheduler.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.memory import MemoryEstimate, MemoryModel
from peft_mux.scheduler.plan import Plan, TaskShare
from peft_mux.scheduler.planner import Budget, Outcome, plan_tasks
from peft_mux.scheduler.profile import Profile, analytic_profile, corrected
from peft_mux.task_run import TaskRun

_SAMPLE_ROWS = 64


class Planner:
    """Plans for one run: holds what does not change while tasks come and go.

    Args:
        model: with the adapters of all tasks; possibly a description without weights.
        source: where the backbone comes from.
        args: of the run.
        collator: tells the chunk size.

    Attributes:
        profile: that plans are made with; corrected by what is observed.
        time_ratio: measured over predicted time of a step, smoothed, under the last plan that was observed.
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        source: Backbone,
        args: MultiTaskTrainingArguments,
        collator: ChunkPackingCollator,
    ) -> None:
        """Remember the run; read nothing yet."""
        self.model, self.source, self.args, self.collator = model, source, args, collator
        self.profile: Profile | None = None
        self.time_ratio: float | None = None
        self._kept_bytes: float | None = None
        self._log_ratio: float | None = None
        self._is_first_step = True

    def observe(self, plan: Plan, num_tokens: int, seconds: float) -> None:
        """Compare a step with its prediction; the next plan is made with the corrected profile.

        The first step under a plan allocates what the others find there, so it does not count.

        Args:
            plan: that the step followed.
            num_tokens: of the step.
            seconds: that it took, passes and updates.
        """
        if self._is_first_step or not plan.step_s or not num_tokens or seconds <= 0:
            self._is_first_step = False
            return
        log_ratio = math.log(seconds / (plan.step_s * num_tokens / plan.tokens_per_step))
        self._log_ratio = log_ratio if self._log_ratio is None else 0.8 * self._log_ratio + 0.2 * log_ratio
        self.time_ratio = math.exp(self._log_ratio)

    def _correct_profile(self) -> None:
        """Scale the profile by what was observed since the last plan."""
        if self.profile is not None and self._log_ratio is not None:
            ratio = math.exp(self._log_ratio)
            self.profile = corrected(self.profile, 1.0, ratio, smoothing=1.0, largest_change=max(ratio, 1 / ratio))
        self._log_ratio, self._is_first_step = None, True

    def replan(self, runs: Sequence[TaskRun], *, running: Sequence[str] = ()) -> Plan:
        """Return the plan to follow from now on, made with what the last one taught.

        Args:
            runs: as for `plan`.
            running: as for `plan`.

        Raises:
            ConfigError: as `plan`.
        """
        self._correct_profile()
        return self.plan(runs, running=running)

    def plan(self, runs: Sequence[TaskRun], *, running: Sequence[str] = (), devices: str | None = None) -> Plan:
        """Return the plan for the given tasks; reads shapes and lengths, no weights.

        Args:
            runs: tasks that could take steps.
            running: names of those that do already.
            devices: to plan for, such as "4xA100-80GB"; the run's own one by default.

        Raises:
            ConfigError: if not even one task fits into memory, naming the cheapest fixes; or for unknown devices.
        """
        args, cluster = self.args, None if devices is None else _cluster(devices)
        activation_dtype = torch.bfloat16 if args.bf16 else self.source.dtype
        backbone = self.model.backbone
        shape = model_shape(backbone, self.source.config, dtype=self.source.dtype, activation_dtype=activation_dtype)
        num_stages = 1 if cluster is None else cluster.num_devices
        device_type = args.device.type if cluster is None else "cuda"
        profile = self._profile(shape, cluster)
        cost = CostModel(profile, shape, num_stages=num_stages)
        loads = [task_load(run, self.model) for run in runs]
        memory = MemoryModel(
            shape,
            num_stages=num_stages,
            checkpointing=args.uses_checkpointing,
            activation_bytes_per_token=self._counted_bytes(loads, activation_dtype),
            device_type=device_type,
        )
        limit = memory_limit_bytes(args) if cluster is None else cluster.device.memory_bytes
        budget = Budget(args.max_tokens_per_micro_batch, limit)
        try:
            outcome = plan_tasks(loads, cost, memory, budget, policy=args.planner, running=running)
        except DoesNotFitError as error:
            raise ConfigError(f"plan: {error} {fixes_for(error, loads, memory, args, self._weight_bytes)}") from error
        return self._described(outcome, runs, memory, loads, profile, limit, cluster)

    def _counted_bytes(self, loads: Sequence[TaskLoad], dtype: torch.dtype) -> float | None:
        """Return what a pass keeps for each token, counted once on the meta device; `None` for the analytic number."""
        if self.args.uses_checkpointing or not loads or quantization_method(self.source.config) is not None:
            return None
        if self._kept_bytes is None:
            lengths = [length for load in loads for length in load.lengths][:_SAMPLE_ROWS]
            self._kept_bytes = activation_bytes_per_token(self.model, lengths, dtype=dtype)
        return self._kept_bytes

    @property
    def _weight_bytes(self) -> int:
        """Bytes of one frozen weight as it is held; 1 for quantised ones."""
        return 1 if quantization_method(self.source.config) is not None else self.source.dtype.itemsize

    def _profile(self, shape: Any, cluster: Cluster | None) -> Profile:
        if cluster is not None:
            return analytic_profile(cluster.device, shape)
        if self.profile is None:
            self.profile = run_profile(self.args, shape)
        return self.profile

    def _described(
        self,
        outcome: Outcome,
        runs: Sequence[TaskRun],
        memory: MemoryModel,
        loads: Sequence[TaskLoad],
        profile: Profile,
        limit: int | None,
        cluster: Cluster | None,
    ) -> Plan:
        args = self.args
        in_plan = {name for htask in outcome.htasks for name in htask.tasks}
        own = [load for load in loads if load.name in in_plan]
        lengths = [length for run in runs for length in run.loader.sample_lengths]
        device = str(args.device) if cluster is None else f"{cluster.num_devices} x {cluster.device.name}"
        return Plan(
            htasks=outcome.htasks,
            shares=tuple(_share(run, self.model) for run in runs if run.name in in_plan),
            max_tokens_per_micro_batch=args.max_tokens_per_micro_batch,
            chunk_size=self.collator.size(lengths),
            pad_to_chunks=args.pad_to_chunks,
            memory=_peak(outcome, own, memory, args.max_tokens_per_micro_batch),
            device=device,
            policy=args.planner,
            buckets=outcome.buckets,
            template=outcome.template,
            bucket_loads=outcome.bucket_loads,
            step_s=outcome.step_s,
            peak_bytes=outcome.peak_bytes,
            limit_bytes=limit,
            profile_source=profile.source,
            waiting=outcome.waiting,
            notes=_notes(runs, args.device.type),
        )


def _cluster(devices: str) -> Cluster:
    try:
        return parse_devices(devices)
    except ValueError as error:
        raise ConfigError(f"devices: {error}") from error


def run_profile(args: MultiTaskTrainingArguments, shape: Any) -> Profile:
    """Return the profile that a run plans with: a stored file, or numbers from data sheets."""
    if args.cost_profile is not None:
        return Profile.from_json(Path(args.cost_profile).read_text(encoding="utf-8"))
    name = "cpu"
    if args.device.type == "cuda":
        found = torch.cuda.get_device_name(args.device)
        name = next((known for known in DEVICES if known.split("-")[0].lower() in found.lower()), "A100-80GB")
    return analytic_profile(DEVICES[name], shape)


def memory_limit_bytes(args: MultiTaskTrainingArguments) -> int | None:
    """Return what a plan may fill: what was asked for, else the GPU less a margin, else no limit."""
    if args.memory_limit_gib is not None:
        return int(args.memory_limit_gib * 2**30)
    if args.device.type != "cuda":
        return None
    return int(0.95 * torch.cuda.get_device_properties(args.device).total_memory)


def task_load(run: TaskRun, model: MultiTaskPeftModel) -> TaskLoad:
    """Return what the planner needs to know of a task.

    Args:
        run: the task; its rows are sampled.
        model: with its adapter.
    """
    lengths = typical_lengths(run.loader.sample_lengths, run.hyper.train_batch_size)
    parameters = model.task_parameters(run.name)
    return TaskLoad(
        name=run.name,
        lengths=lengths,
        num_targets=max(1, round(sum(lengths) * _share_of_targets(run))),
        adapters=_adapter_loads(parameters, model),
        trainable_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_steps=run.num_steps,
        priority=run.task.priority,
    )


def typical_lengths(lengths: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Return the lengths of a typical global batch: evenly spaced quantiles of all lengths.

    Args:
        lengths: of the rows.
        batch_size: rows of a global batch.
    """
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    count = min(batch_size, len(ordered))
    if count == 0:
        return ()
    places = ((np.arange(count) + 0.5) / count * len(ordered)).astype(np.int64)
    return tuple(int(length) for length in ordered[places])


def _share_of_targets(run: TaskRun) -> float:
    """Return which share of a task's tokens predict something, from some of its rows."""
    dataset = getattr(run.loader, "dataset", None)
    if dataset is None:
        sequences = run.loader.batch(0).sequences[:_SAMPLE_ROWS]
    else:
        sequences = [dataset[row] for row in range(min(len(dataset), _SAMPLE_ROWS))]
    tokens = sum(len(sequence) for sequence in sequences)
    return sum(sequence.num_targets for sequence in sequences) / max(tokens, 1)


def _adapter_loads(parameters: dict[str, Any], model: MultiTaskPeftModel) -> tuple[AdapterLoad, ...]:
    """Return the adapters of a mean decoder layer."""
    found: Counter[tuple[int, int]] = Counter()
    for name, a in parameters.items():
        if ".lora_A." in name:
            b = parameters[name.replace(".lora_A.", ".lora_B.")]
            found[a.shape[0], a.shape[1] + b.shape[0]] += 1
    num_layers = max(1, getattr(model.backbone.config.get_text_config(), "num_hidden_layers", 1))
    return tuple(
        AdapterLoad(rank, width)
        for (rank, width), count in sorted(found.items())
        for _ in range(max(1, round(count / num_layers)))
    )


def _share(run: TaskRun, model: MultiTaskPeftModel) -> TaskShare:
    return TaskShare(
        name=run.name,
        batch_size=run.hyper.train_batch_size,
        tokens_per_step=run.loader.tokens_per_step,
        num_steps=run.num_steps,
        adapter_parameters=sum(parameter.numel() for parameter in model.task_parameters(run.name).values()),
    )


def _peak(outcome: Outcome, loads: Sequence[TaskLoad], memory: MemoryModel, max_tokens: int) -> MemoryEstimate:
    """Return the fullest stage's memory by part, for the largest pass that may come."""
    longest = max((load.longest for load in loads), default=0)
    tokens = max((htask.tokens_per_micro_batch for htask in outcome.htasks), default=0)
    largest = math.ceil(max(tokens, longest)) or max_tokens
    return memory.estimate(loads, largest)


def _notes(runs: Sequence[TaskRun], device_type: str) -> tuple[str, ...]:
    device_notes = ()
    if device_type == "cuda" and not runs_kernels(torch.device(device_type)):
        device_notes = ("adapters are computed task by task with torch, as Triton is absent",)
    reports = [getattr(getattr(run.loader, "dataset", None), "report", None) for run in runs]
    return device_notes + tuple(remark for report in reports if report is not None for remark in report.remarks)
