"""What a notebook shows of a plan, and its drawings: whole pictures without scripts or colours of one theme."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments
from peft_mux.scheduler.drawing import ALARM, Bar, Rows, memory_rows, rows_svg
from tests.invariants.mux_lab import small_task, tiny_llama
from tests.scheduler.plan_cases import a_plan

GIB = 2**30


def memory_svg(rows: dict[str, dict[str, float]], limit: int | None, device: int | None = None) -> str:
    return rows_svg(memory_rows(rows, limit, device))


def widths(svg: str) -> list[float]:
    return [float(bar.get("width", 0)) for bar in ElementTree.fromstring(svg).iter() if bar.tag.endswith("rect")]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    rows = [("<one>", [Bar(0, 1, 0, "a"), Bar(1, 4, 1, "b")]), ("two", [Bar(0, 2, 0, "c")])]
    svg = rows_svg(Rows(rows, 4.0, (1.0, "s")))
    one, three, two = widths(svg)
    assert (round(three / one, 1), round(two / one, 1)) == (3.0, 2.0)
    assert "&lt;one&gt;" in svg
    assert re.findall(r">(\d+ s)<", svg) == ["0 s", "1 s", "2 s", "3 s", "4 s"], "round numbers with their unit"


def test_a_limit_far_beyond_what_is_used_is_not_drawn() -> None:
    rows = {"planned": {"backbone": GIB, "workspace": GIB}}
    assert "stroke-dasharray" in memory_svg(rows, 4 * GIB)
    assert "stroke-dasharray" not in memory_svg(rows, 40 * GIB)
    assert "stroke-dasharray" not in memory_svg(rows, None)
    assert widths(memory_svg(rows, 40 * GIB))[0] == 2 * widths(memory_svg(rows, 4 * GIB))[0]


def test_memory_that_is_free_is_drawn_up_to_the_end_of_the_device() -> None:
    rows = {"planned": {"backbone": GIB, "workspace": GIB}, "process 0": {"measured": 3 * GIB}}
    svg = memory_svg(rows, 3 * GIB, 4 * GIB)
    assert [round(width / widths(svg)[0]) for width in widths(svg)] == [1, 1, 2, 3, 1]
    assert "free: 2.00 GiB" in svg
    assert "stroke-dasharray" in svg, "what a plan may fill"
    assert ALARM not in svg


def test_memory_that_is_nearly_full_is_framed_in_red() -> None:
    rows = {"planned": {"backbone": 0.96 * GIB}, "process 0": {"measured": 0.94 * GIB}}
    svg = memory_svg(rows, None, GIB)
    assert svg.count(ALARM) == 2, "the label and the frame of the first row"
    assert svg.index(ALARM) < svg.index("process 0")
    nearly = dataclasses.replace(a_plan(), device_bytes=int(a_plan().memory.peak_bytes / 0.96))
    assert "more than 95 % is taken" in nearly._repr_html_()
    assert "more than 95 % is taken" not in a_plan()._repr_html_()


def test_a_plan_is_a_summary_with_drawings_at_a_prompt_and_in_a_notebook(tmp_path: Path) -> None:
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    plan = MultiTaskTrainer(tiny_llama(), args, [small_task("a", data_seed=1)]).plan()
    assert repr(plan) == plan.summary()
    html = plan._repr_html_()
    drawings = re.findall(r"<svg.*?</svg>", html)
    assert len(drawings) == 2
    assert len(widths(drawings[0])) == len(plan.timeline().spans)
    assert len(widths(drawings[1])) == 5, "base weights, adapters, optimizers, activations, workspace"
    assert "<script" not in html
    assert "http" not in html
