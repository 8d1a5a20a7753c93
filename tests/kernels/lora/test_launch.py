"""A launch is bound by Triton once, and goes straight to the compiled kernel from then on, where that is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from peft_mux.kernels.lora.tables import Factors, RankTable, SegmentTables, Tiles, tiles

pytest.importorskip("triton")

from peft_mux.kernels.lora import launch as kernels

ROWS, COLUMNS, RANK = 8, 32, 4
X = torch.zeros(ROWS, COLUMNS)
W, RANKS = Factors([torch.zeros(RANK, COLUMNS)], COLUMNS), RankTable([RANK], [1.0])
TABLE = torch.zeros(4)


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
    assert launched(Kernel(is_interpreted=True), aligned, aligned) == ["bound", "bound"]


def test_where_the_caller_knows_how_tensors_begin_nothing_is_checked_and_runners_are_kept_by_grid() -> None:
    kernel, grids = Kernel(), [(3, 1, 1), (3, 1, 1), (6, 1, 1), (3, 1, 1)]
    assert launched(kernel, *["no tensor"] * 4, grids=grids, is_aligned=True) == ["bound", *["straight"] * 3]
    assert [call[1] for call in kernel.calls] == grids


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


def expand(y: torch.Tensor = X, s: torch.Tensor | None = None, factors: Factors = W, **settings: Any) -> None:
    s = torch.empty(ROWS, 8) if s is None else s
    kernels.expand(s, factors, y, SegmentTables([ROWS], [0]), RANKS, scaled=False, **settings)


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


TWO, HALVES = (
    Factors([torch.zeros(RANK, COLUMNS), None], COLUMNS),
    Factors([torch.zeros(RANK, COLUMNS).half()], COLUMNS),
)
BIAS = r"bias must be contiguous \[32\] in torch\.float32, and None with dropout, got shape "
DROPPING = RankTable([RANK], [1.0], dropouts=[0.5])
REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "fewer rows of S": (lambda: shrink(s=torch.empty(7, 8)), r"S must have 8 rows, as many as the act.* \(7, 8\)"),
    "a narrow S": (lambda: shrink(s=torch.empty(ROWS, 3)), " must "),
    "another dtype": (
        lambda: shrink(s=torch.empty(ROWS, 8, dtype=torch.float64)),
        r"activations and S must have the same dtype, bf16, fp16 or fp32, got torch\.float32 and torch\.float64",
    ),
    "factors of another dtype": (lambda: expand(factors=HALVES), " must "),
    "factors of more segments": (lambda: expand(factors=TWO), " must |do not fit"),
    "more rows than there are": (lambda: shrink(lengths=[9]), "segments of 9 rows"),
    "tables of more segments": (lambda: shrink(lengths=[4, 4]), "got 2, 1 and 1"),
    "another width": (lambda: expand(torch.zeros(ROWS, COLUMNS + 1)), " must "),
    "a transposed x": (lambda: shrink(torch.zeros(COLUMNS, ROWS).t()), " must "),
    "a transposed y": (lambda: expand(torch.zeros(COLUMNS, ROWS).t()), " must "),
    "too few places": (
        lambda: shrink(ranks=DROPPING, places=torch.arange(7), module_seed=5),
        r"places must be contiguous int64 \[8\], got torch\.int64 of length 7",
    ),
    "a short bias": (lambda: expand(biases=[torch.zeros(COLUMNS - 1)]), BIAS + r"\(31,\)"),
    "a bias of another dtype": (lambda: expand(biases=[torch.zeros(COLUMNS).half()]), BIAS + r"\(32,\)"),
    "gradients of another dtype": (
        lambda: kernels.wgrad(torch.empty(ROWS, 8), X, HALVES, SegmentTables([ROWS], [0]), RANKS, scaled=False),
        " must ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_launch_that_does_not_fit_its_tensors_is_refused_though_another_was_prepared(
    started: list[kernels.Launch], name: str
) -> None:
    shrink()
    shrink(ranks=DROPPING, places=torch.arange(ROWS), module_seed=5)
    expand(biases=[torch.zeros(COLUMNS)])
    expand()
    before = len(started)
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
    assert len(started) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "kind"), [(1, "NARROW"), (16, "NARROW"), (17, "WIDE"), (65, "WIDE"), (256, "WIDE")])
def test_a_rank_is_worked_on_once_and_by_the_same_code_next_to_any_other(
    rank: int, kind: str, dtype: torch.dtype
) -> None:
    alone = tiles("expand", "", 16 if kind == "NARROW" else 64, dtype.itemsize)
    for others in ([], [0], [4], [40], [4, 40], [1, 256]):
        table = RankTable([rank, 0, *others], [1.0] * (2 + len(others)))
        for with_zero in (False, True):
            launches = kernels._rank_classes("expand", table, torch.empty(0, dtype=dtype), with_zero=with_zero)
            ((tile, stages),) = [(tile, stages) for low, high, tile, stages in launches if low <= rank <= high]
            assert (tile.columns, tile.warps, stages[f"{kind}_STAGES"]) == alone
            assert len([low for low, high, *_ in launches if low <= 0 <= high]) == with_zero, "rows without an adapter"
            assert len(launches) == (1 if dtype is torch.bfloat16 else table.has_narrow + table.has_wide)


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
    adding = started.copy()
    started.clear()
    # What is written and not added to must be written where there is no row, too.
    kernels.wgrad(s, x, grad, tables, ranks, scaled=False)
    assert len(started) == 2
    assert not any(launch in adding for launch in started), "code that adds is not code that writes"
