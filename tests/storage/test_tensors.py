"""Tensors and states through safetensors and JSON: every bit comes back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.errors import CheckpointError
from peft_mux.storage import load_tensors, pack_state, save_tensors, unpack_state

_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8)
)
_STATES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=12)), inner, max_size=3),
        st.dictionaries(st.sampled_from(["__tensor__", "__map__", "__tuple__", "__float__"]), inner, max_size=2),
    ),
    max_leaves=12,
)


def through_json(state: Any) -> Any:
    tensors, tree = pack_state(state)
    return unpack_state(tensors, json.loads(json.dumps(tree, allow_nan=False)))


def same(first: Any, second: Any) -> bool:
    """Whether two states are equal to the bit, types and key order included."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bool(torch.equal(first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float):
        return first.hex() == second.hex()
    return bool(first == second)


@settings(deadline=None, max_examples=80)
@given(_STATES)
def test_any_nested_state_comes_back_with_its_types(state: Any) -> None:
    assert same(through_json(state), state)


def test_floats_that_json_has_no_name_for_and_integer_keys_come_back() -> None:
    state = {"a": math.inf, "b": -math.inf, "c": -0.0, "d": 5e-324, "e": math.nan, 0: "a", "0": "b"}
    assert same(through_json(state), state)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"state\.a\.b\[1\] must have tensors, numbers, strings, None, and nestings of"),
        ({"a": np.float64(1.0) * np.ones(2)}, r"state\.a must have tensors, numbers, strings, None, and nestings of"),
        ({"f": len}, r"state\.f must have tensors, numbers, strings, None, and nestings of them, got a"),
        ([b"bytes"], r"state\[0\] must have tensors, numbers, strings, None, and nestings of them, got a bytes"),
        ({(1, 2): 3}, "state: keys must be strings or integers"),
        ({True: 3}, "state: keys must be strings or integers"),
    ],
)
def test_what_cannot_be_written_exactly_is_refused_with_its_place(state: Any, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        pack_state(state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.randn(6, 6)[1:4, ::2],
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.randn(5).bfloat16(),
        torch.tensor([True, False]),
        torch.tensor([2**62, -1]),
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.randn(3, requires_grad=True),
    ],
)
def test_every_kind_of_tensor_comes_back_to_the_bit(tensor: torch.Tensor, tmp_path: Path) -> None:
    save_tensors(tmp_path / "t.safetensors", {"x": tensor, "same": tensor})
    back = load_tensors(tmp_path / "t.safetensors")
    wanted = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    for name in ("x", "same"):
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].reshape(-1).view(torch.uint8).tolist() == wanted


def test_equal_content_makes_equal_files_whatever_the_order(tmp_path: Path) -> None:
    one, two = torch.arange(4.0), torch.arange(3.0)
    save_tensors(tmp_path / "a", {"x": one, "y": two})
    save_tensors(tmp_path / "b", {"y": two, "x": one})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\xff" * 40])
def test_a_file_without_tensors_is_a_typed_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    said = r"t\.safetensors is not an intact safetensors file \(Error while deserializing: header"
    with pytest.raises(CheckpointError, match=said):
        load_tensors(path)
    with pytest.raises(CheckpointError, match="absent"):
        load_tensors(tmp_path / "absent")
