"""What cannot be trained in a layout of processes: refused by task and field before any weight is read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from peft_mux.arguments import ELEMENTWISE, MultiTaskTrainingArguments
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.tasks.resolved import ResolvedTask
from peft_mux.engine.tensor.cut import blocks_of
from peft_mux.errors import Fault, raise_faults, shown
from peft_mux.modeling.adapters.fields import divided_model_faults
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.lora.config import convert
from peft_mux.modeling.adapters.prompts.kinds import PromptKind
from peft_mux.modeling.backbone.families import family_of
from peft_mux.modeling.objectives.objective import WORDS
from peft_mux.modeling.objectives.task_objective import columns_of


def check_layout(
    layout: ParallelLayout,
    *,
    is_quantized: bool,
    args: MultiTaskTrainingArguments,
    tasks: Sequence[ResolvedTask],
    backbone: Any,
) -> None:
    """Refuse what cannot be trained in a layout.

    Args:
        layout: which process holds which part of which replica.
        is_quantized: whether the backbone will be loaded quantised.
        args: the arguments of the run.
        tasks: the tasks of the run, or those that are to join it.
        backbone: the transformers model, possibly without weights.

    Raises:
        ConfigError: naming every task and field.
        UnsupportedModelError: if the architecture cannot be cut.
    """
    faults = []
    if not layout.is_data_parallel or args.shard_backbone:
        got = f"replicas {layout}{' with shard_backbone=True' if args.shard_backbone else ''}"
        allowed = "None where a process holds a part of the model"
        fix = (
            "Give every process the whole model, or evaluate the saved adapters with peft_mux.generate in one process."
        )
        generating = [task.name for task in tasks if task.task.generate_options is not None]
        faults += [Fault(f"tasks.{name}.eval_generate", got, allowed, fix) for name in generating]
    # A run that may move to other replicas may use turns there.
    if not (args.interleaved_passes in ("auto", 1) or args.redeploy or layout.is_tensor_parallel):
        fix = "Leave it out: turns hide sums of tensor parallelism, which no replica has here."
        allowed = f'"auto" or 1 with replicas {layout}'
        faults.append(Fault("args.interleaved_passes", str(args.interleaved_passes), allowed, fix))
    raise_faults(faults)
    if args.shard_backbone:
        faults = _sharding_faults(layout, args, is_quantized=is_quantized)
        # Prompts are made and read outside of the units that FSDP2 gathers.
        faults += [
            Fault(
                f"tasks.{task.name}.peft_config",
                f"{kind.title} with shard_backbone=True",
                "types of layers",
                "Leave shard_backbone out, or train LORA.",
            )
            for task in tasks
            if isinstance(kind := kind_of(task.peft_config), PromptKind)
        ]
        faults += _divided_faults(tasks, "shard_backbone=True") + _word_faults("shard_backbone=True", tasks)
        raise_faults(faults)
    if layout.is_data_parallel:
        return
    raise_faults(_divided_faults(tasks, f"replicas {layout}"))
    family_of(backbone)  # refuses architectures that cannot be cut, as `blocks_of` does below
    faults = [fault for task in tasks for fault in kind_of(task.peft_config).refusals(layout, f"tasks.{task.name}")]
    faults += _bare_parameter_faults(layout, tasks, backbone)
    for tp_size in sorted({replica.tp for replica in layout.replicas} - {1}):
        blocks_of(backbone, tp_size)
    if layout.is_tensor_parallel:
        allowed = f"{', '.join(sorted(ELEMENTWISE))} with replicas {layout}: an optimizer that treats every"
        allowed += " element alike, as parameters are cut"
        faults += [
            Fault(f"tasks.{task.name}.optim", repr(optim), allowed, "Set one of these, or tensor_parallel_size=1.")
            for task in tasks
            if (optim := task.hyper.optim) not in ELEMENTWISE
        ]
        if args.cuda_graphs:
            faults.append(Fault("args.cuda_graphs", "True", f"False with replicas {layout}"))
        faults += _word_faults(f"replicas {layout}, which divide the vocabulary", tasks)
    raise_faults(faults)


def _sharding_faults(layout: ParallelLayout, args: MultiTaskTrainingArguments, *, is_quantized: bool) -> list[Fault]:
    """Return what cannot be combined with sharded frozen weights (FSDP2)."""
    found = {"cuda_graphs": ("True", args.cuda_graphs), "model": ("a quantised backbone", is_quantized)}
    faults = [
        Fault(f"args.{name}", got, "its default beside shard_backbone=True", "Leave one of the two out.")
        for name, (got, is_fault) in found.items()
        if is_fault
    ]
    # The weights of a stage are sharded over the replicas, which must have cut the backbone in the same way.
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


def _divided_faults(tasks: Sequence[ResolvedTask], layout: str) -> list[Fault]:
    """Return the fields of tasks that need the whole backbone in a process."""
    return [
        fault
        for task in tasks
        for fault in divided_model_faults(task.peft_config, f"tasks.{task.name}.peft_config", layout)
    ]


def _bare_parameter_faults(layout: ParallelLayout, tasks: Sequence[ResolvedTask], backbone: Any) -> list[Fault]:
    """Return a fault for every task that adapts bare parameters, which parts of a model cannot hold."""
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


def _word_faults(layout: str, tasks: Sequence[ResolvedTask]) -> list[Fault]:
    """Return the tasks whose loss reads more words than each target, which needs the whole output head at hand."""
    faults = []
    fix = "Give every process the whole output head (no tensor_parallel_size, no shard_backbone)."
    for task in tasks:
        if task.objective.needs_entropy(task.loss_args):
            got = f"a loss that reads entropies beside {layout}"
            faults.append(Fault(f"tasks.{task.name}.objective_args", got, "losses without them in this layout", fix))
        columns = task.objective.row_form.token_columns
        known = {name for name, column in columns.items() if column.is_required} | columns_of(task.task.train_dataset)
        named = [name for name in WORDS if name in columns and name in known]
        if named:
            got = f'rows with "{named[0]}" beside {layout}'
            allowed = "one target for each token in this layout"
            faults.append(Fault(f"tasks.{task.name}.train_dataset", got, allowed, fix))
    return faults
