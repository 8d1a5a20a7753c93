"""Virtual tokens stand before every sequence of a row, and whatever a row says of its tokens moves with them."""

from __future__ import annotations

import numpy as np

from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence, ignored, with_virtual_tokens


def test_each_sequence_of_a_row_begins_with_virtual_tokens() -> None:
    ids = np.array([5, 6, 7, 8, 9])
    row = TokenSequence(
        ids,
        ids.copy(),
        3,
        is_one_term=True,
        starts=(3,),
        token_columns={"weights": np.arange(5.0)},
        row_values={"m": 2.0},
    )
    made = with_virtual_tokens(row, ignored(2))
    assert made.input_ids.tolist() == [0, 0, 5, 6, 7, 0, 0, 8, 9]
    x = IGNORE_INDEX
    assert made.labels.tolist() == [x, x, 5, 6, 7, x, x, 8, 9]
    assert made.token_columns["weights"].tolist() == [0, 0, 0, 1, 2, 0, 0, 3, 4]
    assert (made.starts, made.num_virtual_tokens, made.row_values, made.row) == ((5,), 2, {"m": 2.0}, 3)


def test_a_row_without_a_prompt_stays_as_it_is() -> None:
    row = TokenSequence(np.array([5, 6]), np.array([5, 6]), 0)
    assert with_virtual_tokens(row, ()) is row
