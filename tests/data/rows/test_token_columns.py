"""Columns with a number, or several, for each token: what of them is refused by row and column."""

from __future__ import annotations

from typing import Any

import pytest

from peft_mux.data.dataset import tokenize_dataset
from peft_mux.data.tokenize import TokenizeOptions
from peft_mux.errors import DataError
from peft_mux.modeling.objectives.objective import OBJECTIVES


def taught(num_words: int, logprob: float = -2.0) -> dict[str, Any]:
    words = list(range(1, num_words + 1))
    return {"input_ids": [1, 2, 3], "teacher_ids": [words] * 3, "teacher_logprobs": [[logprob] * num_words] * 3}


@pytest.mark.parametrize(
    ("objective", "rows", "match"),
    [
        ("distill", [taught(2), taught(3)], "row 1 column teacher_ids: got 3 numbers a token; allowed: 2, as in the"),
        ("distill", [taught(2, 0.5)], "row 0 column teacher_logprobs: got 0.5; allowed: natural logarithms"),
        (
            "policy",
            [{"input_ids": [1, 2], "advantages": 1.0, "old_logprobs": [-1.0, 0.3]}],
            "row 0 column old_logprobs: got 0.3",
        ),
    ],
)
def test_rows_of_other_widths_and_probabilities_for_their_logarithms_are_refused(
    objective: str, rows: list[dict[str, Any]], match: str
) -> None:
    settings = TokenizeOptions(task="a", max_length=16, row_form=OBJECTIVES[objective].row_form)
    with pytest.raises(DataError, match=match):
        tokenize_dataset(rows, options=settings, tokenizer=None)


def test_rounding_of_a_log_probability_above_zero_is_let_be() -> None:
    settings = TokenizeOptions(task="a", max_length=16, row_form=OBJECTIVES["distill"].row_form)
    assert len(tokenize_dataset([taught(1, 1e-3)], options=settings, tokenizer=None)) == 1
