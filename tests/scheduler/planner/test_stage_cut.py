"""Layers are cut into stages by predicted cost: as fast as the best of all cuts, within memory, as equal as can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.passes import PassRules, TaskRows, cut_into_passes
from peft_mux.scheduler.costs.hardware import DEVICES
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import AdapterLoad, FrozenParts, ModelShape, TaskLoad, split_layers
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.planner.stage_cut import balanced_layers, choose_layers

VOCABULARY, HIDDEN, LAYERS = 128_000, 2048, 16
LAYER_BYTES = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 8192)
PARTS = FrozenParts(
    before_bytes=2 * VOCABULARY * HIDDEN,
    layer_bytes=LAYER_BYTES,
    cut_bytes=LAYER_BYTES,
    after_bytes=2 * HIDDEN,
    head_bytes=2 * VOCABULARY * HIDDEN,
)
SHAPE = ModelShape(
    LAYERS, HIDDEN, 8192, HIDDEN, HIDDEN, VOCABULARY, LAYERS * LAYER_BYTES + 4 * VOCABULARY * HIDDEN, 2, PARTS
)
PROFILE = analytic_profile(DEVICES["A40"], SHAPE)


def cuts(num_layers: int, num_stages: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut layers into stages."""
    for ends in itertools.combinations(range(1, num_layers), num_stages - 1):
        layers = tuple(end - start for start, end in zip((0, *ends), (*ends, num_layers), strict=True))
        if min(layers) >= least:
            yield layers


def load(name: str, length: int = 256, count: int = 16, parameters: int = 4_000_000) -> TaskLoad:
    adapters = tuple(AdapterLoad(16, 2 * HIDDEN, HIDDEN) for _ in range(4))
    return TaskLoad(name, (length,) * count, length * count, adapters, parameters, cut_parameters=parameters // 2)


def models(num_stages: int, devices: int = 1) -> tuple[CostModel, MemoryModel]:
    cost = CostModel(PROFILE, SHAPE, num_stages=num_stages, devices_per_stage=devices)
    return cost, MemoryModel(SHAPE, num_stages=num_stages, devices_per_stage=devices)


def pace_s(layers: tuple[int, ...], loads: list[TaskLoad], devices: int = 1) -> float:
    """Return the mean seconds of the slowest stage, forward and backward, by the cost model itself."""
    cost = CostModel(PROFILE, SHAPE, num_stages=len(layers), devices_per_stage=devices, layers_per_stage=layers)
    rows = [TaskRows(one.lengths) for one in loads]
    passes = cut_into_passes(rows, PassRules(), bound=8192, num_passes=4 * len(layers))
    return float(cost.passes_s(loads, passes).mean(axis=0).max())


def unequal(layers: tuple[int, ...]) -> int:
    return sum(count * count for count in layers)


# ---------------------------------------------------------------- brute force


@settings(max_examples=40)
@given(st.data())
def test_no_other_cut_is_faster_and_none_as_fast_is_more_equal(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 5))
    least = data.draw(st.integers(1, 2))
    num_layers = data.draw(st.integers(least * num_stages, 11))
    # Small whole numbers, so that there are ties, and sums of them are exact.
    own = data.draw(st.lists(st.integers(0, 6), min_size=num_stages, max_size=num_stages))
    each = data.draw(st.lists(st.integers(0, 3), min_size=num_layers, max_size=num_layers))
    most = data.draw(st.lists(st.integers(least, num_layers), min_size=num_stages, max_size=num_stages))

    def stage_s(stage: int, first: int, layers: int) -> float:
        return float(sum(each[first : first + layers]) + own[stage])

    allowed = [
        layers
        for layers in cuts(num_layers, num_stages, least)
        if all(count <= bound for count, bound in zip(layers, most, strict=True))
    ]
    assume(allowed)

    def key(layers: tuple[int, ...]) -> tuple[float, int]:
        firsts = itertools.accumulate(layers, initial=0)
        return max(map(stage_s, range(num_stages), firsts, layers)), unequal(layers)

    found = balanced_layers(stage_s, num_layers, most, least=least)
    assert found in allowed
    assert key(found) == min(key(layers) for layers in allowed)


@pytest.mark.parametrize(("num_stages", "devices"), [(2, 2), (3, 1)])
def test_stages_below_the_lowest_adapters_have_more_layers(num_stages: int, devices: int) -> None:
    deep = [replace(load(name, 64, 64), lowest_layer=8) for name in "ab"]
    whole = [replace(one, lowest_layer=0) for one in deep]
    found = choose_layers(deep, *models(num_stages, devices), None, max_tokens=8192)
    everyone = {layers: pace_s(layers, deep, devices) for layers in cuts(LAYERS, num_stages)}
    assert everyone[found] == pytest.approx(min(everyone.values()), rel=1e-3)
    before = choose_layers(whole, *models(num_stages, devices), None, max_tokens=8192)
    assert before[-1] < LAYERS // num_stages, "the head is worth layers here, so that the last stage has fewer"
    assert found[0] > before[0]
    assert everyone[found] < 0.95 * everyone[before]


# --------------------------------------------------------------------- memory


def fits(layers: tuple[int, ...], loads: list[TaskLoad], limit_bytes: int, tokens: float) -> bool:
    memory = replace(models(len(layers))[1], layers_per_stage=layers)
    stages = range(len(layers))
    return all(memory.peak_bytes(loads, tokens, len(layers) - stage, stage) <= limit_bytes for stage in stages)


@settings(max_examples=10)
@given(st.sampled_from([2, 3]), st.floats(0.3, 1.2))
def test_under_a_limit_the_fastest_of_the_cuts_that_fit_is_taken(num_stages: int, part: float) -> None:
    loads = [load("a", 256, 64)]
    tokens = 256  # 16,384 tokens of a batch in up to 64 micro-batches a stage, of one sequence at least
    limit = int(part * models(1)[1].peak_bytes(loads, tokens))
    fitting = [layers for layers in cuts(LAYERS, num_stages) if fits(layers, loads, limit, tokens)]
    found = choose_layers(loads, *models(num_stages), limit, max_tokens=8192)
    if fitting:
        assert found in fitting
        assert pace_s(found, loads) == pytest.approx(min(pace_s(layers, loads) for layers in fitting))


# ---------------------------------------------------------------------- edges


def test_every_virtual_stage_has_a_layer() -> None:
    heavy = [replace(load("a"), num_targets=10**6)]
    assert choose_layers(heavy, *models(4), None, max_tokens=8192)[-1] == 1
    assert choose_layers(heavy, *models(4), None, max_tokens=8192, num_chunks=2)[-1] == 2
    # Layers below all adapters are as dear as others where virtual stages are apart.
    deep = [replace(load("a"), lowest_layer=8)]
    apart = [choose_layers(one, *models(2), None, max_tokens=8192, num_chunks=2) for one in (deep, [load("a")])]
    assert apart[0] == apart[1] != choose_layers(deep, *models(2), None, max_tokens=8192)


def test_without_tasks_or_with_one_stage_layers_are_cut_equally() -> None:
    assert choose_layers([], *models(3), None, max_tokens=8192) == (6, 5, 5)
    assert choose_layers([load("a")], *models(1), 10, max_tokens=8192) == (16,)
    for layers, stages in itertools.combinations(range(12, 0, -1), 2):
        cut = balanced_layers(lambda stage, first, number: 0.1 * number, layers, (layers,) * stages)
        assert cut == split_layers(layers, stages)
