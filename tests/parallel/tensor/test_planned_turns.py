"""Plans say how many passes take turns, and why; runs that cannot have turns are refused.

Runs in turns are compared with one process in `test_slow_links.py` and `tests/parallel/replicas/test_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peft_mux.errors import ConfigError
from peft_mux.planning.model_shape import model_shape
from peft_mux.scheduler.costs.hardware import DEVICES, Overlap
from peft_mux.scheduler.costs.profile import Curve, analytic_profile
from peft_mux.scheduler.plan import Link
from tests.invariants.mux_lab import make_trainer, small_task
from tests.parallel.replicas import layout_cases


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


HIDES = Overlap(skew=9.0)


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
