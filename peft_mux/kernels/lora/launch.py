"""LoRA of many tasks over one packed stream: the launches of shrink, expand and wgrad with its reduction.

    shrink   S[m] = s? * drop?(x[m]) @ W_g^T         forward (x, A), backward (dy, B^T)
    expand   y[m] = s? * drop?(S[m] @ W_g)           forward (S, B^T), backward (dS, A)
    wgrad    dW_g = s? * sum_m S[m]^T drop?(x[m])    backward (dS, x) for dA, (S, dy) for dB^T

The kernels are in `lora_kernels.py`. Importing this file imports Triton, so callers import it only if they use kernels.

Below a few thousand tokens the host limits the speed of a pass. Therefore everything that is the same in every pass is
prepared once, as a `Launch`, and cached by the `Factors` that it works on.

Layers that read the same activations share a launch, in which each has programs of its own: their factors, ranks and
scales follow one another in the tables, and `others` are the tensors of all layers but the first.

Shape letters: T rows of the stream, D features, K features written, C columns of S, R rank, G segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from peft_mux.kernels.lora.lora_kernels import expand_kernel, reduce_kernel, shrink_kernel, wgrad_kernel
from peft_mux.kernels.lora.tables import (
    DTYPES,
    MAX_JOINT_RANK,
    MAX_LAYERS,
    NARROW_RANK,
    WIDE_BLOCK,
    Factors,
    RankTable,
    SegmentTables,
    Tiles,
    gpu_model,
    is_hopper,
    signed_seed,
    tiles,
)

_WORD_BYTES = 16  # alignment in bytes that vectorised code needs
_REDUCE_RANKS = 16  # rows of a block of the reduction

# Tests run the kernels on CPUs in Triton's interpreter, which computes wrong products of 16-bit blocks.
_INTERPRETED = not isinstance(shrink_kernel, triton.JITFunction)


class Launch:
    """A kernel with the arguments that are the same in every pass.

    In each launch Triton binds the arguments to find the matching compiled code, which takes the host several times as
    long as the launch itself. Here everything that the choice depends on is fixed except the alignment of tensors: the
    code for 16-byte aligned tensors is cached after the first launch, and other launches use Triton's binder.

    Args:
        kernel: the Triton kernel that is launched.
        tile: how it is launched.
        fixed: the arguments between those of a call and the constants.
        constants: the kernel's constants, in its own order, which ends with them.
    """

    __slots__ = ("_compiled", "_fixed", "_grid", "_kernel", "_options", "_runner")

    def __init__(self, kernel: Any, tile: Tiles, *fixed: object, **constants: object) -> None:
        assert tuple(kernel.arg_names[-len(constants) :]) == tuple(constants), "constants are in the kernel's order"
        self._kernel, self._fixed = kernel, (*fixed, *constants.values())
        # Triton 3.10 no longer fuses a product and a sum into one instruction by default.
        self._options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
        self._compiled: Any = None
        # Cached for the last grid: Triton creates a function for each launch, and consecutive passes have equal sizes.
        self._grid: tuple[int, ...] | None = None
        self._runner: Any = None

    def __call__(
        self,
        grid: tuple[int, ...],
        moving: tuple[torch.Tensor, ...],
        tables: tuple[torch.Tensor, ...],
        *,
        is_aligned: bool = False,
    ) -> None:
        """Start the kernel; all launches go through here.

        Args:
            grid: number of programs in each of three dimensions.
            moving: the kernel's first arguments, tensors whose addresses change from pass to pass.
            tables: the arguments after them, 16-byte aligned tables of the pass.
            is_aligned: whether the caller knows that the tensors in `moving` are 16-byte aligned; those whose addresses
                never change are excepted.
        """
        if not is_aligned:
            address = 0
            for tensor in moving:
                address |= tensor.data_ptr()
            is_aligned = address % _WORD_BYTES == 0
        if self._compiled is not None and is_aligned:
            if grid != self._grid:
                self._grid, self._runner = grid, self._compiled[grid]
            self._runner(*moving, *tables, *self._fixed)
            return
        compiled = self._kernel[grid](*moving, *tables, *self._fixed, **self._options)
        # Triton's interpreter compiles nothing, and returns nothing.
        if is_aligned:
            self._compiled = compiled


def shrink(
    x_TD: torch.Tensor,
    w: Factors,
    s_TC: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    others: Sequence[torch.Tensor] = (),
    places: torch.Tensor | None = None,
    module_seed: int = 0,
    layout: int | None = None,
) -> None:
    """Write `S[m] = scale? * drop?(x[m]) @ W_g^T`, for (x, A) and for (dy, B transposed).

    A segment of rank r writes r columns of S, rounded up to a multiple of 8, starting at its first column; the columns
    past r are set to 0. All other columns are unchanged.

    Args:
        x_TD: `[T, D]` activations or gradients, columns adjacent, any row stride.
        w: the segments' factors `[R, D]`.
        s_TC: the output S `[T, C]`, with at least `ranks.num_columns` columns.
        tables: which rows of the stream belong to which segment.
        ranks: the segments' adapters in this module.
        scaled: whether to multiply by each segment's scale.
        others: the same of the other layers; none of them has dropout.
        places: int64 `[T]`, place of each row in its task's global batch, to drop elements of x where the table has
            dropout; `None` for no dropout.
        module_seed: the module's half of the key, `philox.hash_seed(module_name)`.
        layout: a number for everything else that determines the launches of `w`. Launches with the same number must
            have the same layout and 16-byte aligned tensors, and are not checked again. `None` to check.

    Raises:
        ValueError: if a shape or a dtype is not as above.
    """
    xs_TD = x_TD, *others
    launches = None if layout is None else w.launches.get(("shrink", layout))
    if launches is None:
        drop = ranks.has_dropout and places is not None
        key = ("shrink", layout)
        if layout is None:
            key = ("shrink", scaled, drop, module_seed, ranks, *_layout_of(xs_TD, s_TC, tables))
        launches = _found(key, xs_TD, w, s_TC, tables, ranks, places)
    if launches is None:
        launches = w.launches[key] = []
        is_short = tables.shrink_rows < tables.block_rows
        for lowest, highest, tile, stages in _rank_classes("shrink", ranks, x_TD, is_short=is_short):
            launch = Launch(
                shrink_kernel,
                tile,
                *(w.base, w.offset_G, *ranks.of_adapters),
                *(*_of_layers([x.stride(0) for x in xs_TD]), s_TC.stride(0), tables.num_segments),
                *(lowest, highest, signed_seed(module_seed), int(scaled)),
                **_constants("D", w),
                BLOCK_M=tables.block_rows,
                ROWS=tables.shrink_rows,
                BLOCK_D=tile.columns,
                **stages,
                DROP=drop,
                RAGGED=any(width % tile.columns for width in w.widths),
                UPCAST=_INTERPRETED,
            )
            launches.append((triton.cdiv(min(highest, ranks.max_rank), WIDE_BLOCK), launch))
    # Without dropout the last argument is not read, but it must be a tensor.
    moving = *_of_layers(xs_TD), s_TC, tables.step_seed_G if places is None else places
    parts = tables.block_rows // tables.shrink_rows * len(xs_TD)
    for num_blocks, launch in launches if tables.num_tiles else ():
        launch((tables.num_tiles, num_blocks, parts), moving, tables.of_tiles, is_aligned=layout is not None)


def expand(
    s_TC: torch.Tensor,
    w: Factors,
    y_TK: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    others: Sequence[torch.Tensor] = (),
    biases: Sequence[torch.Tensor] = (),
    places: torch.Tensor | None = None,
    module_seed: int = 0,
    add: bool = False,
    layout: int | None = None,
) -> None:
    """Write `y[m] = scale? * drop?(S[m] @ W_g) + bias`, for (S, B transposed) and for (dS, A).

    All rows of all segments are written and none is read: a segment without an adapter gets the bias or zeros. The
    base product is then added (`torch.addmm(y, x, W.t(), out=y)`). With `add` the result is added to the contents of
    `y_TK`, and segments without an adapter are unchanged.

    Args:
        s_TC: the S `[T, C]` that `shrink` has written.
        w: the segments' factors `[R, K]`.
        y_TK: the output `[T, K]`, columns adjacent, any row stride.
        tables: which rows of the stream belong to which segment.
        ranks: the segments' adapters in this module.
        scaled: whether to multiply by each segment's scale.
        others: as in `shrink`, the outputs.
        biases: the bias `[K]` of each layer, or none. There are none with dropout.
        places: as in `shrink`, but elements of the result (dx) are dropped.
        module_seed: as in `shrink`.
        add: whether to add to `y_TK` instead of overwriting it.
        layout: as in `shrink`.

    Raises:
        ValueError: if a shape or a dtype is not as above.
    """
    ys_TK = y_TK, *others
    launches = None if layout is None else w.launches.get(("expand", layout))
    if launches is None:
        drop = ranks.has_dropout and places is not None
        key = ("expand", layout)
        if layout is None:
            choices = scaled, drop, module_seed, bool(biases), add
            key = ("expand", *choices, ranks, *_layout_of(ys_TK, s_TC, tables))
        launches = _found(key, ys_TK, w, s_TC, tables, ranks, places)
        # Also check the dtype, because code that was compiled for another one would read the wrong bytes.
        for bias, y in zip(biases, ys_TK, strict=bool(biases)):
            if drop or bias.shape != y.shape[1:] or bias.dtype != y.dtype or not bias.is_contiguous():
                raise ValueError(
                    f"bias must be contiguous [{y.shape[1]}] in {y.dtype}, and None with dropout, got shape "
                    f"{tuple(bias.shape)} in {bias.dtype}."
                )
    if launches is None:
        launches = w.launches[key] = []
        # Without `add` every row must be written, also those of tasks without an adapter here.
        for lowest, highest, tile, stages in _rank_classes("expand", ranks, y_TK, with_zero=not add):
            launch = Launch(
                expand_kernel,
                tile,
                *(w.base, w.offset_G, *ranks.of_adapters),
                *(s_TC.stride(0), *_of_layers([y.stride(0) for y in ys_TK]), tables.num_segments),
                *(lowest, highest, signed_seed(module_seed), int(scaled)),
                **_constants("K", w),
                BLOCK_M=tables.block_rows,
                BLOCK_K=tile.columns,
                **stages,
                DROP=drop,
                HAS_BIAS=bool(biases),
                ADD=add,
                UPCAST=_INTERPRETED,
            )
            launches.append((_num_column_blocks(w, tile), launch))
    moving = (
        *(s_TC, *_of_layers(ys_TK), *_of_layers(biases or (w.base,))),
        tables.step_seed_G if places is None else places,
    )
    for num_blocks, launch in launches if tables.num_tiles else ():
        launch((tables.num_tiles, num_blocks, 1), moving, tables.of_tiles, is_aligned=layout is not None)


def wgrad(
    s_TC: torch.Tensor,
    x_TD: torch.Tensor,
    grad: Factors,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    others: Sequence[torch.Tensor] = (),
    places: torch.Tensor | None = None,
    module_seed: int = 0,
    accumulate: bool = False,
    layout: int | None = None,
) -> None:
    """Write `dW_g = scale? * sum_m S[m]^T drop?(x[m])`, for (dS, x) and for (S, dy).

    Each chunk of a segment is summed separately, and the chunks are added in order, without atomics, for the same bits
    every time. Only the gradients of segments with an adapter are written; the gradient of a segment without rows is
    set to 0, or unchanged if gradients accumulate.

    Args:
        s_TC: the S `[T, C]` that `shrink` has written.
        x_TD: `[T, D]` activations or gradients, columns adjacent, any row stride.
        grad: addresses of the segments' gradients, fp32 `[R, D]`; no two segments share one.
        tables: which rows of the stream belong to which segment.
        ranks: the segments' adapters in this module.
        scaled: whether to multiply by each segment's scale.
        others: as in `shrink`.
        places: as in `shrink`.
        module_seed: as in `shrink`.
        accumulate: whether to add to `grad` instead of overwriting it.
        layout: as in `shrink`.

    Raises:
        ValueError: if a shape or a dtype is not as above.
    """
    xs_TD = x_TD, *others
    prepared = None if layout is None else grad.launches.get(("wgrad", layout))
    if prepared is None:
        drop = ranks.has_dropout and places is not None
        key = ("wgrad", layout)
        if layout is None:
            key = ("wgrad", scaled, drop, module_seed, accumulate, ranks, *_layout_of(xs_TD, s_TC, tables))
        prepared = _found(key, xs_TD, grad, s_TC, tables, ranks, places, is_gradient=True)
    if prepared is None:
        launches = []
        for lowest, highest, tile, stages in _rank_classes("wgrad", ranks, x_TD):
            launch = Launch(
                wgrad_kernel,
                tile,
                *(grad.base, grad.offset_G, *ranks.of_adapters),
                *(s_TC.stride(0), *_of_layers([x.stride(0) for x in xs_TD]), tables.num_segments, ranks.max_rank),
                *(lowest, highest, signed_seed(module_seed), int(scaled)),
                **_constants("D", grad),
                CHUNK=tables.chunk_rows,
                BLOCK_M=tables.block_rows,
                BLOCK_D=tile.columns,
                **stages,
                DROP=drop,
                ACCUMULATE=accumulate,
                UPCAST=_INTERPRETED,
            )
            num_blocks = _num_column_blocks(grad, tile), triton.cdiv(min(highest, ranks.max_rank), WIDE_BLOCK)
            launches.append((num_blocks, launch))
        tile = tiles("reduce", gpu_model(x_TD.device), _REDUCE_RANKS, grad.base.element_size())
        reduction = Launch(
            reduce_kernel,
            tile,
            *(grad.base, grad.offset_G, ranks.rank_G, ranks.max_rank, tables.num_segments),
            **_constants("D", grad),
            BLOCK_R=_REDUCE_RANKS,
            BLOCK_D=tile.columns,
            ACCUMULATE=accumulate,
        )
        num_blocks = _num_column_blocks(grad, tile), triton.cdiv(ranks.max_rank, _REDUCE_RANKS)
        prepared = grad.launches[key] = launches, (num_blocks, reduction)
    if ranks.max_rank == 0 or tables.num_segments == 0:
        return
    launches, (reduced_blocks, reduction) = prepared
    num_chunks, parts = tables.num_chunks, grad.base
    if tables.has_parts:
        # fp32 for any dtype of the factors, because the parts of many chunks are added later.
        parts = s_TC.new_empty((num_chunks, ranks.max_rank, sum(grad.widths)), dtype=torch.float32)
    moving = s_TC, *_of_layers(xs_TD), parts, tables.step_seed_G if places is None else places
    for num_blocks, launch in launches if num_chunks else ():
        launch((num_chunks, *num_blocks), moving, tables.of_chunks, is_aligned=layout is not None)
    # Needed even without parts, because the gradient of an empty segment must be written unless it accumulates.
    if tables.has_parts or not accumulate:
        reduction((tables.num_segments, *reduced_blocks), (parts,), (tables.chunk_begin,))


def _of_layers(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return three arguments of a kernel; no program works on a layer that is not there."""
    return (*values, *(values[0],) * (MAX_LAYERS - len(values)))


def _constants(name: str, w: Factors) -> dict[str, int]:
    """Return the constants by which a kernel knows the widths of the layers; 0 for a layer that is not there."""
    first, second, third = (*w.widths, *(0,) * (MAX_LAYERS - len(w.widths)))
    return {name: first, f"{name}_1": second, f"{name}_2": third, "LAYERS": len(w.widths)}


def _num_column_blocks(w: Factors, tile: Tiles) -> int:
    return sum(triton.cdiv(width, tile.columns) for width in w.widths)


def _layout_of(xs_TD: Sequence[torch.Tensor], s_TC: torch.Tensor, tables: SegmentTables) -> tuple[Any, ...]:
    """Return the key of a launch: everything that determines it or is checked, except for the rows."""
    tensors = *((x.dtype, x.shape[1], x.stride()) for x in xs_TD), s_TC.dtype, s_TC.shape[1], s_TC.stride()
    return (*tensors, tables.num_segments, tables.block_rows, tables.shrink_rows, tables.chunk_rows)


def _found(
    key: tuple[Any, ...],
    xs_TD: Sequence[torch.Tensor],
    w: Factors,
    s_TC: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    places: torch.Tensor | None,
    *,
    is_gradient: bool = False,
) -> Any:
    """Return what was prepared under a key, `None` if nothing was: types and columns are checked only then."""
    prepared = w.launches.get(key)
    if prepared is None:
        if not tables.num_segments * len(xs_TD) == ranks.num_adapters == w.num_adapters:
            raise ValueError(
                f"tables, ranks and factors must have the same number of segments, got "
                f"{tables.num_segments * len(xs_TD)}, {ranks.num_adapters} and {w.num_adapters}."
            )
        for x_TD, width in zip(xs_TD, w.widths, strict=True):
            _check_columns(x_TD, w.base.dtype, width, s_TC, ranks, is_gradient=is_gradient)
    # A launch would read or write rows or places that are not there.
    num_rows = len(xs_TD[0])
    if any(len(tensor) != num_rows for tensor in (s_TC, *xs_TD)):
        raise ValueError(f"S must have {num_rows} rows, as many as the activations, got shape {tuple(s_TC.shape)}.")
    if tables.num_rows > num_rows:
        raise ValueError(f"segments of {tables.num_rows} rows, {num_rows} rows of the stream; the tables do not fit.")
    if places is not None and (places.dtype != torch.int64 or len(places) < num_rows or not places.is_contiguous()):
        raise ValueError(f"places must be contiguous int64 [{num_rows}], got {places.dtype} of length {len(places)}.")
    return prepared


def _check_columns(
    x_TD: torch.Tensor, dtype: torch.dtype, width: int, s_TC: torch.Tensor, ranks: RankTable, *, is_gradient: bool
) -> None:
    """Raise if dtypes or columns of a layer do not match its factors, which have a given dtype and width."""
    if x_TD.dtype not in DTYPES or s_TC.dtype != x_TD.dtype:
        raise ValueError(
            f"activations and S must have the same dtype, bf16, fp16 or fp32, got {x_TD.dtype} and {s_TC.dtype}."
        )
    if dtype != (torch.float32 if is_gradient else x_TD.dtype) or width != x_TD.shape[1]:
        raise ValueError(
            "factors and gradients must have the width of the activations and their dtype (fp32 for gradients), got "
            f"[R, {width}] in {dtype} for activations {tuple(x_TD.shape)} in {x_TD.dtype}."
        )
    if s_TC.shape[1] < ranks.num_columns or s_TC.stride(1) != 1:
        raise ValueError(
            f"S must have shape [{len(x_TD)}, at least {ranks.num_columns}] with adjacent columns, got "
            f"{tuple(s_TC.shape)}."
        )
    if x_TD.stride(1) != 1 and width > 1:
        raise ValueError("activations must have adjacent columns, got transposed ones.")


def _rank_classes(
    kernel: str, ranks: RankTable, x_TD: torch.Tensor, *, with_zero: bool = False, is_short: bool = False
) -> list[tuple[int, int, Tiles, dict[str, int]]]:
    """Return the launches that the ranks need: lowest and highest rank, settings, and the constants of both classes.

    Narrow and wide ranks share a launch if their programs have equally many warps. In fp32 they do not: a wide program
    needs twice as many, with which the code for both classes spills registers on an A100. Without tensor cores the GPU
    is slower than the host in all but the shortest passes, so the second launch costs no time there. The weight
    gradients share one on Hopper only: elsewhere their code spills, or fewer narrow programs fit on a processor.

    Args:
        kernel: "shrink", "expand" or "wgrad".
        ranks: the segments' adapters.
        x_TD: activations of the dtype and on the device of the launch.
        with_zero: whether the first launch also writes the rows of segments without an adapter.
        is_short: as for `tiles`.
    """
    model = gpu_model(x_TD.device)
    narrow, wide = (
        tiles(kernel, model, block_ranks, x_TD.element_size(), is_short=is_short)
        for block_ranks in (NARROW_RANK, WIDE_BLOCK)
    )
    lowest = 0 if with_zero else 1
    can_share = narrow.warps == wide.warps and (kernel != "wgrad" or is_hopper(model))
    if ranks.has_narrow and ranks.has_wide and can_share:
        return [(lowest, MAX_JOINT_RANK, wide, {"NARROW_STAGES": narrow.stages, "WIDE_STAGES": wide.stages})]
    classes = []
    if ranks.has_narrow or (with_zero and not ranks.has_wide):
        classes.append((lowest, NARROW_RANK, narrow, {"NARROW_STAGES": narrow.stages, "WIDE_STAGES": 0}))
    if ranks.has_wide:
        lowest_wide = NARROW_RANK + 1 if ranks.has_narrow else lowest
        classes.append((lowest_wide, MAX_JOINT_RANK, wide, {"NARROW_STAGES": 0, "WIDE_STAGES": wide.stages}))
    return classes
