"""What a notebook shows of a plan, and its drawings: whole pictures without scripts or colours of one theme."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments
from peft_mux.scheduler.pipeline.svg import Bar, memory_svg, rows_svg
from tests.invariants.mux_lab import small_task, tiny_llama

GIB = 2**30


def widths(svg: str) -> list[float]:
    return [float(bar.get("width", 0)) for bar in ElementTree.fromstring(svg).iter() if bar.tag.endswith("rect")]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    svg = rows_svg([("<one>", [Bar(0, 1, 0, "a"), Bar(1, 4, 1, "b")]), ("two", [Bar(0, 2, 0, "c")])], 4.0, "4 s")
    one, three, two = widths(svg)
    assert (round(three / one, 1), round(two / one, 1)) == (3.0, 2.0)
    assert "&lt;one&gt;" in svg


def test_a_limit_far_beyond_what_is_used_is_not_drawn() -> None:
    rows = [("planned", [("backbone", GIB), ("workspace", GIB)])]
    assert "stroke-dasharray" in memory_svg(rows, 4 * GIB)
    assert "stroke-dasharray" not in memory_svg(rows, 40 * GIB)
    assert "stroke-dasharray" not in memory_svg(rows, None)
    assert widths(memory_svg(rows, 40 * GIB))[0] == 2 * widths(memory_svg(rows, 4 * GIB))[0]


def test_a_plan_is_a_summary_with_drawings_at_a_prompt_and_in_a_notebook(tmp_path: Path) -> None:
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    plan = MultiTaskTrainer(tiny_llama(), args, [small_task("a", data_seed=1)]).plan()
    assert repr(plan) == plan.summary()
    html = plan._repr_html_()
    drawings = re.findall(r"<svg.*?</svg>", html)
    assert len(drawings) == 2
    assert len(widths(drawings[0])) == len(plan.timeline().spans)
    assert len(widths(drawings[1])) == 4
    assert "<script" not in html
    assert "http" not in html
