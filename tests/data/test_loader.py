"""The order of rows: a pure function of seed and step, that nothing else can move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.batch import TaskBatch
from peft_mux.data.dataset import open_rows, tokenize_dataset
from peft_mux.data.loader import TaskLoader
from peft_mux.data.streams.loader import StreamLoader
from peft_mux.data.tokenize import TokenizeOptions
from peft_mux.errors import DataError

PROPERTY = settings(deadline=None, max_examples=60)
OPTIONS = TokenizeOptions(task="own", max_length=64)


def make_loader(
    num_rows: int, batch_size: int, *, seed: int = 0, shuffle: bool = True, task: str = "own"
) -> TaskLoader:
    rows = [{"input_ids": [row + 1, row + 2]} for row in range(num_rows)]
    dataset = tokenize_dataset(rows, options=OPTIONS, tokenizer=None)
    return TaskLoader(dataset, task=task, batch_size=batch_size, seed=seed, shuffle=shuffle)


def rows_of(batch: TaskBatch) -> list[int]:
    return [sequence.row for sequence in batch.sequences]


def epoch_rows(loader: TaskLoader, epoch: int) -> list[int]:
    steps = range(epoch * loader.steps_per_epoch, (epoch + 1) * loader.steps_per_epoch)
    return [row for step in steps for row in rows_of(loader.batch(step))]


@PROPERTY
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**63 - 1), st.booleans())
def test_each_epoch_visits_every_row_once_and_only_its_last_batch_is_smaller(
    num_rows: int, batch_size: int, seed: int, shuffle: bool
) -> None:
    loader = make_loader(num_rows, batch_size, seed=seed, shuffle=shuffle)
    assert loader.steps_per_epoch == -(-num_rows // batch_size)
    for epoch in range(3):
        assert sorted(epoch_rows(loader, epoch)) == list(range(num_rows))
        first = epoch * loader.steps_per_epoch
        sizes = [len(loader.batch(first + step).sequences) for step in range(loader.steps_per_epoch)]
        assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
        assert sizes[-1] == (num_rows - 1) % batch_size + 1


@PROPERTY
@given(st.integers(1, 30), st.integers(1, 7), st.lists(st.integers(0, 60), min_size=1, max_size=30))
def test_a_batch_depends_on_its_step_alone_whatever_was_asked_for_before(
    num_rows: int, batch_size: int, steps: list[int]
) -> None:
    loader = make_loader(num_rows, batch_size, seed=3)
    for step in steps:
        fresh = make_loader(num_rows, batch_size, seed=3, task="another")
        assert rows_of(loader.batch(step)) == rows_of(fresh.batch(step))
        assert (loader.batch(step).step, loader.batch(step).seed) == (step, 3)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    loader = make_loader(30, 4)
    orders = [tuple(epoch_rows(loader, epoch)) for epoch in range(3)]
    orders += [tuple(epoch_rows(make_loader(30, 4, seed=seed), 0)) for seed in (1, 2)]
    assert len(set(orders)) == 5


def test_without_shuffling_every_epoch_is_in_dataset_order() -> None:
    loader = make_loader(10, 3, shuffle=False)
    assert [epoch_rows(loader, epoch) for epoch in range(3)] == [list(range(10))] * 3


def test_the_order_is_the_one_of_released_versions() -> None:
    # Runs resume across versions only while this order stays.
    loader = make_loader(10, 3, seed=7)
    assert loader.order(0).tolist() == [5, 0, 9, 6, 2, 1, 3, 8, 7, 4]
    assert loader.order(1).tolist() == [2, 6, 5, 1, 8, 9, 0, 7, 4, 3]


def test_two_loaders_in_turn_do_not_disturb_each_other() -> None:
    one, other = make_loader(20, 3, seed=1), make_loader(15, 4, seed=2)
    alone = [rows_of(make_loader(20, 3, seed=1).batch(step)) for step in range(15)]
    together = []
    for step in range(15):
        other.batch(14 - step)
        together.append(rows_of(one.batch(step)))
    assert together == alone


def test_tokens_per_step_and_lengths_are_those_of_the_rows() -> None:
    loader = make_loader(10, 4)
    assert loader.sample_lengths == [2] * 10
    assert loader.tokens_per_step == pytest.approx(20 / 3)


# ----------------------------------------------------------------- streams


class Rows:
    """A stream that can be read again and counts how often it was."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.num_reads = 0

    def __iter__(self) -> Any:
        self.num_reads += 1
        return iter(self.rows)


def make_stream(stream: Any, batch_size: int = 3, *, timeout_s: float = 60.0) -> StreamLoader:
    opener = partial(open_rows, options=OPTIONS, tokenizer=None)
    where = "tasks.own.train_dataset"
    return StreamLoader(stream, opener, where=where, task="own", batch_size=batch_size, seed=5, timeout_s=timeout_s)


def first_tokens(batch: TaskBatch) -> list[int]:
    return [int(sequence.input_ids[0]) for sequence in batch.sequences]


def hub_stream(num_rows: int = 10) -> Any:
    from datasets import Dataset

    rows = [{"input_ids": [row + 1, row + 2]} for row in range(num_rows)]
    return Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=3, buffer_size=4)


def plain_stream() -> Rows:
    return Rows([{"input_ids": [row + 1, row + 2]} for row in range(10)])


@pytest.mark.parametrize("make", [plain_stream, hub_stream])
def test_reading_on_seeking_and_reading_again_give_the_same_batches(make: Callable[[], Any]) -> None:
    sequential = make_stream(make())
    batches = [first_tokens(sequential.batch(step)) for step in range(9)]
    assert all(len(batch) == 3 for batch in batches)
    for step in (8, 3, 0, 5, 5):
        assert first_tokens(make_stream(make()).batch(step)) == batches[step], "a fresh loader that seeks"
        assert first_tokens(sequential.batch(step)) == batches[step], "the same loader, going back"


def test_a_stream_that_ends_is_read_anew_without_losing_a_row() -> None:
    stream = plain_stream()
    loader = make_stream(stream)
    tokens = [token for step in range(10) for token in first_tokens(loader.batch(step))]
    assert tokens == list(range(1, 11)) * 3
    assert stream.num_reads == 3


def test_a_shuffled_stream_has_another_order_in_its_next_epoch() -> None:
    loader = make_stream(hub_stream(12))
    epochs = [
        [token for step in range(4 * epoch, 4 * epoch + 4) for token in first_tokens(loader.batch(step))]
        for epoch in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, 13))
    assert epochs[0] != epochs[1]


def test_a_stream_has_no_epochs_and_estimates_from_its_first_batch() -> None:
    loader = make_stream(plain_stream())
    assert loader.steps_per_epoch is None
    assert loader.sample_lengths == [2, 2, 2]
    assert loader.tokens_per_step == 6
    assert loader.batch(0).seed == 5


def test_a_bad_row_of_a_stream_is_named_when_it_comes() -> None:
    loader = make_stream(Rows([{"input_ids": [1, 2]}] * 4 + [{"input_ids": None}]))
    assert len(loader.batch(0).sequences) == 3
    with pytest.raises(DataError, match=r"tasks\.own\.train_dataset row 4 column input_ids"):
        loader.batch(1)


def test_a_stream_without_usable_rows_is_refused_rather_than_read_for_ever() -> None:
    with pytest.raises(DataError, match="a stream without rows"):
        make_stream(Rows([])).batch(0)
    masked = [{"input_ids": [1, 2], "labels": [-100, -100]}]
    with pytest.raises(DataError, match="a stream without usable rows"):
        make_stream(Rows(masked)).batch(0)
