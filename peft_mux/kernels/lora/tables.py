"""Tables of a packed stream for the grouped LoRA kernels, as small arrays on the device, and launch settings.

`SegmentTables` describes one step and is shared by all launches of it: which rows belong to which segment, cut into
tiles and into chunks that never cross a segment. `RankTable` describes one module: each segment's rank, scale and
dropout. `Factors` holds the address of one factor (A, B transposed, or the gradient of either) of each segment. Each is
built on the host in one numpy buffer and moved in one copy.

Segments are contiguous and in order, and may be empty. Rows after the last segment belong to no task; no kernel writes
them. If a stream is padded, the padding is a segment of rank 0.

Tile sizes are constants: tuning at run time would synchronise, break graph capture, and make runs differ. The order of
sums depends only on the device and the task's own rank, never on the ranks of others: a program takes the code for
ranks up to 16 or that for larger ones, whatever else its launch holds. The sizes were chosen from compiled code
(registers, shared memory, instructions) and byte counts, not from timings.

Shape letters: G segments, R rows of a factor (its rank), D columns, NT tiles, NC chunks; S is `x A^T` of all segments.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from peft_mux.kernels import philox

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of activations and factors; sums are fp32 in any case."""

NARROW_RANK = 16
"""Ranks up to this are processed in one block of 16, the smallest block of a tensor core."""

WIDE_BLOCK = 64
"""Larger ranks are processed in blocks of this size."""

MAX_RANK = 256
"""The largest rank of one adapter."""

MAX_LAYERS = 3
"""The largest number of layers of a group, such as q, k and v, that share a launch."""

MAX_JOINT_RANK = 1024
"""The largest sum of ranks of adapters that are used as one, because they read the same activations."""

BLOCK_ROWS = 64
"""Rows of a tile: the work of one program of shrink and expand."""

SHORT_ROWS, SHORT_TOKENS = 16, 4096
"""In a pass of fewer tokens than this, a program of shrink has so many rows of a tile: with whole tiles, most
processors would have no program. It computes a whole tile's block, the other rows masked, for the same bits."""
_SHORT_STAGES = 8, 5
"""Loads in flight in such programs, for narrow and wide ranks, because each loads less at a time. They take at most
80 KiB of shared memory (160 on Hopper), which every GPU with bf16 has."""

CHUNK_ROWS = 512
"""Rows of a chunk: one program of wgrad sums them up before the chunks are added in order."""

_UNUSED = -1


class Tiles(NamedTuple):
    """How one kernel is launched.

    Attributes:
        columns: columns of the activation that are processed at a time, for 16-bit elements.
        warps: number of warps of a program.
        stages: number of loads in flight in a loop.
    """

    columns: int
    warps: int
    stages: int


# For narrow and for wide ranks. At most 48 KiB of shared memory in 16 bits, which every GPU with bf16 has.
_DEFAULT = {
    "shrink": (Tiles(64, 4, 3), Tiles(64, 4, 2)),
    "expand": (Tiles(128, 4, 2), Tiles(128, 4, 2)),
    "wgrad": (Tiles(128, 4, 2), Tiles(128, 4, 2)),
    "reduce": (Tiles(256, 4, 2), Tiles(256, 4, 2)),
}
_HOPPER = _DEFAULT | {
    "shrink": (Tiles(128, 4, 4), Tiles(128, 4, 3)),
    "wgrad": (Tiles(128, 4, 4), Tiles(128, 4, 3)),
}
_TILES_BY_MODEL: dict[str, dict[str, tuple[Tiles, Tiles]]] = {
    "H100": _HOPPER, "H200": _HOPPER, "H20": _HOPPER, "GH200": _HOPPER
}  # fmt: skip


def is_hopper(device_name: str) -> bool:
    """Return whether a model of GPU, as `gpu_model` returns it, has compute capability 9.0."""
    return device_name in _TILES_BY_MODEL


def tiles(kernel: str, device_name: str, block_ranks: int, element_size: int, *, is_short: bool = False) -> Tiles:
    """Return the launch settings of a kernel.

    Args:
        kernel: "shrink", "expand", "wgrad" or "reduce".
        device_name: model of the GPU, as `gpu_model` returns it.
        block_ranks: number of ranks of a block, 16 or 64.
        element_size: bytes of an element.
        is_short: whether programs have `SHORT_ROWS` rows.
    """
    narrow, wide = _TILES_BY_MODEL.get(device_name, _DEFAULT)[kernel]
    tiles = narrow if block_ranks <= NARROW_RANK else wide
    if is_short:
        tiles = tiles._replace(stages=_SHORT_STAGES[block_ranks > NARROW_RANK])
    if element_size <= 2:
        return tiles
    # Half as many columns of 4 bytes need the same shared memory; the reduction keeps its blocks in registers.
    columns = tiles.columns if kernel == "reduce" else tiles.columns // 2
    if block_ranks <= NARROW_RANK:
        # A narrow expand has one block of ranks, so it loads nothing ahead; with two stages an A100 spills registers.
        return tiles._replace(columns=columns, stages=1 if kernel == "expand" else tiles.stages)
    # Products in fp32 use no tensor cores, so a thread holds more of them: with 4 warps an A100 spills registers, in
    # wgrad even with two loads in flight.
    return Tiles(columns, 2 * tiles.warps, tiles.stages - (kernel == "wgrad"))


@functools.cache
def gpu_model(device: torch.device) -> str:
    """Return the model of a GPU, "H200" for "NVIDIA H200"; "" for any other device."""
    if device.type != "cuda":
        return ""
    words = torch.cuda.get_device_name(device).split()
    return next((word for word in words if word in _TILES_BY_MODEL), " ".join(words))


class SegmentTables:
    """Rows of all segments of one step, on the device.

    With `max_tokens` the device buffer keeps its address and shape for all lengths, so that a captured CUDA graph can
    be replayed in every step of the same segments.

    Args:
        lengths: number of rows of each segment, in the order of the stream.
        step_seeds: 64 bits per segment, from `philox.hash_seed(task_seed, step)`.
        device: the device on which the kernels run.
        block_rows: number of rows of a tile, a power of two of at least 16.
        chunk_rows: number of rows of a chunk, a multiple of `block_rows`.
        max_tokens: number of rows of the largest step, for tables that `update` can rewrite in place.

    Attributes:
        step_seed_G: int64, the half of the dropout key that belongs to a task and its step.
        seg_end_G: int32, one past the last row of each segment.
        tile_segment: int32 `[NT]`, the segment of each tile; -1 if the tile is unused.
        tile_row: int32 `[NT]`, first row of each tile.
        chunk_segment: int32 `[NC]`, the segment of each chunk; -1 if the chunk is unused.
        chunk_row: int32 `[NC]`, first row of each chunk; chunks are aligned to the start of their own segment.
        chunk_begin: int32 `[G + 1]`, first chunk of each segment.
        num_segments: G.
        num_rows: number of rows that belong to a segment.
        num_tiles: NT, the programs of a launch over rows.
        shrink_rows: rows of a tile for each program of shrink.
        num_chunks: NC, the programs of a launch over chunks.
        of_tiles: the table arguments of launches over rows, in order.
        of_chunks: the table arguments of launches over chunks, in order.
        has_parts: whether a segment may have several chunks, whose parts of a gradient need a reduction.

    Raises:
        ValueError: if a length is negative, or the rows exceed `max_tokens`.
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
    ) -> None:
        """Build the tables of a first step."""
        assert block_rows >= 16, "the smallest block of a tensor core"
        assert block_rows & (block_rows - 1) == 0, "Triton's blocks are powers of two"
        assert chunk_rows % block_rows == 0, "chunks are cut into tiles"
        count = self.num_segments = len(lengths)
        self.block_rows, self.chunk_rows = block_rows, chunk_rows
        self.max_tokens = sum(lengths) if max_tokens is None else max_tokens
        self.shrink_rows = SHORT_ROWS if self.max_tokens < SHORT_TOKENS else block_rows
        if max_tokens is None:
            num_tiles = sum(-(-length // block_rows) for length in lengths)
            num_chunks = sum(-(-length // chunk_rows) for length in lengths)
        else:
            # Upper bound for any lengths: the last tile and the last chunk of every segment may be partly empty.
            num_tiles = -(-max_tokens // block_rows) + count
            num_chunks = -(-max_tokens // chunk_rows) + count
        self._slots, begin = [], 0
        for size in (2 * count, count, num_tiles, num_tiles, num_chunks, num_chunks, count + 1):
            self._slots.append(slice(begin, begin + size))
            begin += -(-size // 4) * 4  # on 16 bytes: Triton compiles for each alignment that occurs
        host = self._packed(lengths, step_seeds)
        self._buffer = copy_to_device(host, torch.empty(len(host), dtype=torch.int32, device=device))
        parts = [self._buffer[slot] for slot in self._slots]
        self.step_seed_G = parts[0].view(torch.int64)
        self.seg_end_G, self.tile_segment, self.tile_row = parts[1:4]
        self.chunk_segment, self.chunk_row, self.chunk_begin = parts[4:]
        self.num_tiles, self.num_chunks = num_tiles, num_chunks
        self.of_tiles = self.tile_segment, self.tile_row, self.seg_end_G, self.step_seed_G
        self.of_chunks = self.chunk_segment, self.chunk_row, self.chunk_begin, self.seg_end_G, self.step_seed_G
        # Captured launches may be replayed with other lengths.
        self.has_parts = max_tokens is not None or max((0, *lengths)) > chunk_rows

    def update(self, lengths: Sequence[int], step_seeds: Sequence[int]) -> None:
        """Rewrite the tables for another step of the same segments, in the same memory.

        Raises:
            ValueError: if the step does not fit the tables.
        """
        copy_to_device(self._packed(lengths, step_seeds), self._buffer)

    def _packed(self, lengths: Sequence[int], step_seeds: Sequence[int]) -> np.ndarray:
        """Return one int32 buffer with all tables of a step."""
        if not len(lengths) == len(step_seeds) == self.num_segments:
            raise ValueError(
                f"lengths and seeds must have {self.num_segments} entries each, got {len(lengths)} and "
                f"{len(step_seeds)}."
            )
        lengths_G = np.array(lengths, dtype=np.int64)
        if (lengths_G < 0).any() or lengths_G.sum() > self.max_tokens:
            raise ValueError(f"lengths must be 0 or more and add up to at most {self.max_tokens}, got {list(lengths)}.")
        end_G = np.cumsum(lengths_G)
        start_G = end_G - lengths_G
        # Tiles and chunks that are not written below stay marked as unused, and their programs return immediately.
        buffer = np.full(self._slots[-1].stop, _UNUSED, dtype=np.int32)
        seeds, ends, *of_tiles, chunk_segment, chunk_row, chunk_begin = (buffer[slot] for slot in self._slots)
        seeds.view(np.int64)[:] = [signed_seed(seed) for seed in step_seeds]
        ends[:] = end_G
        for size, (segment_of, row_of) in ((self.block_rows, of_tiles), (self.chunk_rows, (chunk_segment, chunk_row))):
            pieces_G = -(-lengths_G // size)
            last_G = np.cumsum(pieces_G)
            segments = np.repeat(np.arange(len(lengths_G)), pieces_G)
            within = np.arange(len(segments)) - (last_G - pieces_G)[segments]
            segment_of[: len(segments)] = segments
            row_of[: len(segments)] = start_G[segments] + within * size
            if size == self.chunk_rows:
                # The reduction goes through a segment's chunks by number, and therefore in order.
                chunk_begin[0], chunk_begin[1:] = 0, last_G
        self.num_rows = int(lengths_G.sum())
        return buffer


class RankTable:
    """Adapters of all segments in one layer, or layer by layer in those that share a launch, on the device.

    Args:
        ranks: rank of each segment's adapter; 0 if it has none in this layer.
        scales: scale of each segment's adapter, alpha / rank or alpha / sqrt(rank).
        s_columns: first column of each segment in S, a multiple of 8; by default 0 for all, because segments share no
            row of S.
        dropouts: dropout probability of each segment's adapter; zeros by default.
        device: the device on which the kernels run.

    Attributes:
        of_adapters: first column in S, rank, scale, scale of kept elements (`philox.keep_scale`) and dropout threshold
            (`philox.drop_threshold`) of each segment, in the order of the kernels' arguments.
        rank_G: int32, the ranks.
        max_rank: the largest rank.
        has_narrow: whether there are ranks up to `NARROW_RANK`.
        has_wide: whether there are larger ones.
        has_dropout: whether launches draw masks.
        num_columns: number of columns of S that are needed.
        num_adapters: number of ranks.

    Raises:
        ValueError: if a rank is not in 0..1024.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        scales: Sequence[float],
        *,
        s_columns: Sequence[int] | None = None,
        dropouts: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        count = self.num_adapters = len(ranks)
        s_columns = [0] * count if s_columns is None else s_columns
        thresholds = [0] * count if dropouts is None else [philox.drop_threshold(p) for p in dropouts]
        keep_scales = [1.0] * count if dropouts is None else [philox.keep_scale(p) for p in dropouts]
        if any(not 0 <= rank <= MAX_JOINT_RANK for rank in ranks):
            raise ValueError(f"ranks must be 0 to {MAX_JOINT_RANK}, got {list(ranks)}.")
        assert not any(column % 8 for column in s_columns), "columns of S come in groups of eight"
        self.max_rank = max((0, *ranks))
        self.has_narrow = any(0 < rank <= NARROW_RANK for rank in ranks)
        self.has_wide = self.max_rank > NARROW_RANK
        self.has_dropout = any(thresholds)
        self.num_columns = max(
            (0, *(column + -(-rank // 8) * 8 for column, rank in zip(s_columns, ranks, strict=True) if rank))
        )
        # Rows are 16-byte aligned, because Triton compiles a variant for each alignment.
        host = np.zeros((5, -(-count // 4) * 4), dtype=np.int32)
        for row, column in zip((0, 1, 4), (s_columns, ranks, thresholds), strict=True):
            host[row, :count] = column
        for row, column in zip((2, 3), (scales, keep_scales), strict=True):
            host[row].view(np.float32)[:count] = column
        rows = copy_to_device(host, torch.empty(host.shape, dtype=torch.int32, device=device))[:, :count]
        self.rank_G = rows[1]
        self.of_adapters = rows[0], rows[1], rows[2].view(torch.float32), rows[3].view(torch.float32), rows[4]


class Factors:
    """The addresses of one factor (A, B transposed, or the gradient of either) of each segment on the device.

    Each task keeps its adapters in its own memory. A launch receives one tensor and, for each segment, the distance of
    the segment's factor from the start of this tensor, in elements.

    Several layers of a group may share a launch: their factors follow one another, layer by layer.

    Args:
        parts: factor of each segment in each layer, contiguous `[R, width]`; `None` for a segment without an adapter.
        widths: number of columns of the factors of each layer, of at most `MAX_LAYERS`.

    Attributes:
        base: the first factor, from whose start distances are counted.
        offset_G: int64, distance of each factor from it in elements; multiples of 8 where its width is one.
        widths: see above.
        num_adapters: number of segments times the number of layers.
        launches: prepared launches of these factors; see `peft_mux.kernels.lora.launch`.

    Raises:
        ValueError: if there is no factor, or if one differs in width, dtype or device, or is not 16-byte aligned.
    """

    def __init__(self, parts: Sequence[torch.Tensor | None], *widths: int) -> None:
        """Check the factors, and compute their distances from the first one."""
        present = [part for part in parts if part is not None]
        if not present:
            raise ValueError("factors must have at least one segment with an adapter, got none.")
        base = self.base = present[0]
        self.widths, self.num_adapters = widths, len(parts)
        num_segments = len(parts) // len(widths)
        for index, part in enumerate(parts):
            if part is None:
                continue
            width = widths[index // num_segments]
            if part.dim() != 2 or part.shape[1] != width or not part.is_contiguous():
                raise ValueError(f"a factor must be contiguous with {width} columns, got shape {tuple(part.shape)}.")
            if part.dtype != base.dtype or part.device != base.device:
                raise ValueError(
                    f"a factor must be {base.dtype} on {base.device}, like the others, got {part.dtype} on "
                    f"{part.device}."
                )
            # Rows of other widths have any alignment, so vectorised loads are impossible anyway.
            if width % 8 == 0 and part.data_ptr() % 16:
                raise ValueError("a factor must be 16-byte aligned, so that vectorised loads can read it.")
        # Signed and 64 bits, because the buffers of other tasks may be at lower or higher addresses.
        offsets = np.zeros(len(parts), dtype=np.int64)
        for index, part in enumerate(parts):
            if part is not None:
                offsets[index] = (part.data_ptr() - base.data_ptr()) // base.element_size()
        self.offset_G = copy_to_device(offsets, torch.empty(len(parts), dtype=torch.int64, device=base.device))
        self.launches: dict[tuple[Any, ...], Any] = {}


def signed_seed(seed: int) -> int:
    """Return the int64 with the same bits as 64 unsigned ones, because torch has no arithmetic on uint64."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def copy_to_device(host: np.ndarray, buffer: torch.Tensor) -> torch.Tensor:
    """Start the copy to a buffer on the device, and return the buffer; pinned memory is reused only after the copy."""
    source = torch.from_numpy(host)
    if buffer.device.type == "cuda":
        source = source.pin_memory()
    return buffer.copy_(source, non_blocking=True)
