"""The page for programs: its blocks run in their order, and its tables say what the code does."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import shlex
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainingArguments

import peft_mux
from peft_mux import errors
from peft_mux.cli.config_file import DATA_KEYS, TASK_KEYS
from peft_mux.cli.main import main
from peft_mux.reporting.mailbox import Mailbox
from peft_mux.task import TASK_FIELDS
from peft_mux.trainer.trainer import REFUSED
from tests.paths import ROOT

PAGE = (ROOT / "docs/programs.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def words(text: str) -> list[str]:
    """Return the code in backticks."""
    return re.findall(r"`([^`]+)`", text)


def rows_of(header: str) -> dict[str, str]:
    """Return the rest of each row of a table by its first cell, which may name several things."""
    table = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|", 1)] for line in table]
    return {name: rest for first, rest in cells for name in (words(first) or first.split(", "))}


def after(start: str) -> list[str]:
    """Return the code in backticks of a paragraph."""
    return words(PAGE[PAGE.index(start) :].split("\n\n")[0])


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run every block; return the folder, and what each command printed as JSON."""
    folder, printed, names = tmp_path_factory.mktemp("programs"), {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
        torch.set_num_threads(1)
        for language, block in BLOCKS:
            if language == "python":
                exec(block, names)
            elif language == "yaml":
                Path("tasks.yaml").write_text(block, encoding="utf-8")
            else:
                for line in block.splitlines():
                    printed[line] = run_line(line)
    return folder, printed


def run_line(line: str) -> Any:
    """Run a line of a shell in this process; return the JSON that it prints."""
    program, *rest = shlex.split(line)
    assert program == "peft-mux"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(rest) == 0, line
    return json.loads(said.getvalue())


def of(printed: dict[str, Any], start: str) -> Any:
    return next(value for line, value in printed.items() if line.startswith(f"peft-mux {start}"))


def test_every_block_runs_and_what_it_promises_is_there(outputs: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = outputs
    assert [language for language, _ in BLOCKS] == ["python", "python", "python", "yaml", "bash", "python"]
    assert len(printed) == 10
    assert of(printed, "train tasks.yaml --resume")["tasks"]["two"]["step"] == 5
    assert (folder / "merged/config.json").is_file()


def test_what_commands_print_as_json_has_the_keys_that_the_page_names(outputs: tuple[Path, dict[str, Any]]) -> None:
    _, printed = outputs
    keys = {name: [words(part) for part in rest.split(";")] for name, rest in rows_of("| command | keys").items()}
    assert list(of(printed, "validate")["one"]) == keys["validate"][0]
    assert {*keys["plan"][0]} - {"Plan.to_json()"} <= of(printed, "plan").keys()
    for command in ("train", "status"):
        found = of(printed, command)
        assert list(found) == keys[command][0]
        assert list(found["tasks"]["one"]) == keys[command][1]
    assert [list(one) for one in of(printed, "pause")] == [keys["pause"][0]]
    assert [list(of(printed, start)) for start in ("export runs/file --vllm", "export runs/file one")] == keys[
        "export"
    ][:2]
    assert list(of(printed, "export runs/file --merge")) == keys["export"][2]
    assert list(of(printed, "doctor")) == keys["doctor"][0]


def test_every_file_of_a_run_is_on_the_page(outputs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = outputs
    listed = {name.rstrip("/") for name in rows_of("| in `output_dir`")} | {"one", "two"}
    assert {path.name for path in (folder / "runs/file").iterdir()} <= listed
    own = set(words(rows_of("| in `output_dir`")["TASK/"]))
    found = {path.name for path in (folder / "runs/file/one").iterdir()}
    assert {name for name in found if not name.startswith(("checkpoint-", "token", "special_tokens"))} <= own


def test_every_event_of_the_code_is_on_the_page_and_every_record_has_the_keys(
    outputs: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = outputs
    table = rows_of("| event | of")
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "peft_mux").rglob("*.py"))
    written = set(re.findall(r'(?:\.event|\b_?record|\.numbers)\(\s*(?:task, )?"(\w+)"', code))
    written |= set(re.findall(r'\{"event": "(\w+)"', code))
    assert written == table.keys()
    exact = ("data", "status", "sharing")
    for path in (folder / "run/metrics.jsonl", folder / "runs/file/metrics.jsonl"):
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            named = set(words(table[record["event"]]))
            assert {"event", "run_step", "time"} <= record.keys()
            own = record.keys() - {"event", "run_step", "time"}
            assert own == named if record["event"] in exact else named & {"task", "step", "loss", "eval_loss"} <= own


def test_the_page_names_all_that_is_public() -> None:
    assert sorted(rows_of("| name | what it is")) == sorted(set(peft_mux.__all__) - {"__version__"})
    own = {
        name
        for name, value in vars(peft_mux.MultiTaskTrainer).items()
        if (inspect.isfunction(value) or isinstance(value, property)) and not name.startswith("_")
    }
    # Those of Trainer are Trainer's, and these serve parts of the package.
    own -= {
        *REFUSED,
        "is_in_train",
        "add_callback",
        "log",
        "tell",
        "prefer",
        "plan_deployment",
        "measure_profile",
        "use_command",
    }
    assert set(after("Methods of `MultiTaskTrainer`")) - {"MultiTaskTrainer"} == own
    assert set(after("Further fields of `Task`")) - {"Task", "None"} == set(TASK_FIELDS)
    knobs = {item.name for item in fields(peft_mux.MultiTaskTrainingArguments)}
    named = set(after("Further fields of `MultiTaskTrainingArguments`"))
    assert named - {"MultiTaskTrainingArguments", "TrainingArguments"} == knobs - {
        *TrainingArguments.__dataclass_fields__
    }
    assert set(DATA_KEYS) <= set(after("`run` takes the fields"))
    left_out = set(TASK_FIELDS) - set(TASK_KEYS)
    assert left_out == {
        *("name", "peft_config", "train_dataset", "callbacks", "compute_metrics", "preprocess_logits_for_metrics")
    }


def test_the_page_names_all_errors_and_what_else_they_are() -> None:
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.PeftMuxError) and kind is not errors.PeftMuxError
    }
    table = rows_of("| error | also a")
    assert table.keys() == kinds.keys()
    assert {name: words(rest)[0] for name, rest in table.items()} == {
        name: kind.__mro__[2].__name__ for name, kind in kinds.items()
    }


@pytest.mark.slow
def test_exit_statuses_are_those_of_the_page(
    outputs: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = outputs
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
    failing = ["train", "tasks.yaml", "--set", "tasks.one.learning_rate=1e30", "--set", "output_dir=runs/failing"]
    assert main(failing) == 1
    assert main(["train", "tasks.yaml"]) == 2, "the folder holds a run"
    assert "error: " in capsys.readouterr().err
    assert main(["pause", "runs/file", "one"]) == 2, "no process trains"
    (folder / "runs/paused").mkdir()
    Mailbox(folder / "runs/paused").send({"command": "pause", "task": "one"})
    assert main(["train", "tasks.yaml", "--set", "output_dir=runs/paused"]) == 3
    assert rows_of("| exit status").keys() == {"0", "1", "2", "3", str(128 + signal.SIGINT), str(128 + signal.SIGTERM)}
