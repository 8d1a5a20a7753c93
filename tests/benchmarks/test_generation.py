"""The benchmark of generation compares equal work, and says so where it does not."""

from __future__ import annotations

import pytest

from benchmarks import generation


def test_it_prints_a_line_for_each_contender(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tasks", "2", "--prompts", "2", "--new-tokens", "3", "--hidden-size", "64", "--layers", "1"]
    generation.main([*sizes, "--repeats", "1"])
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in ("task by task", "adapter_names", "mux", "base"))


def test_contenders_that_complete_differently_are_not_compared() -> None:
    generation.require_equal({"a": [(1, 2)], "b": [(1, 2)]})
    with pytest.raises(RuntimeError, match=r"row 1: b completes it with \(3,\), a with \(2,\)"):
        generation.require_equal({"a": [(1,), (2,)], "b": [(1,), (3,)]})
