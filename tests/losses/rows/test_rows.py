"""Rows of preferences: what is refused by row and column, what is left out, and rows that are tokens already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from peft_mux.data.dataset import open_rows
from peft_mux.data.formats import RowForm
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.data.tokenize import TokenizeOptions
from peft_mux.demo.small_llama import make_tokenizer
from peft_mux.errors import ConfigError, DataError
from peft_mux.losses.preference_rows import ODDS_ROWS, PAIR_ROWS, SCORED_ROWS, SINGLE_ROWS
from tests.data.cases import read

PAIR = {"prompt": "which color", "chosen": " blue", "rejected": " green"}
SINGLE = {"prompt": "which color", "completion": " blue", "label": True}
MESSAGES = [{"role": "user", "content": "which color"}]
TURN = {"from": "gpt", "value": "blue"}
TOKENS = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6], "rejected_ids": [7, 8]}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(["which color is blue", "it is green"])


@pytest.mark.parametrize(
    ("form", "row", "column", "match"),
    [
        (PAIR_ROWS, {**PAIR, "chosen": None}, "chosen", "a string"),
        (PAIR_ROWS, {**PAIR, "chosen": 7}, "chosen", "a string"),
        (PAIR_ROWS, {"conversations": [TURN], "chosen": TURN, "rejected": TURN}, "chosen", 'row_format="sharegpt"'),
        (PAIR_ROWS, {"conversations": [], "chosen": [TURN], "rejected": [TURN]}, "chosen", 'row_format="sharegpt"'),
        (PAIR_ROWS, {**PAIR, "rejected": MESSAGES}, "rejected", "a text, as chosen is"),
        (PAIR_ROWS, {**PAIR, "prompt": MESSAGES}, "prompt", "a text, as chosen is"),
        (PAIR_ROWS, {**PAIR, "prompt": 3.0}, "prompt", "a string"),
        (PAIR_ROWS, {"chosen": "", "rejected": "blue"}, "chosen", "begins with the prompt"),
        (PAIR_ROWS, {"prompt": "which", "chosen": "blue"}, "rejected", "in every row"),
        (PAIR_ROWS, {**PAIR, "tools": [{"name": "search"}]}, "tools", "empty"),
        (PAIR_ROWS, {**PAIR, "images": ["a.png"]}, "images", "only text"),
        (PAIR_ROWS, {**PAIR, "ref_chosen_logps": -1.0}, "ref_chosen_logps", "or in none"),
        (ODDS_ROWS, {**PAIR, "chosen": ["blue"]}, "chosen", "role"),
        (SINGLE_ROWS, {**SINGLE, "label": 2}, "label", "True for a good answer"),
        (SINGLE_ROWS, {**SINGLE, "label": 0.5}, "label", "True for a good answer"),
        (SINGLE_ROWS, {**SINGLE, "label": None}, "label", "True for a good answer"),
        (SINGLE_ROWS, {**SINGLE, "completion": MESSAGES}, "completion", "a text, as the prompt is"),
        (SINGLE_ROWS, {**SINGLE, "ref_logps": float("nan")}, "ref_logps", "in none"),
        (SCORED_ROWS, {"chosen": "a", "rejected": None}, "rejected", "a string"),
        (SCORED_ROWS, {"chosen": "a", "rejected": MESSAGES}, "rejected", "a text, as chosen is"),
        (SCORED_ROWS, {"chosen": "a", "rejected": "b", "margin": 1.0}, "margin", "or in none"),
    ],
)
def test_a_cell_that_cannot_be_trained_on_is_refused_by_row_and_column(
    form: RowForm, row: dict[str, Any], column: str, match: str, tokenizer: Any
) -> None:
    first = {PAIR_ROWS: PAIR, ODDS_ROWS: PAIR, SINGLE_ROWS: SINGLE, SCORED_ROWS: PAIR}[form]
    with pytest.raises(DataError, match=f"tasks.a.train_dataset row 1 column {column} must be .*{match}"):
        read([first, row], form, tokenizer)


def test_numbers_that_some_rows_lack_or_that_are_none_are_refused(tokenizer: Any) -> None:
    row = {**PAIR, "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}
    values = read([row, row], PAIR_ROWS, tokenizer)[1].row_values
    assert (values["ref_chosen_logps"], values["ref_rejected_logps"]) == (-1.0, -2.0)
    for bad in (PAIR, {**row, "ref_rejected_logps": "-2"}, {**row, "ref_rejected_logps": float("inf")}):
        with pytest.raises(
            DataError, match=(r"row 1 column ref_(chosen|rejected)_logps must be .*in every row, or in none")
        ):
            read([row, bad], PAIR_ROWS, tokenizer)


def test_an_answer_of_a_pair_is_refused_under_the_name_that_it_had(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="row 1 column rejected must be a text or a list of messages, got None"):
        read([PAIR, {**PAIR, "rejected": None}], SINGLE_ROWS, tokenizer)
    with pytest.raises(DataError, match=r"row 1 column rejected .*got a NUL character"):
        read([PAIR, {**PAIR, "rejected": "blue\0"}], SINGLE_ROWS, tokenizer)


@pytest.mark.parametrize("form", [PAIR_ROWS, ODDS_ROWS])
def test_rows_may_be_tokens_already(form: RowForm) -> None:
    sequence = read([TOKENS], form)[0]
    assert sequence.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8]
    assert sequence.starts == (6,)
    rejected = sequence.labels[6:]
    assert rejected.tolist() == [IGNORE_INDEX] * 3 + [7, 8]
    assert sequence.num_targets == 1
    assert not sequence.can_be_split


def test_answers_and_texts_to_score_may_be_tokens_already() -> None:
    sequence = read([{"prompt_ids": [1, 2], "completion_ids": [3, 4], "label": np.bool_(False)}], SINGLE_ROWS)[0]
    assert sequence.labels.tolist() == [IGNORE_INDEX, IGNORE_INDEX, 3, 4]
    assert sequence.row_values == {"desirable": 0.0}
    sequence = read([{"chosen_ids": [1, 2, 3], "rejected_ids": [4], "margin": 2}], SCORED_ROWS)[0]
    assert (sequence.input_ids.tolist(), sequence.starts) == ([1, 2, 3, 4], (3,))
    assert sequence.row_values == {"margin": 2.0}


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({**TOKENS, "chosen_ids": [4, 900]}, "token id 900"),
        ({**TOKENS, "rejected_ids": []}, "column rejected_ids must be at least one token, got no tokens"),
        ({**TOKENS, "prompt_ids": [1.5]}, r"column prompt_ids must be a list of integers, got \[1\.5\] \(list\)"),
        ({**TOKENS, "rejected_ids": [[1]]}, "column rejected_ids"),
    ],
)
def test_tokens_that_cannot_be_trained_on_are_refused(row: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        read([row], PAIR_ROWS, vocab_size=800)


def test_long_pairs_are_cut_left_out_or_refused_as_the_policy_says() -> None:
    long = {"prompt_ids": [1] * 4, "chosen_ids": [2] * 9, "rejected_ids": [3] * 2}
    dataset = read([TOKENS, long], PAIR_ROWS, max_length=8)
    assert dataset[1].input_ids.tolist() == [1] * 4 + [2] * 4 + [1] * 4 + [3] * 2
    assert dataset[1].row_values == {"chosen_tokens": 4, "rejected_tokens": 2}
    assert (dataset.report.num_truncated, dataset.report.num_target_tokens) == (1, 11)
    dataset = read([TOKENS, long], PAIR_ROWS, max_length=8, overlong_policy="drop")
    assert (len(dataset), dataset.report.num_dropped_long) == (1, 1)
    with pytest.raises(
        DataError, match=r"row 1 column input_ids must be at most 8 tokens \(max_length\), got 13 or more"
    ):
        read([TOKENS, long], PAIR_ROWS, max_length=8, overlong_policy="error")
    only_prompt = {**long, "prompt_ids": [1] * 8}
    dataset = read([TOKENS, only_prompt], PAIR_ROWS, max_length=8)
    assert (len(dataset), dataset.report.num_without_targets) == (1, 1)


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_texts_to_score_are_left_out_where_one_is_too_long(policy: str) -> None:
    rows = [{"chosen_ids": [1] * length, "rejected_ids": [2]} for length in (8, 9)]
    dataset = read(rows, SCORED_ROWS, max_length=8, overlong_policy=policy)
    assert (len(dataset), dataset.report.num_dropped_long) == (1, 1)
    with pytest.raises(
        DataError,
        match=r"tasks\.a\.train_dataset row 1 column input_ids must be at most 8 tokens \(max_length\), got 9 or more",
    ):
        read(rows, SCORED_ROWS, max_length=8, overlong_policy="error")


def test_settings_of_other_rows_are_refused(tokenizer: Any) -> None:
    for setting, value in (
        ("completion_only_loss", False),
        ("completion_only_loss", True),
        ("assistant_only_loss", True),
    ):
        reason = "already determines which tokens carry loss"
        with pytest.raises(ConfigError, match=rf"tasks.a.{setting} must be .*{reason}"):
            read([PAIR], PAIR_ROWS, tokenizer, **{setting: value})


def test_datasets_of_other_numbers_have_other_fingerprints_and_texts_need_a_tokenizer() -> None:
    rows = [{**TOKENS, "ref_chosen_logps": value, "ref_rejected_logps": -2.0} for value in (-1.0, -1.5)]
    assert read(rows[:1], PAIR_ROWS).fingerprint != read(rows[1:], PAIR_ROWS).fingerprint
    assert read([TOKENS], PAIR_ROWS).fingerprint != read([TOKENS], ODDS_ROWS).fingerprint
    with pytest.raises(DataError, match=r"tasks\.a\.train_dataset has preference rows, which need a tokenizer"):
        read([PAIR], PAIR_ROWS)


def test_rows_of_another_form_are_refused_by_their_columns(tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"must have the columns .*chosen \+ rejected.*, got columns prompt, completion, label"
    ):
        read([SINGLE], PAIR_ROWS, tokenizer)
    with pytest.raises(
        DataError,
        match=r"train_dataset must have the columns .*prompt \+ completion \+ label.*, got columns prompt, completion",
    ):
        read([{"prompt": "a", "completion": "b"}], SINGLE_ROWS, tokenizer)
    # A stream is not read ahead by a thousand rows, so its pairs stay pairs.
    with pytest.raises(DataError, match=r"got columns prompt, chosen, rejected"):
        open_rows(PAIR, options=TokenizeOptions(task="a", max_length=8, row_form=SINGLE_ROWS), tokenizer=tokenizer)
