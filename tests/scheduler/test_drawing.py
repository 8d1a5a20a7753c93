"""A plan as pictures: the memory bar, the Gantt chart and the HTML of a notebook."""

from __future__ import annotations

import dataclasses
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.scheduler.drawing import (
    ALARM,
    MemoryBar,
    gantt_text,
    memory_bars_text,
    memory_rows,
    rows_svg,
    save_rows,
)
from peft_mux.scheduler.pipeline.simulator import Simulation
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan_views import Plan, simulated_step, timeline
from tests.invariants.mux_lab import small_task, tiny_llama
from tests.scheduler.pipeline.cases import even
from tests.scheduler.plan_cases import a_plan

GIB = 2**30
PARTS = (("backbone", 4 * GIB), ("adapters", GIB), ("optimizers", GIB), ("activations", 3 * GIB), ("workspace", GIB))


def test_letters_are_as_many_as_the_parts_are_large_and_dots_are_free() -> None:
    assert MemoryBar(PARTS, 20 * GIB).lines(40) == [
        "        [########aaoo++++++ww....................]  50% of the device's 20.00 GiB, 10.00 GiB free",
        "        # backbone, a adapters, o optimizers, + activations, w workspace, . free",
    ]
    assert MemoryBar(PARTS, None).lines(10)[0].strip() == "[####ao+++w]", "of a device of unknown size"
    assert MemoryBar(PARTS, 2000 * GIB).lines(40)[0].startswith("        [#..."), "a part is seen on any device"


@pytest.mark.parametrize(("size_gib", "is_full"), [(10.6, False), (10.5, True), (8.0, True)])
def test_more_than_95_percent_is_nearly_full(size_gib: float, is_full: bool) -> None:
    bar = MemoryBar(PARTS, int(size_gib * GIB))
    assert bar.is_nearly_full is is_full
    assert ("NEARLY FULL: more than 95 %" in bar.lines()[0]) is is_full
    assert ("2.00 GiB too much" in bar.lines()[0]) is (size_gib == 8)


def test_bars_of_stages_say_how_full_they_are_and_by_how_much_too_full() -> None:
    assert memory_bars_text([2**29, 2**31, 3 * 2**30], 2**31, width=8).splitlines() == [
        "stage 0  [##......]  512.00 MiB of 2.00 GiB  25%",
        "stage 1  [########]  2.00 GiB of 2.00 GiB  100%",
        "stage 2  [########]  3.00 GiB of 2.00 GiB  150%  over by 1.00 GiB",
    ]


def test_a_plan_is_compared_with_its_device_and_where_that_is_unknown_against_what_it_may_fill() -> None:
    plan, large = a_plan(), dataclasses.replace(a_plan(), device_bytes=2 * GIB)
    assert "of the 1.00 GiB, " in str(plan)
    assert "of the device's 2.00 GiB, " in str(large)
    assert sum(plan.memory.parts.values()) == plan.memory.peak_bytes
    assert (plan.memory.parts["adapters"], plan.memory.parts["optimizers"]) == (300 * 12, 300 * 8)


def planned(latencies_s: list[float], *, stages: int = 2, micro_batches: int = 1) -> Plan:
    loads = tuple(even(latencies_s, stages=stages, micro_batches=micro_batches))
    buckets = ((0,), (1,)) if len(loads) > 1 else ((0, 1),)
    return dataclasses.replace(a_plan(), buckets=buckets, template=build_template(loads, "mux"), bucket_loads=loads)


def simulated(latencies_s: list[float], *, stages: int = 2, micro_batches: int = 1) -> Simulation:
    return simulated_step(planned(latencies_s, stages=stages, micro_batches=micro_batches))


def bars(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("stage")]


def test_each_slot_shows_who_runs_in_it_over_an_axis_that_ends_with_the_makespan() -> None:
    # 40 ms in 40 slots: stage 0 runs its backward last, stage 1 both in the middle.
    text = gantt_text(simulated([0.010]), width=50)
    assert bars(text) == ["A" * 10 + "." * 20 + "a" * 10, "." * 10 + "A" * 10 + "a" * 10 + "." * 10]
    assert text.splitlines()[0] == "makespan 40.0 ms, 2 stages, 50% of device time busy"
    assert text.splitlines()[3].split()[0] == "0.0"
    assert text.splitlines()[3].endswith("40.0 ms")
    assert "A bucket 0  B bucket 1" in gantt_text(simulated([0.001, 0.003], micro_batches=2))
    many = gantt_text(simulated([0.001] * 30, stages=1, micro_batches=10), width=40)
    assert "." not in bars(many)[0], "many actions in one slot are not shown as idle"
    assert max(map(len, many.splitlines()[1:])) <= 50
    with pytest.raises(ValueError, match="width must be 30 or more for 2 stages, got 20"):
        gantt_text(simulated([0.010]), width=20)


def test_a_picture_is_written_in_the_format_of_its_suffix_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = {"a step": timeline(planned([0.002, 0.001], stages=3, micro_batches=2))}
    assert save_rows(tmp_path / "plan.png", rows).read_bytes().startswith(b"\x89PNG")
    first, second = (save_rows(tmp_path / name, rows).read_text(encoding="utf-8") for name in ("a.svg", "b.svg"))
    assert first == second
    for label in ("0.0", "0.1", "1.0", "1.1", "sql, tales", "sums", "planned stage 2"):
        assert f"<!-- {label} -->" in first
    with pytest.raises(ConfigError, match=r"path must be a name that ends in \.png or \.svg, got 'plan\.gif'"):
        save_rows(tmp_path / "plan.gif", rows)


def test_long_names_leave_room_for_the_bars_and_no_title_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    figure_type = pytest.importorskip("matplotlib.figure").Figure
    saved: list[Any] = []
    monkeypatch.setattr(figure_type, "savefig", lambda figure, *args, **options: saved.append(figure))
    names = [f"a-task-with-a-rather-long-name-{number}" for number in range(9)]
    drawn = timeline(planned([0.001]))._replace(legend=[(", ".join(names), 0)])
    save_rows(Path("plan.png"), {"a title of many words " * 3: drawn})
    saved[0].canvas.draw()
    (axes,) = saved[0].axes
    box = axes._left_title.get_window_extent()
    assert axes.get_position().width > 0.5
    assert saved[0].bbox.x0 <= box.x0 < box.x1 <= saved[0].bbox.x1


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        save_rows(tmp_path / "plan.png", {"a step": timeline(planned([0.001]))})


def test_the_picture_of_a_plan_has_its_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = a_plan()
    tight = dataclasses.replace(plan, device_bytes=int(plan.memory.peak_bytes * 1.02))
    for one, is_tight in ((plan, False), (tight, True)):
        drawn = one.save_gantt(tmp_path / "plan.svg").read_text(encoding="utf-8")
        assert all(f"<!-- {part}" in drawn for part in (*plan.memory.parts, "memory of the fullest stage"))
        assert ("<!-- free" in drawn, ALARM in drawn) == (is_tight, is_tight)


def widths(svg: str) -> list[float]:
    return [float(bar.get("width", 0)) for bar in ElementTree.fromstring(svg).iter() if bar.tag.endswith("rect")]


def test_memory_is_drawn_up_to_the_end_of_the_device_and_framed_in_red_where_it_is_nearly_full() -> None:
    rows = {"<planned>": {"backbone": GIB, "workspace": GIB}, "process 0": {"measured": 3 * GIB}}
    svg = rows_svg(memory_rows(rows, 3 * GIB, 4 * GIB))
    assert [round(width / widths(svg)[0]) for width in widths(svg)] == [1, 1, 2, 3, 1]
    assert "free: 2.00 GiB" in svg
    assert "&lt;planned&gt;" in svg
    assert ("stroke-dasharray" in svg, ALARM in svg) == (True, False), "what a plan may fill is drawn"
    assert "stroke-dasharray" not in rows_svg(memory_rows(rows, 60 * GIB, None)), "a limit far beyond is not drawn"
    full = rows_svg(
        memory_rows({"planned": {"backbone": 0.96 * GIB}, "process 0": {"measured": 0.94 * GIB}}, None, GIB)
    )
    assert full.count(ALARM) == 2, "the label and the frame of the first row"
    assert full.index(ALARM) < full.index("process 0")


def test_a_plan_is_a_summary_with_drawings_at_a_prompt_and_in_a_notebook(tmp_path: Path) -> None:
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    plan = MultiTaskTrainer(tiny_llama(), args, [small_task("a", data_seed=1)]).plan()
    assert repr(plan) == plan.summary()
    html = plan._repr_html_()
    drawings = re.findall(r"<svg.*?</svg>", html)
    assert len(drawings) == 2
    assert len(widths(drawings[0])) == len(simulated_step(plan).spans)
    assert len(widths(drawings[1])) == 5, "base weights, adapters, optimizers, activations, workspace"
    assert "<script" not in html
    assert "http" not in html
