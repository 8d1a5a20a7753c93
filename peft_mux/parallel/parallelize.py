"""`ParallelPart`: what one of several processes holds of a run's model: all of it, or a part.

A process reads only the weights of its own stage, and keeps its tensor parallel rank's part of them. Of every adapter
it gets the matching part, with the same initial values as in a single process.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.task_state import TaskState
from peft_mux.engine.backbone_source import BackboneSource, assign_settings
from peft_mux.engine.executor import Executor
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.model_part import ModelPart, complete_tasks
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import ActiveTask, ResolvedTask, TaskTable
from peft_mux.engine.tasks.optimizer import TaskOptimizer
from peft_mux.engine.tasks.setup import adapters_of
from peft_mux.engine.work import StepResult
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.modeling.backbone.modules import adaptable_modules, head_kind_for, is_meta
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.cells import CellSync
from peft_mux.parallel.fsdp import ShardedBackbone, shard_backbone
from peft_mux.parallel.keepers import KeeperSync, OptimizerShards
from peft_mux.parallel.layout import check_layout
from peft_mux.parallel.pipeline.executor import PipelineExecutor
from peft_mux.parallel.pipeline.links import PipelineLinks
from peft_mux.parallel.pipeline.pipeline_plan import PipelinePlan
from peft_mux.parallel.pipeline.stage import StageLayout, StageModel, blank_model, is_converted, load_stage
from peft_mux.parallel.task_states import gather_state
from peft_mux.parallel.tensor.interleaving import Interleaving, TurnLinks
from peft_mux.parallel.tensor.parallel import PEFT_PREFIX, TensorLinks, TensorParallelModel
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.scheduler.plan import Plan


class ParallelPart(ModelPart):
    """The part of the model that one process holds in a layout.

    Processes that hold the whole model share it if their frozen weights (`shard_backbone`) or their optimizers
    (`shard_optimizer`) are sharded. Every process goes through the same steps in any layout, because many of them are
    collective; steps that its layout does not need do nothing.
    """

    def __init__(
        self, source: BackboneSource, args: MultiTaskTrainingArguments, layout: ParallelLayout, rank: int
    ) -> None:
        super().__init__(source, args, layout, rank)
        self._num_chunks = 2 if args.pipeline_schedule == "interleaved_1f1b" else 1
        self._stage: StageModel | None = None
        self._tensor_links: TensorLinks | None = None
        self._links: TurnLinks | None = None  # the same, for interleaved passes too
        self._tensor_parallel: TensorParallelModel | None = None
        self._sharded: ShardedBackbone | None = None
        self._shards: OptimizerShards | None = None

    @property
    def runs_whole_model(self) -> bool:
        """Whether this process alone has all weights that its passes need."""
        return self.is_whole and self._sharded is None

    def check(self, tasks: Sequence[ResolvedTask], backbone: Any) -> None:
        """Reject settings that the layout does not support; see `ModelPart.check`."""
        is_quantized = self.source.quantization is not None
        check_layout(self.layout, is_quantized=is_quantized, args=self.args, tasks=tasks, backbone=backbone)

    def outline(self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> MultiTaskPeftModel:
        """Return the whole model without weights for planning, because `described` itself will be partitioned."""
        if self.layout.is_data_parallel or is_meta(described.backbone):
            return described
        # Plans need the whole model, and partitioning consumes `described`.
        with torch.device("meta"):
            backbone = type(described.backbone)(described.backbone.config)
        return assign_settings(MultiTaskPeftModel(backbone, **adapters_of(tasks), verify=False), tasks)

    def _divide(self, model: MultiTaskPeftModel, processes: Processes) -> None:
        """Cut the model for tensor parallelism, or shard its frozen weights; all processes call this."""
        layout, stage = self.layout, self._stage
        is_sharded = self.args.shard_backbone and not processes.is_alone
        # Every process takes part in creating all groups, even if its own has one rank.
        if layout.is_tensor_parallel:
            self._tensor_links = TensorLinks(layout.tensor_groups, processes)
            self._links = TurnLinks(self._tensor_links)
        if stage is None and (is_sharded or not self.is_whole):
            model.verify_once()  # a part of a model computes nothing by itself
        if self._links is not None:
            self._tensor_parallel = TensorParallelModel(model, self._links)
        if is_sharded:
            # FSDP2 moves one unit to the device and cuts it before the next one.
            self._sharded = shard_backbone(model, processes, stage, None if stage is None else layout)

    def _make_executor(
        self, model: MultiTaskPeftModel, plan: Plan | None, processes: Processes, table: TaskTable
    ) -> Executor:
        args, layout, stage = self.args, self.layout, self._stage
        if args.shard_optimizer and not processes.is_alone:
            self._shards, self.has_keepers = OptimizerShards(processes, table, model), True
        if self.has_keepers or not layout.is_data_parallel:
            self.gather_state = self._gather_state
        interleaving = None
        if self._links is not None and self._links.size > 1:
            # The plan determines how many passes are interleaved.
            interleaving = Interleaving(model, self._links, recomputes=args.uses_checkpointing, processes=processes)
        sums: dict[str, Any] = {
            "is_deferred": self._sharded is not None,
            "reduce_dtype": torch.bfloat16 if args.reduce_dtype == "bfloat16" else None,
        }
        if not layout.is_data_parallel:
            sync: GradientSync = CellSync(model, processes, layout, **sums)
        elif self._shards is not None:
            sync = KeeperSync(model, processes, self._shards, **sums)
        else:
            sync = GradientSync(model, processes, **sums)
        shared: dict[str, Any] = {"bf16": args.bf16, "sync": sync}
        if stage is not None:
            assert plan is not None, "several stages are planned before they are cut"
            shared |= {"interleaving": interleaving, "sharded": self._sharded, "pipelines": layout.pipelines}
            return PipelineExecutor(stage, PipelinePlan.of(plan), processes, **shared)
        if any(replica.pp > 1 for replica in layout.replicas):
            # This process needs none of them, but every process takes part in creating the groups of all pipelines.
            PipelineLinks(layout.pipelines, self._num_chunks, processes)
        return Executor(model, runner=interleaving or self._sharded, **shared)

    def _read_weights(
        self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask], plan: Plan | None
    ) -> MultiTaskPeftModel:
        """Return the model of this process's stage, with its weights."""
        if self.num_stages == 1:
            return super()._read_weights(described, tasks, plan)
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
            self._stage = StageModel(whole, stages, self.place.stage)
        else:
            adapters = adapters_of(tasks)
            configs, options = adapters["peft_configs"], {"seeds": adapters["seeds"], "dtype": self.source.dtype}
            self._stage = load_stage(folder, configs, stages, self.place.stage, **options)
        return assign_settings(self._stage.model, tasks)

    def register(self, model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> None:
        """Add tasks to this process's part of the model."""
        if self.is_whole:
            super().register(model, tasks)
        else:
            register_parts(model, tasks, self._tensor_parallel)

    def assign_keeper(self, optimizer: TaskOptimizer, before: TaskOptimizer | None) -> None:
        """Choose the process that steps a task if optimizers are sharded; it stays the same for a task."""
        if self._shards is not None:
            optimizer.keeper = self._shards.choose_keeper() if before is None else before.keeper
            optimizer.steps_here = optimizer.keeper == self._shards.processes.rank

    def apply(self, table: TaskTable, result: StepResult) -> None:
        """Step every task with the gradients of a step, here or on its keeper."""
        if self._shards is None:
            super().apply(table, result)
        else:
            self._shards.apply(result)

    def _gather_state(self, task: ActiveTask, *, only_weights: bool = False) -> TaskState | None:
        """Return the whole state of a task on the first process; all processes call this."""
        # The executor's model, as a bound one would stay in memory after `close`.
        assert self.executor is not None, "states are gathered while a model is loaded"
        processes, model = self.executor.sync.processes, self.executor.model
        return gather_state(processes, self.layout, model, task, only_weights=only_weights)

    def close(self) -> None:
        """Let go of the model and close connections that only this part uses; all processes call this together."""
        super().close()
        if self._tensor_links is not None:
            self._tensor_links.close()
        self._stage = self._tensor_links = self._links = self._tensor_parallel = self._sharded = self._shards = None


def register_parts(
    model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask], tensor_parallel: TensorParallelModel | None
) -> None:
    """Add tasks to a part of a model with the same initial weights as in a single process.

    Weights are drawn for the whole adapter, on a backbone without memory for its weights: a part has fewer or narrower
    layers, so the same seed would give other weights.

    Args:
        model: the model of this process: a stage, or a tensor parallel rank's part of one.
        tasks: the new tasks.
        tensor_parallel: how the model was cut for tensor parallelism; `None` if it was not.

    Raises:
        ConfigError: if there are errors; the message names all of them for every new task, and no task is added.
    """
    adapters = adapters_of(tasks)
    whole = blank_model(model.backbone, adapters["peft_configs"], adapters["seeds"])
    for task in tasks:
        name = task.name
        drawn, kind = whole.task_parameters(name), kind_of(task.peft_config)
        adapted = {kind.site_of(key).removeprefix(PEFT_PREFIX) for key in drawn if kind.owns(key)}
        here = adapted & set(adaptable_modules(model.backbone))
        completed = whole.peft_config[whole.adapter_of(name)]
        if here:
            part_config: Any = copy.deepcopy(task.peft_config)
            narrow(part_config, sorted(here))
            # It was already checked against the whole model, whose layers are wider.
            model.register_tasks(**{**adapters_of([task]), "peft_configs": {name: part_config}}, are_checked=True)
            if tensor_parallel is not None:
                tensor_parallel.register_pieces([name])
            # The configuration of the whole adapter is saved, without names that belong to this part.
            model.peft_config[model.adapter_of(name)] = copy.deepcopy(completed)
            held = model.task_parameters(name)
            # A head is never cut, and `model.register_tasks` has initialised it.
            model.registry.place_whole(name, {key: drawn[key] if kind.owns(key) else held[key] for key in held})
        else:
            # Still registered by name, because every process must count, sum and finish the same tasks.
            model.peft_config[model.registry.add(name, completed)] = copy.deepcopy(completed)
            model.objectives.add(name, head_kind_for(completed.task_type))
            model.registry.adopt(name, {}, model.device)
            model.stream.clear_tables()
        model.stream.lowest_layers[model.adapter_of(name)] = lowest_layer(drawn)
    complete_tasks(model, tasks)


def narrow(config: Any, modules: Sequence[str]) -> None:
    """Let a copy of a configuration adapt exactly the modules of these full names, those of one stage."""
    config.target_modules = list(modules)
    for field in ("exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"):
        if hasattr(config, field):
            setattr(config, field, None)
