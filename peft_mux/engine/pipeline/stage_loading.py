"""`load_stage`: one stage of a model from a folder of safetensors; nothing but its own weights is ever read.

The backbone is built without weights. Then this process's parameters are filled from the files, and those of other
processes are given a shape but no memory: one element, spread over all of it. So PEFT injects adapters into a model
that looks whole, and draws for each of them what it would draw in one process; what belongs elsewhere is cut off last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftConfig
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping

from peft_mux.engine.pipeline.stage import StageModel
from peft_mux.engine.pipeline.stage_layout import StageLayout
from peft_mux.errors import CheckpointError, UnsupportedModelError
from peft_mux.modeling.backbone.families import family_of
from peft_mux.modeling.backbone.modules import frozen_parameters
from peft_mux.modeling.backbone.quantized import quantization_method
from peft_mux.modeling.model import MultiTaskPeftModel

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


def load_stage(
    folder: str | Path,
    peft_configs: Mapping[str, PeftConfig],
    layout: StageLayout,
    stage: int,
    *,
    seeds: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = None,
) -> StageModel:
    """Return one stage of a causal language model with the adapters of all tasks.

    The packing probe (`peft_mux.modeling.backbone.probe`) needs a whole model and does not run; architectures that can
    be cut are few, and known to pass it.

    Args:
        folder: folder of the backbone, as `save_pretrained` writes it.
        peft_configs: `PeftConfig` of each task, by name of the task.
        layout: which decoder layers lie in which stage.
        stage: number of the stage that this process holds.
        seeds: what fixes the initial adapter weights of each task, by name of the task.
        dtype: dtype of the backbone; by default that of its configuration.

    Raises:
        CheckpointError: if the folder holds no safetensors, or a weight of this stage is not there.
        UnsupportedModelError: for an architecture that cannot be cut, or quantised weights.
    """
    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if quantization_method(config) is not None:
        raise UnsupportedModelError(
            f"{folder} holds quantised weights; allowed: plain ones, where stages read their own weights alone. Load"
            " the model with from_pretrained and cut it with StageModel."
        )
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    with init_empty_weights(include_buffers=False):  # rotary frequencies are computed, and in no file
        backbone = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    backbone.tie_weights()  # weights were taken away one by one, also those that are one
    _fill(backbone, _own_names(backbone, layout, stage), folder)
    model = MultiTaskPeftModel(backbone, peft_configs, seeds=seeds, verify=False)
    return StageModel(model, layout, stage)


def is_converted(folder: str | Path, backbone: Any) -> bool:
    """Whether transformers renames the tensors of a folder, or puts some together, as it reads them.

    It does with mixtures, whose experts lie there one by one, and with GPT-NeoX's head.

    Args:
        folder: folder of the backbone, as `save_pretrained` writes it.
        backbone: the model, possibly without weights, possibly with adapters.
    """
    if not get_model_conversion_mapping(backbone, add_legacy=False):
        return False
    keys = set(_files(Path(folder)))
    return not {name for name, _ in frozen_parameters(backbone)} <= keys


def blank_model(
    like: Any, peft_configs: Mapping[str, PeftConfig], seeds: Mapping[str, int] | None = None
) -> MultiTaskPeftModel:
    """Return a whole model whose backbone takes no memory, with the adapters that one process would draw.

    Args:
        like: a backbone of the same class and configuration, perhaps a part of one.
        peft_configs: `PeftConfig` of each task, by name of the task.
        seeds: what fixes the initial adapter weights of each task, by name of the task.
    """
    with init_empty_weights(include_buffers=False):
        backbone = type(like)(like.config)
    for name, parameter in list(backbone.named_parameters()):
        _put(backbone, name, torch.zeros((), dtype=like.dtype).expand(parameter.shape))
    backbone.tie_weights()
    return MultiTaskPeftModel(backbone, peft_configs, seeds=seeds, verify=False)


def _own_names(backbone: Any, layout: StageLayout, stage: int) -> set[str]:
    """Return the names of the backbone's parameters that lie in a stage."""
    family, prefix = family_of(backbone), backbone.base_model_prefix
    virtual_stages = layout.virtual_stages_of(stage)
    layers = [index for virtual_stage in virtual_stages for index in layout.layers_of(virtual_stage)]
    own = [f"{prefix}.{family.layers}.{index}." for index in layers]
    if 0 in virtual_stages:
        own += [f"{prefix}.{name}." for name in family.embeddings]
    if layout.last_virtual_stage in virtual_stages:
        own += [f"{prefix}.{name}." for name in family.after]
        head = backbone.get_output_embeddings()
        tied = [name for name, item in backbone.named_parameters(remove_duplicate=False) if item is head.weight]
        # A head that is tied to the embedding is one parameter under two names; files may hold it under either.
        own += [f"{name.rpartition('.')[0]}." for name in tied]
    return {name for name, _ in backbone.named_parameters() if name.startswith(tuple(own))}


@torch.no_grad()
def _fill(backbone: Any, own: set[str], folder: Path) -> None:
    """Give every parameter a tensor: from the files, or one that takes no memory."""
    files = _files(folder)
    names = [name for name, _ in backbone.named_parameters()]
    wanted: dict[Path, list[tuple[str, str]]] = {}
    for name in names:
        if name in own:
            key = _key(name, backbone, files, folder)
            wanted.setdefault(files[key], []).append((name, key))
        else:
            empty = backbone.get_parameter(name)
            # Not on the meta device: PEFT puts adapters where the layer is, and there it would draw nothing.
            _put(backbone, name, torch.zeros((), dtype=empty.dtype).expand(empty.shape))
    # File by file, as opening a shard costs more than reading one tensor of it.
    for path, pairs in wanted.items():
        with safe_open(path, framework="pt") as file:
            for name, key in pairs:
                _put(backbone, name, file.get_tensor(key).to(backbone.get_parameter(name).dtype))
    _fill_buffers(backbone, files)
    # Anew, as each parameter was replaced by itself, also one that has two names.
    backbone.tie_weights()


def _fill_buffers(backbone: Any, files: Mapping[str, Path]) -> None:
    """Read the buffers that are saved beside the weights, such as those by which routers balance experts."""
    saved = backbone.state_dict()
    for name, buffer in backbone.named_buffers():
        if name in saved and name in files:
            with safe_open(files[name], framework="pt") as file:
                buffer.copy_(file.get_tensor(name))


def _put(backbone: Any, name: str, tensor: torch.Tensor) -> None:
    expected = backbone.get_parameter(name).shape
    if tensor.shape != expected:
        raise CheckpointError(
            f"{name}: got shape {list(tensor.shape)}; allowed: {list(expected)}, as config.json says. Restore the"
            " folder."
        )
    home, _, leaf = name.rpartition(".")
    setattr(backbone.get_submodule(home), leaf, nn.Parameter(tensor, requires_grad=False))


def _files(folder: Path) -> dict[str, Path]:
    """Return the file that holds each tensor of a checkpoint, by the tensor's key."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        # The name alone: an index must not lead out of the folder.
        return {key: folder / Path(file).name for key, file in index.items()}
    if not (folder / _WHOLE).is_file():
        raise CheckpointError(
            f"{folder}: got neither {_INDEX} nor {_WHOLE}; allowed: a folder that save_pretrained wrote. Load a model"
            " of another format with from_pretrained and cut it with StageModel."
        )
    with safe_open(folder / _WHOLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _WHOLE)


def _key(name: str, backbone: Any, files: Mapping[str, Path], folder: Path) -> str:
    """Return under which key a parameter was saved: its name, or that within the base model alone (GPT-2's)."""
    parameter = backbone.get_parameter(name)
    same = [other for other, item in backbone.named_parameters(remove_duplicate=False) if item is parameter]
    candidates = [key for other in same for key in (other, other.removeprefix(f"{backbone.base_model_prefix}."))]
    found = next((key for key in candidates if key in files), None)
    if found is None:
        raise CheckpointError(
            f"{folder}: got no tensor {name}; allowed: the weights of a {type(backbone).__name__} under their own"
            " names. Load the model with from_pretrained and cut it with StageModel."
        )
    return found
