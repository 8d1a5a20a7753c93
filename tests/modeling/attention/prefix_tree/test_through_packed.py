"""Packed attention over computed rows: by the tree where it can be, and as over all tokens in any case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.attention import packed
from peft_mux.modeling.attention.attention_stream import AttentionStream, Prefixes
from peft_mux.modeling.attention.packed import packed_attention
from peft_mux.modeling.stream import Stream
from tests.modeling.attention.test_packed import Attention, relative, states

KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"sliding_window": 7},
    "soft-cap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.linspace(-1.0, 1.0, 4)},
}


def stream() -> MuxBatch:
    """Return two tasks whose rows share a prefix, computed once, and one whose rows do not."""
    draw = np.random.default_rng(0)

    def rows(begin: int, *ends: int) -> tuple[TokenSequence, ...]:
        start = draw.integers(50, size=begin)
        ids = [np.concatenate([start, draw.integers(50, size=end)]) for end in ends]
        return tuple(TokenSequence(own, own, row) for row, own in enumerate(ids))

    tasks = {"a": rows(20, 3, 17, 5), "b": rows(33, 8, 9), "c": rows(0, 12, 6)}
    batches = [TaskBatch(name, 0, 0, own) for name, own in tasks.items()]
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=10_000)
    return batch.sharing([True] * 3, min_tokens=4)


def attend(batch: MuxBatch, qkv: Sequence[torch.Tensor], prefixes: Prefixes | None = None, **kind: Any) -> torch.Tensor:
    (q, k, v), module, reader = qkv, Attention(), Stream()
    with reader.reading(batch, {name: name for name in batch.task_names}):
        attention = AttentionStream(reader, batch, {module: "layer.attention"}, prefixes)
        return packed_attention(module, q, k, v, None, mux_stream=attention, **kind)[0][0]


def over_all_tokens(batch: MuxBatch, qkv: Sequence[torch.Tensor], **kind: Any) -> torch.Tensor:
    """Return what the computed rows get in the stream that shares nothing."""
    assert batch.shared is not None
    rows = batch.shared.row_of_token
    out = attend(replace(batch, shared=None), [x[:, :, rows] for x in qkv], **kind)
    return out[batch.shared.computed]


@pytest.fixture
def nothing_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be laid out by token."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the tree was not used")

    monkeypatch.setattr(packed, "take_rows", refuse)


@pytest.mark.parametrize("kind", KINDS)
def test_computed_rows_get_what_all_tokens_would_without_being_laid_out(kind: str, nothing_laid_out: None) -> None:
    batch = stream()
    qkv = states(batch.num_computed, key_heads=2)
    assert batch.num_computed < batch.num_tokens
    assert relative(attend(batch, qkv, **KINDS[kind]), over_all_tokens(batch, qkv, **KINDS[kind])) < 1e-6


def test_learnt_prefixes_have_all_tokens_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = stream()
    qkv = states(batch.num_computed, key_heads=2)
    assert batch.shared is not None
    layers = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(1))
    prefixes = Prefixes([None] * 5 + [0, 0], [layers])
    monkeypatch.setattr(Attention, "layer_idx", 0, raising=False)
    found = attend(batch, qkv, prefixes)
    without = over_all_tokens(batch, qkv)
    first = batch.computed_offsets[2]
    assert relative(found[:first], without[:first]) < 1e-6
    assert relative(found[first:], without[first:]) > 1e-2, "the prefixes did nothing"


def test_under_autocast_it_is_computed_as_without_a_tree() -> None:
    batch = stream()
    qkv = states(batch.num_computed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = attend(batch, qkv), over_all_tokens(batch, qkv)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert relative(found, wanted) < 2e-2
    for gradient, x in zip(torch.autograd.grad(found.float().sum(), qkv), qkv, strict=True):
        assert gradient.dtype == x.dtype


def test_where_every_token_sees_every_other_shared_rows_are_refused() -> None:
    batch = stream()
    with pytest.raises(
        UnsupportedModelError,
        match=r"Attention lets every token see every other, so no prefix can be shared.* share_prefixes=False",
    ):
        attend(batch, states(batch.num_computed), is_causal=False)
