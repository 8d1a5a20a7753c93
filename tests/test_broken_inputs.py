"""What people get wrong, one row a fault, with what they read: where, what came, what is allowed, and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.cli.main import main
from peft_mux.errors import PeftMuxError
from tests.cli.lab import write_rows
from tests.invariants.mux_lab import rows, tiny_llama
from tests.runs import trainer_of

SHORT = rows(1, 6, 5, 9)
TRAIN = "tasks.sql.train_dataset"
FILE = """\
model: {folder}/no-model
output_dir: {folder}/out
run: {{use_cpu: true, report_to: none}}
tasks:
  sql: {{dataset: {folder}/rows.jsonl, peft: {{r: 4, target_modules: all-linear}}, max_steps: 2}}
"""


def task(train_dataset: Any = SHORT) -> Task:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    return Task(name="sql", peft_config=config, train_dataset=train_dataset, train_batch_size=2, max_steps=2)


def old_tokenizer(folder: Path) -> None:
    MultiTaskTrainer(tiny_llama(), MultiTaskTrainingArguments(output_dir=str(folder)), [task()], tokenizer=1)


def empty_tokenizer(folder: Path) -> None:
    trainer_of(folder, [task()], tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())))


def rows_file(name: str, content: str | None = None) -> Callable[[Path], Any]:
    """Return what makes a trainer of a task of a file of rows, which may not be there."""

    def make(folder: Path) -> None:
        if content is not None:
            (folder / name).write_text(content, encoding="utf-8")
        trainer_of(folder, [task(str(folder / name))])

    return make


def command(*words: str) -> Callable[[Path], Any]:
    """Return what runs a command that ends with 2."""

    def make(folder: Path) -> None:
        assert main([word.format(folder=folder) for word in words]) == 2

    return make


def file(old: str, new: str, *, with_model: bool = False) -> Callable[[Path], Any]:
    """Return what validates a good file in which a piece is another; its model may be there."""

    def make(folder: Path) -> None:
        if with_model:
            tiny_llama().save_pretrained(folder / "no-model")
        write_rows(folder / "rows.jsonl", SHORT)
        text = FILE.format(folder=folder)
        assert old in text
        (folder / "tasks.yaml").write_text(text.replace(old, new), encoding="utf-8")
        command("validate", "{folder}/tasks.yaml")(folder)

    return make


MISSPELT = "max_steps: 2}\ndefaults:\n  peft:\n    target_modules: [q_prj]"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tokenizer under its old name": (
        old_tokenizer,
        "tokenizer must be left out, got int.*Pass it as processing_class.",
    ),
    "an empty tokenizer": (
        empty_tokenizer,
        "processing_class must be a tokenizer with a vocabulary, got one without tokens.*Check the",
    ),
    "a file that is not there": (rows_file("sql.jsonl"), f"{TRAIN} .*got .*sql.jsonl'.*There is no"),
    "a broken line": (
        rows_file("a.jsonl", '{"text": "a"}\n\n{"text": oops}\n'),
        f"{TRAIN} must be a JSON object on each line.*got a.jsonl line 3, row 1: '{{\"text\": oops}}' (Expecting value",
    ),
    "a line that is no row": (
        rows_file("a.jsonl", '{"text": "a"}\n["b"]\n'),
        f"{TRAIN} must be a JSON object on each line.*got a.jsonl line 2, row 1: '[\"b\"]'",
    ),
    **{
        f"an empty file, {name}": (rows_file(name, text), f"{TRAIN} .*one row.*got {name}, which is empty")
        for name, text in (("b.jsonl", "\n \n"), ("c.json", "[]"), ("d.csv", ""), ("e.parquet", ""))
    },
    "an open bracket": (file("max_steps: 2}", "max_steps: 2"), "tasks.yaml:6: is not YAML.*begins on line 5."),
    "a type that is an option": (
        file("{r: 4", "{type: dora, r: 4"),
        "sql.peft.type must be a type of docs/peft_types.md, such as lora, got 'dora'.*use_dora: true",
    ),
    "a type under PEFT's name": (file("{r: 4", "{peft_type: IA3, r: 4"), 'yaml:5 tasks.sql.peft.peft_type.*"type"?'),
    "a target misspelt in the defaults": (
        file("peft: {r: 4, target_modules: all-linear}, max_steps: 2}", MISSPELT, with_model=True),
        'tasks.yaml:8 tasks.sql.peft.target_modules must be "all-linear" or .*, got \'q_prj\'.*Did you mean "q_proj"?',
    ),
    "a rank of 0 in a file": (
        file("r: 4", "r: 0", with_model=True),
        "tasks.yaml:5 tasks.sql.peft.r must be an integer of at least 1, got 0",
    ),
    "no such model": (
        file("tasks:", "tasks:"),
        'error: model must be a folder with a config.json, or a hub id, got .*no-model", which does not exist',
    ),
    "no run": (command("status", "{folder}"), "run must be the output_dir of a run, got.*which holds none."),
    "no adapters": (
        command("export", "{folder}"),
        "run must be the output_dir of a run, got .*which holds no adapters",
    ),
    "a file there": (command("init", "{folder}"), "init must write a new file, got.*Choose another name."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_user_reads(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, says = FAULTS[fault]
    try:
        make(tmp_path)
        said = capsys.readouterr().err
    except PeftMuxError as error:
        said = f"{type(error).__name__}: {error}"
    assert "Traceback" not in said
    assert re.search(".*".join(map(re.escape, says.split(".*"))), said, re.DOTALL), said
