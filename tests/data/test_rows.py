"""Rows with classes and columns of numbers for each token: what is read, and what is refused by row and column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence, batch_totals, with_virtual_tokens
from peft_mux.data.tokenize import LABELLED_ROWS, TAGGED_ROWS
from peft_mux.errors import DataError
from peft_mux.modeling.objectives.objective import OBJECTIVES
from tests.data.cases import read


@pytest.mark.parametrize(
    ("first", "second", "allowed"),
    [
        (1, [0, 1], "one class or one value, as in the first row"),
        ([0, 1], 1, "a list of 2 numbers, as in the first row"),
    ],
)
def test_rows_with_a_class_and_rows_with_a_list_of_numbers_do_not_mix(
    first: object, second: object, allowed: str
) -> None:
    rows = [{"input_ids": [1, 2], "label": label} for label in (first, second)]
    with pytest.raises(DataError, match=rf"row 1 column label must be {allowed}.*got .*"):
        read(rows, LABELLED_ROWS)


class _Words:
    """A tokenizer of two tokens a word, between two special tokens."""

    is_fast = True

    def __call__(self, words: list[str], *, is_split_into_words: bool) -> Any:
        class Encoded(dict):  # type: ignore[type-arg]
            def word_ids(self) -> list[int | None]:
                return [None, *[number for number in range(len(words)) for _ in range(2)], None]

        return Encoded(input_ids=[1, *[5] * (2 * len(words)), 2])


def sequence(row: dict[str, Any], form: Any = TAGGED_ROWS, **options: Any) -> Any:
    return read([row], form, _Words(), vocab_size=20, **options)[0]


def test_the_first_token_of_each_word_has_its_class() -> None:
    found = sequence({"tokens": ["a", "b"], "ner_tags": [3, 4]})
    assert found.labels.tolist() == [-100, 3, -100, 4, -100, -100]
    assert found.labels_itself
    assert found.num_targets == 2


IDS = {"input_ids": [4, 5, 6]}
WRONG_CLASSES = [
    ({"tokens": ["a"], "ner_tags": [1, 2]}, "ner_tags must be 1 classes, one for each token or word, got 2"),
    ({"tokens": [], "ner_tags": []}, "a list of words"),
    ({**IDS, "labels": [0, 7, 0]}, "row 0 column labels must be classes from 0 to 2, or -100 for none, got 7"),
    ({"input_ids": [4, 5]}, "no such column"),
]
WRONG_NUMBERS = [
    ({**IDS, "weights": [1.0]}, "shape [1]"),
    ({**IDS, "weights": [1.0, -1.0, 0.0]}, "at least 0"),
    ({**IDS, "weights": [1.0, float("nan"), 0.0]}, "not finite"),
    ({**IDS, "target_ids": [[1, 2]] * 3}, 'because the row has "target_ids"'),
    ({**IDS, "target_ids": [[1, 99]] * 3, "target_weights": [[1, 1]] * 3}, "token id 99"),
    ({**IDS, "target_ids": [[1, 2]] * 3, "target_weights": [[1]] * 3}, "as"),
]


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [(TAGGED_ROWS, *case) for case in WRONG_CLASSES] + [(LANGUAGE_ROWS, *case) for case in WRONG_NUMBERS],
)
def test_wrong_classes_and_numbers_of_tokens_are_named_by_row_and_column(
    form: Any, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match="row 0 column") as error:
        sequence(row, form, num_labels=3)
    assert message in str(error.value)


@pytest.mark.parametrize("ignored", [{"labels": [1, -100, 2, 3]}, {"completion_mask": [1, 0, 1, 1]}])
def test_a_token_that_the_row_ignores_is_no_target_though_it_has_several(ignored: dict[str, Any]) -> None:
    several = {"target_ids": [[7, 8]] * 4, "target_weights": [[1, 1]] * 4}
    found = sequence({"input_ids": [1, 2, 3, 4], **several, **ignored}, LANGUAGE_ROWS)
    assert found.labels.tolist() == [7, -100, 7, 7]
    assert batch_totals(TaskBatch("a", 0, 0, (found,)))["target_weights"] == 4


def taught(num_words: int, logprob: float = -2.0) -> dict[str, Any]:
    words = list(range(1, num_words + 1))
    return {"input_ids": [1, 2, 3], "teacher_ids": [words] * 3, "teacher_logprobs": [[logprob] * num_words] * 3}


@pytest.mark.parametrize(
    ("objective", "rows", "match"),
    [
        (
            "distill",
            [taught(2), taught(3)],
            "row 1 column teacher_ids must be 2 numbers per token, as in the first row, got 3",
        ),
        (
            "distill",
            [taught(2, 0.5)],
            r"row 0 column teacher_logprobs must be natural logarithms of probabilities, at most 0, got 0\.5",
        ),
        (
            "policy",
            [{"input_ids": [1, 2], "advantages": 1.0, "old_logprobs": [-1.0, 0.3]}],
            r"row 0 column old_logprobs must be natural logarithms of probabilities, at most 0, got 0\.3",
        ),
    ],
)
def test_rows_of_other_widths_and_probabilities_for_their_logarithms_are_refused(
    objective: str, rows: list[dict[str, Any]], match: str
) -> None:
    with pytest.raises(DataError, match=match):
        read(rows, OBJECTIVES[objective].row_form)
    assert len(read([taught(1, 1e-3)], OBJECTIVES["distill"].row_form)) == 1, "rounding of a logarithm is let be"


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
    made = with_virtual_tokens(row, (IGNORE_INDEX,) * 2)
    assert made.input_ids.tolist() == [0, 0, 5, 6, 7, 0, 0, 8, 9]
    x = IGNORE_INDEX
    assert made.labels.tolist() == [x, x, 5, 6, 7, x, x, 8, 9]
    assert made.token_columns["weights"].tolist() == [0, 0, 0, 1, 2, 0, 0, 3, 4]
    assert (made.starts, made.num_virtual_tokens, made.row_values, made.row) == ((5,), 2, {"m": 2.0}, 3)
