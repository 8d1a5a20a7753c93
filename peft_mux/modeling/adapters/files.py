"""Adapters as files, in PEFT's own format, and their classification heads.

`adapter_model.safetensors` has the keys that PEFT saves. The parameters of a prompt's encoder are in a file next to it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.copies import only_adapter
from peft_mux.modeling.adapters.kind import EMBEDDINGS, PREFIX, kind_of
from peft_mux.modeling.adapters.lora.lora_kind import DoubledRank
from peft_mux.modeling.adapters.trained_parts import TASK_BIASES, biases_unsaid
from peft_mux.modeling.pieces import Piece
from peft_mux.storage import CHECKSUMS_NAME, digest_file, load_tensors, verify_checksums

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
ADAPTER_NAMES = (CONFIG_NAME, WEIGHTS_NAME)
"""The files of an adapter, which the `adapter_checksums.json` next to them covers."""
ENCODER_NAME = "prompt_encoder.safetensors"
"""Parameters of a prompt's encoder, of which PEFT saves only the output; PEFT does not read this file."""


def adapter_names(folder: Path) -> tuple[str, ...]:
    """Return the names of an adapter's files in a folder."""
    return (*ADAPTER_NAMES, ENCODER_NAME) if (folder / ENCODER_NAME).is_file() else ADAPTER_NAMES


def adapter_state(model: Any, adapter: str) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors under the keys that PEFT saves them with.

    Raises:
        CheckpointError: if PEFT's selection is not exactly the adapter's parameters (peft#3584).
    """
    parameters = _parameters_of(model, adapter)
    tensors = kind_of(model.peft_config[adapter]).to_file(model, adapter, parameters)
    if tensors is not None:
        return tensors
    with (
        model.as_peft_model(adapter),
        biases_unsaid([model.peft_config[adapter]]),
        only_adapter(model.backbone, adapter),
    ):
        state = get_peft_model_state_dict(model, adapter_name=adapter)
        form = DoubledRank(model.backbone, adapter)
    state |= {saved_key(name): parameter for name, parameter in parameters.items() if name.endswith(f".{TASK_BIASES}")}
    # PEFT adds the frozen embedding if it is adapted; if that is divided among processes, no process has it.
    state = {key: value for key, value in state.items() if not isinstance(value, DTensor)}
    missing = [saved_key(name) for name in parameters if _key_in(state, name) not in state]
    if missing:
        raise CheckpointError(
            f"adapter {adapter}: PEFT selected {len(state)} tensors of the {len(parameters)} trained ones, and not "
            f"{missing[0]}; nothing was written."
        )
    return form.saved(state)


def _parameters_of(model: Any, adapter: str) -> dict[str, nn.Parameter]:
    return model.task_parameters(next(name for name, known in model.adapters.items() if known == adapter))


def saved_key(name: str) -> str:
    """Return the key under which PEFT saves a parameter, by its name without the adapter id."""
    # DoRA's magnitude was a parameter before it was a module, and its key has stayed.
    key = name.replace(".modules_to_save", "").replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
    return f"{key.removesuffix(TASK_BIASES)}bias" if key.endswith(f".{TASK_BIASES}") else key


def _echoes(model: Any, adapter: str) -> dict[str, torch.Tensor]:
    """Return what PEFT saves besides for `bias="all"`: once more each bias of a copied module, and of its original."""
    echoes: dict[str, torch.Tensor] = {}
    if getattr(model.peft_config[adapter], "bias", "none") != "all":
        return echoes
    for name, module in model.backbone.named_modules():
        if not isinstance(module, ModulesToSaveWrapper) or adapter not in module.modules_to_save:
            continue
        for key, item in module.modules_to_save[adapter].named_parameters():
            # PEFT takes the adapter's name out of keys that end right after it.
            echoes[f"{name}.modules_to_save.{'default.' if '.' in key else ''}{key}"] = item
        for key, item in module.original_module.named_parameters():
            echoes[f"{name}.original_module.{key}"] = item
    return {f"base_model.model.{key}": item for key, item in echoes.items() if "bias" in key}


def _key_in(state: Mapping[str, torch.Tensor], name: str) -> str:
    """Return the key of a parameter in a file: state that layers share has the model's name there, not a layer's."""
    key = saved_key(name)
    parts = key.split(".")
    shared = (f"base_model.{'.'.join(parts[-count:])}" for count in (1, 2))
    return next((candidate for candidate in (key, *shared) if candidate in state), key)


# ---------------------------------------------------------------------- writing


def save_adapter(model: Any, adapter: str, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into `folder`, as a solo PEFT model would.

    Args:
        model: the model that holds the adapter, or a part of it.
        adapter: internal id of the task.
        folder: where the files go; created if absent.
        weights: the whole adapter's tensors by parameter name, if the model holds only a part of it.

    Raises:
        CheckpointError: if the files cannot be written.
    """
    if weights is None:
        state = adapter_state(model, adapter)
    else:
        tensors = kind_of(model.peft_config[adapter]).to_file(model, adapter, weights)
        state = {saved_key(key): weights[key] for key in weights} if tensors is None else tensors
    state |= _echoes(model, adapter)
    # Each tensor apart: views of one buffer share their storage, which safetensors refuses.
    state = {key: value.detach().cpu().clone().contiguous() for key, value in state.items()}
    config: Any = copy.deepcopy(model.peft_config[adapter])
    # As PEFT saves it; training sets it back.
    config.inference_mode = True
    DoubledRank(model.backbone, adapter).write_config(config)
    for name, value in vars(config).items():
        if isinstance(value, set):  # in an order of their own at every save, which would be another file
            setattr(config, name, sorted(value))
    # Without a task type, PEFT notes the backbone's class.
    backbone = type(model.backbone)
    classes = {"base_model_class": backbone.__name__, "parent_library": backbone.__module__}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Checksums of the files that go now; the caller writes new ones if there are to be any.
        (folder / CHECKSUMS_NAME).unlink(missing_ok=True)
        (folder / ENCODER_NAME).unlink(missing_ok=True)
        if encoder := {key: state.pop(key) for key in list(state) if key.startswith(PREFIX)}:
            save_file(encoder, folder / ENCODER_NAME, metadata={"format": "pt"})
        save_file(state, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(str(folder), auto_mapping_dict=classes if config.task_type is None else None)
    except (OSError, SafetensorError) as error:  # safetensors has its own, for a full disk too
        raise CheckpointError(f"{folder}: the adapter could not be written ({error}).") from error


# ---------------------------------------------------------------------- reading


def matching_weights(model: Any, adapter: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved adapter; every tensor must be there and finite, and no other.

    The model may be a description without weights.

    Raises:
        CheckpointError: naming the file that is missing, torn or changed, or the tensors that are missing, extra, of
            another shape or not finite.
    """
    state = _read_weights(folder)
    expected = {key: value.shape for key, value in adapter_state(model, adapter).items()}
    echoes = _echoes(model, adapter)
    state = {key: value for key, value in state.items() if key not in echoes}
    shapes = {key: value.shape for key, value in state.items()}
    if expected != shapes:
        missing = expected.keys() - shapes.keys()
        if EMBEDDINGS in shapes and missing and all(key.startswith(PREFIX) for key in missing):
            raise CheckpointError(
                f"{folder} must have the parameters of the prompt's encoder, got only its output ({EMBEDDINGS}), "
                "which is all that PEFT saves. Give a folder that peft_mux wrote; for inference, load this one with "
                "PeftModel.from_pretrained."
            )
        odd = sorted(expected.keys() ^ shapes.keys()) or [key for key in expected if expected[key] != shapes[key]]
        raise CheckpointError(
            f"{folder} must be an adapter of the same configuration on the same backbone, got {len(shapes)} tensors "
            f"that do not match its {len(expected)}; the first one that differs: {odd[0]}."
        )
    broken = [key for key, value in state.items() if not bool(torch.isfinite(value.float()).all())]
    if broken:
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME} must have finite weights, got numbers that are not finite in {broken[0]}. Load "
            "an older checkpoint of the task."
        )
    return state


def load_adapter(model: Any, adapter: str, folder: Path) -> None:
    """Read an adapter's weights; a `CheckpointError` as of `matching_weights`."""
    state = matching_weights(model, adapter, folder)
    parameters = _parameters_of(model, adapter)
    weights = kind_of(model.peft_config[adapter]).from_file(model, adapter, state, parameters)
    if weights is not None:
        for name, parameter in parameters.items():
            parameter.data.copy_(weights[name])
        return
    with model.as_peft_model(adapter):
        form = DoubledRank(model.backbone, adapter)
        for name, parameter in parameters.items():
            if name.endswith(f".{TASK_BIASES}"):  # which PEFT would write into the backbone
                parameter.data.copy_(state.pop(saved_key(name)))
        set_peft_model_state_dict(model, form.loaded(state), adapter_name=adapter)


def read_adapter(model: Any, adapter: str, folder: Path, pieces: Mapping[str, Piece]) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved adapter by parameter name: those that a process has a piece of.

    Args:
        model: the model that holds the adapter, or a part of it.
        adapter: internal id of the task.
        folder: the folder of the adapter, as PEFT writes it.
        pieces: what the process holds of each parameter, by PEFT name without the adapter id.

    Raises:
        CheckpointError: naming the file that is missing, torn or changed, or the first tensor that is missing or of
            another shape.
    """
    # Also weights that are not finite: the step after them fails the task, as it would have without the interruption.
    state = _read_weights(folder)
    with model.as_peft_model(adapter):
        form = DoubledRank(model.backbone, adapter)
    weights = kind_of(model.peft_config[adapter]).from_file(model, adapter, state, pieces)
    if weights is None:
        keys = {name: _key_in(state, name) for name in pieces}
        weights = {name: state[key] for name, key in keys.items() if key in state}
    for name, piece in pieces.items():
        shape, tensor = form.shape(saved_key(name), piece.shape), weights.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            got = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
            raise CheckpointError(
                f"{folder}: {saved_key(name)} must be {list(shape)}, as in an adapter of the same configuration on the "
                f"same backbone, got {got}."
            )
    if not form.layers:
        return weights
    state = form.loaded(state)
    return {name: state[_key_in(state, name)] for name in pieces}


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter's file, which must match its checksum if there is one."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder} must be the folder of a PEFT adapter, got one without {WEIGHTS_NAME}.")
    names = [name for name in adapter_names(folder) if name != CONFIG_NAME]
    if (folder / CHECKSUMS_NAME).exists():
        verify_checksums(folder, names)
    return {key: value for name in names for key, value in load_tensors(folder / name).items()}


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's weights.

    Raises:
        CheckpointError: if the file is missing.
    """
    path = folder / WEIGHTS_NAME
    try:
        facts = path.stat()
        return _digest(path, facts.st_mtime_ns, facts.st_size)
    except OSError as error:
        raise CheckpointError(f"{path} must be the adapter from which a task started, got {error}.") from error


@lru_cache(maxsize=256)
def _digest(path: Path, time_ns: int, size_bytes: int) -> str:
    return digest_file(path)[1]


# ---------------------------------------------------------- folders of adapters


def saved_adapters(root: Path) -> tuple[dict[str, PeftConfig], dict[str, int]]:
    """Return the adapters in the sub-folders of `root`, which are named like their tasks; no weight is read.

    Returns:
        The configuration of each adapter, ready for further training; and the classes of those that have a head.

    Raises:
        CheckpointError: if there is none, or naming the task and its file that is missing, torn or changed.
    """
    folders = [path.parent for path in sorted(root.glob(f"*/{CONFIG_NAME}"))]
    if not folders:
        raise CheckpointError(
            f"{root} must be a folder of adapters, got one without a sub-folder that has an {CONFIG_NAME}."
        )
    configs: dict[str, PeftConfig] = {}
    labels: dict[str, int] = {}
    for folder in folders:
        path, name, task = folder / WEIGHTS_NAME, folder.name, f'task "{folder.name}"'
        try:
            configs[name] = read_config(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{task}: {error}") from error
        try:
            if not path.is_file():
                raise OSError("it is no regular file")
            if (number := saved_num_labels(folder)) is not None:
                labels[name] = number
        except (OSError, SafetensorError, IndexError) as error:
            raise CheckpointError(
                f"{task}: {path} must be an intact safetensors file, but cannot be read ({error})."
            ) from error
    return configs, labels


def saved_num_labels(folder: Path) -> int | None:
    """Return the classes of a saved adapter's head; `None` if it has none. No weight is read."""
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
        heads = [key for key in file.keys() if key.endswith((".score.weight", "classifier.weight"))]
        heads += [key for key in file.keys() if key.endswith("classifier.out_proj.weight")]
        return file.get_slice(heads[0]).get_shape()[0] if heads else None


def read_config(folder: Path) -> PeftConfig:
    """Return the configuration of a saved adapter, ready for further training.

    Raises:
        CheckpointError: naming the file, if it is missing, torn or changed.
    """
    path = folder / CONFIG_NAME
    if (folder / CHECKSUMS_NAME).exists():
        verify_checksums(folder, [CONFIG_NAME])
    try:
        if not path.is_file():  # PEFT would look for it in the hub; a pipe would hang
            raise OSError("it is no regular file")
        config = PeftConfig.from_pretrained(str(folder))
    # Whatever PEFT raises for garbage: it has no error of its own for it.
    except Exception as error:
        raise CheckpointError(
            f"{path} must be the configuration of a PEFT adapter, but cannot be read ({type(error).__name__}: {error})."
        ) from error
    config.inference_mode = False
    return config
