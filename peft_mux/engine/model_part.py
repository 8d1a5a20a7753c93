"""What a layout of processes cannot do: refused with the names of tasks and fields, before any weight is read."""

# MERGED: `ModelPart`: the part of a run's model that one process holds in a layout of processes.

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from peft_mux.arguments import ELEMENTWISE, MultiTaskTrainingArguments
from peft_mux.data.formats import RowForm
from peft_mux.engine.backbone_source import BackboneSource, assign_settings
from peft_mux.engine.layout import ParallelLayout, Place
from peft_mux.engine.parallelize import ParallelModel, parallelize
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.resolved import ResolvedTask, configs_of, num_labels_of, seeds_of
from peft_mux.engine.tensor.cut import blocks_of
from peft_mux.errors import Fault, raise_faults, shown
from peft_mux.modeling.adapters.fields import divided_model_faults
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.lora.config import convert
from peft_mux.modeling.adapters.prompts.kinds import PromptKind
from peft_mux.modeling.backbone.families import family_of
from peft_mux.modeling.backbone.modules import is_meta
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import WORDS
from peft_mux.modeling.objectives.task_objective import columns_of
from peft_mux.scheduler.plan import Plan


def check_layout(
    layout: ParallelLayout,
    *,
    source: BackboneSource,
    args: MultiTaskTrainingArguments,
    tasks: Sequence[ResolvedTask],
    backbone: Any,
) -> None:
    """Refuse what cannot be trained in a layout.

    Args:
        layout: which process holds which part of which replica.
        source: where the backbone comes from.
        args: the arguments of the run.
        tasks: the tasks of the run, or those that are to join it.
        backbone: the transformers model, possibly without weights.

    Raises:
        ConfigError: naming every task and field.
        UnsupportedModelError: if the architecture cannot be cut.
    """
    raise_faults([*_generation_faults(layout, args, tasks), *_turn_faults(layout, args)])
    if args.shard_backbone:
        sharded = [*_sharding_faults(layout, source, args), *_sharded_prompt_faults(tasks)]
        divided = [*_divided_faults(tasks, "shard_backbone=True"), *_word_faults("shard_backbone=True", tasks)]
        raise_faults([*sharded, *divided])
    if layout.is_data_parallel:
        return
    raise_faults(_divided_faults(tasks, f"replicas {layout}"))
    # Called for what it refuses, like `blocks_of` below.
    family_of(backbone)
    faults = [fault for task in tasks for fault in kind_of(task.peft_config).refusals(layout, f"tasks.{task.name}")]
    faults += _bare_parameter_faults(layout, tasks, backbone)
    sizes = sorted({replica.tp for replica in layout.replicas} - {1})
    for tp_size in sizes:
        blocks_of(backbone, tp_size)
    if sizes:
        faults += _tensor_parallel_faults(layout, args, tasks)
        faults += _word_faults(f"replicas {layout}, which divide the vocabulary", tasks)
    raise_faults(faults)


def _turn_faults(layout: ParallelLayout, args: MultiTaskTrainingArguments) -> list[Fault]:
    """Return a fault for passes in turns that would never wait for anybody."""
    # A run that may move to other replicas can have use of it there.
    if args.interleaved_passes in ("auto", 1) or args.redeploy or any(replica.tp > 1 for replica in layout.replicas):
        return []
    fix = "Leave it out: turns hide sums of tensor parallelism, which no replica has here."
    return [Fault("args.interleaved_passes", str(args.interleaved_passes), f'"auto" or 1 with replicas {layout}', fix)]


def _bare_parameter_faults(layout: ParallelLayout, tasks: Sequence[ResolvedTask], backbone: Any) -> list[Fault]:
    """Return a fault for every task that adapts bare parameters, which no part of a model knows how to hold."""
    faults = []
    for task in tasks:
        config: Any = copy.deepcopy(task.peft_config)
        field = "target_parameters" if getattr(config, "target_parameters", None) else "target_modules"
        given = shown(getattr(config, field, None))
        if hasattr(config, "target_parameters"):
            convert(config, backbone)  # "all-linear" names experts of a mixture too
        if targets := getattr(config, "target_parameters", None):
            allowed = f"layers with replicas {layout}, as processes that hold a part of the model divide layers alone"
            got = given if field == "target_parameters" else f"{given}, which on this mixture adapts {shown(targets)}"
            fix = (
                'Name layers of attention in target_modules, such as ["q_proj", "v_proj"], or let every process hold '
                "the whole model (data parallelism, shard_backbone=True)."
            )
            faults.append(Fault(f"tasks.{task.name}.peft_config.{field}", got, allowed, fix))
    return faults


def _divided_faults(tasks: Sequence[ResolvedTask], layout: str) -> list[Fault]:
    """Return what tasks ask for that needs the whole backbone in a process."""
    return [
        fault
        for task in tasks
        for fault in divided_model_faults(task.peft_config, f"tasks.{task.name}.peft_config", layout)
    ]


def _generation_faults(
    layout: ParallelLayout, args: MultiTaskTrainingArguments, tasks: Sequence[ResolvedTask]
) -> list[Fault]:
    """Return the tasks whose evaluations generate, where a process holds a part of the model only."""
    if layout.is_data_parallel and not args.shard_backbone:
        return []
    got = f"replicas {layout}{' with shard_backbone=True' if args.shard_backbone else ''}"
    allowed = "None where a process holds a part of the model"
    fix = "Give every process the whole model, or evaluate the saved adapters with peft_mux.generate in one process."
    return [
        Fault(f"tasks.{task.name}.eval_generate", got, allowed, fix)
        for task in tasks
        if task.task.generate_options is not None
    ]


def _sharding_faults(layout: ParallelLayout, source: BackboneSource, args: MultiTaskTrainingArguments) -> list[Fault]:
    """Return what does not go together with sharded frozen weights (FSDP2)."""
    others = {"cuda_graphs": "True", "model": "a quantised backbone"}
    found = (args.cuda_graphs is True, source.quantization is not None)
    faults = [
        Fault(f"args.{name}", got, "its default beside shard_backbone=True", "Leave one of the two out.")
        for (name, got), is_fault in zip(others.items(), found, strict=True)
        if is_fault
    ]
    # What a process holds of a stage is sharded over the replicas, which must have cut the backbone alike.
    if layout.is_data_parallel or (layout.are_alike and not layout.is_tensor_parallel and layout.num_replicas > 1):
        return faults
    where = "args.tensor_parallel_size, pipeline_parallel_size, replicas"
    allowed = "no tensor parallelism beside shard_backbone=True"
    if layout.is_tensor_parallel:
        got, fix = f"{layout}, with tensor parallelism", "Leave one of the two out: both divide each layer."
    elif layout.are_alike:
        got, allowed = f"{layout}, a single replica", "several replicas, which share the weights of each stage"
        fix = f"Start twice as many processes, {2 * layout.world_size}, or more; or leave shard_backbone out."
    else:
        got, allowed = f"{layout}, unlike replicas", "replicas of as many stages each beside shard_backbone=True"
        fix = "Replicas share the weights of each stage, so all have to cut the backbone alike."
    return [*faults, Fault(where, got, allowed, fix)]


def _sharded_prompt_faults(tasks: Sequence[ResolvedTask]) -> list[Fault]:
    """Return the tasks whose prompts are made, or read, outside of the units that FSDP2 gathers."""
    kinds = [(task, kind_of(task.peft_config)) for task in tasks]
    fix = "Leave shard_backbone out, or train LORA."
    return [
        Fault(f"tasks.{task.name}.peft_config", f"{kind.title} with shard_backbone=True", "types of layers", fix)
        for task, kind in kinds
        if isinstance(kind, PromptKind)
    ]


def _word_faults(layout: str, tasks: Sequence[ResolvedTask]) -> list[Fault]:
    """Return the tasks whose rows name several words for each target, which needs the whole output head at hand."""
    faults = []
    for task in tasks:
        form = task.objective.row_form
        named = [name for name in WORDS if name in form.token_columns and name in _known_columns(task, form)]
        if named:
            got = f'rows with "{named[0]}" beside {layout}'
            allowed = "one target for each token in this layout"
            fix = "Give every process the whole output head (no tensor_parallel_size, no shard_backbone)."
            faults.append(Fault(f"tasks.{task.name}.train_dataset", got, allowed, fix))
    return faults


def _known_columns(task: ResolvedTask, form: RowForm) -> set[str]:
    required = {name for name, column in form.token_columns.items() if column.is_required}
    return required | columns_of(task.task.train_dataset)


def _tensor_parallel_faults(
    layout: ParallelLayout, args: MultiTaskTrainingArguments, tasks: Sequence[ResolvedTask]
) -> list[Fault]:
    """Return what does not go together with tensor parallelism, which cuts parameters of adapters."""
    faults = [
        Fault(
            f"tasks.{task.name}.optim",
            repr(optim),
            f"{', '.join(sorted(ELEMENTWISE))} with replicas {layout}: an optimizer that treats every"
            " element alike, as parameters are cut",
            "Set one of these, or tensor_parallel_size=1.",
        )
        for task in tasks
        if (optim := task.hyper.optim) not in ELEMENTWISE
    ]
    if args.cuda_graphs is True:
        faults.append(Fault("args.cuda_graphs", "True", f"False with replicas {layout}"))
    return faults


class ModelPart:
    """The part of the model that one process holds in a layout: what is known of it before anything is loaded.

    Args:
        source: where the backbone comes from.
        args: the arguments of the run.
        layout: which process holds which part of which replica.
        rank: global rank of the process.

    Attributes:
        place: replica, stage and tensor parallel rank of the process.
    """

    def __init__(
        self, source: BackboneSource, args: MultiTaskTrainingArguments, layout: ParallelLayout, rank: int
    ) -> None:
        """Remember the run; load nothing."""
        self.source, self.args, self.layout = source, args, layout
        self.place: Place = layout.place(rank)

    @property
    def num_stages(self) -> int:
        """Pipeline stages of this process's replica."""
        return self.layout.replicas[self.place.replica].pp

    @property
    def tp_size(self) -> int:
        """Tensor parallel ranks of each stage of this process's replica."""
        return self.layout.replicas[self.place.replica].tp

    @property
    def is_whole(self) -> bool:
        """Whether this process holds the whole model."""
        return self.layout.replicas[self.place.replica].num_gpus == 1

    def check(self, tasks: Sequence[ResolvedTask], backbone: Any) -> None:
        """Refuse what cannot be trained in the layout.

        Args:
            tasks: the tasks of the run, or those that are to join it.
            backbone: the transformers model, possibly without weights.

        Raises:
            ConfigError: naming every task and field.
            UnsupportedModelError: if the architecture cannot be cut.
        """
        check_layout(self.layout, source=self.source, args=self.args, tasks=tasks, backbone=backbone)

    def outline(self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> Any:
        """Return the whole model without weights, that plans are made with when `described` itself will be cut.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in the order in which they came.
        """
        if self.layout.is_data_parallel or is_meta(described.backbone):
            return described
        # Plans are of the whole model, and cutting uses `described` up.
        with torch.device("meta"):
            backbone = type(described.backbone)(described.backbone.config)
        model = MultiTaskPeftModel(
            backbone, configs_of(tasks), seeds=seeds_of(tasks), num_labels=num_labels_of(tasks), verify=False
        )
        return assign_settings(model, tasks)

    def parallelize(
        self,
        described: MultiTaskPeftModel,
        tasks: Sequence[ResolvedTask],
        plan: Plan | None,
        processes: Processes,
    ) -> ParallelModel:
        """Load this process's part and make what runs it: see `parallelize`.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in the order in which they came.
            plan: tells how many layers each stage has; may be `None` where there is one stage.
            processes: the processes of the run, connected.

        Raises:
            ConfigError: if the weights cannot be loaded.
            ProcessError: if another process does not come within the time limit.
        """
        return parallelize(
            described,
            source=self.source,
            tasks=tasks,
            args=self.args,
            layout=self.layout,
            plan=plan,
            processes=processes,
        )
