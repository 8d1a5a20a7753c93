"""What runs on the device between the products of bottlenecks: nonlinearities, their derivatives, and biases.

A program works on rows of one segment only, as in `peft_mux.kernels.lora.device`, whose kernels compute the products.
Nothing is added up here, so that every bit a task gets is the same alone and in company.

Shape letters: T rows of the stream, K features, C columns of P, M of a bottleneck, G segments.
"""

# Triton's annotations of scalars are values and not types, and plain values stand for its constexpr.
# pyright: reportInvalidTypeForm=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

RELU = tl.constexpr(0)
GELU = tl.constexpr(1)
SILU = tl.constexpr(2)
TANH = tl.constexpr(3)


@triton.jit
def _cdf(x):
    """Return the distribution function of a standard normal variable."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent; by its series near 0, where the quotient would lose its digits."""
    square = x * x
    near = x * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315 - square * (62.0 / 2835)))))
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _activated(x, code):
    """Return f(x) in fp32; NaN stays NaN."""
    if code == RELU:
        f = tl.where(x <= 0.0, 0.0, x)
    elif code == GELU:
        f = x * _cdf(x)
    elif code == SILU:
        f = x * _sigmoid(x)
    else:
        f = _tanh(x)
    return f


@triton.jit
def _slope(x, code):
    """Return f'(x) in fp32."""
    if code == RELU:
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif code == GELU:
        slope = _cdf(x) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif code == SILU:
        gate = _sigmoid(x)
        slope = gate * (1.0 + x * (1.0 - gate))
    else:
        f = _tanh(x)
        slope = 1.0 - f * f
    return slope


@triton.jit
def _tile(tile_segment_ptr, tile_row_ptr, seg_end_ptr, BLOCK_M: tl.constexpr):
    """Return the segment of this program's tile (-1 for none), its rows, and which of them are the segment's."""
    tile = tl.program_id(0)
    segment = tl.load(tile_segment_ptr + tile)
    # int64, as row times stride passes 2^31 elements in long streams of wide layers.
    row = (tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_mask = row < tl.load(seg_end_ptr + tl.maximum(segment, 0))
    return segment, row, row_mask


@triton.jit
def activate_kernel(
    p_ptr,
    h_ptr,
    tile_segment_ptr,
    tile_row_ptr,
    seg_end_ptr,
    step_seed_ptr,
    rank_ptr,
    code_ptr,
    bias_ptr,
    bias_offset_ptr,
    bias_size_ptr,
    p_stride,
    h_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """P of one tile of rows and one block of columns gets its bias, in place; H = f(P)."""
    segment, row, row_mask = _tile(tile_segment_ptr, tile_row_ptr, seg_end_ptr, BLOCK_M)
    if segment < 0:
        return
    size = (tl.load(rank_ptr + segment) + 7) // 8 * 8
    first_column = tl.program_id(1) * BLOCK_C
    if first_column >= size:
        return
    column = first_column + tl.arange(0, BLOCK_C)
    mask = row_mask[:, None] & (column < size)[None, :]
    p_ptr = p_ptr + row[:, None] * p_stride + column[None, :]
    has_bias = column < tl.load(bias_size_ptr + segment)
    bias = tl.load(bias_ptr + tl.load(bias_offset_ptr + segment) + column, mask=has_bias, other=0.0)
    before = tl.load(p_ptr, mask=mask, other=0.0).to(tl.float32) + bias.to(tl.float32)[None, :]
    # Rounded first: the derivative is of what the backward pass will read.
    before = before.to(p_ptr.dtype.element_ty)
    tl.store(p_ptr, before, mask=mask)
    after = _activated(before.to(tl.float32), tl.load(code_ptr + segment))
    h_ptr = h_ptr + row[:, None] * h_stride + column[None, :]
    tl.store(h_ptr, after.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def derivative_kernel(
    p_ptr,
    dp_ptr,
    h_ptr,
    tile_segment_ptr,
    tile_row_ptr,
    seg_end_ptr,
    step_seed_ptr,
    rank_ptr,
    code_ptr,
    p_stride,
    dp_stride,
    h_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """DP = f'(P) dH of one tile of rows and one block of columns, in the place of dH; H = f(P) once more."""
    segment, row, row_mask = _tile(tile_segment_ptr, tile_row_ptr, seg_end_ptr, BLOCK_M)
    if segment < 0:
        return
    size = (tl.load(rank_ptr + segment) + 7) // 8 * 8
    first_column = tl.program_id(1) * BLOCK_C
    if first_column >= size:
        return
    column = first_column + tl.arange(0, BLOCK_C)
    mask = row_mask[:, None] & (column < size)[None, :]
    code = tl.load(code_ptr + segment)
    before = tl.load(p_ptr + row[:, None] * p_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    dp_ptr = dp_ptr + row[:, None] * dp_stride + column[None, :]
    gradient = tl.load(dp_ptr, mask=mask, other=0.0).to(tl.float32) * _slope(before, code)
    tl.store(dp_ptr, gradient.to(dp_ptr.dtype.element_ty), mask=mask)
    h_ptr = h_ptr + row[:, None] * h_stride + column[None, :]
    tl.store(h_ptr, _activated(before, code).to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def copy_kernel(
    y_ptr,
    out_ptr,
    tile_segment_ptr,
    tile_row_ptr,
    seg_end_ptr,
    step_seed_ptr,
    bias_ptr,
    bias_offset_ptr,
    bias_size_ptr,
    y_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Out = y + c of one tile of rows and one block of columns; a segment without a bias is copied."""
    segment, row, row_mask = _tile(tile_segment_ptr, tile_row_ptr, seg_end_ptr, BLOCK_M)
    if segment < 0:
        return
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = row_mask[:, None] & (column < K)[None, :]
    y = tl.load(y_ptr + row[:, None] * y_stride + column[None, :], mask=mask, other=0.0)
    bias_ptr += tl.multiple_of(tl.load(bias_offset_ptr + segment), 8)
    bias = tl.load(bias_ptr + column, mask=column < tl.load(bias_size_ptr + segment), other=0.0)
    out_ptr = out_ptr + row[:, None] * out_stride + column[None, :]
    out = y.to(tl.float32) + bias.to(tl.float32)[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    x_ptr,
    seg_start_ptr,
    seg_end_ptr,
    grad_ptr,
    grad_offset_ptr,
    size_ptr,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add the sum over a segment's rows of one block of columns to the gradient of its bias."""
    segment = tl.program_id(0)
    size = tl.load(size_ptr + segment)
    first_column = tl.program_id(1) * BLOCK_C
    if first_column >= size:
        return
    column = first_column + tl.arange(0, BLOCK_C)
    column_mask = column < size
    end_row = tl.load(seg_end_ptr + segment)
    sums = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for block_row in range(tl.load(seg_start_ptr + segment), end_row, BLOCK_M):
        row = (block_row + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (row < end_row)[:, None] & column_mask[None, :]
        sums += tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    grad_ptr = grad_ptr + tl.load(grad_offset_ptr + segment) + column
    before = tl.load(grad_ptr, mask=column_mask, other=0.0)
    tl.store(grad_ptr, before + tl.sum(sums, axis=0), mask=column_mask)
