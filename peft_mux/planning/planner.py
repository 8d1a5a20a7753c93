"""`Planner`: gathers the facts of a run (lengths, adapters, shapes, memory, profile) and has its `Plan` made of them.

`peft_mux.scheduler.planner` decides what runs together. This module adds what only the run knows: the tasks' shares,
notes on the decision and, if not even one task fits into memory, what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.packing.passes import even_shares
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.tasks.active_task import ActiveTask, run_interval
from peft_mux.errors import ConfigError
from peft_mux.kernels.availability import has_triton, reason_against_kernels
from peft_mux.modeling.backbone.liger import is_fused
from peft_mux.modeling.backbone.quantized import quantization_method
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import OWN
from peft_mux.parallel.cuda_graphs import reason_against
from peft_mux.parallel.tensor.cut import blocks_of
from peft_mux.planning.learning import PassPrices, TimeCorrection, repriced_s
from peft_mux.planning.model_shape import cut_layers, frozen_parts, model_shape
from peft_mux.planning.profiling.activation_bytes import count_activation_bytes_per_token
from peft_mux.planning.targets import (
    Target,
    execution_of,
    has_fused_layers,
    interleaved_passes,
    other_target,
    run_profile,
    run_target,
    target_notes,
)
from peft_mux.planning.task_loads import SAMPLE_ROWS, part_of, task_load, whole_shapes
from peft_mux.scheduler.costs.hardware import Cluster
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import Parts, Profile, corrected, with_recomputed_inputs
from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.plan import Plan, TaskShare
from peft_mux.scheduler.planner.planned_passes import TurnTimes, planned_passes
from peft_mux.scheduler.planner.planner import (
    Budget,
    DoesNotFitError,
    Outcome,
    chunks_per_device,
    least_pass_tokens,
    plan_tasks,
)
from peft_mux.scheduler.planner.stage_cut import choose_layers
from peft_mux.scheduler.units import bytes_text

_LEAST_STEPS = 4
"""Steps between two logs below which a pipeline counts as drained: a window of two has half of the flushes left."""
_NUM_FIXES = 3
_STAGE_FIXES = (
    "Raise memory_limit_gib, take more stages, cut rows with max_length, or set gradient_checkpointing=True or"
    " bf16=True."
)


class PlanInputs(NamedTuple):
    """What a plan is made from.

    Attributes:
        profiled: the devices that the plan is for, with the times of the profile.
        target: the same with times corrected by what was measured, if these are the run's own.
        replicas: for each replica what the tasks bring into its steps.
        loads: the same of the replica with most tokens, which all others wait for.
        cost: predicts the seconds of each stage.
        memory: predicts the bytes of the same stages.
        budget: the bounds within which the plan is looked for.
    """

    profiled: Target
    target: Target
    replicas: list[list[TaskLoad]]
    loads: list[TaskLoad]
    cost: CostModel
    memory: MemoryModel
    budget: Budget


class Planner:
    """Plans for one run: holds what does not change while tasks come and go.

    Args:
        model: the whole model with the adapters of all tasks, possibly a description without weights.
        source: where the backbone comes from, and in which dtype it is held.
        args: the arguments of the run: bounds, policy, parallel sizes, precision.
        collator: packs the rows of the run, and has the size of chunks.
        num_replicas: replicas that divide the global batch of each task among them.

    Attributes:
        model: the model from which the shapes of tasks are read that came later; it may be cut to a stage, and `None`
            while a run moves from one to another.
        num_replicas: replicas that divide the global batch of each task among them.
        cuts: layers of each stage, by the number of stages. A model that is cut cannot change, so that they are chosen
            once; clear them before the weights are loaded if processes may have planned apart from one another.
        most_tokens: the most tokens of a pass that the device was found to have memory for; `None` if none was too
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
        self.model: Any = model
        self.source, self.args, self.collator = source, args, collator
        self.num_replicas = num_replicas
        activation_dtype = torch.bfloat16 if args.bf16 else source.dtype
        shape = model_shape(model.backbone, source.config, dtype=source.dtype, activation_dtype=activation_dtype)
        self.shape = replace(shape, parts=frozen_parts(model.backbone, shape.num_layers, source.dtype))
        self.cut_layers = cut_layers(model.backbone)
        self.cuts: dict[int, tuple[int, ...]] = {}
        self.correction = TimeCorrection()
        self.most_tokens: int | None = None
        # Read now, since a stage later holds only a part of these parameters.
        self._known = {name: whole_shapes(model, name) for name in model.tasks}
        self._profile: tuple[Profile, tuple[str, ...]] | None = None
        self._kept_bytes: dict[tuple[str, bool], float] = {}
        self._last_inputs: PlanInputs | None = None

    # ------------------------------------------------------------------ plans

    def plan(
        self,
        runs: Sequence[ActiveTask],
        *,
        running: Sequence[str] = (),
        devices: str | Cluster | None = None,
        num_stages: int | None = None,
        devices_per_stage: int | None = None,
        schedule: Schedule | None = None,
    ) -> Plan:
        """Return the plan for the given tasks; reads shapes and lengths, no weights.

        Args:
            runs: the tasks that could take steps.
            running: names of the tasks that take steps already.
            devices: the devices to plan for, such as "4xA100-80GB"; by default the run's own.
            num_stages: number of stages of each replica; by default 1 on the run's own devices; on other devices as in
                the arguments, or if these ask for none, one pipeline over all devices.
            devices_per_stage: number of devices that share every layer; by default `tensor_parallel_size` of the
                arguments.
            schedule: the schedule of a pipeline: "mux", or a baseline's template over the same buckets; by default that
                of the arguments.

        Raises:
            ConfigError: if not even one task fits into memory, naming the cheapest fixes; for unknown devices, a number
                of them that cannot be divided so, an unreadable profile, or an impossible number of stages.
            UnsupportedModelError: if other devices cannot share the backbone's layers.
        """
        args, loads = self.args, [self.load_of(run) for run in runs]
        inputs = self._inputs(self._target(devices, num_stages, devices_per_stage), loads, schedule)
        target = inputs.target
        if target.is_own:
            self._last_inputs = inputs
        budget = replace(inputs.budget, drains=is_drained(args, target, runs, inputs.loads))
        try:
            outcome = plan_tasks(inputs.loads, inputs.cost, inputs.memory, budget, policy=args.planner, running=running)
        except DoesNotFitError as error:
            load = next(load for load in inputs.loads if load.name == error.task)
            weight_bytes = 1 if quantization_method(self.source.config) is not None else self.source.dtype.itemsize
            fixes = _cheapest_fixes(error, load, inputs.memory, args, weight_bytes)
            raise ConfigError(f"plan: {error} {fixes}") from error
        except ValueError as error:
            raise ConfigError(f"plan: {error} {_STAGE_FIXES}") from error
        layers_per_stage = inputs.cost.layers_per_stage
        # Tasks that wait for memory have no share of a step.
        in_plan = {name for htask in outcome.htasks for name in htask.tasks}
        shares = tuple(
            TaskShare(
                name=run.name,
                batch_size=run.hyper.train_batch_size,
                tokens_per_step=run.loader.tokens_per_step,
                num_steps=run.num_steps,
                adapter_parameters=load.trainable_parameters,
                computed_share=1.0 if load.trie is None else load.tokens / sum(load.lengths),
            )
            for run, load in zip(runs, loads, strict=True)
            if run.name in in_plan
        )
        passes = tuple(
            planned_passes(outcome.htasks, rows, budget.rules, outcome.max_tokens) for rows in inputs.replicas if runs
        )
        return Plan(
            htasks=outcome.htasks,
            shares=shares,
            max_tokens_per_micro_batch=outcome.max_tokens,
            chunk_size=self.collator.rules.size([length for run in runs for length in run.loader.sample_lengths]),
            pad_to_chunks=args.pad_to_chunks,
            memory=outcome.memory or inputs.memory.estimate((), 0),
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
            notes=(
                *target.notes,
                *target_notes(target, layers_per_stage, self.shape, outcome.turns),
                *_run_notes(outcome, runs, target, args),
            ),
            num_replicas=target.num_replicas,
            layers_per_stage=layers_per_stage,
            links=target.stage_links,
            devices_per_stage=target.devices_per_stage,
            passes=passes or (outcome.passes,),
            turns=outcome.turns,
            device_bytes=target.device_bytes,
        )

    def alone_s(
        self,
        runs: Sequence[ActiveTask],
        *,
        devices: str | Cluster | None = None,
        num_stages: int | None = None,
        devices_per_stage: int | None = None,
        schedule: Schedule | None = None,
    ) -> dict[str, float]:
        """Return the predicted seconds of a step of each task if it trained alone, by name; targets as for `plan`."""
        target, step_s = self._target(devices, num_stages, devices_per_stage), {}
        known: dict[TaskLoad, float] = {}
        for run in runs:
            # Tasks of a sweep often differ in nothing that takes time, and are planned once.
            load = replace(self.load_of(run), name="one", num_steps=1, priority=0)
            if load.trie is None and load in known:
                step_s[run.name] = known[load]
                continue
            inputs = self._inputs(target, [load], schedule)
            outcome = plan_tasks(inputs.loads, inputs.cost, inputs.memory, inputs.budget, policy="sequential")
            step_s[run.name] = outcome.step_s
            if load.trie is None:
                known[load] = outcome.step_s
        return step_s

    def gain_of(self, plan: Plan, factors: Parts, runs: Sequence[ActiveTask], **options: Any) -> float:
        """Return how much faster, as a share, a plan made with other factors would be than the current one.

        Both are priced by the same costs, those with the factors.

        Args:
            plan: the plan that is followed.
            factors: measured over predicted time of each part.
            runs: the tasks that could take steps.
            **options: as `plan` takes them.
        """
        before, self.correction.factors = self.correction.factors, factors
        try:
            other = self.plan(runs, **options)
        finally:
            self.correction.factors = before
        inputs = self._last_inputs
        assert inputs is not None, "a plan of the run's own devices was made"
        if not plan.htasks or {share.name for share in plan.shares} != {share.name for share in other.shares}:
            return 0.0
        before_s, after_s = (
            repriced_s(
                priced,
                {load.name: load for load in inputs.loads},
                inputs.cost,
                inputs.budget.rules,
                links=inputs.target.stage_links,
                drains=is_drained(self.args, inputs.target, runs, inputs.loads),
                recomputes=inputs.budget.recomputes,
            )
            for priced in (plan, other)
        )
        return before_s / after_s - 1.0

    # --------------------------------------------------------- facts of a run

    @property
    def profile(self) -> Profile | None:
        """The times that plans use, each part times its factor of `correction`; `None` before the first plan."""
        return None if self._profile is None else corrected(self._profile[0], self.correction.factors)

    def prices(self, stage: int, width: int = 1) -> PassPrices | None:
        """Return what the uncorrected profile predicts for passes of the last own plan; `None` if it is not needed.

        It is not before the first plan, nor with a profile from data sheets, whose parts are too rough to report,
        unless plans are made with the measured times.

        Args:
            stage: stage of the pipeline that this process holds.
            width: the most passes that took turns.
        """
        inputs = self._last_inputs
        if inputs is None or (inputs.profiled.profile.source != "measured" and self.args.measured_times != "plan"):
            return None
        profiled, layers = inputs.profiled, inputs.cost.layers_per_stage
        prices = PassPrices(
            replace(self._cost_model(profiled), layers_per_stage=layers),
            {load.name: load for load in inputs.loads},
            min(stage, profiled.num_stages - 1),
        )
        turns_never_run = profiled.num_stages == 1 and width == 1
        if turns_never_run or not TurnTimes(prices.cost).is_known:
            return prices
        learnt = self.correction.learnt
        known = replace(self._cost_model(profiled.corrected(learnt)), layers_per_stage=layers)
        turns = TurnTimes(known, width, recomputes=self.args.uses_checkpointing)
        return replace(prices, turns=turns, turns_factor=learnt.communication)

    def load_of(self, run: ActiveTask, *, in_chains: bool = True) -> TaskLoad:
        """Return what a task brings into a step of all replicas.

        Args:
            run: the task.
            in_chains: whether rows that are split count as the whole chains of passes that they run in.
        """
        splits = in_chains and self.args.split_long_sequences
        # Of a model that is cut, the shapes from before the cut. A task that was removed and registered again under its
        # name may have other shapes: then those of the model count.
        shapes, known = whole_shapes(self.model, run.name), self._known.get(run.name, {})
        is_part = len(shapes) < len(known) and all(known.get(key) == shape for key, shape in shapes.items())
        return task_load(
            run,
            known if is_part else shapes,
            self.shape.num_layers,
            cut=self.cut_layers,
            chain_tokens=self.args.pass_tokens() if splits else None,
            routed_share=self.shape.routed_share,
        )

    def counted_bytes(self, loads: Sequence[TaskLoad], device_type: str, *, is_fused: bool = False) -> float | None:
        """Return what a pass keeps for each token, counted once on the meta device; `None` for the analytic number.

        Args:
            loads: the loads of the tasks.
            device_type: "cuda" or "cpu".
            is_fused: whether the layers compute by Liger's kernels, which keep less.
        """
        if not loads or quantization_method(self.source.config) is not None:
            return None
        # Once a run: it takes seconds with many tasks (docs/log.md).
        key = device_type, is_fused
        if key not in self._kept_bytes:
            lengths = [length for load in loads for length in load.lengths][:SAMPLE_ROWS]
            self._kept_bytes[key] = count_activation_bytes_per_token(
                self.model,
                lengths,
                dtype=self.source.dtype,
                autocast=torch.bfloat16 if self.args.bf16 else None,
                device_type=device_type,
                checkpointing=self.args.uses_checkpointing,
                liger=(self.args.liger_kernel_config or {}) if is_fused else None,
                selective=self.args.selective_recompute,
            )
        return self._kept_bytes[key]

    # ---------------------------------------------------------------- internal

    def _target(self, devices: str | Cluster | None, num_stages: int | None, devices_per_stage: int | None) -> Target:
        args = self.args
        sharers = args.tensor_parallel_size if devices_per_stage is None else devices_per_stage
        if devices is not None:
            if sharers > 1:
                blocks_of(self.model.backbone, sharers)
            asked = args.pipeline_parallel_size if num_stages is None else num_stages
            stages = asked if asked > 1 else None
            return other_target(args, self.shape, devices, num_stages=stages, devices_per_stage=sharers)
        if self._profile is None:
            self._profile = run_profile(args, self.shape, sharers)
        return run_target(
            args,
            *self._profile,
            num_stages=num_stages or 1,
            devices_per_stage=sharers,
            num_replicas=self.num_replicas,
        )

    def _inputs(self, profiled: Target, loads: Sequence[TaskLoad], schedule: Schedule | None) -> PlanInputs:
        """Return what a plan for a target is made from: rows divided among replicas, layers cut into stages."""
        args = self.args
        target = profiled.corrected(self.correction.factors) if profiled.is_own else profiled
        chosen: Any = schedule or args.pipeline_schedule
        num_chunks = chunks_per_device(chosen, target.num_stages)
        most_stages = self.shape.num_layers // num_chunks
        if not 1 <= target.num_stages <= most_stages:
            field = "pipeline_parallel_size" if target.is_own else "devices"
            each, other = "one layer", ""
            if num_chunks > 1:
                each = f"{num_chunks} layers (interleaved_1f1b: one for each virtual stage)"
                other = ", or another pipeline_schedule"
            raise ConfigError(
                f"plan: {field} must be 1 to {most_stages} stages, because the backbone has {self.shape.num_layers} "
                f"layers and each stage needs {each}, got {target.num_stages}. Take fewer stages{other}."
            )
        # Divided as the rows of every step are.
        lengths, tries = [load.lengths for load in loads], [load.trie for load in loads]
        shares = even_shares(lengths, target.num_replicas, tries=tries)
        replicas = [[part_of(load, rows) for load, rows in zip(loads, share, strict=True)] for share in shares]
        busiest = max(replicas, key=lambda rows: sum(load.tokens for load in rows))
        memory = MemoryModel(
            self.shape,
            num_stages=target.num_stages,
            devices_per_stage=target.devices_per_stage,
            backbone_shards=target.backbone_shards,
            optimizer_shards=target.num_replicas if args.shard_optimizer else 1,
            checkpointing=args.uses_checkpointing,
            activation_bytes_per_token=self.counted_bytes(busiest, target.device_type, is_fused=self._is_fused(target)),
            device_type=target.device_type,
        )
        max_tokens, cost = args.pass_tokens(target.device_type), self._cost_model(target)
        layers = self.cuts.get(target.num_stages) if target.is_own else None
        if target.num_stages == 1:
            layers = (self.shape.num_layers,)
        elif layers is None or min(layers) < num_chunks:
            limit = target.limit_bytes
            layers = choose_layers(busiest, cost, memory, limit, max_tokens=max_tokens, num_chunks=num_chunks)
            if target.is_own and loads:
                # Weights are cut once, and later plans keep the cut, however costs have been corrected since.
                self.cuts.setdefault(target.num_stages, layers)
        if target.is_own and self.most_tokens is not None:
            max_tokens = min(max_tokens, self.most_tokens)
        in_turns: Any = interleaved_passes(args, target)
        budget = Budget(
            max_tokens,
            target.limit_bytes,
            schedule=chosen,
            num_chunks=num_chunks,
            links=target.stage_links,
            num_micro_batches=args.num_micro_batches,
            rules=self.collator.rules,
            interleaved_passes=in_turns,
            recomputes=args.uses_checkpointing,
        )
        cost, memory = replace(cost, layers_per_stage=layers), replace(memory, layers_per_stage=layers)
        return PlanInputs(profiled, target, replicas, busiest, cost, memory, budget)

    def _is_fused(self, target: Target) -> bool:
        """Whether layers compute by Liger's kernels: on the own GPU as they do now, elsewhere as they will."""
        if target.device_type != "cuda":
            return False
        backbone = self.model.backbone
        if target.is_own and next(backbone.parameters()).is_cuda:
            return is_fused(backbone)
        num_devices = target.num_stages * target.devices_per_stage
        return has_fused_layers(execution_of(self.args, num_devices, num_devices * target.num_replicas))

    def _cost_model(self, target: Target) -> CostModel:
        """Return the cost model for a target whose stages have these numbers of layers, by default equal ones."""
        profile = with_recomputed_inputs(target.profile) if self.args.selective_recompute else target.profile
        if profile.graph_tokens and reason_against(self.model) is not None:  # no pass is replayed
            profile = replace(profile, graph_tokens=0)
        return CostModel(
            profile,
            self.shape,
            num_stages=target.num_stages,
            devices_per_stage=target.devices_per_stage,
            tensor_link=target.tensor_link,
            backbone_shards=target.backbone_shards,
        )


def is_drained(
    args: MultiTaskTrainingArguments, target: Target, runs: Sequence[ActiveTask], loads: Sequence[TaskLoad]
) -> bool:
    """Return whether plans should be compared by steps that end in a flush of the pipeline.

    The engine decides it step by step (`peft_mux.trainer.loop`), as logs, evaluations and files are due. A plan only
    needs what is true for most steps: few large buckets of many micro-batches are faster if the pipeline is drained,
    and many small ones if it is not.
    """
    if args.pipeline_flush != "auto" or target.num_stages == 1:
        return True
    # If gradients are summed over processes, all of them meet at the end of every step.
    if target.num_replicas > 1 or target.devices_per_stage > 1:
        return True
    if args.logging_strategy == "steps" and run_interval(args.logging_steps, runs) < _LEAST_STEPS:
        return True
    has_passes_before = any(load.has_reference_forward or load.has_batch_forward for load in loads)
    is_read_ahead = any(run.loader.steps_per_epoch is None for run in runs)
    return has_passes_before or is_read_ahead or any(run.resolved.objective.name == OWN for run in runs)


def _run_notes(
    outcome: Outcome, runs: Sequence[ActiveTask], target: Target, args: MultiTaskTrainingArguments
) -> list[str]:
    """Return remarks on bounds, on the path that adapters take, on rows, and on CUDA graphs."""
    notes, asked = [], args.pass_tokens(target.device_type)
    if outcome.max_tokens < asked:
        notes.append(
            f"passes hold at most {outcome.max_tokens:,} tokens instead of {asked:,}, as no more fit into memory"
        )
    if target.device_type == "cuda":
        # A plan may be for a GPU of another machine.
        reason = reason_against_kernels(torch.device("cuda")) if torch.cuda.is_available() else None
        if not has_triton():
            reason = "Triton is not installed"
        if reason is not None:
            notes.append(f"adapters are computed task by task with torch, as {reason}")
    notes += [remark for run in runs for remark in run.loader.report.remarks]
    notes += [run.sharing_remark for run in runs if run.sharing_remark]
    return notes


def _cheapest_fixes(
    error: DoesNotFitError, load: TaskLoad, memory: MemoryModel, args: MultiTaskTrainingArguments, weight_bytes: int
) -> str:
    """Return a sentence with the three cheapest fixes, each with its predicted peak; those that suffice come first.

    Args:
        error: what does not fit, and by how much.
        load: the task that needs least.
        memory: the memory model that found so.
        args: the arguments of the run.
        weight_bytes: bytes of one frozen weight as it is held; 1 for quantised ones.
    """
    shape, kept = memory.shape, memory.activation_bytes_per_token
    # The change, its cost in words, and what then needs memory; the cheapest for the user first.
    changes: list[tuple[str, str, MemoryModel, TaskLoad]] = []
    if shape.activation_bytes > 2:
        # The count is of activations in the present dtype.
        halved = None if kept is None else kept * 2 / shape.activation_bytes
        in_16_bits = replace(memory, shape=replace(shape, activation_bytes=2), activation_bytes_per_token=halved)
        changes.append(("bf16=True", "activations in 16 bits, faster on a GPU", in_16_bits, load))
    if not args.uses_checkpointing:
        # The count is of passes that keep everything; with checkpointing the formula is used.
        recomputed = replace(memory, checkpointing=True, activation_bytes_per_token=None)
        changes.append(("gradient_checkpointing=True", "about a third more time", recomputed, load))
    if weight_bytes >= 4:
        in_bf16 = replace(memory, shape=shape.in_precision(0.5))
        changes.append(("a backbone in bf16", "rounds the frozen weights to 16 bits", in_bf16, load))
    longest = load.longest
    if longest > 64:
        cut = tuple(min(length, longest // 2) for length in load.lengths)
        shorter = replace(load, lengths=cut, shared=(), trie=None, longest_row_tokens=longest // 2)
        changes.append((f"max_length={longest // 2}", "cuts longer rows", memory, shorter))
    if weight_bytes >= 2:
        # Half a byte a weight and a scale for every 64; other weights stay unchanged, which is ignored here.
        in_4_bits = replace(memory, shape=shape.in_precision(0.56 / weight_bytes))
        what = "a backbone in 4 bits (BitsAndBytesConfig)"
        changes.append((what, "quantises the frozen weights", in_4_bits, load))
    smaller = replace(
        load, trainable_parameters=load.trainable_parameters // 2, cut_parameters=load.cut_parameters // 2
    )
    changes.append(("half the rank", "a smaller adapter", memory, smaller))

    enough, rest = [], []
    for change, cost, changed, needed in changes:
        tokens = least_pass_tokens([needed])
        peak_bytes = max(changed.peak_bytes([needed], tokens, 1, stage) for stage in range(changed.num_stages))
        if peak_bytes <= error.limit_bytes:
            enough.append(f"{change} ({bytes_text(peak_bytes)}; {cost})")
        elif peak_bytes < error.peak_bytes:
            rest.append((peak_bytes, f"{change} ({bytes_text(peak_bytes)}, not enough by itself; {cost})"))
    # Those that suffice stay in the order of their cost to the user; the others are ranked by how much they save.
    chosen = [*enough, *(text for _, text in sorted(rest, key=lambda fix: fix[0]))][:_NUM_FIXES]
    if not chosen:
        return "Take a smaller backbone or a larger device."
    listed = "; ".join(f"{number}. {text}" for number, text in enumerate(chosen, start=1))
    return f"Cheapest fixes, each with its predicted peak: {listed}."
