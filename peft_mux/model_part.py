"""`ModelPart`: the part of the backbone and of the adapters that this process holds, from loading to arrivals.

Where every process holds the whole model, nothing here does more than load it. Otherwise a process reads the weights of
its own stage alone, cuts its shard out of them, and takes of every adapter what lies there. Initial weights are drawn
for the whole adapter, on a backbone that has shapes but no memory, so that they are those of a run in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftConfig

from peft_mux.arguments import MultiTaskTrainingArguments, resolve
from peft_mux.backbone import Backbone
from peft_mux.engine.data_parallel import GradientSync
from peft_mux.engine.executor import Executor
from peft_mux.engine.interleaved_pass import Interleaving
from peft_mux.engine.interleaved_pipeline import InterleavedPipelineExecutor
from peft_mux.engine.layout import ParallelLayout, Place
from peft_mux.engine.pipeline_links import PipelineLinks
from peft_mux.engine.processes import Processes
from peft_mux.engine.sharded_backbone import gathering_mesh, shard_backbone
from peft_mux.engine.sharded_executor import ShardedExecutor
from peft_mux.engine.tensor_links import TensorLinks
from peft_mux.engine.turn_links import TurnLinks
from peft_mux.engine.work import StepExecutor
from peft_mux.errors import Fault, raise_faults
from peft_mux.modeling.fingerprint import weight_samples
from peft_mux.modeling.injection import is_meta
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stage_layout import StageLayout
from peft_mux.modeling.stage_loading import blank_model, load_stage
from peft_mux.modeling.stages import StageModel, decoder_parts
from peft_mux.modeling.support import adaptable_modules
from peft_mux.modeling.tensor_parallel import TensorShards, shard_model
from peft_mux.modeling.tensor_plan import blocks_of
from peft_mux.optim import ELEMENTWISE
from peft_mux.scheduler.plan import Plan
from peft_mux.task import Task

_PREFIX = "base_model.model."
"""Of PEFT's names, before those of the backbone."""


class ModelPart:
    """What this process holds.

    Args:
        source: where the backbone comes from.
        args: of the run.
        layout: of the processes.
        rank: of this one.

    Attributes:
        place: of this process.
        samples: what the frozen weights were when they were loaded, for a digest of the whole.
        stage: the model as a stage of a pipeline; `None` where there is none.
        shards: the model as a shard of its stage; `None` where there is none.
    """

    def __init__(self, source: Backbone, args: MultiTaskTrainingArguments, layout: ParallelLayout, rank: int) -> None:
        """Remember the run; load nothing."""
        self.source, self.args, self.layout = source, args, layout
        self.place: Place = layout.place(rank)
        self.samples: dict[str, str] = {}
        self.stage: StageModel | None = None
        self.shards: TensorShards | None = None
        self._links: TurnLinks | None = None

    @property
    def num_stages(self) -> int:
        """Of this process's replica."""
        return self.layout.replicas[self.place.replica].pp

    @property
    def num_shards(self) -> int:
        """Of this process's replica."""
        return self.layout.replicas[self.place.replica].tp

    @property
    def is_whole(self) -> bool:
        """Whether this process holds the whole model."""
        return self.num_stages == self.num_shards == 1

    def check(self, tasks: Sequence[Task], backbone: Any) -> None:
        """Refuse what a part of a model cannot do.

        Args:
            tasks: of the run.
            backbone: possibly without weights.

        Raises:
            ConfigError: naming every task and field.
            UnsupportedModelError: if the architecture cannot be cut.
        """
        if self.args.shard_backbone:
            raise_faults(self._sharding_faults())
        if self.layout.is_data_parallel:
            return
        decoder_parts(backbone)
        for num_shards in sorted({replica.tp for replica in self.layout.replicas} - {1}):
            blocks_of(backbone, num_shards)
        has_shards = any(replica.tp > 1 for replica in self.layout.replicas)
        faults = []
        for task in tasks:
            optim = resolve(task, self.args).optim
            if has_shards and optim not in ELEMENTWISE:
                faults.append(
                    Fault(
                        f"tasks.{task.name}.optim",
                        repr(optim),
                        f"{', '.join(sorted(ELEMENTWISE))} with replicas {self.layout}: an optimizer that treats every"
                        " element alike, as parameters are cut",
                        "Set one of these, or tensor_parallel_size=1.",
                    )
                )
        if has_shards and self.args.cuda_graphs:
            faults.append(Fault("args.cuda_graphs", "True", f"False with replicas {self.layout}"))
        raise_faults(faults)

    def _sharding_faults(self) -> list[Fault]:
        """Return what does not go together with dividing the frozen weights among replicas."""
        others = {
            "tensor_parallel_size, pipeline_parallel_size, replicas": str(self.layout),
            "cuda_graphs": "True",
            "model": "a quantised backbone",
        }
        found = (not self.layout.is_data_parallel, self.args.cuda_graphs, self.source.quantization is not None)
        return [
            Fault(f"args.{name}", got, "its default beside shard_backbone=True", "Leave one of the two out.")
            for (name, got), is_fault in zip(others.items(), found, strict=True)
            if is_fault
        ]

    def outline(self, described: MultiTaskPeftModel, tasks: Sequence[Task], counts: Mapping[str, int]) -> Any:
        """Return the whole model without weights, that plans are made with when `described` itself will be cut."""
        if self.layout.is_data_parallel or is_meta(described.backbone):
            return described
        with torch.device("meta"):
            backbone = type(described.backbone)(described.backbone.config)
        return MultiTaskPeftModel(
            backbone, _configs(tasks), seeds=self._seeds(tasks), num_labels=dict(counts), verify=False
        )

    def load(
        self,
        described: MultiTaskPeftModel,
        tasks: Sequence[Task],
        counts: Mapping[str, int],
        plan: Plan | None,
        processes: Processes,
    ) -> MultiTaskPeftModel:
        """Return the model of this process, with its weights, on its device.

        Args:
            described: the whole model, possibly without weights.
            tasks: of the run.
            counts: classes of the tasks that have their own number.
            plan: tells how many layers each stage has; `None` where there is one stage.
            processes: of the run, connected.

        Raises:
            ConfigError: if the weights cannot be loaded.
        """
        if self.num_stages > 1:
            assert plan is not None, "several stages are planned before they are cut"
            self.stage = self._load_stage(described, tasks, counts, plan)
            model = self.stage.model
        else:
            model = self.source.load(described, list(tasks), dict(counts))
        self.samples = weight_samples(model.backbone)
        if any(replica.tp > 1 for replica in self.layout.replicas):
            self._links = TurnLinks(TensorLinks(self.layout.tensor_groups, processes))  # all make the groups of all
            self.shards = shard_model(model, self._links)
        model.to(self.args.device)  # when it is cut, so that no device ever holds what it does not keep
        return model

    def register(
        self, model: MultiTaskPeftModel, configs: Mapping[str, PeftConfig], seeds: Mapping[str, int], counts: Any
    ) -> None:
        """Add tasks to this process's model, with the weights that one process would draw for them.

        Args:
            model: of this process.
            configs: by task.
            seeds: likewise.
            counts: classes, of the tasks that have their own number.

        Raises:
            ConfigError: naming every fault of every new task; then none is added.
        """
        if self.is_whole:
            model.register_tasks(configs, seeds=seeds, num_labels=counts)
            return
        whole = blank_model(model.backbone, configs, seeds)
        for name, config in configs.items():
            self._register_part(model, whole, name, config, seeds, counts)

    def executor(self, model: MultiTaskPeftModel, plan: Plan | None, processes: Processes) -> StepExecutor:
        """Return what runs the passes of this process.

        Args:
            model: of this process.
            plan: that a pipeline follows at first.
            processes: of the run, connected.

        Raises:
            ProcessError: if another process does not come within the time limit.
        """
        if self.args.shard_backbone and not processes.is_alone:
            backbone = shard_backbone(model, processes, gathering_mesh(processes))
            return ShardedExecutor(backbone, bf16=self.args.bf16)
        sync = GradientSync(model, processes, self.layout)
        if self.stage is not None:
            assert plan is not None, "several stages are planned before they are cut"
            pipeline = InterleavedPipelineExecutor(
                self.stage, plan, processes, pipelines=self.layout.pipelines, bf16=self.args.bf16, sync=sync
            )
            pipeline.interleaving = self._interleaving(model)
            return pipeline
        if any(replica.pp > 1 for replica in self.layout.replicas):
            PipelineLinks(self.layout.pipelines, self._num_chunks, processes)  # all make the groups of all
        return Executor(
            model,
            bf16=self.args.bf16,
            cuda_graphs=self.args.cuda_graphs,
            sync=sync,
            interleaving=self._interleaving(model),
        )

    def _interleaving(self, model: MultiTaskPeftModel) -> Interleaving | None:
        """Return what runs passes in turns; `None` where there are no sums of shards to wait for."""
        width = self.args.interleaved_passes
        if self._links is None or self.num_shards == 1 or width == 1:
            return None
        return Interleaving(model, self._links, width=width)

    def close(self) -> None:
        """Give up the connections between shards; all processes call this at one time."""
        if self._links is not None:
            self._links.links.close()

    def _load_stage(
        self, described: MultiTaskPeftModel, tasks: Sequence[Task], counts: Mapping[str, int], plan: Plan
    ) -> StageModel:
        layout = StageLayout.of(
            sum(plan.layers_per_stage),
            self.num_stages,
            num_chunks=self._num_chunks,
            layers_per_stage=plan.layers_per_stage,
        )
        folder = self.source.folder(tasks)
        if folder is None:
            return StageModel(self.source.load(described, list(tasks), dict(counts)), layout, self.place.stage)
        seeds, dtype = self._seeds(tasks), self.source.dtype
        return load_stage(folder, _configs(tasks), layout, self.place.stage, seeds=seeds, dtype=dtype)

    def _register_part(
        self,
        model: MultiTaskPeftModel,
        whole: MultiTaskPeftModel,
        name: str,
        config: PeftConfig,
        seeds: Mapping[str, int],
        counts: Mapping[str, int],
    ) -> None:
        """Add a task to a part of a model, with what the whole model has of it there."""
        drawn = whole.task_parameters(name)
        adapted = {key.split(".lora_")[0].removeprefix(_PREFIX) for key in drawn if ".lora_" in key}
        here = adapted & set(adaptable_modules(model.backbone))
        completed = whole.peft_config[whole.adapter_of(name)]
        if not here:
            model.register_absent(name, copy.deepcopy(completed))
            return
        own: Any = copy.deepcopy(config)
        own.target_modules, own.exclude_modules = sorted(here), None
        own.layers_to_transform = own.layers_pattern = None  # the names are those of single layers
        # It was held against the whole model, whose layers are wider than those here.
        model.register_tasks({name: own}, seeds=seeds, num_labels=counts, are_checked=True)
        if self.shards is not None:
            self.shards.adopt([name])
        model.peft_config[model.adapter_of(name)] = copy.deepcopy(completed)
        own_tensors = model.task_parameters(name)
        # A head is whole where there is one, and drawn or copied as ever.
        model.place_whole(name, {key: drawn[key] if ".lora_" in key else own_tensors[key] for key in own_tensors})

    @property
    def _num_chunks(self) -> int:
        """Virtual stages of a process."""
        return 2 if self.args.pipeline_schedule == "interleaved_1f1b" else 1

    def _seeds(self, tasks: Sequence[Task]) -> dict[str, int]:
        return {task.name: resolve(task, self.args).seed for task in tasks}


def _configs(tasks: Sequence[Task]) -> dict[str, PeftConfig]:
    return {task.name: task.peft_config for task in tasks}
