"""Passes in turns are planned: buckets by Eq. 7, sums charged as far as they show, and the memory of all in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.costs.hardware import Overlap
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.planner.planner import Budget, Outcome, plan_tasks
from tests.scheduler.planner.cases import A40, LLAMA_7B, load, loads_of, simulated, tasks_of

LINK = Link(2e-5, 2e10)
LIMIT = 48 * 2**30
MIXES = st.lists(st.tuples(st.sampled_from([32, 64, 128, 192]), st.integers(2, 12)), min_size=1, max_size=6)
HIDES = Overlap(slowdown=0.1)


def models(
    num_stages: int = 1, *, devices: int = 2, overlap: Overlap | None = HIDES, device: str = "A40"
) -> tuple[CostModel, MemoryModel]:
    profile = replace(analytic_profile(A40.device, LLAMA_7B, devices), overlap=overlap, device=device)
    cost = CostModel(profile, LLAMA_7B, num_stages=num_stages, devices_per_stage=devices, tensor_link=LINK)
    return cost, MemoryModel(LLAMA_7B, num_stages=num_stages, devices_per_stage=devices)


def planned(
    loads: list[TaskLoad], width: int | str, num_stages: int = 1, limit: int = LIMIT, **facts: object
) -> Outcome:
    budget = Budget(4096, limit, interleaved_passes=width)  # type: ignore[arg-type]
    return plan_tasks(loads, *models(num_stages, **facts), budget)  # type: ignore[arg-type]


def width_of(outcome: Outcome) -> int:
    return 1 if outcome.turns is None else outcome.turns.width


@given(MIXES.map(loads_of))
@settings(max_examples=2)
def test_the_width_that_is_chosen_is_predicted_to_be_about_the_best_and_fits(loads: list[TaskLoad]) -> None:
    auto = planned(loads, "auto")
    fixed = [planned(loads, width) for width in (1, 2, 3, 4)]
    assert auto.step_s <= fixed[0].step_s
    assert auto.step_s <= 1.03 * min(one.step_s for one in fixed)
    assert max(auto.peak_bytes) <= LIMIT
    for one in fixed[1:]:
        assert one.turns is not None
        assert sorted(index for bucket in one.buckets for index in bucket) == list(range(len(one.htasks)))
        assert tasks_of(one) == sorted(own.name for own in loads)
        assert len(one.turns.parts) == len(one.htasks)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_turns_hide_sums_and_hold_the_memory_of_all_passes_in_flight(num_stages: int) -> None:
    loads = loads_of([(128, 8)] * 8)
    alone, turns = (planned(loads, width, num_stages) for width in (1, 4))
    assert turns.step_s < alone.step_s
    assert turns.turns is not None
    assert turns.turns.saved_s > 0
    assert max(turns.peak_bytes) > max(alone.peak_bytes)
    cost = models(num_stages)[0]
    rest_s = cost.optimizer_s(loads) + cost.profile.step_overhead_s
    assert turns.step_s == pytest.approx(simulated(turns).makespan_s + rest_s, rel=1e-6)


@pytest.mark.parametrize(
    ("num_stages", "facts"),
    [
        pytest.param(1, {"devices": 1}, id="no device waits for another"),
        pytest.param(2, {"overlap": None}, id="unknown what turns hide"),
        pytest.param(1, {"overlap": Overlap(slowdown=0.99, turn_s=1e-4)}, id="sums stop all computing"),
        pytest.param(2, {"overlap": Overlap(turn_s=1.0)}, id="turns are dear"),
    ],
)
def test_where_turns_do_not_pay_passes_run_one_after_another(num_stages: int, facts: dict[str, object]) -> None:
    loads = loads_of([(128, 8)] * 6)
    auto, one = planned(loads, "auto", num_stages, **facts), planned(loads, 1, num_stages, **facts)
    assert auto == one
    assert auto.turns is None


def test_on_a_cpu_passes_of_one_task_may_be_neighbours_and_on_a_gpu_they_may_not() -> None:
    alone = [load("only", 128, 16)]
    cpu, gpu = (planned(alone, "auto", device=device) for device in ("cpu", "A40"))
    assert width_of(gpu) == 1
    assert width_of(cpu) > 1
    assert cpu.htasks[0].micro_batches > 1
    assert cpu.step_s < gpu.step_s


def test_a_short_memory_lowers_the_width_before_anything_is_refused() -> None:
    loads = loads_of([(1024, 2)] * 4)
    free = planned(loads, "auto", limit=10**13)
    assert width_of(free) > 1
    least = models()[1].peak_bytes(loads, 1024)
    tight = planned(loads, "auto", limit=int(1.02 * least))
    assert (width_of(tight), tight.waiting) == (1, ())
    assert max(tight.peak_bytes) <= 1.02 * least


def test_with_turns_on_request_tasks_wait_for_the_memory_of_all_passes() -> None:
    loads = loads_of([(1024, 2)] * 4)
    limit = replace(models()[1], passes_in_turns=2).peak_bytes(loads[:2], 1024, in_flight=2)
    insisted, auto = (planned(loads, width, limit=limit) for width in (2, "auto"))
    assert len(insisted.waiting) == 2
    assert max(insisted.peak_bytes) <= limit
    assert auto.waiting == ()


def test_a_width_that_no_task_fits_with_is_refused_with_one_that_fits() -> None:
    loads = [load("long", 2048, 2)]
    memory = models()[1]
    limit = int(1.1 * memory.peak_bytes(loads, 2048))
    assert planned(loads, "auto", limit=limit).turns is None
    with pytest.raises(ValueError, match='interleaved_passes must be "auto", or an integer up to 1, got 4'):
        planned(loads, 4, limit=limit)
    with pytest.raises(ValueError, match="task 'long' alone needs") as refused:
        planned(loads, 4, limit=limit // 10)
    assert "interleaved_passes" not in str(refused.value)
