"""Planned against executed passes: what counts as the same, and what a run prints of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peft_mux.reporting.pass_report import PassReport, pass_lines
from peft_mux.scheduler.planner.values import PlannedPass

PLANNED = (PlannedPass(0, ("a", "b"), 20), PlannedPass(0, ("a",), 9))


def ran(*passes: tuple[tuple[str, ...], int]) -> list[Any]:
    return [
        SimpleNamespace(task_names=names, num_computed=tokens + 3, num_padding_tokens=3) for names, tokens in passes
    ]


def test_a_step_as_planned_counts_in_number_tasks_and_tokens_and_padding_counts_nowhere() -> None:
    report = PassReport().after(PLANNED, ran((("a", "b"), 20), (("a",), 9)))
    assert (report.num_steps, report.same_number, report.same_tasks, report.same_tokens) == (1, 1, 1, 1)
    assert (report.planned_passes, report.passes, report.planned_tokens, report.tokens) == (2, 2, 29, 29)
    assert report.is_as_planned
    assert str(report).endswith("run 2.0 of 14.5; the same tasks in the same order")


def test_other_tokens_other_orders_and_other_numbers_of_passes_are_told_apart() -> None:
    drawn = PassReport().after(PLANNED, ran((("a", "b"), 21), (("a",), 8)))
    assert (drawn.same_number, drawn.same_tasks, drawn.same_tokens) == (1, 1, 0)
    turned = PassReport().after(PLANNED, ran((("a",), 9), (("a", "b"), 20)))
    assert (turned.same_number, turned.same_tasks, turned.same_tokens) == (1, 0, 0)
    fewer = PassReport().after(PLANNED, ran((("a", "b"), 29)))
    assert (fewer.same_number, fewer.same_tasks) == (0, 0)
    assert "as many in 0 of 1 steps, the same tasks in the same order in 0" in str(fewer)


def test_a_run_prints_one_line_and_more_only_where_a_replica_differs() -> None:
    same = PassReport().after(PLANNED, ran((("a", "b"), 20), (("a",), 9)))
    other = PassReport(replica=1).after(PLANNED, ran((("a", "b"), 29)))
    assert len(pass_lines([same])) == 1
    assert pass_lines([same, same])[0].endswith("(replica 1 of 2; the others too)")
    assert [line.endswith("(replica 2 of 2)") for line in pass_lines([same, other])] == [True]
    assert pass_lines([PassReport()]) == []
