"""Rows with a class for each token or word, and columns with a number for each token."""

from __future__ import annotations

from typing import Any

import pytest

from peft_mux.data.dataset import tokenize_dataset
from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.data.task_batch import TaskBatch, batch_totals
from peft_mux.data.tokenize import TAGGED_ROWS, TokenizeOptions
from peft_mux.errors import DataError


class _Words:
    """A tokenizer of two tokens a word, between two special tokens."""

    is_fast = True

    def __call__(self, words: list[str], *, is_split_into_words: bool) -> Any:
        class Encoded(dict):  # type: ignore[type-arg]
            def word_ids(self) -> list[int | None]:
                return [None, *[number for number in range(len(words)) for _ in range(2)], None]

        return Encoded(input_ids=[1, *[5] * (2 * len(words)), 2])


def sequence(row: dict[str, Any], form: Any = TAGGED_ROWS, **options: Any) -> Any:
    settings = TokenizeOptions(task="a", max_length=16, vocab_size=20, row_form=form, **options)
    return tokenize_dataset([row], options=settings, tokenizer=_Words())[0]


def test_the_first_token_of_each_word_has_its_class() -> None:
    found = sequence({"tokens": ["a", "b"], "ner_tags": [3, 4]})
    assert found.labels.tolist() == [-100, 3, -100, 4, -100, -100]
    assert found.labels_itself
    assert found.num_targets == 2


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"tokens": ["a"], "ner_tags": [1, 2]}, "2 classes; allowed: 1"),
        ({"tokens": [], "ner_tags": []}, "a list of words"),
        ({"input_ids": [4, 5], "labels": [0, 7]}, "got 7; allowed: classes from 0 to 2"),
        ({"input_ids": [4, 5]}, "no such column"),
    ],
)
def test_wrong_classes_are_named_by_row_and_column(row: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match="row 0 column") as error:
        sequence(row, num_labels=3)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"weights": [1.0]}, "shape [1]; allowed: 3 numbers"),
        ({"weights": [1.0, -1.0, 0.0]}, "at least 0"),
        ({"weights": [1.0, float("nan"), 0.0]}, "not finite"),
        ({"target_ids": [[1, 2]] * 3}, 'one beside "target_ids"'),
        ({"target_ids": [[1, 99]] * 3, "target_weights": [[1, 1]] * 3}, "token id 99"),
        ({"target_ids": [[1, 2]] * 3, "target_weights": [[1]] * 3}, "as"),
    ],
)
def test_wrong_numbers_of_tokens_are_named_by_row_and_column(columns: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match="row 0 column") as error:
        sequence({"input_ids": [4, 5, 6], **columns}, LANGUAGE_ROWS)
    assert told in str(error.value)


@pytest.mark.parametrize("ignored", [{"labels": [1, -100, 2, 3]}, {"completion_mask": [1, 0, 1, 1]}])
def test_a_token_that_the_row_ignores_is_no_target_though_it_has_several(ignored: dict[str, Any]) -> None:
    several = {"target_ids": [[7, 8]] * 4, "target_weights": [[1, 1]] * 4}
    found = sequence({"input_ids": [1, 2, 3, 4], **several, **ignored}, LANGUAGE_ROWS)
    assert found.labels.tolist() == [7, -100, 7, 7]
    assert batch_totals(TaskBatch("a", 0, 0, (found,)))["target_weights"] == 4
