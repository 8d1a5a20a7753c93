"""Rows of classes: one class or one value for all rows of a dataset, or a list of numbers for all of them."""

from __future__ import annotations

import pytest

from peft_mux.data.dataset import tokenize_dataset
from peft_mux.data.tokenize import LABELLED_ROWS, TokenizeOptions
from peft_mux.errors import DataError


@pytest.mark.parametrize(
    ("first", "second", "allowed"),
    [(1, [0, 1], "one class or one value, as before"), ([0, 1], 1, "a list of 2 numbers, as before")],
)
def test_rows_with_a_class_and_rows_with_a_list_of_numbers_do_not_mix(
    first: object, second: object, allowed: str
) -> None:
    rows = [{"input_ids": [1, 2], "label": label} for label in (first, second)]
    settings = TokenizeOptions(task="a", max_length=16, row_form=LABELLED_ROWS)
    with pytest.raises(DataError, match=f"row 1 column label: got .*; allowed: {allowed}"):
        tokenize_dataset(rows, options=settings, tokenizer=None)
