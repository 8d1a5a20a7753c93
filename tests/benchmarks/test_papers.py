"""The papers' evaluations: which seconds count, and that contenders are held to equal losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import UnequalWorkError
from benchmarks.papers import runs
from benchmarks.papers.runs import Contender, measure, steps_of
from benchmarks.training.workloads import Case, ModelSpec

CASE = Case("uniform", 2, 3, ModelSpec(hidden_size=32, num_layers=1))


@pytest.mark.parametrize(
    ("counts", "counted"),
    [
        ([[1, 0], [2, 0], [2, 1], [2, 2]], [1.0, 4.0]),
        ([[1, 0], [1, 1], [2, 1], [2, 2]], [7.0, 4.0]),
    ],
    ids=["one task after another", "step by step"],
)
def test_of_tasks_that_take_turns_the_first_step_of_each_is_not_counted(
    counts: list[list[int]], counted: list[float]
) -> None:
    found = {"ends_s": [1.0, 2.0, 9.0, 13.0], "planned_s": [0.0] * 4, "steps": 2, "counts": counts}
    assert [seconds for seconds, _ in steps_of(found)] == counted
    with pytest.raises(RuntimeError, match=r"a run of 3 steps ended with \[2, 2\] steps of its tasks"):
        steps_of({**found, "steps": 3})


def stand_in(monkeypatch: pytest.MonkeyPatch, losses: dict[str, float]) -> list[str]:
    """Let every launch answer at once: 1 s a step, losses by the planner; return who was launched."""
    launched: list[str] = []

    def launch(job: dict[str, object], processes: int) -> dict[str, object]:
        case = Case.from_json(str(job["case"]))
        planner = job["arguments"]["planner"]  # type: ignore[index]
        launched.append(planner)
        tasks = list(job["tasks"]) or [task.name for task in case.workload().tasks]  # type: ignore[call-overload]
        own = {name: [losses[planner]] * case.num_steps for name in tasks}
        ends = [float(step) for step in range(case.num_steps)]
        counts = [[step + 1] * len(tasks) for step in range(case.num_steps)]
        planned = [0.0] * len(ends)
        return {"ends_s": ends, "planned_s": planned, "counts": counts, "losses": own, "steps": case.num_steps}

    monkeypatch.setattr(runs, "launch", launch)
    return launched


ONE, OTHER = (Contender(name, 2, {"planner": name}) for name in ("mux", "together"))


def test_contenders_are_held_to_equal_losses_and_then_timed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = stand_in(monkeypatch, {"mux": 2.0, "together": 2.00001})
    found = measure([ONE, OTHER], CASE, 2, Path("backbone"))
    assert launched == ["mux", "together", "mux", "together", "together", "mux"]
    assert found["mux"].seconds == found["together"].seconds == [2.0, 2.0]
    names = [task.name for task in CASE.workload().tasks]
    apart = Contender("apart", 2, {"planner": "mux"}, parts=tuple((name,) for name in names), part_arguments=({}, {}))
    assert measure([ONE, apart], CASE, 1, Path("backbone"))["apart"].seconds == [4.0], "one task after another"
    stand_in(monkeypatch, {"mux": 2.0, "together": 2.1})
    with pytest.raises(UnequalWorkError, match=r"sst2-0 by together and mux: losses \[2\.1, 2\.1\] and \[2\.0, 2\.0\]"):
        measure([ONE, OTHER], CASE, 1, Path("backbone"))
