"""A plan priced by other costs: as planned where they are the same, part by part where they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peft_mux.data.packing.passes import PassRules
from peft_mux.scheduler.costs.hardware import Link, Overlap
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.memory import MemoryEstimate, MemoryModel
from peft_mux.scheduler.costs.profile import AS_PROFILED, Parts, corrected
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.planner import Budget, plan_tasks
from peft_mux.scheduler.repricing import repriced_s
from tests.scheduler.planner.cases import LLAMA_7B, load, models

LOADS = {one.name: one for one in (load("a", 64), load("b", 256), load("c", 1024, 4))}


def planned_by(cost: CostModel, memory: MemoryModel, budget: Budget) -> Plan:
    found = plan_tasks(list(LOADS.values()), cost, memory, budget)
    return Plan(
        found.htasks, (), found.max_tokens, 64, False, MemoryEstimate(0, 0, 0, 0), "A40",
        buckets=found.buckets, template=found.template, bucket_loads=found.bucket_loads, step_s=found.step_s,
        link=budget.links, turns=found.turns,
    )  # fmt: skip


def planned(num_stages: int) -> tuple[Plan, CostModel]:
    cost, memory = models(num_stages)
    return planned_by(cost, memory, Budget(4096)), cost


@pytest.mark.parametrize("num_stages", [1, 2])
def test_by_the_costs_that_it_was_made_with_a_plan_takes_what_was_planned(num_stages: int) -> None:
    plan, cost = planned(num_stages)
    assert repriced_s(plan, LOADS, cost, PassRules()) == pytest.approx(plan.step_s, rel=1e-9)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_part_that_takes_longer_makes_the_plan_take_longer_by_what_it_has_of_it(num_stages: int) -> None:
    plan, cost = planned(num_stages)
    before = repriced_s(plan, LOADS, cost, PassRules())

    def with_factors(factors: Parts) -> float:
        profile = corrected(cost.profile, factors)
        return repriced_s(plan, LOADS, CostModel(profile, LLAMA_7B, num_stages=num_stages), PassRules())

    assert with_factors(Parts(*(2.0,) * 6)) == pytest.approx(2 * before, rel=1e-6)
    names = ("fixed", "tokens", "attention", "adapters")
    added = [with_factors(AS_PROFILED._replace(**{name: 2.0})) - before for name in names]
    assert min(added) > 0
    assert added.index(max(added)) == 1, "most of a pass are its tokens"


def in_turns(link: Link, num_stages: int) -> tuple[Plan, CostModel]:
    """Return a plan of stages of two devices each that share every layer, and its costs."""
    cost, memory = models(num_stages)
    profile = replace(cost.profile, overlap=Overlap(slowdown=0.1, turn_s=2e-4))
    own = CostModel(profile, LLAMA_7B, num_stages=num_stages, devices_per_stage=2, tensor_link=link)
    return planned_by(own, replace(memory, devices_per_stage=2), Budget(4096, interleaved_passes="auto")), own


@pytest.mark.parametrize("num_stages", [1, 2])
def test_what_turns_hide_is_priced_so_that_slower_links_make_turns_pay(num_stages: int) -> None:
    fast, slow = Link(1e-6, 1e12), Link(2e-5, 5e9)
    (apart, at_first), (turns, measured) = in_turns(fast, num_stages), in_turns(slow, num_stages)
    assert (apart.passes_in_turns, turns.passes_in_turns > 1) == (1, True)
    for plan, cost in ((apart, at_first), (turns, measured)):
        assert repriced_s(plan, LOADS, cost, PassRules()) == pytest.approx(plan.step_s, rel=1e-6)
    # Each is the better one of the two by the costs that it was made with.
    assert repriced_s(turns, LOADS, measured, PassRules()) < repriced_s(apart, LOADS, measured, PassRules())
    assert repriced_s(apart, LOADS, at_first, PassRules()) < repriced_s(turns, LOADS, at_first, PassRules())


def test_messages_take_what_the_link_is_known_to_be_now() -> None:
    cost, memory = models(2)
    fast = Link(1e-6, 1e11)
    plan = planned_by(cost, memory, Budget(4096, links=fast))
    before, after = (repriced_s(plan, LOADS, cost, PassRules(), links=one) for one in (fast, fast.slowed(500.0)))
    assert before == pytest.approx(plan.step_s, rel=1e-9)
    assert after > 1.02 * before


def test_a_plan_of_other_stages_is_refused() -> None:
    plan, _ = planned(1)
    with pytest.raises(ValueError, match="allowed: 2"):
        repriced_s(plan, LOADS, models(2)[0], PassRules())
