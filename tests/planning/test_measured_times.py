"""Measured times: a wrong profile ends in the plan of the right one if `measured_times` is "plan"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peft_mux import MultiTaskTrainer, Task
from peft_mux.engine.work import PassClock, StepTimes, TaskInPass
from peft_mux.scheduler.costs.profile import AS_PROFILED, Curve, Parts, Profile
from peft_mux.scheduler.plan import Plan
from tests.invariants.mux_lab import Recorder, assert_same, make_trainer, small_task, train
from tests.records import run_records
from tests.runs import stop

_NUM_STEPS = 24
_PASS_S = 0.05
_SQUARE_S = 2e-7
"""What a pass takes whatever its size, and a layer for the square of its tokens, on the machine that is pretended: far
more than the two layers of these models need."""
_DECIDES = {"measured_times": "plan", "replan_steps": 6, "replan_gain": 0.0, "logging_steps": 1}
"""Any gain counts: what lies between passes is not pretended, and takes most of a step on a busy machine."""


def tasks_of_many_lengths() -> list[Task]:
    """Return tasks whose batches differ from step to step, so that passes tell their parts apart."""
    return [
        replace(
            small_task(name, data_seed=seed, train_batch_size=2, max_steps=_NUM_STEPS),
            train_dataset=[
                {"input_ids": [(seed + row + place) % 60 + 1 for place in range(10 + 17 * row * seed % 90)]}
                for row in range(16)
            ],
        )
        for seed, name in enumerate(("a", "b", "c"), start=1)
    ]


def stored_profile(folder: Path, pass_s: float, source: str = "analytic") -> str:
    """Store a profile in which large passes are dear, so that tasks part where a pass costs little by itself."""
    folder.mkdir()
    trainer = make_trainer(tasks_of_many_lengths(), folder / "any")
    trainer.plan()
    profile = trainer._plans.planner.profile
    assert profile is not None
    counts = [2.0**power for power in range(3, 11)]
    dear = Curve.measured(counts, [_SQUARE_S * count**2 for count in counts])
    path = folder / "profile.json"
    path.write_text(replace(profile, layer=dear, pass_overhead_s=pass_s, source=source).to_json(), encoding="utf-8")
    assert Profile.from_json(path.read_text(encoding="utf-8")).pass_overhead_s == pass_s
    return str(path)


def shape_followed(trainer: MultiTaskTrainer) -> list[tuple[tuple[str, ...], int]]:
    """Return the shape of the plan that a run follows at present."""
    assert trainer._plans.current is not None
    return shape_of(trainer._plans.current)


def shape_of(plan: Plan) -> list[tuple[tuple[str, ...], int]]:
    return sorted((htask.tasks, htask.micro_batches) for htask in plan.htasks)


def pretend_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clocks read what passes take on a machine of these figures, however busy this one is."""
    taken = PassClock.take

    def take(self: PassClock) -> StepTimes:
        times = taken(self)
        passes = tuple(replace(one, seconds=sum(map(machine_s, one.passes))) for one in times.passes)
        return replace(times, passes=passes)

    monkeypatch.setattr(PassClock, "take", take)


def machine_s(rows: tuple[TaskInPass, ...]) -> float:
    return _PASS_S + 2 * _SQUARE_S * sum(sum(own.lengths) for own in rows) ** 2


@pytest.mark.slow
def test_a_profile_that_is_wrong_in_one_part_ends_in_the_plan_of_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_machine(monkeypatch)
    wrong, right = stored_profile(tmp_path / "wrong", 1e-4), stored_profile(tmp_path / "right", _PASS_S)
    expected = shape_of(make_trainer(tasks_of_many_lengths(), tmp_path / "b", cost_profile=right).plan())
    shapes: list[Any] = []
    look = Recorder(at_begin=dict.fromkeys((0, _NUM_STEPS - 1), lambda trainer: shapes.append(shape_followed(trainer))))
    folder = tmp_path / "run"
    run = train(tasks_of_many_lengths(), folder, recorder=look, cost_profile=wrong, **_DECIDES)
    first, last = shapes
    assert first != expected, "both profiles plan alike; the case is too easy"
    assert last == expected
    (times,) = run_records(folder, "times")
    assert times["fixed"] > 50, "the profile said 0.1 ms of 50 ms"
    assert run_records(folder, "replanned")
    assert "measured / predicted time: fixed" in run.trainer.report()
    # Another plan in the middle of a run, and no other result.
    monkeypatch.undo()
    for task in tasks_of_many_lengths():
        assert_same(run, train([task], tmp_path / f"alone-{task.name}"), task.name, 1e-5)


@pytest.mark.parametrize("source", ["measured", "analytic"])
def test_by_default_times_are_reported_with_a_measured_profile_and_the_plan_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    pretend_machine(monkeypatch)
    wrong = stored_profile(tmp_path / "wrong", 1e-4, source)
    folder = tmp_path / "run"
    tasks = [replace(task, max_steps=10) for task in tasks_of_many_lengths()]
    run = train(tasks, folder, cost_profile=wrong, replan_steps=1, logging_steps=1)
    assert run.trainer._plans.planner.correction.factors == AS_PROFILED
    assert [times["measured"] > 9 for times in run_records(folder, "times")] == [True] * (source == "measured")
    assert not run_records(folder, "replanned")


def test_a_resumed_run_keeps_the_times_that_its_plan_was_made_with(tmp_path: Path) -> None:
    learnt = Parts(3.0, 2.0, 1.0, 1.5, 1.0, 4.0)

    def teach(trainer: MultiTaskTrainer) -> None:
        trainer._plans.planner.correction.restore(learnt)

    tasks = [small_task("own", data_seed=1, max_steps=8)]
    saving = {"save_strategy": "steps", "save_steps": 2, "measured_times": "plan", "replan_steps": 50}
    train(tasks, tmp_path, recorder=Recorder(at_begin={1: teach}, at_end={3: stop}), **saving)
    seen: list[Parts] = []
    looking = Recorder(at_begin={4: lambda trainer: seen.append(trainer._plans.planner.correction.factors)})
    train(tasks, tmp_path, recorder=looking, resume=True, **saving)
    assert seen == [learnt]
