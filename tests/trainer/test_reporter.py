"""`Reporter` alone: when losses are logged, whose turn it is to be evaluated, and what a run comes to."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peft_mux.engine.layout import ParallelLayout
from peft_mux.reporting.pass_report import TokenCounts
from peft_mux.reporting.report import RankRecord
from peft_mux.task import TaskStatus
from peft_mux.trainer.reporter import Reporter
from peft_mux.trainer.run import Run
from tests.invariants.mux_lab import rows
from tests.trainer.parts import Calls, FakePlans, lines, make_run, start_all


def reporter_of(run: Run, calls: Calls, *, num_ranks: int = 1) -> Reporter:
    def records(num_tokens: int, seconds: float, waited_s: float) -> tuple[RankRecord, ...]:
        return tuple(RankRecord(rank, num_tokens, seconds, waited_s, 1, "a part") for rank in range(num_ranks))

    def generate(owns: Any) -> dict[str, str]:
        return {own.name: f"answers of {own.name}" for own in owns}

    def evaluate(own: Any, answers: Any) -> dict[str, float]:
        assert answers == f"answers of {own.name}"
        calls.note("evaluate", own.name)
        return {f"{own.name}/eval_loss": 1.0}

    # The numbers of all ranks, of which one knows of a signal.
    processes = SimpleNamespace(
        gather=lambda value: (
            [TokenCounts() if isinstance(value, TokenCounts) else 0 if isinstance(value, int) else value]
            * (num_ranks - 1)
            + [value]
        )
    )
    world: Any = SimpleNamespace(
        gather_records=records, layout=ParallelLayout.of(num_ranks), records=(), processes=processes
    )
    plans: Any = FakePlans(run, calls)
    evaluator: Any = SimpleNamespace(evaluate=evaluate, generate=generate)
    return Reporter(run, world, plans, evaluator)


@pytest.mark.parametrize(
    ("settings", "logged"),
    [
        ({"logging_strategy": "steps", "logging_steps": 2}, [2, 4]),
        ({"logging_strategy": "steps", "logging_steps": 3, "logging_first_step": True}, [1, 3]),
        ({"logging_strategy": "no"}, []),
    ],
)
def test_losses_are_logged_at_the_steps_that_the_arguments_name(
    tmp_path: Path, settings: dict[str, Any], logged: list[int]
) -> None:
    run = make_run(tmp_path, **settings)
    reporter, found = reporter_of(run, Calls()), []
    for step in (1, 2, 3, 4):
        run.state.global_step = step
        run.table["a"].loss_mean.add(0.5)
        reporter.log_if_due()
        found += [step] if run.state.log_history[-1:] and run.state.log_history[-1]["step"] == step else []
    assert found == logged


def test_a_callback_that_asks_for_logs_gets_them_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    reporter = reporter_of(run, Calls())
    run.table["a"].loss_mean.add(0.5)
    run.control.should_log = True
    reporter.log_if_due()
    assert lines(run) == ["step 0  a 0.5000"]
    assert not run.control.should_log


def test_only_tasks_whose_turn_it_is_are_evaluated_unless_a_callback_asks_for_all(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    for name, step in (("a", 4), ("b", 3)):
        run.table[name].eval_data, run.table[name].step = rows(0, 2, 3, 4), step
        own = run.table[name]
        own.resolved = replace(own.resolved, hyper=replace(own.hyper, eval_steps=2))
    reporter = reporter_of(run, calls)
    reporter.evaluate_if_due(["a", "b"])
    assert calls == [("evaluate", "a")]
    run.control.should_evaluate = True
    reporter.evaluate_if_due(["a", "b"])
    assert calls[1:] == [("evaluate", "a"), ("evaluate", "b")]
    assert not run.control.should_evaluate


def test_a_task_whose_own_callback_wants_to_stop_stops_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start_all(run)
    run.log.callbacks["a"].control.should_training_stop = True
    reporter_of(run, Calls()).evaluate_if_due(["a", "b"])
    assert run.table["a"].status is TaskStatus.STOPPED_EARLY
    assert run.table["b"].status is TaskStatus.RUNNING


def test_a_run_comes_to_the_mean_of_the_finite_last_losses_and_rates_of_all_replicas(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.table["a"].last_loss = 0.5  # the other task has taken no step, so its loss is no number
    run.state.global_step = 7
    output = reporter_of(run, Calls(), num_ranks=2).finish(2.0, 0.5, num_tokens=100, num_steps=4)
    assert output.global_step == 7
    assert output.training_loss == 0.5
    assert output.metrics["train_tokens_per_second"] == 100.0
    assert output.metrics["train_steps_per_second"] == 2.0
    assert output.metrics["a/train_loss"] == 0.5
    assert "measured_over_planned_time" not in output.metrics


@pytest.mark.parametrize(
    ("strategy", "way_on"),
    [
        ("no", 'nothing is saved (save_strategy="no"); train() of this trainer goes on from here'),
        ("steps", "saved in {root}; go on with train(resume_from_checkpoint=True), or peft-mux train FILE --resume"),
    ],
)
def test_a_run_that_a_signal_has_ended_says_so_and_how_to_go_on(tmp_path: Path, strategy: str, way_on: str) -> None:
    run = make_run(tmp_path, save_strategy=strategy)
    if strategy == "steps":
        folder: Any = object()
        run.saver.folder = folder
        run.saver._saved_step = 7
    run.state.global_step = 7
    run.interrupt(signal.SIGTERM)
    output = reporter_of(run, Calls(), num_ranks=2).finish(2.0, 0.5, num_tokens=100, num_steps=4)
    assert output.metrics["interrupted_by"] == signal.SIGTERM
    said, *_, report = lines(run)
    assert said == f"interrupted by SIGTERM after step 7; {way_on.format(root=tmp_path)}"
    assert report.startswith("\ntask  status ")


def test_the_report_names_no_folder_where_nothing_is_saved(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    report = reporter_of(run, Calls()).report()
    assert "not saved" in report
    assert str(tmp_path) not in report
