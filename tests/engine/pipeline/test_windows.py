"""Pipelines that are not flushed between steps train what flushed ones do, bit for bit, and what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.traffic import StepEnd, StepEnds
from peft_mux.scheduler.pipeline.template import build_template
from tests.engine.pipeline import stage_cases as stages
from tests.engine.pipeline import window_cases as cases
from tests.engine.pipeline.window_cases import Shown
from tests.engine.processes.cases import launch, run_in_session, values

OF_TWO = "llama-1f1b llama-poisoned".split()
MORE_OF_TWO = "llama-interleaved gpt2-mux".split()
OF_FOUR = "llama-gpipe qwen-interleaved llama-mux-limit llama-bf16".split()


# ------------------------------------------------------------------ the engine


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, OF_TWO, id="pp2"),
        pytest.param(2, MORE_OF_TWO, id="pp2, other schedules", marks=pytest.mark.slow),
        pytest.param(4, OF_FOUR, id="pp4", marks=pytest.mark.slow),
    ],
)
def test_steps_in_a_window_have_the_bits_of_steps_that_are_flushed(
    world: int, names: list[str], tmp_path: Path
) -> None:
    items = [*(f"{how}:{name}" for name in names for how in ("train", "window")), f"window:{names[0]}+odd"]
    folder = tmp_path / "run"
    run_in_session(stages.run_launches, [[{"world": world, "folder": str(folder), "items": items}]], limit_s=280)
    codes = json.loads((folder / "codes.json").read_text())
    assert codes == [0] * world, [(folder / f"output-{rank}.txt").read_text()[-3000:] for rank in range(world)]
    for name in names:
        for rank in range(world):
            check_facts(name, facts(folder, name, rank), facts(folder, f"window-{name}", rank))
        for task in stages.LENGTHS:
            check_states(folder, name, task)
    check_failure_of_one_stage(folder, names[0], world)


def check_failure_of_one_stage(folder: Path, name: str, world: int) -> None:
    """Assert that no stage steps a task again whose update has failed on the last one, and that no other task is
    affected."""
    for rank in range(world):
        flushed, odd = facts(folder, name, rank), facts(folder, f"window-{name}+odd", rank)
        is_last = rank == world - 1
        reason = "the optimizer failed" if is_last else "non_finite: gradient norm is nan"
        assert odd["failures"] == {stages.ODD: reason}
        assert len(odd["losses"][stages.ODD]) == (1 if is_last else 2)
        for task in set(flushed["losses"]) - {stages.ODD}:
            assert odd["losses"][task] == flushed["losses"][task], task
            assert odd["norms"][task] == flushed["norms"][task], task


def facts(folder: Path, name: str, rank: int) -> Any:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


def check_facts(name: str, flushed: Any, window: Any) -> None:
    assert window["failures"] == flushed["failures"]
    assert any(action.endswith("+2") for action in window["ran"])
    for task, losses in flushed["losses"].items():
        if is_beside_poison(name, task):  # the rows of the one that failed stay in its passes
            assert window["losses"][task] == pytest.approx(losses, rel=1e-6)
        else:
            assert str(window["losses"][task]) == str(losses), (name, task)
            assert str(window["norms"][task]) == str(flushed["norms"][task]), (name, task)
    for task in set(flushed["losses"]) - set(flushed["failures"]):
        assert [one[task] for one in window["results"]] == window["losses"][task]


def check_states(folder: Path, name: str, task: str) -> None:
    flushed, window = (stages.read_state(folder / f"{how}{name}-{task}") for how in ("", "window-"))
    assert (window.settings, window.schedule) == (flushed.settings, flushed.schedule)
    for key, weight in flushed.weights.items():
        if is_beside_poison(name, task):
            assert (window.weights[key] - weight).norm() <= 1e-5 * weight.norm()
            continue
        assert torch.equal(window.weights[key].nan_to_num(), weight.nan_to_num()), (name, task, key)
        for kind, moment in flushed.moments.get(key, {}).items():
            assert torch.equal(window.moments[key][kind], moment), (name, task, key, kind)


def is_beside_poison(name: str, task: str) -> bool:
    return name == "llama-poisoned" and task == "e"


# --------------------------------------------------------------------- the run


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4], ids=["pp2", "pp4"])
def test_a_run_in_windows_is_the_run_that_is_flushed_and_the_run_of_one_process(
    num_stages: int, tmp_path: Path
) -> None:
    parts = values(launch(num_stages, cases.run_all, tmp_path, num_stages, ["every_step", "auto"], limit_s=280))
    alone = cases.run(tmp_path, 1, "auto")
    for part in parts:
        for flushed, window, one in zip(part["every_step"], part["auto"], alone, strict=True):
            assert not flushed.windows
            assert max(window.windows) > 2, "nothing was left unflushed"
            check_equal(window, flushed)
            check_close(window, one)
    assert [shown.windows for shown in parts[0]["auto"]] == [shown.windows for shown in parts[-1]["auto"]]
    statuses = {name: status for name, (status, _) in parts[0]["auto"][-1].statuses.items()}
    ended = dict.fromkeys(["long", "short", "steady", "late"], "succeeded")
    assert statuses == {**ended, "wild": "failed"}
    assert "at step 1" in parts[-1]["auto"][0].statuses["wild"][1], "it failed within a window"


def check_equal(found: Shown, wanted: Shown) -> None:
    assert str(found.outcomes) == str(wanted.outcomes)
    assert found.statuses == wanted.statuses
    assert str(found.history) == str(wanted.history)
    assert found.step == wanted.step
    assert found.adapters.keys() == wanted.adapters.keys()
    for name, own in wanted.adapters.items():
        assert all(np.array_equal(found.adapters[name][key], weight) for key, weight in own.items()), name


def check_close(found: Shown, wanted: Shown) -> None:
    assert found.statuses == wanted.statuses
    for name, steps in wanted.outcomes.items():
        losses, norms = zip(*steps, strict=True)
        own_losses, own_norms = zip(*found.outcomes[name], strict=True)
        assert own_losses == pytest.approx(losses, rel=1e-5, nan_ok=True), name
        assert own_norms == pytest.approx(norms, rel=1e-4, nan_ok=True), name
    for name, own in wanted.adapters.items():
        found_flat, flat = (np.concatenate([one[key].ravel() for key in own]) for one in (found.adapters[name], own))
        assert np.linalg.norm(found_flat - flat) <= 1e-4 * np.linalg.norm(flat), name


# ----------------------------------------------------------------- one process


def test_a_buckets_step_ends_behind_its_last_backward_and_before_its_next_forward() -> None:
    row = build_template(stages.loads_of(2, (1000, 700)), "mux", num_steps=2).actions[0]
    ends = StepEnds.of(row)
    assert sorted(ends.after.values()) == [StepEnd(0, 0), StepEnd(0, 1), StepEnd(1, 0), StepEnd(1, 1)]
    assert sorted(ends.before.values()) == [StepEnd(0, 0), StepEnd(1, 0)]
    assert sorted(ends.last) == [StepEnd(0, 1), StepEnd(1, 1)]
    places = {str(action): place for place, action in enumerate(row)}
    for action, end in ends.before.items():
        (last,) = [one for one, other in ends.after.items() if other == end]
        assert places[str(last)] < places[str(action)]


def test_windows_pay_where_buckets_can_fill_the_bubbles_of_one_another() -> None:
    loads = stages.loads_of(2, (1000, 700))
    template = build_template(loads, "mux")
    assert PipelinePlan(template, stages.HTASKS, stages.BUCKETS, tuple(loads)).gains_by_windows
    assert not PipelinePlan(template, stages.HTASKS, stages.BUCKETS).gains_by_windows, "nothing is predicted"
    alone = build_template(loads[:1], "mux")
    assert not PipelinePlan(alone, (("a",),), ((0,),), tuple(loads[:1])).gains_by_windows
