"""One run in a logger for all tasks, or one for each: TensorBoard's callback of transformers with a writer of ours."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers.integrations import integration_utils

from tests.invariants import mux_lab as lab


class Writer:
    """Keeps what a `SummaryWriter` would write."""

    made: list[Writer]

    def __init__(self, log_dir: str) -> None:
        self.log_dir, self.scalars, self.texts, self.closed = log_dir, [], {}, 0
        Writer.made.append(self)

    def add_scalar(self, key: str, value: float, global_step: int) -> None:
        self.scalars.append((key, value, global_step))

    def add_text(self, key: str, text: str, global_step: int | None = None) -> None:
        self.texts[key] = text

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers find TensorBoard."""
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter, Writer.made = Writer, []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)


def trained(folder: Path, recorder: lab.Recorder | None = None, **arguments: Any) -> lab.Run:
    tasks = [
        lab.small_task("a", data_seed=1, max_steps=4, learning_rate=1e-3),
        lab.small_task("b", data_seed=2, max_steps=6, eval_dataset=lab.rows(3, 4, 5, 9), eval_steps=3),
    ]
    options = {"report_to": "tensorboard", "logging_strategy": "steps", "logging_steps": 2, **arguments}
    return lab.train(tasks, folder, recorder=recorder, **options)


def steps_of(writer: Writer, key: str) -> list[int]:
    return [step for name, _, step in writer.scalars if name == key]


def test_one_run_has_all_tasks_by_their_names(tmp_path: Path) -> None:
    before = integration_utils.rewrite_logs
    trained(tmp_path / "run")
    (writer,) = Writer.made
    keys = {key for key, _, _ in writer.scalars}
    assert {"run/memory_gib", "run/tokens_per_second"} <= keys
    assert not [key for key in keys if key.startswith(("train/", "eval/"))], "keys stay as they are"
    assert integration_utils.rewrite_logs is before, "other trainers of the process keep their keys"
    assert steps_of(writer, "a/loss") == [2, 4]
    assert steps_of(writer, "b/loss") == [2, 4, 6]
    assert steps_of(writer, "b/eval_loss") == [3, 6]
    assert writer.closed == 1


@pytest.mark.parametrize("place", ["run", "boards"])
def test_each_task_has_a_run_of_its_own_with_its_own_steps_arguments_and_plain_keys(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "boards":
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "boards"))
    run = trained(tmp_path / "run", report_per_task=True, run_name="both")
    writers = {Path(one.log_dir).relative_to(tmp_path / place).parts[0]: one for one in Writer.made}
    assert sorted(writers) == ["a", "b"]
    assert len(Writer.made) == 2
    assert steps_of(writers["a"], "train/loss") == [2, 4]
    assert steps_of(writers["b"], "train/loss") == [2, 4, 6]
    assert steps_of(writers["b"], "eval/loss") == [3, 6]
    assert not any("/" in key.removeprefix("train/").removeprefix("eval/") for key, _, _ in writers["a"].scalars)
    assert '"learning_rate": 0.001' in writers["a"].texts["args"]
    assert '"run_name": "both/a"' in writers["a"].texts["args"]
    assert '"learning_rate": 0.003' in writers["b"].texts["args"]
    assert [one.closed for one in Writer.made] == [1, 1]
    assert run.trainer.args.report_to == ["tensorboard"]


def test_a_task_that_was_paused_continues_with_its_run(tmp_path: Path) -> None:
    pauses: dict[int, Any] = {2: lambda trainer: trainer.pause_task("b"), 3: lambda trainer: trainer.resume_task("b")}
    trained(tmp_path, lab.Recorder(at_end=pauses), report_per_task=True, logging_steps=1)
    first, second = sorted(Writer.made, key=lambda one: one.log_dir)
    assert steps_of(first, "train/loss") == [1, 2, 3, 4]
    assert steps_of(second, "train/loss") == [1, 2, 3, 4, 5, 6]


def test_a_logger_that_does_not_let_go_keeps_no_task_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: Writer) -> None:
        raise OSError("no connection")

    def leave(trainer: Any) -> None:
        monkeypatch.setattr(Writer, "close", fail)
        trainer.remove_task("a")

    acts = {2: leave, 3: lambda trainer: monkeypatch.undo()}
    run = trained(tmp_path, lab.Recorder(at_end=acts), report_per_task=True)
    assert run.trainer.task_statuses == {"b": "succeeded"}
    assert run.trainer.model.tasks == ("b",)
