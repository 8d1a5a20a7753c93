"""The launches between the products of bottlenecks; importing this file imports Triton.

Shape letters: T rows of the stream, K features, C columns of P, G segments.
"""

# Plain values stand for Triton's constexpr, and arguments are handed over several at a time.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch

from peft_mux.kernels.bottleneck.biases import Biases
from peft_mux.kernels.bottleneck.device import activate_kernel, copy_kernel, derivative_kernel, sum_kernel
from peft_mux.kernels.lora.launch import Launch
from peft_mux.kernels.lora.tables import SegmentTables, Tiles

Launches = dict[tuple[Any, ...], Launch]
"""Launches of earlier passes of the same adapters, by all that decides on them."""

_COLUMNS = 32
"""Columns of P that a program works on: blocks of 64 rows of them need no more registers than there are."""
_FEATURES = 128
"""Features that a program copies."""
_MAX_LAYOUTS = 64
"""Layouts of tensors of which launches are kept, before all are made anew."""


def activate(
    p_TC: torch.Tensor,
    h_TC: torch.Tensor,
    tables: SegmentTables,
    rank_G: torch.Tensor,
    code_G: torch.Tensor,
    biases: Biases,
    launches: Launches,
) -> None:
    """Add each segment's bias to P, in place, and write `H = f(P)`.

    Args:
        p_TC: P as `shrink` has written it, rows contiguous.
        h_TC: H, of the same shape.
        tables: which rows of the stream belong to which segment.
        rank_G: int32, columns of each segment's bottleneck, 0 for none.
        code_G: int32, the nonlinearity of each segment; see `CODES` of `peft_mux.kernels.bottleneck.group`.
        biases: those behind `down`.
        launches: those of the same adapters.
    """
    blocks = {"BLOCK_M": tables.block_rows, "BLOCK_C": _COLUMNS}
    fixed = rank_G, code_G, *biases, p_TC.stride(0), h_TC.stride(0)
    launch = _kept(launches, activate_kernel, p_TC, fixed, blocks)
    if tables.num_tiles:
        launch((tables.num_tiles, -(-p_TC.shape[1] // _COLUMNS), 1), (p_TC, h_TC), tables.of_tiles)


def derivative(
    p_TC: torch.Tensor,
    dp_TC: torch.Tensor,
    h_TC: torch.Tensor,
    tables: SegmentTables,
    rank_G: torch.Tensor,
    code_G: torch.Tensor,
    launches: Launches,
) -> None:
    """Write `dP = f'(P) dH` in the place of dH, and `H = f(P)`.

    Args:
        p_TC: P as `activate` has left it.
        dp_TC: dH, which becomes dP.
        h_TC: H, of the same shape.
        tables: which rows of the stream belong to which segment.
        rank_G: int32, columns of each segment's bottleneck, 0 for none.
        code_G: int32, the nonlinearity of each segment.
        launches: those of the same adapters.
    """
    blocks = {"BLOCK_M": tables.block_rows, "BLOCK_C": _COLUMNS}
    fixed = rank_G, code_G, p_TC.stride(0), dp_TC.stride(0), h_TC.stride(0)
    launch = _kept(launches, derivative_kernel, p_TC, fixed, blocks)
    if tables.num_tiles:
        launch((tables.num_tiles, -(-p_TC.shape[1] // _COLUMNS), 1), (p_TC, dp_TC, h_TC), tables.of_tiles)


def copy_with_bias(
    y_TK: torch.Tensor, out_TK: torch.Tensor, tables: SegmentTables, biases: Biases, launches: Launches
) -> None:
    """Write `out = y + c`, with each segment's bias c.

    Args:
        y_TK: `[T, K]`, columns adjacent.
        out_TK: `[T, K]`, columns adjacent; rows of no segment are not written.
        tables: which rows of the stream belong to which segment.
        biases: those behind `up`.
        launches: those of the same adapters.
    """
    width = y_TK.shape[1]
    blocks = {"K": width, "BLOCK_M": tables.block_rows, "BLOCK_K": _FEATURES}
    launch = _kept(launches, copy_kernel, y_TK, (*biases, y_TK.stride(0), out_TK.stride(0)), blocks)
    if tables.num_tiles:
        launch((tables.num_tiles, -(-width // _FEATURES), 1), (y_TK, out_TK), tables.of_tiles)


def add_sums(x_TC: torch.Tensor, gradients: Biases, tables: SegmentTables, launches: Launches) -> None:
    """Add to the gradient of each segment's bias the sum of its rows, as many columns as the bias has.

    Args:
        x_TC: `[T, C]` gradient of what the biases were added to, columns adjacent.
        gradients: where the gradients lie, fp32.
        tables: which rows of the stream belong to which segment.
        launches: those of the same adapters.
    """
    blocks = {"BLOCK_M": tables.block_rows, "BLOCK_C": _COLUMNS}
    launch = _kept(launches, sum_kernel, x_TC, (*gradients, x_TC.stride(0)), blocks)
    # By the segment and not by chunks: biases are short, and their sums need no parts that are added up.
    if tables.num_segments:
        grid = tables.num_segments, -(-x_TC.shape[1] // _COLUMNS), 1
        launch(grid, (x_TC,), (tables.seg_start_G, tables.seg_end_G))


def _kept(
    launches: Launches, kernel: Any, x_TC: torch.Tensor, fixed: tuple[Any, ...], constants: dict[str, int]
) -> Launch:
    """Return the launch of a kernel for tensors of one layout, made once."""
    # Tensors by where they lie: those of a group stay there, and biases of `down` and `up` lie apart.
    numbers = (value.data_ptr() if isinstance(value, torch.Tensor) else value for value in fixed)
    key = kernel, x_TC.dtype, *numbers, *constants.values()
    if key not in launches:
        if len(launches) >= _MAX_LAYOUTS:
            launches.clear()
        launches[key] = Launch(kernel, Tiles(_COLUMNS, warps=4, stages=3), *fixed, **constants)
    return launches[key]
