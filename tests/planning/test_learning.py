"""What is learnt of measured times: factors of parts, which steps teach, what passes should take, and forecasts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.passes import PassRules
from peft_mux.engine.work import PassTime, StepTimes, TaskInPass
from peft_mux.planning.learning import PassPrices, TimeCorrection, repriced_s
from peft_mux.scheduler.costs.hardware import Overlap
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.profile import AS_PROFILED, Parts, corrected
from peft_mux.scheduler.plan import Link, MemoryEstimate, Plan
from peft_mux.scheduler.planner.planned_passes import TurnTimes
from peft_mux.scheduler.planner.planner import Budget, plan_tasks
from tests.scheduler.plan_cases import a_plan
from tests.scheduler.planner.cases import LLAMA_7B, load, models

PLAN: Any = SimpleNamespace(step_s=1.0, tokens_per_step=10)
COMPUTED = ("fixed", "tokens", "attention", "adapters")

# ------------------------------------------------------------ factors of parts


def passes(draw: np.random.Generator, count: int) -> list[Parts]:
    """Return passes whose parts do not grow together: of many sizes, lengths and adapters."""
    found = []
    for _ in range(count):
        tokens, length, adapted = draw.uniform(50, 2000), draw.uniform(10, 1000), draw.uniform(0.1, 1.0)
        found.append(Parts(4e-3, 1e-5 * tokens, 2e-8 * tokens * length, 1e-5 * tokens * adapted))
    return found


def taught(truth: Parts, draw: np.random.Generator, count: int = 200, noise: float = 0.05) -> TimeCorrection:
    correction = TimeCorrection()
    for one in passes(draw, count):
        correction.learn(one, one.times(truth).total * float(np.exp(draw.normal(0, noise))))
    return correction


@settings(max_examples=3)
@given(st.integers(0, 2**32 - 1), st.sampled_from(COMPUTED), st.sampled_from([0.25, 4.0]))
def test_a_part_that_is_wrong_by_four_is_found_and_the_others_are_left(seed: int, part: str, wrong: float) -> None:
    truth = AS_PROFILED._replace(**{part: wrong})
    found = taught(truth, np.random.default_rng(seed)).learnt
    for name in COMPUTED:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.35, abs=0.1), name


@pytest.mark.parametrize("slower", [0.05, 20.0])
def test_a_machine_that_is_slower_in_all_is_distinguished_from_passes_that_are_all_equal(slower: float) -> None:
    draw, correction = np.random.default_rng(1), TimeCorrection()
    (one,) = passes(draw, 1)
    for _ in range(30):
        correction.learn(one, slower * one.total * float(np.exp(draw.normal(0, 0.05))))
    assert list(correction.learnt[:4]) == pytest.approx([slower] * 4, rel=0.2)
    assert correction.learnt.communication == pytest.approx(1.0), "nothing was said of links"


@pytest.mark.parametrize("odd", [10, 1000])
def test_one_odd_step_changes_little_and_a_lasting_change_is_followed(odd: float) -> None:
    draw = np.random.default_rng(odd)
    correction = taught(AS_PROFILED, draw)
    before = correction.learnt
    for said_nothing, seconds in ((Parts(), 1.0), (Parts(tokens=1.0), 0.0), (Parts(tokens=1.0), float("nan"))):
        correction.learn(said_nothing, seconds)
    assert correction.learnt == before
    (one,) = passes(draw, 1)
    correction.learn(one, odd * one.total)
    assert list(correction.learnt) == pytest.approx(list(before), rel=0.1)
    truth = AS_PROFILED._replace(tokens=3.0)
    for one in passes(draw, 400):
        correction.learn(one, one.times(truth).total)
    assert correction.learnt.tokens == pytest.approx(3.0, rel=0.15)


def test_what_processes_have_learnt_apart_is_what_one_would_have_learnt_of_all_passes() -> None:
    draw, truth = np.random.default_rng(5), Parts(2.0, 1.0, 3.0, 1.0, 1.0, 1.0)
    both = [TimeCorrection(), TimeCorrection()]
    for number, one in enumerate(passes(draw, 200)):
        both[number % 2].learn(one, one.times(truth).total)
    numbers = [one.numbers() for one in both]
    for one in both:
        one.agree(numbers)
    assert both[0].agreed == both[1].agreed, "all processes must plan alike, to the last bit"
    assert list(both[0].agreed[:4]) == pytest.approx([2.0, 1.0, 3.0, 1.0], rel=0.1)
    assert (both[0].num_passes, both[0].differs) == (200, True)
    assert str(both[0]).startswith("measured / predicted time: fixed ")
    later, start = TimeCorrection(), Parts(2.0, 3.0, 1.0, 1.0, 4.0, 1.0)
    later.restore(start)
    assert (later.learnt, later.factors, later.differs) == (start, start, False), "learnt before, where it begins"


# ------------------------------------------------------------ from which steps


class Prices:
    """Predicts passes whose sums grow with their tokens, as their computing does; counts how often it is asked."""

    def __init__(self) -> None:
        self.num_priced = 0

    def of(self, timed: PassTime) -> Parts:
        self.num_priced += 1
        tokens = float(timed.passes[0][0].lengths[0])
        return Parts(fixed=0.01, tokens=1e-3 * tokens, communication=1e-3 + 5e-4 * tokens)

    def between(self, tasks: object) -> Parts:
        return Parts(optimizer=0.1)

    def summed_s(self, timed: PassTime) -> float:
        assert timed.waited_s is not None
        return timed.waited_s


def observe(correction: TimeCorrection, num_steps: int, factor: float = 1.0) -> list[int]:
    """Let steps of one pass of varying size be observed, whose sums take so many times what the profile says.

    Return how many passes were priced after each step.
    """
    prices: Any = Prices()
    priced = []
    for step in range(num_steps):
        rows = ((TaskInPass("a", (50 + 37 * step % 400,), 1),),)
        own = Prices().of(PassTime(rows, 0.0))
        waited_s = factor * own.communication
        timed = PassTime(rows, own.fixed + own.tokens + waited_s, waited_s)
        correction.observe_passes(StepTimes((timed,), timed.seconds), 0.1, ["a"], prices)
        correction.observe(PLAN, 10, timed.seconds)
        priced.append(prices.num_priced)
    return priced


def test_the_first_step_under_a_plan_teaches_nothing_the_next_ones_all_and_later_ones_some() -> None:
    correction = TimeCorrection()
    priced = observe(correction, 40)
    assert (priced[0], priced[19], priced[39]) == (0, 19, 19 + 4), "later each fifth"
    correction.begin_plan()
    assert observe(correction, 3)[-1] == 2
    slow_links = TimeCorrection()
    observe(slow_links, 40, 6.0)
    assert slow_links.learnt.communication == pytest.approx(6.0, rel=0.1)
    assert (slow_links.learnt.fixed, slow_links.learnt.tokens) == pytest.approx((1.0, 1.0), rel=0.1)


# --------------------------------------------------------- what passes should take

LOADS = {name: load(name) for name in "abc"}
PASSES = tuple((TaskInPass(name, (128,) * 8, 500),) for name in LOADS)
LINK = Link(2e-5, 2e10)


def costs(link: Link, overlap: Overlap | None, num_stages: int = 1) -> CostModel:
    profile = replace(models()[0].profile, overlap=overlap)
    return CostModel(profile, LLAMA_7B, num_stages=num_stages, devices_per_stage=2, tensor_link=link)


def rows_of(timed: PassTime) -> list[list[TaskLoad]]:
    return [[replace(LOADS[one.task], num_targets=one.num_targets) for one in own] for own in timed.passes]


@pytest.mark.parametrize(("num_stages", "stage", "width"), [(1, 0, 3), (2, 1, 2)])
def test_passes_in_turns_take_what_was_planned_and_teach_nothing_if_the_profile_is_right(
    num_stages: int, stage: int, width: int
) -> None:
    overlap = Overlap(skew=0.1, slowdown=0.1, turn_s=1e-4)
    given_cost, machine = costs(LINK, overlap, num_stages), costs(LINK.slowed(4.0), overlap, num_stages)
    slot = PassTime(PASSES, 0.0)

    def planned_s(cost: CostModel) -> float:
        turns = TurnTimes(cost, width)
        parts = [cost.pass_parts(stage, cost.pass_work(own, [whole_pass(own)])) for own in rows_of(slot)]
        if num_stages == 1:
            return turns.group_s(parts)
        tasks = [[one.task for one in own] for own in slot.passes]
        return turns.action_s(tasks, parts, stage, "forward") + turns.action_s(tasks, parts, stage, "backward")

    prices = PassPrices(given_cost, LOADS, stage, TurnTimes(machine, width), 4.0)
    predicted = prices.of(slot).times(AS_PROFILED._replace(communication=4.0))
    assert predicted.total == pytest.approx(planned_s(machine), rel=1e-9)
    # Sums in full would show a faster device, though only what turns hide of them is missing.
    right = PassPrices(given_cost, LOADS, stage, TurnTimes(given_cost, width))
    factors = []
    for own in (PassPrices(given_cost, LOADS, stage), right):
        correction = TimeCorrection()
        for _ in range(10):
            correction.learn(own.of(slot), planned_s(given_cost))
        factors.append(correction.learnt.tokens)
    assert factors[1] == pytest.approx(1.0, rel=1e-6)
    assert abs(factors[0] - 1.0) > 0.02, "nothing is hidden; the case is too easy"


def test_ranks_that_come_late_are_no_slow_link() -> None:
    prices = PassPrices(costs(LINK, Overlap(skew=0.25)), LOADS, 0)
    assert prices.summed_s(PassTime(PASSES[:1], 10.0, 4.0)) == pytest.approx(4.0 - 0.25 * 6.0)
    assert prices.summed_s(PassTime(PASSES[:1], 10.0, 1.0)) == pytest.approx(0.1), "some of it is always the sum"
    assert PassPrices(costs(LINK, None), LOADS, 0).summed_s(PassTime((), 10.0, 4.0)) == 4.0


# ----------------------------------------------------------- plans at other costs

MIXED = {one.name: one for one in (load("a", 64), load("b", 256), load("c", 1024, 4))}


def planned_by(cost: CostModel, budget: Budget) -> Plan:
    memory = replace(models(cost.num_stages)[1], devices_per_stage=cost.devices_per_stage)
    found = plan_tasks(list(MIXED.values()), cost, memory, budget)
    return Plan(
        found.htasks, (), found.max_tokens, 64, False, MemoryEstimate(0, 0, 0, 0), "A40",
        buckets=found.buckets, template=found.template, bucket_loads=found.bucket_loads, step_s=found.step_s,
        links=() if budget.links is None else (budget.links,) * cost.num_stages, turns=found.turns,
    )  # fmt: skip


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_plan_takes_what_was_planned_by_its_own_costs_and_longer_by_what_it_has_of_a_slower_part(
    num_stages: int,
) -> None:
    cost = models(num_stages)[0]
    plan = planned_by(cost, Budget(4096))
    before = repriced_s(plan, MIXED, cost, PassRules())
    assert before == pytest.approx(plan.step_s, rel=1e-9)

    def with_factors(factors: Parts) -> float:
        profile = corrected(cost.profile, factors)
        return repriced_s(plan, MIXED, CostModel(profile, LLAMA_7B, num_stages=num_stages), PassRules())

    assert with_factors(Parts(*(2.0,) * 6)) == pytest.approx(2 * before, rel=1e-6)
    added = [with_factors(AS_PROFILED._replace(**{name: 2.0})) - before for name in COMPUTED]
    assert min(added) > 0
    assert added.index(max(added)) == 1, "most of a pass are its tokens"
    if num_stages == 2:
        slow, fast = Link(1e-6, 1e11).slowed(500.0), Link(1e-6, 1e11)
        linked = planned_by(cost, Budget(4096, links=fast))
        messages = [repriced_s(linked, MIXED, cost, PassRules(), links=link) for link in (fast, slow)]
        assert messages[0] == pytest.approx(linked.step_s, rel=1e-9)
        assert messages[1] > 1.02 * messages[0]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_what_turns_hide_is_priced_so_that_slower_links_make_turns_pay(num_stages: int) -> None:
    overlap = Overlap(slowdown=0.1, turn_s=2e-4)
    at_first, measured = (costs(link, overlap, num_stages) for link in (Link(1e-6, 1e12), Link(2e-5, 5e9)))
    apart, turns = (planned_by(cost, Budget(4096, interleaved_passes="auto")) for cost in (at_first, measured))
    assert (apart.passes_in_turns, turns.passes_in_turns > 1) == (1, True)
    for plan, cost in ((apart, at_first), (turns, measured)):
        assert repriced_s(plan, MIXED, cost, PassRules()) == pytest.approx(plan.step_s, rel=1e-6)
    # Each is the better one of the two by the costs that it was made with.
    assert repriced_s(turns, MIXED, measured, PassRules()) < repriced_s(apart, MIXED, measured, PassRules())
    assert repriced_s(apart, MIXED, at_first, PassRules()) < repriced_s(turns, MIXED, at_first, PassRules())


# ----------------------------------------------------------------------- forecast


def compared(ratio: float | None, steps: int = 9, source: str = "analytic") -> list[tuple[float, float, str]]:
    plan, correction = replace(a_plan(), profile_source=source), TimeCorrection()
    correction.time_ratio = ratio
    left = {share.name: 10 for share in plan.shares}
    found = [correction.compare_with_plan(plan, left) for _ in range(steps)]
    return [one for one in found if one is not None]


def test_steps_that_take_longer_correct_the_forecast_once() -> None:
    assert compared(1.4) == [(1.4, pytest.approx(12.5), "time: 1.8 s a step, measured; 18 s left")]
    assert len(compared(0.5)) == 1
    ((_, _, line),) = compared(1.4, source="measured")
    assert line == "time: 1.8 s a step, measured, 1.4 times the predicted 1.25 s; 18 s left"
    assert compared(1.1) == compared(None) == compared(1.4, steps=4) == [], "it holds, or cannot be compared yet"
