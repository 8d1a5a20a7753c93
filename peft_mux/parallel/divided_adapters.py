"""Adapters where processes divide the backbone: which layouts a task is refused in, and how adapters are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.kind import WEIGHTS_ARE_READ, AdapterKind
from peft_mux.modeling.adapters.lora.config import INITIALISED_FROM_WEIGHTS
from peft_mux.modeling.adapters.lora.layer import NAME as LORA
from peft_mux.modeling.backbone.modules import head_kind_for

CAN_BE_CUT = frozenset({LORA})
"""Names of the kinds whose adapters tensor parallelism can cut."""

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


def divided_model_faults(config: Any, where: str, layout: str) -> list[Fault]:
    """Return a fault for every field that cannot be honoured if processes divide the backbone among them.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        layout: how the backbone is divided, for messages.
    """
    faults = []
    heads = head_kind_for(config.task_type).trained_modules
    for name, reason in _OF_WHOLE_MODELS.items():
        value = getattr(config, name, None)
        if value in (None, False, "none") or (name == "modules_to_save" and set(value) <= set(heads)):
            continue
        if name == "init_lora_weights" and not str(value).startswith(INITIALISED_FROM_WEIGHTS):
            continue
        fix = f"Not supported there: {reason}. Give every process the whole model."
        faults.append(Fault(f"{where}.{name}", f"{shown(value)} with {layout}", "its default", fix))
    return faults


def divided_kind_faults(kind: AdapterKind, layout: Any, where: str) -> list[Fault]:
    """Return why a task of a kind cannot be trained on a `ParallelLayout` of processes.

    Every layer must be whole if it cannot be cut, and all layers must be in one process if they depend on one another.

    Args:
        kind: the kind of the task's adapter.
        layout: the layout of the processes.
        where: prefix of the fields, such as `tasks.sql`.
    """
    if kind.name not in CAN_BE_CUT and any(replica.tp > 1 for replica in layout.replicas):
        reason = "its layers are not cut"
    else:
        reason = kind.entry.spans_layers or (WEIGHTS_ARE_READ if kind.entry.reads_weights else "")
    if not reason or layout.is_data_parallel:
        return []
    got, fix = f"{kind.title} with replicas {layout}", f"Reason: {reason}. Give every process the whole model."
    return [Fault(f"{where}.peft_config", got, "another PEFT type with this layout", fix)]


def narrow(config: Any, modules: Sequence[str]) -> None:
    """Let a copy of a configuration adapt exactly the modules of these full names, those of one stage."""
    config.target_modules = list(modules)
    for field in ("exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"):
        if hasattr(config, field):
            setattr(config, field, None)


def cut_dim(parameter_name: str, *, is_row: bool) -> int | None:
    """Return which dimension of an adapter's parameter tensor parallelism cuts; `None` if every shard holds it whole.

    Of LoRA's A that is the input dimension if the layer is cut by its inputs, of B otherwise the output dimension.

    Args:
        parameter_name: PEFT's name of a parameter of an adapter on a layer that is cut.
        is_row: whether the layer is cut by its inputs; otherwise by its outputs.
    """
    factor, dim = (".lora_A.", 1) if is_row else (".lora_B.", 0)
    return dim if factor in parameter_name and parameter_name.endswith(".weight") else None


def cut_adapters(layer: Any, cut: Any) -> None:
    """Cut A or B of every LoRA adapter of a PEFT layer, as its frozen weight was cut by a `LayerCut`."""
    for linear in (layer.lora_A if cut.is_row else layer.lora_B).values():
        linear.weight.data = cut.take(linear.weight.data, 1 if cut.is_row else 0)
        # One of the whole shape would not fit any more.
        linear.weight.grad = None
        setattr(linear, "in_features" if cut.is_row else "out_features", cut.num_held)
