"""What a profile says of passes that have run: in turns of sums what shows, and of waiting no delay of other ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peft_mux.engine.pass_clock import PassTime, TaskInPass
from peft_mux.planning.pass_prices import PassPrices
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.link import Link, Overlap
from peft_mux.scheduler.costs.measured.parts import AS_PROFILED
from peft_mux.scheduler.planner.turn_times import TurnTimes
from tests.scheduler.planner.cases import LLAMA_7B, load, models

LOADS = {name: load(name) for name in ("a", "b")}
GROUP = PassTime(tuple((TaskInPass(name, (128,) * 8, 500),) for name in LOADS), 0.0)


def costs(link: Link, overlap: Overlap | None) -> CostModel:
    profile = replace(models()[0].profile, overlap=overlap)
    return CostModel(profile, LLAMA_7B, devices_per_stage=2, tensor_link=link)


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


def test_ranks_that_come_late_are_no_slow_link() -> None:
    prices = PassPrices(costs(Link(2e-5, 2e10), Overlap(skew=0.25)), LOADS, 0)
    assert prices.summed_s(PassTime(GROUP.passes[:1], 10.0, 4.0)) == pytest.approx(4.0 - 0.25 * 6.0)
    assert prices.summed_s(PassTime(GROUP.passes[:1], 10.0, 1.0)) == pytest.approx(0.1), "some of it is always the sum"
    assert PassPrices(costs(Link(2e-5, 2e10), None), LOADS, 0).summed_s(PassTime((), 10.0, 4.0)) == 4.0
