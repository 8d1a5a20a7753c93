"""What is learnt of measured times, and of which steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peft_mux.engine.work import PassTime, StepTimes, TaskInPass
from peft_mux.planning.learning import TimeCorrection
from peft_mux.scheduler.costs.profile import Parts

PLAN: Any = SimpleNamespace(step_s=1.0, tokens_per_step=10)


class Prices:
    """Predicts the same for every pass, and counts how often it is asked."""

    def __init__(self) -> None:
        self.num_priced = 0

    def of(self, timed: PassTime) -> Parts:
        self.num_priced += 1
        return Parts(fixed=0.5, tokens=0.5)

    def between(self, tasks: object) -> Parts:
        return Parts(optimizer=0.1)


class CutPrices(Prices):
    """Predicts passes of any size whose sums grow with their tokens, as their computing does."""

    def of(self, timed: PassTime) -> Parts:
        tokens = float(timed.passes[0][0].lengths[0])
        return Parts(fixed=0.01, tokens=1e-3 * tokens, communication=1e-3 + 5e-4 * tokens)

    def summed_s(self, timed: PassTime) -> float:
        assert timed.waited_s is not None
        return timed.waited_s


def observed(num_steps: int) -> tuple[TimeCorrection, list[int]]:
    """Return what has seen so many steps of one pass, and how many passes it had priced after each of them."""
    correction, prices, priced = TimeCorrection(), Prices(), []
    for _ in range(num_steps):
        times = StepTimes((PassTime(((),), 2.0),), 2.0)
        correction.observe_passes(times, 0.1, ["a"], prices)  # type: ignore[arg-type]
        correction.observe(PLAN, 10, 2.1)
        priced.append(prices.num_priced)
    return correction, priced


def test_the_first_step_teaches_nothing_the_next_ones_all_and_later_ones_some() -> None:
    _, priced = observed(40)
    assert priced[0] == 0
    assert priced[19] == 19
    assert priced[39] - priced[19] == 4, "each fifth of twenty"


def test_a_new_plan_is_learnt_from_anew() -> None:
    correction, _ = observed(40)
    correction.begin_plan()
    prices = Prices()
    for _ in range(3):
        correction.observe_passes(StepTimes((PassTime(((),), 2.0),), 2.0), 0.1, ["a"], prices)  # type: ignore[arg-type]
        correction.observe(PLAN, 10, 2.1)
    assert prices.num_priced == 2


def test_passes_that_take_twice_the_profiles_seconds_are_learnt_as_such_by_late_steps_too() -> None:
    correction, _ = observed(60)
    factors = correction.fit.factors()
    # Passes that are all alike do not tell these two apart.
    assert 0.5 * factors.fixed + 0.5 * factors.tokens == pytest.approx(2.0, rel=0.05)


def learnt_of_slow_links(factor: float, *, is_waiting_timed: bool) -> Parts:
    """Return what is learnt of passes of many sizes whose sums take so many times what the profile says."""
    correction, prices = TimeCorrection(), CutPrices()
    for step in range(40):
        rows = ((TaskInPass("a", (50 + 37 * step % 400,), 1),),)
        own = prices.of(PassTime(rows, 0.0))
        waited_s = factor * own.communication
        timed = PassTime(rows, own.fixed + own.tokens + waited_s, waited_s if is_waiting_timed else None)
        correction.observe_passes(StepTimes((timed,), timed.seconds), 0.1, ["a"], prices)  # type: ignore[arg-type]
        correction.observe(PLAN, 10, timed.seconds)
    return correction.fit.factors()


def test_slow_links_are_told_from_slow_computing_where_waiting_for_sums_was_timed() -> None:
    found = learnt_of_slow_links(6.0, is_waiting_timed=True)
    assert found.communication == pytest.approx(6.0, rel=0.1)
    assert (found.fixed, found.tokens) == pytest.approx((1.0, 1.0), rel=0.1)


def test_without_that_what_slow_links_add_counts_as_slow_computing_and_the_sum_of_both_is_right() -> None:
    found = learnt_of_slow_links(6.0, is_waiting_timed=False)
    assert found.communication < 3
    assert found.tokens > 2
    own = CutPrices().of(PassTime(((TaskInPass("a", (300,), 1),),), 0.0))
    assert own.times(found).total == pytest.approx(own._replace(communication=6 * own.communication).total, rel=0.1)
