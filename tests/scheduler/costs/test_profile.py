"""Profiles look times up between measured points, travel as JSON, follow what is measured, and say what they are."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.costs.hardware import DEVICES
from peft_mux.scheduler.costs.profile import (
    AS_PROFILED,
    AdapterTable,
    Curve,
    Parts,
    Profile,
    analytic_profile,
    corrected,
    profile_key,
)
from peft_mux.scheduler.plan import Link
from tests.scheduler.planner.cases import LLAMA_7B

TIMES = st.lists(st.floats(0, 10), min_size=1, max_size=8)


def a_profile() -> Profile:
    curve = Curve((16.0, 64.0), (0.001, 0.003))
    table = AdapterTable(
        (8.0, 16.0), (100.0, 200.0), (16.0, 64.0), (((1.0, 2.0), (2.0, 4.0)), ((2.0, 3.0), (3.0, 7.0)))
    )
    return Profile(
        device="cpu, 1 threads",
        dtype="float32",
        model="tiny",
        layer=curve,
        attention=curve,
        adapter=table,
        head=curve,
        embedding=curve,
        optimizer=curve,
        pass_overhead_s=0.01,
        link=Link(1e-5, 1e9),
        versions=(("torch", "2"),),
    )


# --------------------------------------------------------------------- curves


@given(TIMES, st.booleans())
def test_a_measured_curve_never_falls_whatever_the_noise(values: list[float], is_quadratic: bool) -> None:
    curve = Curve.measured([2.0**n for n in range(len(values))], values, is_quadratic=is_quadratic)
    found = curve(np.linspace(0, 2.0 ** (len(values) + 2), 60))
    assert np.all(np.diff(found) >= -1e-9)
    counts = np.array([2.0**n for n in range(len(values))])
    assert Curve.measured(counts, sorted(values))(counts) == pytest.approx(sorted(values)), "points that rise are kept"


def test_a_curve_is_straight_between_points_held_below_them_and_continues_beyond() -> None:
    curve = Curve((16.0, 64.0), (1.0, 3.0))
    assert [curve(count) for count in (0, 1, 16, 40, 64, 112)] == pytest.approx([0, 1, 1, 2, 3, 5])
    with pytest.raises(ValueError, match=r"values must be finite, 0 or more, not falling, got \(2\.0, 1\.0\)"):
        Curve((1.0, 2.0), (2.0, 1.0))
    with pytest.raises(ValueError, match="counts and values must have equally many entries, got 0 and 0"):
        Curve((), ())
    for counts in ((2.0, 1.0), (0.0, 1.0)):
        with pytest.raises(ValueError, match="counts"):
            Curve(counts, (1.0, 1.0))


def test_attention_continues_as_the_square_beyond_what_was_measured() -> None:
    lengths = np.array([16.0, 64, 128, 256, 512, 1024])
    beyond = np.array([1025.0, 2048, 4096, 32768])
    for linear in (0.0, 3e-5):
        true_s = linear * lengths + 1e-7 * lengths**2
        curve = Curve.measured(lengths, true_s, is_quadratic=True)
        assert curve(beyond) == pytest.approx(linear * beyond + 1e-7 * beyond**2)
    straight = Curve.measured(lengths, 1e-7 * lengths**2)
    assert straight(4096) < 0.35 * 1e-7 * 4096**2, "by default a curve continues straight"
    assert Curve((10.0,), (2.0,), is_quadratic=True)(30) == pytest.approx(18)


def test_an_adapter_table_gives_its_points_back_and_is_linear_between_them() -> None:
    table = a_profile().adapter
    for r, rank in enumerate(table.ranks):
        for w, width in enumerate(table.widths):
            for t, tokens in enumerate(table.tokens):
                assert table(rank, width, tokens) == pytest.approx(table.values[r][w][t])
    assert table(12, 150, 40) == pytest.approx(np.mean(table.values))
    # Beyond its points it continues in proportion.
    assert table(32, 200, 64) == table(16, 400, 64) == pytest.approx(2 * table(16, 200, 64))
    assert table(16, 200, 112) == pytest.approx(2 * table(16, 200, 64) - table(16, 200, 16))
    assert table(16, 200, 0) == 0.0
    ranks, tokens = np.array([8, 12, 16]), np.array([16, 20, 500])
    assert table(ranks, 100, tokens) == pytest.approx([table(8, 100, 16), table(12, 100, 20), table(16, 100, 500)])


# ------------------------------------------------------------------- profiles


def test_a_profile_comes_back_from_json_as_it_was_and_other_text_is_refused() -> None:
    for profile in (a_profile(), analytic_profile(DEVICES["A40"], LLAMA_7B)):
        assert Profile.from_json(profile.to_json()) == profile
    for text in ("[]", "no json", '{"format_version": 1}'):
        with pytest.raises(ValueError, match=r"profile must be .*to_json wrote"):
            Profile.from_json(text)
    with pytest.raises(ValueError, match="format_version must be 1, got 99"):
        Profile.from_json(json.dumps({**json.loads(a_profile().to_json()), "format_version": 99}))


def test_the_key_changes_with_device_dtype_model_and_versions_but_not_with_the_order_of_versions() -> None:
    given = ("cpu", "float32", "m", {"torch": "2"})
    others = [("gpu", *given[1:]), ("cpu", "bfloat16", *given[2:]), ("cpu", "float32", "n", given[3])]
    assert len({profile_key(*one) for one in (given, *others, (*given[:3], {"torch": "3"}))}) == 5
    assert profile_key("c", "d", "m", {"a": "1", "b": "2"}) == profile_key("c", "d", "m", {"b": "2", "a": "1"})


# ------------------------------------------------------------------- feedback


def test_each_part_of_a_profile_follows_its_own_factor_and_nothing_else_changes() -> None:
    before = replace(a_profile(), attention_call_s=0.002, step_overhead_s=0.004)

    def times_of(one: Profile) -> list[float]:
        curves = [curve(40) for curve in (one.layer, one.embedding, one.head, one.attention, one.optimizer)]
        sums_s = 0.0 if one.link is None else one.link.transfer_s(10**6)
        fixed = [one.pass_overhead_s, one.attention_call_s, one.step_overhead_s]
        return [*curves, one.adapter(12, 150, 40), sums_s, *fixed]

    after = corrected(before, Parts(2.0, 3.0, 5.0, 7.0, 11.0, 13.0))
    ratios = [now / then for now, then in zip(times_of(after), times_of(before), strict=True)]
    assert ratios == pytest.approx([3, 3, 3, 5, 13, 7, 11, 2, 5, 13])
    assert (after.forward_fraction, after.key) == (before.forward_fraction, before.key)
    assert corrected(before, AS_PROFILED) is before


# ------------------------------------------------------------------- analytic


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_an_analytic_profile_says_so_and_grows_with_the_work(name: str) -> None:
    profile = analytic_profile(DEVICES[name], LLAMA_7B)
    assert profile.source == "analytic"
    assert profile.device == name
    assert (profile.attention.is_quadratic, profile.layer.is_quadratic) == (True, False)
    less, more = profile.utilization(16, 8192, np.array([64, 128]), grows=False)
    assert 0 < less <= more <= 1
    counts = np.array([64, 1024, 16384])
    for seconds in (profile.layer, profile.attention, profile.head, profile.embedding, profile.optimizer):
        assert np.all(np.diff(seconds(counts)) >= 0)
        assert seconds(16384) > seconds(64) > 0


def test_large_products_reach_the_stated_efficiency_and_small_ones_wait_for_the_weights() -> None:
    device = DEVICES["A40"]
    profile = analytic_profile(device, LLAMA_7B)
    weights = 4 * 4096 * 4096 + 3 * 4096 * 11008
    many = 16384
    arithmetic_s = 4 * many * weights / (device.flops_per_s * device.efficiency)
    assert arithmetic_s < profile.layer(many) < 1.15 * arithmetic_s
    assert profile.layer(16) > 2 * 2 * weights / device.memory_bytes_per_s
    assert profile.layer(64) < 2 * profile.layer(16)
