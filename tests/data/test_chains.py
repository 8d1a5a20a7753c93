"""Long sequences in parts: nothing is lost, and order, prefixes, targets and places are those of whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.batch import MuxBatch, SequencePart, chains_of, is_chained
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.packing.passes import best_fit_decreasing
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence

PROPERTY = settings(deadline=None, max_examples=80)


def make_batch(name: str, lengths: Sequence[int], *, seed: int = 0, classes: bool = False) -> TaskBatch:
    rng = np.random.default_rng([seed, *name.encode()])
    sequences = []
    for row, length in enumerate(lengths):
        ids = rng.integers(1, 10_000, length)
        labels = np.where(rng.random(length) < 0.3, IGNORE_INDEX, ids)
        types = rng.integers(0, 2, length)
        sequences.append(TokenSequence(ids, labels, row, row % 2 if classes else None, types))
    return TaskBatch(name, step=3, seed=7, sequences=tuple(sequences))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[TaskBatch], int, int | None]:
    """Return global batches with long and short rows, the bound of a pass, and the chunk size."""
    lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(100, 400)), min_size=1, max_size=7)
    tasks = draw(st.lists(lengths, min_size=1, max_size=3))
    seed = draw(st.integers(0, 2**16))
    batches = [make_batch(f"task{index}", rows, seed=seed) for index, rows in enumerate(tasks)]
    return batches, draw(st.integers(3, 150)), draw(st.sampled_from([None, 1, 8, 16, 64]))


def split(batches: list[TaskBatch], max_tokens: int, size: int | None, *, pads: bool = False) -> list[MuxBatch]:
    collator = ChunkPackingCollator(chunk_size=size, split_long_sequences=True, pad_to_chunks=pads)
    return collator.micro_batches(batches, max_tokens=max_tokens)


def parts_of(micro: MuxBatch) -> list[tuple[SequencePart, slice]]:
    bounds = micro.cu_seqlens.tolist()
    return list(zip(micro.parts, map(slice, bounds[:-1], bounds[1:]), strict=True)) if micro.parts else []


def first_places(batch: TaskBatch) -> list[int]:
    return np.cumsum([0, *map(len, batch.sequences)])[:-1].tolist()


# ---------------------------------------------------------------- the collator


@PROPERTY
@given(steps())
def test_every_token_comes_once_with_the_position_target_and_place_of_its_row(
    drawn: tuple[list[TaskBatch], int, int | None],
) -> None:
    batches, max_tokens, size = drawn
    found: dict[tuple[str, int], tuple[int, int, int, int]] = {}
    for micro in split(batches, max_tokens, size):
        assert micro.num_tokens <= max_tokens
        assert micro.token_type_ids is not None
        owners = np.repeat(micro.task_names, np.diff(micro.task_offsets)).tolist()
        columns = micro.token_places, *(x[0] for x in (micro.input_ids, micro.position_ids, micro.labels))
        rows = zip(*(column.tolist() for column in (*columns, micro.token_type_ids[0])), strict=True)
        for name, (place, *token) in zip(owners, rows, strict=True):
            assert (name, place) not in found, "a token came twice"
            found[name, place] = tuple(token)
    wanted = {}
    for batch in batches:
        for sequence, first in zip(batch.sequences, first_places(batch), strict=True):
            assert sequence.token_type_ids is not None
            targets = [*sequence.labels[1:].tolist(), IGNORE_INDEX]
            rows = zip(sequence.input_ids.tolist(), targets, sequence.token_type_ids.tolist(), strict=True)
            for position, (token, target, kind) in enumerate(rows):
                wanted[batch.task, first + position] = token, position, target, kind
    assert found == wanted


@PROPERTY
@given(steps())
def test_parts_of_a_row_lie_in_consecutive_micro_batches_and_know_what_is_before_them(
    drawn: tuple[list[TaskBatch], int, int | None],
) -> None:
    batches, max_tokens, size = drawn
    rows = {batch.task: batch for batch in batches}
    micro_batches = split(batches, max_tokens, size)
    met: dict[tuple[str, int], list[tuple[int, SequencePart]]] = {}
    for number, micro in enumerate(micro_batches):
        for part, tokens in parts_of(micro):
            met.setdefault(part.sequence, []).append((number, part))
            sequence = rows[part.task].sequences[part.row]
            assert micro.input_ids[0, tokens].tolist() == sequence.input_ids[part.start : part.end].tolist()
            assert part.num_tokens == len(sequence)
    for batch in batches:
        for row, sequence in enumerate(batch.sequences):
            if len(sequence) > max_tokens:
                numbers, parts = zip(*met[batch.task, row], strict=True)
                assert list(numbers) == list(range(numbers[0], numbers[0] + len(parts)))
                assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
                assert [part.has_more for part in parts] == [True] * (len(parts) - 1) + [False]
                assert parts[-1].end == len(sequence)
            elif (batch.task, row) in met:
                assert [part.is_whole for _, part in met[batch.task, row]] == [True]


@PROPERTY
@given(steps())
def test_chains_are_the_micro_batches_of_each_long_row(drawn: tuple[list[TaskBatch], int, int | None]) -> None:
    batches, max_tokens, size = drawn
    micro_batches = split(batches, max_tokens, size)
    chains = chains_of(micro_batches)
    assert [micro for chain in chains for micro in chain] == micro_batches
    long_rows = [len(sequence) for batch in batches for sequence in batch.sequences if len(sequence) > max_tokens]
    chained = [chain for chain in chains if is_chained(chain)]
    assert len(chained) == len(long_rows)
    assert all(len(chain) > 1 for chain in chained)
    assert all(len(chain) == 1 for chain in chains if not is_chained(chain))


@PROPERTY
@given(steps())
def test_targets_times_weights_add_up_to_one_and_are_counted_for_each_task(
    drawn: tuple[list[TaskBatch], int, int | None],
) -> None:
    batches, max_tokens, size = drawn
    totals = {batch.task: 0.0 for batch in batches}
    for micro in split(batches, max_tokens, size):
        assert micro.target_rows.tolist() == np.flatnonzero(micro.labels[0].numpy() != IGNORE_INDEX).tolist()
        for index, name in enumerate(micro.task_names):
            totals[name] += (micro.target_offsets[index + 1] - micro.target_offsets[index]) * micro.loss_weights[index]
    for batch in batches:
        assert totals[batch.task] == pytest.approx(1.0 if batch.num_targets else 0.0, rel=1e-12)


def test_rows_that_fit_are_laid_out_as_if_nothing_could_be_split() -> None:
    batches = [make_batch("a", [5, 30, 17, 60]), make_batch("b", [40, 41, 8])]
    whole = ChunkPackingCollator(chunk_size=16).micro_batches(batches, max_tokens=64)
    found = split(batches, 64, 16)
    assert [micro.parts for micro in found] == [()] * len(whole)
    for one, other in zip(found, whole, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.position_ids.tolist() == other.position_ids.tolist()
        assert one.token_places.tolist() == other.token_places.tolist()


def test_short_rows_fill_the_room_beside_parts() -> None:
    batches = [make_batch("a", [66]), make_batch("b", [8, 8, 9, 7])]
    micro_batches = split(batches, 32, 8)
    assert [micro.sequence_lengths for micro in micro_batches] == [(24, 8), (24, 8), (18, 9), (7,)]
    assert [micro.task_names for micro in micro_batches] == [("a", "b")] * 3 + [("b",)]


def test_a_row_with_a_class_stays_whole() -> None:
    (micro,) = split([make_batch("a", [90], classes=True)], 32, 8)
    assert micro.num_tokens == 90
    assert micro.parts == ()


def test_padding_beside_a_part_belongs_to_no_row() -> None:
    first, last = split([make_batch("a", [41])], 32, 16, pads=True)
    assert first.num_padding_tokens == 0
    assert last.num_padding_tokens == 7
    assert last.parts == (SequencePart("a", 0, 32, 41, 41), SequencePart("a", -1, 0, 7, 7))
    assert last.position_ids[0].tolist() == [*range(32, 41), *range(7)]
    assert last.token_places.tolist() == list(range(32, 48))


def test_only_the_chosen_rows_are_split() -> None:
    batch = make_batch("a", [50, 60, 5])
    collator = ChunkPackingCollator(chunk_size=8, split_long_sequences=True)
    micro_batches = collator.micro_batches([batch], max_tokens=32, only=[[1, 2]])
    assert [part[:4] for micro in micro_batches for part in micro.parts] == [("a", 1, 0, 32), ("a", 1, 32, 60)]
    assert sum(micro.num_tokens for micro in micro_batches) == 65


def test_items_go_into_rooms_that_are_there_before_packs_are_opened() -> None:
    assert best_fit_decreasing([5, 3, 9], 10, rooms=[4, 0, 6]) == [[1], [], [0], [2]]
    assert best_fit_decreasing([], 10, rooms=[4]) == [[]]


def test_a_chain_without_its_middle_is_our_own_bug() -> None:
    micro_batches = split([make_batch("a", [96])], 32, 8)
    with pytest.raises(AssertionError, match="does not follow"):
        chains_of([micro_batches[0], micro_batches[2]])
    with pytest.raises(AssertionError, match="are missing"):
        chains_of(micro_batches[:2])
    with pytest.raises(AssertionError, match="does not follow"):
        chains_of(micro_batches[1:])
    empty = replace(micro_batches[1], parts=())
    with pytest.raises(AssertionError, match="a part is missing"):
        chains_of([micro_batches[0], empty])
