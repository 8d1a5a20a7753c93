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

from peft_mux.data.sources import load_rows, mapped
from peft_mux.errors import ConfigError, DataError
from peft_mux.task import Task
from tests.data.test_tokenize import PLAIN_TEMPLATE, tokenised, words_tokenizer

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


def test_sharegpt_and_alpaca_rows_train_as_the_messages_that_they_stand_for() -> None:
    messages = [
        {"role": "system", "content": "on a mat"},
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat"},
    ]
    for rows, own in ((mapped(SHAREGPT, "sharegpt"), messages), (mapped(ALPACA[:1], "alpaca_chat"), messages[1:])):
        found, wanted = (
            tokenised(given, words_tokenizer(), chat_template=PLAIN_TEMPLATE) for given in (rows, [{"messages": own}])
        )
        assert found.fingerprint == wanted.fingerprint


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
        ({"row_format": {}}, r"row_format must be .*alpaca, alpaca_chat, sharegpt, or a dict .*got \{\}"),
        ({"row_format": 5}, r"row_format must be .*alpaca, alpaca_chat, sharegpt, or a dict .*got 5"),
    ],
)
def test_a_format_that_rows_do_not_have_is_refused_when_the_task_is_made(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task(**settings)


def test_somebody_unknown_who_speaks_is_named_with_the_row() -> None:
    rows = [SHAREGPT[0], {"conversations": [{"from": "narrator", "value": "the cat"}]}]
    with pytest.raises(
        DataError, match=r"tasks\.own\.train_dataset row 1 cannot be read: .*conversations from 'narrator'"
    ):
        tokenised(mapped(rows, "sharegpt"), words_tokenizer(), chat_template=PLAIN_TEMPLATE)


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
