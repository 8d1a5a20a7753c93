"""What is shown of a run at one moment: means, trends, rates and times left, by a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest

from peft_mux.reporting.views import RunWatch, curve_of, settings_text, view_of_records
from tests.reporting.lab import Clock
from tests.reporting.lab import shown_task as task


def step(watch: RunWatch, clock: Clock, tasks: list[Any], *, loss: float = 1.0, seconds: float = 1.0) -> None:
    clock.now_s += seconds
    for one in tasks:
        if one.status == "running":
            one.step, one.num_tokens, one.last_loss = one.step + 1, one.num_tokens + 50, loss
    watch.advance(tasks)


def watched(*tasks: Any) -> tuple[RunWatch, Clock]:
    clock = Clock()
    watch = RunWatch(clock=clock)
    watch.start(tasks)
    return watch, clock


def test_before_its_first_step_a_task_has_no_loss_no_rate_and_no_time_left() -> None:
    watch, _ = watched(task())
    (view,) = watch.view().tasks
    assert (view.loss, view.trend, view.tokens_per_s, view.left_s) == (None, "", None, None)


def test_rates_and_times_left_are_those_of_the_last_steps() -> None:
    own = task()
    watch, clock = watched(own)
    for _ in range(50):
        step(watch, clock, [own], seconds=4.0)
    for _ in range(30):
        step(watch, clock, [own], seconds=1.0)
    view = watch.view()
    assert view.tasks[0].tokens_per_s == pytest.approx(50, rel=0.1)
    assert view.tasks[0].left_s == pytest.approx(20, rel=0.1)
    assert view.left_s == view.tasks[0].left_s
    assert view.seconds == pytest.approx(230)


@pytest.mark.parametrize(("change", "trend"), [(-0.01, "down"), (0.01, "up"), (0.0, "flat")])
def test_a_loss_that_falls_rises_or_stays_is_reported(change: float, trend: str) -> None:
    own = task()
    watch, clock = watched(own)
    for number in range(40):
        step(watch, clock, [own], loss=2.0 + change * number)
    (view,) = watch.view().tasks
    assert view.trend == trend
    assert view.loss == pytest.approx(2.0 + change * 31, abs=0.02)


def test_a_loss_that_is_not_finite_is_no_part_of_the_mean() -> None:
    own = task()
    watch, clock = watched(own)
    for loss in (1.0, float("nan"), float("inf"), 1.0):
        step(watch, clock, [own], loss=loss)
    assert watch.view().tasks[0].loss == pytest.approx(1.0)


def test_a_task_that_rests_has_no_rate_and_begins_a_new_one_when_it_continues() -> None:
    own, other = task("a"), task("b")
    watch, clock = watched(own, other)
    step(watch, clock, [own, other])
    own.status = "paused"
    for _ in range(100):
        step(watch, clock, [own, other])
    assert [one.tokens_per_s is None for one in watch.view().tasks] == [True, False]
    own.status = "running"
    step(watch, clock, [own, other])
    step(watch, clock, [own, other])
    assert watch.view().tasks[0].tokens_per_s == pytest.approx(50)


def test_tasks_come_and_go_between_steps() -> None:
    own, other = task("a"), task("b")
    watch, clock = watched(own)
    step(watch, clock, [own, other])
    assert [one.name for one in watch.view().tasks] == ["a", "b"]
    step(watch, clock, [other])
    assert [one.name for one in watch.view().tasks] == ["b"]


def test_the_last_held_out_loss_is_found_also_in_a_history_that_starts_again() -> None:
    own = task()
    own.state.log_history = [{"step": 1, "loss": 3.0}, {"step": 2, "eval_loss": 5.0}]
    watch, clock = watched(own)
    step(watch, clock, [own])
    assert watch.view().tasks[0].eval_loss == 5.0
    own.state.log_history = [{"step": 1, "eval_loss": 4.0}]
    step(watch, clock, [own])
    view = watch.view(with_curves=True).tasks[0]
    assert (view.eval_loss, view.eval_losses, view.losses) == (4.0, ((1, 4.0),), ())


def test_a_curve_passes_over_what_is_no_number() -> None:
    records = [{"step": 1, "loss": 2.0}, {"step": "x", "loss": 1.0}, {"loss": 1.0}, {"step": 2, "loss": "nan"}, 7]
    assert curve_of(records, "loss") == ((1, 2.0),)


def test_each_task_has_its_share_of_the_time_of_all_steps() -> None:
    one, other = task("a"), task("b", status="waiting")
    watch, clock = watched(one, other)
    assert not watch.view().shows_shares
    step(watch, clock, [one, other])
    other.status = "running"
    step(watch, clock, [one, other])
    view = watch.view()
    assert ([own.share for own in view.tasks], view.share_of, view.shows_shares) == ([0.75, 0.25], "time", True)


# ---------------------------------------------------------------- of records


def record(event: str, time: float, **facts: Any) -> dict[str, Any]:
    return {"event": event, "time": time, "run_step": 0, "task": "a", **facts}


def trained(time: float, step: int, **facts: Any) -> dict[str, Any]:
    return record("train", time, step=step, num_tokens=50 * step, loss=1.0, **facts)


def test_records_of_a_run_that_trains_tell_its_rates_its_time_and_what_is_left() -> None:
    records = [record("data", 100.0), *(trained(100.0 + 2 * number, 10 * number) for number in range(1, 21))]
    view = view_of_records(records, {"a": 300})
    (own,) = view.tasks
    assert (own.tokens_per_s, own.left_s, view.tokens_per_s) == (250.0, 20.0, 250.0)
    assert (view.seconds, view.left_s) == (40.0, 20.0)


def test_records_tell_the_share_of_each_task_of_the_tokens() -> None:
    others = [record("train", 3.0, step=2, num_tokens=300, loss=1.0) | {"task": name} for name in "bb"]
    records = [record("data", 0.0), trained(1.0, 2), *others, record("status", 4.0, status="paused")]
    view = view_of_records(records, {"c": 9})
    assert ({own.name: own.share for own in view.tasks}, view.share_of) == ({"c": 0.0, "a": 0.25, "b": 0.75}, "tokens")
    assert not view_of_records([record("data", 0.0)], {"c": 9}).shows_shares


def test_logs_that_are_farther_apart_than_the_window_tell_rates_too() -> None:
    own = view_of_records([record("data", 0.0), trained(100.0, 10), trained(200.0, 20)], {"a": 30}).tasks[0]
    assert (own.tokens_per_s, own.left_s) == (5.0, 100.0)


def test_a_task_that_rests_or_has_just_begun_again_has_no_rate_of_records() -> None:
    before = [record("data", 0.0), trained(1.0, 1), trained(2.0, 2)]
    rests = record("status", 3.0, status="paused")
    goes_on = record("status", 50.0, status="running")
    again = [record("data", 900.0), trained(901.0, 3)]
    for records in ([*before, rests], [*before, rests, goes_on, trained(51.0, 3)], [*before, *again]):
        assert view_of_records(records, {"a": 9}).tasks[0].tokens_per_s is None
    assert view_of_records([*before, *again], {"a": 9}).seconds == 1.0, "of the last training"


def test_a_training_that_is_over_took_what_it_says_whatever_streams_tell_at_its_end() -> None:
    records = [record("data", 0.0), trained(1.0, 1), record("run", 2.0, train_runtime=1.5), record("data", 2.1)]
    assert view_of_records(records, {"a": 1}).seconds == 1.5


def test_records_without_usable_times_tell_no_rates_and_are_no_error() -> None:
    for spoilt in (
        {**trained(1.0, 1), "time": "x"},
        {**trained(1.0, 1), "num_tokens": None},
        {"event": "train", "task": "a"},
    ):
        view = view_of_records([record("data", 0.0), {**spoilt, "step": 1}, {**spoilt, "step": 2}], {"a": 9})
        assert view.tasks[0].tokens_per_s is None


def test_settings_of_a_sweep_are_short_words() -> None:
    settings = {
        "learning_rate": 2e-4,
        "peft_config.r": 8,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "adam_epsilon": 1.5e-10,
    }
    assert settings_text(settings) == "lr=2e-4 r=8 weight_decay=0.1 max_grad_norm=0 adam_epsilon=1.5e-10"
