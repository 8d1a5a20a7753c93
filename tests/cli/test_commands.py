"""`peft-mux plan` and `train`: what they print and write, and with which status they end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import peft_mux
from peft_mux.cli import config_file
from peft_mux.cli.config_file import read_config
from peft_mux.cli.main import _QUIET, main
from peft_mux.planning.profiling import backbone as profiling
from peft_mux.reporting.mailbox import Mailbox
from peft_mux.trainer.loop import TrainingLoop
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.paths import ROOT
from tests.records import run_records
from tests.shell import Shell

# ------------------------------------------------------------------- train


def test_train_writes_the_adapters_of_python_which_plain_peft_loads_and_ends_with_0(
    file: Path, made: Path, tmp_path: Path, shell: Shell
) -> None:
    config = read_config(file, [f"output_dir={tmp_path / 'python'}"])
    MultiTaskTrainer(config.model, config.args, config.tasks).train()
    said, out = shell("train", file), tmp_path / "out"
    assert "plan  2 tasks on cpu" in said
    report = said[said.rindex("task  ") :]
    for name, steps in (("sql", "3/3"), ("math", "2/2")):
        (line,) = [line for line in report.splitlines() if line.startswith(name)]
        assert all(part in line.split() for part in (name, "succeeded", steps, str(out / name)))
        backbone = AutoModelForCausalLM.from_pretrained(made / "backbone")
        adapter = PeftModel.from_pretrained(backbone, out / name)
        learned = [value for key, value in adapter.named_parameters() if "lora_B" in key]
        assert learned
        assert all(torch.count_nonzero(value) for value in learned), f"{name} was not trained"
        weights = [tmp_path / place / name / "adapter_model.safetensors" for place in ("out", "python")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    written = {path.name for path in out.iterdir()} - {"losses.png"}  # where matplotlib is
    assert written == {
        "sql",
        "math",
        "state",
        "metrics.jsonl",
        "run.yaml",
        "config.json",
        "plan.json",
        "environment.json",
        "report.html",
    }
    losses = [(record["task"], record["step"]) for record in run_records(out, "train")]
    assert sorted(losses) == [("math", 1), ("math", 2), ("sql", 1), ("sql", 2), ("sql", 3)]


def test_train_obeys_set_and_writes_tokens_of_the_environment_nowhere(
    file: Path, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUX_TOKEN", "hf_secret_of_the_owner")
    changes = ["run.hub_token=${MUX_TOKEN}", "model_init_kwargs.token=${MUX_TOKEN}", "tasks.math.max_steps=1"]
    changes += [f"output_dir={tmp_path / 'other'}", "tasks.math.peft.r=3"]
    said = shell.streams("train", file, *(part for change in changes for part in ("--set", change)))
    files = {path.name: path.read_bytes() for path in (tmp_path / "other").rglob("*") if path.is_file()}
    config = json.loads(files["config.json"])["tasks"]
    assert (config["math"]["num_steps"], config["math"]["peft_config"]["r"]) == (1, 3)
    assert (config["sql"]["num_steps"], config["sql"]["peft_config"]["r"]) == (3, 4)
    assert not (tmp_path / "out").exists()
    assert {"config.json", "report.html", "metrics.jsonl"} <= files.keys()
    assert [name for name, data in files.items() if b"hf_secret" in data] == []
    assert "hf_secret" not in "".join(said)


def test_a_second_train_is_refused_before_a_model_or_rows_are_read_and_resume_continues(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    shell("train", file)
    before = (tmp_path / "out" / "sql" / "adapter_model.safetensors").read_bytes()
    shell("train", file, "--resume")
    assert (tmp_path / "out" / "sql" / "adapter_model.safetensors").read_bytes() == before
    monkeypatch.setattr("peft_mux.cli.commands.make_trainer", lambda config: pytest.fail("a trainer was made"))
    assert "which holds a run" in shell.refused("train", file)
    new = f"output_dir={tmp_path / 'new'}"
    assert "holds no state of a run" in shell.refused("train", file, "--resume", "--set", new)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_training_that_a_signal_ends_says_where_it_was_saved_and_its_status_tells_the_signal(
    file: Path,
    tmp_path: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    status: int,
) -> None:
    step = TrainingLoop.train_step

    def interrupted(self: TrainingLoop) -> None:
        step(self)
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patches:
        patches.setattr(TrainingLoop, "train_step", interrupted)
        said = shell("train", file, status=status)
    name, out = signal.Signals(number).name, tmp_path / "out"
    assert f"interrupted by {name} after step 1; saved in {out}; resume with" in said
    assert "peft-mux train FILE --resume" in said
    shell("train", file, "--resume")


def test_an_interrupt_before_training_ends_with_130_and_no_traceback(
    file: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("peft_mux.cli.commands.read_config", interrupted)
    assert shell.streams("train", file, status=130)[1] == "interrupted\n"


def pause(out: Path, *names: str) -> None:
    """Leave requests that a training reads before its first step."""
    out.mkdir(exist_ok=True)
    for name in names:
        Mailbox(out).send({"command": "pause", "task": name})


def test_a_training_that_ends_while_a_task_is_paused_says_so_with_a_status_and_the_command_that_continues(
    file: Path, tmp_path: Path, shell: Shell
) -> None:
    pause(tmp_path / "out", "sql")
    said = shell("train", file, "--set", "tasks.sql.max_steps=4", status=3)
    assert "paused sql: the run has ended, with steps left" in said
    lines = said.splitlines()
    line = lines[lines.index("next   # resume the run") + 1]
    commands = [shlex.split(part) for part in line.split("&&")]
    assert [words[:2] for words in commands] == [["peft-mux", "resume"], ["peft-mux", "train"]]
    _, report = (shell(*words[1:]) for words in commands)
    assert any(line.split()[:3] == ["sql", "succeeded", "4/4"] for line in report.splitlines())


def test_only_tasks_that_have_ended_well_are_served_unless_asked_for(file: Path, tmp_path: Path, shell: Shell) -> None:
    out = tmp_path / "out"
    pause(out, "sql")
    shell("train", file, status=3)
    left_out, command = shell("export", out, "--vllm").splitlines()
    assert left_out == "sql: left out, paused at step 0 of 3; --unfinished includes it"
    assert (f"math={out}/math" in command, f"sql={out}/sql" in command) == (True, False)
    (command,) = shell("export", out, "--vllm", "--unfinished").splitlines()
    assert f"math={out}/math sql={out}/sql" in command
    assert shell.json("export", out)["unfinished"] == {"sql": "paused at step 0 of 3"}
    merge = ("export", out, "--merge", "sql", "--output", tmp_path / "merged")
    assert "sql has not succeeded (paused at step 0 of 3). Add --unfinished to merge it." in shell.refused(*merge)
    assert shell(*merge, "--unfinished") == f"merged: {tmp_path / 'merged'}\n"


def test_a_look_at_a_run_that_starts_says_what_it_loads_until_it_trains(
    file: Path, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def looking(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def look(*arguments: Any, **options: Any) -> Any:
            seen.append(shell.json("status", tmp_path / "out")["loading"])
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, look)

    looking(config_file, "rows_of")
    looking(Placement, "load")
    looking(TrainingLoop, "train_step")
    shell("train", file, "--set", "run.max_steps=1", "--set", "tasks.math.max_steps=1")
    assert list(dict.fromkeys(seen)) == ["data", "model", None]


def shown(folder: Path, *words: str) -> str:
    """Return what an interpreter of its own writes to standard error."""
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    for name in _QUIET:
        environment.pop(name, None)
    command = [sys.executable, "-m", "peft_mux", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_nothing_of_a_library_is_shown(file: Path, tmp_path: Path) -> None:
    assert shown(tmp_path, "train", str(file), "--set", "tasks.sql.eval_dataset=null") == ""


@pytest.mark.slow  # another interpreter
def test_what_libraries_show_can_be_asked_for(file: Path, tmp_path: Path) -> None:
    assert "Generating train split" in shown(tmp_path, "plan", str(file), "--verbose")


def test_json_of_a_training_is_alone_on_standard_output(file: Path, tmp_path: Path, shell: Shell) -> None:
    third = "tasks.third={max_steps: 2}"
    pause(tmp_path / "out", "third")
    settings = ["--set", third, "--set", "tasks.sql.learning_rate=1e30"]
    # A failed task counts more than a paused one.
    printed, said = shell.streams("train", file, "--json", *settings, status=1)
    found = json.loads(printed)
    assert (found["output_dir"], found["interrupted_by"], found["sweeps"]) == (str(tmp_path / "out"), None, [])
    sql, math, third = (found["tasks"][name] for name in ("sql", "math", "third"))
    assert (sql["status"], math["status"], math["reason"]) == ("failed", "succeeded", "")
    assert (math["step"], math["num_steps"], math["place"]) == (2, 2, str(tmp_path / "out" / "math"))
    assert math["loss"] > 0
    assert third["status"] == "paused"
    assert "NaN" not in printed
    assert "plan  3 tasks on cpu" in said


# -------------------------------------------------------------------- plan


def test_a_profile_is_measured_once_and_read_again_until_asked_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    measured: list[int] = []
    measure = profiling._measure
    monkeypatch.setattr(profiling, "_measure", lambda *given: measured.append(1) or measure(*given))
    output = tmp_path / "out.json"
    command = ["profile", file, "--output", output, "--seconds", "0.3"]
    shell(*command)
    first = output.read_text(encoding="utf-8")
    output.unlink()
    assert "measured up to" in shell(*command)
    assert output.read_text(encoding="utf-8") == first
    assert len(measured) == 1
    assert "measured up to" in shell(*command, "--refresh")
    assert len(measured) == 2
    found = shell.json(*command)
    assert found["written"] == str(output)
    assert found["profile"] == json.loads(output.read_text(encoding="utf-8"))


def test_plan_shows_every_task_and_the_memory_and_makes_no_folder(file: Path, tmp_path: Path, shell: Shell) -> None:
    said = shell("plan", file)
    assert "plan  2 tasks on cpu" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["sql", "3"] in [[words[0], words[4]] for words in lines if len(words) == 6]
    assert ["math", "2"] in [[words[0], words[4]] for words in lines if len(words) == 6]
    assert "memory (analytic estimate)  peak" in said
    assert not (tmp_path / "out").exists(), "output_dir may be a path meant for another machine"


def test_a_terminal_shows_memory_that_is_nearly_full_in_red(
    file: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" not in shell("plan", file)
    monkeypatch.setattr("peft_mux.planning.targets.device_memory_bytes", lambda device: 2**10)
    (red,) = [line for line in shell("plan", file).splitlines() if "\x1b" in line]
    assert red.startswith("\x1b[31m        [#")
    assert red.endswith("NEARLY FULL: more than 95 %\x1b[0m")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert "\x1b" not in shell("plan", file)


def test_plan_as_json_can_be_read_and_needs_no_weights_but_train_does(file: Path, made: Path, shell: Shell) -> None:
    bare = made / "bare"
    bare.mkdir()
    for path in (made / "backbone").iterdir():
        if path.suffix != ".safetensors":
            (bare / path.name).write_bytes(path.read_bytes())
    shares = shell.json("plan", file, "--set", "model=bare")["shares"]
    assert [(share["name"], share["num_steps"]) for share in shares] == [("sql", 3), ("math", 2)]
    assert "bare" in shell.refused("train", file, "--set", "model=bare")


# ------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("command", "override", "said"),
    [
        ("train", "tasks.sql.peft.target_modules=[no_such]", "tasks.sql"),
        ("plan", "model=absent-model", "/absent-model: paths are relative to the folder of the file."),
        ("train", "model=absent-model", 'model "absent-model" cannot be read'),
        ("plan", "tokenizer=absent-tokenizer", "/absent-tokenizer: paths are relative to the folder of the file."),
    ],
)
def test_a_fault_ends_with_2_and_is_named_without_a_traceback(
    command: str, override: str, said: str, file: Path, tmp_path: Path, shell: Shell
) -> None:
    assert said in shell.refused(command, file, "--set", override)
    assert not (tmp_path / "out").exists()


def test_rows_of_an_unknown_form_end_with_2_by_task(file: Path, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "odd.jsonl").write_text('{"promt": "a", "completion": "b"}\n', encoding="utf-8")
    said = shell.refused("train", file, "--set", f"tasks.sql.dataset={tmp_path / 'odd.jsonl'}")
    assert "tasks.sql.train_dataset must have the columns input_ids; prompt + completion; messages; text," in said
    assert "got columns promt, completion" in said
    assert 'Did you mean "prompt"?' in said


def test_a_tokenizer_folder_next_to_the_file_is_found(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "plan  2 tasks on cpu" in shell("plan", file, "--set", "tokenizer=backbone")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "usage: peft-mux"),
        (["train"], 2, "usage: peft-mux"),
        (["plan", "a.yaml", "--colour"], 2, "usage: peft-mux"),
        (["stat", "runs/a"], 2, 'Did you mean "status"?'),
        (["--version"], 0, f"peft-mux {peft_mux.__version__}\n"),
        (["train", "--help"], 0, "--resume"),
        (["plan", "--help"], 0, "--set"),
        (["demo", "--help"], 0, "--fast"),
    ],
)
def test_help_the_version_and_the_usage_of_a_wrong_command_line_are_printed(
    words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == status
    printed = capsys.readouterr()
    assert said in (printed.err if status else printed.out)
