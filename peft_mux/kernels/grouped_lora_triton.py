"""LoRA of many tasks over one packed stream in four launches a pass: shrink, expand, wgrad and its reduction.

    shrink   S[m] = s? * drop?(x[m]) @ W_g^T         forward (x, A), backward (dy, B^T)
    expand   y[m] = s? * drop?(S[m] @ W_g)           forward (S, B^T), backward (dS, A)
    wgrad    dW_g = s? * sum_m S[m]^T drop?(x[m])    backward (dS, x) for dA, (S, dy) for dB^T

A program works on rows of one segment only, and reads neither rows nor columns of S nor rows of a slab that are not
that segment's: a NaN stays with the task that has it. How a segment is cut into blocks follows from its own rank and
rows, never from its neighbours, and gradients are summed in a fixed order without atomics; so every bit a task gets is
the same alone and in company.

Importing this file imports Triton; only the caller that has chosen it does so.

Shape letters: T rows of the stream, D features, K features written, R rows of a slab, C columns of S, G segments;
inside of kernels M rows of a block.
"""

# Triton's annotations of scalars are values and not types, and plain values stand for its constexpr.
# pyright: reportInvalidTypeForm=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from peft_mux.kernels import tunings
from peft_mux.kernels.tables import MAX_RANK, RankTable, SegmentTables, signed_seed

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What activations and factors may be held in; sums are fp32 in any case."""

_REDUCE_RANKS = 16


@triton.jit
def _keep_mask(key, counter_M, first_column, threshold, COLUMNS: tl.constexpr, PINNED: tl.constexpr):
    """Return which elements of `[M, COLUMNS]` are kept; bit for bit `philox.keep_mask`."""
    # One call gives eight draws. They are reduced to eight bits before they are spread over columns, so that the
    # generator runs once per eight columns and not once per element.
    calls = first_column // 8 + tl.arange(0, COLUMNS // 8)
    counter = counter_M[:, None] + calls.to(tl.uint32)[None, :]
    zeros = tl.zeros_like(counter)
    limit = threshold.to(tl.uint32)
    if PINNED:
        # A loop of one turn: the compiler moves no layout conversion across it. Beside a product, whose layout gives
        # a thread two neighbouring columns, it would otherwise run the generator four times as often.
        bits = tl.zeros_like(counter).to(tl.int32)
        turns = 1
        while turns > 0:
            bits = _keep_bits(key, counter, zeros, limit)
            turns -= 1
    else:
        bits = _keep_bits(key, counter, zeros, limit)
    keep = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(keep, (counter_M.shape[0], COLUMNS)) != 0


@triton.jit
def _keep_bits(key, counter, zeros, limit):
    """Return eight bits per call of the generator: which of its eight draws keep their elements."""
    word_0, word_1, word_2, word_3 = tl.philox(key, counter, zeros, zeros, zeros, n_rounds=7)
    bits = _keep_pair(word_0, limit) | (_keep_pair(word_1, limit) << 2)
    return bits | (_keep_pair(word_2, limit) << 4) | (_keep_pair(word_3, limit) << 6)


@triton.jit
def _keep_pair(word, limit):
    """Return two bits: whether the lower and the upper half of a word keep their elements."""
    return ((word & 0xFFFF) >= limit).to(tl.int32) | (((word >> 16) >= limit).to(tl.int32) << 1)


@triton.jit
def _dropout_state(step_seed_ptr, threshold_ptr, places_ptr, segment, row, row_mask, module_seed, WIDTH: tl.constexpr):
    """Return key, threshold, and each row's first counter."""
    CALLS: tl.constexpr = (WIDTH + 7) // 8
    key = tl.load(step_seed_ptr + segment) ^ module_seed
    place = tl.load(places_ptr + row, mask=row_mask, other=0)
    return key, tl.load(threshold_ptr + segment), place.to(tl.uint32) * CALLS


@triton.jit
def _factor(scale_ptr, keep_scale_ptr, segment, SCALED: tl.constexpr, DROP: tl.constexpr):
    """Return what sums are multiplied by, in fp32."""
    factor = 1.0
    if SCALED:
        factor = tl.load(scale_ptr + segment)
    if DROP:
        factor = factor * tl.load(keep_scale_ptr + segment)
    return factor


@triton.jit
def _dot(left, right, sums, UPCAST: tl.constexpr):
    """Add a product of blocks to sums; the interpreter cannot multiply 16-bit blocks."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _columns_of(rank):
    """Return how many columns of S belong to a segment: whole groups of eight, so that rows of S move in words."""
    return (rank + 7) // 8 * 8


@triton.jit
def _out_of_class(rank, lowest_rank, highest_rank):
    """Return whether a segment's rank is left to another launch, or to none."""
    return (rank < lowest_rank) | (rank > highest_rank)


@triton.jit(do_not_specialize=["module_seed", "lowest_rank", "highest_rank"])
def _shrink_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    places_ptr,
    tile_segment_ptr,
    tile_row_ptr,
    seg_end_ptr,
    step_seed_ptr,
    w_row_ptr,
    s_column_ptr,
    rank_ptr,
    scale_ptr,
    keep_scale_ptr,
    threshold_ptr,
    x_stride,
    s_stride,
    lowest_rank: tl.int32,
    highest_rank: tl.int32,
    module_seed: tl.int64,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SCALED: tl.constexpr,
    DROP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    segment = tl.load(tile_segment_ptr + tile)
    if segment < 0:
        return
    rank = tl.load(rank_ptr + segment)
    first_rank = tl.program_id(1) * BLOCK_R
    if (first_rank >= rank) | _out_of_class(rank, lowest_rank, highest_rank):
        return
    row = (tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_mask = row < tl.load(seg_end_ptr + segment)
    ranks = first_rank + tl.arange(0, BLOCK_R)
    rank_mask = ranks < rank
    column = tl.arange(0, BLOCK_D)
    if DROP:
        key, threshold, counter = _dropout_state(
            step_seed_ptr, threshold_ptr, places_ptr, segment, row, row_mask, module_seed, D
        )
    w_ptr += tl.load(w_row_ptr + segment).to(tl.int64) * D
    x_ptr = x_ptr + row[:, None] * x_stride + column[None, :]
    w_ptr = w_ptr + ranks[:, None] * D + column[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for first_column in range(0, D, BLOCK_D):
        x_mask = row_mask[:, None]
        w_mask = rank_mask[:, None]
        if D % BLOCK_D != 0:
            inside = (first_column + column < D)[None, :]
            x_mask = x_mask & inside
            w_mask = w_mask & inside
        x = tl.load(x_ptr, mask=x_mask, other=0.0)
        w = tl.load(w_ptr, mask=w_mask, other=0.0)
        if DROP:
            x = tl.where(_keep_mask(key, counter, first_column, threshold, BLOCK_D, False), x, 0.0)
        sums = _dot(x, tl.trans(w), sums, UPCAST)
        x_ptr += BLOCK_D
        w_ptr += BLOCK_D
    sums = sums * _factor(scale_ptr, keep_scale_ptr, segment, SCALED, DROP)
    s_ptr += tl.multiple_of(tl.load(s_column_ptr + segment), 8)
    s_ptr = s_ptr + row[:, None] * s_stride + ranks[None, :]
    tl.store(s_ptr, sums.to(s_ptr.dtype.element_ty), mask=row_mask[:, None] & (ranks < _columns_of(rank))[None, :])


@triton.jit(do_not_specialize=["module_seed", "lowest_rank", "highest_rank"])
def _expand_kernel(
    s_ptr,
    w_ptr,
    y_ptr,
    bias_ptr,
    places_ptr,
    tile_segment_ptr,
    tile_row_ptr,
    seg_end_ptr,
    step_seed_ptr,
    w_row_ptr,
    s_column_ptr,
    rank_ptr,
    scale_ptr,
    keep_scale_ptr,
    threshold_ptr,
    s_stride,
    y_stride,
    lowest_rank: tl.int32,
    highest_rank: tl.int32,
    module_seed: tl.int64,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SCALED: tl.constexpr,
    DROP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    segment = tl.load(tile_segment_ptr + tile)
    if segment < 0:
        return
    rank = tl.load(rank_ptr + segment)
    if _out_of_class(rank, lowest_rank, highest_rank):
        return
    row = (tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_mask = row < tl.load(seg_end_ptr + segment)
    first_column = tl.program_id(1) * BLOCK_K
    column = first_column + tl.arange(0, BLOCK_K)
    column_mask = column < K
    lane = tl.arange(0, BLOCK_R)
    s_ptr += tl.multiple_of(tl.load(s_column_ptr + segment), 8)
    w_ptr += tl.load(w_row_ptr + segment).to(tl.int64) * K
    s_ptr = s_ptr + row[:, None] * s_stride + lane[None, :]
    w_ptr = w_ptr + lane[:, None] * K + column[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        rank_mask = first_rank + lane < rank
        s_mask = row_mask[:, None] & (first_rank + lane < _columns_of(rank))[None, :]
        s = tl.load(s_ptr + first_rank, mask=s_mask, other=0.0)
        w = tl.load(w_ptr + first_rank * K, mask=rank_mask[:, None] & column_mask[None, :], other=0.0)
        sums = _dot(s, w, sums, UPCAST)
    sums = sums * _factor(scale_ptr, keep_scale_ptr, segment, SCALED, DROP)
    if DROP:
        key, threshold, counter = _dropout_state(
            step_seed_ptr, threshold_ptr, places_ptr, segment, row, row_mask, module_seed, K
        )
        sums = tl.where(_keep_mask(key, counter, first_column, threshold, BLOCK_K, True), sums, 0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    y_ptr = y_ptr + row[:, None] * y_stride + column[None, :]
    tl.store(y_ptr, sums.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["module_seed", "part_ranks", "lowest_rank", "highest_rank"])
def _wgrad_kernel(
    s_ptr,
    x_ptr,
    part_ptr,
    places_ptr,
    chunk_segment_ptr,
    chunk_row_ptr,
    seg_end_ptr,
    step_seed_ptr,
    s_column_ptr,
    rank_ptr,
    scale_ptr,
    keep_scale_ptr,
    threshold_ptr,
    s_stride,
    x_stride,
    part_ranks: tl.int32,
    lowest_rank: tl.int32,
    highest_rank: tl.int32,
    module_seed: tl.int64,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SCALED: tl.constexpr,
    DROP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    CALLS: tl.constexpr = (D + 7) // 8
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment_ptr + chunk)
    if segment < 0:
        return
    rank = tl.load(rank_ptr + segment)
    first_rank = tl.program_id(2) * BLOCK_R
    if (first_rank >= rank) | _out_of_class(rank, lowest_rank, highest_rank):
        return
    first_row = tl.load(chunk_row_ptr + chunk)
    end_row = tl.minimum(tl.load(seg_end_ptr + segment), first_row + CHUNK)
    ranks = first_rank + tl.arange(0, BLOCK_R)
    rank_mask = ranks < rank
    first_column = tl.program_id(1) * BLOCK_D
    column = first_column + tl.arange(0, BLOCK_D)
    column_mask = column < D
    if DROP:
        key = tl.load(step_seed_ptr + segment) ^ module_seed
        threshold = tl.load(threshold_ptr + segment)
    s_ptr += tl.multiple_of(tl.load(s_column_ptr + segment), 8)
    # Columns first: 16 ranks are too few rows for the tensor cores' own product of a warp group.
    sums = tl.zeros((BLOCK_D, BLOCK_R), dtype=tl.float32)
    for block_row in range(first_row, end_row, BLOCK_M):
        row = (block_row + tl.arange(0, BLOCK_M)).to(tl.int64)
        row_mask = row < end_row
        s_mask = row_mask[:, None] & (ranks < _columns_of(rank))[None, :]
        s = tl.load(s_ptr + row[:, None] * s_stride + ranks[None, :], mask=s_mask, other=0.0)
        x_mask = row_mask[:, None] & column_mask[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=x_mask, other=0.0)
        if DROP:
            counter = tl.load(places_ptr + row, mask=row_mask, other=0).to(tl.uint32) * CALLS
            x = tl.where(_keep_mask(key, counter, first_column, threshold, BLOCK_D, False), x, 0.0)
        sums = _dot(tl.trans(x), s, sums, UPCAST)
    sums = sums * _factor(scale_ptr, keep_scale_ptr, segment, SCALED, DROP)
    part_ptr += chunk.to(tl.int64) * part_ranks * D
    part_ptr = part_ptr + ranks[:, None] * D + column[None, :]
    tl.store(part_ptr, tl.trans(sums), mask=rank_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["part_ranks"])
def _reduce_kernel(
    part_ptr,
    grad_ptr,
    chunk_begin_ptr,
    w_row_ptr,
    rank_ptr,
    grad_stride,
    part_ranks: tl.int32,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    segment = tl.program_id(0)
    rank = tl.load(rank_ptr + segment)
    ranks = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    if tl.program_id(2) * BLOCK_R >= rank:
        return
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (ranks < rank)[:, None] & (column < D)[None, :]
    sums = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    part_ptr = part_ptr + ranks.to(tl.int64)[:, None] * D + column[None, :]
    for chunk in range(tl.load(chunk_begin_ptr + segment), tl.load(chunk_begin_ptr + segment + 1)):
        sums += tl.load(part_ptr + tl.cast(chunk, tl.int64) * part_ranks * D, mask=mask, other=0.0)
    grad_row = tl.load(w_row_ptr + segment) + ranks
    grad_ptr = grad_ptr + grad_row.to(tl.int64)[:, None] * grad_stride + column[None, :]
    if ACCUMULATE:
        sums += tl.load(grad_ptr, mask=mask, other=0.0)
    tl.store(grad_ptr, sums, mask=mask)


_INTERPRETED = not isinstance(_shrink_kernel, triton.JITFunction)


def shrink(
    x_TD: torch.Tensor,
    w_RD: torch.Tensor,
    s_TC: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    places: torch.Tensor | None = None,
    module_seed: int = 0,
) -> None:
    """Write `S[m] = scale? * drop?(x[m]) @ W_g^T`, for (x, A) and for (dy, B transposed).

    A segment of rank r writes the columns of S from its `s_column`, r rounded up to a multiple of 8; those past r
    become 0. All other columns stay as they are.

    Args:
        x_TD: `[T, D]`, any row stride.
        w_RD: contiguous slab `[R, D]` of the factors.
        s_TC: output `[T, C]` with at least `ranks.num_columns` columns.
        tables: the segments.
        ranks: their adapters in this module.
        scaled: whether to multiply by each segment's scale.
        places: int64 `[T]`, to drop elements of x where the table has dropout; `None` for no dropout.
        module_seed: the module's half of the key, `philox.hash_seed(module_name)`.

    Raises:
        ValueError: if a shape, a dtype or a layout is not as above.
    """
    x_TD = _adjacent_columns(x_TD)
    _check_launch(x_TD, w_RD, s_TC, tables, ranks, places)
    if tables.num_tiles == 0:
        return
    for lowest, highest, block_ranks in _rank_classes(ranks):
        tile = _tiles("shrink", x_TD, block_ranks)
        _launch(
            _shrink_kernel,
            (tables.num_tiles, _cdiv(min(highest, ranks.max_rank), block_ranks)),
            tile,
            *(x_TD, w_RD, s_TC, tables.step_seed_G if places is None else places),
            *(tables.tile_segment, tables.tile_row, tables.seg_end_G, tables.step_seed_G),
            *_adapter_arguments(ranks),
            *(x_TD.stride(0), s_TC.stride(0), lowest, highest, signed_seed(module_seed)),
            D=x_TD.shape[1],
            BLOCK_M=tables.block_rows,
            BLOCK_D=tile.columns,
            BLOCK_R=block_ranks,
            SCALED=scaled,
            DROP=ranks.has_dropout and places is not None,
            UPCAST=_INTERPRETED,
        )


def expand(
    s_TC: torch.Tensor,
    w_RK: torch.Tensor,
    y_TK: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    bias: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    module_seed: int = 0,
) -> None:
    """Write `y[m] = scale? * drop?(S[m] @ W_g) + bias`, for (S, B transposed) and for (dS, A).

    All rows of all segments are written and none is read: a segment without an adapter gets the bias, or zeros. The
    base product is then added on top (`torch.addmm(y, x, W.t(), out=y)`).

    Args:
        s_TC: `[T, C]`, from `shrink`.
        w_RK: contiguous slab `[R, K]`.
        y_TK: output `[T, K]`, any row stride.
        tables: the segments.
        ranks: their adapters in this module.
        scaled: whether to multiply by each segment's scale.
        bias: `[K]`.
        places: int64 `[T]`, to drop elements of the result where the table has dropout (that is dx).
        module_seed: the module's half of the key.

    Raises:
        ValueError: if a shape, a dtype or a layout is not as above, or a bias would be dropped from.
    """
    _check_launch(y_TK, w_RK, s_TC, tables, ranks, places)
    width = y_TK.shape[1]
    drop = ranks.has_dropout and places is not None
    if y_TK.stride(1) != 1 and width > 1:
        raise ValueError("columns of y are not adjacent; a copy would get the result in its place.")
    if bias is not None and (drop or bias.shape != (width,) or not bias.is_contiguous()):
        raise ValueError(f"bias of shape {tuple(bias.shape)}; allowed: contiguous [{width}], and none with dropout.")
    if tables.num_tiles == 0:
        return
    for lowest, highest, block_ranks in _rank_classes(ranks, with_zero=True):
        tile = _tiles("expand", y_TK, block_ranks)
        _launch(
            _expand_kernel,
            (tables.num_tiles, _cdiv(width, tile.columns)),
            tile,
            *(s_TC, w_RK, y_TK, w_RK if bias is None else bias, tables.step_seed_G if places is None else places),
            *(tables.tile_segment, tables.tile_row, tables.seg_end_G, tables.step_seed_G),
            *_adapter_arguments(ranks),
            *(s_TC.stride(0), y_TK.stride(0), lowest, highest, signed_seed(module_seed)),
            K=width,
            BLOCK_M=tables.block_rows,
            BLOCK_K=tile.columns,
            BLOCK_R=block_ranks,
            SCALED=scaled,
            DROP=drop,
            HAS_BIAS=bias is not None,
            UPCAST=_INTERPRETED,
        )


def wgrad(
    s_TC: torch.Tensor,
    x_TD: torch.Tensor,
    grad_RD: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    places: torch.Tensor | None = None,
    module_seed: int = 0,
    accumulate: bool = False,
) -> None:
    """Write `dW_g = scale? * sum_m S[m]^T drop?(x[m])`, for (dS, x) and for (S, dy).

    Each chunk of a segment is summed by itself, and the chunks are added in order: no atomics, and the same bits
    every time. Only the rows of segments with an adapter are touched; those of an empty segment become 0, or stay as
    they are where gradients accumulate.

    Args:
        s_TC: `[T, C]`, from `shrink`.
        x_TD: `[T, D]`, any row stride.
        grad_RD: fp32 `[R, D]`, of the shape of the slab.
        tables: the segments.
        ranks: their adapters in this module; no two share rows of the slab.
        scaled: whether to multiply by each segment's scale.
        places: int64 `[T]`, to drop elements of x where the table has dropout.
        module_seed: the module's half of the key.
        accumulate: whether to add to `grad_RD`.

    Raises:
        ValueError: if a shape, a dtype or a layout is not as above.
    """
    x_TD = _adjacent_columns(x_TD)
    _check_launch(x_TD, grad_RD, s_TC, tables, ranks, places, is_gradient=True)
    width = x_TD.shape[1]
    if ranks.max_rank == 0 or tables.num_segments == 0:
        return
    parts = torch.empty(tables.num_chunks, ranks.max_rank, width, dtype=torch.float32, device=x_TD.device)
    for lowest, highest, block_ranks in _rank_classes(ranks) if tables.num_chunks else ():
        tile = _tiles("wgrad", x_TD, block_ranks)
        _launch(
            _wgrad_kernel,
            (tables.num_chunks, _cdiv(width, tile.columns), _cdiv(min(highest, ranks.max_rank), block_ranks)),
            tile,
            *(s_TC, x_TD, parts, tables.step_seed_G if places is None else places),
            *(tables.chunk_segment, tables.chunk_row, tables.seg_end_G, tables.step_seed_G),
            *_adapter_arguments(ranks)[1:],
            *(s_TC.stride(0), x_TD.stride(0), ranks.max_rank, lowest, highest, signed_seed(module_seed)),
            D=width,
            CHUNK=tables.chunk_rows,
            BLOCK_M=tables.block_rows,
            BLOCK_D=tile.columns,
            BLOCK_R=block_ranks,
            SCALED=scaled,
            DROP=ranks.has_dropout and places is not None,
            UPCAST=_INTERPRETED,
        )
    tile = _tiles("reduce", grad_RD, _REDUCE_RANKS)
    _launch(
        _reduce_kernel,
        (tables.num_segments, _cdiv(width, tile.columns), _cdiv(ranks.max_rank, _REDUCE_RANKS)),
        tile,
        *(parts, grad_RD, tables.chunk_begin, ranks.w_row_G, ranks.rank_G, grad_RD.stride(0), ranks.max_rank),
        D=width,
        BLOCK_R=_REDUCE_RANKS,
        BLOCK_D=tile.columns,
        ACCUMULATE=accumulate,
    )


def _launch(kernel: Any, grid: tuple[int, ...], tile: tunings.Tiles, *arguments: object, **constants: object) -> None:
    kernel[grid](*arguments, **constants, num_warps=tile.warps, num_stages=tile.stages)


def _adapter_arguments(ranks: RankTable) -> tuple[torch.Tensor, ...]:
    """Return the table's columns in the order in which all kernels take them."""
    return ranks.w_row_G, ranks.s_column_G, ranks.rank_G, ranks.scale_G, ranks.keep_scale_G, ranks.threshold_G


def _cdiv(value: int, size: int) -> int:
    return -(-value // size)


def _rank_classes(ranks: RankTable, *, with_zero: bool = False) -> list[tuple[int, int, int]]:
    """Return the launches that ranks need: lowest and highest rank, and ranks of a block.

    One kernel for both block sizes would need so many registers that it spills; and one block size for all would let
    neighbours decide how a small rank is summed.
    """
    classes = []
    if ranks.has_narrow:
        classes.append((1, tunings.NARROW_RANK, tunings.NARROW_RANK))
    if ranks.has_wide:
        classes.append((tunings.NARROW_RANK + 1, MAX_RANK, tunings.WIDE_BLOCK))
    if with_zero:
        _, highest, block = classes[0] if classes else (0, 0, tunings.NARROW_RANK)
        classes[:1] = [(0, highest, block)]
    return classes


def _tiles(kernel: str, activation: torch.Tensor, block_ranks: int) -> tunings.Tiles:
    name = tunings.device_name(activation.device)
    return tunings.tiles(kernel, name, activation.shape[1], block_ranks, activation.element_size())


def _adjacent_columns(x_TD: torch.Tensor) -> torch.Tensor:
    """Return x, copied only where its columns are not adjacent."""
    return x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()


def _check_launch(
    x_TD: torch.Tensor,
    w_RD: torch.Tensor,
    s_TC: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    places: torch.Tensor | None,
    *,
    is_gradient: bool = False,
) -> None:
    """Raise where a launch would read or write outside of its tensors, or compute with the wrong type."""
    num_rows, width = x_TD.shape
    if x_TD.dtype not in DTYPES or s_TC.dtype != x_TD.dtype:
        raise ValueError(f"activations are {x_TD.dtype}, S is {s_TC.dtype}; allowed: one of bf16, fp16, fp32 for both.")
    if w_RD.dtype != (torch.float32 if is_gradient else x_TD.dtype):
        raise ValueError(f"factors or gradients are {w_RD.dtype}; allowed: that of activations, fp32 for gradients.")
    if w_RD.shape[1] != width or not w_RD.is_contiguous():
        raise ValueError(f"slab of shape {tuple(w_RD.shape)}; allowed: contiguous with {width} columns.")
    if len(s_TC) != num_rows or s_TC.shape[1] < ranks.num_columns or s_TC.stride(1) != 1:
        raise ValueError(
            f"S of shape {tuple(s_TC.shape)}; allowed: [{num_rows}, at least {ranks.num_columns}], columns adjacent."
        )
    if w_RD.shape[0] < ranks.num_slab_rows:
        raise ValueError(f"slab of {len(w_RD)} rows; allowed: at least {ranks.num_slab_rows}.")
    if ranks.num_segments != tables.num_segments or tables.num_rows > num_rows:
        raise ValueError(
            f"{tables.num_segments} segments of {tables.num_rows} rows, ranks of {ranks.num_segments} segments, "
            f"{num_rows} rows of the stream; the tables do not fit."
        )
    if places is not None and (places.dtype != torch.int64 or len(places) < num_rows or not places.is_contiguous()):
        raise ValueError(f"places are {places.dtype} of length {len(places)}; allowed: contiguous int64 [{num_rows}].")
