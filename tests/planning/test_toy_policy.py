"""A planner policy of one new file: it is registered, a run trains by it, and no task is trained to other losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from peft_mux.scheduler.planner.policies import register_policy, unregister_policy
from tests.invariants.mux_lab import assert_close, small_task, train
from tests.scheduler.planner.policies.toy_policy import Pairs


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_policy(Pairs())
    yield
    unregister_policy(Pairs.name)


def test_a_run_trains_by_a_policy_of_one_new_file(tmp_path: Path) -> None:
    tasks = [small_task(name, data_seed=seed, max_steps=3) for seed, name in enumerate(("a", "b", "c"))]
    pairs = train(tasks, tmp_path / "pairs", planner=Pairs.name)
    plan = pairs.trainer._plans.planner.plan(list(pairs.trainer.table))
    assert plan.policy == Pairs.name
    assert sorted(len(htask.tasks) for htask in plan.htasks) == [1, 2]
    together = train(tasks, tmp_path / "together", planner="together")
    for name in ("a", "b", "c"):
        assert len(pairs.losses[name]) == 3
        assert_close(pairs.losses[name], together.losses[name], 1e-5, name)
