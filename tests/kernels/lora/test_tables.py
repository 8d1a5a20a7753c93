"""Tables of a packed stream: every row in one tile and one chunk of its own segment, in memory that does not move."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.kernels import philox
from peft_mux.kernels.lora.tables import Factors, RankTable, SegmentTables, gpu_model, tiles

LENGTHS = st.lists(st.integers(0, 150), max_size=8)
NAMES = "step_seed_G seg_end_G tile_segment tile_row chunk_segment chunk_row chunk_begin".split()


def tables_of(lengths: list[int], **options: Any) -> SegmentTables:
    return SegmentTables(lengths, list(range(len(lengths))), block_rows=16, chunk_rows=64, **options)


def pieces_of(segments: torch.Tensor, rows: torch.Tensor) -> list[tuple[int, int]]:
    """Return the used entries; unused ones may only follow behind."""
    used = int((segments >= 0).sum())
    assert (segments[used:] == -1).all()
    return list(zip(segments[:used].tolist(), rows[:used].tolist(), strict=True))


# ------------------------------------------------------------------------------ segments


@given(LENGTHS, st.none() | st.integers(0, 100))
def test_tiles_and_chunks_cover_each_segment_from_its_own_start(lengths: list[int], more_tokens: int | None) -> None:
    fixed = {} if more_tokens is None else {"max_tokens": sum(lengths) + more_tokens}
    tables, starts = tables_of(lengths, **fixed), np.cumsum([0, *lengths])
    for size, found in (
        (16, pieces_of(tables.tile_segment, tables.tile_row)),
        (64, pieces_of(tables.chunk_segment, tables.chunk_row)),
    ):
        assert found == [(g, row) for g, n in enumerate(lengths) for row in range(starts[g], starts[g] + n, size)]
    assert tables.chunk_begin.tolist() == [0, *np.cumsum([math.ceil(length / 64) for length in lengths])]
    assert tables.seg_end_G.tolist() == starts[1:].tolist()
    assert tables.num_rows == sum(lengths)
    if fixed:
        assert tables.num_tiles == math.ceil(fixed["max_tokens"] / 16) + len(lengths)
        assert tables.num_chunks == math.ceil(fixed["max_tokens"] / 64) + len(lengths)
    else:
        assert tables.num_tiles == sum(math.ceil(length / 16) for length in lengths)
    # Otherwise Triton would compile for another mix of tasks again.
    base = tables.step_seed_G.data_ptr()
    assert all((getattr(tables, name).data_ptr() - base) % 16 == 0 for name in NAMES)


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), max_size=8))
def test_an_update_leaves_nothing_of_the_step_before(steps: list[tuple[int, int]]) -> None:
    before, after = [length for length, _ in steps], [length for _, length in steps]
    tables = tables_of(before, max_tokens=1200)
    addresses = [getattr(tables, name).data_ptr() for name in NAMES]
    tables.update(after, list(range(len(after))))
    fresh = tables_of(after, max_tokens=1200)
    for name in NAMES:
        assert torch.equal(getattr(tables, name), getattr(fresh, name)), name
    assert addresses == [getattr(tables, name).data_ptr() for name in NAMES]
    assert tables.num_rows == sum(after)


def test_the_worst_mix_of_a_budget_fits() -> None:
    tables = tables_of([1] * 9, max_tokens=160)
    tables.update([17, 17, 17, 17, 17, 17, 17, 17, 24], [0] * 9)
    assert len(pieces_of(tables.tile_segment, tables.tile_row)) == 18


def test_seeds_keep_all_64_bits() -> None:
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    stored = SegmentTables([1] * 5, seeds).step_seed_G
    assert stored.dtype == torch.int64
    assert stored.numpy().view(np.uint64).tolist() == seeds


def test_a_step_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        SegmentTables([-1], [0])
    with pytest.raises(ValueError, match="lengths and seeds must have 1 entries each, got 1 and 2"):
        SegmentTables([5], [0, 0])
    tables = tables_of([10, 20], max_tokens=30)
    before = [getattr(tables, name).clone() for name in NAMES]
    for lengths in ([31, 0], [16, 17], [10, 10, 10], [30]):
        with pytest.raises(ValueError, match=r"^lengths .*must "):
            tables.update(lengths, [0] * len(lengths))
    assert all(torch.equal(getattr(tables, name), kept) for name, kept in zip(NAMES, before, strict=True))
    assert tables.num_rows == 30


# ------------------------------------------------------------------------------ adapters and factors


def test_a_rank_table_holds_what_it_was_given() -> None:
    table = RankTable([8, 0, 40], [2.0, 0.0, 0.3], s_columns=[0, 0, 8], dropouts=[0.1, 0.0, 0.5])
    s_columns, ranks, scales, keep_scales, thresholds = table.of_adapters
    assert ranks.tolist() == table.rank_G.tolist() == [8, 0, 40]
    assert s_columns.tolist() == [0, 0, 8]
    assert torch.equal(scales, torch.tensor([2.0, 0.0, 0.3]))
    assert thresholds.tolist() == [philox.drop_threshold(p) for p in (0.1, 0.0, 0.5)]
    assert torch.equal(keep_scales, torch.tensor([philox.keep_scale(p) for p in (0.1, 0.0, 0.5)]))
    assert (table.max_rank, table.has_dropout, table.num_columns) == (40, True, 48)
    assert not any(column.data_ptr() % 16 for column in table.of_adapters)
    assert not RankTable([8], [1.0], dropouts=[1e-6]).has_dropout, "it rounds to no draw at all"


@pytest.mark.parametrize(
    ("ranks", "narrow", "wide"),
    [([], False, False), ([0], False, False), ([1, 0], True, False), ([16], True, False), ([17], False, True)],
)
def test_launches_are_made_only_for_kinds_of_rank_that_occur(ranks: list[int], narrow: bool, wide: bool) -> None:
    table = RankTable(ranks, [1.0] * len(ranks))
    assert (table.has_narrow, table.has_wide) == (narrow, wide)


@pytest.mark.parametrize("rank", [1025, -1])
def test_a_rank_that_launches_do_not_serve_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="0 to 1024"):
        RankTable([rank], [1.0])


def test_factors_are_found_from_one_base_wherever_tasks_keep_them() -> None:
    pages = [torch.zeros(64, dtype=torch.bfloat16) for _ in range(3)]
    parts = [pages[0][8:40].view(2, 16), None, pages[2][16:32].view(1, 16), pages[1].view(4, 16)]
    factors = Factors(parts, 16)
    for part, offset in zip(parts, factors.offset_G.tolist(), strict=True):
        if part is not None:
            assert factors.base.data_ptr() + 2 * offset == part.data_ptr()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([None], "at least one"),
        ([torch.zeros(2, 8)], "16 columns"),
        ([torch.zeros(16, 2).t()], "contiguous"),
        ([torch.zeros(2, 16), torch.zeros(2, 16).bfloat16()], r"a factor must be torch\.float32 on cpu, like the"),
        ([torch.zeros(33)[1:].view(2, 16)], "16-byte aligned"),
    ],
)
def test_factors_that_a_launch_could_not_read_are_refused(parts: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Factors(parts, 16)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "rows", "programs"),
    [([138] * 8, None, 16, 96), ([138] * 8, 4096, 64, 72), ([512] * 8, None, 64, 64), ([512] * 7, None, 16, 224)],
)
def test_short_passes_have_four_programs_of_shrink_for_each_tile(
    lengths: list[int], max_tokens: int | None, rows: int, programs: int
) -> None:
    tables = SegmentTables(lengths, range(len(lengths)), max_tokens=max_tokens)
    assert tables.shrink_rows == rows
    assert tables.num_tiles * tables.block_rows // rows == programs


# ------------------------------------------------------------------------------ tile choices


def test_neighbours_change_no_tile_size_but_only_how_deep_loads_are_pipelined() -> None:
    for kernel in ("shrink", "expand", "wgrad", "reduce"):
        for name in ("H200", "another GPU"):
            narrow, wide = (tiles(kernel, name, block, 2) for block in (16, 64))
            assert (narrow.columns, narrow.warps) == (wide.columns, wide.warps)


def test_an_unknown_device_gets_the_default_and_four_byte_elements_half_the_columns() -> None:
    assert gpu_model(torch.device("cpu")) == ""
    assert tiles("shrink", "", 16, 2) == tiles("shrink", "another GPU", 16, 2)
    assert tiles("shrink", "", 16, 2) != tiles("shrink", "H200", 16, 2)
    assert tiles("wgrad", "H200", 64, 4).columns * 2 == tiles("wgrad", "H200", 64, 2).columns
