"""What replicas that pack their sequences take: passes are filled, whatever the lengths, and nothing is padded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.time_model import LayerFit, PackedTimeModel, ReplicaTimeModel

ONE, PIPELINE = ParallelConfig(1, 1), ParallelConfig(1, 2)
FIT = LayerFit((1e-9, 0, 1e-6, 0, 0, 1e-3))
LENGTHS = [64, 100, 256, 1000]
_COUNTS = st.lists(st.integers(0, 9), min_size=4, max_size=4)


def models(limit: int = 1024) -> tuple[PackedTimeModel, ReplicaTimeModel]:
    padded = ReplicaTimeModel({1: FIT}, num_layers=4, max_tokens={ONE: limit, PIPELINE: limit})
    return PackedTimeModel(padded), padded


@pytest.mark.parametrize("config", [ONE, PIPELINE])
def test_full_passes_of_one_length_take_what_the_paper_says(config: ParallelConfig) -> None:
    packed, padded = models()
    assert packed.step_s(config, [12], [256], 1024) == pytest.approx(padded.step_s(config, [12], [256], 1024))


def test_sequences_of_unlike_lengths_share_a_pass_where_buckets_would_have_one_each() -> None:
    packed, padded = models()
    counts, lengths = [1, 1, 1], [64, 100, 256]
    each_s = 4 * sum(FIT.terms(length)[1] for length in lengths)
    assert packed.step_s(ONE, counts, lengths, 1024) == pytest.approx(4 * 1e-3 + each_s)
    assert padded.step_s(ONE, counts, lengths, 1024) == pytest.approx(3 * 4 * 1e-3 + each_s)


@given(_COUNTS, st.integers(0, 3), st.sampled_from([ONE, PIPELINE]))
def test_another_sequence_never_makes_a_step_shorter(counts: list[int], bucket: int, config: ParallelConfig) -> None:
    packed, _ = models()
    more = [count + (index == bucket) for index, count in enumerate(counts)]
    assert packed.step_s(config, more, LENGTHS, 1024) >= packed.step_s(config, counts, LENGTHS, 1024) * (1 - 1e-12)


@given(_COUNTS)
def test_the_linear_form_is_a_step_of_full_passes_and_never_more_than_a_step_takes(counts: list[int]) -> None:
    packed, _ = models()
    each_s, constant_s = packed.linear_terms(ONE, LENGTHS, 1024)
    linear_s = sum(count * float(seconds) for count, seconds in zip(counts, each_s, strict=True))
    assert constant_s == 0.0
    assert linear_s <= packed.step_s(ONE, counts, LENGTHS, 1024) * (1 + 1e-12)


def test_no_sequences_take_no_time_and_the_configurations_are_those_of_the_curve() -> None:
    packed, padded = models()
    assert packed.step_s(PIPELINE, [0, 0], [64, 100], 1024) == 0.0
    assert (packed.max_tokens, packed.configurations) == (padded.max_tokens, padded.configurations)
