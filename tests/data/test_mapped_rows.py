"""Rows of other projects, and rows by their place: Alpaca, ShareGPT, other names of columns, files and folders."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from peft import LoraConfig

from peft_mux.data.formats import LANGUAGE_ROWS, RowForm
from peft_mux.data.sources import load_rows, mapped
from peft_mux.errors import ConfigError, DataError
from peft_mux.losses.preference_rows import PAIR_ROWS, SINGLE_ROWS
from peft_mux.task import Task
from tests.data.test_tokenize import PLAIN_TEMPLATE, targets, tokenised, words, words_tokenizer

ALPACA = [
    {"instruction": "the cat", "input": "", "output": "sat"},
    {"instruction": "a dog", "input": "on a mat", "output": "ran"},
]
SHAREGPT = [
    {
        "conversations": [
            {"from": "system", "value": "on a mat"},
            {"from": "human", "value": "the cat"},
            {"from": "gpt", "value": "sat"},
        ]
    }
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def task(**settings: Any) -> Task:
    return Task(**{"name": "own", "peft_config": LoraConfig(r=2), "train_dataset": ALPACA, **settings})


def test_alpaca_rows_have_the_prompt_of_stanford_alpaca() -> None:
    first, second = task(row_format="alpaca").train_dataset
    assert first["prompt"].startswith("Below is an instruction that describes a task. Write a response")
    assert first["prompt"].endswith("### Instruction:\nthe cat\n\n### Response:\n")
    assert first["completion"] == "sat"
    assert "paired with an input that provides further context" in second["prompt"]
    assert second["prompt"].endswith("### Instruction:\na dog\n\n### Input:\non a mat\n\n### Response:\n")


CHAT = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }} {% if message.role == 'assistant' %}{% generation %}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments.at }} {% endfor %}"
    "{{ message.content or '' }} :{% endgeneration %} {% else %}{{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
CALL = [
    {"from": "human", "value": "cat"},
    {"from": "function_call", "value": '{"name": "ran", "arguments": {"at": "home"}}'},
    {"from": "observation", "value": "yes"},
    {"from": "gpt", "value": "sat"},
]
SPOKEN = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "sat"}]
HISTORY = {"history": [["cat", "sat"]], "system": "mat", "instruction": "dog", "output": "ran", "input": None}
EARLIER = "system mat user cat assistant sat : user dog assistant ran :"
ANSWERS = {"completion_only_loss": False, "assistant_only_loss": True}


@pytest.mark.parametrize(
    ("row_format", "row", "form", "options", "text", "trained"),
    [
        ("alpaca_chat", ALPACA[1], LANGUAGE_ROWS, {}, "user a dog on a mat assistant ran :", "ran :"),
        (
            "alpaca_chat",
            HISTORY,
            LANGUAGE_ROWS,
            {},
            "system mat user cat assistant sat : user dog assistant ran :",
            "ran :",
        ),
        (
            "alpaca_chat",
            HISTORY,
            LANGUAGE_ROWS,
            ANSWERS,
            "system mat user cat assistant sat : user dog assistant ran :",
            "sat : ran :",
        ),
        (
            "sharegpt",
            {"conversations": CALL, "system": "mat", "tools": '[{"name": "ran", "parameters": {}}]'},
            LANGUAGE_ROWS,
            {"assistant_only_loss": True},
            "ran system mat user cat assistant ran home : <unk> yes assistant sat :",
            "ran home : sat :",
        ),
        (
            "sharegpt",
            {"conversations": CALL[:1], "chosen": CALL[3], "rejected": {"from": "gpt", "value": "ran"}},
            PAIR_ROWS,
            {},
            "user cat assistant sat : user cat assistant ran :",
            "sat : ran :",
        ),
        (
            {"format": "alpaca_chat", "instruction": "question"},
            {"question": "cat", "chosen": "sat", "rejected": SPOKEN, "instruction": "dog"},
            PAIR_ROWS,
            {},
            "user cat assistant sat : user cat assistant sat :",
            "sat : sat :",
        ),
        (
            {"format": "sharegpt", "conversations": "messages"},
            {"messages": SPOKEN, "label": False},
            SINGLE_ROWS,
            {},
            "user cat assistant sat :",
            "sat :",
        ),
        ("alpaca_chat", {**ALPACA[0], "kto_tag": True}, SINGLE_ROWS, {}, "user the cat assistant sat :", "sat :"),
    ],
)
def test_rows_of_chats_train_on_their_answers(
    row_format: Any, row: dict[str, Any], form: RowForm, options: dict[str, Any], text: str, trained: str
) -> None:
    rows = mapped([row], row_format)
    assert set(rows.column_names) == rows[0].keys()
    (sequence,) = tokenised(rows, words_tokenizer(), form, chat_template=CHAT, **options)
    assert " ".join(words(sequence)) == text
    assert " ".join(targets(sequence)) == trained


def test_columns_are_read_under_the_names_that_they_have_elsewhere() -> None:
    own = task(row_format={"prompt": "instruction", "completion": "output"}, eval_dataset=ALPACA[:1])
    assert own.train_dataset[0] == {"prompt": "the cat", "input": "", "completion": "sat"}
    assert own.train_dataset.column_names == ["prompt", "input", "completion"]
    assert len(own.eval_dataset) == 1


def test_a_stream_of_other_rows_stays_a_stream_that_can_be_read_again() -> None:
    stream = datasets.Dataset.from_list(ALPACA).to_iterable_dataset()
    own = task(train_dataset=stream, row_format="alpaca_chat", max_steps=2)
    assert not hasattr(own.train_dataset, "__len__")
    assert [list(own.train_dataset) for _ in range(2)] == [list(task(row_format="alpaca_chat").train_dataset)] * 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"row_format": "alpacca"}, "row_format must be.*, got 'alpacca'.*Did you mean \"alpaca\""),
        (
            {"row_format": "sharegpt"},
            (
                "train_dataset must be rows with conversations, as row_format "
                "requires, got columns instruction, input, output"
            ),
        ),
        (
            {"row_format": {"prompt": "instructions"}},
            r'tasks\.own\.train_dataset must be rows with instructions, as row_format.*mean "instruction"',
        ),
        (
            {"row_format": {"format": "alpaca_chat", "respons": "output"}},
            r"row_format\.respons must be one of instruction, output, input, history, .*, got an unknown column",
        ),
        (
            {"row_format": "alpaca_chat", "train_dataset": [{"instruction": "the cat", "chosen": "sat"}]},
            "train_dataset must be rows with instruction, chosen, rejected, as row_format requires",
        ),
        ({"row_format": {}}, r"row_format must be .*alpaca, alpaca_chat, sharegpt, or a dict .*got \{\}"),
        ({"row_format": 5}, r"row_format must be .*alpaca, alpaca_chat, sharegpt, or a dict .*got 5"),
    ],
)
def test_a_format_that_rows_do_not_have_is_refused_when_the_task_is_made(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task(**settings)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"from": "narrator", "value": "the cat"}, "conversations from 'narrator'"),
        ({"from": "function_call", "value": "ran()"}, r"function_call 'ran\(\)', which is not .*as JSON"),
    ],
)
def test_turns_that_cannot_be_read_are_named_with_the_row(turn: dict[str, str], said: str) -> None:
    rows = mapped([SHAREGPT[0], {"conversations": [turn]}], "sharegpt")
    with pytest.raises(DataError, match=rf"tasks\.own\.train_dataset row 1 cannot be read: .*{said}"):
        tokenised(rows, words_tokenizer(), chat_template=PLAIN_TEMPLATE)


# ----------------------------------------------------------------- rows by their place

ROWS = [{"prompt": f"the {word}", "completion": "sat"} for word in ("cat", "dog", "mat")]


def written(kind: str, folder: Path) -> Path:
    path = folder / f"rows.{kind}"
    if kind in ("jsonl", "json"):
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    else:
        path = folder / "saved"
        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_a_task_takes_the_path_of_its_rows(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    own = task(train_dataset=str(path), eval_dataset=path)
    assert [dict(row) for row in own.train_dataset] == ROWS
    assert [dict(row) for row in own.eval_dataset] == ROWS
    assert [dict(row) for row in load_rows(path)] == ROWS


def test_a_dataset_that_cannot_be_had_names_how_to_choose_its_split() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"tasks\.own\.eval_dataset must be a file, or a dataset with a.*got "
            r"'me/absent'.*load_rows\('me/absent', split"
        ),
    ):
        task(eval_dataset="me/absent")
    with pytest.raises(ConfigError, match="2 things are wrong") as caught:
        task(train_dataset="absent.csv", learning_rate=-1.0)
    assert "tasks.own.train_dataset must be a .jsonl" in str(caught.value)
    assert "got 'absent.csv', which does not exist" in str(caught.value)
    own = replace(task(row_format="alpaca"), seed=3)
    assert own.train_dataset[0]["completion"] == "sat", "rows that were mapped are not mapped again"
