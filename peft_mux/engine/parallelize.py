"""`ModelPart`: the part of a run's model that one process holds in a layout; `ModelPart.parallelize` creates it.

If every process holds the whole model, it is loaded and moved to its device. Otherwise a process reads only the weights
of its own stage and keeps its tensor parallel rank's part of them. Of every adapter it gets the matching part, with the
same initial values as in a single process.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.allocator import use_expandable_segments
from peft_mux.engine.backbone_source import BackboneSource, assign_settings
from peft_mux.engine.cuda_graphs import CapturedPasses
from peft_mux.engine.divided_adapters import narrow
from peft_mux.engine.executor import Executor
from peft_mux.engine.fsdp import shard_backbone
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import check_layout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.links import PipelineLinks
from peft_mux.engine.pipeline.stage import StageLayout, StageModel, blank_model, is_converted, load_stage
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import ResolvedTask
from peft_mux.engine.tasks.setup import adapters_of
from peft_mux.engine.tensor.interleaving import Interleaving, TurnLinks
from peft_mux.engine.tensor.parallel import PEFT_PREFIX, TensorLinks, TensorParallelModel
from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.kernels.availability import runs_kernels
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.modeling.backbone.digests import weight_digests
from peft_mux.modeling.backbone.liger import fuse_layers, has_liger
from peft_mux.modeling.backbone.modules import adaptable_modules, is_meta
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.scheduler.plan import Plan


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """The part of a run's model that a process holds after parallelizing, and its executor.

    Attributes:
        model: the model of this process, whole or a part, with its weights, on its device, in training mode.
        executor: runs the passes of this process.
        digests: digests of this process's frozen weights by name.
        tensor_parallel: how the model was cut for tensor parallelism; `None` if no replica is.
        links: all-reduces over the tensor parallel group; `None` if no replica has several ranks.
    """

    model: MultiTaskPeftModel
    executor: Executor
    digests: dict[str, str]
    tensor_parallel: TensorParallelModel | None
    links: TensorLinks | None

    def close(self) -> None:
        """Close all connections that only this part uses; all processes must call this at the same time."""
        self.executor.close()
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
        self.source, self.args, self.layout = source, args, layout
        self.place = layout.place(rank)
        replica = layout.replicas[self.place.replica]
        self.num_stages, self.tp_size, self.is_whole = replica.pp, replica.tp, replica.num_gpus == 1
        self._num_chunks = 2 if args.pipeline_schedule == "interleaved_1f1b" else 1

    def check(self, tasks: Sequence[ResolvedTask], backbone: Any) -> None:
        """Reject settings that the layout does not support.

        Args:
            tasks: the tasks of the run, or those that are to join it.
            backbone: the transformers model, possibly without weights.

        Raises:
            ConfigError: if there are any; the message names every task and field.
            UnsupportedModelError: if the architecture cannot be partitioned.
        """
        is_quantized = self.source.quantization is not None
        check_layout(self.layout, is_quantized=is_quantized, args=self.args, tasks=tasks, backbone=backbone)

    def outline(self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> Any:
        """Return the whole model without weights for planning, because `described` itself will be partitioned.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in registration order.
        """
        if self.layout.is_data_parallel or is_meta(described.backbone):
            return described
        # Plans need the whole model, and partitioning consumes `described`.
        with torch.device("meta"):
            backbone = type(described.backbone)(described.backbone.config)
        return assign_settings(MultiTaskPeftModel(backbone, **adapters_of(tasks), verify=False), tasks)

    def parallelize(
        self,
        described: MultiTaskPeftModel,
        tasks: Sequence[ResolvedTask],
        plan: Plan | None,
        processes: Processes,
        keeper_of: Callable[[str], int] | None = None,
    ) -> ParallelModel:
        """Create the part of the model that this process holds, and its executor.

        All processes of the run must call this, because most steps are collective: all processes create process groups
        in the same order. Each process goes through the same steps in any layout; steps that its layout does not need
        do nothing.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in registration order.
            plan: determines the layers of each stage, and is the initial plan of a pipeline; may be `None` if the
                replica of this process has one stage.
            processes: the processes of the run, connected.
            keeper_of: returns the rank that steps a task, if optimizers are sharded.

        Raises:
            ConfigError: if the weights cannot be loaded.
            ProcessError: if another process does not join within the time limit.
        """
        args, layout = self.args, self.layout
        model, stage = self._load_weights(described, tasks, plan)
        digests = weight_digests(model.backbone)  # as they were saved: later steps leave only parts of them

        # Tensor parallelism. Every process takes part in creating all groups, even if its own has one rank. Layers
        # always use links that support interleaved passes.
        links = TensorLinks(layout.tensor_groups, processes) if layout.is_tensor_parallel else None
        turn_links = None if links is None else TurnLinks(links)
        is_sharded = args.shard_backbone and not processes.is_alone
        if stage is None and (is_sharded or not self.is_whole):
            model.verify_once()  # a part of a model computes nothing by itself
        tensor_parallel = None if turn_links is None else TensorParallelModel(model, turn_links)

        if args.device.type == "cuda":
            use_expandable_segments()
        sharded = None
        if is_sharded:
            # FSDP2 moves one unit to the device and cuts it before the next one.
            sharded = shard_backbone(model, processes, stage, None if stage is None else layout)
        model.to(args.device)  # only now, so that no device ever holds what it does not keep
        if not is_sharded and self.is_whole:
            # Packing is verified on the device and in the precision of the passes. A CPU runs the same code in
            # every precision, so the model's own is enough there.
            is_autocast = args.bf16 and args.device.type == "cuda"
            with torch.autocast(args.device.type, dtype=torch.bfloat16) if is_autocast else nullcontext():
                self._fuse_layers(model)
                model.verify_once()
        begin_from_adapters(model, tasks)
        if args.uses_checkpointing:
            model.activation_checkpointing_enable(**args.checkpointing_kwargs)
        model.train()

        interleaving = None
        if turn_links is not None and turn_links.size > 1:
            # The plan determines how many passes are interleaved.
            interleaving = Interleaving(model, turn_links, recomputes=args.uses_checkpointing, processes=processes)
        reduce_dtype = torch.bfloat16 if args.reduce_dtype == "bfloat16" else None
        options: dict[str, Any] = {"keeper_of": keeper_of, "reduce_dtype": reduce_dtype}
        sync = GradientSync(model, processes, layout, is_deferred=is_sharded, **options)
        shared: dict[str, Any] = {"bf16": args.bf16, "sync": sync}
        if stage is not None:
            assert plan is not None, "several stages are planned before they are cut"
            shared |= {"interleaving": interleaving, "sharded": sharded, "pipelines": layout.pipelines}
            executor = PipelineExecutor(stage, plan, processes, **shared)
        else:
            if any(replica.pp > 1 for replica in layout.replicas):
                # This process needs none of them, but every process takes part in creating the groups of all pipelines.
                PipelineLinks(layout.pipelines, self._num_chunks, processes)
            # A run that is resumed captures other passes than before, which pad differently and so round differently.
            graphs = False if args.cuda_graphs == "auto" and args.full_determinism else args.cuda_graphs
            executor = Executor(model, runner=interleaving or sharded, **shared)
            if graphs is True or (graphs == "auto" and args.device.type == "cuda" and processes.is_alone):
                executor.runner = CapturedPasses(model, executor.precision, is_auto=graphs == "auto")
        if plan is not None:
            executor.follow(plan)
        return ParallelModel(model, executor, digests, tensor_parallel, links)

    def _load_weights(
        self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask], plan: Plan | None
    ) -> tuple[MultiTaskPeftModel, StageModel | None]:
        """Return this process's model with its weights, and also as a `StageModel` if it is a pipeline stage."""
        if self.num_stages == 1:
            return self.source.load(described, tasks), None
        assert plan is not None, "several stages are planned before they are cut"
        num_layers, num_chunks = sum(plan.layers_per_stage), self._num_chunks
        layers_per_stage = plan.layers_per_stage
        stages = StageLayout.of(num_layers, self.num_stages, num_chunks=num_chunks, layers_per_stage=layers_per_stage)
        folder = self.source.folder(tasks)
        if folder is not None and is_converted(folder, described.backbone):
            warnings.warn(
                f"every process reads all of {folder}, because transformers converts its tensors.", stacklevel=2
            )
            folder = None
        if folder is None:  # load the whole model and cut it
            whole = self.source.load(described, tasks)
            whole.verify_once()
            stage = StageModel(whole, stages, self.place.stage)
        else:
            adapters = adapters_of(tasks)
            configs, options = adapters["peft_configs"], {"seeds": adapters["seeds"], "dtype": self.source.dtype}
            stage = load_stage(folder, configs, stages, self.place.stage, **options)
        return assign_settings(stage.model, tasks), stage

    def _fuse_layers(self, model: MultiTaskPeftModel) -> None:
        """Let the backbone compute by Liger's kernels if the arguments ask for it or leave it open.

        Raises:
            ConfigError: if it was asked for and cannot be done.
        """
        wanted = self.args.use_liger_kernel
        if wanted is False or (wanted == "auto" and not (has_liger() and runs_kernels(model.device))):
            return
        reason = fuse_layers(model, self.args.liger_kernel_config)
        if reason and wanted is True:
            raise ConfigError(f"args.use_liger_kernel must be False for this model, got True: {reason}.")
        if reason:
            warnings.warn(f"norms, RoPE and MLPs are not fused, because {reason}.", stacklevel=2)


def register_tasks(
    model: MultiTaskPeftModel,
    tasks: Sequence[ResolvedTask],
    *,
    is_whole: bool,
    tensor_parallel: TensorParallelModel | None,
) -> None:
    """Add tasks to a whole or partial model with the same initial weights as in a single process.

    For a part, weights are drawn for the whole adapter, on a backbone without memory for its weights: a part has fewer
    or narrower layers, so the same seed would give other weights.

    Args:
        model: the model of this process: whole, a stage, or a tensor parallel rank's part of one.
        tasks: the new tasks.
        is_whole: whether this process holds the whole model.
        tensor_parallel: how the model was cut for tensor parallelism; `None` if it was not.

    Raises:
        ConfigError: if there are errors; the message names all of them for every new task, and no task is added.
    """
    if is_whole:
        model.register_tasks(**adapters_of(tasks))
    else:
        _register_parts(model, tasks, tensor_parallel)
    assign_settings(model, tasks)
    try:
        begin_from_adapters(model, tasks)
    except ConfigError:
        model.remove_tasks([task.name for task in tasks])
        raise


def begin_from_adapters(model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> None:
    """Load the initial adapters of tasks; for a model without weights, only compare the tensors.

    Raises:
        ConfigError: if a tensor is missing, unexpected or has another shape; the message names the task and the first
            such tensor.
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
    adapters = adapters_of(tasks)
    whole = blank_model(model.backbone, adapters["peft_configs"], adapters["seeds"])
    for task in tasks:
        name = task.name
        drawn, kind = whole.task_parameters(name), kind_of(task.peft_config)
        adapted = {kind.site_of(key).removeprefix(PEFT_PREFIX) for key in drawn if kind.owns(key)}
        here = adapted & set(adaptable_modules(model.backbone))
        completed = whole.peft_config[whole.adapter_of(name)]
        if here:
            own: Any = copy.deepcopy(task.peft_config)
            narrow(own, sorted(here))
            # It was already checked against the whole model, whose layers are wider.
            model.register_tasks(**{**adapters_of([task]), "peft_configs": {name: own}}, are_checked=True)
            if tensor_parallel is not None:
                tensor_parallel.register_pieces([name])
            # The configuration of the whole adapter is saved, without names that belong to this part.
            model.peft_config[model.adapter_of(name)] = copy.deepcopy(completed)
            held = model.task_parameters(name)
            # A head is never cut, and `model.register_tasks` has initialised it.
            model.registry.place_whole(name, {key: drawn[key] if kind.owns(key) else held[key] for key in held})
        else:
            # Still registered by name, because every process must count, sum and finish the same tasks.
            model.registry.register_absent(model, name, copy.deepcopy(completed))
        model.stream.lowest_layers[model.adapter_of(name)] = lowest_layer(drawn)
