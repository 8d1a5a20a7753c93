"""What a run takes and computes: seconds of steps, tasks and their own code; planned against executed passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peft_mux.engine.work import StepTimes
from peft_mux.log.recorders import CALL_LIMIT_S, SHARE_LIMIT, PassReport, RunTimes, pass_lines, shared_tokens
from peft_mux.scheduler.plan import PlannedPass
from tests.reporting.lab import Clock

PLANNED = (PlannedPass(0, ("a", "b"), 20), PlannedPass(0, ("a",), 9))
PLAN, OTHER, ALONE = (SimpleNamespace(shares=shares) for shares in ("ab", "bc", "b"))


def warned_totals(clock: Clock, times: RunTimes, seconds: float, *, calls: int, every_s: float = 0.0) -> list[float]:
    """Return the totals at which the user of a task is warned about calls of its own code."""
    totals = []
    for _ in range(calls):
        clock.now_s += max(seconds, every_s)
        totals.append(times.add_user_code("slow", "callback", seconds))
    return [total for total in totals if total is not None]


# ------------------------------------------------------------------------ steps


def steps(times: RunTimes, *taken: tuple[Any, float, int]) -> RunTimes:
    for plan, seconds, count in taken:
        times.add_steps(plan, seconds, count, StepTimes(span_s=seconds))
    return times


def test_first_steps_under_a_plan_count_as_the_mean_of_the_others() -> None:
    assert RunTimes().settled_s == 0.0
    times = steps(RunTimes(), (PLAN, 35.0, 1), (PLAN, 20.0, 1), (PLAN, 22.0, 3))
    assert times.settled_s == pytest.approx(5 * (20 + 3 * 22) / 4)
    only_first = steps(RunTimes(), (PLAN, 35.0, 1), (OTHER, 30.0, 1))
    assert only_first.settled_s == pytest.approx(65.0), "no step has followed another under one plan"


def test_of_the_plans_with_the_most_tasks_that_of_most_steps_is_kept_with_its_last_step() -> None:
    times = steps(RunTimes(), (ALONE, 1.0, 1), (PLAN, 1.0, 2), (PLAN, 2.0, 1), (OTHER, 3.0, 2), (ALONE, 4.0, 9))
    assert times.followed == (PLAN, StepTimes(span_s=2.0))


# -------------------------------------------------------------- own code of tasks


def test_many_short_calls_are_reported_if_they_take_much_of_the_run() -> None:
    clock = Clock()
    times = RunTimes(clock)
    assert warned_totals(clock, times, CALL_LIMIT_S / 4, calls=3) == [], "less than a second in all"
    assert len(warned_totals(clock, times, CALL_LIMIT_S / 4, calls=2)) == 1
    clock = Clock()
    assert warned_totals(clock, RunTimes(clock), 0.1, calls=200, every_s=0.2 / SHARE_LIMIT) == []


def test_a_task_is_reported_each_time_its_total_has_doubled() -> None:
    clock = Clock()
    assert warned_totals(clock, RunTimes(clock), 2.0, calls=1000) == [2.0 * 2**power for power in range(10)]


def test_totals_name_each_kind_and_leave_out_tasks_that_cost_little() -> None:
    times = RunTimes(Clock())
    times.add_user_code("slow", "callback", 2.0)
    times.add_user_code("slow", "train_dataset", 3.0)
    times.add_user_code("quick", "callback", CALL_LIMIT_S / 2)
    assert times.user_code_s() == {"slow": {"callback": 2.0, "train_dataset": 3.0}}
    times.forget_user_code("slow")
    times.forget_user_code("slow")
    assert times.user_code_s() == {}
    assert times.add_user_code("slow", "callback", 1.5) == 1.5, "another task of this name begins again"


# ------------------------------------------------------------------------ passes


def ran(*passes: tuple[tuple[str, ...], int]) -> list[Any]:
    """Return micro-batches by their tasks and tokens, with three tokens of padding each."""
    found = []
    for names, tokens in passes:
        offsets = (0, *range(1, len(names)), tokens)
        batch = {"task_names": names, "num_computed": tokens + 3, "num_padding_tokens": 3}
        found.append(SimpleNamespace(**batch, task_offsets=offsets, computed_offsets=offsets))
    return found


def test_a_step_as_planned_counts_in_number_tasks_and_tokens_and_padding_counts_nowhere() -> None:
    report = PassReport().after(PLANNED, ran((("a", "b"), 20), (("a",), 9)))
    assert (report.num_steps, report.same_number, report.same_tasks, report.same_tokens) == (1, 1, 1, 1)
    assert (report.planned_passes, report.passes, report.planned_tokens, report.tokens) == (2, 2, 29, 29)
    assert report.is_as_planned
    assert str(report).endswith("actual 2.0 (14.5 tokens); same tasks in the same order")


def test_other_tokens_orders_and_numbers_of_passes_are_distinguished() -> None:
    drawn = PassReport().after(PLANNED, ran((("a", "b"), 21), (("a",), 8)))
    assert (drawn.same_number, drawn.same_tasks, drawn.same_tokens) == (1, 1, 0)
    turned = PassReport().after(PLANNED, ran((("a",), 9), (("a", "b"), 20)))
    assert (turned.same_number, turned.same_tasks, turned.same_tokens) == (1, 0, 0)
    fewer = PassReport().after(PLANNED, ran((("a", "b"), 29)))
    assert (fewer.same_number, fewer.same_tasks) == (0, 0)
    assert "same number in 0 of 1 steps, same tasks in the same order in 0" in str(fewer)


def test_a_run_prints_one_line_and_more_only_if_a_replica_differs() -> None:
    same = PassReport().after(PLANNED, ran((("a", "b"), 20), (("a",), 9)))
    other = PassReport(replica=1).after(PLANNED, ran((("a", "b"), 29)))
    assert len(pass_lines([same])) == 1
    assert pass_lines([same, same])[0].endswith("(replica 1 of 2; the others too)")
    assert [line.endswith("(replica 2 of 2)") for line in pass_lines([same, other])] == [True]
    assert pass_lines([PassReport()]) == []


def test_shared_tokens_add_up_over_steps_and_replicas() -> None:
    batch = SimpleNamespace(task_names=("a", "b"), task_offsets=(0, 10, 16), computed_offsets=(0, 7, 13))
    first = PassReport().after(None, [batch, batch])  # type: ignore[list-item]
    second = PassReport(replica=1).after(None, [batch])  # type: ignore[list-item]
    assert (first.num_steps, second.num_steps) == (0, 0), "no plan had these passes"
    assert shared_tokens([first, second]) == {"a": (21, 30)}
