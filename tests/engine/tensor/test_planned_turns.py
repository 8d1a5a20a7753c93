"""Runs whose passes take the turns of their plan train what one process does, however many take turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peft_mux.errors import ConfigError
from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.scheduler.costs.hardware import DEVICES, Link, Overlap
from peft_mux.scheduler.costs.profile import Curve, analytic_profile
from peft_mux.scheduler.plan import Plan
from tests.engine.processes.cases import Part, assert_alike, assert_as_one, launch, values
from tests.engine.replicas import layout_cases
from tests.invariants.mux_lab import make_trainer, small_task


@dataclass
class InTurns:
    """What a run in turns showed to one process.

    Attributes:
        laid: what any run shows.
        plans: the plan of each step.
        decisions: the order of turns of each group.
    """

    laid: Part
    plans: list[Plan]
    decisions: list[tuple[tuple[int, int], ...]]


class PlanWatcher(layout_cases.Watcher):
    """Keeps the plans, too."""

    def __init__(self) -> None:
        """Start without steps."""
        super().__init__()
        self.plans: list[Plan] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the plan of the step."""
        assert self.trainer is not None
        self.plans.append(self.trainer._plans.current)
        super().on_step_end(args, state, control, **kwargs)


def stored_profile(path: Path, **facts: Any) -> str:
    """Write a profile that passes as measured, whose layers take a time in proportion to tokens."""
    backbone = layout_cases.backbone("llama")
    shape = model_shape(backbone, backbone.config, dtype=backbone.dtype, activation_dtype=backbone.dtype)
    counts = np.array([16.0, 4096.0])
    facts |= {"layer": Curve.measured(counts, 1e-4 * counts), "source": "measured"}
    profile = replace(analytic_profile(DEVICES["cpu"], shape, 2), **facts)
    path.write_text(profile.to_json(), encoding="utf-8")
    return str(path)


def profile_of_turns(path: Path, overlap: Overlap | None) -> str:
    """Write a profile of a link on which ranks wait only for slower ranks."""
    # Two small passes take no longer than a large one.
    return stored_profile(path, pass_overhead_s=0.0, overlap=overlap, link=Link(1e-7, 1e12))


def train_in_turns(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> InTurns:
    """Train the five tasks of the tests of layouts."""
    watcher = PlanWatcher()
    laid = layout_cases.train(folder, model, layout_cases.tasks_of("llama"), watcher=watcher, **arguments)
    trainer: Any = watcher.trainer
    executor = trainer._placement.executor
    interleaving = getattr(executor, "actions", executor).interleaving
    return InTurns(laid, watcher.plans, list(interleaving.decisions))


HIDES = Overlap(skew=9.0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "passes", "width"),
    [
        pytest.param(2, "auto", 2, id="tp2, as many as pay", marks=pytest.mark.slow),
        pytest.param(2, 4, 4, id="tp2, 4", marks=pytest.mark.nightly),
        pytest.param(4, "auto", 1, id="pp2 x tp2, auto", marks=pytest.mark.nightly),
        pytest.param(4, 4, 4, id="pp2 x tp2, 4", marks=pytest.mark.slow),
    ],
)
def test_five_tasks_in_planned_turns_train_to_the_result_of_one_process(
    world_size: int, passes: Any, width: int, tmp_path: Path
) -> None:
    model = layout_cases.saved_backbone("llama", tmp_path / "model")
    alone = layout_cases.train_five(0, tmp_path / "alone", model, "llama", {})
    profile = profile_of_turns(tmp_path / "profile.json", HIDES)
    own = {"tensor_parallel_size": 2, "interleaved_passes": passes, "cost_profile": profile}
    own |= {"pipeline_parallel_size": 2} if world_size == 4 else {}
    parts = values(launch(world_size, train_in_turns, tmp_path / "run", model, own, limit_s=240))
    assert_alike([part.laid for part in parts])
    assert_as_one(parts[0].laid, alone)
    widths = {plan.passes_in_turns for plan in parts[0].plans}
    # Tasks end one after another, until only one task is left.
    assert max(widths) >= width if passes == "auto" else widths == {width}
    assert all(part.plans == parts[0].plans for part in parts)
    # On stages an action has as many passes as its bucket has hTasks, here often one.
    grouped = world_size == 2 or any(len(bucket) > 1 for plan in parts[0].plans for bucket in plan.buckets)
    assert all(part.decisions for part in parts) == (max(widths) > 1 and grouped)
    if world_size == 2:
        assert parts[0].decisions == parts[1].decisions


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        pytest.param(None, "as no cost_profile has measured here how much turns hide", id="nothing was measured"),
        pytest.param(HIDES, "minus the part that turns hide", id="turns were measured"),
    ],
)
def test_a_plan_of_shards_says_what_is_known_of_turns(overlap: Overlap | None, expected: str, tmp_path: Path) -> None:
    profile = profile_of_turns(tmp_path / "profile.json", overlap)
    trainer = make_trainer(
        layout_cases.tasks_of("llama"),
        tmp_path / "run",
        model=layout_cases.backbone("llama"),
        cost_profile=profile,
    )
    plan = trainer._plans.planner.plan(list(trainer.table), devices_per_stage=2)
    assert expected in str(plan)
    assert (plan.passes_in_turns > 1) == (overlap is not None)
    if plan.turns is not None:
        assert f"up to {plan.turns.width} passes of a bucket take turns, which saves" in str(plan)
        bucket = next(bucket for bucket in plan.buckets if len(bucket) > 1)
        first, second = (plan.htasks[index].tasks[0] for index in bucket[:2])
        assert f"Its passes take turns with those of {second}" in plan.explain(first).replace(" and ", ", ")
        assert type(plan).from_json(plan.to_json()) == plan
        assert "bucket" in plan.gantt()


def test_turns_without_waiting_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'args\.interleaved_passes must be "auto" or 1 with replicas <1,1>x1, got 3'):
        make_trainer([small_task("own", data_seed=1)], tmp_path, interleaved_passes=3)
    with pytest.raises(ConfigError, match=r'args.interleaved_passes must be "auto", or an integer.*got .all.'):
        make_trainer([small_task("own", data_seed=1)], tmp_path, interleaved_passes="all")
