"""What a profile says of passes that have run: in turns of sums what shows, and of waiting no delay of other ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peft_mux.engine.work import PassTime, TaskInPass
from peft_mux.planning.learning import PassPrices
from peft_mux.scheduler.costs.fit import PartFit
from peft_mux.scheduler.costs.hardware import Link, Overlap
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.profile import AS_PROFILED
from peft_mux.scheduler.planner.times import TurnTimes
from peft_mux.scheduler.subgraphs.passes import Direction
from tests.scheduler.planner.cases import LLAMA_7B, load, models

LOADS = {name: load(name) for name in "abc"}
PASSES = tuple((TaskInPass(name, (128,) * 8, 500),) for name in LOADS)
GROUP = PassTime(PASSES[:2], 0.0)


def costs(link: Link, overlap: Overlap | None, num_stages: int = 1) -> CostModel:
    profile = replace(models()[0].profile, overlap=overlap)
    return CostModel(profile, LLAMA_7B, num_stages=num_stages, devices_per_stage=2, tensor_link=link)


def test_passes_in_turns_take_what_was_planned_once_the_right_factor_is_learnt() -> None:
    link, overlap = Link(2e-5, 2e10), Overlap(slowdown=0.1, turn_s=1e-4)
    given, machine = costs(link, overlap), costs(link.slowed(4.0), overlap)
    times = TurnTimes(machine)
    prices = PassPrices(given, LOADS, 0, lambda: (times, 4.0))
    predicted = prices.of(GROUP).times(AS_PROFILED._replace(communication=4.0))
    rows = [prices._rows(own) for own in GROUP.passes]
    planned_s = times.group_s([machine.pass_parts(own, 1) for own in rows])
    assert predicted.total == pytest.approx(planned_s, rel=1e-9)
    in_full = PassPrices(given, LOADS, 0).of(GROUP).times(AS_PROFILED._replace(communication=4.0))
    assert in_full.total > 1.2 * planned_s, "nothing is hidden; the case is too easy"


def planned_s(cost: CostModel, prices: PassPrices, timed: PassTime, stage: int, width: int) -> float:
    """Return the seconds that a plan has for a micro-batch of a pipeline, forward and backward."""
    parts = [cost.pass_parts(prices._rows(own), 1, stage=stage) for own in timed.passes]
    tasks = [[one.task for one in own] for own in timed.passes]
    ways: tuple[Direction, ...] = ("forward", "backward")
    return sum(TurnTimes(cost).action_s(tasks, parts, width, stage, way) for way in ways)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_passes_of_a_stage_take_what_was_planned_and_teach_nothing_where_the_profile_is_right(
    width: int, stage: int
) -> None:
    link, overlap = Link(2e-5, 2e10), Overlap(skew=0.1, slowdown=0.1, turn_s=1e-4)
    given, machine = costs(link, overlap, 2), costs(link.slowed(4.0), overlap, 2)
    slot = PassTime(PASSES, 0.0)
    prices = PassPrices(given, LOADS, stage, lambda: (TurnTimes(machine), 4.0), width=width)
    predicted = prices.of(slot).times(AS_PROFILED._replace(communication=4.0))
    assert predicted.total == pytest.approx(planned_s(machine, prices, slot, stage, width), rel=1e-9)
    # Sums in full would tell of a faster device, though only what turns hide of them is missing.
    in_full, right = (
        PassPrices(given, LOADS, stage, *more, width=width) for more in ((), (lambda: (TurnTimes(given), 1.0),))
    )
    taken_s = planned_s(given, prices, slot, stage, width)
    factors = []
    for own in (in_full, right):
        fit = PartFit()
        for _ in range(10):
            fit.observe(own.of(slot), taken_s)
        factors.append(fit.factors().tokens)
    assert factors[1] == pytest.approx(1.0, rel=1e-6)
    assert abs(factors[0] - 1.0) > 0.02, "nothing is hidden, and nobody waits; the case is too easy"


def test_ranks_that_come_late_are_no_slow_link() -> None:
    prices = PassPrices(costs(Link(2e-5, 2e10), Overlap(skew=0.25)), LOADS, 0)
    assert prices.summed_s(PassTime(GROUP.passes[:1], 10.0, 4.0)) == pytest.approx(4.0 - 0.25 * 6.0)
    assert prices.summed_s(PassTime(GROUP.passes[:1], 10.0, 1.0)) == pytest.approx(0.1), "some of it is always the sum"
    assert PassPrices(costs(Link(2e-5, 2e10), None), LOADS, 0).summed_s(PassTime((), 10.0, 4.0)) == 4.0
