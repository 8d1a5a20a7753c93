"""What grouped LoRA kernels have to know about a packed stream, as small arrays on the device.

`SegmentTables` describes one step and is shared by all launches of it: which rows belong to which segment, cut into
tiles and into chunks that never cross a segment. `RankTable` describes one module: each segment's rank, scale and
dropout. `Factors` says where one factor of each segment lies, wherever its owner keeps it. All are built on the host in
one numpy buffer and moved in one copy. With fixed sizes the device buffers keep their addresses and shapes whatever the
mix, so that a captured CUDA graph serves every step of the same budget.

Segments are contiguous and in order: the first one begins at row 0, each next one where the last one ended, and any
may be empty. Rows behind the last segment belong to nobody and are not written by any kernel; a stream that is padded
gives its padding a segment of its own, of rank 0.

Shape letters: G segments, NT tiles, NC chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from peft_mux.kernels import philox, tunings

BLOCK_ROWS = 64
"""Rows of a tile: what one program of shrink and expand works on."""

CHUNK_ROWS = 512
"""Rows of a chunk: what one program of wgrad sums up before the chunks are added in order."""

MAX_RANK = 256
"""Of one adapter."""

MAX_JOINT_RANK = 1024
"""Of adapters that are worked on as one, as they read the same activations."""

_UNUSED = -1
_WORD_ALIGNMENT = 4  # int32 words in 16 bytes: else Triton would compile anew for each alignment that occurs


class SegmentTables:
    """Rows of all segments of one step, on the device.

    Attributes:
        step_seed_G: int64, the task-and-step half of the key of dropout.
        seg_start_G: int32, first row.
        seg_end_G: int32, one past the last row.
        tile_segment: int32 `[NT]`, -1 where unused.
        tile_row: int32 `[NT]`, first row of the tile.
        chunk_segment: int32 `[NC]`, -1 where unused.
        chunk_row: int32 `[NC]`, first row; chunks are aligned to the start of their own segment.
        chunk_begin: int32 `[G + 1]`, first chunk of each segment.
        block_rows: rows of a tile.
        chunk_rows: rows of a chunk.
        num_segments: G, with unused ones where the size is fixed.
        num_rows: rows that belong to a segment.
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
            lengths: rows of each segment, in the order of the stream.
            step_seeds: 64 bits per segment, from `philox.hash_seed(task_seed, step)`.
            device: where the kernels run.
            block_rows: rows of a tile, a power of two of at least 16.
            chunk_rows: rows of a chunk, a multiple of `block_rows`.
            max_tokens: rows of the largest step, for tables that `update` can rewrite in place.
            max_segments: segments of the largest step; given together with `max_tokens`.

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
            num_tiles = -(-max_tokens // block_rows) + self.num_segments
            num_chunks = -(-max_tokens // chunk_rows) + self.num_segments
        count = self.num_segments
        self._slots = _slots((2 * count, count, count, num_tiles, num_tiles, num_chunks, num_chunks, count + 1))
        host = self._pack(lengths, step_seeds)
        self._buffer = torch.empty(len(host), dtype=torch.int32, device=device)
        _copy(host, self._buffer)
        parts = [self._buffer[slot] for slot in self._slots]
        self.step_seed_G = parts[0].view(torch.int64)
        self.seg_start_G, self.seg_end_G, self.tile_segment, self.tile_row = parts[1:5]
        self.chunk_segment, self.chunk_row, self.chunk_begin = parts[5:]

    @property
    def num_tiles(self) -> int:
        """NT, the programs of a launch over rows."""
        return len(self.tile_segment)

    @property
    def num_chunks(self) -> int:
        """NC, the programs of a launch over chunks."""
        return len(self.chunk_segment)

    def update(self, lengths: Sequence[int], step_seeds: Sequence[int]) -> None:
        """Rewrite the tables for another step, in the same memory.

        Args:
            lengths: rows of each segment.
            step_seeds: 64 bits per segment.

        Raises:
            ValueError: if the step exceeds what the tables were made for.
        """
        _copy(self._pack(lengths, step_seeds), self._buffer)

    def _pack(self, lengths: Sequence[int], step_seeds: Sequence[int]) -> np.ndarray:
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
        buffer = np.full(self._slots[-1].stop, _UNUSED, dtype=np.int32)
        parts = [buffer[slot] for slot in self._slots]
        parts[0][:] = 0
        parts[0].view(np.int64)[: len(step_seeds)] = [signed_seed(seed) for seed in step_seeds]
        parts[1][:], parts[2][:] = start_G, end_G
        _cut(start_G, lengths_G, self.block_rows, parts[3], parts[4])
        parts[7][1:] = _cut(start_G, lengths_G, self.chunk_rows, parts[5], parts[6])
        parts[7][0] = 0
        self.num_rows = num_rows
        return buffer


class RankTable:
    """Adapters of all segments in one module, on the device.

    Attributes:
        s_column_G: int32, its first column in S.
        rank_G: int32, 0 where the segment has no adapter in this module.
        scale_G: fp32.
        threshold_G: int32, how many of 65,536 draws drop an element; see `philox.drop_threshold`.
        keep_scale_G: fp32, what kept elements are multiplied by; see `philox.keep_scale`.
        max_rank: the largest rank that launches are made for.
        has_narrow: whether there may be ranks up to `tunings.NARROW_RANK`.
        has_wide: whether there may be greater ones; each of the two kinds takes a launch of its own.
        has_dropout: whether launches draw masks.
        num_columns: how many columns of S are needed.
        num_segments: G.
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
            ranks: of each segment, 0 for no adapter here.
            scales: alpha / rank, or alpha / sqrt(rank).
            s_columns: first columns in S, multiples of 8; zeros by default: segments have their own rows of S anyway.
            dropouts: probabilities, zeros by default.
            device: where the kernels run.
            max_segments: as that of the `SegmentTables` used beside it; for a table that `update` rewrites in place.
            max_rank: fixed by a captured launch; the largest of `ranks` by default.
            has_dropout: likewise; whether any of `dropouts` is above 0 by default.

        Raises:
            ValueError: if a rank is not in 0..1024, a column is not as above, lengths differ, or a fixed size is
                exceeded.
        """
        is_fixed = max_segments is not None or max_rank is not None
        self.num_segments = len(ranks) if max_segments is None else max_segments
        self.max_rank = max((0, *ranks)) if max_rank is None else max_rank
        if not 0 <= self.max_rank <= MAX_JOINT_RANK:
            raise ValueError(f"the largest rank is {self.max_rank}; allowed: 0 to {MAX_JOINT_RANK}.")
        self.has_narrow = is_fixed or any(0 < rank <= tunings.NARROW_RANK for rank in ranks)
        self.has_wide = self.max_rank > tunings.NARROW_RANK
        self.has_dropout = _any_drops(dropouts or ()) if has_dropout is None else has_dropout
        self.num_columns = max(_columns(ranks, s_columns), _round_up(self.max_rank, 8) if is_fixed else 0)
        self._slots = _slots((self.num_segments,) * 5)
        host = self._pack(ranks, scales, s_columns, dropouts)
        self._buffer = torch.empty(len(host), dtype=torch.int32, device=device)
        _copy(host, self._buffer)
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
            ranks: as in `__init__`.
            scales: as in `__init__`.
            s_columns: as in `__init__`.
            dropouts: as in `__init__`.

        Raises:
            ValueError: as `__init__`; also if a rank or a probability exceeds what launches were made for.
        """
        _copy(self._pack(ranks, scales, s_columns, dropouts), self._buffer)

    def _pack(
        self,
        ranks: Sequence[int],
        scales: Sequence[float],
        s_columns: Sequence[int] | None,
        dropouts: Sequence[float] | None,
    ) -> np.ndarray:
        """Return one int32 buffer with all columns of the table."""
        count = len(ranks)
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
        if not self.has_narrow and any(0 < rank <= tunings.NARROW_RANK for rank in ranks):
            raise ValueError(
                f"ranks are {list(ranks)}; a table that is updated with small ones is built with max_rank."
            )
        if _columns(ranks, s_columns) > self.num_columns:
            raise ValueError(f"{_columns(ranks, s_columns)} columns of S; the table was made for {self.num_columns}.")
        if _any_drops(dropouts) and not self.has_dropout:
            raise ValueError("dropout above 0, but the launches of this table draw no masks.")


class Factors:
    """Where one factor (A, B transposed, or the gradient of either) of each segment lies on the device.

    Owners keep their adapters in memory of their own; a launch is handed one tensor and, for each segment, how far from
    its beginning the segment's factor lies, in elements.

    Attributes:
        base: tensor that distances are counted from.
        offset_G: int64, in multiples of 8 elements where `width` is one.
        width: columns of every factor.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor | None],
        width: int,
        *,
        num_segments: int | None = None,
        base: torch.Tensor | None = None,
    ) -> None:
        """Find the factors.

        Args:
            parts: contiguous `[R, width]` of each segment; `None` for a segment without an adapter here.
            width: of all of them.
            num_segments: that the table is made for; as many as `parts` by default.
            base: tensor that distances are counted from; the first factor by default.

        Raises:
            ValueError: if there is no factor and no base, or one differs in width, dtype or device, or does not begin
                on 16 bytes.
        """
        base = next((part for part in parts if part is not None), None) if base is None else base
        if base is None:
            raise ValueError("factors: got none; allowed: at least one segment with an adapter.")
        self.base, self.width = base, width
        size = self.base.element_size()
        offsets = np.zeros(len(parts) if num_segments is None else num_segments, dtype=np.int64)
        for index, part in enumerate(parts):
            if part is not None:
                _check_factor(part, self.base, width)
                offsets[index] = (part.data_ptr() - self.base.data_ptr()) // size
        self.offset_G = torch.empty(len(offsets), dtype=torch.int64, device=self.base.device)
        _copy(offsets, self.offset_G)

    @classmethod
    def of_slab(
        cls, slab_RD: torch.Tensor, first_rows: Sequence[int], ranks: Sequence[int], *, num_segments: int | None = None
    ) -> Factors:
        """Return factors that lie below each other in one tensor.

        Args:
            slab_RD: contiguous `[rows, D]`.
            first_rows: of each segment's factor.
            ranks: rows of each factor, 0 for none.
            num_segments: as for the class.

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
    if width % 8 == 0 and part.data_ptr() % 16:
        raise ValueError("a factor does not begin on 16 bytes; allowed: memory that loads of whole words can read.")


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


def _cut(
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
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def _any_drops(dropouts: Sequence[float]) -> bool:
    return any(philox.drop_threshold(probability) > 0 for probability in dropouts)


def _copy(host: np.ndarray, buffer: torch.Tensor) -> None:
    """Start the copy to the device; pinned memory is handed back only once the copy is done."""
    source = torch.from_numpy(host)
    if buffer.device.type == "cuda":
        source = source.pin_memory()
    buffer.copy_(source, non_blocking=True)
