"""Layouts of processes from the arguments of a run, and what they do not support.

`check_layout` rejects settings that a layout does not support, by task and field, before any weight is read.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from peft_mux.adapters.prompt_kind import PromptKind
from peft_mux.arguments import ELEMENTWISE, MultiTaskTrainingArguments
from peft_mux.engine.tasks.active_task import ResolvedTask
from peft_mux.errors import ConfigError, Fault, raise_faults, shown
from peft_mux.modeling.adapters.kind import WEIGHTS_ARE_READ, AdapterKind, kind_of
from peft_mux.modeling.adapters.lora.config import INITIALISED_FROM_WEIGHTS, convert
from peft_mux.modeling.backbone.modules import head_kind_for, head_kind_of
from peft_mux.modeling.objectives.objective import WORDS
from peft_mux.modeling.objectives.task_objective import columns_of
from peft_mux.parallel.families import family_of
from peft_mux.parallel.tensor.cut import CAN_BE_CUT, blocks_of
from peft_mux.scheduler.parallel_layout import ParallelConfig, ParallelLayout

AUTO = "auto"
"""The value of `replicas` with which the replicas are planned."""
_MOST_DIGITS = 5
_REPLICAS = re.compile(r"<\s*(\d+)\s*,\s*(\d+)\s*>\s*(?:x\s*(\d+))?")


def layout_of(args: MultiTaskTrainingArguments) -> ParallelLayout:
    """Return the layout of a run's processes according to its arguments; whole models for `replicas="auto"`.

    Raises:
        ConfigError: if the number of processes does not match.
    """
    tp, pp, world_size = args.tensor_parallel_size, args.pipeline_parallel_size, args.world_size
    if args.replicas is None:
        unit = tp * pp
        if world_size % unit:
            raise ConfigError(
                "args.tensor_parallel_size * args.pipeline_parallel_size must divide the number of processes, got "
                f"{tp} * {pp} in a run of {world_size}. Start {unit} processes or a multiple: torchrun "
                f"--nproc-per-node {unit} script.py, or accelerate launch --multi_gpu --num_processes {unit} "
                "script.py."
            )
        return ParallelLayout.of(world_size, tp=tp, pp=pp)
    if (tp, pp) != (1, 1):
        raise ConfigError(
            f"args.replicas must be left out with tensor_parallel_size={tp} and pipeline_parallel_size={pp}, got "
            f"{args.replicas!r}. Leave the sizes at 1, because replicas includes them."
        )
    if args.replicas == AUTO:
        return ParallelLayout.of(world_size)
    return layout_of_text(args.replicas, world_size)


def parse_layout(text: str) -> ParallelLayout:
    """Parse LobRA's notation, such as "<1,1>x2, <2,1>".

    Raises:
        ValueError: if the text is not in this notation.
    """
    # A comma within <tp,pp> separates degrees, not replicas.
    items = [item.strip() for item in re.split(r"[;+]|,(?![^<]*>)", text) if item.strip()]
    matches = [match for item in items if (match := _REPLICAS.fullmatch(item))]
    if not items or len(matches) < len(items):
        raise ValueError(
            'replicas must be the tensor and pipeline degrees of each replica, such as "<1,1>x2, <2,1>x1", got '
            f"{text!r}."
        )
    replicas = []
    for match in matches:
        tp, pp, count = match.groups(default="1")
        # Checked before the list is created, because huge numbers would fill the memory.
        if max(map(len, (tp, pp, count))) > _MOST_DIGITS:
            raise ValueError(f"replicas must have numbers of at most {_MOST_DIGITS} digits, got {text!r}.")
        replicas += [ParallelConfig(int(tp), int(pp))] * int(count)
    return ParallelLayout(tuple(replicas))


def layout_of_text(replicas: str, world_size: int) -> ParallelLayout:
    """Parse LobRA's notation, such as "<1,1>x2, <2,1>", for a given number of processes.

    Raises:
        ConfigError: if it cannot be parsed, or if it does not have `world_size` processes.
    """
    try:
        layout = parse_layout(replicas)
    except ValueError as error:
        raise ConfigError(f"args.{error}") from error
    if layout.world_size != world_size:
        raise ConfigError(
            f"args.replicas must have as many processes as the run ({world_size}), got {layout}, which needs "
            f"{layout.world_size}. Start {layout.world_size} processes, use other replicas, or set "
            'args.replicas="auto", which plans them for the processes that there are.'
        )
    return layout


def network_warning(layout: ParallelLayout) -> str:
    """Return a warning if a tensor parallel group that fits on a machine is on two; "" if there is none."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or layout.world_size)  # torchrun and accelerate set it
    split = [group for group in layout.tensor_groups if group[0] // per_node != group[-1] // per_node]
    if not split or len(split[0]) > per_node:
        return ""
    return (
        f"replicas {layout}: ranks {split[0][0]} to {split[0][-1]} share layers but are on two machines of "
        f"{per_node} ranks. Their sums, several per layer, cross the network. List replicas with larger tensor "
        "parallel degrees first, and start a multiple of these on each machine."
    )


def check_layout(
    layout: ParallelLayout,
    *,
    is_quantized: bool,
    args: MultiTaskTrainingArguments,
    tasks: Sequence[ResolvedTask],
    backbone: Any,
) -> None:
    """Reject settings that a layout does not support.

    Args:
        layout: which process holds which part of which replica.
        is_quantized: whether the backbone will be loaded quantised.
        args: the arguments of the run.
        tasks: the tasks of the run, or those that are to join it.
        backbone: the transformers model, possibly without weights.

    Raises:
        ConfigError: if there are any; the message names every task and field.
        UnsupportedModelError: if the architecture cannot be partitioned.
    """
    faults = []
    if not layout.is_data_parallel or args.shard_backbone:
        got = f"replicas {layout}{' with shard_backbone=True' if args.shard_backbone else ''}"
        allowed = "None if a process holds only a part of the model"
        fix = (
            "Give every process the whole model, or evaluate the saved adapters with peft_mux.generate in one process."
        )
        generating = [task.name for task in tasks if task.task.generate_options is not None]
        faults += [Fault(f"tasks.{name}.eval_generate", got, allowed, fix) for name in generating]
    # A run that may move to other replicas may interleave passes there.
    if not (args.interleaved_passes in ("auto", 1) or args.redeploy or layout.is_tensor_parallel):
        fix = "Leave it out: it hides all-reduces of tensor parallelism, which no replica uses here."
        allowed = f'"auto" or 1 with replicas {layout}'
        faults.append(Fault("args.interleaved_passes", str(args.interleaved_passes), allowed, fix))
    for name, allowed in {"use_liger_kernel": '"auto" or False', "selective_recompute": "False"}.items():
        if getattr(args, name) is True and (args.shard_backbone or not layout.is_data_parallel):
            got = "True with shard_backbone=True" if args.shard_backbone else f"True with replicas {layout}"
            faults.append(Fault(f"args.{name}", got, f"{allowed} if a process holds only a part of the model"))
    if args.shard_optimizer and not (layout.is_data_parallel and not args.redeploy):
        got = "True with redeploy=True" if args.redeploy else f"True with replicas {layout}"
        allowed = "False if a process holds only a part of the model, or may do so later"
        fix = "Leave it out: stages and tensor parallelism divide optimizer states already."
        faults.append(Fault("args.shard_optimizer", got, allowed, fix))
    raise_faults(faults)
    if args.shard_backbone:
        faults = _sharding_faults(layout, args, is_quantized=is_quantized)
        # Prompts are computed and read outside the units that FSDP2 gathers.
        faults += [
            Fault(
                f"tasks.{task.name}.peft_config",
                f"{kind.title} with shard_backbone=True",
                "a PEFT type that adapts layers",
                "Leave shard_backbone out, or use LORA.",
            )
            for task in tasks
            if isinstance(kind := kind_of(task.peft_config), PromptKind)
        ]
        # Processes gather the output head together, and a pass without words would not.
        faults += [
            Fault(
                f"tasks.{task.name}.peft_config.task_type",
                f"that of {task.head_kind.name} tasks with shard_backbone=True",
                f"that of {head_kind_of(backbone).name} tasks, as the backbone's head is",
                "Leave shard_backbone out, or train classifiers in another run.",
            )
            for task in tasks
            if task.head_kind != head_kind_of(backbone)
        ]
        faults += _divided_faults(tasks, "shard_backbone=True") + _word_faults("shard_backbone=True", tasks)
        raise_faults(faults)
    if layout.is_data_parallel:
        return
    raise_faults(_divided_faults(tasks, f"replicas {layout}"))
    family_of(backbone)  # rejects architectures that cannot be partitioned, like `blocks_of` below
    faults = [
        fault
        for task in tasks
        for fault in divided_kind_faults(kind_of(task.peft_config), layout, f"tasks.{task.name}")
    ]
    faults += _bare_parameter_faults(layout, tasks, backbone)
    for tp_size in sorted({replica.tp for replica in layout.replicas} - {1}):
        blocks_of(backbone, tp_size)
    if layout.is_tensor_parallel:
        allowed = f"{', '.join(sorted(ELEMENTWISE))} with replicas {layout}, because parameters are cut and the"
        allowed += " optimizer must be element-wise"
        faults += [
            Fault(f"tasks.{task.name}.optim", repr(optim), allowed, "Set one of these, or tensor_parallel_size=1.")
            for task in tasks
            if (optim := task.hyper.optim) not in ELEMENTWISE
        ]
        if args.cuda_graphs is True:
            faults.append(Fault("args.cuda_graphs", "True", f'"auto" or False with replicas {layout}'))
        faults += _word_faults(f"replicas {layout}, which divide the vocabulary", tasks)
    raise_faults(faults)


def _sharding_faults(layout: ParallelLayout, args: MultiTaskTrainingArguments, *, is_quantized: bool) -> list[Fault]:
    """Return what cannot be combined with sharded frozen weights (FSDP2)."""
    combined = {"cuda_graphs": ("True", args.cuda_graphs is True), "model": ("a quantised backbone", is_quantized)}
    faults = [
        Fault(f"args.{name}", got, "its default with shard_backbone=True", "Leave one of the two out.")
        for name, (got, is_fault) in combined.items()
        if is_fault
    ]
    # The weights of a stage are sharded over replicas, which must all have the same stages.
    if layout.is_data_parallel or (layout.are_alike and not layout.is_tensor_parallel and layout.num_replicas > 1):
        return faults
    where = "args.tensor_parallel_size, pipeline_parallel_size, replicas"
    allowed = "without tensor parallelism with shard_backbone=True"
    if layout.is_tensor_parallel:
        got, fix = f"{layout}, with tensor parallelism", "Leave one of the two out: both divide each layer."
    elif layout.are_alike:
        got, allowed = f"{layout}, a single replica", "several replicas, because they share the weights of each stage"
        fix = f"Start twice as many processes, {2 * layout.world_size}, or more; or leave shard_backbone out."
    else:
        got, allowed = f"{layout}, different replicas", "replicas with the same stages with shard_backbone=True"
        fix = "Replicas share the weights of each stage, so all must have the same number of stages."
    return [*faults, Fault(where, got, allowed, fix)]


_OF_WHOLE_MODELS: Mapping[str, str] = {
    "use_dora": "it reads whole rows of frozen weights",
    "lora_bias": "its biases are not divided",
    "use_bdlora": "its blocks are not divided",
    "init_lora_weights": "it decomposes whole frozen weights",
    "bias": "biases of the backbone are not divided",
    "modules_to_save": "copies of modules are not divided",
    "trainable_token_indices": "rows of embeddings are not divided",
}
"""Why some fields can be honoured only by a process that holds the whole backbone."""


def _divided_faults(tasks: Sequence[ResolvedTask], layout: str) -> list[Fault]:
    """Return a fault for every field of a task that needs the whole backbone in one process."""
    faults = []
    for task in tasks:
        heads = head_kind_for(task.peft_config.task_type).trained_modules
        for name, reason in _OF_WHOLE_MODELS.items():
            value = getattr(task.peft_config, name, None)
            if value in (None, False, "none") or (name == "modules_to_save" and set(value) <= set(heads)):
                continue
            if name == "init_lora_weights" and not str(value).startswith(INITIALISED_FROM_WEIGHTS):
                continue
            fix = f"Not supported there: {reason}. Give every process the whole model."
            where = f"tasks.{task.name}.peft_config.{name}"
            faults.append(Fault(where, f"{shown(value)} with {layout}", "its default", fix))
    return faults


def divided_kind_faults(kind: AdapterKind, layout: ParallelLayout, where: str) -> list[Fault]:
    """Return why a task of a kind cannot be trained in a layout of processes.

    Every layer must be whole if it cannot be cut, and all layers must be in one process if they depend on one another.

    Args:
        kind: the kind of the task's adapter.
        layout: the layout of the processes.
        where: prefix of the fields, such as `tasks.sql`.
    """
    if kind.name not in CAN_BE_CUT and layout.is_tensor_parallel:
        reason = "its layers are not cut"
    else:
        reason = kind.entry.spans_layers or (WEIGHTS_ARE_READ if kind.entry.reads_weights else "")
    if not reason or layout.is_data_parallel:
        return []
    got, fix = f"{kind.title} with replicas {layout}", f"Reason: {reason}. Give every process the whole model."
    return [Fault(f"{where}.peft_config", got, "another PEFT type with this layout", fix)]


def _bare_parameter_faults(layout: ParallelLayout, tasks: Sequence[ResolvedTask], backbone: Any) -> list[Fault]:
    """Return a fault for every task that adapts bare parameters, which parts of a model cannot hold."""
    faults = []
    for task in tasks:
        config: Any = copy.deepcopy(task.peft_config)
        field = "target_parameters" if getattr(config, "target_parameters", None) else "target_modules"
        given = shown(getattr(config, field, None))
        if hasattr(config, "target_parameters"):
            convert(config, backbone)  # "all-linear" includes the experts of a mixture
        if targets := getattr(config, "target_parameters", None):
            allowed = f"layers with replicas {layout}, because bare parameters cannot be divided"
            got = given if field == "target_parameters" else f"{given}, which on this mixture adapts {shown(targets)}"
            fix = (
                'Set target_modules to attention layers such as ["q_proj", "v_proj"], or let every process hold '
                "the whole model (data parallelism, shard_backbone=True)."
            )
            faults.append(Fault(f"tasks.{task.name}.peft_config.{field}", got, allowed, fix))
    return faults


def _word_faults(layout: str, tasks: Sequence[ResolvedTask]) -> list[Fault]:
    """Return a fault for each task whose loss reads logits other than the target's, which needs the whole head."""
    faults = []
    fix = "Give every process the whole output head (no tensor_parallel_size, no shard_backbone)."
    for task in tasks:
        if task.loss_args.entropy_coef != 0:
            got = f"one that reads entropies with {layout}"
            allowed = "a loss without entropies in this layout"
            faults.append(Fault(f"tasks.{task.name}.objective_args", got, allowed, fix))
        columns = task.objective.row_form.token_columns
        known = {name for name, column in columns.items() if column.is_required} | columns_of(task.task.train_dataset)
        named = [name for name in WORDS if name in columns and name in known]
        if named:
            got = f'"{named[0]}" with {layout}'
            allowed = "rows with one target per token in this layout"
            faults.append(Fault(f"tasks.{task.name}.train_dataset", got, allowed, fix))
    return faults
