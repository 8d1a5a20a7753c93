"""The planner's benchmarks run, and what they print is what they computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner import figures as planner_figures
from benchmarks.planner.cluster import __main__ as cluster
from benchmarks.planner.figures_bench import TABLE_1


@pytest.mark.nightly
def test_the_quick_cluster_replay_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Every four minutes a task of one or two hours, for a day: several times what 8 instances can do.
    lines = [f"{240 * number},{3600 * (1 + number % 2)}" for number in range(360)]
    (tmp_path / cluster.TRACE).write_text("\n".join(["submit_s,duration_s", *lines]) + "\n")
    options = ["--quick", "--write", "--max-tasks", "2", "--micro-batches", "8"]
    assert cluster.main([*options, "--data", str(tmp_path), "--results", str(tmp_path / "results")]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "results" / "cluster-a40-quick.json").read_text())["comparison"]
    assert all(f"{row['ours']:.2f}" in printed for row in rows)
    ratios = {(row["case"], row["over"]): row["ours"] for row in rows}
    assert ratios["Non-uniform", "sl-peft"] > ratios["Uniform", "sl-peft"] >= 1


def rows_of(figures: list[planner_figures.Row], figure: str, *words: str) -> list[float]:
    return [row.ours for row in figures if row.figure == figure and all(word in row.what for word in words)]


@pytest.mark.slow
def test_figures_follow_the_papers_curves() -> None:
    figures = [row for make in planner_figures.FIGURES.values() for row in make("A40")]
    by_size = rows_of(figures, "9(a)")
    assert by_size[0] > 1 > by_size[-1], "spatial multiplexing wins for small inputs, and temporal for large ones"
    for count in (8, 4):
        ratios = rows_of(figures, "19(b)", f"{count} micro-batches")
        assert ratios == sorted(ratios)
        assert 1 < ratios[0] < ratios[-1] <= (count + 3) / count, "bubbles bound what interleaving gains"
    pairs = list(zip(rows_of(figures, "20(a)", ": throughput"), rows_of(figures, "20(a)", "effective"), strict=True))
    assert len(pairs) == 3
    for overall, effective in pairs:
        assert 1 < overall < effective
        assert overall <= 4 * 4 / 7  # S n / (S - 1 + n) with four chunks in the longest pack
    shared = [rows_of(figures, part, "backbone each", "all held") for part in ("17(a)", "17(b)")]
    assert shared == [pytest.approx([3.87, 4.28], abs=0.01), pytest.approx([3.38, 4.04], abs=0.01)], "M Table 2"
    assert {row.what.split(",")[0] for row in figures if row.figure == "14"} == {name for name, *_ in TABLE_1}
    assert min(row.ours for row in figures if row.figure in ("14", "15")) > 0.99
    assert min(rows_of(figures, "17(a)", "backbone each") + rows_of(figures, "17(b)", "backbone each")) > 2
    assert max(rows_of(figures, "16", "orchestration") + rows_of(figures, "16", "all padded")) < -5
