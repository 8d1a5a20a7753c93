"""A run as HTML: what it says, that it is whole, and that nothing of a task's text becomes markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from peft_mux.reporting.page import chart_svg, run_html
from peft_mux.reporting.screen import NotebookProgress
from peft_mux.reporting.table import table_text
from peft_mux.reporting.views import RunView, RunWatch, TaskView, interrupted, view_of_records
from peft_mux.scheduler.drawing import rounded_ticks
from tests.reporting.lab import shown_task

CURVE = tuple((step, 5.0 - step / 100) for step in range(1, 401))
TASKS = (
    TaskView("sql", "running", 50, 100, "", 0.84, "down", 0.91, 98.0, 60.0, CURVE, ((100, 3.0),)),
    TaskView("math", "failed", 3, 60, "<script>alert(1)</script>", losses=((1, 2.0),), settings="lr=2e-4 r=8"),
    TaskView("new", "waiting", 0, 60),
)


def drawings(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html)]


def test_a_run_is_a_table_with_bars_and_a_chart_of_each_task_that_has_losses() -> None:
    html = run_html(RunView(TASKS, 50, 61.0, 2**30, 2**31, ("sql: <b>running</b>",)))
    text = re.sub("<[^>]*>", "", html)
    assert re.search(r"^sql +running +[━╺]+ +50/100 +0.8400 ↓ +0.9100 +98 +1:00$", text, re.MULTILINE)
    assert [svg[0].text for svg in drawings(html)] == ["sql", "math"]
    assert drawings(html)[1][1].text == "lr=2e-4 r=8"
    assert "sql: &lt;b&gt;running&lt;/b&gt;" in html
    assert "math: &lt;script&gt;alert(1)" in html
    assert "<script" not in html
    assert "memory 1.00/2.0 GiB" in text


def test_a_notebook_shows_a_run_once_although_rich_displays_what_is_printed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *args: shown.append(args))
    assert "sql" in run_html(RunView(TASKS))
    assert "sql" in table_text(RunView(TASKS))
    assert shown == []


def test_of_many_tasks_those_that_run_get_a_chart_first_and_the_others_are_counted() -> None:
    tasks = [TaskView(f"t{number}", "succeeded", 9, 9, losses=CURVE) for number in range(5)]
    html = run_html(RunView((*tasks, TASKS[0])), most_charts=2)
    assert [svg[0].text for svg in drawings(html)] == ["sql", "t0"]
    assert "... and 4 more" in html


def test_points_lie_within_their_chart_and_a_fall_goes_down() -> None:
    svg = ElementTree.fromstring(
        chart_svg("a", [TaskView("a", "running", 5, 9, losses=CURVE, eval_losses=((5, 4.0),))])
    )
    (line, *_) = [part.get("points", "") for part in svg.iter() if part.tag == "polyline"]
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) <= 201
    assert (points[0][0], points[-1][0]) == (round(58 + 176 / 400, 1), 234.0), "a long curve keeps its ends"
    assert all(58 <= x <= 250 and 20 <= y <= 118 for x, y in points)
    assert points[0][1] < points[-1][1]
    assert len([part for part in svg.iter() if part.tag == "circle"]) == 1


@pytest.mark.parametrize(
    ("last", "value"), [(30, 0.5), (50_000, 1_234_567.0), (1_234_567, 1e300), (999, -123.4567)], ids=str
)
@pytest.mark.parametrize("width", [250, 760])
def test_labels_lie_inside_their_chart_and_apart_from_each_other(last: int, value: float, width: int) -> None:
    task = TaskView("a" * 99, "running", 5, 9, losses=((1, value), (last, -value)))
    svg = ElementTree.fromstring(chart_svg(task.name, [task], below="lr=2e-4 " * 20, width=width))
    places: dict[str, list[tuple[float, float]]] = {}
    for text in [part for part in svg.iter() if part.tag == "text" and part.get("x")]:
        length = 6.2 * len(text.text or "")
        start = float(text.get("x", 0)) - {"middle": 0.5, "end": 1.0}.get(text.get("text-anchor", ""), 0.0) * length
        places.setdefault(text.get("y", ""), []).append((start, start + length))
        assert 0 <= float(text.get("y", 0)) <= float(svg.get("height", 0))
    assert all(start >= 0 and end <= width for line in places.values() for start, end in line)
    assert all(first[1] < second[0] for line in places.values() for first, second in pairwise(sorted(line)))


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.9312, 1.0187, ["0.94", "0.96", "0.98", "1.00"]),
        (0, 7, ["0", "2", "4", "6"]),
        (-0.3, 0.31, ["-0.2", "0.0", "0.2"]),
        (0, 123_456, ["0", "50,000", "100,000"]),
        (2e-9, 9e-9, ["2e-09", "4e-09", "6e-09", "8e-09"]),
        (-1e300, 1e300, ["-1e+300", "-5e+299", "0", "5e+299", "1e+300"]),
        (3.0, 3.0, []),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(low: float, high: float, texts: list[str]) -> None:
    ticks = rounded_ticks(low, high)
    assert [text for _, text in ticks] == texts
    assert all(low <= value <= high * (1 + 1e-9) for value, _ in ticks)


def test_held_out_curves_are_dashed_with_dots_and_the_colours_are_explained() -> None:
    html = run_html(RunView(TASKS))
    dashed = [part for svg in drawings(html) for part in svg.iter() if part.get("stroke-dasharray")]
    assert len(dashed) == 1, "one of the tasks is evaluated"
    assert "eval (dashed): loss of held-out rows" in html
    assert "eval (dashed)" not in run_html(RunView(TASKS[1:]))


def test_curves_of_one_point_or_one_height_are_drawn_too() -> None:
    own = TaskView("a", "running", 5, 9)
    assert chart_svg("a", [own]) == "", "without points there is no chart"
    for points in (((1, 2.0),), ((0, 0.0), (0, 0.0)), ((1, -3.0), (2, -3.0)), ((1, 1e300), (2, -1e300))):
        drawn = chart_svg("a", [replace(own, losses=points)])
        assert "nan" not in drawn
        assert ElementTree.fromstring(drawn) is not None


def test_what_a_folder_has_of_a_run_is_shown_as_the_run_was() -> None:
    records = [
        {"event": "train", "task": "a", "step": 2, "loss": 2.0, "run_step": 2},
        {"event": "eval", "task": "a", "step": 4, "eval_loss": 3.0, "run_step": 4},
        {"event": "status", "task": "a", "step": 4, "status": "failed", "reason": "nan", "run_step": 4},
        {"event": "train", "task": "b", "step": 5, "loss": "nan", "run_step": 5},
        {"event": "run", "train_runtime": 7.5, "run_step": 5},
        {"event": "passes", "run_step": 5},
    ]
    view = view_of_records(records, {"a": 9})
    assert (view.step, view.seconds) == (5, 7.5)
    a, b = view.tasks
    assert (a.status, a.reason, a.step, a.num_steps, a.loss, a.eval_loss) == ("failed", "nan", 4, 9, 2.0, 3.0)
    assert (b.status, b.step, b.num_steps, b.loss) == ("running", 5, 5, None)


def test_a_run_that_was_interrupted_before_its_first_log_shows_its_tasks_and_their_steps() -> None:
    records = [
        {"event": "data", "task": "a", "split": "train_dataset", "run_step": 0},
        {"event": "data", "task": "b", "split": "train_dataset", "run_step": 0},
        {"event": "status", "task": "b", "step": 8, "status": "paused", "reason": "", "run_step": 8},
        {"event": "interrupted", "steps": {"a": 12, "b": 8, "c": None}, "run_step": 12},
    ]
    view = view_of_records(records, {"a": 30, "b": 20, "c": 10})
    assert [(one.name, one.status, one.step, one.num_steps) for one in view.tasks] == [
        ("a", "running", 12, 30),
        ("b", "paused", 8, 20),
        ("c", "waiting", 0, 10),
    ]
    left = interrupted(view)
    assert [one.status for one in left.tasks] == ["interrupted", "paused", "waiting"]
    assert "<b>run</b> step 12<" in run_html(left)
    assert "run  interrupted, " in run_html(left)
    rest = replace(view, tasks=view.tasks[1:])
    assert interrupted(rest) is rest, "no task of it would take steps by itself"


def test_a_notebook_has_one_output_that_is_updated_and_gets_later_lines_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    display = pytest.importorskip("IPython.display", reason="needs the notebooks extra: IPython")
    shown: list[str] = []
    asked: list[dict[str, Any]] = []

    def update(html: Any) -> None:
        shown.append(html.data)

    def show(html: Any, **options: Any) -> Any:
        asked.append(options)
        update(html)
        return SimpleNamespace(update=update)

    monkeypatch.setattr(display, "display", show)
    own = shown_task("sql", num_steps=9, last_loss=1.0, eval_data={})
    progress = NotebookProgress(RunWatch())
    progress.log("before")
    progress.start([own])
    for _ in range(100):
        own.step += 1
        progress.advance([own])
    progress.stop()
    progress.log("the report")
    assert asked == [{"display_id": True}]
    assert len(shown) < 20, "not once a step"
    assert "before" in shown[0]
    assert "100/9" in shown[-1]
    assert "the report" in shown[-1]
