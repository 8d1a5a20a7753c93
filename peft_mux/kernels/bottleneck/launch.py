"""The launches between the products of bottlenecks; importing this file imports Triton.

Shape letters: T rows of the stream, K features, C columns of P, G segments.
"""

# Plain values stand for Triton's constexpr, and arguments are handed over several at a time.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch

from peft_mux.kernels.bottleneck.biases import Biases
from peft_mux.kernels.bottleneck.device import activate_kernel, copy_kernel, derivative_kernel, sum_kernel
from peft_mux.kernels.lora.tables import SegmentTables

_COLUMNS = 32
"""Columns of P that a program works on: blocks of 64 rows of them need no more registers than there are."""
_FEATURES = 128
"""Features that a program copies."""


def activate(
    p_TC: torch.Tensor,
    h_TC: torch.Tensor,
    tables: SegmentTables,
    rank_G: torch.Tensor,
    code_G: torch.Tensor,
    biases: Biases,
) -> None:
    """Add each segment's bias to P, in place, and write `H = f(P)`.

    Args:
        p_TC: P as `shrink` has written it, rows contiguous.
        h_TC: H, of the same shape.
        tables: which rows of the stream belong to which segment.
        rank_G: int32, columns of each segment's bottleneck, 0 for none.
        code_G: int32, the nonlinearity of each segment; see `CODES` of `peft_mux.kernels.bottleneck.group`.
        biases: those behind `down`.
    """
    if tables.num_tiles:
        activate_kernel[(tables.num_tiles, -(-p_TC.shape[1] // _COLUMNS))](
            *(p_TC, h_TC, *tables.of_tiles, rank_G, code_G, *biases, p_TC.stride(0), h_TC.stride(0)),
            BLOCK_M=tables.block_rows,
            BLOCK_C=_COLUMNS,
        )


def derivative(
    p_TC: torch.Tensor,
    dp_TC: torch.Tensor,
    h_TC: torch.Tensor,
    tables: SegmentTables,
    rank_G: torch.Tensor,
    code_G: torch.Tensor,
) -> None:
    """Write `dP = f'(P) dH` in the place of dH, and `H = f(P)`.

    Args:
        p_TC: P as `activate` has left it.
        dp_TC: dH, which becomes dP.
        h_TC: H, of the same shape.
        tables: which rows of the stream belong to which segment.
        rank_G: int32, columns of each segment's bottleneck, 0 for none.
        code_G: int32, the nonlinearity of each segment.
    """
    if tables.num_tiles:
        derivative_kernel[(tables.num_tiles, -(-p_TC.shape[1] // _COLUMNS))](
            *(p_TC, dp_TC, h_TC, *tables.of_tiles, rank_G, code_G, p_TC.stride(0), dp_TC.stride(0), h_TC.stride(0)),
            BLOCK_M=tables.block_rows,
            BLOCK_C=_COLUMNS,
        )


def copy_with_bias(y_TK: torch.Tensor, out_TK: torch.Tensor, tables: SegmentTables, biases: Biases) -> None:
    """Write `out = y + c`, with each segment's bias c.

    Args:
        y_TK: `[T, K]`, columns adjacent.
        out_TK: `[T, K]`, columns adjacent; rows of no segment are not written.
        tables: which rows of the stream belong to which segment.
        biases: those behind `up`.
    """
    if tables.num_tiles:
        copy_kernel[(tables.num_tiles, -(-y_TK.shape[1] // _FEATURES))](
            *(y_TK, out_TK, *tables.of_tiles, *biases, y_TK.stride(0), out_TK.stride(0)),
            K=y_TK.shape[1],
            BLOCK_M=tables.block_rows,
            BLOCK_K=_FEATURES,
        )


def add_sums(x_TC: torch.Tensor, gradients: Biases, tables: SegmentTables) -> None:
    """Add to the gradient of each segment's bias the sum of its rows, as many columns as the bias has.

    Args:
        x_TC: `[T, C]` gradient of what the biases were added to, columns adjacent.
        gradients: where the gradients lie, fp32.
        tables: which rows of the stream belong to which segment.
    """
    # By the segment and not by chunks: biases are short, and their sums need no parts that are added up.
    if tables.num_segments:
        sum_kernel[(tables.num_segments, -(-x_TC.shape[1] // _COLUMNS))](
            *(x_TC, tables.seg_start_G, tables.seg_end_G, *gradients, x_TC.stride(0)),
            BLOCK_M=tables.block_rows,
            BLOCK_C=_COLUMNS,
        )
