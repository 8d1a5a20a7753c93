"""Cells, sums and whole states over random layouts, all processes simulated in one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given

from peft_mux.checkpoint.task_state import TaskState, take_part
from peft_mux.engine.processes import Processes
from peft_mux.errors import CheckpointError, ProcessError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.pieces import Piece
from peft_mux.parallel import task_states
from peft_mux.parallel.cells import Bundle, CellSync, TaskCells, bundles, divide, holding_of
from peft_mux.parallel.layout import parse_layout
from peft_mux.parallel.task_states import join_parts
from tests.engine import lab
from tests.parallel import cell_cases as cases
from tests.parallel.tensor.test_parallel import shard


def parts_of(task: cases.Drawn) -> list[TaskCells]:
    pieces = task.all_pieces()
    cells, holdings = divide(pieces), cases.holdings_of(pieces)
    found = bundles(cells, holdings)
    return [TaskCells.of(rank, holding, cells, found) for rank, holding in enumerate(holdings)]


def summed(parts: list[TaskCells], pages: list[list[torch.Tensor]], gradients: list[dict[str, torch.Tensor]]) -> None:
    """Do what processes do, one bundle after another."""
    order: dict[Bundle, None] = {}
    for own in parts:
        order |= dict.fromkeys(own.bundles)
    for bundle in order:
        buffers = []
        for rank in bundle.holders:
            number = parts[rank].in_place[parts[rank].bundles.index(bundle)]
            if number is None:
                buffers.append(bundle.pack(rank, gradients[rank], parts[rank].pieces))
            else:
                buffers.append(pages[rank][number])
            assert buffers[-1].nbytes == bundle.num_bytes
        total = torch.stack(buffers).sum(0)
        for rank, buffer in zip(bundle.holders, buffers, strict=True):
            buffer.copy_(total)
            if bundle.page is None:
                bundle.unpack(buffer, gradients[rank], parts[rank].pieces)


@given(cases.drawn())
def test_cells_cover_every_index_of_every_parameter_once_and_know_who_holds_it(task: cases.Drawn) -> None:
    pieces = task.all_pieces()
    seen: dict[tuple[str, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for cell in divide(pieces):
        shape = task.shapes[cell.name]
        assert cell.num_elements == math.prod(shape) // shape[cell.dim] * (cell.end - cell.start)
        for index in range(cell.start, cell.end):
            assert (cell.name, cell.dim, index) not in seen
            seen[cell.name, cell.dim, index] = cell.holders, cell.adders
    for name, shape in task.shapes.items():
        dim = next((own[name].dim for own in pieces if name in own and not own[name].is_whole), 0)
        for index in range(shape[dim]):
            marks = torch.arange(shape[dim]).view([-1 if axis == dim else 1 for axis in range(2)]).expand(shape)
            have = [rank for rank, own in enumerate(pieces) if name in own and (own[name].take(marks) == index).any()]
            add = [rank for rank in have if pieces[rank][name].adds]
            assert seen.pop((name, dim, index)) == (tuple(have), tuple(add))
    assert not seen


@given(cases.drawn())
def test_sums_of_partial_gradients_are_whole_in_every_process_and_each_cell_is_in_the_norm_once(
    task: cases.Drawn,
) -> None:
    parts, (own, totals) = parts_of(task), task.gradients()
    holdings = cases.holdings_of([part.pieces for part in parts])
    laid = [cases.laid_out(holding, gradients) for holding, gradients in zip(holdings, own, strict=True)]
    summed(parts, [pages for pages, _ in laid], [views for _, views in laid])
    squares = 0.0
    for part, (pages, views) in zip(parts, laid, strict=True):
        for name, piece in part.pieces.items():
            assert torch.equal(views[name], piece.take(totals[name])), (part.rank, name)
        squares += sum(pages[number].square().sum().item() for number in part.counted_pages)
        for cell in part.counted_cells:
            squares += cell.view(views[cell.name], part.pieces[cell.name]).square().sum().item()
    assert squares == sum(total.square().sum().item() for total in totals.values())


@given(cases.drawn())
def test_pages_of_equal_whole_replicas_are_summed_as_they_lie(task: cases.Drawn) -> None:
    whole = parse_layout("<1,1>x3")
    pieces = [task.pieces(rank, whole) for rank in range(3)]
    holdings = cases.holdings_of(pieces)
    (bundle,) = bundles(divide(pieces), holdings)
    assert bundle.page == holdings[0][0]
    assert bundle.holders == (0, 1, 2)


def test_a_page_of_which_one_process_adds_nothing_is_packed() -> None:
    pieces = [{"a": Piece.whole((8, 2))}, {"a": Piece.whole((8, 2), adds=False)}]
    (bundle,) = bundles(divide(pieces), cases.holdings_of(pieces))
    assert bundle.page is None
    gradients = {"a": torch.full((8, 2), float("nan"))}
    assert torch.equal(bundle.pack(1, gradients, pieces[1]), torch.zeros(16))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece((8, 2), 0, ((0, 4),)), Piece((8, 2), 0, ((6, 8),))], "indices 4 to 5 of 8 .* no process"),
        ([Piece((8, 2), 0, ((0, 4),)), Piece.whole((8, 2), adds=False)], "indices 4 to 7 of 8 .* no adding process"),
        ([Piece.whole((8, 2)), Piece.whole((8, 3))], "shapes"),
        ([Piece((8, 2), 0, ((0, 4),)), Piece((8, 2), 1, ((0, 2),))], None),
        ([Piece((8, 2), 0, ((0, 4),)), Piece((8, 2), 1, ((0, 1),))], "cut along dimensions \\[0, 1\\]"),
    ],
)
def test_pieces_that_do_not_fit_together_are_named(pieces: list[Piece], message: str | None) -> None:
    held = [{"layers.0.B": piece} for piece in pieces]
    if message is None:  # all columns are the whole
        assert len(divide(held)) == 2
        return
    with pytest.raises(ValueError, match=f"layers.0.B.*{message}"):
        divide(held)


class Both(Processes):
    """The first of two processes, which knows what the other one holds."""

    def __init__(self, other: MultiTaskPeftModel) -> None:
        super().__init__(0, 2)
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, {name: holding_of(self.other, name) for name in value}]


def test_two_shards_send_the_partial_sums_alone_and_parts_that_are_no_whole_are_an_error() -> None:
    layout = parse_layout("<2,1>")
    sync = CellSync(shard(0), Both(shard(1)), layout)
    sync.exchange_holdings(["b"])
    # q_proj is column-parallel, o_proj row-parallel: A of the one, B of the other.
    assert sum(bundle.num_bytes for bundle in sync.cells_of("b").bundles) == 4 * 2 * 3 * lab.HIDDEN_SIZE * 4
    for one, other, said in (
        (shard(0), shard(0), r"lora_A\.weight: each index must.* that no process"),
        (lab.mux_model(), lab.mux_model(lab.Case("gpt2")), "layers.*each replica must have the whole gradient"),
    ):
        own = layout if "no process" in said else parse_layout("<1,1>x2")
        sync = CellSync(one, Both(other), own)
        with pytest.raises(ProcessError, match=f'task "b", .*{said}'):
            sync.exchange_holdings(["b"])


# --------------------------------------------------------------- whole states


def state_of(task: cases.Drawn) -> TaskState:
    """Return a whole state with two moments, a count, and a copy of the weights."""
    first, second = task.whole(7), task.whole(8)
    moments = {
        name: {"exp_avg": first[name], "exp_avg_sq": second[name].float(), "step": torch.tensor(3.0), "kind": "plain"}
        for name in task.shapes
    }
    copies = {"last_good": task.whole(9), "best": {}}
    settings = {"decays": {"lr": 0.1}}
    return TaskState(task.whole(6), moments, settings, {"base_lrs": {"decays": 0.1}, "last_epoch": 3}, copies)


def check_equal(found: TaskState, expected: TaskState) -> None:
    for one, other in ((found.weights, expected.weights), (found.copies["last_good"], expected.copies["last_good"])):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert found.copies["best"] == {}
    assert found.moments.keys() == expected.moments.keys()
    for name, moments in expected.moments.items():
        assert found.moments[name].keys() == moments.keys()
        for key, value in moments.items():
            got = found.moments[name][key]
            is_same = got.dtype == value.dtype and torch.equal(got, value) if key != "kind" else got == value
            assert is_same, (name, key)
    assert (found.settings, found.schedule) == (expected.settings, expected.schedule)


@given(cases.drawn())
def test_a_whole_state_cut_for_any_layout_and_joined_again_is_itself(task: cases.Drawn) -> None:
    whole = state_of(task)
    for replica in range(task.layout.num_replicas):
        ranks = [rank for rank in range(task.layout.world_size) if task.layout.place(rank).replica == replica]
        parts = []
        for rank in ranks:
            pieces = task.pieces(rank)
            part = take_part(whole, pieces)
            assert all(tuple(part.weights[name].shape) == piece.part_shape for name, piece in pieces.items())
            words, buffer = task_states._packed(pieces, part)
            parts.append(task_states._unpacked(words, buffer))
        check_equal(join_parts(parts), whole)


@pytest.mark.parametrize(
    ("parts", "moments", "message"),
    [
        (1, {}, "B: the processes of one replica must have all of it, got nothing of index 4 along dimension 0, of 8"),
        (
            2,
            {"B": {"exp_avg_sq_row": torch.ones(4)}},
            r"B, exp_avg_sq_row: a divided parameter n.*, got shape \[4\] for a part of shape \[4, 2\]",
        ),
    ],
    ids=["a part is missing", "an optimizer keeps rows and columns"],
)
def test_parts_that_cannot_be_joined_are_refused(parts: int, moments: Any, message: str) -> None:
    cuts = [{"B": Piece((8, 2), 0, ((start, start + 4),))} for start in (0, 4)]
    with pytest.raises(CheckpointError, match=message):
        join_parts([(cut, TaskState({"B": torch.ones(4, 2)}, moments, {}, {})) for cut in cuts[:parts]])


def test_a_state_of_another_rank_is_refused_by_shape() -> None:
    state = TaskState({"B": torch.ones(8, 4)}, {}, {}, {})
    with pytest.raises(CheckpointError, match=r"B must be a tensor of shape \[8, 2\], got shape \[8, 4\]"):
        take_part(state, {"B": Piece((8, 2), 0, ((0, 4),))})
    with pytest.raises(CheckpointError, match=r"A .*got nothing"):
        take_part(state, {"A": Piece.whole((2, 8))})
