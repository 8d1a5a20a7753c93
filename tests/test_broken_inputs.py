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


class Fault:
    """A fault in a user's input.

    Args:
        name: what is wrong, in the user's words.
        make: makes it, in a folder of its own.
        says: pieces of the message, in their order: where and what came, what is allowed, the way out.
    """

    def __init__(self, name: str, make: Callable[[Path], Any], *says: str) -> None:
        self.name, self.make, self.says = name, make, says


def task(**settings: Any) -> Task:
    given = {"name": "sql", "train_dataset": SHORT, "train_batch_size": 2, "max_steps": 2, **settings}
    return Task(peft_config=LoraConfig(r=4, target_modules=["q_proj"]), **given)


def of_task(**settings: Any) -> Callable[[Path], Any]:
    """Return what makes a trainer of one task with such settings."""
    return lambda folder: trainer_of(folder, [task(**settings)])


def with_tokenizer(folder: Path) -> None:
    MultiTaskTrainer(tiny_llama(), MultiTaskTrainingArguments(output_dir=str(folder)), [task()], tokenizer=1)


def of_file(old: str, new: str, *words: str, with_model: bool = False) -> Callable[[Path], Any]:
    """Return what gives `peft-mux` a good file in which a piece is another; its model may be there."""

    def make(folder: Path) -> None:
        if with_model:
            tiny_llama().save_pretrained(folder / "no-model")
        write_rows(folder / "rows.jsonl", SHORT)
        text = FILE.format(folder=folder)
        assert old in text
        (folder / "tasks.yaml").write_text(text.replace(old, new), encoding="utf-8")
        of_command(*(words or ("validate", "{folder}/tasks.yaml")))(folder)

    return make


def of_rows_file(name: str, content: str) -> Callable[[Path], Any]:
    """Return what makes a task of a file of rows."""

    def make(folder: Path) -> None:
        (folder / name).write_text(content, encoding="utf-8")
        of_task(train_dataset=str(folder / name))(folder)

    return make


def with_empty_tokenizer(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    trainer_of(folder, [task()], tokenizer=tokenizer)


def of_command(*words: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> None:
        assert main([word.format(folder=folder) for word in words]) == 2

    return make


FAULTS = (
    # ------------------------------------------------------------------ names
    Fault(
        "a tokenizer under its old name",
        with_tokenizer,
        "tokenizer must be left out, got int",
        "Pass it as processing_class.",
    ),
    # ------------------------------------------------------------------- rows
    Fault(
        "a file that is not there", of_task(train_dataset="a/sql.jsonl"), rf"{TRAIN} .*got 'a/sql.jsonl'", "Check the"
    ),
    Fault(
        "a broken line",
        of_rows_file("a.jsonl", '{"text": "a"}\n\n{"text": oops}\n'),
        f"{TRAIN} .*got a.jsonl line 3, row 1: '{{\"text\": oops}}' (Expecting value",
        "a JSON object on each line",
    ),
    Fault(
        "a line that is no row",
        of_rows_file("a.jsonl", '{"text": "a"}\n["b"]\n'),
        f"{TRAIN} must be a JSON object on each line.*got a.jsonl line 2, row 1: '[\"b\"]'",
    ),
    *(
        Fault(f"an empty file, {name}", of_rows_file(name, text), rf"{TRAIN} .*got {name}, which is empty", "one row")
        for name, text in (("a.jsonl", ""), ("b.jsonl", "\n \n"), ("c.json", "[]"), ("d.csv", ""), ("e.parquet", ""))
    ),
    Fault(
        "an empty tokenizer",
        with_empty_tokenizer,
        "processing_class must be a tokenizer with a vocabulary, got one without tokens",
        "Check the",
    ),
    # ------------------------------------------------------------- from a file
    Fault(
        "no such file",
        of_command("plan", "{folder}/tasks.yml"),
        "error: file must be a YAML file, got .*tasks.yml', which does not exist",
        "peft-mux init",
    ),
    Fault(
        "an open bracket", of_file("max_steps: 2}", "max_steps: 2"), "tasks.yaml:6: is not YAML", "begins on line 5."
    ),
    Fault(
        "a type that is an option",
        of_file("{r: 4", "{type: dora, r: 4"),
        "sql.peft.type must be a type of docs/peft_types.md, such as lora, got 'dora'",
        "use_dora: true",
    ),
    Fault(
        "a target misspelt in the defaults",
        of_file(
            "peft: {r: 4, target_modules: all-linear}, max_steps: 2}",
            "max_steps: 2}\ndefaults:\n  peft:\n    target_modules: [q_prj]",
            with_model=True,
        ),
        "tasks.yaml:8 tasks.sql.peft.target_modules must be \"all-linear\" or modules of .*, got 'q_prj'",
        'Did you mean "q_proj"?',
    ),
    Fault(
        "a rank of 0 in a file",
        of_file("r: 4", "r: 0", with_model=True),
        "tasks.yaml:5 tasks.sql.peft.r must be an integer of at least 1, got 0",
    ),
    Fault(
        "a type under PEFT's name",
        of_file("{r: 4", "{peft_type: IA3, r: 4"),
        "tasks.yaml:5 tasks.sql.peft.peft_type",
        'mean "type"?',
    ),
    Fault(
        "no such model",
        of_file("tasks:", "tasks:"),
        'error: model must be a folder with a config.json, or a hub id, got .*no-model", which does not exist',
        "Check the path.",
    ),
    Fault("no run", of_command("status", "{folder}"), "run must be the output_dir of a run, got", "which holds none."),
    Fault(
        "no adapters",
        of_command("export", "{folder}"),
        "error: run must be the output_dir of a run, got .*which holds no adapters",
    ),
    Fault(
        "a file there",
        of_file("tasks:", "tasks:", "init", "{folder}/tasks.yaml"),
        "init must write a new file, got",
        "Choose another name.",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_user_reads(fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        fault.make(tmp_path)
        said = capsys.readouterr().err
    except PeftMuxError as error:
        said = f"{type(error).__name__}: {error}"
    assert "Traceback" not in said
    for piece in fault.says:
        assert re.search(".*".join(map(re.escape, piece.split(".*"))), said, re.DOTALL), said
