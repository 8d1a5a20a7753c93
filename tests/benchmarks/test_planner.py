"""The planner's benchmarks run, and what they print is what they computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner import case_two
from benchmarks.planner import figures as planner_figures
from benchmarks.planner import times as planner
from benchmarks.planner.cluster import __main__ as cluster


def test_a_missing_trace_is_reported_with_the_way_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.main(["--data", str(tmp_path)]) == 2
    assert "--data" in capsys.readouterr().out


@pytest.mark.slow
def test_the_quick_cluster_replay_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("simpy", reason="simpy is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    # Every four minutes a task of one or two hours, for a day: several times what 8 instances can do.
    lines = [f"{240 * number},{3600 * (1 + number % 2)}" for number in range(360)]
    (tmp_path / cluster.TRACE).write_text("\n".join(["submit_s,duration_s", *lines]) + "\n")
    options = ["--quick", "--write", "--max-tasks", "2", "--micro-batches", "8"]
    assert cluster.main([*options, "--data", str(tmp_path), "--results", str(tmp_path / "results")]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "results" / "cluster-a40-quick.json").read_text())
    assert (tmp_path / "results" / "cluster-a40-quick.png").stat().st_size > 10_000
    assert "First come, first served" in printed
    assert report["load_of_the_whole_trace"] == pytest.approx(360 * 5400 / 86400 / 8)
    for row in report["comparison"]:
        assert f"{row['ours']:.2f}x" in printed
        systems = {one["system"]: one["tokens_per_s"] for one in report["cases"][row["case"]]}
        assert row["ours"] == pytest.approx(systems["muxtune"] / systems[row["over"]])
    ratios = {(row["case"], row["over"]): row["ours"] for row in report["comparison"]}
    assert ratios["Non-uniform", "sl-peft"] > ratios["Uniform", "sl-peft"] >= 1


@pytest.fixture(scope="module")
def figures() -> list[planner_figures.Row]:
    return [row for make in planner_figures.FIGURES.values() for row in make("A40")]


def rows_of(figures: list[planner_figures.Row], figure: str, *words: str) -> list[planner_figures.Row]:
    return [row for row in figures if row.figure == figure and all(word in row.what for word in words)]


def test_spatial_multiplexing_wins_for_small_inputs_and_temporal_for_large_ones(
    figures: list[planner_figures.Row],
) -> None:
    ratios = [row.ours for row in rows_of(figures, "9(a)")]
    assert ratios[0] > 1 > ratios[-1]


def test_interleaving_stays_within_the_bound_of_the_bubbles_and_grows_with_tasks(
    figures: list[planner_figures.Row],
) -> None:
    for count in (8, 4):
        ratios = [row.ours for row in rows_of(figures, "19(b)", f"{count} micro-batches")]
        assert len(ratios) == 4
        assert ratios == sorted(ratios)
        assert 1 < ratios[0] < ratios[-1] <= (count + 3) / count


def test_chunks_gain_no_more_than_the_bubbles_and_the_padding_that_they_save(
    figures: list[planner_figures.Row],
) -> None:
    pairs = list(zip(rows_of(figures, "20(a)", ": throughput"), rows_of(figures, "20(a)", "effective"), strict=True))
    assert len(pairs) == 3
    for overall, effective in pairs:
        assert 1 < overall.ours < effective.ours
        assert overall.ours <= 4 * 4 / 7  # S n / (S - 1 + n) with four chunks in the longest pack


def test_one_shared_backbone_takes_less_memory_than_one_for_each_task(figures: list[planner_figures.Row]) -> None:
    rows = [*rows_of(figures, "17(a)", "backbone each"), *rows_of(figures, "17(b)", "backbone each")]
    assert len(rows) == 8
    assert min(row.ours for row in rows) > 2


def test_disabling_orchestration_or_alignment_costs_throughput(figures: list[planner_figures.Row]) -> None:
    rows = [*rows_of(figures, "16", "orchestration"), *rows_of(figures, "16", "all padded")]
    assert len(rows) == 6
    assert max(row.ours for row in rows) < -5


def test_times_of_planning_are_printed_for_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--repeats", "1", "--tasks", "3", "--stages", "1", "2", "--fusion-tasks", "20"]
    assert planner.main([*options, "--write", "--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "planner-times.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["fusion"] + ["planning"] * 8
    assert "interleaved" in capsys.readouterr().out


def test_one_launch_over_two_htasks_is_no_faster_than_the_better_of_turns_and_one_htask() -> None:
    for case in case_two.cases()[::7]:
        found = case_two.compared(case)
        assert min(found.turns_s, found.one_s) <= found.shared_s * 1.001, case
        assert found.shared_s <= found.turns_s * (1 + 1e-9), case
