"""What is checked of the tensors of a launch, as kernels trust whatever they are given.

Shape letters: T rows of the stream, D features, K features written, C columns of S.
"""

from __future__ import annotations

import torch

from peft_mux.kernels.lora.factors import DTYPES, Factors
from peft_mux.kernels.lora.tables import RankTable, SegmentTables


def check_layout(
    x_TD: torch.Tensor, w: Factors, s_TC: torch.Tensor, ranks: RankTable, tables: SegmentTables, *, is_gradient: bool
) -> None:
    """Raise where a launch would compute with the wrong type, or read columns or segments that are not there."""
    width = x_TD.shape[1]
    if x_TD.dtype not in DTYPES or s_TC.dtype != x_TD.dtype:
        raise ValueError(f"activations are {x_TD.dtype}, S is {s_TC.dtype}; allowed: one of bf16, fp16, fp32 for both.")
    if w.base.dtype != (torch.float32 if is_gradient else x_TD.dtype):
        raise ValueError(f"factors or gradients are {w.base.dtype}; allowed: that of activations, fp32 for gradients.")
    if w.width != width:
        raise ValueError(f"factors have {w.width} columns; allowed: {width}, as activations.")
    if s_TC.shape[1] < ranks.num_columns or s_TC.stride(1) != 1:
        raise ValueError(
            f"S of shape {tuple(s_TC.shape)}; allowed: [{len(x_TD)}, at least {ranks.num_columns}], columns adjacent."
        )
    if not tables.num_segments == ranks.num_segments == w.num_segments:
        raise ValueError(
            f"{tables.num_segments} segments, ranks of {ranks.num_segments} segments, factors of {w.num_segments}; the "
            "tables do not fit."
        )


def check_bias(bias: torch.Tensor, y_TK: torch.Tensor, *, drops: bool) -> None:
    """Raise where a bias is not one number of y's dtype for each column, or would be dropped from."""
    # The dtype too: code that was compiled for another one would read the wrong bytes.
    if drops or bias.shape != y_TK.shape[1:] or bias.dtype != y_TK.dtype or not bias.is_contiguous():
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} in {bias.dtype}; allowed: contiguous [{y_TK.shape[1]}] in "
            f"{y_TK.dtype}, and none with dropout."
        )


def check_rows(x_TD: torch.Tensor, s_TC: torch.Tensor, tables: SegmentTables, places: torch.Tensor | None) -> None:
    """Raise where a launch would read or write rows or places that are not there."""
    num_rows = len(x_TD)
    if len(s_TC) != num_rows:
        raise ValueError(f"S of shape {tuple(s_TC.shape)}; allowed: [{num_rows}, columns], as activations.")
    if tables.num_rows > num_rows:
        raise ValueError(f"segments of {tables.num_rows} rows, {num_rows} rows of the stream; the tables do not fit.")
    if places is not None and (places.dtype != torch.int64 or len(places) < num_rows or not places.is_contiguous()):
        raise ValueError(f"places are {places.dtype} of length {len(places)}; allowed: contiguous int64 [{num_rows}].")
