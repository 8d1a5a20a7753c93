"""The next step is planned on a thread of its own, with the result that a direct call gives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from peft_mux.scheduler.dispatching import ahead as dispatch_planner
from peft_mux.scheduler.dispatching.ahead import DispatchPlanner, StepDispatch, plan_step
from peft_mux.scheduler.dispatching.dispatch import Dispatch
from peft_mux.scheduler.replicas.configs import ParallelConfig
from tests.scheduler.dispatching.cases import THREE_GROUPS, MicroBatchModel


def test_the_background_planner_gives_what_direct_calls_give() -> None:
    steps = [np.random.default_rng(seed).integers(10, 8000, size=40).tolist() for seed in range(3)]
    model = MicroBatchModel()
    with DispatchPlanner(THREE_GROUPS, model, num_buckets=6) as planner:
        for lengths in steps:
            planner.submit(lengths)
        planned = [planner.result() for _ in steps]
    assert all(name.startswith("dispatch") for name in model.threads), "planned on a thread of its own"
    last = None
    for lengths, work in zip(steps, planned, strict=True):
        direct = plan_step(lengths, THREE_GROUPS, MicroBatchModel(), num_buckets=6, warm_start=last)
        last = direct.dispatch
        assert replace(work.dispatch, solve_s=0) == replace(direct.dispatch, solve_s=0)
        assert (work.bucketing, work.assignment) == (direct.bucketing, direct.assignment)


def test_submit_returns_before_the_step_is_planned() -> None:
    begin = threading.Event()

    class WaitingModel(MicroBatchModel):
        def linear_terms(
            self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int
        ) -> tuple[np.ndarray, float]:
            assert begin.wait(60)
            return super().linear_terms(config, lengths, max_tokens)

    with DispatchPlanner(THREE_GROUPS, WaitingModel()) as planner:
        planner.submit([10, 2000])
        with pytest.raises(TimeoutError, match=r"not planned within 0.01 s"):
            planner.result(timeout_s=0.01)
        begin.set()
        assert planner.result().dispatch.status == "optimal"


def test_an_error_surfaces_with_its_own_step_and_the_next_is_planned_all_the_same() -> None:
    with DispatchPlanner(THREE_GROUPS, MicroBatchModel()) as planner:
        planner.submit([99_999])
        planner.submit([100])
        with pytest.raises(ValueError, match="is 99999; allowed: at most 8192"):
            planner.result()
        assert planner.result().bucketing.counts == (1,)


def test_a_planner_says_when_it_is_used_out_of_turn() -> None:
    planner = DispatchPlanner(THREE_GROUPS, MicroBatchModel())
    with pytest.raises(RuntimeError, match="no step is submitted"):
        planner.result()
    planner.close()
    planner.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        planner.submit([10])
    with pytest.raises(ValueError, match="warm_start is set; allowed: the step before"):
        DispatchPlanner(THREE_GROUPS, MicroBatchModel(), warm_start=None)


def test_each_step_starts_from_the_last_that_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Dispatch | None] = []

    def recording(*arguments: Any, warm_start: Dispatch | None, **options: Any) -> StepDispatch:
        starts.append(warm_start)
        return plan_step(*arguments, warm_start=warm_start, **options)

    monkeypatch.setattr(dispatch_planner, "plan_step", recording)
    with DispatchPlanner(THREE_GROUPS, MicroBatchModel()) as planner:
        for lengths in ([10, 900, 2000], [99_999], [20, 30]):
            planner.submit(lengths)
        first = planner.result().dispatch
        with pytest.raises(ValueError, match="99999"):
            planner.result()
        planner.result()
    assert starts == [None, first, first]
