"""`peft-mux init | validate | export | doctor | config-schema`, and `add` to a run that trains."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from peft_mux.cli import commands
from peft_mux.cli.config_file import schema
from peft_mux.cli.main import main
from peft_mux.cli.validate import _sample
from tests.cli.lab import write_rows
from tests.paths import ROOT
from tests.shell import Shell


def test_a_first_file_is_written_once_and_can_be_validated(made: Path, tmp_path: Path, shell: Shell) -> None:
    path = tmp_path / "first.yaml"
    words = ["init", path, "--model", made / "backbone", "--data", made / "rows.jsonl"]
    shell(*words)
    assert "which exists" in shell.refused(*words)
    found = shell.json("validate", path)["rows"]
    split = found["splits"]["train_dataset"]
    assert (split["format"], split["rows"], split["kept"], split["cut_share"]) == ("prompt_completion", 6, 6, 0.0)
    assert 0 < split["masked_share"] < 1
    assert "".join(text for text, _ in found["sample"]).startswith("say one")


def test_what_is_trained_on_is_shown_and_held_out_rows_among_it_are_reported(file: Path, shell: Shell) -> None:
    said = shell("validate", file, status=1)
    assert "train_dataset: 6 of 6 rows (prompt_completion)" in said
    assert "6 held-out rows are trained on as well" in said
    assert "say one[ one" in said, "what carries loss is marked"


def test_a_file_with_a_ratio_of_loraplus_is_validated(file: Path, shell: Shell) -> None:
    shell("validate", file, "--set", "defaults.loraplus_lr_ratio=16", status=1)  # it warns of held-out rows
    said = shell.refused("validate", file, "--set", "defaults.loraplus_lr_ratio=-1")
    assert "loraplus_lr_ratio must be a finite number above 0, got -1" in said


def test_lengths_are_drawn_and_it_is_shown_whether_the_end_of_sequence_is_trained(
    file: Path, made: Path, shell: Shell
) -> None:
    rows = [{"prompt": "say", "completion": " one" * count} for count in (1, 1, 1, 1, 2, 20)]
    write_rows(made / "lengths.jsonl", rows)
    words = ["validate", file, "--set", f"defaults.dataset={made / 'lengths.jsonl'}"]
    cut = [*words, "--set", "tasks.math.max_length=10"]
    found = shell.json(*cut, status=1)
    bins = found["sql"]["splits"]["train_dataset"]["histogram"]
    shortest = found["sql"]["splits"]["train_dataset"]["shortest"]
    assert [own["rows"] for own in bins] == [5, 0, 0, 0, 0, 0, 1]
    assert [own["from"] for own in bins] == [shortest + 3 * number for number in range(7)]
    assert bins[-1]["to"] == shortest + 19
    assert (found["sql"]["end_of_sequence"]["trained"], found["math"]["end_of_sequence"]["trained"]) == (6, 5)
    sql, math = shell(*cut, status=1).split("\nmath  ")
    assert f"  {'#' * 32}  5\n" in sql
    assert f"  {'#' * 7}{' ' * 25}  1\n" in sql
    assert ": trained in 6 of 6 rows\n" in sql
    assert ": trained in 5 of 6 rows; rows without it teach no end" in math


def test_adapters_of_a_run_are_served_merged_and_copied(file: Path, tmp_path: Path, made: Path, shell: Shell) -> None:
    shell("train", file, "--set", "tasks.math.peft.use_dora=true")
    run, merged, copy = (tmp_path / name for name in ("out", "merged", "copy"))
    said = shell("export", run)
    command = shlex.split(said.splitlines()[-1])
    assert command[:2] == ["vllm", "serve"]
    assert command[command.index("--max-lora-rank") + 1] == "8", "the least that holds rank 4"
    assert f"sql={run}/sql" in command
    assert "math: vLLM does not serve it: it has use_dora=True" in said
    saved = run / "sql" / "adapter_config.json"
    plain = json.loads(saved.read_text(encoding="utf-8"))
    for field, value in {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}, "lora_bias": True}.items():
        saved.write_text(json.dumps({**plain, field: value}), encoding="utf-8")
        assert f"it has {field}={value}" in shell.json("export", run, status=2)["refused"]["sql"]
    saved.write_text(json.dumps(plain), encoding="utf-8")
    shell("export", run, "--merge", "sql", "--output", merged)
    base, own = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (made / "backbone", merged))
    assert base.keys() == own.keys()
    assert any((base[key] != own[key]).any() for key in base)
    shell("export", run, "sql", "--output", copy)
    assert {path.name for path in copy.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    shell.refused("export", run, "sql", "--output", copy)
    shell.refused("export", run, "--merge", "absent", "--output", tmp_path / "x")
    shell.refused("export", tmp_path / "nowhere")


def test_a_task_that_classifies_alongside_others_is_merged_with_its_classes(
    file: Path, tmp_path: Path, made: Path, shell: Shell
) -> None:
    write_rows(
        made / "moods.jsonl", [{"text": f"say {word}", "label": label} for label, word in enumerate("onetwo"[:5])]
    )
    mood = "\n  mood: {dataset: moods.jsonl, peft: {task_type: SEQ_CLS}, max_steps: 2}\n"
    file.write_text(file.read_text(encoding="utf-8") + mood, encoding="utf-8")
    shell("train", file)
    shell("export", tmp_path / "out", "--merge", "mood", "--output", tmp_path / "merged")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").score.weight.shape[0] == 5


def test_an_adapter_whose_configuration_is_cut_off_is_named(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "run" / "sql"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LO', encoding="utf-8")
    (folder / "adapter_model.safetensors").touch()
    said = shell.refused("export", tmp_path / "run")
    assert f"{folder / 'adapter_config.json'} must be a file that PEFT wrote, but cannot be read" in said


def test_the_doctor_says_what_is_there(shell: Shell) -> None:
    found = shell.json("doctor")
    assert {"python", "versions", "devices", "kernels", "disk", "hub", "amiss"} == found.keys()
    assert found["versions"]["torch"][0].isdigit()
    assert "torch" in shell("doctor")


def test_a_doctor_that_finds_a_driver_asks_torch(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("peft_mux.cli.starting.installed_version", lambda name: "2.9.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert any(one.startswith("torch sees no GPU") for one in shell.json("doctor", status=1)["amiss"])


def test_the_schema_knows_good_files_and_finds_wrong_keys_and_types(file: Path, shell: Shell) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs the notebooks extra")
    written = json.loads(shell("config-schema"))
    assert written == schema()
    good = yaml.safe_load(file.read_text(encoding="utf-8").replace("1e-2", "0.01"))
    jsonschema.validate(good, written)
    bad = {**good, "run": {**good["run"], "logging_stepz": 1, "bf16": "yes"}}
    faults = jsonschema.Draft202012Validator(written).iter_errors(bad)
    assert sorted((fault.validator, *fault.path) for fault in faults) == [
        ("additionalProperties", "run"),
        ("type", "run", "bf16"),
    ]


@pytest.mark.slow
def test_tasks_of_a_file_come_into_a_run_that_another_process_trains(file: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "peft_mux", "train", str(file), "--set", "run.max_steps=100000"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run, more = str(tmp_path / "out"), file.with_name("more.yaml")
    more.write_text("defaults: {dataset: rows.jsonl, peft: {r: 2}}\ntasks:\n  sql: {}\n  late: {max_steps: 3}\n")
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "out" / "metrics.jsonl").is_file() and time.monotonic() < until:
            time.sleep(0.2)
        assert main(["add", run, str(more)]) == 0, "sql is there already, so only late is meant"
        assert main(["pause", run, "sql"]) == 0
        while not (tmp_path / "out" / "late" / "adapter_model.safetensors").is_file() and time.monotonic() < until:
            time.sleep(0.2)
        assert process.wait(30) == 3, "every task has ended or is paused"
    finally:
        process.kill()
    assert (tmp_path / "out" / "late" / "adapter_model.safetensors").is_file()
    assert yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())["tasks"].keys() == {"sql", "math", "late"}


def test_a_sample_keeps_the_spaces_that_a_tokenizer_drops_of_a_first_token() -> None:
    class Words:
        words = ("", "▁the", "▁film", "▁is", "▁good")

        def decode(self, ids: list[int]) -> str:
            return "".join(self.words[one] for one in ids).replace("▁", " ").removeprefix(" ")

    row = SimpleNamespace(input_ids=np.array([1, 2, 3, 4]), labels=np.array([-100, -100, -100, 4]))
    assert _sample(row, Words()) == [("the film is", False), (" good", True)]
    assert _sample(row, None) == [("1 2 3 ", False), ("4 ", True)]


def test_a_command_prints_a_warning_as_one_line_and_leaves_python_as_it_was(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(arguments: Any) -> int:
        # What Python prints of a warning; tests record warnings instead of printing them.
        sys.stderr.write(warnings.formatwarning("rows are cut", UserWarning, "file.py", 7))
        return 0

    before = warnings.formatwarning
    monkeypatch.setattr(commands, "demo", command)
    assert shell.streams("demo")[1] == "warning: rows are cut\n"
    assert warnings.formatwarning is before
