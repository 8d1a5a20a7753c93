"""What a task's own callbacks, metrics and optimizer may do to the others: nothing, and what it costs is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from peft_mux import EarlyStopping, Task
from peft_mux.reporting import recorders
from tests.invariants.mux_lab import Run, assert_bit_identical, make_trainer, small_task, train
from tests.records import run_records as records
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
        (lambda **_: "done", "TypeError: it must return the TrainerControl or None, got str"),
        (lambda **_: 7, "TypeError: it must return the TrainerControl or None, got int"),
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


def test_what_callbacks_write_to_what_they_are_given_reaches_no_one_else(alone: Run, tmp_path: Path) -> None:
    acts = {"state": spoil_state, "history": spoil_history, "arguments": spoil_arguments, "modes": spoil_modes}
    run = train(
        [good(), *(bad_task(f"bad-{what}", callbacks=[Does(spoil)]) for what, spoil in acts.items())],
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
    for what in acts:
        history = run.trainer.task_states[f"bad-{what}"].log_history
        assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, len(history) + 1))
        assert json.dumps(history)


# ---------------------------------------------------------------------- metrics


def test_metrics_that_fail_or_are_none_fail_their_task_alone(alone: Run, tmp_path: Path) -> None:
    tasks = []
    for function in ("compute_metrics", "preprocess_logits_for_metrics"):
        for error in (SystemExit(3), KeyboardInterrupt("mine"), ZeroDivisionError("nothing")):
            functions = {"compute_metrics": lambda _: {"f": 1.0}, function: lambda *_, error=error: raising(error)()}
            kind = type(error).__name__
            task = bad_task(f"{kind}-{function}", eval_steps=3, **functions)
            tasks.append((task, f"evaluation failed: {kind}: {error}"))
    answers: list[Any] = [None, 7, ["f"], {"f": "high"}, {7: 1.0}, {"f": None}]
    for number, answer in enumerate(answers):
        task = bad_task(f"bad{number}", eval_steps=3, compute_metrics=lambda _, answer=answer: answer)
        tasks.append((task, "evaluation failed: "))
    check_all_fail_alone(tasks, tmp_path, alone)


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no such column")])
def test_outside_of_training_what_metrics_raise_is_the_caller_s(error: BaseException, tmp_path: Path) -> None:
    trainer = make_trainer([bad_task(eval_steps=0, compute_metrics=lambda _: raising(error)())], tmp_path)
    with pytest.raises(type(error)) as caught:
        trainer.evaluate("bad")
    assert caught.value is error


def test_a_diverged_task_that_stops_early_fails_alone_and_keeps_usable_weights(alone: Run, tmp_path: Path) -> None:
    task = bad_task(learning_rate=1e30, weight_decay=1.0, eval_steps=1, early_stopping=EarlyStopping(patience=1))
    run = check_fails_alone(task, tmp_path, alone, "non_finite: the loss of its evaluation is nan at step 1")
    assert all(weight.isfinite().all() for weight in run.weights("bad").values())


def scored(name: str, scores: Sequence[float], callback: TrainerCallback | None = None) -> Task:
    """Return a task that is evaluated after each step and stops at the second score that is no better."""
    left = iter(scores)
    return bad_task(
        name,
        eval_steps=1,
        compute_metrics=lambda _: {"score": next(left)},
        early_stopping=EarlyStopping(metric="score", patience=2),
        callbacks=[callback] if callback else [],
    )


def test_a_metric_that_is_never_a_number_stops_its_task_alone(alone: Run, tmp_path: Path) -> None:
    class Clears(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            metrics.clear()  # of its own copy

    values = {"nan": float("nan"), "inf": float("inf"), "cleared": float("nan")}
    tasks = [scored(name, [value] * 8, Clears() if name == "cleared" else None) for name, value in values.items()]
    run = train([good(), *tasks], tmp_path, planner="interleaved", save_strategy="steps", save_steps=2)
    assert run.trainer.task_statuses == {"good": "succeeded", **dict.fromkeys(values, "stopped_early")}
    for name in values:
        assert run.trainer.table[name].reason == "score was no finite number in any of 2 evaluations"
    assert_bit_identical(run, alone, "good")


def test_a_task_that_a_callback_fails_at_its_last_evaluation_has_failed(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def __init__(self, event: str) -> None:
            setattr(self, event, self.fail)

        def fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:  # when the task stops early
                raise ValueError("no")

    events = ("on_log", "on_evaluate")
    tasks = [scored(event, [2.0, 1.0, 0.0], Fails(event)) for event in events]
    trainer = train([good(), *tasks], tmp_path).trainer
    assert trainer.task_statuses == {"good": "succeeded", **dict.fromkeys(events, "failed")}
    for event in events:
        assert trainer.table[event].reason == f"a callback failed in {event}: ValueError: no"


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


def test_what_own_code_costs_the_others_is_reported_by_task_and_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every call passes a limit of nothing; each one is told once its task's total has doubled.
    monkeypatch.setattr(recorders, "CALL_LIMIT_S", 0.0)
    slow = (
        bad_task("callback", callbacks=[Does(lambda **_: None)]),
        bad_task("compute_metrics", eval_steps=1, compute_metrics=lambda _: {"f": 1.0}),
        stream_task(Stream(lambda: {"input_ids": [1, 2]}), "train_dataset"),
        bad_task("objective", objective=lambda outputs: outputs.nll_M),
    )
    train([small_task("good", data_seed=1), *slow], tmp_path)
    printed = capsys.readouterr().out
    for name in (task.name for task in slow):
        assert name in {record["what"] for record in records(tmp_path, "delay") if record["task"] == name}
        (total,) = (record for record in records(tmp_path, "delay_total") if record["task"] == name)
        assert total[f"{name}_s"] > 0
        assert f"{name}: its" in printed
