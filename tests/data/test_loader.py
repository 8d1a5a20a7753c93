"""The order of rows: a pure function of seed and step, that nothing else can move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.dataset import TaskLoader
from peft_mux.data.task_batch import TaskBatch
from tests.data.cases import read

PROPERTY = settings(deadline=None, max_examples=30)


def make_loader(
    num_rows: int, batch_size: int, *, seed: int = 0, shuffle: bool = True, task: str = "own"
) -> TaskLoader:
    rows = [{"input_ids": [row + 1, row + 2]} for row in range(num_rows)]
    return TaskLoader(read(rows), task=task, batch_size=batch_size, seed=seed, shuffle=shuffle)


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


def test_an_epoch_may_leave_out_its_last_batch_and_put_rows_of_similar_length_together() -> None:
    rows = [{"input_ids": [1] * (2 + row % 40)} for row in range(162)]
    settings: dict[str, Any] = {"task": "own", "batch_size": 4, "seed": 0, "drops_last": True}
    loader = TaskLoader(read(rows), shuffle="group_by_length", **settings)
    assert loader.steps_per_epoch == 40
    orders = [epoch_rows(loader, epoch) for epoch in range(2)]
    assert all(len(set(order)) == 160 for order in orders)
    assert orders[0] != orders[1]
    spreads = [np.ptp([len(row) for row in loader.batch(step).sequences]) for step in range(80)]
    assert np.median(spreads) < 8, "in batches of any rows it is about 25"
    assert loader.tokens_per_step == pytest.approx(4 * np.mean(loader.sample_lengths))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    loader = make_loader(30, 4)
    orders = [tuple(epoch_rows(loader, epoch)) for epoch in range(3)]
    orders += [tuple(epoch_rows(make_loader(30, 4, seed=seed), 0)) for seed in (1, 2)]
    assert len(set(orders)) == 5


def test_the_order_is_the_one_of_released_versions() -> None:
    # Runs resume across versions only while this order stays.
    loader = make_loader(10, 3, seed=7)
    assert loader.order(0).tolist() == [5, 0, 9, 6, 2, 1, 3, 8, 7, 4]
    assert loader.order(1).tolist() == [2, 6, 5, 1, 8, 9, 0, 7, 4, 3]


def test_datasets_that_were_mixed_before_keep_the_order_of_the_mix() -> None:
    from datasets import Dataset, interleave_datasets

    parts = [Dataset.from_list([{"input_ids": [first + row, 1]} for row in range(8)]) for first in (1, 100)]
    mixed = interleave_datasets(parts, probabilities=[0.8, 0.2], seed=0, stopping_strategy="all_exhausted")
    batch = TaskLoader(read(mixed), task="own", batch_size=len(mixed), seed=0, shuffle=False).batch(0)
    assert [int(sequence.input_ids[0]) for sequence in batch.sequences] == [row["input_ids"][0] for row in mixed]
