"""`environment.json`: what it says, what it does not say, and that no checkout holds a run up."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peft_mux import MultiTaskTrainingArguments
from peft_mux.checkpoint import saver as environment
from peft_mux.checkpoint.saver import ENVIRONMENT_NAME, commit_of_script, environment_of
from tests.invariants import mux_lab as lab


@pytest.fixture(autouse=True)
def _git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask git after all."""
    monkeypatch.setattr(environment, "commit_of_script", commit_of_script)


@pytest.fixture
def args(tmp_path: Path) -> MultiTaskTrainingArguments:
    return MultiTaskTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")


def git(folder: Path, *words: str) -> str:
    given = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *given, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_run_folder_says_with_what_it_was_trained_and_not_where(tmp_path: Path) -> None:
    lab.train([lab.small_task("a", data_seed=1, max_steps=1)], tmp_path / "run", save_strategy="steps")
    text = (tmp_path / "run" / ENVIRONMENT_NAME).read_text(encoding="utf-8")
    found = json.loads(text)
    assert (found["python"], found["num_processes"]) == (platform.python_version(), 1)
    assert found["versions"]["torch"] == torch.__version__
    assert {"transformers", "peft", "accelerate"} <= found["versions"].keys()
    assert found["device"].startswith("cpu, ")
    for secret in (platform.node(), getpass.getuser(), str(tmp_path)):
        assert f'"{secret}"' not in text
        assert f"/{secret}" not in text


def test_the_checkout_of_the_script_or_folder_is_reported_by_its_commit_and_whether_files_differ(
    args: MultiTaskTrainingArguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert environment_of(args)["git"] is None, "no checkout"
    git(folder, "init", "-q")
    assert environment_of(args)["git"] is None, "no commit yet"
    (folder / "train.py").write_text("1\n")
    git(folder, "add", "train.py")
    git(folder, "commit", "-q", "-m", "a")
    (folder / "notes").write_text("not part of it\n")
    commit = git(folder, "rev-parse", "HEAD").strip()
    assert environment_of(args)["git"] == {"commit": commit, "is_dirty": False}
    monkeypatch.chdir(tmp_path)
    assert environment_of(args)["git"] is None, "pytest is the script here, which is no part of anybody's work"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "train.py"), raising=False)
    (folder / "train.py").write_text("2\n")
    assert environment_of(args)["git"] == {"commit": commit, "is_dirty": True}


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 2.0)])
def test_where_git_is_absent_or_slow_a_run_continues_without(
    error: Exception, args: MultiTaskTrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: object, timeout: float, **options: object) -> None:
        assert timeout <= 2.0
        raise error

    monkeypatch.setattr(environment.subprocess, "run", run)
    assert environment_of(args)["git"] is None
