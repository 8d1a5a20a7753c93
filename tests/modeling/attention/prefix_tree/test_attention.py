"""Attention over a prefix tree gives each sequence what it gets alone, and not one bit from other trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.prefixes import PrefixTree, build_prefix_tree
from peft_mux.modeling.attention import prefix_tree as attention
from peft_mux.modeling.attention.prefix_tree import TreeLayouts, tree_attention, tree_varlen
from peft_mux.modeling.attention.rows import Scores
from tests.modeling.attention.kernel_cases import one_call
from tests.modeling.attention.test_packed import alone

HEADS, CHANNELS = 4, 8
PROPERTY = settings(deadline=None, max_examples=60)
CPU = torch.device("cpu")
Attend = Callable[[Sequence[torch.Tensor], TreeLayouts, Scores], torch.Tensor]

KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 5},
    "window of one token": {"window": 1},
    "window as long as the longest": {"window": 37},
    "window one shorter than the longest": {"window": 36},
    "soft-cap": {"softcap": 1.5},
    "window and soft-cap": {"window": 7, "softcap": 1.5},
    "scaling": {"scaling": 0.7},
    "sinks": {"sinks": torch.linspace(-1.0, 1.0, HEADS)},
}


def scores(*, scaling: float = CHANNELS**-0.5, **kind: Any) -> Scores:
    return Scores(scaling, is_causal=True, **{"window": None, "softcap": None, **kind})


def by_one_call(qkv: Sequence[torch.Tensor], tree: TreeLayouts, kind: Scores) -> torch.Tensor:
    """Attend as on CUDA, by a kernel that computes on a CPU what flash attention does."""
    with pytest.MonkeyPatch.context() as patch:
        one_call(patch, attention)
        return tree_varlen((qkv[0], qkv[1], qkv[2]), tree, kind)


def by_blocks(qkv: Sequence[torch.Tensor], tree: TreeLayouts, kind: Scores) -> torch.Tensor:
    """Attend by blocks alone, with no tree computed at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_PAIRS_OF_CALL", -(10**9))
        return tree_attention((qkv[0], qkv[1], qkv[2]), tree, kind)


WAYS: dict[str, Attend] = {
    "by blocks": by_blocks,
    "on a cpu": lambda qkv, tree, kind: tree_attention((qkv[0], qkv[1], qkv[2]), tree, kind),
    "by rectangles": lambda qkv, tree, kind: attention.tree_rectangles((qkv[0], qkv[1], qkv[2]), tree, kind),
    "in one call": by_one_call,
}


def knows(way: str, kind: Scores) -> bool:
    """Return whether a way supports this: `varlen_support` refuses caps and sinks."""
    return way != "in one call" or (kind.softcap is None and kind.sinks is None)


KNOWN = [(way, kind) for way in WAYS for kind in KINDS if knows(way, scores(**KINDS[kind]))]


def family(*ends: int, start: Sequence[int] = (7,) * 20, seed: int = 0) -> list[np.ndarray]:
    """Return sequences with one beginning, each with an end of its own of so many tokens."""
    draw = np.random.default_rng(seed)
    return [np.array([*start, *(draw.integers(100, 10_000, end))]) for end in ends]


# A beginning of 20 tokens, under one of its ends another branch, a row that ends with it, and one that shares nothing.
NESTED = [*family(5, 17), np.array([7] * 20), *family(3, 4, start=[7] * 20 + [8] * 6, seed=1), np.arange(50, 61)]


# Nodes that are long enough for calls of their own, next to short ones.
LONG = [*family(70, 5, 40, start=(7,) * 50), *family(33, 9, start=(7,) * 50 + (8,) * 36, seed=1), np.arange(200, 265)]


def tree_of(rows: Sequence[np.ndarray], groups: Sequence[int] | None = None, min_tokens: int = 2) -> PrefixTree:
    tree = build_prefix_tree(rows, groups or [0] * len(rows), min_tokens=min_tokens)
    assert tree is not None, "the rows of the test begin alike"
    return tree


def states(num_rows: int, key_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, heads, CHANNELS) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def one_by_one(rows: Sequence[np.ndarray], tree: PrefixTree, qkv: Sequence[torch.Tensor], kind: Scores) -> torch.Tensor:
    """Return `[U, H, C]` of every sequence alone, by its definition, over the tokens without sharing."""
    tokens = torch.from_numpy(tree.row_of_token)
    parts = zip(*(x[tokens].split([len(row) for row in rows]) for x in qkv), strict=True)
    outs = [_alone([x.transpose(0, 1)[None] for x in part], kind) for part in parts]
    return torch.cat(outs)[torch.from_numpy(tree.computed)]


def _alone(qkv: Sequence[torch.Tensor], kind: Scores) -> torch.Tensor:
    q, k, v = qkv
    if kind.sinks is not None:
        # A key of no value, to which each head has the score of its sink.
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        places = torch.arange(q.shape[2])
        logits = (q @ k.mT * kind.scaling).masked_fill(places[:, None] < places, -math.inf)
        sinks = kind.sinks.to(q.dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        return (torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v)[0].transpose(0, 1)
    return alone(q, k, v, is_causal=True, sliding_window=kind.window, softcap=kind.softcap, scaling=kind.scaling)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1.0)).item()


def check(way: str, rows: Sequence[np.ndarray], tree: PrefixTree, qkv: Sequence[torch.Tensor], kind: Scores) -> None:
    """Compare outputs and gradients with those of every sequence alone."""
    found = WAYS[way](qkv, TreeLayouts(tree, CPU), kind)
    wanted = one_by_one(rows, tree, qkv, kind)
    # Weights are computed in fp32 where they are written out.
    bound = 1e-12 if qkv[0].dtype == torch.float64 and kind.softcap is None and kind.sinks is None else 1e-6
    assert relative(found, wanted) < bound
    flow = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = torch.autograd.grad((found * flow).sum(), qkv)
    theirs = torch.autograd.grad((wanted * flow).sum(), qkv)
    for one, other in zip(mine, theirs, strict=True):
        assert relative(one, other) < 3 * bound


# ------------------------------------------------------------------------------- against each sequence alone


@pytest.mark.parametrize(
    ("way", "kind", "key_heads"),
    [*((way, kind, 2) for way, kind in KNOWN), *((way, "causal", heads) for way in WAYS for heads in (4, 1))],
)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(way: str, kind: str, key_heads: int) -> None:
    tree = tree_of(NESTED)
    assert tree.num_rows < len(tree.row_of_token) / 2
    check(way, NESTED, tree, states(tree.num_rows, key_heads), scores(**KINDS[kind]))


@pytest.mark.parametrize("kind", ["causal", "window", "window as long as the longest"])
@pytest.mark.parametrize("way", WAYS)
def test_long_nodes_have_the_same_outputs_and_gradients(way: str, kind: str) -> None:
    tree = tree_of(LONG)
    found = TreeLayouts(tree, CPU).depth_first
    assert found.long_nodes
    assert [own.masks[0] for own in found.gathered] == [None], "short nodes, and no tree that is computed at once"
    check(way, LONG, tree, states(tree.num_rows, 2), scores(**KINDS[kind]))


WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(np.array)


@PROPERTY
@given(
    rows=st.lists(WORDS, min_size=2, max_size=8),
    tasks=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    min_tokens=st.integers(1, 3),
    kind=st.sampled_from(sorted(KINDS)),
    way=st.sampled_from(sorted(WAYS)),
)
def test_any_sequences_get_what_each_gets_alone(
    rows: list[np.ndarray], tasks: list[int], min_tokens: int, kind: str, way: str
) -> None:
    wanted = scores(**KINDS[kind])
    tree = build_prefix_tree(rows, sorted(tasks[: len(rows)]), min_tokens=min_tokens)
    if tree is not None and knows(way, wanted):
        check(way, rows, tree, states(tree.num_rows, 2), wanted)


def test_rows_of_two_beginnings_may_alternate() -> None:
    one, other = family(4, 5, 6), family(5, 3, 8, start=(9,) * 18, seed=1)
    rows = [row for pair in zip(one, other, strict=True) for row in pair]
    tree = tree_of(rows)
    assert TreeLayouts(tree, CPU).depth_first.order is not None, "the test needs rows out of depth-first order"
    for way in WAYS:
        check(way, rows, tree, states(tree.num_rows, 2), scores())


def test_bfloat16_is_near_to_float64() -> None:
    tree = tree_of(NESTED)
    qkv = states(tree.num_rows, 2, torch.bfloat16)
    for way in WAYS:
        found = WAYS[way](qkv, TreeLayouts(tree, CPU), scores())
        assert found.dtype == torch.bfloat16
        assert relative(found, one_by_one(NESTED, tree, qkv, scores())) < 2e-2


def test_values_may_be_narrower_than_keys() -> None:
    tree = tree_of(NESTED)
    q, k, v = states(tree.num_rows)
    wide = tree_attention((q, k, v), TreeLayouts(tree, CPU), scores())
    narrow = tree_attention((q, k, v[..., :3]), TreeLayouts(tree, CPU), scores())
    assert relative(narrow, wide[..., :3]) < 1e-12


# --------------------------------------------------------------------------------------------- apart from others

EXACT = [kind for kind in KINDS if "cap" not in kind and kind != "sinks"]
"""Where weights are written out, batched products sum in another order for other numbers of nodes."""


def joined(*families: list[np.ndarray]) -> PrefixTree:
    """Return the tree of several tasks in one stream."""
    groups = [task for task, rows in enumerate(families) for _ in rows]
    return tree_of([row for rows in families for row in rows], groups)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("way", WAYS)
def test_a_task_has_the_same_bits_alone_and_with_others(way: str, kind: str) -> None:
    other, own_rows = family(6, 30, 11, start=(9,) * 33), [*NESTED, *LONG]
    apart, together = joined(own_rows), joined(other, own_rows)
    own = slice(together.num_rows - apart.num_rows, None)
    qkv = states(together.num_rows, 2, torch.float32)
    mine = [x.detach()[own].clone().requires_grad_() for x in qkv]
    flow = torch.randn(together.num_rows, HEADS, CHANNELS)
    in_company = WAYS[way](qkv, TreeLayouts(together, CPU), scores(**KINDS[kind]))
    by_itself = WAYS[way](mine, TreeLayouts(apart, CPU), scores(**KINDS[kind]))
    assert torch.equal(in_company[own], by_itself)
    pairs = zip(
        torch.autograd.grad(in_company, qkv, flow), torch.autograd.grad(by_itself, mine, flow[own]), strict=True
    )
    for with_other, without in pairs:
        assert torch.equal(with_other[own], without)


@pytest.mark.parametrize(("way", "kind"), KNOWN)
def test_a_poisoned_task_changes_no_bit_of_another(way: str, kind: str) -> None:
    together = joined(family(6, 30, 11, start=(9,) * 33), NESTED)
    own = slice(together.num_rows - joined(NESTED).num_rows, None)
    runs = []
    for poison in (1.0, math.nan, math.inf):
        qkv = states(together.num_rows, 2, torch.float32)
        with torch.no_grad():
            for x in qkv:
                x[: own.start] *= poison
        out = WAYS[way](qkv, TreeLayouts(together, CPU), scores(**KINDS[kind]))
        gradients = torch.autograd.grad(out.sum(), qkv)
        assert math.isnan(out.detach()[: own.start].sum()) == (poison != 1.0)
        runs.append([x[own] for x in (out, *gradients)])
    for poisoned in runs[1:]:
        assert all(map(torch.equal, runs[0], poisoned))


# ------------------------------------------------------------------------------------------------ what a call gets


def test_one_call_gets_the_keys_from_the_root_on_that_a_window_leaves() -> None:
    tree = tree_of(family(5, 17))
    q, k, v = states(tree.num_rows)
    with pytest.MonkeyPatch.context() as patch:
        calls = one_call(patch, attention)
        for window in (None, 4):
            tree_varlen((q, k, v), TreeLayouts(tree, CPU), scores(window=window))
    assert calls[0][:4] == ([20, 5, 17], [20, 25, 37], 20, 37)
    assert calls[1][:4] == ([20, 5, 17], [20, 5 + 3, 17 + 3], 20, 20)


def test_where_no_window_narrows_keys_are_read_where_they_lie() -> None:
    tree = tree_of(NESTED)
    q, k, v = states(tree.num_rows, 2, torch.float32)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        tree_attention((q, k, v), TreeLayouts(tree, CPU), scores(window=40))
    assert {shape[0] for shape in kept} == {tree.num_rows}, "copies of keys are kept for the backward pass"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["causal", "window", "scaling"])
def test_on_a_gpu_one_call_agrees_with_each_sequence_alone(kind: str) -> None:
    tree = tree_of(NESTED)
    exact = [x.detach().bfloat16().double().requires_grad_() for x in states(tree.num_rows, 2)]
    q, k, v = (x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in exact)
    layouts = TreeLayouts(tree, torch.device("cuda"))
    found = tree_varlen((q, k, v), layouts, scores(**KINDS[kind]))
    wanted = one_by_one(NESTED, tree, exact, scores(**KINDS[kind]))
    assert relative(found.cpu(), wanted) < 1e-2
    gradients = torch.autograd.grad(found.sum(), (q, k, v))
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted.sum(), exact), strict=True):
        assert relative(mine.cpu(), theirs) < 2e-2
