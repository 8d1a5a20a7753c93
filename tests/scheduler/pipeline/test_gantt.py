"""Drawings of a pipeline show each action where it ran, and how full each stage gets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from peft_mux.errors import ConfigError
from peft_mux.scheduler.drawing import gantt_text, memory_bars_text, save_rows, timeline
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate
from peft_mux.scheduler.pipeline.template import build_template


def simulated(latencies_s: list[float], *, stages: int = 2, micro_batches: int = 1) -> Simulation:
    buckets = [
        BucketLoad(
            name=f"load {index}",
            forward_s=(latency,) * stages,
            activation_bytes=(1,) * stages,
            num_micro_batches=micro_batches,
        )
        for index, latency in enumerate(latencies_s)
    ]
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
    assert "A load 0  B load 1" in text


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
    lines = gantt_text(
        simulated([0.001 * (1 + i % 3) for i in range(num_buckets)], micro_batches=2), width
    ).splitlines()
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
    for label in ("0.0", "0.1", "1.0", "1.1", "load 0", "load 1", "planned stage 2"):
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
