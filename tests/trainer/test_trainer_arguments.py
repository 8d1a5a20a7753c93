"""Arguments and callbacks of Trainer that work as in Trainer, for each task: best adapters, epochs, shares, uploads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.storage import numbered_folders
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants.mux_lab import Recorder, make_trainer, rows, small_task, tiny_llama, train, weights
from tests.records import run_records as records
from tests.runs import SAVING, Acts, assert_equal_weights, stops_after

HELD_OUT = rows(5, 4, 9, 9)


def scored(scores: list[float], name: str = "own", **settings: Any) -> Any:
    """Return a task whose evaluations score as listed."""
    left = iter(scores)
    options = {"eval_steps": 1, "max_steps": len(scores), "eval_dataset": HELD_OUT, **settings}
    return small_task(name, data_seed=1, compute_metrics=lambda _: {"score": next(left)}, **options)


# ------------------------------------------------------------------ best adapters


def test_the_early_stopping_callback_of_transformers_stops_its_task_alone(tmp_path: Path) -> None:
    stops = EarlyStoppingCallback(early_stopping_patience=2)
    own = scored([3.0, 5.0, 4.0, 4.5, 9.0, 9.0], callbacks=[stops], metric_for_best_model="score")
    evaluated: dict[str, Any] = {"eval_dataset": {"a": HELD_OUT, "b": HELD_OUT}, "eval_steps": 1}
    evaluated |= {"metric_for_best_model": "b_loss"}
    by_loss = small_task("by-loss", data_seed=1, callbacks=[EarlyStoppingCallback(2, 1.0)], **evaluated)
    trainer = make_trainer([own, by_loss, small_task("other", data_seed=2, max_steps=5)], tmp_path)
    trainer.train()
    assert trainer.task_statuses == {"own": "stopped_early", "by-loss": "stopped_early", "other": "succeeded"}
    assert trainer.table["own"].reason == "stopped by a callback of the task"
    assert trainer.table["own"].step == 4, "two evaluations in a row were no better than 5.0"
    assert trainer.table["by-loss"].step == 3, "no later loss was less by 1.0"
    state = trainer.task_states["own"]
    assert (state.best_metric, state.best_global_step) == (5.0, 2)
    said = r"callbacks must be without EarlyStoppingCallback, .*, got one for the whole run.*Task\(callbacks="
    with pytest.raises(ConfigError, match=said):
        MultiTaskTrainer(tiny_llama(), trainer.args, [small_task("a", data_seed=1)], callbacks=[stops])


def test_an_early_stopping_callback_keeps_its_count_in_a_resumed_run(tmp_path: Path) -> None:
    for scores, resume in ([3.0, 5.0, 4.0], None), ([4.5, 9.0, 9.0], True):
        options = {"callbacks": [EarlyStoppingCallback(2)], "metric_for_best_model": "score", "max_steps": 6}
        trainer = make_trainer([scored(scores, **options)], tmp_path, recorder=stops_after(3), **SAVING)
        trainer.train(resume_from_checkpoint=resume)
    assert (trainer.table["own"].step, trainer.table["own"].status.value) == (4, "stopped_early")


def test_a_task_ends_with_the_adapter_of_its_best_evaluation(tmp_path: Path) -> None:
    kept: dict[str, list[dict[str, torch.Tensor]]] = {"own": [], "as-run": []}

    def keeps(name: str) -> Acts:
        return Acts(lambda **_: kept[name].append(weights(trainer, name)), event="on_evaluate")

    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_score"}
    # What a task says of itself overrules the run: here a smaller score is better.
    own = scored([3.0, 1.0, 2.0], callbacks=[keeps("own")], greater_is_better=False, **best)
    # An evaluation before the first step does not count.
    as_run = scored([9.0, 1.0, 7.0, 3.0], "as-run", callbacks=[keeps("as-run")], eval_on_start=True, max_steps=3)
    trainer = make_trainer([own, as_run], tmp_path, greater_is_better=True, **best)
    trainer.train()
    assert trainer.task_statuses == {"own": "succeeded", "as-run": "succeeded"}
    for name, value in (("own", 1.0), ("as-run", 7.0)):
        assert (trainer.table[name].best.value, trainer.table[name].best.step) == (value, 2)
        found = weights(trainer, name)
        assert_equal_weights(found, kept[name][-2])
        assert any(not torch.equal(found[key], weight) for key, weight in kept[name][-1].items())


def test_the_report_tells_the_loss_of_the_adapter_that_was_kept_and_the_tasks_that_left(tmp_path: Path) -> None:
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "score"}
    own = scored([1.0, 7.0, 3.0, 2.0, 0.0], max_steps=4, learning_rate=0.1, **best)

    leaves = Recorder(at_end={2: lambda trainer: trainer.remove_task("gone")})
    trainer = train([own, small_task("gone", data_seed=2)], tmp_path, recorder=leaves, **SAVING).trainer
    losses = [record["eval_loss"] for record in records(tmp_path, "eval")]
    lines = trainer.report().splitlines()
    line, gone = (next(line for line in lines if line.startswith(name)) for name in ("own", "gone"))
    assert f" {losses[1]:.4f} " in line
    assert f" {losses[3]:.4f} " not in line
    assert "removed" in gone
    assert str(tmp_path / "gone") in gone
    assert trainer.evaluate("own")["own/eval_loss"] == pytest.approx(losses[1])


# ---------------------------------------------------------- when things are due


def test_every_task_is_logged_evaluated_and_saved_at_the_end_of_its_own_epochs(tmp_path: Path) -> None:
    # 10 rows in batches of 4 are 3 steps an epoch, in batches of 5 they are 2.
    tasks = [
        small_task("a", data_seed=1, max_steps=6, eval_dataset=HELD_OUT),
        small_task("b", data_seed=2, max_steps=6, train_batch_size=5, eval_dataset=HELD_OUT),
    ]
    make_trainer(tasks, tmp_path, logging_strategy="epoch", save_strategy="epoch", eval_strategy="epoch").train()
    logged = [(record["task"], record["step"]) for record in records(tmp_path, "train")]
    assert logged == [("b", 2), ("a", 3), ("b", 4), ("a", 6), ("b", 6)]
    assert [(record["task"], record["step"]) for record in records(tmp_path, "eval")] == logged
    assert numbered_folders(tmp_path / "a")[:3] == [2, 3, 4]


def test_intervals_below_one_are_shares_of_all_steps(tmp_path: Path) -> None:
    own = small_task("own", data_seed=1, max_steps=8, eval_dataset=HELD_OUT, eval_steps=0.5, save_steps=0.25)
    of_run = {"logging_strategy": "steps", "logging_steps": 0.3, "save_strategy": "steps", "save_steps": 0.75}
    make_trainer([own], tmp_path, **of_run).train()
    assert [record["step"] for record in records(tmp_path, "train")] == [3, 6, 8]
    assert [record["step"] for record in records(tmp_path, "eval")] == [4, 8]
    assert numbered_folders(tmp_path / "own") == [2, 4, 6, 8]
    assert {path.name for path in (tmp_path / "state").glob("run-*")} == {"run-00000006.json", "run-00000008.json"}


def test_an_evaluation_before_the_first_step_and_a_delay_of_others(tmp_path: Path) -> None:
    common: dict[str, Any] = {"max_steps": 4, "eval_dataset": HELD_OUT}
    tasks = [
        small_task("a", data_seed=1, eval_steps=1, eval_on_start=True, eval_delay=3, **common),
        small_task("b", data_seed=2, eval_steps=2, **common),
    ]
    make_trainer(tasks, tmp_path, save_strategy="steps").train()
    found = [(record["task"], record["step"]) for record in records(tmp_path, "eval")]
    assert found == [("a", 0), ("b", 2), ("a", 3), ("a", 4), ("b", 4)]


def test_what_evaluations_would_tell_is_refused_where_there_are_none(tmp_path: Path) -> None:
    values = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_on_start": True, "eval_delay": 2}
    for name, value in {**values, "eval_strategy": "epoch"}.items():
        said = rf"args\.{name} must be its default, got .* without a task that has held-out rows"
        with pytest.raises(ConfigError, match=said):
            make_trainer([small_task("a", data_seed=1)], tmp_path, **{name: value})
    for name, value in values.items():
        with pytest.raises(ConfigError, match=rf"eval_dataset must be held-out rows, because {name} is set, got None"):
            small_task("a", data_seed=1, **{name: value})


# ------------------------------------------------------------------------ folders


def test_an_upload_of_what_is_not_saved_is_refused() -> None:
    allowed = r'args\.push_to_hub must be False, or used with save_strategy "steps" or "epoch"'
    with pytest.raises(ConfigError, match=rf'{allowed}, got True with save_strategy="no"'):
        MultiTaskTrainingArguments(output_dir="unused", use_cpu=True, push_to_hub=True, save_strategy="no")
    args = MultiTaskTrainingArguments(output_dir="unused", use_cpu=True, save_strategy="no")
    with pytest.raises(ConfigError, match=r'^tasks\.a\.save_steps must be None, .*, got 2 with save_strategy="no"'):
        MultiTaskTrainer(tiny_llama(), args, [small_task("a", data_seed=1, save_steps=2)])


def test_a_folder_that_holds_a_run_and_one_that_holds_none_are_reported_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [small_task("a", data_seed=1, max_steps=2)]
    make_trainer(tasks, tmp_path / "run", save_strategy="steps").train()
    monkeypatch.setattr(Placement, "load", lambda *_: pytest.fail("weights were loaded"))
    again = make_trainer(tasks, tmp_path / "run", save_strategy="steps")
    said = r"output_dir must be a new folder, got .*which holds a run.*peft-mux train FILE --resume"
    with pytest.raises(CheckpointError, match=said):
        again.train()
    new = make_trainer(tasks, tmp_path / "new", save_strategy="steps")
    with pytest.raises(CheckpointError, match="which holds no state of a run"):
        new.train(resume_from_checkpoint=True)
    assert not (tmp_path / "new").exists(), "a look leaves no folder behind"
