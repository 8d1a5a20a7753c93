"""A plan as a value: what it predicts, its JSON and its text, with bands of forecasts and the times of whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.plan import HTask, Link, TaskShare, run_times
from peft_mux.scheduler.plan_views import Plan, simulated_step
from peft_mux.scheduler.units import ANALYTIC_TIME, MEASURED_TIME, MEMORY, Band, time_band
from tests.scheduler.plan_cases import a_plan


def test_a_plan_and_one_without_tasks_come_back_from_json_as_they_were() -> None:
    empty = replace(a_plan(), htasks=(), shares=(), buckets=(), template=None, bucket_loads=())
    for plan in (a_plan(), replace(a_plan(), device_bytes=2**31, links=(Link(1e-5, 1e9),) * 2), empty):
        assert Plan.from_json(plan.to_json()) == plan
    assert simulated_step(a_plan()).makespan_s == pytest.approx(1.1)
    with pytest.raises(ValueError, match="the plan must have at least one running task to have a timeline, got none"):
        empty.gantt()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format_version=99), "format_version must be 5, got 99"),
        (lambda data: data.pop("htasks"), "plan must be what to_json wrote, but lacks or misnames a field .*htasks"),
        (lambda data: data.pop("memory"), "plan must be what to_json wrote, but lacks or misnames a field .*memory"),
        (lambda data: data["template"].pop("actions"), r"template must be what to_dict wrote, .* \('actions'\)"),
    ],
)
def test_what_is_no_plan_is_refused_by_the_name_of_its_field(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    data = json.loads(a_plan().to_json())
    change(data)
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(data))


def test_a_printed_plan_shows_each_task_under_its_htask_and_every_note() -> None:
    assert a_plan().tokens_per_step == 340.5
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
    shares = [replace(share, alone_s=seconds) for share, seconds in zip(plan.shares, (1.0, 0.75, 0.5), strict=True)]
    plan = replace(plan, shares=tuple(shares))
    assert "one after another" not in str(plan), "less is gained than such a profile may be off"
    plan = replace(plan, profile_source="measured")
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
    alone = replace(plan, shares=plan.shares[:1])
    assert "one after another" not in str(alone), "a single task has nothing to be compared with"


def test_a_task_is_explained_with_its_company_and_its_share() -> None:
    text = a_plan().explain("sql")
    assert text.startswith("sql shares its passes with tales (hTask 1 of 2).")
    assert "2 passes of about 150 tokens" in text
    assert "1 s of the step's 1.25 s" in text
    assert "it trains 100 parameters" in text.lower()
    assert "has its passes to itself" in a_plan().explain("sums")
    assert a_plan().explain("late") == "late waits: 0.10 GiB too much next to sql; runs when others end"
    with pytest.raises(ValueError, match="task must be sql, tales, sums, late, got 'sqll'"):
        a_plan().explain("sqll")


def test_a_diff_tells_who_comes_goes_and_changes_company() -> None:
    before = a_plan()
    after = replace(
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


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("planner-accuracy*.json"))


@pytest.mark.parametrize(("band", "what"), [(MEASURED_TIME, "step time"), (MEMORY, "peak memory")])
def test_a_band_is_the_worst_stored_error_rounded_up_to_whole_five_percent(band: Band, what: str) -> None:
    assert RESULTS
    worst = max(json.loads(path.read_text(encoding="utf-8"))["summary"][what]["worst_error"] for path in RESULTS)
    width = -(-worst // 0.05) * 0.05
    assert (band.low, band.high) == (pytest.approx(1 - width), pytest.approx(1 + width))
    assert band.words == f"+-{width:.0%}".replace("%", " %")
    assert (time_band("measured"), time_band("analytic")) == (MEASURED_TIME, ANALYTIC_TIME)


def test_text_html_and_json_of_a_plan_have_the_bands() -> None:
    plan = replace(a_plan(), profile_source="measured")
    assert "1.25 s a step +-15 %, " in str(plan)
    assert "+-15 %" in plan._repr_html_()
    found = json.loads(plan.to_json())["forecast"]
    assert found["step_s"] == {
        "predicted": 1.25,
        "low": pytest.approx(1.0625),
        "high": pytest.approx(1.4375),
        "source": "measured profile",
    }
    assert found["peak_bytes"]["high"] == pytest.approx(1.15 * plan.memory.peak_bytes)
    assert found["peak_bytes"]["source"] == "analytic estimate"
    assert replace(plan, step_s=0.0).forecast["step_s"] is None


OVERHEAD_S = 0.5
"""What a pass takes whatever it holds."""


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 9.0)), min_size=2, max_size=8))
def test_of_passes_with_a_fixed_overhead_the_time_together_is_that_of_steps_as_tasks_end(
    tasks: list[tuple[int, float]],
) -> None:
    step_s = OVERHEAD_S + sum(work_s for _, work_s in tasks)
    times = run_times([steps for steps, _ in tasks], [OVERHEAD_S + work_s for _, work_s in tasks], step_s)
    assert times is not None
    running = [[work_s for steps, work_s in tasks if steps > step] for step in range(max(steps for steps, _ in tasks))]
    assert times.together_s == pytest.approx(sum(OVERHEAD_S + sum(one) for one in running))
    assert times.in_turn_s == pytest.approx(sum(steps * (OVERHEAD_S + work_s) for steps, work_s in tasks))
    assert times.ratio == pytest.approx(times.in_turn_s / times.together_s)


def test_company_makes_no_task_faster_than_it_is_alone_and_one_task_or_unknown_times_have_no_comparison() -> None:
    times = run_times([10, 10, 1], [4.0, 1.0, 4.0], 4.5)
    assert times is not None
    assert times.together_s == pytest.approx(4.5 + 9 * 4.0)
    for alone_s, step_s in (((1.0,), 1.0), ((1.0, 0.0), 1.0), ((1.0, 1.0), 0.0), ((), 0.0)):
        assert run_times([3] * len(alone_s), alone_s, step_s) is None
