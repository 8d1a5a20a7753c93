"""Rates of replicas: a slow one is told from the others within a few steps, and one odd step does little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.dispatching.ahead import ReplicaRates

SHARES = st.lists(st.floats(0.1, 10), min_size=3, max_size=3)


@given(st.lists(SHARES, min_size=8, max_size=8), st.floats(1.5, 8), st.floats(0.01, 100))
def test_a_slow_replica_is_told_whatever_the_shares_and_the_unit(
    steps: list[list[float]], slower: float, unit: float
) -> None:
    rates = ReplicaRates(3)
    for shares in steps:
        rates.observe([unit * share for share in shares], [shares[0], slower * shares[1], shares[2]])
    first, second, third = rates.slowness
    assert first == third == 1.0
    assert slower**0.7 < second <= 1.06 * slower


@given(st.floats(10, 1000))
def test_one_odd_step_does_little_and_is_forgotten(odd: float) -> None:
    rates = ReplicaRates(3)
    rates.observe([1, 1, 1], [1, odd, 1])
    assert max(rates.slowness) < 1.6
    for _ in range(15):
        rates.observe([1, 1, 1], [1, 1, 1])
    assert rates.slowness == (1.0, 1.0, 1.0)


def test_differences_within_noise_leave_replicas_equal() -> None:
    rates = ReplicaRates(2)
    for _ in range(20):
        rates.observe([1, 1], [1.0, 1.02])
    assert rates.slowness == (1.0, 1.0)


@pytest.mark.parametrize("measured", [[0.0, 3.0], [0.0, 0.0]])
def test_a_replica_by_itself_tells_nothing(measured: list[float]) -> None:
    rates = ReplicaRates(2)
    rates.observe([1, 1], measured)
    assert rates.slowness == (1.0, 1.0)
