"""The examples do what they say, on a machine without network."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from peft_mux.cli.config_file import read_config
from peft_mux.cli.main import main
from peft_mux.demo.sentences import corpus
from peft_mux.demo.small_llama import make_backbone, make_tokenizer
from tests.paths import ROOT

TASKS_YAML = ROOT / "examples" / "tasks.yaml"


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("small-model")
    tokenizer = make_tokenizer(corpus(50))
    make_backbone(tokenizer, hidden_size=32, num_layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `datasets` makes of the example rows out of the reader's home."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def run_example(name: str, *arguments: str) -> str:
    """Run an example as a script, and return what it prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return printed.getvalue()


# ----------------------------------------------------------------- quickstart


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the quickstart prints when it makes its own model, and the folder that it leaves."""
    folder = tmp_path_factory.mktemp("quickstart")
    return run_example("quickstart.py", "--output-dir", str(folder / "out")), folder / "out"


@pytest.mark.slow
def test_the_quickstart_plans_three_tasks_and_teaches_each_its_held_out_answers(quickstart: tuple[str, Path]) -> None:
    printed, _ = quickstart
    assert "plan  3 tasks on " in printed
    pattern = r"^(\w+) +held out: loss ([\d.]+) -> ([\d.]+), right answers (\d+)% -> (\d+)%$"
    rows = re.findall(pattern, printed, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["mood", "kind", "action"]
    for name, loss_before, loss_after, right_before, right_after in rows:
        assert f"{name}: succeeded" in printed
        assert float(loss_after) < 0.5 * float(loss_before), name
        assert int(right_before) < 50 < 90 <= int(right_after), name


@pytest.mark.slow
def test_the_adapters_of_the_quickstart_are_plain_peft(quickstart: tuple[str, Path]) -> None:
    printed, folder = quickstart
    for name in ("mood", "kind", "action"):
        assert LoraConfig.from_pretrained(folder / "run" / name).target_modules, name
        assert (folder / "run" / name / "adapter_model.safetensors").is_file()
    assert f"plain PEFT loads {folder / 'run' / 'mood'}" in printed
    assert printed.rstrip().endswith(("-> ' happy'", "-> ' unhappy'"))


def test_the_adapters_of_the_quickstart_answer_together(quickstart: tuple[str, Path]) -> None:
    _, folder = quickstart
    printed = run_example("generate.py", "--model", str(folder / "backbone"), "--run", str(folder / "run"))
    rows = re.findall(r"^(\w+) .* -> '(.*?)' \(wanted '(.*?)'\)", printed, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["mood", "mood", "kind", "kind", "action", "action"]
    assert sum(text.strip(" .") == wanted.strip(" .") for _, text, wanted in rows) >= 5


def test_three_models_with_three_losses_learn_in_one_pass_and_one_is_sampled() -> None:
    printed = run_example("calls.py", "--num-steps", "6")
    losses = [re.findall(r"-?\d+\.\d+", line) for line in printed.splitlines() if line.startswith("step ")]
    assert [len(own) for own in losses] == [3] * 6
    assert all(float(last) < float(first) for first, last in zip(losses[0], losses[-1], strict=True))
    assert re.search(r"^teacher: \[\d+, \d+, \d+\] -> \[\d+(, \d+){4}\]$", printed, flags=re.MULTILINE)


@pytest.mark.slow
def test_the_quickstart_takes_a_model_of_the_readers_own(small_model: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(small_model), "--output-dir", str(tmp_path / "out"), "--max-steps", "2")
    printed = run_example("quickstart.py", *arguments)
    assert "plain PEFT loads" in printed
    assert not (tmp_path / "out" / "backbone").exists()


# ----------------------------------------------------------------- tasks.yaml


def test_the_example_file_describes_three_tasks_whose_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    config = read_config(TASKS_YAML, [f"output_dir={tmp_path}"])
    assert [task.name for task in config.tasks] == ["sql", "sums", "tales"]
    assert config.model == "Qwen/Qwen3-0.6B"
    for task in config.tasks:
        trained_on = {json.dumps(row, sort_keys=True) for row in task.train_dataset}
        if task.eval_dataset is None:
            assert len(trained_on) == 30, f"{task.name}: a row stands twice"
            continue
        held_out = {json.dumps(row, sort_keys=True) for row in task.eval_dataset}
        assert (len(trained_on), len(held_out)) == (24, 6), task.name
        assert not trained_on & held_out, task.name


def test_the_example_file_is_planned_with_a_model_of_the_readers_own(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", str(TASKS_YAML), "--set", f"model={small_model}", "--set", f"output_dir={tmp_path}"])
    printed = capsys.readouterr().out
    assert status == 0
    assert "plan  3 tasks on " in printed
    # 24 rows in batches of 8 for 3 epochs; max_steps; 30 rows in batches of 4 for 3 epochs.
    steps = dict(re.findall(r"^  (sql|sums|tales) +1 +\d+ +[\d,]+ +(\d+)", printed, flags=re.MULTILINE))
    assert steps == {"sql": "9", "sums": "12", "tales": "24"}


@pytest.mark.slow
def test_the_example_file_is_trained_with_a_model_of_the_readers_own(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (f"model={small_model}", f"output_dir={tmp_path / 'run'}", "tasks.tales.max_steps=3")
    status = main(["train", str(TASKS_YAML), *(part for item in settings for part in ("--set", item))])
    printed = capsys.readouterr().out
    assert status == 0
    assert re.search(r"^tales +succeeded +3/3 ", printed, flags=re.MULTILINE)
    for name in ("sql", "sums", "tales"):
        assert (tmp_path / "run" / name / "adapter_config.json").is_file(), name


def test_the_minimal_example_trains_each_task_together_as_it_does_alone() -> None:
    minimal = runpy.run_path(str(ROOT / "examples" / "minimal.py"))
    torch.manual_seed(0)
    backbone = minimal["Backbone"]()
    together, alone = minimal["train"](backbone, "ab"), {}
    for name in "ab":
        alone |= minimal["train"](backbone, name)
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
        assert together[name][-1] < 0.75 * together[name][0]
