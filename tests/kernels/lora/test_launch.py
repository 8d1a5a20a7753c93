"""A launch is bound by Triton once, and goes straight to the compiled kernel from then on, where that is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from peft_mux.kernels.lora.tables import Factors, RankTable, SegmentTables, Tiles

pytest.importorskip("triton")

from peft_mux.kernels.lora import launch as kernels

ROWS, COLUMNS, RANK = 8, 32, 4


class Compiled:
    """Stands for a compiled kernel."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.calls.append(("straight", grid, arguments))


class Kernel:
    """Stands for a Triton kernel of the arguments x, table, stride and SIZE."""

    arg_names = ("x_ptr", "table_ptr", "stride", "SIZE")

    def __init__(self, *, is_interpreted: bool = False) -> None:
        self.calls: list[Any] = []
        self.is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def bind(*arguments: Any, **options: Any) -> Compiled | None:
            self.calls.append(("bound", grid, arguments, options))
            return None if self.is_interpreted else Compiled(self.calls)

        return bind


def memory() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor that begins on 16 bytes, and one that does not."""
    whole = torch.zeros(64)
    first = (-whole.data_ptr() // 4) % 4
    return whole[first : first + 8], whole[first + 1 : first + 9]


def test_the_second_launch_goes_straight_to_what_was_compiled_with_all_arguments_in_order() -> None:
    kernel, table = Kernel(), torch.zeros(4)
    launch = kernels.Launch(kernel, Tiles(8, 4, 2), 5, SIZE=7)
    aligned, _ = memory()
    launch((3, 1, 1), (aligned,), (table,))
    launch((6, 1, 1), (aligned,), (table,))
    bound, straight = kernel.calls
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert bound == ("bound", (3, 1, 1), (aligned, table, 5, 7), options)
    assert straight == ("straight", (6, 1, 1), (aligned, table, 5, 7))


def test_tensors_that_do_not_begin_on_whole_words_are_always_bound_again() -> None:
    kernel, table = Kernel(), torch.zeros(4)
    launch = kernels.Launch(kernel, Tiles(8, 4, 2), 5, SIZE=7)
    aligned, odd = memory()
    for tensor in (odd, aligned, odd, aligned):
        launch((3, 1, 1), (tensor,), (table,))
    assert [call[0] for call in kernel.calls] == ["bound", "bound", "bound", "straight"]


def test_where_the_caller_knows_how_tensors_begin_nothing_is_checked_and_runners_are_kept_by_grid() -> None:
    kernel, table = Kernel(), torch.zeros(4)
    launch = kernels.Launch(kernel, Tiles(8, 4, 2), 5, SIZE=7)
    for grid in ((3, 1, 1), (3, 1, 1), (6, 1, 1), (3, 1, 1)):
        launch(grid, ("no tensor",), (table,), is_aligned=True)  # type: ignore[arg-type]
    assert [call[:2] for call in kernel.calls] == [
        ("bound", (3, 1, 1)),
        ("straight", (3, 1, 1)),
        ("straight", (6, 1, 1)),
        ("straight", (3, 1, 1)),
    ]


def test_a_kernel_that_is_interpreted_is_bound_in_every_launch() -> None:
    kernel = Kernel(is_interpreted=True)
    launch = kernels.Launch(kernel, Tiles(8, 4, 2), 5, SIZE=7)
    for _ in range(2):
        launch((3, 1, 1), (memory()[0],), (torch.zeros(4),))
    assert [call[0] for call in kernel.calls] == ["bound", "bound"]


def test_constants_out_of_the_order_of_the_kernel_are_refused() -> None:
    with pytest.raises(AssertionError, match="order"):
        kernels.Launch(Kernel(), Tiles(8, 4, 2), stride=1)


# ------------------------------------------------- what a launch was prepared for


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[kernels.Launch]:
    """Return the launches that are started from now on, which do nothing."""
    found: list[kernels.Launch] = []
    monkeypatch.setattr(kernels.Launch, "__call__", lambda self, *arguments, **options: found.append(self))
    return found


def shrink(x: torch.Tensor, w: Factors, ranks: RankTable, s: torch.Tensor | None = None, **settings: Any) -> None:
    tables = SegmentTables([len(x)], [0])
    s = torch.empty(len(x), 8, dtype=x.dtype) if s is None else s
    kernels.shrink(x, w, s, tables, ranks, **{"scaled": False, **settings})


def test_a_launch_is_prepared_once_for_any_number_of_rows_and_again_for_another_layout(
    started: list[kernels.Launch],
) -> None:
    w, ranks = Factors([torch.zeros(RANK, COLUMNS)], COLUMNS), RankTable([RANK], [1.0])
    wide = torch.zeros(ROWS, 2 * COLUMNS)
    shrink(torch.zeros(ROWS, COLUMNS), w, ranks)
    shrink(torch.zeros(3 * ROWS, COLUMNS), w, ranks)
    shrink(wide[:, :COLUMNS], w, ranks)
    shrink(torch.zeros(ROWS, COLUMNS), w, ranks, torch.empty(ROWS, 16))
    shrink(torch.zeros(ROWS, COLUMNS), w, ranks, scaled=True)
    shrink(torch.zeros(ROWS, COLUMNS), w, RankTable([RANK], [2.0]))
    first, second, *others = started
    assert first is second
    assert len({id(launch) for launch in (first, *others)}) == 5


def test_rows_are_checked_in_every_launch_and_layouts_in_the_first_of_each(started: list[kernels.Launch]) -> None:
    w, ranks = Factors([torch.zeros(RANK, COLUMNS)], COLUMNS), RankTable([RANK], [1.0])
    shrink(torch.zeros(ROWS, COLUMNS), w, ranks)
    with pytest.raises(ValueError, match=r"S must have 8 rows, as many as the activations, got shape \(7, 8\)"):
        shrink(torch.zeros(ROWS, COLUMNS), w, ranks, torch.empty(ROWS - 1, 8))
    with pytest.raises(
        ValueError,
        match=r"activations and S must have the same dtype, bf16, fp16 or fp32, got torch\.float32 and torch\.float64",
    ):
        shrink(torch.zeros(ROWS, COLUMNS), w, ranks, torch.empty(ROWS, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="segments of 9 rows"):
        kernels.shrink(
            torch.zeros(ROWS, COLUMNS), w, torch.empty(ROWS, 8), SegmentTables([9], [0]), ranks, scaled=False
        )
    with pytest.raises(ValueError, match="got 2, 1 and 1"):
        kernels.shrink(
            torch.zeros(ROWS, COLUMNS), w, torch.empty(ROWS, 8), SegmentTables([4, 4], [0, 0]), ranks, scaled=False
        )
    assert len(started) == 1


def test_types_and_columns_are_checked_once_if_launches_are_equal(
    started: list[kernels.Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    plain = kernels._check_columns
    monkeypatch.setattr(
        kernels, "_check_columns", lambda *given, **more: (checked.append("once"), plain(*given, **more))
    )
    w, ranks = Factors([torch.zeros(RANK, COLUMNS)], COLUMNS), RankTable([RANK], [1.0], dropouts=[0.5])
    drawn = {"places": torch.arange(3 * ROWS), "module_seed": 5}
    for rows in (ROWS, 3 * ROWS, 2 * ROWS):
        x, s, tables = torch.zeros(rows, COLUMNS), torch.zeros(rows, 8), SegmentTables([rows], [0])
        kernels.shrink(x, w, s, tables, ranks, scaled=False, **drawn)
        kernels.expand(s, w, x, tables, ranks, scaled=True, bias=torch.zeros(COLUMNS))
        kernels.wgrad(s, x, w, tables, ranks, scaled=False, **drawn)
    assert checked == ["once"] * 3
    with pytest.raises(ValueError, match=r"places must be contiguous int64 \[16\], got torch\.int64 of length 8"):
        kernels.shrink(x, w, s, tables, ranks, scaled=False, places=torch.arange(ROWS), module_seed=5)


def test_a_bias_of_another_dtype_is_refused_though_all_else_was_prepared(started: list[kernels.Launch]) -> None:
    w, ranks, tables = Factors([torch.zeros(RANK, COLUMNS)], COLUMNS), RankTable([RANK], [1.0]), SegmentTables([4], [0])
    s, y = torch.zeros(4, 8), torch.zeros(4, COLUMNS)
    kernels.expand(s, w, y, tables, ranks, scaled=True, bias=torch.zeros(COLUMNS))
    with pytest.raises(
        ValueError,
        match=r"bias must be contiguous \[32\] in torch\.float32, and None with dropout, got shape \(32,\)",
    ):
        kernels.expand(s, w, y, tables, ranks, scaled=True, bias=torch.zeros(COLUMNS, dtype=torch.bfloat16))
    assert len(started) == 1


@pytest.mark.parametrize(
    ("lengths", "settings", "reductions"), [([5, 0, 16], {}, 0), ([5, 17], {}, 1), ([5, 0, 16], {"max_tokens": 64}, 1)]
)
def test_gradients_of_one_chunk_each_need_no_reduction_but_where_other_rows_may_come(
    started: list[kernels.Launch], lengths: list[int], settings: dict[str, int], reductions: int
) -> None:
    tables = SegmentTables(lengths, [0] * len(lengths), block_rows=16, chunk_rows=16, **settings)
    grads = [torch.zeros(RANK, COLUMNS) for _ in lengths]
    grad, ranks = Factors(grads, COLUMNS), RankTable([RANK] * len(lengths), [1.0] * len(lengths))
    rows = max(sum(lengths), settings.get("max_tokens", 0))
    s, x = torch.zeros(rows, 8), torch.zeros(rows, COLUMNS)
    kernels.wgrad(s, x, grad, tables, ranks, scaled=False, accumulate=True)
    assert len(started) == 1 + reductions
    started.clear()
    # What is written and not added to must be written where there is no row, too.
    kernels.wgrad(s, x, grad, tables, ranks, scaled=False)
    assert len(started) == 2
