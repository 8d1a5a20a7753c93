"""One run in a logger for all tasks, or one for each, all alive at once: stand-ins keep what the loggers get."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from peft_mux import ConfigError, MultiTaskTrainingArguments
from peft_mux.reporting.trackers import IDS_NAME, TaskTrackers
from tests.invariants import mux_lab as lab
from tests.reporting.trackers import pretended_loggers
from tests.reporting.trackers.pretended_loggers import Writer
from tests.runs import SAVING, Acts, raising, stops_after
from tests.trainer.parts import make_run

FINISHED = {"wandb": 0, "mlflow": "FINISHED", "trackio": "finished"}
FAILED = {"wandb": 1, "mlflow": "FAILED", "trackio": "finished"}
CUT_OFF = {"wandb": 0, "mlflow": "KILLED", "trackio": "finished"}
NAMES = tuple(FINISHED)


Loggers = dict[str, pretended_loggers.Logger]


def pretend(name: str, monkeypatch: pytest.MonkeyPatch) -> pretended_loggers.Logger:
    logger = pretended_loggers.Logger()
    for module, contents in getattr(pretended_loggers, name)(logger).items():
        monkeypatch.setitem(sys.modules, module, contents)
    monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: True)
    return logger


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> Loggers:
    """Let stand-ins of all loggers be installed."""
    return {name: pretend(name, monkeypatch) for name in NAMES}


def two_tasks(**settings: Any) -> list[Any]:
    return [
        lab.small_task("a", data_seed=1, max_steps=4, learning_rate=1e-3, **settings),
        lab.small_task("b", data_seed=2, max_steps=6, eval_dataset=lab.rows(3, 4, 5, 9), eval_steps=3),
    ]


def trained(folder: Path, recorder: lab.Recorder | None = None, tasks: Any = None, **arguments: Any) -> lab.Run:
    """Train with a run in every logger for each task."""
    options = {"report_to": list(NAMES), "report_per_task": True, "logging_strategy": "steps", "logging_steps": 2}
    return lab.train(tasks or two_tasks(), folder, recorder=recorder, **{**options, **arguments})


def test_each_task_has_a_run_with_its_settings_that_ends_with_it_while_the_others_continue(
    tmp_path: Path, loggers: Loggers
) -> None:
    endings: dict[int, Any] = {}

    def look(trainer: Any) -> None:
        step = trainer.state.global_step
        endings[step] = {name: [run.ending for run in logger.runs] for name, logger in loggers.items()}

    trained(tmp_path / "run", lab.Recorder(at_end={3: look, 5: look}))
    for name, logger in loggers.items():
        first, second = logger.runs
        assert (first.name, second.name) == ("run/a", "run/b"), "the folder names a run that has no name"
        assert second.others == ["run/a"], "both were active at once"
        assert first.begun["group"] == second.begun["group"] == "run"
        assert first.steps_of("train/loss") == [2, 4]
        assert second.steps_of("train/loss") == [2, 4, 6]
        assert second.steps_of("eval/loss") == [3, 6]
        assert not any("eval/loss" in numbers for numbers, _ in first.logs)
        assert (endings[3][name], endings[5][name]) == ([None, None], [FINISHED[name], None])
        assert second.ending == FINISHED[name]
        assert [float(run.settings["learning_rate"]) for run in logger.runs] == [1e-3, 3e-3]
        assert [int(run.settings["num_steps"]) for run in logger.runs] == [4, 6]
        assert int(first.settings["hidden_size"]) == 32, "the backbone's, as in Trainer"
        assert "all-linear" in str(first.settings["peft_config"])
    assert json.loads((tmp_path / "run" / "a" / IDS_NAME).read_text()).keys() == loggers.keys()


def test_a_removed_task_ends_its_run_and_one_that_comes_under_its_name_has_another(
    tmp_path: Path, loggers: Loggers
) -> None:
    ended: dict[str, list[Any]] = {}

    def return_another(trainer: Any) -> None:
        ended.update({name: [run.ending for run in logger.runs] for name, logger in loggers.items()})
        trainer.register_tasks([lab.small_task("a", data_seed=5, max_steps=2)])

    trained(tmp_path, lab.Recorder(at_end={2: lambda trainer: trainer.remove_task("a"), 3: return_another}))
    for name, logger in loggers.items():
        assert ended[name] == [CUT_OFF[name], None]
        before, after = logger.of("a")
        assert before.steps_of("train/loss") == [2]
        assert before.notes.get("task_status", "removed") == "removed"
        assert (after.steps_of("train/loss")[-1], after.ending) == (2, FINISHED[name])
        assert after.begun.get("resume") != "allow" or name == "wandb"
        assert name == "trackio" or before.run_id != after.run_id
        assert logger.of("b")[0].steps_of("train/loss") == [2, 4, 6]


def test_a_task_that_fails_ends_its_run_as_failed(tmp_path: Path, loggers: Loggers) -> None:
    fails = Acts(raising(ValueError("no more")), step=3)
    run = trained(tmp_path, tasks=two_tasks(callbacks=[fails]))
    assert run.trainer.task_statuses == {"a": "failed", "b": "succeeded"}
    for name, logger in loggers.items():
        first, second = logger.runs
        assert (first.ending, second.ending) == (FAILED[name], FINISHED[name])
        assert first.notes.get("task_status", "failed") == "failed"
        assert "no more" in first.notes.get("task_reason", "no more")


def test_what_cuts_the_training_off_ends_the_runs_of_its_tasks(tmp_path: Path, loggers: Loggers) -> None:
    with pytest.raises(ValueError, match="own callback"):
        trained(tmp_path, lab.Recorder(at_end={3: raising(ValueError("the run's own callback"))}))
    for name, logger in loggers.items():
        assert [run.ending for run in logger.runs] == [CUT_OFF[name]] * 2
        assert {run.notes.get("task_status", "interrupted") for run in logger.runs} == {"interrupted"}


def test_a_resumed_task_continues_with_its_run(tmp_path: Path, loggers: Loggers) -> None:
    trained(tmp_path, stops_after(5), **SAVING)
    for name, logger in loggers.items():
        endings = [run.ending for run in logger.runs]
        assert endings == [FINISHED[name], CUT_OFF[name]], "a had taken its four steps"
    trained(tmp_path, resume=True, **SAVING)
    ids = json.loads((tmp_path / "b" / IDS_NAME).read_text())
    for name, logger in loggers.items():
        (only,), (before, after) = logger.of("a"), logger.of("b")
        assert only.steps_of("train/loss") == [2, 4], "a task that has ended asks for no run"
        assert ids[name] == after.run_id == before.run_id
        assert after.begun["resume"] == "allow"
        assert (after.steps_of("train/loss"), after.ending) == ([6], FINISHED[name])


def test_a_training_that_starts_again_has_new_runs(tmp_path: Path, loggers: Loggers) -> None:
    for _ in range(2):
        trained(tmp_path)
    for name, logger in loggers.items():
        assert len(logger.runs) == 4
        if name == "trackio":  # which names a run of the same name again
            assert {run.begun["resume"] for run in logger.runs} == {"never"}
        else:
            assert len({run.run_id for run in logger.runs}) == 4


def test_a_file_of_ids_that_somebody_has_spoilt_costs_no_more_than_the_old_run(
    tmp_path: Path, loggers: Loggers
) -> None:
    trained(tmp_path, stops_after(2), **SAVING)
    (tmp_path / "a" / IDS_NAME).write_text("[1")
    (tmp_path / "b" / IDS_NAME).write_text(json.dumps({name: ["no id"] for name in NAMES}))
    run = trained(tmp_path, resume=True, **SAVING)
    assert set(run.trainer.task_statuses.values()) == {"succeeded"}
    for name, logger in loggers.items():
        assert [run.ending for run in logger.runs[2:]] == [FINISHED[name]] * 2


@pytest.mark.parametrize("broken", ["begin", "log", "end"])
def test_loggers_that_raise_end_neither_the_task_nor_the_run_and_are_reported_once_each(
    tmp_path: Path, loggers: Loggers, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, logger in loggers.items():

        def fails(run: str, what: str, name: str = name) -> None:
            if run.endswith("/a") and what == broken:
                raise OSError(f"no connection to {name}")

        logger.fails = fails
    run = trained(tmp_path, logging_steps=1)
    assert run.trainer.task_statuses == {"a": "succeeded", "b": "succeeded"}
    for name, logger in loggers.items():
        assert logger.of("b")[0].steps_of("train/loss") == [1, 2, 3, 4, 5, 6]
        messages = [record.getMessage() for record in caplog.records if f"connection to {name}" in record.getMessage()]
        assert len(messages) == 1
        assert 'task "a"' in messages[0]


def test_other_processes_than_the_first_keep_no_runs(
    tmp_path: Path, loggers: Loggers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, report_to=list(NAMES), report_per_task=True)
    for process, number in ((1, 0), (0, 1)):
        monkeypatch.setattr(MultiTaskTrainingArguments, "process_index", process)
        TaskTrackers(run.table["a"], run.args).hear("on_train_begin", None)
        assert [len(logger.runs) for logger in loggers.values()] == [number] * 3


def test_settings_of_the_loggers_are_heeded_as_in_trainer(
    tmp_path: Path, loggers: Loggers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setenv("MLFLOW_FLATTEN_PARAMS", "TRUE")
    monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "40")
    trained(tmp_path, project="theirs", trackio_space_id="me/space", trackio_bucket_id="me/bucket")
    expected: dict[str, dict[str, Any]] = {
        "wandb": {"project": "ours", "reinit": "create_new"},
        "mlflow": {"experiment_id": "7"},
        "trackio": {"project": "theirs", "space_id": "me/space", "bucket_id": "me/bucket"},
    }
    for name, wanted in expected.items():
        begun = loggers[name].runs[0].begun
        assert {key: begun[key] for key in wanted} == wanted
    settings = loggers["mlflow"].runs[0].settings
    assert len(settings) == 40
    assert not any(value.startswith("{") for value in settings.values())


# -------------------------------------------------------------------- TensorBoard


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """Let transformers find TensorBoard with a writer of ours; return those that are made."""
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter, Writer.made = Writer, []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    return Writer.made


class RewritesPart(TrainerCallback):
    """Rewrites the keys of a part of the numbers, and of other ones."""

    def on_log(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        part = {key: value for key, value in facts["logs"].items() if "eval" in key}
        self.logs = [integration_utils.rewrite_logs(logs) for logs in (part, {"other": 3.0})]


def test_one_run_has_all_tasks_by_their_names(tmp_path: Path, writers: list[Writer]) -> None:
    before = integration_utils.rewrite_logs
    trained(tmp_path / "run", report_to="tensorboard", report_per_task=False)
    (writer,) = writers
    keys = {key for key, _, _ in writer.scalars}
    assert {"run/memory_gib", "run/tokens_per_second"} <= keys
    assert not [key for key in keys if key.startswith(("train/", "eval/"))], "keys stay as they are"
    assert integration_utils.rewrite_logs is before, "other trainers of the process keep their keys"
    run = make_run(tmp_path / "parts")
    run.callbacks.handler.add_callback(parts := RewritesPart())
    run.callbacks.log({"a/loss": 1.0, "a/eval_loss": 2.0})
    assert parts.logs == [{"a/eval_loss": 2.0}, {"train/other": 3.0}], "W&B passes a part of the numbers"
    assert (writer.steps_of("a/loss"), writer.steps_of("b/loss")) == ([2, 4], [2, 4, 6])
    assert writer.steps_of("b/eval_loss") == [3, 6]
    assert writer.closed == 1


@pytest.mark.parametrize("place", ["run", "boards"])
def test_each_task_has_a_board_of_its_own_also_one_that_was_paused(
    place: str, tmp_path: Path, writers: list[Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "boards":
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "boards"))
    pauses = {2: lambda trainer: trainer.pause_task("b"), 3: lambda trainer: trainer.resume_task("b")}
    run = trained(tmp_path / "run", lab.Recorder(at_end=pauses), report_to="tensorboard", run_name="both")
    a, b = sorted(writers, key=lambda one: one.log_dir)
    assert [Path(one.log_dir).relative_to(tmp_path / place).parts[0] for one in (a, b)] == ["a", "b"]
    assert a.steps_of("train/loss") == [2, 4]
    assert b.steps_of("train/loss")[-1] == 6
    assert b.steps_of("eval/loss") == [3, 6]
    assert not any("/" in key.removeprefix("train/").removeprefix("eval/") for key, _, _ in a.scalars)
    assert '"learning_rate": 0.001' in a.texts["args"]
    assert '"run_name": "both/a"' in a.texts["args"]
    assert '"learning_rate": 0.003' in b.texts["args"]
    assert [one.closed for one in writers] == [1, 1]
    assert run.trainer.args.report_to == ["tensorboard"]


# ----------------------------------------------------------------------- refusals


def test_loggers_with_one_run_a_process_and_no_logger_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("comet", "wandb", "trackio"):
        monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: True)

    def refusal(report_to: Any, **settings: Any) -> str:
        options = {"use_cpu": True, "report_to": report_to, "report_per_task": True, **settings}
        with pytest.raises(ConfigError) as caught:
            MultiTaskTrainingArguments(str(tmp_path), **options)
        return str(caught.value)

    message = "args.report_per_task must be False, or used with tensorboard, wandb, mlflow, trackio only, got True with"
    assert refusal("none").startswith(f"{message} report_to=none.")
    assert refusal(["wandb", "comet_ml"]).startswith(f"{message} report_to=wandb, comet_ml.")
    assert "comet_ml supports one run per process" in refusal("comet_ml")
    said = refusal("trackio", trackio_static_space_id="me/space")
    assert "args.trackio_static_space_id must be None, got 'me/space'" in said


def test_a_run_that_mlflow_no_longer_has_is_replaced_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = pretend("mlflow", monkeypatch)
    trained(tmp_path, stops_after(2), report_to="mlflow", **SAVING)
    logger.runs.clear()
    trained(tmp_path, resume=True, report_to="mlflow", **SAVING)
    assert [run.steps_of("train/loss") for run in logger.runs] == [[4], [4, 6]]
    assert "run id-0 in MLflow cannot be continued" in caplog.text
