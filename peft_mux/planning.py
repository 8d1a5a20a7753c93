"""Gathers the facts of a run (lengths, adapters, shapes, memory, profile) and has the planner make its `Plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.backbone import Backbone
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import ConfigError
from peft_mux.modeling.lora_pass import runs_kernels
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.quantized import quantization_method
from peft_mux.modeling.shape import model_shape
from peft_mux.modeling.tensor_plan import blocks_of
from peft_mux.planning_fixes import fixes_for
from peft_mux.planning_loads import SAMPLE_ROWS, ParameterShapes, task_load, task_share, whole_shapes
from peft_mux.planning_profile import RunProfile, run_profile
from peft_mux.planning_shapes import cut_factors, frozen_parts
from peft_mux.planning_targets import Target, other_target, own_target, target_notes
from peft_mux.profiling_memory import activation_bytes_per_token
from peft_mux.scheduler.admission import DoesNotFitError
from peft_mux.scheduler.cost_model import CostModel
from peft_mux.scheduler.loads import TaskLoad
from peft_mux.scheduler.memory import MemoryModel
from peft_mux.scheduler.pipeline_template import Schedule
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner import Budget, Outcome, plan_tasks
from peft_mux.scheduler.profile import Profile, corrected
from peft_mux.scheduler.stage_cut import choose_layers
from peft_mux.task_run import TaskRun

_CHUNKS_OF_INTERLEAVED = 2


class Planner:
    """Plans for one run: holds what does not change while tasks come and go.

    Args:
        model: with the adapters of all tasks, whole; possibly a description without weights.
        source: where the backbone comes from.
        args: of the run.
        collator: tells the chunk size.
        num_replicas: that divide each task's global batch.

    Attributes:
        model: from which tasks that came later are read; may be cut to a stage, once `know` was called for them.
        num_replicas: as given.
        profile: that plans are made with; corrected by what is observed.
        time_ratio: measured over predicted time of a step, smoothed, under the last plan that was observed.
        shape: of the whole backbone.
        cut_factors: which factors of adapters tensor parallelism divides.
        cuts: layers of each stage of the run's own pipelines, by their number of stages, as they were first planned: a
            model that is cut so cannot change. To be cleared before the weights are loaded, where processes may have
            planned apart from one another.

    Example:
        >>> planner = Planner(model, source, args, collator, num_replicas=2)  # doctest: +SKIP
        >>> print(planner.plan(runs, num_stages=2))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        source: Backbone,
        args: MultiTaskTrainingArguments,
        collator: ChunkPackingCollator,
        num_replicas: int = 1,
    ) -> None:
        """Remember the run, and the shapes of its whole model, which may be cut later on."""
        self.model, self.source, self.args, self.collator = model, source, args, collator
        self.num_replicas = num_replicas
        self.profile: Profile | None = None
        self.time_ratio: float | None = None
        self._activation_dtype = torch.bfloat16 if args.bf16 else source.dtype
        shape = model_shape(model.backbone, source.config, dtype=source.dtype, activation_dtype=self._activation_dtype)
        self.shape = replace(shape, parts=frozen_parts(model.backbone, shape.num_layers, source.dtype))
        self.cut_factors = cut_factors(model.backbone)
        self.cuts: dict[int, tuple[int, ...]] = {}
        self._known: dict[str, ParameterShapes] = {}
        self.know(model)
        self._profile_notes: tuple[str, ...] = ()
        self._kept_bytes: float | None = None
        self._log_ratio: float | None = None
        self._is_first_step = True

    def know(self, model: MultiTaskPeftModel) -> None:
        """Remember the parameters of all tasks of a whole model; where the model is cut later, these count.

        Args:
            model: with tasks that came, or a description of it.
        """
        self._known |= {name: whole_shapes(model, name) for name in model.tasks}

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

    def replan(
        self,
        runs: Sequence[TaskRun],
        *,
        running: Sequence[str] = (),
        num_stages: int | None = None,
        devices_per_stage: int | None = None,
        schedule: Schedule | None = None,
    ) -> Plan:
        """Return the plan to follow from now on, made with what the last one taught.

        Args:
            runs: as for `plan`.
            running: as for `plan`.
            num_stages: as for `plan`.
            devices_per_stage: as for `plan`.
            schedule: as for `plan`.

        Raises:
            ConfigError: as `plan`.
        """
        self._correct_profile()
        return self.plan(
            runs, running=running, num_stages=num_stages, devices_per_stage=devices_per_stage, schedule=schedule
        )

    def plan(
        self,
        runs: Sequence[TaskRun],
        *,
        running: Sequence[str] = (),
        devices: str | None = None,
        num_stages: int | None = None,
        devices_per_stage: int | None = None,
        schedule: Schedule | None = None,
    ) -> Plan:
        """Return the plan for the given tasks; reads shapes and lengths, no weights.

        Args:
            runs: tasks that could take steps.
            running: names of those that do already.
            devices: to plan for, such as "4xA100-80GB"; by default the run's own.
            num_stages: of each replica; by default 1 of the run's own, and of other devices those of the arguments, or
                where these ask for none, as many as make one pipeline of all devices.
            devices_per_stage: that share every layer; by default `tensor_parallel_size` of the arguments.
            schedule: of a pipeline: "mux", or a baseline's template over the same buckets; by default that of the
                arguments.

        Raises:
            ConfigError: if not even one task fits into memory, naming the cheapest fixes; for unknown devices, a
                number of them that cannot be divided so, a profile that cannot be read, or stages that cannot be.
            UnsupportedModelError: if other devices cannot share the backbone's layers.
        """
        target = self._target(devices, num_stages, devices_per_stage)
        schedule = schedule or self.args.pipeline_schedule  # type: ignore[assignment]
        num_chunks = _CHUNKS_OF_INTERLEAVED if schedule == "interleaved_1f1b" and target.num_stages > 1 else 1
        self._check_stages(target, num_chunks)
        shapes = {run.name: self.shapes_of(run.name) for run in runs}
        loads = [
            task_load(
                run,
                shapes[run.name],
                self.shape.num_layers,
                target.num_replicas,
                cut=self.cut_factors,
                chain_tokens=self.args.max_tokens_per_micro_batch if self.args.split_long_sequences else None,
            )
            for run in runs
        ]
        cost, memory = self._models(target, loads, num_chunks)
        budget = Budget(
            self.args.max_tokens_per_micro_batch,
            target.limit_bytes,
            schedule=schedule,  # type: ignore[arg-type]
            num_chunks=num_chunks,
            links=target.stage_link,
        )
        try:
            outcome = plan_tasks(loads, cost, memory, budget, policy=self.args.planner, running=running)
        except DoesNotFitError as error:
            fixes = fixes_for(error, loads, memory, self.args, self._weight_bytes)
            raise ConfigError(f"plan: {error} {fixes}") from error
        except ValueError as error:
            raise ConfigError(f"plan: {error} {_STAGE_FIXES}") from error
        return self._described(outcome, runs, shapes, memory, target)

    def _target(self, devices: str | None, num_stages: int | None, devices_per_stage: int | None) -> Target:
        args = self.args
        sharers = args.tensor_parallel_size if devices_per_stage is None else devices_per_stage
        if devices is not None:
            if sharers > 1:
                blocks_of(self.model.backbone, sharers)
            asked = args.pipeline_parallel_size if num_stages is None else num_stages
            stages = asked if asked > 1 else None
            return other_target(args, self.shape, devices, num_stages=stages, devices_per_stage=sharers)
        if self.profile is None:
            self.profile, self._profile_notes = run_profile(args, self.shape, sharers)
        return own_target(
            args,
            RunProfile(self.profile, self._profile_notes),
            num_stages=num_stages or 1,
            devices_per_stage=sharers,
            num_replicas=self.num_replicas,
        )

    def _models(self, target: Target, loads: Sequence[TaskLoad], num_chunks: int) -> tuple[CostModel, MemoryModel]:
        """Return what predicts seconds and bytes on a target, its backbone being cut into stages."""
        size: dict[str, Any] = {
            "num_stages": target.num_stages,
            "devices_per_stage": target.devices_per_stage,
            "backbone_shards": target.backbone_shards,
        }
        memory = MemoryModel(
            self.shape,
            checkpointing=self.args.uses_checkpointing,
            activation_bytes_per_token=self.counted_bytes(loads),
            device_type=target.device_type,
            **size,
        )
        even = CostModel(target.profile, self.shape, tensor_link=target.tensor_link, **size)
        kept = self.cuts.get(target.num_stages) if target.is_own else None
        if kept is not None and min(kept) >= num_chunks:
            layers = kept
        else:
            bound = self.args.max_tokens_per_micro_batch
            layers = choose_layers(loads, even, memory, target.limit_bytes, max_tokens=bound, num_chunks=num_chunks)
            if target.is_own and loads:
                self.cuts.setdefault(target.num_stages, layers)
        cost = CostModel(target.profile, self.shape, tensor_link=target.tensor_link, layers_per_stage=layers, **size)
        return cost, replace(memory, layers_per_stage=layers)

    def _check_stages(self, target: Target, num_chunks: int) -> None:
        most = self.shape.num_layers // num_chunks
        if 1 <= target.num_stages <= most:
            return
        field = "pipeline_parallel_size" if target.is_own else "devices"
        each = "one layer" if num_chunks == 1 else f"{num_chunks} layers (interleaved_1f1b: one for each virtual stage)"
        raise ConfigError(
            f"plan: {field} asks for {target.num_stages} stages; allowed: 1 to {most}, as the backbone has"
            f" {self.shape.num_layers} layers and each stage needs {each}. Take fewer stages"
            f"{', or another pipeline_schedule' if num_chunks > 1 else ''}."
        )

    def shapes_of(self, name: str) -> ParameterShapes:
        """Return the shapes of a task's whole parameters; where the model is cut, as they were before."""
        here, known = whole_shapes(self.model, name), self._known.get(name, {})
        is_part = len(here) < len(known) and all(known.get(key) == shape for key, shape in here.items())
        return known if is_part else here

    def counted_bytes(self, loads: Sequence[TaskLoad]) -> float | None:
        """Return what a pass keeps for each token, counted once on the meta device; `None` for the analytic number."""
        if self.args.uses_checkpointing or not loads or quantization_method(self.source.config) is not None:
            return None
        if self._kept_bytes is None:
            lengths = [length for load in loads for length in load.lengths][:SAMPLE_ROWS]
            self._kept_bytes = activation_bytes_per_token(self.model, lengths, dtype=self._activation_dtype)
        return self._kept_bytes

    @property
    def _weight_bytes(self) -> int:
        """Bytes of one frozen weight as it is held; 1 for quantised ones."""
        return 1 if quantization_method(self.source.config) is not None else self.source.dtype.itemsize

    def _described(
        self,
        outcome: Outcome,
        runs: Sequence[TaskRun],
        shapes: dict[str, ParameterShapes],
        memory: MemoryModel,
        target: Target,
    ) -> Plan:
        layers_per_stage = memory.layers_per_stage or (self.shape.num_layers,)
        in_plan = {name for htask in outcome.htasks for name in htask.tasks}
        lengths = [length for run in runs for length in run.loader.sample_lengths]
        return Plan(
            htasks=outcome.htasks,
            shares=tuple(task_share(run, shapes[run.name]) for run in runs if run.name in in_plan),
            max_tokens_per_micro_batch=outcome.max_tokens,
            chunk_size=self.collator.size(lengths),
            pad_to_chunks=self.args.pad_to_chunks,
            memory=outcome.memory or memory.estimate((), 0),
            device=target.device,
            policy=self.args.planner,
            buckets=outcome.buckets,
            template=outcome.template,
            bucket_loads=outcome.bucket_loads,
            step_s=outcome.step_s,
            peak_bytes=outcome.peak_bytes,
            limit_bytes=target.limit_bytes,
            profile_source=target.profile.source,
            waiting=outcome.waiting,
            notes=(
                *target.notes,
                *target_notes(target, layers_per_stage, self.shape),
                *self._bound_notes(outcome),
                *_notes(runs, target.device_type),
            ),
            num_replicas=target.num_replicas,
            layers_per_stage=layers_per_stage,
            link=target.stage_link,
            devices_per_stage=target.devices_per_stage,
        )

    def _bound_notes(self, outcome: Outcome) -> tuple[str, ...]:
        asked = self.args.max_tokens_per_micro_batch
        if outcome.max_tokens >= asked:
            return ()
        return (f"passes hold at most {outcome.max_tokens:,} tokens instead of {asked:,}, as no more fit into memory",)


_STAGE_FIXES = (
    "Raise memory_limit_gib, take more stages, cut rows with max_length, or set gradient_checkpointing=True or"
    " bf16=True."
)


def _notes(runs: Sequence[TaskRun], device_type: str) -> tuple[str, ...]:
    device_notes = ()
    if device_type == "cuda" and not runs_kernels(torch.device(device_type)):
        device_notes = ("adapters are computed task by task with torch, as Triton is absent",)
    reports = [getattr(getattr(run.loader, "dataset", None), "report", None) for run in runs]
    return device_notes + tuple(remark for report in reports if report is not None for remark in report.remarks)
