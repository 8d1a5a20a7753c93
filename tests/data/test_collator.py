"""Collation: every token once, loss weights that add up to a mean, and gradients that no split changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence
from peft_mux.errors import ConfigError, DataError
from peft_mux.modeling.model import MultiTaskPeftModel

PROPERTY = settings(deadline=None, max_examples=80)


def make_batch(
    name: str,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    masked: float = 0.3,
    classes: Sequence[int | float] | None = None,
    vocabulary: int = 10_000,
) -> TaskBatch:
    """Return random sequences; `masked` of the labels carry no loss."""
    rng = np.random.default_rng([seed, *name.encode()])
    sequences = []
    for row, length in enumerate(lengths):
        ids = rng.integers(1, vocabulary, length)
        labels = np.where(rng.random(length) < masked, IGNORE_INDEX, ids)
        sequences.append(TokenSequence(ids, labels, row, None if classes is None else classes[row]))
    return TaskBatch(name, step=3, seed=7, sequences=tuple(sequences))


@st.composite
def global_batches(draw: st.DrawFn) -> tuple[list[TaskBatch], int]:
    lengths = st.lists(st.integers(1, 90), min_size=1, max_size=9)
    tasks = draw(st.lists(lengths, min_size=1, max_size=4))
    seed = draw(st.integers(0, 2**16))
    batches = [make_batch(f"task{index}", part, seed=seed) for index, part in enumerate(tasks)]
    return batches, draw(st.integers(1, 400))


def sequences_of(batch: MuxBatch) -> list[tuple[str, slice]]:
    """Return task and tokens of each sequence of a stream."""
    bounds = batch.cu_seqlens.tolist()
    owners = [
        name
        for index, name in enumerate(batch.task_names)
        for _ in range(batch.sequence_offsets[index], batch.sequence_offsets[index + 1])
    ]
    return list(zip(owners, map(slice, bounds[:-1], bounds[1:]), strict=True))


@PROPERTY
@given(global_batches(), st.sampled_from([None, 1, 16, 64]))
def test_every_token_is_in_exactly_one_micro_batch_at_the_place_of_its_data_order(
    drawn: tuple[list[TaskBatch], int], size: int | None
) -> None:
    batches, max_tokens = drawn
    micro_batches = ChunkPackingCollator(chunk_size=size).micro_batches(batches, max_tokens=max_tokens)
    for batch in batches:
        found: dict[int, int] = {}
        for micro in micro_batches:
            if batch.task not in micro.task_names:
                continue
            index = micro.task_names.index(batch.task)
            part = slice(micro.task_offsets[index], micro.task_offsets[index + 1])
            places, ids = micro.token_places[part].tolist(), micro.input_ids[0, part].tolist()
            assert not found.keys() & set(places), "a token came twice"
            found.update(zip(places, ids, strict=True))
        everything = np.concatenate([sequence.input_ids for sequence in batch.sequences]).tolist()
        assert [found[place] for place in range(len(everything))] == everything
        assert len(found) == len(everything)


@PROPERTY
@given(global_batches())
def test_positions_restart_and_labels_are_shifted_within_each_sequence(
    drawn: tuple[list[TaskBatch], int],
) -> None:
    batches, max_tokens = drawn
    by_place = {
        (batch.task, int(start)): sequence
        for batch in batches
        for sequence, start in zip(batch.sequences, np.cumsum([0, *map(len, batch.sequences)])[:-1], strict=True)
    }
    seen = 0
    for micro in ChunkPackingCollator().micro_batches(batches, max_tokens=max_tokens):
        for name, part in sequences_of(micro):
            sequence = by_place[name, int(micro.token_places[part][0])]
            assert micro.position_ids[0, part].tolist() == list(range(len(sequence)))
            assert micro.labels[0, part].tolist() == [*sequence.labels[1:].tolist(), IGNORE_INDEX]
            seen += 1
    assert seen == len(by_place)


@PROPERTY
@given(global_batches())
def test_targets_times_weights_add_up_to_one_for_every_task(drawn: tuple[list[TaskBatch], int]) -> None:
    batches, max_tokens = drawn
    totals = {batch.task: 0.0 for batch in batches}
    for micro in ChunkPackingCollator().micro_batches(batches, max_tokens=max_tokens):
        for index, name in enumerate(micro.task_names):
            part = slice(micro.task_offsets[index], micro.task_offsets[index + 1])
            num_targets = int((micro.labels[0, part] != IGNORE_INDEX).sum())
            totals[name] += num_targets * micro.loss_weights[index]
    for batch in batches:
        assert totals[batch.task] == pytest.approx(1.0 if batch.num_targets else 0.0, rel=1e-12)


@PROPERTY
@given(global_batches())
def test_micro_batches_keep_to_their_tokens_their_order_and_their_offsets(
    drawn: tuple[list[TaskBatch], int],
) -> None:
    batches, max_tokens = drawn
    order = [batch.task for batch in batches]
    longest = max(len(sequence) for batch in batches for sequence in batch.sequences)
    micro_batches = ChunkPackingCollator().micro_batches(batches, max_tokens=max_tokens)
    for micro in micro_batches:
        assert micro.num_tokens <= max(max_tokens, longest)
        assert list(micro.task_names) == [name for name in order if name in micro.task_names]
        assert micro.task_offsets[0] == micro.sequence_offsets[0] == 0
        assert micro.num_tokens == micro.input_ids.shape[1] == sum(micro.sequence_lengths)
        assert micro.sequence_offsets[-1] == micro.num_sequences == len(micro.cu_seqlens) - 1
        assert micro.cu_seqlens.dtype == torch.int32
        assert set(micro.task_steps) == {3}
        assert set(micro.task_seeds) == {7}
        assert micro.num_padding_tokens == 0
    if sum(batch.num_tokens for batch in batches) <= max_tokens:
        assert len(micro_batches) == 1, "what fits is one micro-batch"


def test_a_row_that_is_too_long_does_not_let_shorter_ones_exceed_the_limit_together() -> None:
    batch = make_batch("a", [300, 60, 60, 60, 60])
    micro_batches = ChunkPackingCollator().micro_batches([batch], max_tokens=100)
    assert all(micro.num_tokens <= 100 or micro.num_sequences == 1 for micro in micro_batches)


def test_collation_is_deterministic() -> None:
    batches = [make_batch("a", [5, 9, 30, 2]), make_batch("b", [40, 41])]
    first, second = (ChunkPackingCollator().micro_batches(batches, max_tokens=50) for _ in range(2))
    assert len(first) == len(second) > 1
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert one.task_offsets == other.task_offsets


@PROPERTY
@given(global_batches(), st.sampled_from([8, 64]))
def test_padding_fills_each_task_up_to_whole_chunks_as_one_sequence_without_targets(
    drawn: tuple[list[TaskBatch], int], size: int
) -> None:
    batches, max_tokens = drawn
    tokens = {batch.task: batch.num_tokens for batch in batches}
    collator = ChunkPackingCollator(chunk_size=size, pad_to_chunks=True, pad_token_id=9_999_999)
    plain = ChunkPackingCollator(chunk_size=size).micro_batches(batches, max_tokens=max_tokens)
    for micro, bare in zip(collator.micro_batches(batches, max_tokens=max_tokens), plain, strict=True):
        widths = np.diff(micro.task_offsets)
        assert (widths % size == 0).all()
        assert (widths - np.diff(bare.task_offsets) < size).all()
        padding = micro.input_ids[0] == 9_999_999
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


# ------------------------------------------------------------ classification


def test_class_labels_follow_their_sequences_and_count_as_one_target_each() -> None:
    batches = [
        make_batch("a", [4, 30, 7], classes=[2, 0, 1]),
        make_batch("b", [25, 3], classes=[1, 0]),
    ]
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


def test_a_stream_of_rows_with_and_without_a_class_is_refused() -> None:
    batches = [make_batch("a", [4], classes=[1]), make_batch("b", [4])]
    with pytest.raises(DataError, match="with and without a class"):
        ChunkPackingCollator().micro_batches(batches, max_tokens=100)


def test_padding_to_chunks_is_refused_for_classification() -> None:
    with pytest.raises(ConfigError, match="pad_to_chunks: got True for sequence classification"):
        ChunkPackingCollator(pad_to_chunks=True).micro_batches([make_batch("a", [4], classes=[1])], max_tokens=9)


def test_padding_to_chunks_is_refused_for_losses_with_one_term_for_each_sequence() -> None:
    batch = make_batch("a", [4])
    whole = dataclasses.replace(
        batch, sequences=tuple(dataclasses.replace(s, is_one_term=True) for s in batch.sequences)
    )
    with pytest.raises(ConfigError, match="pad_to_chunks: got True for a loss of whole sequences"):
        ChunkPackingCollator(pad_to_chunks=True).micro_batches([whole], max_tokens=9)


def test_token_types_are_zero_where_a_sequence_has_none() -> None:
    ids = np.array([5, 6, 7])
    with_types = TokenSequence(ids, ids, 0, 1, np.array([0, 1, 1]))
    without = TokenSequence(ids, ids, 1, 0)
    (micro,) = ChunkPackingCollator().micro_batches([TaskBatch("a", 0, 0, (with_types, without))], max_tokens=9)
    assert micro.token_type_ids is not None
    assert micro.token_type_ids.tolist() == [[0, 1, 1, 0, 0, 0]]


# ------------------------------------------------------ as a plain data collator


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


@pytest.fixture(scope="module")
def mux_model() -> MultiTaskPeftModel:
    """Two tasks on a tiny random Llama, with adapters that do something."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    configs = {
        "a": LoraConfig(r=4, target_modules="all-linear"),
        "b": LoraConfig(r=2, target_modules=["q_proj"]),
    }
    model = MultiTaskPeftModel(LlamaForCausalLM(config), configs)
    with torch.no_grad():
        for name in model.tasks:
            for parameter in model.task_parameters(name).values():
                parameter.normal_(0, 0.1)
    return model.train()


def gradients(model: MultiTaskPeftModel, batches: list[TaskBatch], max_tokens: int) -> dict[str, torch.Tensor]:
    """Return the gradient of every task's every weight, accumulated over all micro-batches."""
    model.zero_grad()
    micro_batches = ChunkPackingCollator().micro_batches(batches, max_tokens=max_tokens)
    for micro in micro_batches:
        model(micro).losses.sum().backward()
    found = {
        f"{name}.{key}": parameter.grad.clone()
        for name in model.tasks
        for key, parameter in model.task_parameters(name).items()
        if parameter.grad is not None
    }
    return {"num": torch.tensor(len(micro_batches)), **found}


@pytest.mark.parametrize("max_tokens", [1, 20, 37, 60, 100, 150])
def test_any_split_into_micro_batches_has_the_gradient_of_one_big_batch(
    mux_model: MultiTaskPeftModel, max_tokens: int
) -> None:
    batches = [
        make_batch("a", [7, 19, 3, 30, 11, 2], masked=0.6, vocabulary=50),
        make_batch("b", [25, 5, 14], masked=0.1, vocabulary=50),
    ]
    whole, parts = gradients(mux_model, batches, 10_000), gradients(mux_model, batches, max_tokens)
    assert whole.pop("num") == 1
    assert (parts.pop("num") > 1) == (sum(batch.num_tokens for batch in batches) > max_tokens)
    assert whole.keys() == parts.keys()
    assert len(whole) == sum(len(mux_model.task_parameters(name)) for name in "ab")
    for key, gradient in whole.items():
        assert gradient.norm() > 0, key
        assert (parts[key] - gradient).norm() <= 1e-5 * gradient.norm(), key


def test_a_mean_per_micro_batch_would_be_noticed(mux_model: MultiTaskPeftModel) -> None:
    batches = [make_batch("a", [7, 19, 3, 30, 11, 2], masked=0.6, vocabulary=50)]
    whole = gradients(mux_model, batches, 10_000)
    mux_model.zero_grad()
    for sequence in batches[0].sequences:
        alone = TaskBatch("a", 3, 7, (sequence,))
        if alone.num_targets:
            (micro,) = ChunkPackingCollator().micro_batches([alone], max_tokens=100)
            (mux_model(micro).losses.sum() / len(batches[0].sequences)).backward()
    key, parameter = next(iter(mux_model.task_parameters("a").items()))
    assert (parameter.grad - whole[f"a.{key}"]).norm() > 1e-3 * whole[f"a.{key}"].norm()


@pytest.mark.parametrize(
    ("second", "match"),
    [
        ({}, "row 1: got columns of tokens none, where the first row has weights"),
        ({"weights": [1.0, 1.0]}, "row 1 column weights: got shape .2.; allowed: 3 numbers"),
        ({"weights": [1.0, -1.0, 1.0]}, "row 1 column weights: got -1.0"),
        ({"target_ids": [[1, 2]] * 3}, "row 1 column target_weights: got no such column, or None; allowed: one beside"),
    ],
)
def test_weights_that_cannot_be_read_or_that_some_rows_lack_are_refused(second: dict[str, Any], match: str) -> None:
    rows = [{"input_ids": [1, 2, 3], "weights": [1.0, 1.0, 0.5]}, {"input_ids": [4, 5, 6], **second}]
    with pytest.raises(DataError, match=match):
        ChunkPackingCollator()(rows)
