"""Sweeps: their tasks, which of them end at which rung, and that what stays is what it would have been alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from peft_mux import ConfigError, EarlyStopping, MultiTaskTrainingArguments, Task, sweep
from peft_mux.log.metrics_file import read_metrics
from peft_mux.reporting.views import view_of_records
from peft_mux.sweeps import losers, rungs, sweep_tasks
from tests.invariants import mux_lab as lab
from tests.runs import Acts

HELD_OUT = lab.rows(9, 4, 5, 9)
RATES = [1e-4, 3e-3, 1e-2, 3.0]


def swept_task(**settings: Any) -> Task:
    return lab.small_task("sql", data_seed=1, **{"eval_dataset": HELD_OUT, "max_steps": 8, **settings})


def arguments(folder: Path, **options: Any) -> MultiTaskTrainingArguments:
    return MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **options)


# ------------------------------------------------------------------------ tasks


def test_every_combination_is_a_task_with_a_name_of_its_own() -> None:
    contest, tasks = sweep_tasks(swept_task(), {"learning_rate": [1e-4, 1e-3], "peft_config.r": [2, 4, 8]})
    assert [task.name for task in tasks] == [f"sql-0{number}" for number in range(1, 7)]
    assert [(task.learning_rate, task.peft_config.r) for task in tasks] == [
        (rate, rank) for rate in (1e-4, 1e-3) for rank in (2, 4, 8)
    ]
    assert contest.members["sql-06"] == {"learning_rate": 1e-3, "peft_config.r": 8}
    assert tasks[0].peft_config.target_modules == swept_task().peft_config.target_modules
    assert all(task.train_dataset is tasks[0].train_dataset for task in tasks)


@pytest.mark.parametrize(
    ("grid", "settings", "said"),
    [
        ({}, {}, 'sweep must be at least one setting, such as {"learning_rate": [1e-4, 3e-4]}, got no settings'),
        ({"learning_rat": [1]}, {}, 'Did you mean "learning_rate"?'),
        ({"peft_config.rank": [1, 2]}, {}, 'Did you mean "peft_config.r"?'),
        ({"name": ["a", "b"]}, {}, "sweep.name must be a field of Task, or peft_config.<field>, got a field that"),
        ({"learning_rate": "1e-4"}, {}, "sweep.learning_rate must be a list of at least one value, got '1e-4'"),
        ({"learning_rate": [1e-3]}, {}, "sweep must have 2 to 512 combinations, got 1"),
        ({"seed": list(range(513))}, {}, "sweep must have 2 to 512 combinations, got 513"),
        ({"learning_rate": [1e-3, -1.0]}, {}, "learning_rate must be a finite number above 0, got -1.0"),
        ({"learning_rate": [1, 2]}, {"eval_dataset": None}, "tasks.sql.eval_dataset must be held-out rows, because"),
        ({"learning_rate": [1, 2]}, {"early_stopping": EarlyStopping()}, 'Use early_stop="halving"'),
    ],
)
def test_what_cannot_be_swept_is_refused_by_name(grid: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_tasks(swept_task(**settings), grid)
    assert said in str(caught.value)


# ---------------------------------------------------------------------- halving


@pytest.mark.parametrize(
    ("num_steps", "num_tasks", "expected"),
    [(80, 8, (10, 20, 40)), (100, 20, (3, 6, 12, 25, 50)), (8, 20, (1, 2, 4)), (1, 4, ()), (10, 1, ()), (3, 2, (1,))],
)
def test_rungs_double_up_to_the_end(num_steps: int, num_tasks: int, expected: tuple[int, ...]) -> None:
    assert rungs(num_steps, num_tasks) == expected


def test_the_worse_half_loses_of_equals_the_first_stays_and_late_ones_meet_those_before() -> None:
    values = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 3.0, "e": float("nan")}
    assert losers(values, set(values), maximise=False) == ["d", "e"]
    assert losers(values, set(values), maximise=True) == ["c", "e"]
    assert losers({"a": 1.0, "b": 1.0}, {"a", "b"}, maximise=False) == ["b"]
    assert losers({"a": 1.0, "b": 2.0, "late": 1.5}, {"late"}, maximise=False) == []
    assert losers({"a": 1.0, "b": 2.0, "c": 1.1, "late": 1.5}, {"late"}, maximise=False) == ["late"]


# ------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("sweep") / "run"
    grid = {"learning_rate": RATES}
    return sweep(swept_task(), grid, model=lab.tiny_llama(), args=arguments(folder), early_stop="halving"), folder


def test_halving_ends_the_worse_half_at_each_rung_and_keeps_the_best(halved: tuple[Any, Path]) -> None:
    result, _ = halved
    assert [one.status for one in result.ranking] == ["succeeded", *["stopped_early"] * 3]
    assert [one.step for one in result.ranking] == [8, 4, 2, 2]
    assert result.best.settings["learning_rate"] != 3.0, "a rate at which it diverges"
    for worse in result.ranking[1:]:
        at = dict(result.best.curve)
        assert at[worse.step] <= worse.value


def test_a_survivor_is_what_it_is_alone(halved: tuple[Any, Path], tmp_path: Path) -> None:
    result, folder = halved
    _, tasks = sweep_tasks(swept_task(), {"learning_rate": RATES})
    own = next(task for task in tasks if task.name == result.best.name)
    alone = lab.train([own], tmp_path / "alone", save_strategy="steps")
    saved = load_file(folder / result.best.name / "adapter_model.safetensors")
    wanted = load_file(tmp_path / "alone" / result.best.name / "adapter_model.safetensors")
    assert saved.keys() == wanted.keys()
    for key, weight in wanted.items():
        assert (saved[key] - weight).norm() <= 1e-4 * weight.norm(), key
    held_out = alone.trainer.evaluate()[f"{own.name}/eval_loss"]
    assert result.best.value == pytest.approx(held_out, rel=1e-5)


def test_the_best_adapter_is_under_the_name_of_the_task(halved: tuple[Any, Path]) -> None:
    result, folder = halved
    assert result.place == folder / "sql"
    best, kept = (
        PeftModel.from_pretrained(lab.tiny_llama(), place).eval() for place in (result.best.place, result.place)
    )
    ids = torch.arange(1, 9)[None]
    assert torch.equal(best(ids).logits, kept(ids).logits)


def test_the_ranking_is_shown_as_text_as_a_table_and_as_a_picture(halved: tuple[Any, Path], tmp_path: Path) -> None:
    result, folder = halved
    lines = str(result).splitlines()
    assert lines[0].split() == ["task", "learning_rate", "eval_loss", "step", "status"]
    assert [line.split()[1] for line in lines[1:5]] == [one.name for one in result.ranking]
    assert result._repr_html_().count("<tr>") == 5
    assert "sql-04 (lr=3)</span>" in (folder / "report.html").read_text(encoding="utf-8")
    (shown, *_) = view_of_records(read_metrics(folder / "metrics.jsonl"), {}).tasks
    assert (shown.settings, shown.loss_kind) == ("lr=1e-4", "sft")
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    assert result.plot(tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_without_halving_all_train_to_their_end_and_the_last_lines_suggest_the_adapter_that_won(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, args = {"learning_rate": [3.0, 1e-4]}, arguments(tmp_path)
    result = sweep(swept_task(max_steps=4), grid, model=lab.tiny_llama(), args=args)
    assert [(one.name, one.step, one.status) for one in result.ranking] == [
        ("sql-02", 4, "succeeded"),  # else the first task would do as well
        ("sql-01", 4, "succeeded"),
    ]
    assert result.ranking[0].value < result.ranking[1].value
    said = capsys.readouterr().out
    assert f"sweep sql: best sql-02, eval_loss {result.best.value:.4f}\n" in said
    assert str(result) not in said, "who is given the ranking prints it"
    assert "--merge sql-02 --output merged" in said
    assert "--merge sql-01" not in said
    args = arguments(tmp_path / "other", save_strategy="no")
    ranked = sweep(swept_task(max_steps=1), {"peft_config.r": [1, 2]}, model=lab.tiny_llama(), args=args)
    assert ranked.place is None, "nothing is saved"
    with pytest.raises(ConfigError, match="sweep\\.early_stop must be \"halving\" or None, got 'median'"):
        sweep(swept_task(), grid, model=lab.tiny_llama(), args=args, early_stop="median")
    with pytest.raises(ConfigError, match="no task has eval_f1"):
        sweep(swept_task(max_steps=1), grid, model=lab.tiny_llama(), args=args, metric="eval_f1")


def test_a_sweep_continues_after_an_interrupt_as_if_there_had_been_none(
    halved: tuple[Any, Path], tmp_path: Path
) -> None:
    stops = Acts(lambda control, **_: setattr(control, "should_training_stop", True), step=3)
    given = {"model": lab.tiny_llama(), "args": arguments(tmp_path / "run"), "early_stop": "halving"}
    grid = {"learning_rate": RATES}
    stopped = sweep(swept_task(), grid, **given, callbacks=[stops])
    assert max(one.step for one in stopped.ranking) < 8
    result = sweep(swept_task(), grid, **{**given, "model": lab.tiny_llama()}, resume_from_checkpoint=True)
    wanted, _ = halved
    assert [(one.name, one.step, one.value) for one in result.ranking] == [
        (one.name, one.step, pytest.approx(one.value, rel=1e-6)) for one in wanted.ranking
    ]
