"""A plan as pictures: the memory bar, the Gantt chart and the HTML of a notebook."""

from __future__ import annotations

import dataclasses
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.scheduler.drawing import (
    ALARM,
    Bar,
    MemoryBar,
    Rows,
    gantt_text,
    memory_bars_text,
    memory_rows,
    rows_svg,
    save_rows,
    timeline,
)
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import Plan
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


def test_a_part_is_seen_on_the_largest_device() -> None:
    assert MemoryBar(PARTS, 2000 * GIB).lines(40)[0].startswith("        [#...")


def test_memory_of_unknown_size_is_drawn_by_itself() -> None:
    first, second = MemoryBar(PARTS, None).lines(10)
    assert first.strip() == "[####ao+++w]"
    assert "free" not in first + second
    assert not MemoryBar(PARTS, None).is_nearly_full


@pytest.mark.parametrize(("size_gib", "is_full"), [(10.6, False), (10.5, True), (8.0, True)])
def test_more_than_95_percent_is_nearly_full(size_gib: float, is_full: bool) -> None:
    bar = MemoryBar(PARTS, int(size_gib * GIB))
    assert bar.is_nearly_full is is_full
    assert ("NEARLY FULL: more than 95 %" in bar.lines()[0]) is is_full
    assert ("2.00 GiB too much" in bar.lines()[0]) is (size_gib == 8)


def test_a_plan_is_compared_with_its_device_and_where_that_is_unknown_against_what_it_may_fill() -> None:
    plan = a_plan()
    assert "of the 1.00 GiB, " in str(plan)
    large = dataclasses.replace(plan, device_bytes=2 * GIB)
    assert "of the device's 2.00 GiB, " in str(large)
    assert "# backbone, a adapters, o optimizers, + activations, w workspace, . free" in str(large)
    assert Plan.from_json(large.to_json()) == large


def test_parts_are_the_peak_and_tell_optimizers_from_weights() -> None:
    memory = a_plan().memory
    assert sum(memory.parts.values()) == memory.peak_bytes
    assert (memory.parts["adapters"], memory.parts["optimizers"]) == (300 * 12, 300 * 8)
    assert "adapters 0.00, optimizers 0.00, activations" in memory.summary()


def test_the_picture_of_a_plan_has_its_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = a_plan()
    drawn = plan.save_gantt(tmp_path / "plan.svg").read_text(encoding="utf-8")
    for part in (*plan.memory.parts, "memory of the fullest stage"):
        assert f"<!-- {part}" in drawn
    assert "<!-- free" not in drawn, "the device is far larger"
    assert ALARM not in drawn
    tight = dataclasses.replace(plan, device_bytes=int(plan.memory.peak_bytes * 1.02))
    drawn = tight.save_gantt(tmp_path / "tight.svg").read_text(encoding="utf-8")
    assert "<!-- free" in drawn
    assert ALARM in drawn


def simulated(latencies_s: list[float], *, stages: int = 2, micro_batches: int = 1) -> Simulation:
    buckets = even(latencies_s, stages=stages, micro_batches=micro_batches)
    return simulate(build_template(buckets, "mux"), buckets)


def saved(path: Path, simulation: Simulation) -> Path:
    return save_rows(path, {"a step": timeline(simulation)})


def bars(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("stage")]


def test_each_slot_shows_who_runs_in_it() -> None:
    # 40 ms in 40 slots: stage 0 runs its backward last, stage 1 both in the middle.
    drawn = bars(gantt_text(simulated([0.010]), width=50))
    assert drawn == ["A" * 10 + "." * 20 + "a" * 10, "." * 10 + "A" * 10 + "a" * 10 + "." * 10]


def test_buckets_have_letters_of_their_own_and_names_in_the_legend() -> None:
    text = gantt_text(simulated([0.001, 0.003], micro_batches=2))
    assert set("".join(bars(text))) == set("AaBb.")
    assert "A bucket 0  B bucket 1" in text


def test_the_head_tells_makespan_and_use() -> None:
    assert gantt_text(simulated([0.010])).splitlines()[0] == "makespan 40.0 ms, 2 stages, 50% of device time busy"


def test_the_axis_ends_with_the_makespan_in_milliseconds() -> None:
    text = gantt_text(simulated([0.010]))
    axis = text.splitlines()[3]
    assert axis.split()[0] == "0.0"
    assert axis.endswith("40.0 ms")


@pytest.mark.parametrize("width", [40, 61, 100, 160])
@pytest.mark.parametrize("num_buckets", [1, 7, 40])
def test_no_line_is_longer_than_the_width_and_all_rows_are_equally_long(width: int, num_buckets: int) -> None:
    latencies_s = [0.001 * (1 + number % 3) for number in range(num_buckets)]
    lines = gantt_text(simulated(latencies_s, micro_batches=2), width).splitlines()
    assert max(len(line) for line in lines[1:]) <= max(width, 50)
    assert {len(line) for line in lines if line.startswith("stage")} == {width}


def test_many_actions_in_one_slot_are_not_shown_as_idle() -> None:
    drawn = bars(gantt_text(simulated([0.001] * 30, stages=1, micro_batches=10), width=40))
    assert "." not in drawn[0]


def test_a_picture_too_narrow_is_refused() -> None:
    with pytest.raises(ValueError, match="width must be 30 or more for 2 stages, got 20"):
        gantt_text(simulated([0.010]), width=20)


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_is_written_in_the_format_of_its_suffix(tmp_path: Path, suffix: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = saved(tmp_path / f"plan{suffix}", simulated([0.002, 0.001], stages=3, micro_batches=3))
    assert path.read_bytes().startswith(start)


def test_a_picture_of_the_same_plan_has_the_same_bytes_and_names_actions_buckets_and_stages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = simulated([0.002, 0.001], stages=3, micro_batches=2)
    first = saved(tmp_path / "a.svg", plan).read_text(encoding="utf-8")
    assert saved(tmp_path / "b.svg", plan).read_text(encoding="utf-8") == first
    assert first.count("PolyCollection") + first.count("FillBetween") >= 2 * 2 * 3
    for label in ("0.0", "0.1", "1.0", "1.1", "bucket 0", "bucket 1", "planned stage 2"):
        assert f"<!-- {label} -->" in first


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"path must be a name that ends in \.png or \.svg, got 'plan\.gif'"):
        saved(tmp_path / "plan.gif", simulated([0.001]))


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install 'peft-mux"):
        saved(tmp_path / "plan.png", simulated([0.001]))


def test_memory_bars_are_as_full_as_the_stage() -> None:
    text = memory_bars_text([2**29, 2**31], 2**31, width=8)
    assert text.splitlines() == [
        "stage 0  [##......]  512.00 MiB of 2.00 GiB  25%",
        "stage 1  [########]  2.00 GiB of 2.00 GiB  100%",
    ]


def test_a_memory_bar_beyond_its_limit_says_by_how_much() -> None:
    text = memory_bars_text([3 * 2**20], 2 * 2**20, width=4)
    assert text == "stage 0  [####]  3.00 MiB of 2.00 MiB  150%  over by 1.00 MiB"


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
