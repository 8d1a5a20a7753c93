"""Factors of parts are found from passes that differ, through noise and odd steps, and stay near otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.costs.fit import PartFit
from peft_mux.scheduler.costs.profile import AS_PROFILED, Parts, factors_of, summed

_SEEDS = st.integers(0, 2**32 - 1)
_WRONG = st.sampled_from([0.25, 4.0])


def passes(draw: np.random.Generator, count: int) -> list[Parts]:
    """Return passes whose parts do not grow together: of many sizes, lengths and adapters."""
    found = []
    for _ in range(count):
        tokens, length, adapted = draw.uniform(50, 2000), draw.uniform(10, 1000), draw.uniform(0.1, 1.0)
        found.append(Parts(4e-3, 1e-5 * tokens, 2e-8 * tokens * length, 1e-5 * tokens * adapted))
    return found


def fitted(truth: Parts, draw: np.random.Generator, *, count: int = 200, noise: float = 0.05) -> PartFit:
    fit = PartFit()
    for one in passes(draw, count):
        fit.observe(one, one.times(truth).total * float(np.exp(draw.normal(0, noise))))
    return fit


@settings(max_examples=12, deadline=None)
@given(_SEEDS, st.sampled_from(["fixed", "tokens", "attention", "adapters"]), _WRONG)
def test_a_part_that_is_wrong_by_four_is_found_and_the_others_are_left(seed: int, part: str, wrong: float) -> None:
    truth = AS_PROFILED._replace(**{part: wrong})
    found = fitted(truth, np.random.default_rng(seed)).factors()
    for name in ("fixed", "tokens", "attention", "adapters"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.35, abs=0.1), name


@settings(max_examples=8, deadline=None)
@given(_SEEDS, st.floats(0.05, 20))
def test_a_machine_that_is_slower_in_all_is_told_from_passes_that_are_all_alike(seed: int, slower: float) -> None:
    draw, fit = np.random.default_rng(seed), PartFit()
    (one,) = passes(draw, 1)
    for _ in range(30):
        fit.observe(one, slower * one.total * float(np.exp(draw.normal(0, 0.05))))
    assert list(fit.factors()[:4]) == pytest.approx([slower] * 4, rel=0.2)
    assert fit.factors().communication == pytest.approx(1.0), "nothing was said of links"


@settings(max_examples=8, deadline=None)
@given(_SEEDS, st.floats(10, 1000))
def test_one_odd_step_changes_little_and_a_lasting_change_is_followed(seed: int, odd: float) -> None:
    draw = np.random.default_rng(seed)
    fit = fitted(AS_PROFILED, draw)
    before = fit.factors()
    (one,) = passes(draw, 1)
    fit.observe(one, odd * one.total)
    assert list(fit.factors()) == pytest.approx(list(before), rel=0.1)
    truth = AS_PROFILED._replace(tokens=3.0)
    for one in passes(draw, 400):
        fit.observe(one, one.times(truth).total)
    assert fit.factors().tokens == pytest.approx(3.0, rel=0.15)


def test_no_factor_falls_to_nothing_even_where_a_part_seems_to_cost_less_than_that() -> None:
    draw, fit = np.random.default_rng(0), PartFit()
    for one in passes(draw, 100):
        fit.observe(one, max(1e-6, one.total - 1.5 * one.adapters - one.fixed))
    assert min(fit.factors()) > 0


def test_what_says_nothing_changes_nothing() -> None:
    fit = PartFit()
    for predicted, seconds in ((Parts(), 1.0), (Parts(tokens=1.0), 0.0), (Parts(tokens=1.0), float("nan"))):
        fit.observe(predicted, seconds)
    assert (fit.factors(), fit.num_passes) == (AS_PROFILED, 0)


def test_what_processes_have_learnt_apart_is_what_one_would_have_learnt_of_all_passes() -> None:
    draw, truth = np.random.default_rng(5), Parts(2.0, 1.0, 3.0, 1.0, 1.0, 1.0)
    fits = [PartFit(), PartFit()]
    for number, one in enumerate(passes(draw, 200)):
        fits[number % 2].observe(one, one.times(truth).total)
    pooled = [one.pooled([other.numbers() for other in fits]) for one in fits]
    assert pooled[0].factors() == pooled[1].factors(), "all processes must plan alike, to the last bit"
    assert list(pooled[0].factors()[:4]) == pytest.approx([2.0, 1.0, 3.0, 1.0], rel=0.1)
    assert pooled[0].num_passes == 200


def test_what_was_learnt_before_is_where_a_fit_begins() -> None:
    start = Parts(2.0, 3.0, 1.0, 1.0, 4.0, 1.0)
    assert PartFit(start).factors() == start


def test_parts_add_up_travel_by_name_and_are_refused_where_they_are_no_factors() -> None:
    one, other = Parts(fixed=1.0, tokens=2.0), Parts(tokens=3.0)
    assert summed([one, other]) == Parts(fixed=1.0, tokens=5.0)
    assert one.times(Parts(2.0, 2.0)).total == 6.0
    assert factors_of(AS_PROFILED._asdict()) == AS_PROFILED
    for bad in ({}, AS_PROFILED._asdict() | {"tokens": -1.0}, AS_PROFILED._asdict() | {"tokens": "1"}):
        assert factors_of(bad) is None


def test_a_part_of_which_only_rounding_is_predicted_takes_nothing_on_itself() -> None:
    draw, fit = np.random.default_rng(3), PartFit()
    for one in passes(draw, 100):
        fit.observe(one._replace(communication=1e-18), 0.05 + one.total)
    assert fit.factors().communication == pytest.approx(1.0, abs=0.01)
    assert fit.factors().fixed * 4e-3 == pytest.approx(0.054, rel=0.1)
