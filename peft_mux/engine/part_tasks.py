"""Tasks that join a model: a part of one gets of each adapter what lies there, as one process would have drawn it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from peft import PeftConfig

from peft_mux.engine.pipeline.stage_loading import blank_model
from peft_mux.engine.tensor.parallel import TensorParallelModel
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.lora.depth import lowest_layer
from peft_mux.modeling.backbone.modules import adaptable_modules
from peft_mux.modeling.model import MultiTaskPeftModel

_PREFIX = "base_model.model."
"""What PEFT's names of parameters have before the backbone's own names."""


def register_tasks(
    model: MultiTaskPeftModel,
    configs: Mapping[str, PeftConfig],
    *,
    seeds: Mapping[str, int],
    counts: Mapping[str, int],
    is_whole: bool,
    tensor_parallel: TensorParallelModel | None,
) -> None:
    """Add tasks to a model, whole or a part, with the weights that one process would draw for them.

    For a part, they are drawn for the whole adapter, on a backbone that has shapes but no memory: a part has fewer
    layers, or narrower ones, so that the same seed would draw other weights on it.

    Args:
        model: the model of this process: whole, a stage, or what a tensor parallel rank holds of one.
        configs: `PeftConfig` of each new task, by name of the task.
        seeds: what fixes the initial weights of each new task, by name of the task.
        counts: number of classes of the tasks that have their own number, by name of the task.
        is_whole: whether this process is to hold the whole model.
        tensor_parallel: how the model was cut for tensor parallelism; `None` where it was not.

    Raises:
        ConfigError: naming every fault of every new task; then none is added.
    """
    if is_whole:
        model.register_tasks(configs, seeds=seeds, num_labels=counts)
        return
    whole = blank_model(model.backbone, configs, seeds)
    for name, config in configs.items():
        _register_one(model, whole, name, config, seeds, counts, tensor_parallel)
        model.stream.lowest_layers[model.adapter_of(name)] = lowest_layer(whole.task_parameters(name))


def _register_one(
    model: MultiTaskPeftModel,
    whole: MultiTaskPeftModel,
    name: str,
    config: PeftConfig,
    seeds: Mapping[str, int],
    counts: Mapping[str, int],
    tensor_parallel: TensorParallelModel | None,
) -> None:
    """Add a task to a part of a model, with what the whole model has of it there."""
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
    model.register_tasks({name: own}, seeds=seeds, num_labels=counts, are_checked=True)
    if tensor_parallel is not None:
        tensor_parallel.register_pieces([name])
    # What is saved with the adapter is the configuration of the whole, not the names of this part's layers.
    model.peft_config[model.adapter_of(name)] = copy.deepcopy(completed)
    own_tensors = model.task_parameters(name)
    # A head is whole where there is one, and drawn or copied as ever.
    model.registry.place_whole(name, {key: drawn[key] if kind.owns(key) else own_tensors[key] for key in own_tensors})
