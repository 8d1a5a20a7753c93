"""Tensors and states as safetensors and JSON: no pickle, and the same bytes for the same content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from peft_mux.errors import CheckpointError

_TENSOR, _TUPLE, _MAP, _FLOAT = "__tensor__", "__tuple__", "__map__", "__float__"


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file; views of one storage are written apart.

    Raises:
        CheckpointError: if the file cannot be written; safetensors has an error of its own for a full disk.
    """
    # Cloned, as safetensors refuses tensors that share memory, which all parameters of a page do; sorted for equal
    # bytes.
    copies = {name: tensors[name].detach().cpu().clone().contiguous() for name in sorted(tensors)}
    try:
        save_file(copies, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: could not be written ({error}).") from error


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    try:
        return load_file(path)
    # Of a crafted header, torch says in its own words what it cannot make.
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: got no readable tensors ({error}); allowed: an intact safetensors file."
        ) from error


def pack_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take a `state_dict()` apart into tensors and JSON.

    Args:
        state: nested dicts (string or integer keys), lists, tuples, tensors, numbers, strings and `None`.

    Returns:
        Tensors by running name, and a tree that refers to them.

    Raises:
        CheckpointError: naming the place of anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _pack(state, "state", tensors)


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the tree of a value, and put its tensors into `tensors`; `path` names the place in errors."""
    if isinstance(value, torch.Tensor):
        # Zeros in front, so that sorted names are in the order of the tree.
        name = str(len(tensors)).zfill(8)
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, float) and not isinstance(value, bool):
        # Hexadecimal is exact, and knows inf and nan, which JSON does not.
        return {_FLOAT: value.hex()}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise CheckpointError(f"{path}: got a key that is neither a string nor an integer; allowed: those two.")
        return {_MAP: [[key, _pack(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    # By exact type: a subclass, such as a named tuple, would come back as something else.
    if type(value) is tuple:
        return {_TUPLE: [_pack(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]}
    if type(value) is list:
        return [_pack(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
    raise CheckpointError(
        f"{path}: got a {type(value).__name__}; allowed: tensors, numbers, strings, None, and nestings of them."
    )


def unpack_state(tensors: Mapping[str, torch.Tensor], tree: Any) -> Any:
    """Put together what `pack_state` took apart."""
    if isinstance(tree, list):
        return [unpack_state(tensors, item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _FLOAT in tree:
        return float.fromhex(tree[_FLOAT])
    if _TUPLE in tree:
        return tuple(unpack_state(tensors, item) for item in tree[_TUPLE])
    return {key: unpack_state(tensors, item) for key, item in tree[_MAP]}
