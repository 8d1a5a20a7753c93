"""Tile choices of the grouped LoRA kernels, as a plain table.

Nothing is tuned at run time: that would synchronise, break graph capture, and let two runs differ. What decides the
order of sums follows from the device, the width of the layer and the task's own rank, never from the ranks of others:
ranks up to 16 and greater ones are launched apart, each with its own block size and its own depth of pipelining.

The choices were made from compiled code (registers, shared memory, instructions) and byte counts, not from timings.
"""

# MERGED: What grouped LoRA kernels have to know about a packed stream, as small arrays on the device.
# MERGED: `SegmentTables` describes one step and is shared by all launches of it: which rows belong to which segment,
# MERGED: cut into
# MERGED: tiles and into chunks that never cross a segment. `RankTable` describes one module: each segment's rank,
# MERGED: scale and
# MERGED: dropout. `Factors` says where one factor of each segment lies, wherever its owner keeps it. All are built on
# MERGED: the host in
# MERGED: one numpy buffer and moved in one copy. With fixed sizes the device buffers keep their addresses and shapes
# MERGED: whatever the
# MERGED: mix, so that a captured CUDA graph serves every step of the same budget.
# MERGED: Segments are contiguous and in order: the first one begins at row 0, each next one where the last one ended,
# MERGED: and any
# MERGED: may be empty. Rows behind the last segment belong to nobody and are not written by any kernel; a stream that
# MERGED: is padded
# MERGED: gives its padding a segment of its own, of rank 0.
# MERGED: Shape letters: G segments, NT tiles, NC chunks; S is `x A^T` of all segments.

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from peft_mux.kernels import philox

NARROW_RANK = 16
"""Ranks up to this are worked on in one block of 16, the smallest a tensor core takes."""

WIDE_BLOCK = 64
"""Greater ranks are worked on in blocks of this many."""


class Tiles(NamedTuple):
    """How one kernel is launched.

    Attributes:
        columns: columns of the activation that are worked on at a time.
        warps: number of warps of a program.
        stages: number of loads in flight in a loop.
    """

    columns: int
    warps: int
    stages: int


class KernelTiles(NamedTuple):
    """Columns and warps of one kernel, and its pipeline depth for small and for greater ranks.

    Attributes:
        columns: columns of the activation that are worked on at a time, for 16-bit elements.
        warps: number of warps of a program.
        narrow_stages: loads in flight, for ranks up to 16.
        wide_stages: loads in flight, for greater ranks; blocks are larger, so fewer fit into shared memory.
    """

    columns: int
    warps: int
    narrow_stages: int
    wide_stages: int


# At most 48 KiB of shared memory in 16 bits: fits every GPU that has bf16.
_DEFAULT = {
    "shrink": KernelTiles(columns=64, warps=4, narrow_stages=3, wide_stages=2),
    "expand": KernelTiles(columns=128, warps=4, narrow_stages=2, wide_stages=2),
    "wgrad": KernelTiles(columns=128, warps=4, narrow_stages=2, wide_stages=2),
    "reduce": KernelTiles(columns=256, warps=4, narrow_stages=2, wide_stages=2),
}

_HOPPER = {
    "shrink": KernelTiles(columns=128, warps=4, narrow_stages=4, wide_stages=3),
    "expand": KernelTiles(columns=128, warps=4, narrow_stages=2, wide_stages=2),
    "wgrad": KernelTiles(columns=128, warps=4, narrow_stages=4, wide_stages=3),
    "reduce": KernelTiles(columns=256, warps=4, narrow_stages=2, wide_stages=2),
}

_ANY_WIDTH = 0

_TABLE: dict[tuple[str, int], dict[str, KernelTiles]] = {
    (name, _ANY_WIDTH): _HOPPER for name in ("H100", "H200", "H20", "GH200")
}
"""By model of the device and width of the activation."""


def tiles(kernel: str, device_name: str, width: int, block_ranks: int, element_size: int) -> Tiles:
    """Return how to launch a kernel.

    Args:
        kernel: "shrink", "expand", "wgrad" or "reduce".
        device_name: model of the GPU, as the function `gpu_model` returns it.
        width: number of columns of the activation.
        block_ranks: number of ranks of a block, 16 or 64.
        element_size: bytes of an element; 4-byte ones get half as many columns in the same shared memory, and
                with great ranks more warps.
    """
    by_kernel = _TABLE.get((device_name, width)) or _TABLE.get((device_name, _ANY_WIDTH)) or _DEFAULT
    choice = by_kernel[kernel]
    # The reduction keeps its blocks in registers, so shared memory does not bound its columns.
    columns = choice.columns if element_size <= 2 or kernel == "reduce" else choice.columns // 2
    if block_ranks <= NARROW_RANK:
        return Tiles(columns, choice.warps, choice.narrow_stages)
    if element_size <= 2:
        return Tiles(columns, choice.warps, choice.wide_stages)
    # Products in fp32 use no tensor cores, so a thread holds more of them: with 4 warps an A100 has to spill, and in
    # wgrad with two loads in flight still.
    return Tiles(columns, 2 * choice.warps, choice.wide_stages - (kernel == "wgrad"))


def gpu_model(device: torch.device) -> str:
    """Return the model of a GPU, "H200" for "NVIDIA H200"; "" for any device but a GPU."""
    if device.type != "cuda":
        return ""
    return _cuda_device_name(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_device_name(index: int) -> str:
    words = torch.cuda.get_device_name(index).split()
    return next((word for word in words if word in {name for name, _ in _TABLE}), " ".join(words))


BLOCK_ROWS = 64
"""Rows of a tile: what one program of shrink and expand works on."""

CHUNK_ROWS = 512
"""Rows of a chunk: what one program of wgrad sums up before the chunks are added in order."""

MAX_RANK = 256
"""The largest rank of one adapter."""

MAX_JOINT_RANK = 1024
"""The largest sum of ranks of adapters that are worked on as one, as they read the same activations."""

_UNUSED = -1
_WORD_ALIGNMENT = 4  # int32 words in 16 bytes: else Triton would compile anew for each alignment that occurs


class SegmentTables:
    """Rows of all segments of one step, on the device.

    Attributes:
        step_seed_G: int64, the half of the dropout key that belongs to a task and its step.
        seg_start_G: int32, first row of each segment.
        seg_end_G: int32, one past the last row of each segment.
        tile_segment: int32 `[NT]`, the segment of each tile; -1 where the tile is unused.
        tile_row: int32 `[NT]`, first row of each tile.
        chunk_segment: int32 `[NC]`, the segment of each chunk; -1 where the chunk is unused.
        chunk_row: int32 `[NC]`, first row of each chunk; chunks are aligned to the start of their own segment.
        chunk_begin: int32 `[G + 1]`, first chunk of each segment.
        block_rows: number of rows of a tile.
        chunk_rows: number of rows of a chunk.
        num_segments: number of segments, G, with unused ones where the size is fixed.
        num_rows: number of rows that belong to a segment.
        num_tiles: NT, the programs of a launch over rows.
        num_chunks: NC, the programs of a launch over chunks.
        of_tiles: the tables that launches over rows take, in the order in which they take them.
        of_chunks: those that launches over chunks take.
        has_parts: whether some segment has several chunks, whose parts of a gradient are added up by a further launch.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        step_seeds: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        block_rows: int = BLOCK_ROWS,
        chunk_rows: int = CHUNK_ROWS,
        max_tokens: int | None = None,
        max_segments: int | None = None,
    ) -> None:
        """Build the tables of a first step.

        Args:
            lengths: number of rows of each segment, in the order of the stream.
            step_seeds: 64 bits per segment, from `philox.hash_seed(task_seed, step)`.
            device: the device on which the kernels run.
            block_rows: number of rows of a tile, a power of two of at least 16.
            chunk_rows: number of rows of a chunk, a multiple of `block_rows`.
            max_tokens: number of rows of the largest step, for tables that `update` can rewrite in place.
            max_segments: number of segments of the largest step; given together with `max_tokens`.

        Raises:
            ValueError: if a length is negative, the sizes are not as above, or the step exceeds the maxima.
        """
        _check_blocks(block_rows, chunk_rows)
        if (max_tokens is None) != (max_segments is None):
            raise ValueError("max_tokens and max_segments: give both or neither.")
        self.block_rows, self.chunk_rows = block_rows, chunk_rows
        self.max_tokens = sum(lengths) if max_tokens is None else max_tokens
        self.num_segments = len(lengths) if max_segments is None else max_segments
        if max_tokens is None:
            num_tiles = sum(-(-length // block_rows) for length in lengths)
            num_chunks = sum(-(-length // chunk_rows) for length in lengths)
        else:
            # The most that any mix can need: every segment may leave its last tile, and its last chunk, part empty.
            num_tiles = -(-max_tokens // block_rows) + self.num_segments
            num_chunks = -(-max_tokens // chunk_rows) + self.num_segments
        count = self.num_segments
        self._slots = _slots((2 * count, count, count, num_tiles, num_tiles, num_chunks, num_chunks, count + 1))
        # One buffer, one copy: a step is described to the device by a single transfer.
        host = self._packed(lengths, step_seeds)
        self._buffer = torch.empty(len(host), dtype=torch.int32, device=device)
        copy_to_device(host, self._buffer)
        parts = [self._buffer[slot] for slot in self._slots]
        self.step_seed_G = parts[0].view(torch.int64)
        self.seg_start_G, self.seg_end_G, self.tile_segment, self.tile_row = parts[1:5]
        self.chunk_segment, self.chunk_row, self.chunk_begin = parts[5:]
        self.num_tiles, self.num_chunks = num_tiles, num_chunks
        self.of_tiles = self.tile_segment, self.tile_row, self.seg_end_G, self.step_seed_G
        self.of_chunks = self.chunk_segment, self.chunk_row, self.chunk_begin, self.seg_end_G, self.step_seed_G
        # Launches of a fixed size may meet any lengths later.
        self.has_parts = max_tokens is not None or max((0, *lengths)) > chunk_rows

    def update(self, lengths: Sequence[int], step_seeds: Sequence[int]) -> None:
        """Rewrite the tables for another step, in the same memory.

        Args:
            lengths: number of rows of each segment, in the order of the stream.
            step_seeds: 64 bits per segment, from `philox.hash_seed(task_seed, step)`.

        Raises:
            ValueError: if the step exceeds what the tables were made for.
        """
        copy_to_device(self._packed(lengths, step_seeds), self._buffer)

    def _packed(self, lengths: Sequence[int], step_seeds: Sequence[int]) -> np.ndarray:
        """Return one int32 buffer with all tables of a step."""
        lengths_G = np.zeros(self.num_segments, dtype=np.int64)
        if len(lengths) != len(step_seeds):
            raise ValueError(f"{len(lengths)} lengths but {len(step_seeds)} seeds; one seed per segment.")
        if len(lengths) > self.num_segments:
            raise ValueError(f"{len(lengths)} segments; the tables hold {self.num_segments}.")
        lengths_G[: len(lengths)] = lengths
        if (lengths_G < 0).any():
            raise ValueError(f"lengths are {list(lengths)}; allowed: 0 or more.")
        num_rows = int(lengths_G.sum())
        if num_rows > self.max_tokens:
            raise ValueError(f"{num_rows} rows; the tables hold {self.max_tokens}.")
        end_G = np.cumsum(lengths_G)
        start_G = end_G - lengths_G
        # Tiles and chunks that are not written below stay marked as unused, and their programs end at once.
        buffer = np.full(self._slots[-1].stop, _UNUSED, dtype=np.int32)
        parts = [buffer[slot] for slot in self._slots]
        parts[0][:] = 0
        parts[0].view(np.int64)[: len(step_seeds)] = [signed_seed(seed) for seed in step_seeds]
        parts[1][:], parts[2][:] = start_G, end_G
        _cut_into_pieces(start_G, lengths_G, self.block_rows, parts[3], parts[4])
        # The reduction goes through a segment's chunks from one number to the next, and so in order.
        parts[7][1:] = _cut_into_pieces(start_G, lengths_G, self.chunk_rows, parts[5], parts[6])
        parts[7][0] = 0
        self.num_rows = num_rows
        return buffer


class RankTable:
    """Adapters of all segments in one module, on the device.

    Attributes:
        s_column_G: int32, first column of each segment in S.
        rank_G: int32, rank of each segment's adapter; 0 where it has none in this module.
        scale_G: fp32, what each adapter's output is multiplied by.
        threshold_G: int32, how many of 65,536 draws drop an element; see `philox.drop_threshold`.
        keep_scale_G: fp32, what kept elements are multiplied by; see `philox.keep_scale`.
        max_rank: the largest rank that launches are made for.
        has_narrow: whether there may be ranks up to `NARROW_RANK`.
        has_wide: whether there may be greater ones; each of the two kinds takes a launch of its own.
        has_dropout: whether launches draw masks.
        num_columns: number of columns of S that are needed.
        num_segments: number of segments, G.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        scales: Sequence[float],
        *,
        s_columns: Sequence[int] | None = None,
        dropouts: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
        max_segments: int | None = None,
        max_rank: int | None = None,
        has_dropout: bool | None = None,
    ) -> None:
        """Build the table of a first step.

        Args:
            ranks: rank of each segment's adapter, 0 for no adapter here.
            scales: scale of each segment's adapter, alpha / rank or alpha / sqrt(rank).
            s_columns: first column of each segment in S, a multiple of 8; zeros by default, as segments have their own
                rows of S anyway.
            dropouts: dropout probability of each segment's adapter; zeros by default.
            device: the device on which the kernels run.
            max_segments: number of segments of the `SegmentTables` used beside it, for a table that `update` rewrites
                in place; `None` for as many as `ranks`.
            max_rank: largest rank that a captured launch serves; the largest of `ranks` by default.
            has_dropout: whether a captured launch draws masks; by default whether any of `dropouts` is above 0.

        Raises:
            ValueError: if a rank is not in 0..1024, a column is not as above, lengths differ, or a fixed size is
                exceeded.
        """
        is_fixed = max_segments is not None or max_rank is not None
        self.num_segments = len(ranks) if max_segments is None else max_segments
        self.max_rank = max((0, *ranks)) if max_rank is None else max_rank
        if not 0 <= self.max_rank <= MAX_JOINT_RANK:
            raise ValueError(f"the largest rank is {self.max_rank}; allowed: 0 to {MAX_JOINT_RANK}.")
        # Captured launches cannot be added later: those of fixed size are made for every rank that may come.
        self.has_narrow = is_fixed or any(0 < rank <= NARROW_RANK for rank in ranks)
        self.has_wide = self.max_rank > NARROW_RANK
        self.has_dropout = _any_drops(dropouts or ()) if has_dropout is None else has_dropout
        self.num_columns = max(_columns(ranks, s_columns), _round_up(self.max_rank, 8) if is_fixed else 0)
        self._slots = _slots((self.num_segments,) * 5)
        host = self._packed(ranks, scales, s_columns, dropouts)
        self._buffer = torch.empty(len(host), dtype=torch.int32, device=device)
        copy_to_device(host, self._buffer)
        parts = [self._buffer[slot] for slot in self._slots]
        self.s_column_G, self.rank_G, self.threshold_G = parts[:3]
        self.scale_G, self.keep_scale_G = parts[3].view(torch.float32), parts[4].view(torch.float32)

    def update(
        self,
        ranks: Sequence[int],
        scales: Sequence[float],
        *,
        s_columns: Sequence[int] | None = None,
        dropouts: Sequence[float] | None = None,
    ) -> None:
        """Rewrite the table for other segments, in the same memory.

        Args:
            ranks: rank of each segment's adapter, 0 for no adapter here.
            scales: scale of each segment's adapter.
            s_columns: first column of each segment in S, a multiple of 8; zeros by default.
            dropouts: dropout probability of each segment's adapter; zeros by default.

        Raises:
            ValueError: for what `__init__` refuses, and if a rank or a probability exceeds what launches were made for.
        """
        copy_to_device(self._packed(ranks, scales, s_columns, dropouts), self._buffer)

    def _packed(
        self,
        ranks: Sequence[int],
        scales: Sequence[float],
        s_columns: Sequence[int] | None,
        dropouts: Sequence[float] | None,
    ) -> np.ndarray:
        """Return one int32 buffer with all columns of the table."""
        count = len(ranks)
        # Column 0 for all: segments share no row of S, so they may share its columns.
        s_columns = [0] * count if s_columns is None else s_columns
        dropouts = [0.0] * count if dropouts is None else dropouts
        columns = (s_columns, ranks, [philox.drop_threshold(p) for p in dropouts], scales)
        if any(len(column) != count for column in columns):
            raise ValueError(f"columns have {[len(column) for column in columns]} entries; allowed: as many as ranks.")
        if any(column < 0 or column % 8 for column in s_columns):
            raise ValueError(f"first columns are {list(s_columns)}; allowed: 0 or more, in multiples of 8.")
        self._check_fixed(ranks, s_columns, dropouts)
        buffer = np.zeros(self._slots[-1].stop, dtype=np.int32)
        for slot, column in zip(self._slots[:3], columns[:3], strict=True):
            buffer[slot][:count] = column
        buffer[self._slots[3]].view(np.float32)[:count] = scales
        buffer[self._slots[4]].view(np.float32)[:count] = [philox.keep_scale(p) for p in dropouts]
        return buffer

    def _check_fixed(self, ranks: Sequence[int], s_columns: Sequence[int], dropouts: Sequence[float]) -> None:
        """Raise where launches as they were made for this table would leave something out."""
        if len(ranks) > self.num_segments:
            raise ValueError(f"{len(ranks)} segments; the table holds {self.num_segments}.")
        if any(not 0 <= rank <= self.max_rank for rank in ranks):
            raise ValueError(f"ranks are {list(ranks)}; allowed: 0 to {self.max_rank}.")
        if not self.has_narrow and any(0 < rank <= NARROW_RANK for rank in ranks):
            raise ValueError(
                f"ranks are {list(ranks)}; a table that is updated with small ones is built with max_rank."
            )
        if _columns(ranks, s_columns) > self.num_columns:
            raise ValueError(f"{_columns(ranks, s_columns)} columns of S; the table was made for {self.num_columns}.")
        if _any_drops(dropouts) and not self.has_dropout:
            raise ValueError("dropout above 0, but the launches of this table draw no masks.")


def _check_blocks(block_rows: int, chunk_rows: int) -> None:
    if block_rows < 16 or block_rows & (block_rows - 1):
        raise ValueError(f"block_rows is {block_rows}; allowed: a power of two of at least 16.")
    if chunk_rows < block_rows or chunk_rows % block_rows:
        raise ValueError(f"chunk_rows is {chunk_rows}; allowed: a multiple of block_rows, {block_rows}.")


def _slots(sizes: Sequence[int]) -> list[slice]:
    """Return where arrays of int32 words lie in one buffer, each on a boundary of 16 bytes."""
    slots, begin = [], 0
    for size in sizes:
        slots.append(slice(begin, begin + size))
        begin += _round_up(size, _WORD_ALIGNMENT)
    return slots


def _columns(ranks: Sequence[int], s_columns: Sequence[int] | None) -> int:
    """Return how many columns of S the segments take; each owns whole groups of eight."""
    s_columns = [0] * len(ranks) if s_columns is None else s_columns
    return max((0, *(column + _round_up(rank, 8) for column, rank in zip(s_columns, ranks, strict=False) if rank)))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _cut_into_pieces(
    start_G: np.ndarray, lengths_G: np.ndarray, size: int, segments_out: np.ndarray, rows_out: np.ndarray
) -> np.ndarray:
    """Write the pieces of `size` rows of all segments; return how many pieces end with each segment."""
    pieces_G = -(-lengths_G // size)
    last_G = np.cumsum(pieces_G)
    segments = np.repeat(np.arange(len(lengths_G)), pieces_G)
    within = np.arange(len(segments)) - (last_G - pieces_G)[segments]
    if len(segments) > len(segments_out):
        raise ValueError(f"{len(segments)} pieces of {size} rows; the tables hold {len(segments_out)}.")
    segments_out[: len(segments)] = segments
    rows_out[: len(segments)] = start_G[segments] + within * size
    return last_G


def signed_seed(seed: int) -> int:
    """Return the int64 with the same bits as 64 unsigned ones."""
    # torch has no arithmetic on uint64; what counts is the bits.
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def _any_drops(dropouts: Sequence[float]) -> bool:
    """Whether any probability is above 0 once it is rounded to 16 bits."""
    return any(philox.drop_threshold(probability) > 0 for probability in dropouts)


def copy_to_device(host: np.ndarray, buffer: torch.Tensor) -> None:
    """Start the copy to the device; pinned memory is handed back only once the copy is done."""
    source = torch.from_numpy(host)
    if buffer.device.type == "cuda":
        source = source.pin_memory()
    buffer.copy_(source, non_blocking=True)
