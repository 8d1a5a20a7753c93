"""A plan in words: each task under its hTask, its company and its share, and what changes from plan to plan."""

from __future__ import annotations

import dataclasses
import json

import pytest

from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.values import HTask, TaskShare
from tests.scheduler.plan_cases import a_plan


def test_a_printed_plan_shows_each_task_under_its_htask_and_every_note() -> None:
    lines = str(a_plan()).splitlines()
    assert lines[0] == "plan  3 tasks on cpu, 2 hTasks, chunks of 64 tokens"
    (sums,) = [line.split() for line in lines if line.startswith("  sums")]
    assert sums == ["sums", "2", "2", "40", "5", "50"]
    assert "  hTask 1: 2 passes a step of about 150 tokens (at most 256), 500 ms each" in lines
    assert "  late   waits: 0.10 GiB too much next to sql; runs when others end" in lines
    assert any(
        line.startswith("time (analytic profile, not measured)  1 s a step (order of magnitude), 300") for line in lines
    )
    assert any(line.startswith("memory (analytic estimate)  peak ") and "iB +-15 %: " in line for line in lines)
    assert lines[-1] == "note  sql: 3 of 40 rows are cut"


def test_a_plan_says_what_its_steps_take_one_task_after_another_and_together() -> None:
    plan = a_plan()
    assert plan.run_times is None, "times alone were not asked for"
    assert "one after another" not in str(plan)
    assert "run" not in json.loads(plan.to_json())["forecast"]
    shares = [
        dataclasses.replace(share, alone_s=seconds)
        for share, seconds in zip(plan.shares, (1.0, 0.75, 0.5), strict=True)
    ]
    plan = dataclasses.replace(plan, shares=tuple(shares))
    assert "one after another" not in str(plan), "less is gained than such a profile may be off"
    plan = dataclasses.replace(plan, profile_source="measured")
    # 30, 10 and 5 steps: 5 of all three, 5 of two of them, 20 of one. Of the 1 s that company saves, each brings half.
    together_s = 5 * 1.25 + 5 * (1.75 - 0.5) + 20 * 1.0
    words = "        one after another 40 s   together 32.5 s   1.2x (estimate), without the tasks that wait"
    assert words in str(plan).splitlines()
    assert words.strip() in plan._repr_html_()
    assert json.loads(plan.to_json())["forecast"]["run"] == {
        "in_turn_s": 40.0,
        "together_s": together_s,
        "ratio": 40.0 / together_s,
    }
    assert Plan.from_json(plan.to_json()) == plan
    alone = dataclasses.replace(plan, shares=plan.shares[:1])
    assert "one after another" not in str(alone), "a single task has nothing to be compared with"


def test_a_task_is_explained_with_its_company_and_its_share() -> None:
    told = a_plan().explain("sql")
    assert told.startswith("sql shares its passes with tales (hTask 1 of 2).")
    assert "2 passes of about 150 tokens" in told
    assert "1 s of the step's 1.25 s" in told
    assert "it trains 100 parameters" in told.lower()
    assert "has its passes to itself" in a_plan().explain("sums")
    assert a_plan().explain("late") == "late waits: 0.10 GiB too much next to sql; runs when others end"


def test_a_task_that_a_plan_does_not_know_is_refused_with_those_it_knows() -> None:
    with pytest.raises(ValueError, match="task must be sql, tales, sums, late, got 'sqll'"):
        a_plan().explain("sqll")


def test_a_diff_tells_who_comes_goes_and_changes_company() -> None:
    before = a_plan()
    after = dataclasses.replace(
        before,
        htasks=(HTask(("sql",), 2, 50.0, 0.2), HTask(("tales", "late"), 1, 240.0, 0.4)),
        shares=(*before.shares[:2], TaskShare("late", 1, 40.0, 5, 10)),
        waiting=(),
        step_s=1.0,
    )
    assert before.diff(before) == ""
    assert before.diff(after).splitlines() == [
        "+ late starts",
        "- sums leaves",
        "~ sql shares its passes with no other task, before with tales",
        "~ tales shares its passes with late, before with sql",
        "~ step_s: 1.25 s -> 1 s",
    ]
    assert after.diff(before).splitlines()[:2] == ["+ sums starts", f"- late waits: {before.waiting[0].reason}"]
