"""The Triton kernels of grouped LoRA, which `launch.py` starts, and their Philox random numbers.

A program works on rows of one segment only, and reads no rows or columns of S and no rows of a slab that belong to
other segments, so a NaN stays in its task. The blocks of a segment depend only on its own rank and rows, never on its
neighbours, and gradients are summed in a fixed order without atomics. Therefore a task gets the same bits when it
trains alone and with others.

Narrow ranks are processed in one block of 16 and wide ranks in blocks of 64. A kernel holds the code of the classes
that its launch has, unrolled by `tl.static_range`, and each program branches to that of its segment's rank.

Shape letters: T rows of the stream, D features, K features written, R rows of a slab, C columns of S, G segments;
M rows of a block.
"""

# Triton's annotations of scalars are values and not types, plain values stand for its constexpr, and its ranges are
# iterable in compiled code only.
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from peft_mux.kernels.lora import tables

_NARROW_RANK = tl.constexpr(tables.NARROW_RANK)
_WIDE_BLOCK = tl.constexpr(tables.WIDE_BLOCK)


@triton.jit
def trial_kernel(out_ptr):
    """Write 1, to show whether kernels can be compiled and launched on a device."""
    tl.store(out_ptr, 1.0)


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
        # A loop of one iteration: the compiler moves no layout conversion across it. Next to a product, whose layout
        # gives a thread two neighbouring columns, it would otherwise run the generator four times as often.
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
def _factor(scale_ptr, keep_scale_ptr, segment, scaled, DROP: tl.constexpr):
    """Return the factor of the sums, in fp32."""
    # Decided at run time: another compiled variant of every kernel would cost more than a multiplication by 1, which is
    # exact.
    factor = tl.where(scaled != 0, tl.load(scale_ptr + segment), 1.0)
    if DROP:
        factor = factor * tl.load(keep_scale_ptr + segment)
    return factor


@triton.jit
def _dot(left, right, sums, UPCAST: tl.constexpr):
    """Add a product of blocks to fp32 sums; the interpreter cannot multiply 16-bit blocks."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    # TF32, the default for fp32 blocks, would keep ten bits of each factor.
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _columns_of(rank):
    """Return how many columns of S belong to a segment: whole groups of eight, so that rows of S move in words."""
    return (rank + 7) // 8 * 8


@triton.jit
def _out_of_class(rank, lowest_rank, highest_rank):
    """Return whether another launch, or none, handles a segment's rank."""
    return (rank < lowest_rank) | (rank > highest_rank)


@triton.jit
def _takes(rank, is_wide: tl.constexpr, NARROW_STAGES: tl.constexpr, WIDE_STAGES: tl.constexpr):
    """Return whether a segment's rank is of a class; constant, and so no branch, if the launch has one class."""
    return (NARROW_STAGES == 0) | (WIDE_STAGES == 0) | ((rank > _NARROW_RANK) == (is_wide == 1))


@triton.jit
def _of_layer(layer, first, second, third, LAYERS: tl.constexpr):
    """Return what belongs to the layer that a program works on; a constant stays one if there is a single layer."""
    if LAYERS == 1:
        return first
    else:
        return tl.where(layer == 0, first, tl.where(layer == 1, second, third))


@triton.jit
def _column_block(block, W: tl.constexpr, W_1: tl.constexpr, BLOCK: tl.constexpr, LAYERS: tl.constexpr):
    """Return the layer of a block of columns, and the number of the block within it; blocks cross no layer."""
    FIRST: tl.constexpr = (W + BLOCK - 1) // BLOCK
    SECOND: tl.constexpr = (W_1 + BLOCK - 1) // BLOCK
    if LAYERS == 1:
        return 0, block
    else:
        layer = (block >= FIRST).to(tl.int32) + (block >= FIRST + SECOND).to(tl.int32)
        return layer, block - _of_layer(layer, 0, FIRST, FIRST + SECOND, LAYERS)


# Not specialised, because each module has its own seed and Triton would compile again for some of them.
@triton.jit(do_not_specialize=["module_seed", "scaled", "num_segments", "lowest_rank", "highest_rank"])
def shrink_kernel(
    x_ptr,
    x_1_ptr,
    x_2_ptr,
    s_ptr,
    places_ptr,
    tile_segment_ptr,
    tile_row_ptr,
    seg_end_ptr,
    step_seed_ptr,
    w_ptr,
    w_offset_ptr,
    s_column_ptr,
    rank_ptr,
    scale_ptr,
    keep_scale_ptr,
    threshold_ptr,
    x_stride,
    x_1_stride,
    x_2_stride,
    s_stride,
    num_segments: tl.int32,
    lowest_rank: tl.int32,
    highest_rank: tl.int32,
    module_seed: tl.int64,
    scaled: tl.int32,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NARROW_STAGES: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    DROP: tl.constexpr,
    RAGGED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """S of `ROWS` rows of one tile and one block of ranks of one layer: the sum over all columns of its `x`."""
    tile = tl.program_id(0)
    segment = tl.load(tile_segment_ptr + tile)
    # Tables have a fixed size, so this step may not use all tiles.
    if segment < 0:
        return
    layer = tl.program_id(2) // (BLOCK_M // ROWS)
    adapter = layer * num_segments + segment
    rank = tl.load(rank_ptr + adapter)
    first_rank = tl.program_id(1) * _WIDE_BLOCK
    if (first_rank >= rank) | _out_of_class(rank, lowest_rank, highest_rank):
        return
    first_row = tl.load(tile_row_ptr + tile) + tl.program_id(2) % (BLOCK_M // ROWS) * ROWS
    end_row = tl.minimum(tl.load(seg_end_ptr + segment), first_row + ROWS)
    if first_row >= end_row:
        return
    # int64, as row times stride passes 2^31 elements in long streams of wide layers.
    row = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_mask = row < end_row
    column = tl.arange(0, BLOCK_D)
    if DROP:
        key, threshold, counter = _dropout_state(
            step_seed_ptr, threshold_ptr, places_ptr, segment, row, row_mask, module_seed, D
        )
    width = _of_layer(layer, D, D_1, D_2, LAYERS)
    x_ptr = _of_layer(layer, x_ptr, x_1_ptr, x_2_ptr, LAYERS)
    x_stride = _of_layer(layer, x_stride, x_1_stride, x_2_stride, LAYERS)
    w_ptr += tl.multiple_of(tl.load(w_offset_ptr + adapter), 8)
    s_ptr += tl.multiple_of(tl.load(s_column_ptr + adapter), 8)
    for is_wide in tl.static_range(0 if NARROW_STAGES else 1, 2 if WIDE_STAGES else 1):
        if _takes(rank, is_wide, NARROW_STAGES, WIDE_STAGES):
            BLOCK_R: tl.constexpr = _WIDE_BLOCK if is_wide else _NARROW_RANK
            STAGES: tl.constexpr = WIDE_STAGES if is_wide else NARROW_STAGES
            ranks = first_rank + tl.arange(0, BLOCK_R)
            rank_mask = ranks < rank
            x_block_ptr = x_ptr + row[:, None] * x_stride + column[None, :]
            w_block_ptr = w_ptr + ranks[:, None] * width + column[None, :]
            sums = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            for first_column in tl.range(0, width, BLOCK_D, num_stages=STAGES):
                x_mask = row_mask[:, None]
                w_mask = rank_mask[:, None]
                if RAGGED:
                    inside = (first_column + column < width)[None, :]
                    x_mask = x_mask & inside
                    w_mask = w_mask & inside
                x = tl.load(x_block_ptr, mask=x_mask, other=0.0)
                w = tl.load(w_block_ptr, mask=w_mask, other=0.0)
                if DROP:
                    # Selected with `where`, not multiplied, because 0 * NaN is NaN.
                    x = tl.where(_keep_mask(key, counter, first_column, threshold, BLOCK_D, False), x, 0.0)
                sums = _dot(x, tl.trans(w), sums, UPCAST)
                x_block_ptr += BLOCK_D
                w_block_ptr += BLOCK_D
            # Scale and keep scale are applied to the fp32 sum, so that S is rounded only once.
            sums = sums * _factor(scale_ptr, keep_scale_ptr, adapter, scaled, DROP)
            s_block_ptr = s_ptr + row[:, None] * s_stride + ranks[None, :]
            tl.store(
                s_block_ptr,
                sums.to(s_ptr.dtype.element_ty),
                mask=row_mask[:, None] & (ranks < _columns_of(rank))[None, :],
            )


@triton.jit(do_not_specialize=["module_seed", "scaled", "num_segments", "lowest_rank", "highest_rank"])
def expand_kernel(
    s_ptr,
    y_ptr,
    y_1_ptr,
    y_2_ptr,
    bias_ptr,
    bias_1_ptr,
    bias_2_ptr,
    places_ptr,
    tile_segment_ptr,
    tile_row_ptr,
    seg_end_ptr,
    step_seed_ptr,
    w_ptr,
    w_offset_ptr,
    s_column_ptr,
    rank_ptr,
    scale_ptr,
    keep_scale_ptr,
    threshold_ptr,
    s_stride,
    y_stride,
    y_1_stride,
    y_2_stride,
    num_segments: tl.int32,
    lowest_rank: tl.int32,
    highest_rank: tl.int32,
    module_seed: tl.int64,
    scaled: tl.int32,
    K: tl.constexpr,
    K_1: tl.constexpr,
    K_2: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NARROW_STAGES: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    DROP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of rows and one block of columns of the `y` of one layer: the sum over a segment's ranks."""
    tile = tl.program_id(0)
    segment = tl.load(tile_segment_ptr + tile)
    if segment < 0:
        return
    layer, block = _column_block(tl.program_id(1), K, K_1, BLOCK_K, LAYERS)
    adapter = layer * num_segments + segment
    rank = tl.load(rank_ptr + adapter)
    if _out_of_class(rank, lowest_rank, highest_rank):
        return
    # int64, as row times stride passes 2^31 elements in long streams of wide layers.
    row = (tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_mask = row < tl.load(seg_end_ptr + segment)
    first_column = block * BLOCK_K
    column = first_column + tl.arange(0, BLOCK_K)
    width = _of_layer(layer, K, K_1, K_2, LAYERS)
    column_mask = column < width
    s_ptr += tl.multiple_of(tl.load(s_column_ptr + adapter), 8)
    w_ptr += tl.multiple_of(tl.load(w_offset_ptr + adapter), 8)
    for is_wide in tl.static_range(0 if NARROW_STAGES else 1, 2 if WIDE_STAGES else 1):
        if _takes(rank, is_wide, NARROW_STAGES, WIDE_STAGES):
            BLOCK_R: tl.constexpr = _WIDE_BLOCK if is_wide else _NARROW_RANK
            STAGES: tl.constexpr = WIDE_STAGES if is_wide else NARROW_STAGES
            lane = tl.arange(0, BLOCK_R)
            s_block_ptr = s_ptr + row[:, None] * s_stride + lane[None, :]
            w_block_ptr = w_ptr + lane[:, None] * width + column[None, :]
            sums = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
            for first_rank in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
                rank_mask = first_rank + lane < rank
                s_mask = row_mask[:, None] & (first_rank + lane < _columns_of(rank))[None, :]
                s = tl.load(s_block_ptr + first_rank, mask=s_mask, other=0.0)
                w = tl.load(w_block_ptr + first_rank * width, mask=rank_mask[:, None] & column_mask[None, :], other=0.0)
                sums = _dot(s, w, sums, UPCAST)
            sums = sums * _factor(scale_ptr, keep_scale_ptr, adapter, scaled, DROP)
            if DROP:
                key, threshold, counter = _dropout_state(
                    step_seed_ptr, threshold_ptr, places_ptr, segment, row, row_mask, module_seed, K
                )
                sums = tl.where(_keep_mask(key, counter, first_column, threshold, BLOCK_K, True), sums, 0.0)
            if HAS_BIAS:
                bias_ptr = _of_layer(layer, bias_ptr, bias_1_ptr, bias_2_ptr, LAYERS)
                sums += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
            y_ptr = _of_layer(layer, y_ptr, y_1_ptr, y_2_ptr, LAYERS)
            y_stride = _of_layer(layer, y_stride, y_1_stride, y_2_stride, LAYERS)
            y_block_ptr = y_ptr + row[:, None] * y_stride + column[None, :]
            if ADD:
                sums += tl.load(y_block_ptr, mask=row_mask[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
            tl.store(y_block_ptr, sums.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _has_one_chunk(chunk_begin_ptr, segment):
    """Return whether a segment has a single chunk, so that one program of wgrad computes its whole gradient."""
    return tl.load(chunk_begin_ptr + segment + 1) - tl.load(chunk_begin_ptr + segment) == 1


@triton.jit(do_not_specialize=["module_seed", "scaled", "num_segments", "part_ranks", "lowest_rank", "highest_rank"])
def wgrad_kernel(
    s_ptr,
    x_ptr,
    x_1_ptr,
    x_2_ptr,
    part_ptr,
    places_ptr,
    chunk_segment_ptr,
    chunk_row_ptr,
    chunk_begin_ptr,
    seg_end_ptr,
    step_seed_ptr,
    grad_ptr,
    w_offset_ptr,
    s_column_ptr,
    rank_ptr,
    scale_ptr,
    keep_scale_ptr,
    threshold_ptr,
    s_stride,
    x_stride,
    x_1_stride,
    x_2_stride,
    num_segments: tl.int32,
    part_ranks: tl.int32,
    lowest_rank: tl.int32,
    highest_rank: tl.int32,
    module_seed: tl.int64,
    scaled: tl.int32,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    LAYERS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NARROW_STAGES: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    DROP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The contribution of one chunk of rows to a weight gradient, for one block of ranks and columns of one layer.

    If the segment has only one chunk, this is its whole gradient; otherwise `reduce_kernel` sums the contributions of
    its chunks. Only the segment's own rows decide which of the two applies.
    """
    CALLS: tl.constexpr = (D + 7) // 8
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment_ptr + chunk)
    if segment < 0:
        return
    layer, block = _column_block(tl.program_id(1), D, D_1, BLOCK_D, LAYERS)
    adapter = layer * num_segments + segment
    rank = tl.load(rank_ptr + adapter)
    first_rank = tl.program_id(2) * _WIDE_BLOCK
    if (first_rank >= rank) | _out_of_class(rank, lowest_rank, highest_rank):
        return
    first_row = tl.load(chunk_row_ptr + chunk)
    end_row = tl.minimum(tl.load(seg_end_ptr + segment), first_row + CHUNK)
    first_column = block * BLOCK_D
    column = first_column + tl.arange(0, BLOCK_D)
    width = _of_layer(layer, D, D_1, D_2, LAYERS)
    column_mask = column < width
    x_ptr = _of_layer(layer, x_ptr, x_1_ptr, x_2_ptr, LAYERS)
    x_stride = _of_layer(layer, x_stride, x_1_stride, x_2_stride, LAYERS)
    if DROP:
        key = tl.load(step_seed_ptr + segment) ^ module_seed
        threshold = tl.load(threshold_ptr + segment)
    s_ptr += tl.multiple_of(tl.load(s_column_ptr + adapter), 8)
    for is_wide in tl.static_range(0 if NARROW_STAGES else 1, 2 if WIDE_STAGES else 1):
        if _takes(rank, is_wide, NARROW_STAGES, WIDE_STAGES):
            BLOCK_R: tl.constexpr = _WIDE_BLOCK if is_wide else _NARROW_RANK
            STAGES: tl.constexpr = WIDE_STAGES if is_wide else NARROW_STAGES
            ranks = first_rank + tl.arange(0, BLOCK_R)
            rank_mask = ranks < rank
            # Columns first, because 16 ranks are too few rows for a warp group product of the tensor cores.
            sums = tl.zeros((BLOCK_D, BLOCK_R), dtype=tl.float32)
            for block_row in tl.range(first_row, end_row, BLOCK_M, num_stages=STAGES):
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
            sums = sums * _factor(scale_ptr, keep_scale_ptr, adapter, scaled, DROP)
            gradient = tl.trans(sums)
            place = ranks[:, None] * width + column[None, :]
            mask = rank_mask[:, None] & column_mask[None, :]
            is_whole = _has_one_chunk(chunk_begin_ptr, segment)
            # int64, as chunks times ranks times columns may pass 2^31.
            first = chunk.to(tl.int64) * (D + D_1 + D_2) + _of_layer(layer, 0, D, D + D_1, LAYERS)
            whole_ptr = grad_ptr + tl.multiple_of(tl.load(w_offset_ptr + adapter), 8)
            out_ptr = tl.where(is_whole, whole_ptr, part_ptr + first * part_ranks) + place
            if ACCUMULATE:
                # Masked and not branched, because a branch spills registers on an A100.
                has_sum = (ranks < tl.where(is_whole, rank, 0))[:, None] & column_mask[None, :]
                gradient += tl.load(out_ptr, mask=has_sum, other=0.0)
            tl.store(out_ptr, gradient, mask=mask)


@triton.jit(do_not_specialize=["num_segments", "part_ranks"])
def reduce_kernel(
    part_ptr,
    chunk_begin_ptr,
    grad_ptr,
    w_offset_ptr,
    rank_ptr,
    part_ranks: tl.int32,
    num_segments: tl.int32,
    D: tl.constexpr,
    D_1: tl.constexpr,
    D_2: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Sum the contributions of a weight gradient's chunks in order; with one chunk, `wgrad` has written it already."""
    segment = tl.program_id(0)
    layer, block = _column_block(tl.program_id(1), D, D_1, BLOCK_D, LAYERS)
    adapter = layer * num_segments + segment
    rank = tl.load(rank_ptr + adapter)
    ranks = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    if (tl.program_id(2) * BLOCK_R >= rank) | _has_one_chunk(chunk_begin_ptr, segment):
        return
    column = block * BLOCK_D + tl.arange(0, BLOCK_D)
    width = _of_layer(layer, D, D_1, D_2, LAYERS)
    mask = (ranks < rank)[:, None] & (column < width)[None, :]
    sums = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    part_ptr += part_ranks * _of_layer(layer, 0, D, D + D_1, LAYERS)
    part_ptr = part_ptr + ranks.to(tl.int64)[:, None] * width + column[None, :]
    # In chunk order and without atomics, for the same bits every time.
    for chunk in range(tl.load(chunk_begin_ptr + segment), tl.load(chunk_begin_ptr + segment + 1)):
        sums += tl.load(part_ptr + tl.cast(chunk, tl.int64) * part_ranks * (D + D_1 + D_2), mask=mask, other=0.0)
    grad_ptr += tl.multiple_of(tl.load(w_offset_ptr + adapter), 8)
    grad_ptr = grad_ptr + ranks[:, None] * width + column[None, :]
    if ACCUMULATE:
        sums += tl.load(grad_ptr, mask=mask, other=0.0)
    tl.store(grad_ptr, sums, mask=mask)
