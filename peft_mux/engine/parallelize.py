"""Tasks that join a model: a part of one gets of each adapter what lies there, as one process would have drawn it."""

# MERGED: `parallelize`: all that is done to a model for a layout of processes, in order, in one place.
# MERGED: Where every process holds the whole model, it is loaded and moved to its device. Otherwise a process reads
# MERGED: the weights
# MERGED: of its own stage alone, keeps its tensor parallel rank's part of them, and of every adapter what lies there.

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.backbone_source import BackboneSource, assign_settings
from peft_mux.engine.executor import Executor
from peft_mux.engine.fsdp.backbone import ShardedBackbone, gathering_mesh, shard_backbone
from peft_mux.engine.fsdp.executors import DeferredSync, ShardedExecutor, ShardedPipelineExecutor, shard_stage
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout, Place
from peft_mux.engine.pipeline.actions import InterleavedActions
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.links import PipelineLinks
from peft_mux.engine.pipeline.stage import StageLayout, StageModel, blank_model, is_converted, load_stage
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.resolved import ResolvedTask, configs_of, num_labels_of, seeds_of
from peft_mux.engine.tensor.interleaving import Interleaving, TurnLinks
from peft_mux.engine.tensor.parallel import TensorLinks, TensorParallelModel, cut_model
from peft_mux.engine.work import StepExecutor
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.modeling.backbone.modules import adaptable_modules
from peft_mux.modeling.backbone.shape import weight_samples
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.plan import Plan

_PREFIX = "base_model.model."
"""What PEFT's names of parameters have before the backbone's own names."""


def register_tasks(
    model: MultiTaskPeftModel,
    tasks: Sequence[ResolvedTask],
    *,
    is_whole: bool,
    tensor_parallel: TensorParallelModel | None,
) -> None:
    """Add tasks to a model, whole or a part, with the weights that one process would draw for them.

    For a part, they are drawn for the whole adapter, on a backbone that has shapes but no memory: a part has fewer
    layers, or narrower ones, so that the same seed would draw other weights on it.

    Args:
        model: the model of this process: whole, a stage, or what a tensor parallel rank holds of one.
        tasks: the new tasks.
        is_whole: whether this process is to hold the whole model.
        tensor_parallel: how the model was cut for tensor parallelism; `None` where it was not.

    Raises:
        ConfigError: naming every fault of every new task; then none is added.
    """
    if is_whole:
        model.register_tasks(configs_of(tasks), seeds=seeds_of(tasks), num_labels=num_labels_of(tasks))
    else:
        whole = blank_model(model.backbone, configs_of(tasks), seeds_of(tasks))
        for task in tasks:
            _register_one(model, whole, task, tensor_parallel)
            model.stream.lowest_layers[model.adapter_of(task.name)] = lowest_layer(whole.task_parameters(task.name))
    assign_settings(model, tasks)


def _register_one(
    model: MultiTaskPeftModel,
    whole: MultiTaskPeftModel,
    task: ResolvedTask,
    tensor_parallel: TensorParallelModel | None,
) -> None:
    """Add a task to a part of a model, with what the whole model has of it there."""
    name, config = task.name, task.peft_config
    drawn, kind = whole.task_parameters(name), kind_of(config)
    adapted = {kind.site_of(key).removeprefix(_PREFIX) for key in drawn if kind.owns(key)}
    here = adapted & set(adaptable_modules(model.backbone))
    completed = whole.peft_config[whole.adapter_of(name)]
    if not here:
        # Known by name all the same: every process must count, sum and end the same tasks.
        model.register_absent(name, copy.deepcopy(completed))
        return
    own: Any = copy.deepcopy(config)
    kind.narrow(own, sorted(here))
    # It was held against the whole model, whose layers are wider than those here.
    model.register_tasks({name: own}, seeds=seeds_of([task]), num_labels=num_labels_of([task]), are_checked=True)
    if tensor_parallel is not None:
        tensor_parallel.register_pieces([name])
    # What is saved with the adapter is the configuration of the whole, not the names of this part's layers.
    model.peft_config[model.adapter_of(name)] = copy.deepcopy(completed)
    own_tensors = model.task_parameters(name)
    # A head is whole where there is one, and drawn or copied as ever.
    model.registry.place_whole(name, {key: drawn[key] if kind.owns(key) else own_tensors[key] for key in own_tensors})


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """What a process holds of a run's model once it is parallelized, and what runs it.

    Attributes:
        model: the model of this process, whole or a part, with its weights, on its device, in training mode.
        executor: runs the passes of this process.
        samples: samples of the frozen weights of this process, by name, for a digest of the whole backbone.
        is_whole: whether this process holds the whole model.
        tensor_parallel: how the model was cut for tensor parallelism; `None` where no replica is.
        links: all-reduces over the tensor parallel group; `None` where no replica has several ranks.
    """

    model: MultiTaskPeftModel
    executor: StepExecutor
    samples: dict[str, str]
    is_whole: bool
    tensor_parallel: TensorParallelModel | None
    links: TensorLinks | None

    def register(self, tasks: Sequence[ResolvedTask]) -> None:
        """Add tasks to the model, with the weights that one process would draw for them.

        Raises:
            ConfigError: naming every fault of every new task; then none is added.
        """
        register_tasks(self.model, tasks, is_whole=self.is_whole, tensor_parallel=self.tensor_parallel)

    def close(self) -> None:
        """Close the connections within tensor parallel groups; all processes call this at one time."""
        if self.links is not None:
            self.links.close()


def parallelize(
    described: MultiTaskPeftModel,
    *,
    source: BackboneSource,
    tasks: Sequence[ResolvedTask],
    args: MultiTaskTrainingArguments,
    layout: ParallelLayout,
    plan: Plan | None,
    processes: Processes,
) -> ParallelModel:
    """Make of a described model what this process holds and runs in a layout.

    Every process of the run calls this, as most steps are collective: process groups are made, and by all processes
    in the same order. Whatever layout there is, each process goes through the same steps; those that its layout does
    not ask for do nothing.

    Args:
        described: the whole model, possibly without weights.
        source: where the backbone comes from.
        tasks: the tasks of the run, in the order in which they came.
        args: the arguments of the run.
        layout: which process holds which part of which replica.
        plan: tells how many layers each stage has, and is what a pipeline follows at first; may be `None` where the
            replica of this process has one stage.
        processes: the processes of the run, connected.

    Raises:
        ConfigError: if the weights cannot be loaded.
        ProcessError: if another process does not come within the time limit.
    """
    place = layout.place(processes.rank)
    stages = _cut_into_stages(layout, place, plan, args)
    model, stage = _load_weights(described, source, tasks, stages, place)
    samples = weight_samples(model.backbone)  # as they were saved: what follows leaves only parts of them
    is_whole = layout.replicas[place.replica].num_gpus == 1
    if stage is None and not is_whole:
        model.verify_once()  # a part of a model computes nothing by itself
    links = _connect_tensor_parallel(layout, processes)
    # Also where passes never run in turns: layers are hooked to one kind of links, which then waits at once.
    turn_links = None if links is None else TurnLinks(links)
    tensor_parallel = None if turn_links is None else cut_model(model, turn_links)
    model.to(args.device)  # only now, so that no device ever holds what it does not keep
    if is_whole:
        _verify_where_it_trains(model, args)
    _prepare_last_layer(model, stage, args)
    _checkpoint_activations(model, args)
    model.train()
    sharded = _shard_frozen_weights(model, stage, args, layout, processes)
    interleaving = _interleave_passes(model, turn_links, args)
    executor = _make_executor(
        model, stage, plan, args=args, layout=layout, processes=processes, sharded=sharded, interleaving=interleaving
    )
    if plan is not None:
        executor.follow(plan)
    return ParallelModel(model, executor, samples, is_whole, tensor_parallel, links)


# ---------------------------------------------------------------------- steps


def _cut_into_stages(
    layout: ParallelLayout, place: Place, plan: Plan | None, args: MultiTaskTrainingArguments
) -> StageLayout | None:
    """Return which layers lie in which stage; `None` where the replica of this process has one stage."""
    num_stages = layout.replicas[place.replica].pp
    if num_stages == 1:
        return None
    assert plan is not None, "several stages are planned before they are cut"
    return StageLayout.of(
        sum(plan.layers_per_stage),
        num_stages,
        num_chunks=_num_chunks(args),
        layers_per_stage=plan.layers_per_stage,
    )


def _load_weights(
    described: MultiTaskPeftModel,
    source: BackboneSource,
    tasks: Sequence[ResolvedTask],
    stages: StageLayout | None,
    place: Place,
) -> tuple[MultiTaskPeftModel, StageModel | None]:
    """Return this process's model with its weights, and that model as a stage of a pipeline, where it is one."""
    if stages is None:
        return source.load(described, tasks), None
    folder = source.folder(tasks)
    if folder is not None and is_converted(folder, described.backbone):
        warnings.warn(f"every process reads all of {folder}, as transformers converts its tensors.", stacklevel=2)
        folder = None
    if folder is None:  # weights that no file holds as they are here come whole, and are cut
        whole = source.load(described, tasks)
        whole.verify_once()
        stage = StageModel(whole, stages, place.stage)
    else:
        seeds, dtype = seeds_of(tasks), source.dtype
        stage = load_stage(folder, configs_of(tasks), stages, place.stage, seeds=seeds, dtype=dtype)
    return assign_settings(stage.model, tasks), stage


def _connect_tensor_parallel(layout: ParallelLayout, processes: Processes) -> TensorLinks | None:
    """Return the all-reduces of tensor parallel groups; `None` where no stage of the run has several ranks."""
    if all(replica.tp == 1 for replica in layout.replicas):
        return None
    # Also where this process's own group has one rank: every process has to take part in making the groups of all.
    return TensorLinks(layout.tensor_groups, processes)


def _verify_where_it_trains(model: MultiTaskPeftModel, args: MultiTaskTrainingArguments) -> None:
    """Prove packing on the device and in the precision of the passes, unless that was done.

    Raises:
        UnsupportedModelError: if packing would change the model's results.
    """
    # A CPU computes by the same code in every precision, so that there the model's own will do.
    is_autocast = args.bf16 and args.device.type == "cuda"
    with torch.autocast(args.device.type, dtype=torch.bfloat16) if is_autocast else nullcontext():
        model.verify_once()


def _prepare_last_layer(model: MultiTaskPeftModel, stage: StageModel | None, args: MultiTaskTrainingArguments) -> None:
    """Let the last layer compute the rows alone that are read, as the arguments say; tell why where it does not."""
    last_layer = model.last_layer
    last_layer.is_wanted = args.last_layer_at_targets is not False
    if not last_layer.is_wanted or (stage is not None and not stage.has_head):
        return
    if stage is not None:
        # All tensor parallel ranks of a stage come here, and sum over each other.
        stage.prove_last_layer()
    last_layer.check_cut(model)
    if last_layer.reason is not None:
        warnings.warn(
            f"the last layer computes all rows, also those that no loss reads, as {last_layer.reason}.", stacklevel=2
        )


def _checkpoint_activations(model: MultiTaskPeftModel, args: MultiTaskTrainingArguments) -> None:
    """Let each layer's activations be recomputed in the backward pass, where the arguments say so."""
    if args.uses_checkpointing:
        model.activation_checkpointing_enable(**args.checkpointing_kwargs)


def _shard_frozen_weights(
    model: MultiTaskPeftModel,
    stage: StageModel | None,
    args: MultiTaskTrainingArguments,
    layout: ParallelLayout,
    processes: Processes,
) -> ShardedBackbone | None:
    """Return the model with its frozen weights sharded over the replicas (FSDP2); `None` where they stay whole."""
    if not args.shard_backbone or processes.is_alone:
        return None
    if stage is not None:
        return shard_stage(stage, processes, layout)
    return shard_backbone(model, processes, gathering_mesh(processes))


def _interleave_passes(
    model: MultiTaskPeftModel, links: TurnLinks | None, args: MultiTaskTrainingArguments
) -> Interleaving | None:
    """Return what runs passes in turns, as many as the plan says; `None` where no pass waits for an all-reduce."""
    if links is None or links.size == 1:
        return None
    # How many passes take turns is in the plan, which follows.
    return Interleaving(model, links, recomputes=args.uses_checkpointing)


def _make_executor(
    model: MultiTaskPeftModel,
    stage: StageModel | None,
    plan: Plan | None,
    *,
    args: MultiTaskTrainingArguments,
    layout: ParallelLayout,
    processes: Processes,
    sharded: ShardedBackbone | None,
    interleaving: Interleaving | None,
) -> StepExecutor:
    """Return what runs the passes of this process: a pipeline's, one that gathers sharded weights, or the plain one."""
    if stage is not None:
        assert plan is not None, "several stages are planned before they are cut"
        options: dict[str, Any] = {"pipelines": layout.pipelines, "bf16": args.bf16}
        if sharded is not None:
            sync = DeferredSync(model, processes, layout)
            return ShardedPipelineExecutor(stage, plan, sharded, sync=sync, **options)
        sync = GradientSync(model, processes, layout)
        actions = None if interleaving is None else InterleavedActions(stage, interleaving, bf16=args.bf16)
        return PipelineExecutor(stage, plan, processes, sync=sync, actions=actions, **options)
    if sharded is not None:
        return ShardedExecutor(sharded, bf16=args.bf16)
    if any(replica.pp > 1 for replica in layout.replicas):
        # This process needs none of them, but every process has to take part in making the groups of all pipelines.
        PipelineLinks(layout.pipelines, _num_chunks(args), processes)
    # Nobody has asked for graphs of passes that wait for other processes, so none are tried.
    is_cut = any(replica.tp > 1 for replica in layout.replicas)
    cuda_graphs = False if args.cuda_graphs == "auto" and is_cut else args.cuda_graphs
    sync = GradientSync(model, processes, layout)
    return Executor(model, bf16=args.bf16, cuda_graphs=cuda_graphs, sync=sync, interleaving=interleaving)


def _num_chunks(args: MultiTaskTrainingArguments) -> int:
    """Return the virtual stages of a process."""
    return 2 if args.pipeline_schedule == "interleaved_1f1b" else 1
