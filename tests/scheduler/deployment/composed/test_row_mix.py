"""Whose rows the sequences of a bucket are."""

from __future__ import annotations

import pytest

from peft_mux.scheduler.deployment.composed import RowMix
from peft_mux.scheduler.deployment.space import TaskLengths

MIX = RowMix(
    [TaskLengths("chat", (10, 20, 30, 40), 4), TaskLengths("qa", (32,), 2), TaskLengths("books", (90, 100), 2)]
)


def test_the_whole_batch_is_every_row_of_every_task() -> None:
    assert MIX.rows([64, 128], [6, 2]) == ((10, 20, 30, 40), (32, 32), (90, 100))


def test_a_part_of_a_bucket_has_rows_of_each_task_in_proportion() -> None:
    chat, qa, books = MIX.rows([64, 128], [3, 0])
    assert (len(chat), len(qa), books) == (2, 1, ())
    assert MIX.rows([64, 128], [0, 1]) == ((), (), (100,))


def test_more_sequences_than_the_sample_has_repeat_its_rows() -> None:
    chat, qa, _ = MIX.rows([64, 128], [12, 0])
    assert (chat, qa) == ((10, 10, 20, 20, 30, 30, 40, 40), (32, 32, 32, 32))


def test_sequences_of_a_length_that_nothing_has_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences are padded to 80 tokens, which no sampled row is"):
        MIX.rows([64, 80, 128], [0, 2, 0])
