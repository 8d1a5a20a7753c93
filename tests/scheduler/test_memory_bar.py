"""The bar of a plan's memory: each part as long as it is large, what is free, and red where there is hardly any."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from peft_mux.scheduler.drawing import ALARM, MemoryBar
from peft_mux.scheduler.plan import Plan
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
