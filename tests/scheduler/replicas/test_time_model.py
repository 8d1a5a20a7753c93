"""The time model: planted curves are found again, Eq. 10 to 12 hold, and the real profile meets the paper's table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import (
    LayerFit,
    LayerTime,
    ReplicaTimeModel,
    fit_layer,
    read_layer_profile,
    read_max_tokens,
)

ONE = ParallelConfig(1, 1)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SIZES = (1, 2, 4, 8)
PLANTED = (5e-11, 2e-11, 4e-6, 1e-6, 2e-5, 2e-3)
"""Seconds of the size of a real layer."""

coefficients = st.tuples(
    *(st.one_of(st.just(0.0), st.floats(0.1, 10.0)).map(lambda factor, unit=unit: factor * unit) for unit in PLANTED)
)


def curve(planted: tuple[float, ...], size: float, length: float) -> float:
    c1, c2, c3, c4, c5, c6 = planted
    return (c1 * size + c2) * length**2 + (c3 * size + c4) * length + (c5 * size + c6)


def measure(planted: tuple[float, ...], tp: int = 1) -> list[LayerTime]:
    return [LayerTime(tp, length, size, curve(planted, size, length)) for length in LENGTHS for size in SIZES]


def model(planted: tuple[float, ...] = PLANTED, num_layers: int = 4, **pipelines: int) -> ReplicaTimeModel:
    configs = {ParallelConfig(1, stages): 4096 for stages in pipelines.values()} or {ONE: 4096}
    return ReplicaTimeModel({1: LayerFit(planted)}, num_layers, configs)  # type: ignore[arg-type]


@given(coefficients.filter(any))
def test_fit_recovers_planted_coefficients(planted: tuple[float, ...]) -> None:
    fit = fit_layer(measure(planted))[1]
    np.testing.assert_allclose(fit.coefficients, planted, rtol=1e-6, atol=1e-9 * max(PLANTED[2], 1e-16))
    assert fit.mean_relative_error < 1e-9


def test_a_step_takes_what_equations_10_to_12_say() -> None:
    def step_s(stages: int, counts: list[int], lengths: list[int], num_layers: int = 4) -> float:
        return model(num_layers=num_layers, stages=stages).step_s(ParallelConfig(1, stages), counts, lengths, 4096)

    # Eq. 10: 4096 tokens hold 4 sequences of 1024; 11 = 2 x 4 + 3, and 2 x 4096 fill two.
    full_s, rest_s, long_s = (curve(PLANTED, *sizes) for sizes in ((4, 1024), (3, 1024), (1, 4096)))
    assert step_s(1, [11, 2], [1024, 4096]) == pytest.approx(4 * (2 * full_s + rest_s + 2 * long_s))
    # Eq. 11: m + p - 1 times a micro-batch on a stage; where layers do not divide, on the slowest.
    assert step_s(2, [20], [1024]) == pytest.approx((5 + 2 - 1) * 2 * full_s)
    assert step_s(2, [4], [1024], num_layers=5) == pytest.approx(3 * (1 + 1) * full_s)
    # Eq. 12, with a remainder that is longer than every full micro-batch of another length.
    short_s, rest_s = curve(PLANTED, 8, 512), curve(PLANTED, 1, 512)
    expected_s = short_s + rest_s + long_s + 3 * max(short_s, rest_s, long_s)
    assert step_s(4, [9, 1], [512, 4096]) == pytest.approx(expected_s)


@given(
    coefficients,
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.integers(0, 2),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_a_step_never_falls_when_a_count_grows_and_takes_no_time_without_sequences(
    planted: tuple[float, ...], counts: list[int], grown: int, stages: int, packs: bool
) -> None:
    config = ParallelConfig(1, stages)
    times = replace(model(planted, stages=stages), packs=packs)
    more = [count + (index == grown) for index, count in enumerate(counts)]
    lengths = [256, 1000, 3000]
    assert times.step_s(config, more, lengths, 4096) >= times.step_s(config, counts, lengths, 4096) * (1 - 1e-12)
    assert times.step_s(config, [0, 0, 0], lengths, 4096) == 0.0
    if packs and stages == 1:
        each_s, constant_s = times.linear_terms(config, lengths, 4096)
        assert np.dot(counts, each_s) <= times.step_s(config, counts, lengths, 4096) * (1 + 1e-12)
        assert constant_s == 0.0


@given(coefficients, st.lists(st.integers(0, 10), min_size=3, max_size=3), st.sampled_from([1, 2, 4]))
def test_linear_terms_are_the_step_where_micro_batches_are_full(
    planted: tuple[float, ...], batches: list[int], stages: int
) -> None:
    config = ParallelConfig(1, stages)
    times = model(planted, stages=stages)
    lengths = [256, 1000, 3000]
    sequence_s, constant_s = times.linear_terms(config, lengths, 4096)
    counts = [full * (4096 // length) for full, length in zip(batches, lengths, strict=True)]
    linear_s = float(np.dot(counts, sequence_s))
    step_s = times.step_s(config, counts, lengths, 4096)
    assert linear_s * (1 - 1e-9) <= step_s <= (linear_s + constant_s) * (1 + 1e-9)
    if stages == 1:
        assert step_s == pytest.approx(linear_s)
    elif batches[2]:  # the longest length is there, and with it the bubble of the linear form
        full_s = [4 // stages * curve(planted, 4096 // length, length) for length in lengths]
        most, present = max(full_s), [seconds for seconds, full in zip(full_s, batches, strict=True) if full]
        assert step_s == pytest.approx(linear_s + constant_s * max(present) / most if most else 0.0)


# ------------------------------------------------------------------ packed passes


def test_sequences_of_different_lengths_share_a_pass_instead_of_one_for_each_bucket() -> None:
    fit = LayerFit((1e-9, 0, 1e-6, 0, 0, 1e-3))
    padded = ReplicaTimeModel({1: fit}, num_layers=4, max_tokens={ONE: 1024})
    counts, lengths = [1, 1, 1], [64, 100, 256]
    each_s = 4 * sum(fit.terms(length)[1] for length in lengths)
    assert replace(padded, packs=True).step_s(ONE, counts, lengths, 1024) == pytest.approx(4 * 1e-3 + each_s)
    assert padded.step_s(ONE, counts, lengths, 1024) == pytest.approx(3 * 4 * 1e-3 + each_s)
    for stages in (1, 2):  # full passes of one length take what the paper says
        same = model(stages=stages)
        arguments = (ParallelConfig(1, stages), [12], [1024], 4096)
        assert replace(same, packs=True).step_s(*arguments) == pytest.approx(same.step_s(*arguments))


def test_slowness_multiplies_every_time_of_its_configuration() -> None:
    plain, two, lengths = model(one=1, two=2), ParallelConfig(1, 2), [256, 1000, 3000]
    slow = replace(plain, slowness={two: 1.5})
    for config, factor in ((ONE, 1.0), (two, 1.5)):
        step_s = plain.step_s(config, [5, 2, 1], lengths, 4096)
        assert slow.step_s(config, [5, 2, 1], lengths, 4096) == pytest.approx(factor * step_s)
        linear, expected = (np.hstack(one.linear_terms(config, lengths, 4096)) for one in (slow, plain))
        np.testing.assert_allclose(linear, factor * expected)
        assert slow.throughput(config, 256, 4) == pytest.approx(plain.throughput(config, 256, 4) / factor)


# ------------------------------------------------------------------- refusals, files


def test_what_a_model_cannot_know_is_refused() -> None:
    with pytest.raises(ValueError, match="three or more lengths"):
        fit_layer([LayerTime(1, 512, size, 1e-3 * size) for size in (1, 2, 4, 8, 16, 32)])
    with pytest.raises(ValueError, match="lengths must be at most max_tokens = 4096, got 4097"):
        model().step_s(ONE, [1], [4097], 4096)
    with pytest.raises(ValueError, match=r"tp of <2,1> must be \[1\].*got 2"):
        ReplicaTimeModel({1: LayerFit(PLANTED)}, 4, {ParallelConfig(2, 1): 4096})
    with pytest.raises(ValueError, match="at most num_layers = 4"):
        model(stages=8)
    with pytest.raises(ValueError, match="max_tokens must have at least one configuration, got none"):
        ReplicaTimeModel({1: LayerFit(PLANTED)}, 4, {})


def test_readers_take_milliseconds_and_refuse_missing_columns_and_configurations_that_come_twice(
    tmp_path: Path,
) -> None:
    profile, limits = tmp_path / "profile.csv", tmp_path / "limits.csv"
    profile.write_text("tp,seq_len,mbs,time\n2,128,4,3.5\n")
    assert read_layer_profile(profile) == (LayerTime(2, 128, 4, 0.0035),)
    with pytest.raises(ValueError, match=r"\['pp', 'max_tokens'\].*, got \['tp', 'seq_len', 'mbs', 'time'\]"):
        read_max_tokens(profile)
    limits.write_text("tp,pp,sp,max_tokens\n1,1,1,2048\n1,1,1,4096\n")
    with pytest.raises(ValueError, match=r"<1,1> must be once in .*, got it twice"):
        read_max_tokens(limits)


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    """Return the folder of the published profile."""
    if not (shared_data / "lobra").is_dir():
        pytest.skip("../shared/data/lobra absent")
    return shared_data / "lobra"


def test_the_model_meets_the_published_profile_and_step_times_within_five_percent(folder: Path) -> None:
    fits = fit_layer(read_layer_profile(folder / "profile_time_llama_7B.csv"))
    assert list(fits) == [1, 2, 4, 8]
    assert max(fit.mean_relative_error for fit in fits.values()) < 0.05
    tables = json.loads((folder / "paper_tables.json").read_text())
    errors = []
    for tp, pp, dp, length, chunks, seconds, _ in tables["table11_7B_16gpu_batch64_tp_pp_dp_seq_chunks_lobra_nemo_s"]:
        config = ParallelConfig(tp, pp)
        per_chunk = 64 // dp // chunks
        times = ReplicaTimeModel(fits, 32, {config: per_chunk * length})
        predicted = times.step_s(config, [64 // dp], [length], per_chunk * length)
        errors.append(abs(predicted / seconds - 1))
    assert len(errors) == 32
    assert float(np.mean(errors)) < 0.05
