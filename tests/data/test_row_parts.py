"""The parts that `RowTokenizer` holds, each by itself: cells, the length limit, chat rows and labelled rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peft_mux.data.formats import RowCells
from peft_mux.data.rows import ChatRows, LabelledRows, LengthLimit, RowCounts
from peft_mux.errors import DataError

CELLS = RowCells("tasks.own.train_dataset", vocab_size=10)


class LetterTokenizer:
    """Gives each letter its place in the alphabet, and takes a template for one that joins contents."""

    chat_template = "{% generation %}"

    def __call__(
        self, text: str, pair: str | None = None, truncation: bool = False, max_length: int | None = None
    ) -> dict[str, list[int]]:
        ids = [ord(letter) - ord("a") for letter in text + (pair or "")]
        return {"input_ids": ids[:max_length] if truncation else ids}

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, list[int]]:
        ids, mask = [], []
        for message in messages:
            own = self(message["content"])["input_ids"]
            ids += own
            mask += [int(message["role"] == "assistant")] * len(own)
        found = {"input_ids": ids + [9] * options["add_generation_prompt"]}
        return {**found, "assistant_masks": mask} if options["return_assistant_tokens_mask"] else found


def limit(policy: str, num_tokens: int = 3) -> tuple[LengthLimit, RowCounts]:
    counts = RowCounts()
    return LengthLimit(num_tokens, "max_length", policy, CELLS, counts), counts


def chat_rows(tokenizer: Any = None, **options: Any) -> ChatRows:
    settings = {"task": "own", "chat_template": None, "assistant_only_loss": False, **options}
    return ChatRows(CELLS, tokenizer or LetterTokenizer(), **settings)


def labelled_rows(policy: str = "truncate", **options: Any) -> LabelledRows:
    settings = {"is_tokenised": True, "num_labels": 3, **options}
    return LabelledRows(CELLS, limit(policy)[0], LetterTokenizer(), **settings)


# ------------------------------------------------------------------- cells


@pytest.mark.parametrize("value", [None, 7, "a\0b", "a\ud800"])
def test_a_text_is_a_string_of_valid_unicode_without_nul(value: Any) -> None:
    with pytest.raises(DataError, match=r"^tasks\.own\.train_dataset row 4 column text: got "):
        CELLS.text({"text": value}, "text", 4)


@pytest.mark.parametrize("value", [[1.5], [[1], [2]], [[1], [2, 3]], "12", 3])
def test_integers_are_a_flat_list_of_whole_numbers(value: Any) -> None:
    with pytest.raises(DataError, match="a list of integers"):
        CELLS.integers(value, 0, "labels")
    assert CELLS.integers([], 0, "labels").dtype == np.int64


def test_padding_is_at_the_ends_only() -> None:
    assert CELLS.attended({}, 0, 2).tolist() == [True, True]
    assert CELLS.attended({"attention_mask": [0, 1, 1, 0]}, 0, 4).tolist() == [False, True, True, False]
    with pytest.raises(DataError, match="a hole in the middle"):
        CELLS.attended({"attention_mask": [1, 0, 1]}, 0, 3)
    with pytest.raises(DataError, match="2 entries"):
        CELLS.attended({"attention_mask": [1, 1]}, 0, 3)


def test_token_ids_lie_in_the_vocabulary_where_it_is_known() -> None:
    for ids in ([10], [-1]):
        with pytest.raises(DataError, match=rf"token id {ids[0]}; allowed: ids from 0 to 9"):
            CELLS.checked_ids(np.array(ids), 0, "input_ids")
    assert RowCells("here", None).checked_ids(np.array([10]), 0, "input_ids").tolist() == [10]
    with pytest.raises(DataError, match="no tokens"):
        CELLS.checked_ids(np.array([], dtype=np.int64), 0, "input_ids")
    assert len(CELLS.checked_ids(np.array([], dtype=np.int64), 0, "labels", empty_allowed=True)) == 0


# ------------------------------------------------------------ length limit


def test_rows_within_the_limit_stay_and_are_not_counted() -> None:
    for policy in ("truncate", "drop", "error"):
        part, counts = limit(policy)
        ids = np.arange(3)
        assert part.cut(ids, ids, 0) == (ids, ids)
        assert counts == RowCounts()


def test_longer_rows_are_cut_left_out_or_refused() -> None:
    ids, labels = np.arange(5), np.arange(5) + 10
    part, counts = limit("truncate")
    kept = part.cut(ids, labels, 0)
    assert kept is not None
    assert [one.tolist() for one in kept] == [[0, 1, 2], [10, 11, 12]]
    assert counts == RowCounts(num_truncated=1)
    part, counts = limit("drop")
    assert part.cut(ids, labels, 0) is None
    assert counts == RowCounts(num_dropped_long=1)
    part, counts = limit("error")
    with pytest.raises(DataError, match=r"row 2 .* got 5 tokens or more; allowed: at most 3 \(max_length\)"):
        part.cut(ids, labels, 2)
    assert counts == RowCounts()


# --------------------------------------------------------------- chat rows


def test_only_what_the_assistant_says_is_marked_where_only_that_carries_loss() -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    assert chat_rows().encode(messages, "messages", 0) == ([0, 1, 2, 3], None)
    ids, mask = chat_rows(assistant_only_loss=True).encode(messages, "messages", 0)
    assert ids == [0, 1, 2, 3]
    assert mask is not None
    assert mask.tolist() == [False, False, True, True]


def test_a_prompt_ends_where_the_answer_begins_and_needs_no_marks() -> None:
    rows = chat_rows(assistant_only_loss=True, chat_template="no such block")
    assert rows.encode_prompt([{"role": "user", "content": "ab"}], "prompt", 0) == [0, 1, 9]
    with pytest.raises(DataError, match=r"tasks\.own\.assistant_only_loss: got True, but the chat template has no"):
        rows.encode([{"role": "user", "content": "ab"}], "messages", 0)


def test_messages_without_a_template_are_refused_by_dataset_and_task() -> None:
    tokenizer = LetterTokenizer()
    tokenizer.chat_template = None  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"^tasks\.own\.train_dataset: got messages, .* tasks\.own\.chat_template"):
        chat_rows(tokenizer).encode([], "messages", 0)


@pytest.mark.parametrize(
    "messages", [[], "hello", [{"role": "user"}], [{"content": "a"}], [{"role": "user", "content": None}]]
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(DataError, match="row 1 column messages: got "):
        chat_rows().messages({"messages": messages}, "messages", 1)


# ----------------------------------------------------------- labelled rows


def test_tokens_types_and_label_of_a_row_lose_the_same_padding() -> None:
    row = {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0], "token_type_ids": [0, 1, 1], "label": 2}
    found = labelled_rows().sequence(row, 5)
    assert found is not None
    assert found.token_type_ids is not None
    assert (found.input_ids.tolist(), found.token_type_ids.tolist()) == ([1, 2], [0, 1])
    assert (found.class_label, found.row, found.num_targets) == (2, 5, 1)


def test_a_text_that_the_tokenizer_cuts_is_counted_only_if_it_is_longer() -> None:
    for text, num_truncated in (("abc", 0), ("abcd", 1)):
        part, counts = limit("truncate")
        rows = LabelledRows(CELLS, part, LetterTokenizer(), is_tokenised=False, num_labels=None)
        found = rows.sequence({"text": text, "label": 0}, 0)
        assert found is not None
        assert found.input_ids.tolist() == [0, 1, 2]
        assert counts == RowCounts(num_truncated=num_truncated)
    part, counts = limit("drop")
    rows = LabelledRows(CELLS, part, LetterTokenizer(), is_tokenised=False, num_labels=None)
    assert rows.sequence({"text": "ab", "text_pair": "cd", "label": 0}, 0) is None
    assert counts == RowCounts(num_dropped_long=1)


def test_labels_are_classes_or_values() -> None:
    row = {"input_ids": [1]}
    values = [(3, 0, 0), (3, np.int64(2), 2), (1, 2, 2.0), (1, 0.5, 0.5), (None, 7, 7), (None, 0.5, 0.5)]
    for num_labels, label, expected in values:
        found = labelled_rows(num_labels=num_labels).sequence({**row, "label": label}, 0)
        assert found is not None
        assert found.class_label == expected
        assert type(found.class_label) is type(expected)
    for num_labels, label in ((3, 3), (3, -1), (3, 0.5), (3, True), (1, float("nan")), (None, float("inf")), (3, None)):
        with pytest.raises(DataError, match="row 0 column label: got "):
            labelled_rows(num_labels=num_labels).sequence({**row, "label": label}, 0)
