"""Prompts of held-out rows: they end where training's loss begins, and rows without one are refused."""

from __future__ import annotations

from typing import Any

import pytest

from peft_mux.data.tokenize import TokenizeOptions
from peft_mux.errors import DataError
from peft_mux.generation.held_out_completions import PromptRow, read_prompts
from tests.data.test_tokenize import TEMPLATE, WORDS, words_tokenizer

PAIR = {"prompt": "the cat sat on a", "completion": " mat"}
OPTIONS = TokenizeOptions(task="own", max_length=64, vocab_size=len(WORDS), chat_template=TEMPLATE)
CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat home"}]


def read(rows: list[Any], *, limit: int | None = None, max_tokens: int | None = None) -> tuple[PromptRow, ...]:
    return read_prompts(rows, OPTIONS, words_tokenizer(), limit=limit, max_tokens=max_tokens)[0]


def words(row: PromptRow) -> str:
    return " ".join(WORDS[token] for token in row.ids)


@pytest.mark.parametrize(
    ("row", "prompt", "reference"),
    [
        (PAIR, "the cat sat on a", " mat"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "user : the cat assistant :", "sat home"),
        ({"messages": CHAT}, "user : the cat assistant :", "sat home"),
        (
            {"messages": [*CHAT, *CHAT]},
            "user : the cat assistant : sat home <eos> user : the cat assistant :",
            "sat home",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "text", "text": "ran"}]}]},
            "user : the cat assistant :",
            "ran",
        ),
    ],
)
def test_a_prompt_ends_where_the_answer_begins(row: dict[str, Any], prompt: str, reference: str) -> None:
    (found,) = read([row])
    assert words(found) == prompt
    assert found.reference == reference


def test_rows_beyond_the_limit_are_not_read_and_long_prompts_are_left_out_and_counted() -> None:
    assert len(read([PAIR, PAIR, 3], limit=2)) == 2
    rows = [PAIR, {**PAIR, "prompt": "the cat"}]
    kept, num_too_long = read_prompts(rows, OPTIONS, words_tokenizer(), limit=None, max_tokens=3)
    assert [row.prompt for row in kept] == ["the cat"]
    assert num_too_long == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "the cat"}, 'tasks.own.eval_generate needs held-out rows with "prompt" and "completion", or'),
        ({"messages": CHAT[:1]}, "messages must be an answer of the assistant at the end, to be generated, got 1"),
        ({"messages": CHAT[::-1]}, "got 2 messages, the last of them of 'user'"),
        ({"prompt": "", "completion": " mat"}, "prompt must be at least one token, got no tokens"),
    ],
)
def test_rows_without_a_prompt_are_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        read([row])
    assert said in str(caught.value)


def test_prompts_behind_which_nothing_fits_and_runs_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"tasks\.own\.eval_generate needs held-out prompts that leave room for.* Lower max_new_tokens",
    ):
        read([PAIR], max_tokens=2)
    with pytest.raises(
        DataError, match=r"tasks\.own\.eval_generate needs a processing_class, which turns completions into text"
    ):
        read_prompts([PAIR], OPTIONS, None, limit=None, max_tokens=None)
