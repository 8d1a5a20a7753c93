"""Attention of short rows of a packed stream, one program for a row and a key-value head.

Flash attention works on tiles of 64 or 128 queries of one head, so a row of 30 tokens costs as much as one of 128, and
its backward pass adds to the gradients of queries in memory. Here all keys of a row fit into one tile, and the queries
of all heads that read them are packed one after another into tiles of 64, so that little is padding::

    row of 30 tokens, 4 heads    | head 0: 30, head 1: 30, head 2: 4 | head 2: 26, head 3: 30 |

As a program sees whole rows of scores, the softmax needs no second look: the backward pass computes it again from
queries and keys, and keeps neither outputs nor divisors. Programs share no sum, and each adds up in one order: results
are the same in every run, and their bits depend only on the row.

Importing this file imports Triton, so callers import it only if they use kernels.

Shape letters: T tokens, S rows, H heads, G key-value heads (G divides H), C channels of a head.
"""

# Triton's annotations are not those of the values that a kernel computes with.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from peft_mux.kernels.attention import MAX_HEAD_DIM, MAX_TOKENS
from peft_mux.kernels.lora.launch import Launch
from peft_mux.kernels.lora.tables import Tiles


@triton.jit
def _probabilities(q, k, visible, scaling):
    """Return the softmax over keys of a tile of queries, fp32 `[TILE, TILE]`."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    scores = tl.where(visible, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _visible(token, key, length, IS_CAUSAL: tl.constexpr, window):
    """Return which keys each query sees."""
    distance = token[:, None] - key[None, :]
    seen = (key < length)[None, :] & (distance < window)
    return seen & (distance >= 0) if IS_CAUSAL else seen & (distance > -window)


@triton.jit
def attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    bounds_ptr,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scaling,
    window,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Write the outputs of the queries that read one key-value head in one row."""
    begin = tl.load(bounds_ptr + tl.program_id(0))
    length = tl.load(bounds_ptr + tl.program_id(0) + 1) - begin
    if (length == 0) | (length > TILE):
        return
    group, first = tl.program_id(1), begin.to(tl.int64)
    key, channel = tl.arange(0, TILE), tl.arange(0, BLOCK_C)
    mask = (key < length)[:, None] & (channel < C)[None, :]
    k = tl.load(k_ptr + (first + key)[:, None] * k_row + group * k_head + channel[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + (first + key)[:, None] * v_row + group * v_head + channel[None, :], mask=mask, other=0.0)
    for start in range(0, GROUPS * length, TILE):
        place = start + tl.arange(0, TILE)
        head, token = group * GROUPS + place // length, place % length
        mask = (place < GROUPS * length)[:, None] & (channel < C)[None, :]
        q_at = (first + token)[:, None] * q_row + head[:, None] * q_head + channel[None, :]
        q = tl.load(q_ptr + q_at, mask=mask, other=0.0)
        p = _probabilities(q, k, _visible(token, key, length, IS_CAUSAL, window), scaling)
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        out_at = ((first + token)[:, None] * HEADS + head[:, None]) * C + channel[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    bounds_ptr,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    scaling,
    window,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Write the gradients of one key-value head in one row, and of the queries that read it."""
    begin = tl.load(bounds_ptr + tl.program_id(0))
    length = tl.load(bounds_ptr + tl.program_id(0) + 1) - begin
    if (length == 0) | (length > TILE):
        return
    group, first = tl.program_id(1), begin.to(tl.int64)
    key, channel = tl.arange(0, TILE), tl.arange(0, BLOCK_C)
    mask = (key < length)[:, None] & (channel < C)[None, :]
    k = tl.load(k_ptr + (first + key)[:, None] * k_row + group * k_head + channel[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + (first + key)[:, None] * v_row + group * v_head + channel[None, :], mask=mask, other=0.0)
    dk = tl.zeros([TILE, BLOCK_C], dtype=tl.float32)
    dv = tl.zeros([TILE, BLOCK_C], dtype=tl.float32)
    for start in range(0, GROUPS * length, TILE):
        place = start + tl.arange(0, TILE)
        head, token = group * GROUPS + place // length, place % length
        q_mask = (place < GROUPS * length)[:, None] & (channel < C)[None, :]
        q_at = (first + token)[:, None] * q_row + head[:, None] * q_head + channel[None, :]
        out_at = ((first + token)[:, None] * HEADS + head[:, None]) * C + channel[None, :]
        q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
        dout = tl.load(dout_ptr + out_at, mask=q_mask, other=0.0)
        p = _probabilities(q, k, _visible(token, key, length, IS_CAUSAL, window), scaling)
        dv += tl.dot(tl.trans(p.to(v.dtype)), dout, input_precision="ieee")
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None]) * scaling).to(k.dtype)
        dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
        dq = tl.dot(ds, k, input_precision="ieee")
        tl.store(dq_ptr + out_at, dq.to(dq_ptr.dtype.element_ty), mask=q_mask)
    k_at = ((first + key)[:, None] * (HEADS // GROUPS) + group) * C + channel[None, :]
    tl.store(dk_ptr + k_at, dk.to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + k_at, dv.to(dv_ptr.dtype.element_ty), mask=mask)


class Heads(NamedTuple):
    """What launches of a layer have in common.

    Attributes:
        num_heads: H.
        num_key_heads: G.
        head_dim: C.
        strides: elements from a token to the next and from a head to the next, of queries, keys and values.
        scaling: factor of the scores.
        window: a query sees this many tokens, itself included.
        is_causal: whether a query sees no later key.
    """

    num_heads: int
    num_key_heads: int
    head_dim: int
    strides: tuple[int, ...]
    scaling: float
    window: int
    is_causal: bool


@functools.cache
def _launch(kernel: Any, heads: Heads, dtype: torch.dtype, device: torch.device) -> Launch:
    """Return a prepared launch; Triton caches code by device, so it depends on that too."""
    is_backward = kernel is attention_backward_kernel
    # The backward pass takes 128 for every head: with 64 Triton lets all warps compute the same, which spills.
    columns = MAX_HEAD_DIM if is_backward else max(16, triton.next_power_of_2(heads.head_dim))
    return Launch(
        kernel,
        Tiles(columns, 8 if is_backward else 4, 1),
        *(*heads.strides, heads.scaling, heads.window),
        HEADS=heads.num_heads,
        GROUPS=heads.num_heads // heads.num_key_heads,
        C=heads.head_dim,
        BLOCK_C=columns,
        TILE=MAX_TOKENS,
        IS_CAUSAL=heads.is_causal,
    )


def _run(kernel: Any, heads: Heads, tensors: tuple[torch.Tensor, ...]) -> None:
    """Launch a kernel for all rows, of which `tensors` ends with the bounds."""
    q, num_rows = tensors[0], len(tensors[-1]) - 1
    if num_rows:
        with torch.cuda.device_of(q):  # Triton launches on the current device, which may not hold the tensors
            _launch(kernel, heads, q.dtype, q.device)((num_rows, heads.num_key_heads, 1), tensors, ())


class _ShortRowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THC: torch.Tensor,
        k_TGC: torch.Tensor,
        v_TGC: torch.Tensor,
        bounds: torch.Tensor,
        scaling: float,
        window: int,
        is_causal: bool,
    ) -> torch.Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THC, k_TGC, v_TGC))
        strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        heads = Heads(q.shape[1], k.shape[1], k.shape[2], strides, scaling, window, is_causal)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, bounds)
        ctx.heads = heads
        _run(attention_forward_kernel, heads, (q, k, v, out, bounds))
        return out

    @staticmethod
    def backward(ctx: Any, dout_THC: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, bounds = ctx.saved_tensors
        heads = ctx.heads
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        _run(attention_backward_kernel, heads, (q, k, v, dout_THC.contiguous(), *gradients, bounds))
        return *gradients, None, None, None, None


def short_row_attention(
    q_THC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    bounds: torch.Tensor,
    *,
    is_causal: bool,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Attend within each row of at most `MAX_TOKENS` tokens; differentiable in queries, keys and values.

    Args:
        q_THC: queries `[T, H, C]` of at most `MAX_HEAD_DIM` channels.
        k_TGC: keys `[T, G, C]`.
        v_TGC: values `[T, G, C]`.
        bounds: int32 `[S + 1]` on the same device, where rows begin and end, from 0 to T.
        is_causal: whether a query sees no later key.
        window: a query sees this many tokens, itself included, before it, and after it if not causal; `None` for all.
        scaling: factor of the scores.

    Returns:
        Outputs `[T, H, C]`. Those of longer rows are not written, and neither are their gradients.
    """
    reach = MAX_TOKENS if window is None else min(window, MAX_TOKENS)
    out: torch.Tensor = _ShortRowAttention.apply(  # type: ignore[assignment]
        q_THC, k_TGC, v_TGC, bounds, float(scaling), reach, is_causal
    )
    return out
