"""`Factors`: where the A and B of every segment lie in memory.

Shape letters: G segments, R rows of a factor (its rank), D columns.
"""

# MERGED: What is checked of the tensors of a launch, as kernels trust whatever they are given.
# MERGED: Shape letters: T rows of the stream, D features, K features written, C columns of S.
# MERGED: `Launch`: a kernel with all of its arguments that are the same in every pass, started without binding them
# MERGED: anew.
# MERGED: Below a few thousand tokens it is the host that sets the speed of a pass, and Triton's binder is most of a
# MERGED: launch.
# MERGED: LoRA of many tasks over one packed stream: the launches of shrink, expand, wgrad and its reduction.
# MERGED:     shrink   S[m] = s? * drop?(x[m]) @ W_g^T         forward (x, A), backward (dy, B^T)
# MERGED:     expand   y[m] = s? * drop?(S[m] @ W_g)           forward (S, B^T), backward (dS, A)
# MERGED:     wgrad    dW_g = s? * sum_m S[m]^T drop?(x[m])    backward (dS, x) for dA, (S, dy) for dB^T
# MERGED: The kernels stand in `device.py`. Importing this file imports Triton; only the caller that has chosen it
# MERGED: does so.
# MERGED: What of a launch is the same in every pass is checked and put together once, as `Launch`, and kept by the
# MERGED: `Factors` that
# MERGED: it is of: below a few thousand tokens it is the host that sets the speed of a pass.
# MERGED: Shape letters: T rows of the stream, D features, K features written, C columns of S, G segments.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton

from peft_mux.kernels.lora.device import expand_kernel, reduce_kernel, shrink_kernel, wgrad_kernel
from peft_mux.kernels.lora.tables import (
    MAX_JOINT_RANK,
    NARROW_RANK,
    WIDE_BLOCK,
    RankTable,
    SegmentTables,
    Tiles,
    copy_to_device,
    gpu_model,
    signed_seed,
    tiles,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What activations and factors may be held in; sums are fp32 in any case."""


class Factors:
    """Where one factor (A, B transposed, or the gradient of either) of each segment lies on the device.

    Owners keep their adapters in memory of their own; a launch is handed one tensor and, for each segment, how far from
    its beginning the segment's factor lies, in elements.

    Attributes:
        base: tensor from whose beginning distances are counted.
        offset_G: int64, distance of each segment's factor from it in elements; multiples of 8 where `width` is one.
        width: number of columns of every factor.
        num_segments: number of segments, G.
        launches: launches of these factors by what they were made for; those who launch keep them here.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor | None],
        width: int,
        *,
        num_segments: int | None = None,
        base: torch.Tensor | None = None,
    ) -> None:
        """Check the factors, and note how far each one lies from the base.

        Args:
            parts: factor of each segment, contiguous `[R, width]`; `None` for a segment without an adapter here.
            width: number of columns of all factors.
            num_segments: number of segments that the table is made for; as many as `parts` by default.
            base: tensor from whose beginning distances are counted; the first factor by default.

        Raises:
            ValueError: if there is no factor and no base, or one differs in width, dtype or device, or does not begin
                on 16 bytes.
        """
        base = next((part for part in parts if part is not None), None) if base is None else base
        if base is None:
            raise ValueError("factors: got none; allowed: at least one segment with an adapter.")
        self.base, self.width = base, width
        size = self.base.element_size()
        # Signed and wide: owners' buffers lie anywhere, before the base as well as behind it.
        offsets = np.zeros(len(parts) if num_segments is None else num_segments, dtype=np.int64)
        for index, part in enumerate(parts):
            if part is not None:
                _check_factor(part, self.base, width)
                offsets[index] = (part.data_ptr() - self.base.data_ptr()) // size
        self.offset_G = torch.empty(len(offsets), dtype=torch.int64, device=self.base.device)
        copy_to_device(offsets, self.offset_G)
        self.num_segments = len(offsets)
        self.launches: dict[tuple[Any, ...], Any] = {}

    @classmethod
    def of_slab(
        cls, slab_RD: torch.Tensor, first_rows: Sequence[int], ranks: Sequence[int], *, num_segments: int | None = None
    ) -> Factors:
        """Return factors that lie below each other in one tensor.

        Args:
            slab_RD: the tensor that holds all factors, contiguous `[rows, D]`.
            first_rows: row of the slab in which each segment's factor begins.
            ranks: number of rows of each factor, 0 for a segment without an adapter here.
            num_segments: number of segments that the table is made for; as many as `ranks` by default.

        Raises:
            ValueError: if a factor reaches out of the slab.
        """
        ends = [row + rank for row, rank in zip(first_rows, ranks, strict=True)]
        if max(ends, default=0) > len(slab_RD) or min(first_rows, default=0) < 0:
            raise ValueError(f"factors end at rows {ends}; allowed: 0 to {len(slab_RD)}, the rows of the slab.")
        parts = [slab_RD[row:end] if end > row else None for row, end in zip(first_rows, ends, strict=True)]
        return cls(parts, slab_RD.shape[1], num_segments=num_segments, base=slab_RD)


def _check_factor(part: torch.Tensor, base: torch.Tensor, width: int) -> None:
    if part.dim() != 2 or part.shape[1] != width or not part.is_contiguous():
        raise ValueError(f"factor of shape {tuple(part.shape)}; allowed: contiguous with {width} columns.")
    if part.dtype != base.dtype or part.device != base.device:
        raise ValueError(f"factor in {part.dtype} on {part.device}; allowed: {base.dtype} on {base.device}, as others.")
    # Rows of other widths begin anywhere, so that loads of whole words are out of the question for them.
    if width % 8 == 0 and part.data_ptr() % 16:
        raise ValueError("a factor does not begin on 16 bytes; allowed: memory that loads of whole words can read.")


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


_WORD_BYTES = 16  # code for tensors that begin on such moves whole words


class Launch:
    """A kernel with all of its arguments that are the same in every pass.

    Triton would bind the arguments anew in each launch, to find the code that was compiled for such ones; that takes
    the host several times as long as the launch. All that decides it is fixed here, but where tensors begin: the code
    for tensors that begin on 16 bytes is kept from the first launch, and any other launch goes through Triton's binder.

    Args:
        kernel: the Triton kernel that is launched.
        tile: how it is launched.
        fixed: the arguments between those of a call and the constants.
        constants: the kernel's constants, in its own order, which ends with them.
    """

    __slots__ = ("_compiled", "_fixed", "_grid", "_kernel", "_options", "_runner")

    def __init__(self, kernel: Any, tile: Tiles, *fixed: object, **constants: object) -> None:
        """Remember all of them; nothing is compiled yet."""
        assert tuple(kernel.arg_names[-len(constants) :]) == tuple(constants), "constants are in the kernel's order"
        self._kernel, self._fixed = kernel, (*fixed, *constants.values())
        self._options = {"num_warps": tile.warps, "num_stages": tile.stages}
        self._compiled: Any = None
        # Of the last grid: Triton makes a function for each launch, and passes of one size follow each other.
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
            moving: the kernel's first arguments, tensors that lie elsewhere in each pass.
            tables: the arguments after them, tables of the pass, which begin on 16 bytes.
            is_aligned: whether the caller knows that `moving` begin on 16 bytes, but for those that never move.
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


_REDUCE_RANKS = 16  # rows of a block of the reduction
_MAX_LAYOUTS = 64  # of one factor; a model has one or two

# Tests run the kernels on CPUs in Triton's interpreter, whose products of 16-bit blocks are wrong.
_INTERPRETED = not isinstance(shrink_kernel, triton.JITFunction)


def shrink(
    x_TD: torch.Tensor,
    w: Factors,
    s_TC: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    places: torch.Tensor | None = None,
    module_seed: int = 0,
    layout: int | None = None,
) -> None:
    """Write `S[m] = scale? * drop?(x[m]) @ W_g^T`, for (x, A) and for (dy, B transposed).

    A segment of rank r writes the columns of S from its `s_column`, r rounded up to a multiple of 8; those past r
    become 0. All other columns stay as they are.

    Args:
        x_TD: `[T, D]` activations or gradients, any row stride.
        w: the segments' factors `[r, D]`.
        s_TC: the output S `[T, C]`, with at least `ranks.num_columns` columns.
        tables: which rows of the stream belong to which segment.
        ranks: the segments' adapters in this module.
        scaled: whether to multiply by each segment's scale.
        places: int64 `[T]`, place of each row in its task's global batch, to drop elements of x where the table has
            dropout; `None` for no dropout.
        module_seed: the module's half of the key, `philox.hash_seed(module_name)`.
        layout: stands for all that decides on the launches beside `w`, where the caller knows it to be as before, and
            all tensors to begin on 16 bytes, their columns adjacent.

    Raises:
        ValueError: if a shape, a dtype or a layout is not as above.
    """
    launches = None if layout is None else w.launches.get((_shrink_launches, layout))
    if launches is None:
        x_TD = _adjacent_columns(x_TD)
        choices = ranks, scaled, ranks.has_dropout and places is not None, module_seed, tables.block_rows
        launches = _prepared(_shrink_launches, choices, w, x_TD, s_TC, tables, places, layout)
    # Without draws the argument is not read, but some tensor has to stand there.
    moving = x_TD, s_TC, tables.step_seed_G if places is None else places
    num_tiles = tables.num_tiles
    for blocks, launch in launches if num_tiles else ():
        launch((num_tiles, blocks, 1), moving, tables.of_tiles, is_aligned=layout is not None)


def _shrink_launches(choices: tuple[Any, ...], w: Factors, x_TD: torch.Tensor, s_TC: torch.Tensor) -> list[_Blocks]:
    ranks, scaled, drop, module_seed, block_rows = choices
    launches = []
    for lowest, highest, block_ranks in _rank_classes(ranks):
        tile = _tiles("shrink", x_TD, block_ranks)
        launch = Launch(
            shrink_kernel,
            tile,
            *(w.base, w.offset_G, *_adapter_arguments(ranks)),
            *(x_TD.stride(0), s_TC.stride(0), lowest, highest, signed_seed(module_seed), int(scaled)),
            D=x_TD.shape[1],
            BLOCK_M=block_rows,
            BLOCK_D=tile.columns,
            BLOCK_R=block_ranks,
            DROP=drop,
            UPCAST=_INTERPRETED,
        )
        launches.append((_cdiv(min(highest, ranks.max_rank), block_ranks), launch))
    return launches


def expand(
    s_TC: torch.Tensor,
    w: Factors,
    y_TK: torch.Tensor,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    bias: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    module_seed: int = 0,
    add: bool = False,
    layout: int | None = None,
) -> None:
    """Write `y[m] = scale? * drop?(S[m] @ W_g) + bias`, for (S, B transposed) and for (dS, A).

    All rows of all segments are written and none is read: a segment without an adapter gets the bias, or zeros. The
    base product is then added on top (`torch.addmm(y, x, W.t(), out=y)`). With `add` the result is added to what is
    there, and segments without an adapter are left alone.

    Args:
        s_TC: the S `[T, C]` that `shrink` has written.
        w: the segments' factors `[r, K]`.
        y_TK: the output `[T, K]`, any row stride.
        tables: which rows of the stream belong to which segment.
        ranks: the segments' adapters in this module.
        scaled: whether to multiply by each segment's scale.
        bias: the frozen layer's bias `[K]`; `None` for none.
        places: int64 `[T]`, place of each row in its task's global batch, to drop elements of the result (that is dx)
            where the table has dropout; `None` for no dropout.
        module_seed: the module's half of the key, `philox.hash_seed(module_name)`.
        add: whether to add to what `y_TK` holds, instead of writing it.
        layout: stands for all that decides on the launches beside `w`, where the caller knows it to be as before, and
            all tensors to begin on 16 bytes, their columns adjacent.

    Raises:
        ValueError: if a shape, a dtype or a layout is not as above, or a bias is of another dtype, or would be dropped
            from.
    """
    launches = None if layout is None else w.launches.get((_expand_launches, layout))
    if launches is None:
        drop = ranks.has_dropout and places is not None
        choices = ranks, scaled, drop, module_seed, tables.block_rows, bias is not None, add
        launches = _prepared(_expand_launches, choices, w, y_TK, s_TC, tables, places, layout)
        if bias is not None:
            check_bias(bias, y_TK, drops=drop)
    moving = s_TC, y_TK, w.base if bias is None else bias, tables.step_seed_G if places is None else places
    num_tiles = tables.num_tiles
    for blocks, launch in launches if num_tiles else ():
        launch((num_tiles, blocks, 1), moving, tables.of_tiles, is_aligned=layout is not None)


def _expand_launches(choices: tuple[Any, ...], w: Factors, y_TK: torch.Tensor, s_TC: torch.Tensor) -> list[_Blocks]:
    ranks, scaled, drop, module_seed, block_rows, has_bias, add = choices
    width = y_TK.shape[1]
    if y_TK.stride(1) != 1 and width > 1:
        raise ValueError("columns of y are not adjacent; a copy would get the result in its place.")
    launches = []
    # Without `add` every row has to be written, those of tasks without an adapter here too.
    for lowest, highest, block_ranks in _rank_classes(ranks, with_zero=not add):
        tile = _tiles("expand", y_TK, block_ranks)
        launch = Launch(
            expand_kernel,
            tile,
            *(w.base, w.offset_G, *_adapter_arguments(ranks)),
            *(s_TC.stride(0), y_TK.stride(0), lowest, highest, signed_seed(module_seed), int(scaled)),
            K=width,
            BLOCK_M=block_rows,
            BLOCK_K=tile.columns,
            BLOCK_R=block_ranks,
            DROP=drop,
            HAS_BIAS=has_bias,
            ADD=add,
            UPCAST=_INTERPRETED,
        )
        launches.append((_cdiv(width, tile.columns), launch))
    return launches


def wgrad(
    s_TC: torch.Tensor,
    x_TD: torch.Tensor,
    grad: Factors,
    tables: SegmentTables,
    ranks: RankTable,
    *,
    scaled: bool,
    places: torch.Tensor | None = None,
    module_seed: int = 0,
    accumulate: bool = False,
    layout: int | None = None,
) -> None:
    """Write `dW_g = scale? * sum_m S[m]^T drop?(x[m])`, for (dS, x) and for (S, dy).

    Each chunk of a segment is summed by itself, and the chunks are added in order: no atomics, and the same bits
    every time. Only the rows of segments with an adapter are touched; those of an empty segment become 0, or stay as
    they are where gradients accumulate.

    Args:
        s_TC: the S `[T, C]` that `shrink` has written.
        x_TD: `[T, D]` activations or gradients, any row stride.
        grad: where each segment's gradient lies, fp32 `[r, D]`.
        tables: which rows of the stream belong to which segment.
        ranks: the segments' adapters in this module; no two share a gradient.
        scaled: whether to multiply by each segment's scale.
        places: int64 `[T]`, place of each row in its task's global batch, to drop elements of x where the table has
            dropout; `None` for no dropout.
        module_seed: the module's half of the key, `philox.hash_seed(module_name)`.
        accumulate: whether to add to what `grad` holds, instead of writing it.
        layout: stands for all that decides on the launches beside `w`, where the caller knows it to be as before, and
            all tensors to begin on 16 bytes, their columns adjacent.

    Raises:
        ValueError: if a shape, a dtype or a layout is not as above.
    """
    launches = None if layout is None else grad.launches.get((_wgrad_launches, layout))
    if launches is None:
        x_TD = _adjacent_columns(x_TD)
        drop = ranks.has_dropout and places is not None
        choices = ranks, scaled, drop, module_seed, tables.block_rows, tables.chunk_rows, accumulate
        launches = _prepared(_wgrad_launches, choices, grad, x_TD, s_TC, tables, places, layout)
    if ranks.max_rank == 0 or tables.num_segments == 0:
        return
    num_chunks, parts = tables.num_chunks, grad.base
    if tables.has_parts:
        # fp32 whatever the factors are held in: the parts of many chunks are still to be added.
        parts = s_TC.new_empty((num_chunks, ranks.max_rank, x_TD.shape[1]), dtype=torch.float32)
    moving = s_TC, x_TD, parts, tables.step_seed_G if places is None else places
    *of_chunks, (grid, reduction) = launches
    for blocks, launch in of_chunks if num_chunks else ():
        launch((num_chunks, *blocks), moving, tables.of_chunks, is_aligned=layout is not None)
    # Without any part too: an empty segment's gradient has to be written, unless it accumulates.
    if tables.has_parts or not accumulate:
        reduction((tables.num_segments, *grid), (parts,), (tables.chunk_begin,))


def _wgrad_launches(choices: tuple[Any, ...], grad: Factors, x_TD: torch.Tensor, s_TC: torch.Tensor) -> list[_Blocks]:
    """Return the launches over chunks, and last that of their reduction."""
    ranks, scaled, drop, module_seed, block_rows, chunk_rows, accumulate = choices
    width = x_TD.shape[1]
    launches: list[_Blocks] = []
    for lowest, highest, block_ranks in _rank_classes(ranks):
        tile = _tiles("wgrad", x_TD, block_ranks)
        launch = Launch(
            wgrad_kernel,
            tile,
            *(grad.base, grad.offset_G, *_adapter_arguments(ranks)),
            *(s_TC.stride(0), x_TD.stride(0), ranks.max_rank, lowest, highest, signed_seed(module_seed), int(scaled)),
            D=width,
            CHUNK=chunk_rows,
            BLOCK_M=block_rows,
            BLOCK_D=tile.columns,
            BLOCK_R=block_ranks,
            DROP=drop,
            ACCUMULATE=accumulate,
            UPCAST=_INTERPRETED,
        )
        launches.append(((_cdiv(width, tile.columns), _cdiv(min(highest, ranks.max_rank), block_ranks)), launch))
    tile = tiles("reduce", gpu_model(x_TD.device), width, _REDUCE_RANKS, grad.base.element_size())
    launch = Launch(
        reduce_kernel,
        tile,
        *(grad.base, grad.offset_G, ranks.rank_G, ranks.max_rank),
        D=width,
        BLOCK_R=_REDUCE_RANKS,
        BLOCK_D=tile.columns,
        ACCUMULATE=accumulate,
    )
    return [*launches, ((_cdiv(width, tile.columns), _cdiv(ranks.max_rank, _REDUCE_RANKS)), launch)]


_Blocks = tuple[Any, Launch]
"""The rest of a launch's grid, and the launch."""


def _prepared(
    prepare: Callable[[tuple[Any, ...], Factors, torch.Tensor, torch.Tensor], list[_Blocks]],
    choices: tuple[Any, ...],
    w: Factors,
    x_TD: torch.Tensor,
    s_TC: torch.Tensor,
    tables: SegmentTables,
    places: torch.Tensor | None,
    layout: int | None,
) -> list[_Blocks]:
    """Return the launches that `prepare` makes, checked and made once for all tensors of one layout.

    Only the number of rows is checked every time.

    Args:
        prepare: makes the launches of a kernel.
        choices: what it makes them of; the table of ranks comes first.
        w: the segments' factors or gradients.
        x_TD: `[T, D]` activations, T rows of the stream.
        s_TC: S `[T, C]`, in the dtype of the activations.
        tables: which rows of the stream belong to which segment.
        places: int64 `[T]`, or `None`.
        layout: stands for tensors and choices that were checked before; `None` where the caller keeps no count.
    """
    num_rows, width = x_TD.shape
    num_s_rows, num_columns = s_TC.shape
    strides = x_TD.stride(), s_TC.stride()
    key = prepare, choices, x_TD.dtype, width, s_TC.dtype, num_columns, strides, tables.num_segments
    launches = w.launches.get(key)
    if launches is None:
        check_layout(x_TD, w, s_TC, choices[0], tables, is_gradient=prepare is _wgrad_launches)
    if num_s_rows != num_rows or tables.num_rows > num_rows or places is not None:
        check_rows(x_TD, s_TC, tables, places)
    if launches is None:
        if len(w.launches) >= _MAX_LAYOUTS:
            w.launches.clear()
        launches = w.launches[key] = prepare(choices, w, x_TD, s_TC)
    if layout is not None:
        w.launches[prepare, layout] = launches
    return launches


def _adapter_arguments(ranks: RankTable) -> tuple[torch.Tensor, ...]:
    """Return the table's columns in the order in which all kernels take them."""
    return ranks.s_column_G, ranks.rank_G, ranks.scale_G, ranks.keep_scale_G, ranks.threshold_G


def _cdiv(value: int, size: int) -> int:
    return -(-value // size)


def _rank_classes(ranks: RankTable, *, with_zero: bool = False) -> list[tuple[int, int, int]]:
    """Return the launches that ranks need: lowest and highest rank, and ranks of a block.

    One kernel for both block sizes would need so many registers that it spills; and one block size for all would let
    neighbours decide how a small rank is summed.
    """
    classes = []
    if ranks.has_narrow:
        classes.append((1, NARROW_RANK, NARROW_RANK))
    if ranks.has_wide:
        classes.append((NARROW_RANK + 1, MAX_JOINT_RANK, WIDE_BLOCK))
    if with_zero:
        # Segments without an adapter, whose rows must be written too, go with the first launch.
        _, highest, block = classes[0] if classes else (0, 0, NARROW_RANK)
        classes[:1] = [(0, highest, block)]
    return classes


def _tiles(kernel: str, activation: torch.Tensor, block_ranks: int) -> Tiles:
    name = gpu_model(activation.device)
    return tiles(kernel, name, activation.shape[1], block_ranks, activation.element_size())


def _adjacent_columns(x_TD: torch.Tensor) -> torch.Tensor:
    """Return x, copied only where its columns are not adjacent."""
    return x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
