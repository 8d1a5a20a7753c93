"""A launch is bound by Triton once, and goes straight to the compiled kernel from then on, where that is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from peft_mux.kernels.lora.tables import Factors, RankTable, SegmentTables, Tiles

pytest.importorskip("triton")

from peft_mux.kernels.lora import launch as kernels

ROWS, COLUMNS, RANK = 8, 32, 4
X = torch.zeros(ROWS, COLUMNS)
W, RANKS = Factors([torch.zeros(RANK, COLUMNS)], COLUMNS), RankTable([RANK], [1.0])


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


def launched(kernel: Kernel, *tensors: Any, grids: Sequence[tuple[int, int, int]] = (), **options: bool) -> list[str]:
    """Launch a kernel with each tensor, by grids of (3, 1, 1) or those given; return how it was reached each time."""
    launch = kernels.Launch(kernel, Tiles(8, 4, 2), 5, SIZE=7)
    for tensor, grid in zip(tensors, grids or [(3, 1, 1)] * len(tensors), strict=True):
        launch(grid, (tensor,), (TABLE,), **options)
    return [call[0] for call in kernel.calls]


TABLE = torch.zeros(4)


def test_the_second_launch_goes_straight_to_what_was_compiled_with_all_arguments_in_order() -> None:
    kernel, (aligned, _) = Kernel(), memory()
    launched(kernel, aligned, aligned, grids=[(3, 1, 1), (6, 1, 1)])
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert kernel.calls == [
        ("bound", (3, 1, 1), (aligned, TABLE, 5, 7), options),
        ("straight", (6, 1, 1), (aligned, TABLE, 5, 7)),
    ]


def test_tensors_that_do_not_begin_on_whole_words_are_always_bound_again() -> None:
    aligned, odd = memory()
    assert launched(Kernel(), odd, aligned, odd, aligned) == ["bound", "bound", "bound", "straight"]


def test_where_the_caller_knows_how_tensors_begin_nothing_is_checked_and_runners_are_kept_by_grid() -> None:
    kernel, grids = Kernel(), [(3, 1, 1), (3, 1, 1), (6, 1, 1), (3, 1, 1)]
    assert launched(kernel, *["no tensor"] * 4, grids=grids, is_aligned=True) == ["bound", *["straight"] * 3]
    assert [call[1] for call in kernel.calls] == grids


def test_a_kernel_that_is_interpreted_is_bound_in_every_launch() -> None:
    assert launched(Kernel(is_interpreted=True), *[memory()[0]] * 2) == ["bound", "bound"]


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


def shrink(
    x: torch.Tensor = X,
    s: torch.Tensor | None = None,
    ranks: RankTable = RANKS,
    lengths: Sequence[int] = (),
    **settings: Any,
) -> None:
    tables = SegmentTables(lengths or [len(x)], [0] * max(1, len(lengths)))
    s = torch.empty(len(x), 8, dtype=x.dtype) if s is None else s
    kernels.shrink(x, W, s, tables, ranks, **{"scaled": False, **settings})


def test_a_launch_is_prepared_once_for_any_number_of_rows_and_again_for_another_layout(
    started: list[kernels.Launch],
) -> None:
    shrink()
    shrink(torch.zeros(3 * ROWS, COLUMNS))
    shrink(torch.zeros(ROWS, 2 * COLUMNS)[:, :COLUMNS])
    shrink(s=torch.empty(ROWS, 16))
    shrink(scaled=True)
    shrink(ranks=RankTable([RANK], [2.0]))
    first, second, *others = started
    assert first is second
    assert len({id(launch) for launch in (first, *others)}) == 5


def test_rows_are_checked_in_every_launch_and_layouts_in_the_first_of_each(started: list[kernels.Launch]) -> None:
    shrink()
    with pytest.raises(ValueError, match=r"S must have 8 rows, as many as the activations, got shape \(7, 8\)"):
        shrink(s=torch.empty(ROWS - 1, 8))
    types = r"bf16, fp16 or fp32, got torch\.float32 and torch\.float64"
    with pytest.raises(ValueError, match=f"activations and S must have the same dtype, {types}"):
        shrink(s=torch.empty(ROWS, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="segments of 9 rows"):
        shrink(lengths=[9])
    with pytest.raises(ValueError, match="got 2, 1 and 1"):
        shrink(lengths=[4, 4])
    assert len(started) == 1


def test_types_and_columns_are_checked_once_if_launches_are_equal(
    started: list[kernels.Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    plain = kernels._check_columns
    monkeypatch.setattr(
        kernels, "_check_columns", lambda *given, **more: (checked.append("once"), plain(*given, **more))
    )
    ranks = RankTable([RANK], [1.0], dropouts=[0.5])
    drawn = {"places": torch.arange(3 * ROWS), "module_seed": 5}
    for rows in (ROWS, 3 * ROWS, 2 * ROWS):
        x, s, tables = torch.zeros(rows, COLUMNS), torch.zeros(rows, 8), SegmentTables([rows], [0])
        kernels.shrink(x, W, s, tables, ranks, scaled=False, **drawn)
        kernels.expand(s, W, x, tables, ranks, scaled=True, bias=torch.zeros(COLUMNS))
        kernels.wgrad(s, x, W, tables, ranks, scaled=False, **drawn)
    assert checked == ["once"] * 3
    with pytest.raises(ValueError, match=r"places must be contiguous int64 \[16\], got torch\.int64 of length 8"):
        shrink(x, s, ranks, places=torch.arange(ROWS), module_seed=5)


def test_a_bias_of_another_dtype_is_refused_though_all_else_was_prepared(started: list[kernels.Launch]) -> None:
    s, y, tables = torch.zeros(4, 8), torch.zeros(4, COLUMNS), SegmentTables([4], [0])
    kernels.expand(s, W, y, tables, RANKS, scaled=True, bias=torch.zeros(COLUMNS))
    with pytest.raises(
        ValueError, match=r"bias must be contiguous \[32\] in torch\.float32, and None with dropout, got shape \(32,\)"
    ):
        kernels.expand(s, W, y, tables, RANKS, scaled=True, bias=torch.zeros(COLUMNS, dtype=torch.bfloat16))
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
