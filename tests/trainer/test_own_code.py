"""What a task's own callbacks, metrics and optimizer may do to the others: nothing, and what it costs is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from peft_mux import EarlyStopping
from peft_mux.reporting import recorders
from tests.invariants.mux_lab import Run, assert_bit_identical, make_trainer, small_task, train
from tests.trainer.neighbours import (
    Stream,
    bad_task,
    check_all_fail_alone,
    check_fails_alone,
    good,
    raising,
    recursing,
    stream_task,
    train_alone,
)


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_alone(tmp_path_factory.mktemp("alone"))


# -------------------------------------------------------------------- callbacks


class Does(TrainerCallback):
    """Does something at the end of its third step."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.act(args=args, state=state, control=control, **kwargs) if state.global_step == 3 else None


def test_callbacks_that_fail_or_answer_rubbish_or_empty_their_control_fail_their_tasks_alone(
    alone: Run, tmp_path: Path
) -> None:
    acts: list[tuple[Callable[..., Any], str]] = [
        (lambda **_: raising(ValueError("no such column"))(), "ValueError: no such column"),
        (lambda **_: raising(SystemExit(3))(), "SystemExit: 3"),
        (lambda **_: raising(KeyboardInterrupt())(), "KeyboardInterrupt"),
        (lambda **_: recursing(), "RecursionError"),
        (lambda **_: "done", "TypeError: got str as its answer"),
        (lambda **_: 7, "TypeError: got int as its answer"),
        (lambda control, **_: vars(control).clear(), "KeyError: 'should_training_stop'"),
    ]
    tasks = [
        (bad_task(f"bad{number}", callbacks=[Does(act)]), f"a callback failed in on_step_end: {reason}")
        for number, (act, reason) in enumerate(acts)
    ]
    check_all_fail_alone(tasks, tmp_path, alone)


def spoil_state(state: Any, **_: Any) -> None:
    state.log_history = None
    state.global_step = "three"


def spoil_history(state: Any, **_: Any) -> None:
    state.log_history.append(object())
    for entry in state.log_history[:-1]:
        entry.clear()


def spoil_arguments(args: Any, **_: Any) -> None:
    args.learning_rate = "fast"
    args.logging_steps = 0
    args.lr_scheduler_kwargs.clear()


def spoil_modes(model: Any, **_: Any) -> None:
    model.eval()
    torch.set_grad_enabled(False)


@pytest.mark.parametrize("spoil", [spoil_state, spoil_history, spoil_arguments, spoil_modes])
def test_what_a_callback_writes_to_what_it_is_given_reaches_nobody_else(
    spoil: Callable[..., None], alone: Run, tmp_path: Path
) -> None:
    run = train(
        [good(), bad_task(callbacks=[Does(spoil)])],
        tmp_path,
        planner="interleaved",
        logging_strategy="steps",
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        lr_scheduler_kwargs={},
    )
    assert torch.is_grad_enabled()
    assert run.trainer.task_statuses["good"] == "succeeded"
    assert_bit_identical(run, alone, "good")
    # What it spoils for itself may fail it; a history that it was shown is a copy.
    history = run.trainer.task_states["bad"].log_history
    assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, len(history) + 1))
    assert json.dumps(history)


# ---------------------------------------------------------------------- metrics


@pytest.mark.parametrize("function", ["compute_metrics", "preprocess_logits_for_metrics"])
def test_metrics_that_fail_in_training_fail_their_task_alone(function: str, alone: Run, tmp_path: Path) -> None:
    tasks = []
    for error in (SystemExit(3), KeyboardInterrupt("mine"), ZeroDivisionError("nothing")):
        functions = {"compute_metrics": lambda _: {"f": 1.0}, function: lambda *_, error=error: raising(error)()}
        kind = type(error).__name__
        tasks.append((bad_task(kind, eval_steps=3, **functions), f"evaluation failed: {kind}: {error}"))
    check_all_fail_alone(tasks, tmp_path, alone)


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no such column")])
def test_outside_of_training_what_metrics_raise_is_the_caller_s(error: BaseException, tmp_path: Path) -> None:
    trainer = make_trainer([bad_task(eval_steps=0, compute_metrics=lambda _: raising(error)())], tmp_path)
    with pytest.raises(type(error)) as caught:
        trainer.evaluate("bad")
    assert caught.value is error


def test_metrics_that_are_none_fail_their_task_alone(alone: Run, tmp_path: Path) -> None:
    answers: list[Any] = [None, 7, ["f"], {"f": "high"}, {7: 1.0}, {"f": None}]
    tasks = [
        (bad_task(f"bad{number}", eval_steps=3, compute_metrics=lambda _, answer=answer: answer), "evaluation failed: ")
        for number, answer in enumerate(answers)
    ]
    check_all_fail_alone(tasks, tmp_path, alone)


def test_a_diverged_task_that_stops_early_fails_alone_and_keeps_usable_weights(alone: Run, tmp_path: Path) -> None:
    task = bad_task(learning_rate=1e30, eval_steps=1, early_stopping=EarlyStopping(patience=1))
    run = check_fails_alone(task, tmp_path, alone, "non_finite: the loss of its evaluation is nan at step 1")
    assert all(weight.isfinite().all() for weight in run.weights("bad").values())


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_metric_that_is_never_a_number_stops_its_task_alone(score: float, alone: Run, tmp_path: Path) -> None:
    rule = EarlyStopping(metric="score", patience=2)
    task = bad_task(eval_steps=1, compute_metrics=lambda _: {"score": score}, early_stopping=rule)
    run = train([good(), task], tmp_path, planner="interleaved", save_strategy="steps", save_steps=2)
    assert run.trainer.task_statuses == {"good": "succeeded", "bad": "stopped_early"}
    assert run.trainer.table["bad"].reason == "score was no finite number in any of 2 evaluations"
    assert_bit_identical(run, alone, "good")


@pytest.mark.parametrize("event", ["on_log", "on_evaluate"])
def test_a_task_that_a_callback_fails_at_its_last_evaluation_has_failed(event: str, tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        pass

    callback = Fails()
    setattr(callback, event, lambda *_, metrics=None, **__: raising(ValueError("no"))())
    scores = iter([2.0, 1.0, 0.0])
    task = bad_task(
        eval_steps=1,
        compute_metrics=lambda _: {"score": next(scores)},
        early_stopping=EarlyStopping(metric="score", patience=1),
        callbacks=[callback],
    )
    trainer = train([good(), task], tmp_path).trainer
    assert trainer.task_statuses == {"good": "succeeded", "bad": "failed"}
    assert trainer.table["bad"].reason == f"a callback failed in {event}: ValueError: no"


def test_metrics_that_a_callback_takes_away_are_its_own_copy(tmp_path: Path) -> None:
    class Clears(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            metrics.clear()

    rule = EarlyStopping(metric="score", patience=1)
    settings = {"compute_metrics": lambda _: {"score": float("nan")}, "early_stopping": rule, "callbacks": [Clears()]}
    trainer = train([good(), bad_task(eval_steps=1, **settings)], tmp_path).trainer
    assert trainer.task_statuses == {"good": "succeeded", "bad": "stopped_early"}


# ------------------------------------------------------------------- optimizers


def test_a_hook_of_an_optimizer_and_a_schedule_that_fail_fail_their_task_alone(alone: Run, tmp_path: Path) -> None:
    def hooked(error: BaseException) -> Does:
        def fail(*_: Any) -> None:
            raise error

        return Does(lambda optimizer, **_: optimizer.register_step_post_hook(fail) and None)

    def break_schedule(lr_scheduler: Any, **_: Any) -> None:
        lr_scheduler.step = raising(OverflowError("too large"))

    tasks = []
    for error in (RuntimeError("no"), SystemExit(3), KeyboardInterrupt()):
        kind = type(error).__name__
        tasks.append((bad_task(kind, callbacks=[hooked(error)]), f"the optimizer failed at step 3: {kind}"))
    reason = "learning_rate: the schedule raises OverflowError: too large at step 4"
    check_all_fail_alone([*tasks, (bad_task(callbacks=[Does(break_schedule)]), reason)], tmp_path, alone)


# ------------------------------------------------------------------ what it costs


def test_what_own_code_costs_the_others_is_told_by_task_and_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every call passes a limit of nothing; each one is told once its task's total has doubled.
    monkeypatch.setattr(recorders, "CALL_LIMIT_S", 0.0)
    slow = {
        "callback": bad_task(callbacks=[Does(lambda **_: None)]),
        "compute_metrics": bad_task(eval_steps=1, compute_metrics=lambda _: {"f": 1.0}),
        "train_dataset": stream_task(Stream(lambda: {"input_ids": [1, 2]})),
        "objective": bad_task(objective=lambda outputs: outputs.nll_M),
    }
    for what, task in slow.items():
        train([small_task("good", data_seed=1), task], tmp_path / what)
        kinds = {record["what"] for record in records(tmp_path / what, "delay") if record["task"] == "bad"}
        assert what in kinds
        (total,) = (record for record in records(tmp_path / what, "delay_total") if record["task"] == "bad")
        assert total[f"{what}_s"] > 0
        assert "bad: its" in capsys.readouterr().out
