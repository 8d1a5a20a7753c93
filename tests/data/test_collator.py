"""Collation: every token once, whole rows and rows in parts, loss weights that add up to a mean, equal gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from peft_mux.data.batch import MuxBatch, SequencePart, chains_of, is_chained
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence
from peft_mux.errors import ConfigError, DataError
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.invariants.mux_lab import tiny_llama

PROPERTY = settings(deadline=None, max_examples=60)
Drawn = tuple[list[TaskBatch], int, ChunkPackingCollator]


def make_batch(
    name: str,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    masked: float = 0.3,
    classes: Sequence[int | float] | None = None,
    vocabulary: int = 10_000,
    has_types: bool = False,
) -> TaskBatch:
    """Return random sequences; `masked` of the labels carry no loss."""
    rng = np.random.default_rng([seed, *name.encode()])
    sequences = []
    for row, length in enumerate(lengths):
        ids = rng.integers(1, vocabulary, length)
        labels = np.where(rng.random(length) < masked, IGNORE_INDEX, ids)
        types = rng.integers(0, 2, length) if has_types else None
        sequences.append(TokenSequence(ids, labels, row, None if classes is None else classes[row], types))
    return TaskBatch(name, step=3, seed=7, sequences=tuple(sequences))


def splitting(chunk_size: int | None = None, **settings: Any) -> ChunkPackingCollator:
    return ChunkPackingCollator(chunk_size=chunk_size, split_long_sequences=True, **settings)


@st.composite
def steps(draw: st.DrawFn) -> Drawn:
    """Draw global batches with long and short rows, the tokens of a micro-batch, and a collator that may split rows."""
    lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(100, 400)), min_size=1, max_size=7)
    tasks = draw(st.lists(lengths, min_size=1, max_size=3))
    seed = draw(st.integers(0, 2**16))
    batches = [make_batch(f"task{index}", rows, seed=seed, has_types=True) for index, rows in enumerate(tasks)]
    size, may_split = draw(st.sampled_from([None, 1, 8, 16, 64])), draw(st.booleans())
    collator = ChunkPackingCollator(chunk_size=size, split_long_sequences=may_split)
    return batches, draw(st.integers(3, 150)), collator


def sequences_of(batch: MuxBatch) -> list[tuple[str, slice]]:
    """Return task and tokens of each sequence of a stream."""
    bounds = batch.cu_seqlens.tolist()
    owners = np.repeat(batch.task_names, np.diff(batch.sequence_offsets)).tolist()
    return list(zip(owners, map(slice, bounds[:-1], bounds[1:]), strict=True))


@PROPERTY
@given(steps())
def test_every_token_comes_once_with_the_position_target_and_place_of_its_row(drawn: Drawn) -> None:
    batches, max_tokens, collator = drawn
    found: dict[tuple[str, int], tuple[int, int, int, int]] = {}
    for micro in collator.micro_batches(batches, max_tokens=max_tokens):
        assert micro.token_type_ids is not None
        owners = np.repeat(micro.task_names, np.diff(micro.task_offsets)).tolist()
        columns = micro.token_places, *(x[0] for x in (micro.input_ids, micro.position_ids, micro.labels))
        rows = zip(*(column.tolist() for column in (*columns, micro.token_type_ids[0])), strict=True)
        for name, (place, *token) in zip(owners, rows, strict=True):
            assert (name, place) not in found, "a token came twice"
            found[name, place] = tuple(token)
    wanted = {}
    for batch in batches:
        firsts = np.cumsum([0, *map(len, batch.sequences)])[:-1].tolist()
        for sequence, first in zip(batch.sequences, firsts, strict=True):
            assert sequence.token_type_ids is not None
            targets = [*sequence.labels[1:].tolist(), IGNORE_INDEX]
            rows = zip(sequence.input_ids.tolist(), targets, sequence.token_type_ids.tolist(), strict=True)
            for position, (token, target, kind) in enumerate(rows):
                wanted[batch.task, first + position] = token, position, target, kind
    assert found == wanted


@PROPERTY
@given(steps())
def test_targets_times_weights_add_up_to_one_and_are_counted_for_each_task(drawn: Drawn) -> None:
    batches, max_tokens, collator = drawn
    totals = {batch.task: 0.0 for batch in batches}
    for micro in collator.micro_batches(batches, max_tokens=max_tokens):
        assert micro.target_rows.tolist() == np.flatnonzero(micro.labels[0].numpy() != IGNORE_INDEX).tolist()
        for index, name in enumerate(micro.task_names):
            totals[name] += (micro.target_offsets[index + 1] - micro.target_offsets[index]) * micro.loss_weights[index]
    for batch in batches:
        assert totals[batch.task] == pytest.approx(1.0 if batch.num_targets else 0.0, rel=1e-12)


@PROPERTY
@given(steps())
def test_micro_batches_keep_to_their_tokens_their_order_and_their_offsets(drawn: Drawn) -> None:
    batches, max_tokens, collator = drawn
    order = [batch.task for batch in batches]
    micro_batches = collator.micro_batches(batches, max_tokens=max_tokens)
    for micro in micro_batches:
        is_one_long_row = micro.num_sequences == 1 and not collator.rules.split_long_sequences
        assert micro.num_tokens <= max_tokens or is_one_long_row
        assert list(micro.task_names) == [name for name in order if name in micro.task_names]
        assert micro.task_offsets[0] == micro.sequence_offsets[0] == 0
        assert micro.num_tokens == micro.input_ids.shape[1] == sum(micro.sequence_lengths)
        assert micro.sequence_offsets[-1] == micro.num_sequences == len(micro.cu_seqlens) - 1
        assert micro.cu_seqlens.dtype == torch.int32
        assert (set(micro.task_steps), set(micro.task_seeds), micro.num_padding_tokens) == ({3}, {7}, 0)
    if sum(batch.num_tokens for batch in batches) <= max_tokens:
        assert len(micro_batches) == 1, "what fits is one micro-batch"


@PROPERTY
@given(steps())
def test_parts_of_a_row_are_in_consecutive_micro_batches_which_are_a_chain(drawn: Drawn) -> None:
    batches, max_tokens, _ = drawn
    rows = {batch.task: batch for batch in batches}
    micro_batches = splitting(drawn[2].rules.chunk_size).micro_batches(batches, max_tokens=max_tokens)
    met: dict[tuple[str, int], list[tuple[int, SequencePart]]] = {}
    for number, micro in enumerate(micro_batches):
        for part, (_, tokens) in zip(micro.parts, sequences_of(micro) if micro.parts else (), strict=True):
            met.setdefault(part.sequence, []).append((number, part))
            sequence = rows[part.task].sequences[part.row]
            assert micro.input_ids[0, tokens].tolist() == sequence.input_ids[part.start : part.end].tolist()
            assert part.num_tokens == len(sequence)
    num_long = 0
    for batch in batches:
        for row, sequence in enumerate(batch.sequences):
            if len(sequence) > max_tokens:
                num_long += 1
                numbers, parts = zip(*met[batch.task, row], strict=True)
                assert list(numbers) == list(range(numbers[0], numbers[0] + len(parts)))
                assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
                assert [part.has_more for part in parts] == [True] * (len(parts) - 1) + [False]
                assert parts[-1].end == len(sequence)
            elif (batch.task, row) in met:
                assert [part.is_whole for _, part in met[batch.task, row]] == [True]
    chains = chains_of(micro_batches)
    assert [micro for chain in chains for micro in chain] == micro_batches
    assert sum(len(chain) > 1 for chain in chains) == sum(map(is_chained, chains)) == num_long


@PROPERTY
@given(steps(), st.sampled_from([8, 64]))
def test_padding_fills_each_task_up_to_whole_chunks_as_one_sequence_without_targets(drawn: Drawn, size: int) -> None:
    batches, max_tokens, _ = drawn
    tokens = {batch.task: batch.num_tokens for batch in batches}
    collator = ChunkPackingCollator(chunk_size=size, pad_to_chunks=True)
    plain = ChunkPackingCollator(chunk_size=size).micro_batches(batches, max_tokens=max_tokens)
    for micro, bare in zip(collator.micro_batches(batches, max_tokens=max_tokens), plain, strict=True):
        widths = np.diff(micro.task_offsets)
        assert (widths % size == 0).all()
        assert (widths - np.diff(bare.task_offsets) < size).all()
        padding = torch.ones(micro.num_tokens, dtype=torch.bool)
        for start, own in zip(micro.task_offsets, np.split(bare.input_ids[0], bare.task_offsets[1:-1]), strict=False):
            padding[start : start + len(own)] = False
        own_ends = bare.input_ids[0].numpy()[np.subtract(bare.task_offsets[1:], 1)]
        repeated = np.repeat(own_ends, widths - np.diff(bare.task_offsets))
        assert micro.input_ids[0][padding].tolist() == repeated.tolist(), "a token that the task has"
        assert int(padding.sum()) == micro.num_padding_tokens == micro.num_tokens - bare.num_tokens
        assert (micro.labels[0][padding] == IGNORE_INDEX).all()
        assert torch.equal(micro.input_ids[0][~padding], bare.input_ids[0])
        assert torch.equal(micro.labels[0][~padding], bare.labels[0])
        assert torch.equal(micro.position_ids[0][~padding], bare.position_ids[0])
        for name, part in sequences_of(micro):
            in_part = padding[part]
            assert bool(in_part.all()) == bool(in_part.any()), "padding is a sequence of its own"
            if in_part.any():
                assert (micro.token_places[part] >= tokens[name]).all(), "padding has no place of a token"
        assert micro.loss_weights == bare.loss_weights


# ----------------------------------------------------------------- rows in parts


def test_short_rows_fill_the_room_next_to_parts() -> None:
    batches = [make_batch("a", [66]), make_batch("b", [8, 8, 9, 7])]
    micro_batches = splitting(8).micro_batches(batches, max_tokens=32)
    assert [micro.sequence_lengths for micro in micro_batches] == [(24, 8), (24, 8), (18, 9), (7,)]
    assert [micro.task_names for micro in micro_batches] == [("a", "b")] * 3 + [("b",)]


def test_a_row_with_a_class_stays_whole() -> None:
    (micro,) = splitting(8).micro_batches([make_batch("a", [90], classes=[0])], max_tokens=32)
    assert micro.num_tokens == 90
    assert micro.parts == ()


def test_padding_next_to_a_part_belongs_to_no_row() -> None:
    first, last = splitting(16, pad_to_chunks=True).micro_batches([make_batch("a", [41])], max_tokens=32)
    assert first.num_padding_tokens == 0
    assert last.num_padding_tokens == 7
    assert last.parts == (SequencePart("a", 0, 32, 41, 41), SequencePart("a", -1, 0, 7, 7))
    assert last.position_ids[0].tolist() == [*range(32, 41), *range(7)]
    assert last.token_places.tolist() == list(range(32, 48))


def test_only_the_chosen_rows_are_split() -> None:
    batch = make_batch("a", [50, 60, 5])
    micro_batches = splitting(8).micro_batches([batch], max_tokens=32, only=[[1, 2]])
    assert [part[:4] for micro in micro_batches for part in micro.parts] == [("a", 1, 0, 32), ("a", 1, 32, 60)]
    assert sum(micro.num_tokens for micro in micro_batches) == 65


# ------------------------------------------------------------ classification


def test_class_labels_follow_their_sequences_and_count_as_one_target_each() -> None:
    batches = [make_batch("a", [4, 30, 7], classes=[2, 0, 1]), make_batch("b", [25, 3], classes=[1, 0])]
    wanted = {
        (batch.task, sequence.input_ids[0]): sequence.class_label for batch in batches for sequence in batch.sequences
    }
    totals = {"a": 0.0, "b": 0.0}
    micro_batches = ChunkPackingCollator().micro_batches(batches, max_tokens=40)
    assert len(micro_batches) > 1
    for micro in micro_batches:
        assert micro.class_labels is not None
        assert micro.class_labels.dtype == torch.int64
        for index, (name, part) in enumerate(sequences_of(micro)):
            assert int(micro.class_labels[index]) == wanted.pop((name, int(micro.input_ids[0, part][0])))
            totals[name] += micro.loss_weights[micro.task_names.index(name)]
    assert not wanted
    assert totals == {"a": pytest.approx(1.0), "b": pytest.approx(1.0)}


def test_values_to_regress_on_are_floats() -> None:
    batch = make_batch("a", [4, 5], classes=[0.5, -1.25])
    (micro,) = ChunkPackingCollator().micro_batches([batch], max_tokens=100)
    assert micro.class_labels is not None
    assert micro.class_labels.dtype == torch.float32
    assert micro.class_labels.tolist() == [0.5, -1.25]


def test_a_task_of_rows_with_and_without_a_class_is_refused_and_alongside_others_its_tokens_are_no_targets() -> None:
    batches = [make_batch("a", [4], classes=[1]), make_batch("b", [4])]
    (micro,) = ChunkPackingCollator().micro_batches(batches, max_tokens=100)
    assert micro.class_labels is not None
    assert micro.class_labels.tolist() == [1, 0]
    assert micro.target_offsets == (0, 0, 2)
    mixed = replace(batches[0], sequences=batches[0].sequences + batches[1].sequences)
    with pytest.raises(DataError, match="a class for all rows of a, or for none, got rows with and without"):
        ChunkPackingCollator().micro_batches([mixed], max_tokens=100)


def test_padding_to_chunks_is_refused_for_rows_with_one_loss_term() -> None:
    batch = make_batch("a", [4])
    one_term = replace(batch, sequences=tuple(replace(sequence, is_one_term=True) for sequence in batch.sequences))
    for refused, said in (
        (make_batch("a", [4], classes=[1]), "padding has no label, got True for sequence classification"),
        (one_term, "padding has no loss term, got True for a loss with one"),
    ):
        with pytest.raises(ConfigError, match=f"pad_to_chunks must be False, because {said}"):
            ChunkPackingCollator(pad_to_chunks=True).micro_batches([refused], max_tokens=9)


def test_token_types_are_zero_where_a_sequence_has_none() -> None:
    ids = np.array([5, 6, 7])
    with_types = TokenSequence(ids, ids, 0, 1, np.array([0, 1, 1]))
    without = TokenSequence(ids, ids, 1, 0)
    (micro,) = ChunkPackingCollator().micro_batches([TaskBatch("a", 0, 0, (with_types, without))], max_tokens=9)
    assert micro.token_type_ids is not None
    assert micro.token_type_ids.tolist() == [[0, 1, 1, 0, 0, 0]]


# ------------------------------------------------------ as a plain data collator


def test_any_split_into_micro_batches_has_the_gradient_of_one_big_batch_and_a_mean_of_each_has_not() -> None:
    configs = {"a": LoraConfig(r=4, target_modules="all-linear"), "b": LoraConfig(r=2, target_modules=["q_proj"])}
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False).train()
    weights = [weight for name in model.tasks for weight in model.task_parameters(name).values()]
    torch.manual_seed(0)
    for weight in weights:
        weight.data.normal_(0, 0.1)
    batches = [
        make_batch("a", [7, 19, 3, 30, 11, 2], masked=0.6, vocabulary=50),
        make_batch("b", [25, 5, 14], masked=0.1, vocabulary=50),
    ]

    def gradients(steps: list[list[TaskBatch]], max_tokens: int) -> list[torch.Tensor]:
        """Return those of the mean of the losses of some steps."""
        model.zero_grad()
        for own in steps:
            for micro in ChunkPackingCollator().micro_batches(own, max_tokens=max_tokens):
                (model(micro).losses.sum() / len(steps)).backward()
        return [weight.grad.clone() for weight in weights if weight.grad is not None]

    whole = gradients([batches], 10_000)
    assert len(whole) == len(weights)

    def difference(found: list[torch.Tensor]) -> float:
        pairs = zip(found, whole, strict=True)
        return max(((gradient - wanted).norm() / wanted.norm()).item() for gradient, wanted in pairs)

    assert all(difference(gradients([batches], max_tokens)) <= 1e-5 for max_tokens in (1, 20, 37, 60, 100, 150))
    halves = [[replace(batch, sequences=batch.sequences[part::2]) for batch in batches] for part in (0, 1)]
    assert difference(gradients(halves, 10_000)) > 1e-3, "a mean per micro-batch would be noticed"


def test_features_are_grouped_by_task_in_the_order_in_which_tasks_come() -> None:
    rows = [
        {"task": "b", "input_ids": [1, 2, 3], "seed": 5, "step": 2},
        {"task": "a", "input_ids": [4, 5], "labels": [-100, 5]},
        {"task": "b", "input_ids": [6, 7]},
    ]
    batch = ChunkPackingCollator()(rows)
    assert batch.task_names == ("b", "a")
    assert batch.input_ids.tolist() == [[1, 2, 3, 6, 7, 4, 5]]
    assert batch.labels.tolist() == [[2, 3, -100, 7, -100, 5, -100]]
    assert batch.task_seeds == (5, 0)
    assert batch.task_steps == (2, 0)
    assert batch.loss_weights == (1 / 3, 1.0)


# --------------------------------------------- D5: gradients that no split changes


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (
            {},
            (
                "1 must have the token columns of the first row, got columns of tokens none, where the first row has "
                r"weights \['L'\]"
            ),
        ),
        ({"weights": [1.0, 1.0]}, r"weights must be 3 numbers, one for each of input_ids, got shape \[2\]"),
        ({"weights": [1.0, -1.0, 1.0]}, r"weights must be numbers of at least 0, got -1\.0"),
        ({"target_ids": [[1, 2]] * 3}, "target_weights must be a number for each of input_ids, because the row has"),
    ],
)
def test_weights_that_cannot_be_read_or_that_some_rows_lack_are_refused(second: dict[str, Any], match: str) -> None:
    rows = [{"input_ids": [1, 2, 3], "weights": [1.0, 1.0, 0.5]}, {"input_ids": [4, 5, 6], **second}]
    with pytest.raises(DataError, match=match):
        ChunkPackingCollator()(rows)
