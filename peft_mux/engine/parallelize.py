"""`ModelPart`: the part of a run's model that one process holds in a layout, and `parallelize`, which makes it.

If every process holds the whole model, it is loaded and moved to its device. Otherwise a process reads the weights of
its own stage alone, keeps its tensor parallel rank's part of them, and gets of every adapter the part that lies there,
as one process would have drawn it.
"""

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
from peft_mux.engine.fsdp import PassPart, ShardedBackbone, shard_backbone
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.layout_checks import check_layout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.links import PipelineLinks
from peft_mux.engine.pipeline.stage import StageLayout, StageModel, blank_model, is_converted, load_stage
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.resolved import ResolvedTask, configs_of, num_labels_of, seeds_of
from peft_mux.engine.tensor.interleaving import Interleaving, TurnLinks
from peft_mux.engine.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.modeling.backbone.modules import adaptable_modules, is_meta
from peft_mux.modeling.backbone.shape import weight_samples
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.plan import Plan

_PREFIX = "base_model.model."
"""What PEFT's names of parameters have before the backbone's own names."""


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """What a process holds of a run's model once it is parallelized, and what runs it.

    Attributes:
        model: the model of this process, whole or a part, with its weights, on its device, in training mode.
        executor: runs the passes of this process.
        samples: samples of the frozen weights of this process, by name, for a digest of the whole backbone.
        is_whole: whether this process holds the whole model.
        tensor_parallel: how the model was cut for tensor parallelism; `None` if no replica is.
        links: all-reduces over the tensor parallel group; `None` if no replica has several ranks.
    """

    model: MultiTaskPeftModel
    executor: Executor
    samples: dict[str, str]
    is_whole: bool
    tensor_parallel: TensorParallelModel | None
    links: TensorLinks | None

    def register(self, tasks: Sequence[ResolvedTask]) -> None:
        """Add tasks to the model, with the weights that one process would draw for them; see `register_tasks`."""
        register_tasks(self.model, tasks, is_whole=self.is_whole, tensor_parallel=self.tensor_parallel)

    def close(self) -> None:
        """Close the connections within tensor parallel groups; all processes call this at one time."""
        if self.links is not None:
            self.links.close()


class ModelPart:
    """The part of the model that one process holds in a layout.

    Args:
        source: where the backbone comes from.
        args: the arguments of the run.
        layout: which process holds which part of which replica.
        rank: global rank of the process.

    Attributes:
        place: replica, stage and tensor parallel rank of the process.
        num_stages: pipeline stages of this process's replica.
        is_whole: whether this process holds the whole model.
    """

    def __init__(
        self, source: BackboneSource, args: MultiTaskTrainingArguments, layout: ParallelLayout, rank: int
    ) -> None:
        """Remember the run; load nothing."""
        self.source, self.args, self.layout = source, args, layout
        self.place = layout.place(rank)
        replica = layout.replicas[self.place.replica]
        self.num_stages, self.tp_size, self.is_whole = replica.pp, replica.tp, replica.num_gpus == 1
        self._num_chunks = 2 if args.pipeline_schedule == "interleaved_1f1b" else 1

    def check(self, tasks: Sequence[ResolvedTask], backbone: Any) -> None:
        """Refuse what cannot be trained in the layout.

        Args:
            tasks: the tasks of the run, or those that are to join it.
            backbone: the transformers model, possibly without weights.

        Raises:
            ConfigError: naming every task and field.
            UnsupportedModelError: if the architecture cannot be cut.
        """
        is_quantized = self.source.quantization is not None
        check_layout(self.layout, is_quantized=is_quantized, args=self.args, tasks=tasks, backbone=backbone)

    def outline(self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> Any:
        """Return the whole model without weights, from which plans are made while `described` itself will be cut.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in the order in which they came.
        """
        if self.layout.is_data_parallel or is_meta(described.backbone):
            return described
        # Plans are of the whole model, and cutting uses `described` up.
        with torch.device("meta"):
            backbone = type(described.backbone)(described.backbone.config)
        configs, seeds, num_labels = configs_of(tasks), seeds_of(tasks), num_labels_of(tasks)
        model = MultiTaskPeftModel(backbone, configs, seeds=seeds, num_labels=num_labels, verify=False)
        return assign_settings(model, tasks)

    def parallelize(
        self,
        described: MultiTaskPeftModel,
        tasks: Sequence[ResolvedTask],
        plan: Plan | None,
        processes: Processes,
    ) -> ParallelModel:
        """Turn a described model into what this process holds and runs.

        Every process of the run calls this, as most steps are collective: process groups are made, by all processes in
        the same order. Each process goes through the same steps in any layout; those that its layout does not need do
        nothing.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in the order in which they came.
            plan: says how many layers each stage has, and is what a pipeline follows at first; may be `None` if the
                replica of this process has one stage.
            processes: the processes of the run, connected.

        Raises:
            ConfigError: if the weights cannot be loaded.
            ProcessError: if another process does not come within the time limit.
        """
        args, layout = self.args, self.layout
        model, stage = self._load_weights(described, tasks, plan)
        samples = weight_samples(model.backbone)  # as they were saved: later steps leave only parts of them

        # Tensor parallelism. Every process takes part in making the groups of all, also if its own has one rank. Layers
        # are hooked to links that can give turns away, also if passes never run in turns.
        links = TensorLinks(layout.tensor_groups, processes) if layout.is_tensor_parallel else None
        turn_links = None if links is None else TurnLinks(links)
        if stage is None and not self.is_whole:
            model.verify_once()  # a part of a model computes nothing by itself
        tensor_parallel = None if turn_links is None else TensorParallelModel(model, turn_links)

        model.to(args.device)  # only now, so that no device ever holds what it does not keep
        if self.is_whole:
            # Packing is proven on the device and in the precision of the passes. A CPU computes by the same code in
            # every precision, so there the model's own will do.
            is_autocast = args.bf16 and args.device.type == "cuda"
            with torch.autocast(args.device.type, dtype=torch.bfloat16) if is_autocast else nullcontext():
                model.verify_once()
        begin_from_adapters(model, tasks)
        self._prepare_last_layer(model, stage)
        if args.uses_checkpointing:
            model.activation_checkpointing_enable(**args.checkpointing_kwargs)
        model.train()

        is_sharded = args.shard_backbone and not processes.is_alone
        sharded = shard_frozen_weights(model, stage, processes, layout) if is_sharded else None
        interleaving = None
        if turn_links is not None and turn_links.size > 1:
            # How many passes take turns is in the plan, which follows.
            interleaving = Interleaving(model, turn_links, recomputes=args.uses_checkpointing)
        sync = GradientSync(model, processes, layout, is_deferred=is_sharded)
        shared: dict[str, Any] = {"bf16": args.bf16, "sync": sync, "interleaving": interleaving, "sharded": sharded}
        if stage is not None:
            assert plan is not None, "several stages are planned before they are cut"
            executor = PipelineExecutor(stage, plan, processes, pipelines=layout.pipelines, **shared)
        else:
            if any(replica.pp > 1 for replica in layout.replicas):
                # This process needs none of them, but every process takes part in making the groups of all pipelines.
                PipelineLinks(layout.pipelines, self._num_chunks, processes)
            executor = Executor(model, cuda_graphs=args.cuda_graphs, **shared)
        if plan is not None:
            executor.follow(plan)
        return ParallelModel(model, executor, samples, self.is_whole, tensor_parallel, links)

    def _load_weights(
        self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask], plan: Plan | None
    ) -> tuple[MultiTaskPeftModel, StageModel | None]:
        """Return this process's model with its weights, and that model as a stage if it is one of a pipeline."""
        if self.num_stages == 1:
            return self.source.load(described, tasks), None
        assert plan is not None, "several stages are planned before they are cut"
        num_layers, num_chunks = sum(plan.layers_per_stage), self._num_chunks
        layers_per_stage = plan.layers_per_stage
        stages = StageLayout.of(num_layers, self.num_stages, num_chunks=num_chunks, layers_per_stage=layers_per_stage)
        folder = self.source.folder(tasks)
        if folder is not None and is_converted(folder, described.backbone):
            warnings.warn(f"every process reads all of {folder}, as transformers converts its tensors.", stacklevel=2)
            folder = None
        if folder is None:  # weights that no file holds as they are here are loaded whole, and cut
            whole = self.source.load(described, tasks)
            whole.verify_once()
            stage = StageModel(whole, stages, self.place.stage)
        else:
            seeds, dtype = seeds_of(tasks), self.source.dtype
            stage = load_stage(folder, configs_of(tasks), stages, self.place.stage, seeds=seeds, dtype=dtype)
        return assign_settings(stage.model, tasks), stage

    def _prepare_last_layer(self, model: MultiTaskPeftModel, stage: StageModel | None) -> None:
        """Let the last layer compute only the rows that are read, as the arguments say; warn with a reason if not."""
        last_layer = model.last_layer
        last_layer.is_wanted = self.args.last_layer_at_targets is not False
        if not last_layer.is_wanted or (stage is not None and not stage.has_head):
            return
        if stage is not None:
            # All tensor parallel ranks of a stage come here, and sum over each other.
            stage.prove_last_layer()
        last_layer.check_cut(model)
        if last_layer.reason is not None:
            warnings.warn(
                f"the last layer computes all rows, also those that no loss reads, as {last_layer.reason}.",
                stacklevel=2,
            )


def shard_frozen_weights(
    model: MultiTaskPeftModel, stage: StageModel | None, processes: Processes, layout: ParallelLayout
) -> ShardedBackbone:
    """Shard the frozen weights of this process over the processes that hold the same ones (FSDP2), in place."""
    if stage is None:
        return shard_backbone(model, processes)
    last = stage.layout.last_virtual_stage
    parts = {
        number: PassPart(stage.layout.layers_of(number), is_first=number == 0, is_last=number == last)
        for number in stage.virtual_stages
    }
    return shard_backbone(model, processes, layout.stage_groups, parts)


def register_tasks(
    model: MultiTaskPeftModel,
    tasks: Sequence[ResolvedTask],
    *,
    is_whole: bool,
    tensor_parallel: TensorParallelModel | None,
) -> None:
    """Add tasks to a model, whole or a part, with the weights that one process would draw for them.

    For a part, they are drawn for the whole adapter, on a backbone that has shapes but no memory: a part has fewer
    layers, or narrower ones, so the same seed would draw other weights on it.

    Args:
        model: the model of this process: whole, a stage, or a tensor parallel rank's part of one.
        tasks: the new tasks.
        is_whole: whether this process is to hold the whole model.
        tensor_parallel: how the model was cut for tensor parallelism; `None` if it was not.

    Raises:
        ConfigError: naming every fault of every new task; then none is added.
    """
    if is_whole:
        model.register_tasks(configs_of(tasks), seeds=seeds_of(tasks), num_labels=num_labels_of(tasks))
    else:
        _register_parts(model, tasks, tensor_parallel)
    assign_settings(model, tasks)
    try:
        begin_from_adapters(model, tasks)
    except ConfigError:
        model.remove_tasks([task.name for task in tasks])
        raise


def begin_from_adapters(model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> None:
    """Give tasks the weights of the adapters that they begin from; a model without weights only compares the tensors.

    Raises:
        ConfigError: naming the task and the first tensor that is missing, extra or of another shape.
    """
    for task in tasks:
        if (folder := task.task.init_adapter) is None:
            continue
        try:
            model.begin_from(task.name, str(folder), keeps_reference=task.has_adapter_reference)
        except CheckpointError as error:
            raise ConfigError(f"tasks.{task.name}.init_adapter: {error}") from error


def _register_parts(
    model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask], tensor_parallel: TensorParallelModel | None
) -> None:
    """Add tasks to a part of a model; see `register_tasks`."""
    whole = blank_model(model.backbone, configs_of(tasks), seeds_of(tasks))
    for task in tasks:
        name = task.name
        drawn, kind = whole.task_parameters(name), kind_of(task.peft_config)
        adapted = {kind.site_of(key).removeprefix(_PREFIX) for key in drawn if kind.owns(key)}
        here = adapted & set(adaptable_modules(model.backbone))
        completed = whole.peft_config[whole.adapter_of(name)]
        if here:
            own: Any = copy.deepcopy(task.peft_config)
            kind.narrow(own, sorted(here))
            # It was checked against the whole model, whose layers are wider than those here.
            num_labels = num_labels_of([task])
            model.register_tasks({name: own}, seeds=seeds_of([task]), num_labels=num_labels, are_checked=True)
            if tensor_parallel is not None:
                tensor_parallel.register_pieces([name])
            # The configuration of the whole is saved with the adapter, not the names of this part's layers.
            model.peft_config[model.adapter_of(name)] = copy.deepcopy(completed)
            held = model.task_parameters(name)
            # A head is whole if there is one, and was drawn or copied by `model.register_tasks`.
            model.registry.place_whole(name, {key: drawn[key] if kind.owns(key) else held[key] for key in held})
        else:
            # Registered by name all the same: every process must count, sum and end the same tasks.
            model.register_absent(name, copy.deepcopy(completed))
        model.stream.lowest_layers[model.adapter_of(name)] = lowest_layer(drawn)
