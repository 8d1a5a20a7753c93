"""Packed attention: each sequence as if it were alone, and not one bit of it from any other."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels import philox
from peft_mux.modeling.attention import packed
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.packed import packed_attention
from peft_mux.modeling.stream import Stream
from tests.modeling.attention.kernel_cases import flash_attention, one_call

PROPERTY = settings(deadline=None, max_examples=40)
HEADS, CHANNELS = 4, 8
# Lengths on both sides of a multiple of 16, equal ones, and single tokens.
LENGTHS = (5, 16, 1, 17, 33, 5, 32, 1)
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "bidirectional": {"is_causal": False},
    "window": {"is_causal": True, "sliding_window": 7},
    "window of two tokens": {"is_causal": True, "sliding_window": 2},
    "window in both directions": {"is_causal": False, "sliding_window": 7},
    "soft-cap": {"is_causal": True, "softcap": 1.5},
    "bidirectional soft-cap": {"is_causal": False, "softcap": 1.5},
    "window and soft-cap": {"is_causal": True, "sliding_window": 7, "softcap": 1.5},
    "scaling": {"is_causal": True, "scaling": 0.7},
}


class Attention(nn.Module):
    """Stands for the module that calls the attention function."""

    is_causal = True


def batch_of(tasks: dict[str, Sequence[int]], *, seeds: dict[str, int] | None = None) -> MuxBatch:
    """Return one stream of sequences of the given lengths."""
    batches = []
    for name, lengths in tasks.items():
        sequences = tuple(
            TokenSequence(np.ones(n, np.int64), np.ones(n, np.int64), row) for row, n in enumerate(lengths)
        )
        batches.append(TaskBatch(name, 0, (seeds or {}).get(name, 0), sequences))
    (micro,) = ChunkPackingCollator().micro_batches(batches, max_tokens=10_000)
    return micro


def states(num_tokens: int, *, key_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, num_tokens, CHANNELS) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def attend(batch: MuxBatch, qkv: Sequence[torch.Tensor], module: nn.Module | None = None, **kind: Any) -> torch.Tensor:
    """Return `[T, H, C]` of packed attention."""
    module = module or Attention()
    stream = Stream()
    with stream.reading(batch, {name: name for name in batch.task_names}):
        attention = AttentionStream(stream, batch, {module: "layer.attention"})
        out, weights = packed_attention(module, *qkv, None, mux_stream=attention, **kind)
    assert weights is None
    assert out.shape[0] == 1
    return out[0]


def alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    sliding_window: int | None = None,
    softcap: float | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return `[L, H, C]` of one sequence, in float64, with torch's own attention wherever it can."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    rows = torch.arange(q.shape[2])
    seen = torch.ones(len(rows), len(rows), dtype=torch.bool)
    if is_causal:
        seen &= rows[:, None] >= rows
    if sliding_window is not None:
        seen &= (rows[:, None] - rows).abs() < sliding_window
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)[0].transpose(0, 1)
    scores = q @ k.mT * (scaling or CHANNELS**-0.5)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, -math.inf)
    return (scores.softmax(dim=-1) @ v)[0].transpose(0, 1)


def one_by_one(lengths: Sequence[int], qkv: Sequence[torch.Tensor], **kind: Any) -> torch.Tensor:
    """Return `[T, H, C]` of every sequence alone."""
    parts = zip(*(x.split(list(lengths), dim=2) for x in qkv), strict=True)
    return torch.cat([alone(*part, **kind) for part in parts])


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the second."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


# ----------------------------------------------------------- against one by one


@pytest.mark.parametrize(("kind", "key_heads"), [*((kind, 2) for kind in KINDS), ("causal", 4), ("causal", 1)])
def test_packed_attention_and_its_gradients_are_those_of_each_sequence_alone(kind: str, key_heads: int) -> None:
    batch = batch_of({"a": LENGTHS[:3], "b": LENGTHS[3:]})
    qkv = states(sum(LENGTHS), key_heads=key_heads)
    found, wanted = attend(batch, qkv, **KINDS[kind]), one_by_one(LENGTHS, qkv, **KINDS[kind])
    assert relative(found, wanted) < 1e-6
    flow = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = torch.autograd.grad((found * flow.float()).sum(), qkv)
    theirs = torch.autograd.grad((wanted * flow).sum(), qkv)
    for one, other in zip(mine, theirs, strict=True):
        assert relative(one, other) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_to_float64(kind: str) -> None:
    qkv = states(sum(LENGTHS), dtype=torch.bfloat16)
    found = attend(batch_of({"a": LENGTHS}), qkv, **KINDS[kind])
    assert found.dtype == torch.bfloat16
    assert relative(found, one_by_one(LENGTHS, qkv, **KINDS[kind])) < 2e-2


@pytest.mark.parametrize("is_causal", [True, False])
def test_by_default_the_module_says_whether_it_is_causal(is_causal: bool) -> None:
    module, qkv = Attention(), states(20)
    module.is_causal = is_causal
    found = attend(batch_of({"a": [12, 8]}), qkv, module, position_ids=torch.arange(20)[None])
    assert relative(found, one_by_one([12, 8], qkv, is_causal=is_causal)) < 1e-6


@PROPERTY
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from(sorted(KINDS)))
def test_any_lengths_give_what_each_sequence_gives_alone(lengths: list[int], kind: str) -> None:
    qkv = states(sum(lengths), key_heads=2)
    with torch.no_grad():
        found = attend(batch_of({"a": lengths}), qkv, **KINDS[kind])
        assert relative(found, one_by_one(lengths, qkv, **KINDS[kind])) < 1e-6


# ------------------------------------------------------------------ isolation


@pytest.mark.parametrize("change", ["other numbers", "nan", "inf"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_sequence_changes_no_bit_of_any_other(kind: str, change: str) -> None:
    batch, qkv = batch_of({"a": LENGTHS[:3], "b": LENGTHS[3:]}), states(sum(LENGTHS))
    before = attend(batch, qkv, **KINDS[kind])
    bounds = np.cumsum((0, *LENGTHS))
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        value = {"nan": math.nan, "inf": math.inf}.get(change)
        changed = [x.detach().clone() for x in qkv]
        for x in changed:
            part = x[:, :, start:end]
            part.copy_(part * 3 + 1 if value is None else torch.full_like(part, value))
        after = attend(batch, changed, **KINDS[kind])
        assert torch.equal(before[:start], after[:start])
        assert torch.equal(before[end:], after[end:])
        assert not torch.equal(before[start:end], after[start:end]), "the change did nothing"


@pytest.mark.parametrize("poisoned", [False, True], ids=["healthy", "poisoned"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_flows_from_one_sequence_to_another(kind: str, poisoned: bool) -> None:
    batch, qkv = batch_of({"a": LENGTHS}), states(sum(LENGTHS))
    flow = torch.ones(sum(LENGTHS), HEADS, CHANNELS)
    start, end = 22, 39  # the sequence of 17 tokens
    mine = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    mine[start:end] = True
    flow[~mine] = 0.0
    if poisoned:
        flow[mine] = math.nan
    gradients = torch.autograd.grad(attend(batch, qkv, **KINDS[kind]), qkv, flow)
    for gradient in gradients:
        assert (gradient[0, :, ~mine] == 0).all()
    assert gradients[2][0, :, mine].isnan().any() == poisoned
    assert (gradients[2][0, :, mine] != 0).any()


# -------------------------------------------------------------------- dropout


def test_dropout_of_attention_weights_is_that_of_the_counter_at_each_query() -> None:
    lengths, p, seed = (5, 18), 0.4, 9
    batch, qkv = batch_of({"a": lengths}, seeds={"a": seed}), states(sum(lengths))
    found = attend(batch, qkv, is_causal=False, dropout=p)
    start = 0
    for length in lengths:
        q, k, v = (x[0, :, start : start + length].double() for x in qkv)
        weights = (q @ k.mT * CHANNELS**-0.5).softmax(dim=-1)
        places = torch.arange(start, start + length)
        by_query = weights.transpose(0, 1).reshape(length, HEADS * length)
        draws = philox.draw_seed(seed, 0, "layer.attention")
        weights = philox.dropout(by_query, places, p, draws).view(length, HEADS, length).transpose(0, 1)
        assert relative(found[start : start + length], (weights @ v).transpose(0, 1)) < 1e-6
        start += length


def test_dropout_of_one_task_does_not_depend_on_its_neighbours() -> None:
    qkv = states(30)
    solo = attend(batch_of({"b": [18]}, seeds={"b": 4}), [x[:, :, 12:] for x in qkv], is_causal=True, dropout=0.5)
    batch = batch_of({"a": [12], "b": [18]}, seeds={"a": 1, "b": 4})
    together = attend(batch, qkv, is_causal=True, dropout=0.5)
    assert relative(together[12:], solo) < 1e-6
    other_seed = attend(batch_of({"a": [12], "b": [18]}, seeds={"a": 2, "b": 4}), qkv, is_causal=True, dropout=0.5)
    assert torch.equal(together[12:], other_seed[12:])
    assert not torch.equal(together[:12], other_seed[:12])


# ------------------------------------------------------------------- refusals


def test_a_model_that_does_not_hand_the_stream_on_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"Attention must pass \*\*kwargs of the model call through to its attention function; without",
    ):
        packed_attention(Attention(), *states(4), None)


@pytest.mark.parametrize(
    ("mask", "kind", "said"),
    [
        (torch.ones(4, 4), {}, "Attention builds its own attention mask, and a mask over the stream would mix tasks"),
        (None, {"position_bias": torch.zeros(4)}, 'Attention passes "position_bias" to attention'),
    ],
)
def test_what_would_mix_tasks_or_change_the_scores_is_refused(mask: Any, kind: dict[str, Any], said: str) -> None:
    stream, batch = Stream(), batch_of({"a": [4]})
    with stream.reading(batch, {"a": "a"}), pytest.raises(UnsupportedModelError, match=said):
        packed_attention(Attention(), *states(4), mask, mux_stream=AttentionStream(stream, batch, {}), **kind)


def test_a_sink_takes_its_part_of_the_softmax_and_leads_to_no_value() -> None:
    batch, qkv = batch_of({"a": [5, 3]}), states(8)
    without, nothing = attend(batch, qkv), torch.full((qkv[0].shape[1],), -1e4)
    torch.testing.assert_close(attend(batch, qkv, s_aux=nothing), without)
    # The first token of a sequence sees itself alone, so its output is its value times the share that is left.
    q, k, v = (x[0, :, 0] for x in qkv)
    groups = q.shape[0] // k.shape[0]
    score = (q * k.repeat_interleave(groups, 0)).sum(-1) / q.shape[-1] ** 0.5
    sinks = torch.linspace(-1.0, 1.0, len(q))
    share = score.exp() / (score.exp() + sinks.exp())
    torch.testing.assert_close(attend(batch, qkv, s_aux=sinks)[0], share[:, None] * v.repeat_interleave(groups, 0))


# ---------------------------------------------------------------------- autocast


def test_under_autocast_one_call_computes_what_groups_of_sequences_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of({"a": (5, 17), "b": (8,)})
    q, k, v = states(30)
    # As rotary embedding leaves them: it multiplies queries and keys by fp32 numbers.
    qkv = [q, k, v.detach().bfloat16().requires_grad_()]
    asked: list[torch.dtype] = []

    def support(device: torch.device, dtype: torch.dtype, head_dim: int, **options: Any) -> None:
        asked.append(dtype)

    def one_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, *args: Any, **options: Any):
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16}
        given = {"scale": options["scaling"], "window_size": (-1, 0), "enable_gqa": False}
        return flash_attention(q, k, v, bounds, bounds, 17, 17, **given)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        groups = attend(batch, qkv)
    groups.float().square().sum().backward()
    wanted = [x.grad for x in qkv]
    for x in qkv:
        x.grad = None
    monkeypatch.setattr(packed, "varlen_support", support)
    monkeypatch.setattr(packed, "varlen_attention", one_call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(batch, qkv)
    out.float().square().sum().backward()
    assert asked == [torch.bfloat16]
    assert out.dtype == groups.dtype == torch.bfloat16
    assert relative(out, groups) < 1e-2
    for x, gradient in zip(qkv, wanted, strict=True):
        assert x.grad is not None
        assert gradient is not None
        assert x.grad.dtype == x.dtype
        assert relative(x.grad, gradient) < 1e-2


class ShortRows(torch.autograd.Function):
    """Stands for the kernels of short rows: of longer ones they write nothing."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.bounds = bounds
        return ShortRows._of_rows(bounds, (q,), lambda rows: [ShortRows._attend(q[rows], k[rows], v[rows])])[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        qkv = ctx.saved_tensors

        def gradients(rows: slice) -> Any:
            with torch.enable_grad():
                own = [x[rows].detach().requires_grad_() for x in qkv]
                return torch.autograd.grad(ShortRows._attend(*own), own, gradient[rows])

        return *ShortRows._of_rows(ctx.bounds, qkv, gradients), None

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bounds = torch.tensor([0, len(q)])
        return flash_attention(q, k, v, bounds, bounds, 64, 64, scale=0.3, window_size=(-1, 0), enable_gqa=False)

    @staticmethod
    def _of_rows(bounds: torch.Tensor, like: Sequence[torch.Tensor], compute: Any) -> list[torch.Tensor]:
        found = [torch.full_like(x, math.nan) for x in like]
        for start, end in itertools.pairwise(bounds.tolist()):
            if end - start <= 64:
                for whole, part in zip(found, compute(slice(start, end)), strict=True):
                    whole[start:end] = part
        return found


@pytest.mark.parametrize(
    ("lengths", "long_lengths"), [((5, 64, 1), None), ((70, 5, 64, 80), [70, 80]), ((70, 80), [70, 80])]
)
def test_short_rows_and_long_ones_of_a_stream_go_through_kernels_of_their_own(
    lengths: tuple[int, ...], long_lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, qkv = batch_of({"a": lengths[:1], "b": lengths[1:]}), states(sum(lengths))
    wanted = attend(batch, qkv, scaling=0.3)
    flow = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    wanted_gradients = torch.autograd.grad(wanted, qkv, flow)
    calls = one_call(monkeypatch)
    kernels = SimpleNamespace(short_row_attention=lambda q, k, v, bounds, **_: ShortRows.apply(q, k, v, bounds))
    monkeypatch.setitem(sys.modules, "peft_mux.kernels.attention.short_rows", kernels)
    monkeypatch.setattr(packed, "runs_kernels", lambda device: True)
    found = attend(batch, qkv, scaling=0.3)
    gradients = torch.autograd.grad(found, qkv, flow)
    assert [queries for queries, *_ in calls] == ([] if long_lengths is None else [long_lengths])
    for ours, theirs in zip((found, *gradients), (wanted, *wanted_gradients), strict=True):
        assert relative(ours, theirs) < 1e-5
