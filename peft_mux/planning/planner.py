"""What the planner found, as the `Plan` that users see: with tasks' shares, bounds, and notes on how it came about."""

# MERGED: Whether a pipeline is drained after nearly every step, as far as that is known when a plan is made.
# MERGED: The engine decides it step by step (`peft_mux.trainer.loop`), as logs, evaluations and files come due. A
# MERGED: plan only has
# MERGED: to know which of the two ways most steps go: few large buckets of many micro-batches are faster where it is
# MERGED: drained,
# MERGED: and many small ones where it is not.
# MERGED: What to change when not even one task fits into memory: the cheapest changes first, each with its predicted
# MERGED: peak.
# MERGED: Gathers the facts of a run (lengths, adapters, shapes, memory, profile) and has the planner make its `Plan`.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.dispatch import BatchRows
from peft_mux.engine.tasks.task_run import TaskRun, run_interval
from peft_mux.engine.tensor.cut import blocks_of
from peft_mux.errors import ConfigError
from peft_mux.kernels.availability import has_triton, reason_against_kernels
from peft_mux.modeling.backbone.quantized import quantization_method
from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.modeling.last_layer import has_own_queries
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import OWN
from peft_mux.planning.learning import PassPrices, TimeCorrection
from peft_mux.planning.loads import (
    SAMPLE_ROWS,
    ParameterShapes,
    part_of,
    replica_loads,
    task_load,
    task_share,
    whole_shapes,
)
from peft_mux.planning.profiling.memory import count_activation_bytes_per_token
from peft_mux.planning.shapes import cut_layers, frozen_parts, sums_before_attention
from peft_mux.planning.targets import (
    RunProfile,
    Target,
    interleaved_passes,
    other_target,
    own_target,
    run_profile,
    target_notes,
)
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.model_shape import ModelShape
from peft_mux.scheduler.costs.profile import Parts, Profile, corrected
from peft_mux.scheduler.pipeline.template import Schedule
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.admission import DoesNotFitError, least_pass_tokens
from peft_mux.scheduler.planner.passes import planned_passes
from peft_mux.scheduler.planner.planner import Budget, Outcome, plan_tasks
from peft_mux.scheduler.planner.stage_cut import choose_layers
from peft_mux.scheduler.planner.times import TurnTimes
from peft_mux.scheduler.planner.values import PlannedPass
from peft_mux.scheduler.repricing import repriced_s
from peft_mux.scheduler.units import bytes_text


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


_LEAST_STEPS = 4
"""Steps between two logs below which a pipeline counts as drained: a window of two has half of the flushes left."""


def is_drained(
    args: MultiTaskTrainingArguments, target: Target, runs: Sequence[TaskRun], loads: Sequence[TaskLoad]
) -> bool:
    """Return whether plans should be compared by steps that end in a flush.

    Args:
        args: the arguments of the run.
        target: what the plan is for.
        runs: the tasks that could take steps.
        loads: what they bring into a step.
    """
    if args.pipeline_flush != "auto" or target.num_stages == 1:
        return True
    # Where gradients are summed over processes, all of them meet at the end of every step.
    if target.num_replicas > 1 or target.devices_per_stage > 1:
        return True
    if args.logging_strategy == "steps" and run_interval(args.logging_steps, runs) < _LEAST_STEPS:
        return True
    has_passes_before = any(load.has_reference_forward or load.has_batch_forward for load in loads)
    is_read_ahead = any(run.loader.steps_per_epoch is None for run in runs)
    return has_passes_before or is_read_ahead or any(run.resolved.objective.name == OWN for run in runs)


_NUM_FIXES = 3


class Fix(NamedTuple):
    """One change and what it is predicted to lead to.

    Attributes:
        change: the setting to change, as the user writes it.
        cost: what the change costs, in words.
        peak_bytes: predicted peak of the fullest device afterwards, in bytes.
    """

    change: str
    cost: str
    peak_bytes: int


def fixes_for(
    error: DoesNotFitError,
    loads: Sequence[TaskLoad],
    memory: MemoryModel,
    args: MultiTaskTrainingArguments,
    weight_bytes: int,
) -> str:
    """Return a sentence with the three cheapest fixes; those that suffice come first.

    Args:
        error: what does not fit, and by how much.
        loads: what the planner knows of each task.
        memory: the memory model that found so.
        args: the arguments of the run.
        weight_bytes: bytes of one frozen weight as it is held; 1 for quantised ones.
    """
    load = next(load for load in loads if load.name == error.task)
    found = [fix for fix in _all_fixes(load, memory, args, weight_bytes) if fix.peak_bytes < error.peak_bytes]
    enough = [fix for fix in found if fix.peak_bytes <= error.limit_bytes]
    rest = sorted((fix for fix in found if fix not in enough), key=lambda fix: fix.peak_bytes)
    # Those that suffice stay in the order of what they cost the owner; the others are ranked by what they bring.
    chosen = [*enough, *rest][:_NUM_FIXES]
    if not chosen:
        return "Take a smaller backbone or a larger device."
    listed = "; ".join(
        f"{number}. {fix.change} ({bytes_text(fix.peak_bytes)}"
        f"{'' if fix.peak_bytes <= error.limit_bytes else ', not enough by itself'}; {fix.cost})"
        for number, fix in enumerate(chosen, start=1)
    )
    return f"Cheapest fixes, with the peak that each is predicted to have: {listed}."


def _all_fixes(load: TaskLoad, memory: MemoryModel, args: MultiTaskTrainingArguments, weight_bytes: int) -> list[Fix]:
    """Return every change that could help, by what it costs the owner, least first."""
    fixes = []
    shape = memory.shape

    def add(change: str, cost: str, changed: MemoryModel, own: TaskLoad = load) -> None:
        fixes.append(Fix(change, cost, _peak(changed, own)))

    def in_precision(factor: float) -> MemoryModel:
        return replace(memory, shape=shape.in_precision(factor))

    kept = memory.activation_bytes_per_token
    if shape.activation_bytes > 2:
        # What was counted is of activations in the present dtype.
        halved = None if kept is None else kept * 2 / shape.activation_bytes
        in_16_bits = replace(memory, shape=replace(shape, activation_bytes=2), activation_bytes_per_token=halved)
        add("bf16=True", "activations in 16 bits, faster on a GPU", in_16_bits)
    if not args.uses_checkpointing:
        # What was counted is of passes that keep everything; with checkpointing the formula is used.
        recomputed = replace(memory, checkpointing=True, activation_bytes_per_token=None)
        add("gradient_checkpointing=True", "about a third more time", recomputed)
    if weight_bytes >= 4:
        add("a backbone in bf16", "rounds the frozen weights to 16 bits", in_precision(0.5))
    longest = load.longest
    if longest > 64:
        cut = tuple(min(length, longest // 2) for length in load.lengths)
        shorter = replace(load, lengths=cut, shared=(), trie=None, longest_row_tokens=longest // 2)
        add(f"max_length={longest // 2}", "cuts longer rows", memory, shorter)
    if weight_bytes >= 2:
        # Half a byte a weight and a scale for every 64; what is not linear stays as it is, which this leaves out.
        bits = in_precision(0.56 / weight_bytes)
        add("a backbone in 4 bits (BitsAndBytesConfig)", "quantises the frozen weights", bits)
    halves = {name: getattr(load, name) // 2 for name in ("trainable_parameters", "cut_parameters")}
    smaller = replace(load, **halves)
    add("half the rank", "a smaller adapter", memory, smaller)
    return fixes


def _peak(memory: MemoryModel, load: TaskLoad) -> int:
    tokens = least_pass_tokens([load])
    return max(int(memory.peak_bytes([load], tokens, in_flight=1, stage=stage)) for stage in range(memory.num_stages))


_CHUNKS_OF_INTERLEAVED = 2


class Planner:
    """Plans for one run: holds what does not change while tasks come and go.

    Args:
        model: the whole model with the adapters of all tasks, possibly a description without weights.
        source: where the backbone comes from, and in which dtype it is held.
        args: the arguments of the run: bounds, policy, parallel sizes, precision.
        collator: packs the rows of the run, and tells the size of chunks.
        num_replicas: replicas that divide the global batch of each task among them.

    Attributes:
        model: the model from which the shapes of tasks are read that came later; it may be cut to a stage.
        num_replicas: replicas that divide the global batch of each task among them.
        most_tokens: the most tokens of a pass that the device was found to have memory for; `None` where none was too
            large yet.
        correction: learns from measured times how far the profile holds; plans are made with its `factors`.
        shape: the shape of the whole backbone.
        cut_layers: which layers tensor parallelism cuts, and how.

    Example:
        >>> planner = Planner(model, source, args, collator, num_replicas=2)  # doctest: +SKIP
        >>> print(planner.plan(runs, num_stages=2))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        source: BackboneSource,
        args: MultiTaskTrainingArguments,
        collator: ChunkPackingCollator,
        num_replicas: int = 1,
    ) -> None:
        """Remember the run, and the shapes of its whole model, which may be cut later on."""
        self.model: Any = model
        self.source, self.args, self.collator = source, args, collator
        self.num_replicas = num_replicas
        self._activation_dtype = torch.bfloat16 if args.bf16 else source.dtype
        shape = model_shape(model.backbone, source.config, dtype=source.dtype, activation_dtype=self._activation_dtype)
        self.shape = replace(shape, parts=frozen_parts(model.backbone, shape.num_layers, source.dtype))
        self._has_own_queries = has_own_queries(model.backbone)
        self._sums_before_attention = sums_before_attention(model.backbone)
        self.cut_layers = cut_layers(model.backbone)
        self.cuts: dict[int, tuple[int, ...]] = {}
        # Read now, since a stage later holds only a part of these parameters.
        self._known = {name: whole_shapes(model, name) for name in model.tasks}
        self._base: RunProfile | None = None
        self._kept_bytes: dict[str, float] = {}
        self.correction = TimeCorrection()
        self.most_tokens: int | None = None
        self._priced: tuple[Target, CostModel, dict[str, TaskLoad]] | None = None

    def plan_for(self, model: MultiTaskPeftModel | None, *, num_replicas: int) -> None:
        """Read shapes from another model from now on; those of tasks that it does not hold whole are still known.

        Args:
            model: the model, whole or cut to a stage; `None` while a run moves from one to another.
            num_replicas: replicas that divide the global batch of each task among them.
        """
        self.model, self.num_replicas = model, num_replicas

    def forget_cuts(self) -> None:
        """Cut the layers into stages anew: to be called before the weights are loaded.

        Stages stay as they were first planned, as a model that is cut so cannot change. But until then processes may
        have planned apart from one another.
        """
        self.cuts.clear()

    def shape_on(
        self, device_type: str, *, num_stages: int = 1, devices_per_stage: int = 1, backbone_shards: int = 1
    ) -> ModelShape:
        """Return the shape of the backbone with what its last layer computes at rows that are read alone on devices.

        Args:
            device_type: kind of the devices, "cuda" or "cpu".
            num_stages: pipeline stages of a replica.
            devices_per_stage: devices that share every layer.
            backbone_shards: replicas that divide the frozen weights.
        """
        args, model, is_alone = self.args, self.model, num_stages * devices_per_stage * backbone_shards == 1
        # Captured passes compute all rows.
        may_replay = args.cuda_graphs is True or (args.cuda_graphs == "auto" and device_type == "cuda" and is_alone)
        sums_first = devices_per_stage > 1 and self._sums_before_attention
        # Proven in one stage of several alone, and all processes have to make one plan.
        was_refused = model is not None and model.num_stages == 1 and model.last_layer.was_refused
        if args.last_layer_at_targets is False or may_replay or sums_first or was_refused:
            return self.shape
        return self.shape.at_targets(has_own_queries=self._has_own_queries)

    @property
    def profile(self) -> Profile | None:
        """The times that plans are made with, each part by its factor of `correction`; `None` before the first plan."""
        return None if self._base is None else corrected(self._base.profile, self.correction.factors)

    def prices(self, stage: int, width: int = 1) -> PassPrices | None:
        """Return what the profile as it was given predicts of passes of the last own plan; `None` before one.

        Args:
            stage: stage of the pipeline that lies in this process.
            width: the most passes that took turns.
        """
        if self._priced is None or self._base is None:
            return None
        target, cost, loads = self._priced
        given = self._own_target(self._base, target.num_stages, target.devices_per_stage, target.num_replicas)
        layers = cost.layers_per_stage

        def learnt() -> tuple[TurnTimes, float]:
            factors = self.correction.fit.factors()
            known = self._cost_model(given.corrected(factors), layers)
            return TurnTimes(known, recomputes=self.args.uses_checkpointing), factors.communication

        own = self._cost_model(given, layers)
        return PassPrices(own, loads, stage, learnt if TurnTimes(own).is_known else None, width=width)

    def gain_of(self, plan: Plan, factors: Parts, runs: Sequence[TaskRun], **options: Any) -> float:
        """Return by what part a plan made anew with other factors would be faster than one that is followed.

        Both are priced by the same costs, those with the factors.

        Args:
            plan: the plan that is followed.
            factors: what each part takes over what the profile says.
            runs: the tasks that could take steps.
            **options: as `plan` takes them.
        """
        before = self.correction.factors
        self.correction.factors = factors
        try:
            other = self.plan(runs, **options)
            assert self._priced is not None, "a plan of the own devices was made"
            target, cost, loads = self._priced
            if not plan.htasks or {share.name for share in plan.shares} != {share.name for share in other.shares}:
                return 0.0
            drains = is_drained(self.args, target, runs, list(loads.values()))
            rules, recomputes = self.collator.rules, self.args.uses_checkpointing
            before_s, after_s = (
                repriced_s(one, loads, cost, rules, links=target.stage_link, drains=drains, recomputes=recomputes)
                for one in (plan, other)
            )
            return before_s / after_s - 1.0
        finally:
            self.correction.factors = before

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
            runs: the tasks that could take steps.
            running: names of the tasks that take steps already.
            devices: the devices to plan for, such as "4xA100-80GB"; by default the run's own.
            num_stages: number of stages of each replica; by default 1 of the run's own, and of other devices that of
                the arguments, or where these ask for none, as many as make one pipeline of all devices.
            devices_per_stage: number of devices that share every layer; by default `tensor_parallel_size` of the
                arguments.
            schedule: the schedule of a pipeline: "mux", or a baseline's template over the same buckets; by default that
                of the arguments.

        Raises:
            ConfigError: if not even one task fits into memory, naming the cheapest fixes; for unknown devices, a
                number of them that cannot be divided so, a profile that cannot be read, or stages that cannot be.
            UnsupportedModelError: if other devices cannot share the backbone's layers.
        """
        target = self._target(devices, num_stages, devices_per_stage)
        schedule, num_chunks = self._schedule(schedule, target)
        self._check_stages(target, num_chunks)
        shapes = {run.name: self.shapes_of(run.name) for run in runs}
        replicas = replica_loads([self._load_of(run, shapes[run.name]) for run in runs], target.num_replicas)
        # The plan is of the replica with most tokens, which all others wait for.
        loads = max(replicas, key=lambda own: sum(load.tokens for load in own))
        cost, memory = self._models(target, loads, num_chunks)
        if target.is_own:
            self._priced = target, cost, {load.name: load for load in loads}
        drains = is_drained(self.args, target, runs, loads)
        budget = replace(self._budget(target, schedule, num_chunks), drains=drains)
        outcome = self._outcome(loads, cost, memory, budget, running)
        return described_plan(
            outcome,
            runs,
            parameters=shapes,
            memory=memory,
            target=target,
            shape=self.shape,
            chunk_size=self.collator.rules.size([length for run in runs for length in run.loader.sample_lengths]),
            args=self.args,
            passes=tuple(
                planned_passes(outcome.htasks, own, budget.rules, outcome.max_tokens) for own in replicas if runs
            ),
        )

    def _outcome(
        self,
        loads: Sequence[TaskLoad],
        cost: CostModel,
        memory: MemoryModel,
        budget: Budget,
        running: Sequence[str],
    ) -> Outcome:
        """Return what the planner finds; what it refuses is told with what would mend it."""
        try:
            return plan_tasks(loads, cost, memory, budget, policy=self.args.planner, running=running)
        except DoesNotFitError as error:
            fixes = fixes_for(error, loads, memory, self.args, self._weight_bytes)
            raise ConfigError(f"plan: {error} {fixes}") from error
        except ValueError as error:
            raise ConfigError(f"plan: {error} {_STAGE_FIXES}") from error

    def typical_batches(self, runs: Sequence[TaskRun]) -> list[BatchRows]:
        """Return the rows of a typical global batch of each task."""
        loads = [self._load_of(run, self.shapes_of(run.name)) for run in runs]
        return [BatchRows(load.name, 0, load.lengths, load.trie) for load in loads]

    def with_rows(
        self, plan: Plan, runs: Sequence[TaskRun], rows: Sequence[Mapping[str, Sequence[int]]], bounds: Sequence[int]
    ) -> Plan:
        """Return a plan with the passes that replicas make which do not divide rows evenly.

        Args:
            plan: a plan, made as for equal replicas.
            runs: the tasks that take steps by it.
            rows: for each replica the indices of its rows in the typical batch of each task.
            bounds: the most tokens of a pass in each replica.
        """
        loads = [self._load_of(run, self.shapes_of(run.name)) for run in runs]
        passes = tuple(
            planned_passes(plan.htasks, [part_of(load, own[load.name]) for load in loads], self.collator.rules, bound)
            for own, bound in zip(rows, bounds, strict=True)
        )
        return replace(plan, passes=passes)

    def _budget(self, target: Target, schedule: Any, num_chunks: int) -> Budget:
        """Return the bounds within which a plan for a target is looked for."""
        asked = self.args.max_tokens_per_micro_batch
        return Budget(
            asked if self.most_tokens is None or not target.is_own else min(asked, self.most_tokens),
            target.limit_bytes,
            schedule=schedule,
            num_chunks=num_chunks,
            links=target.stage_link,
            num_micro_batches=self.args.num_micro_batches,
            rules=self.collator.rules,
            interleaved_passes=interleaved_passes(self.args, target),  # type: ignore[arg-type]
            recomputes=self.args.uses_checkpointing,
        )

    def alone_s(
        self,
        runs: Sequence[TaskRun],
        *,
        devices: str | None = None,
        num_stages: int | None = None,
        devices_per_stage: int | None = None,
        schedule: Schedule | None = None,
    ) -> dict[str, float]:
        """Return the predicted seconds of a step of each task if it trained alone, by name.

        Args:
            runs: the tasks, ended ones too.
            devices: the devices to predict for; by default the run's own.
            num_stages: number of stages of each replica, as `plan` takes it.
            devices_per_stage: number of devices that share every layer; by default as the arguments ask.
            schedule: the schedule of a pipeline; by default that of the arguments.
        """
        target = self._target(devices, num_stages, devices_per_stage)
        schedule, num_chunks = self._schedule(schedule, target)
        budget, found = self._budget(target, schedule, num_chunks), {}
        alike: dict[TaskLoad, float] = {}
        for run in runs:
            # Tasks of a sweep often differ in nothing that takes time, and are planned once.
            load = replace(self._load_of(run, self.shapes_of(run.name)), name="one", num_steps=1, priority=0)
            if load.trie is None and load in alike:
                found[run.name] = alike[load]
                continue
            own = max(replica_loads([load], target.num_replicas), key=lambda loads: sum(one.tokens for one in loads))
            cost, memory = self._models(target, own, num_chunks)
            found[run.name] = plan_tasks(own, cost, memory, budget, policy="sequential").step_s
            alike |= {load: found[run.name]} if load.trie is None else {}
        return found

    def _schedule(self, asked: Schedule | None, target: Target) -> tuple[Any, int]:
        """Return the schedule of a pipeline, and the virtual stages that it has on each device."""
        schedule = asked or self.args.pipeline_schedule
        return schedule, _CHUNKS_OF_INTERLEAVED if schedule == "interleaved_1f1b" and target.num_stages > 1 else 1

    def _load_of(self, run: TaskRun, shapes: ParameterShapes) -> TaskLoad:
        """Return what a task brings into a step of all replicas."""
        return task_load(
            run,
            shapes,
            self.shape.num_layers,
            cut=self.cut_layers,
            chain_tokens=self.args.max_tokens_per_micro_batch if self.args.split_long_sequences else None,
            routed_share=self.shape.routed_share,
            layer_elements=self.shape.layer_elements,
        )

    def _target(self, devices: str | None, num_stages: int | None, devices_per_stage: int | None) -> Target:
        args = self.args
        sharers = args.tensor_parallel_size if devices_per_stage is None else devices_per_stage
        if devices is not None:
            if sharers > 1:
                blocks_of(self.model.backbone, sharers)
            asked = args.pipeline_parallel_size if num_stages is None else num_stages
            stages = asked if asked > 1 else None
            return other_target(args, self.shape, devices, num_stages=stages, devices_per_stage=sharers)
        if self._base is None:
            self._base = run_profile(args, self.shape, sharers)
        own = self._own_target(self._base, num_stages or 1, sharers, self.num_replicas)
        return own.corrected(self.correction.factors)

    def _own_target(self, profile: RunProfile, num_stages: int, devices_per_stage: int, num_replicas: int) -> Target:
        size = {"num_stages": num_stages, "devices_per_stage": devices_per_stage, "num_replicas": num_replicas}
        return own_target(self.args, profile, **size)

    def _cost_model(self, target: Target, layers: tuple[int, ...] | None) -> CostModel:
        """Return what predicts seconds on a target whose stages have so many layers, or equally many."""
        size = {
            "num_stages": target.num_stages,
            "devices_per_stage": target.devices_per_stage,
            "backbone_shards": target.backbone_shards,
        }
        return CostModel(
            target.profile,
            self.shape_on(target.device_type, **size),
            layers_per_stage=layers,
            tensor_link=target.tensor_link,
            **size,
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
            activation_bytes_per_token=self.counted_bytes(loads, target.device_type),
            device_type=target.device_type,
            **size,
        )
        # Only the seconds of layers are read off it: how its own are cut does not count.
        even = self._cost_model(target, None)
        kept = self.cuts.get(target.num_stages) if target.is_own else None
        if kept is not None and min(kept) >= num_chunks:
            layers = kept
        else:
            bound = self.args.max_tokens_per_micro_batch
            layers = choose_layers(loads, even, memory, target.limit_bytes, max_tokens=bound, num_chunks=num_chunks)
            if target.is_own and loads:
                # Weights are cut once, and replans keep to it, however costs have been corrected since.
                self.cuts.setdefault(target.num_stages, layers)
        return self._cost_model(target, layers), replace(memory, layers_per_stage=layers)

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
        # A task that was removed and came again under its name may have other shapes: then what is here holds.
        is_part = len(here) < len(known) and all(known.get(key) == shape for key, shape in here.items())
        return known if is_part else here

    def counted_bytes(self, loads: Sequence[TaskLoad], device_type: str) -> float | None:
        """Return what a pass keeps for each token, counted once on the meta device; `None` for the analytic number."""
        if not loads or quantization_method(self.source.config) is not None:
            return None
        # Once a run: it takes seconds where tasks are many (docs/log.md).
        if device_type not in self._kept_bytes:
            lengths = [length for load in loads for length in load.lengths][:SAMPLE_ROWS]
            self._kept_bytes[device_type] = count_activation_bytes_per_token(
                self.model,
                lengths,
                dtype=self.source.dtype,
                autocast=torch.bfloat16 if self.args.bf16 else None,
                device_type=device_type,
                checkpointing=self.args.uses_checkpointing,
            )
        return self._kept_bytes[device_type]

    @property
    def _weight_bytes(self) -> int:
        """Bytes of one frozen weight as it is held; 1 for quantised ones."""
        return 1 if quantization_method(self.source.config) is not None else self.source.dtype.itemsize


_STAGE_FIXES = (
    "Raise memory_limit_gib, take more stages, cut rows with max_length, or set gradient_checkpointing=True or"
    " bf16=True."
)
