"""Measured links: what messages and sums take, and how far they are hidden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from peft_mux.planning.profiling.measured_links import fitted_costs, fitted_overlap, measure_link, measure_overlap
from peft_mux.scheduler.costs.hardware import MOST_SLOWDOWN, Overlap
from peft_mux.scheduler.costs.profile import Profile, profile_text
from peft_mux.scheduler.subgraphs import TimedSubgraph, turns_timeline
from tests.engine.processes.cases import launch, values
from tests.invariants.mux_lab import make_trainer
from tests.parallel.replicas import layout_cases


def _measure_link(rank: int) -> tuple[tuple[float, float], tuple[float, float, float]]:
    dist.init_process_group("gloo")
    link, overlap = measure_link("cpu"), measure_overlap("cpu", 64)
    assert link is not None
    assert overlap is not None
    return (link.latency_s, link.bytes_per_s), (overlap.skew, overlap.slowdown, overlap.turn_s)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_learn_the_same_of_their_link_and_of_turns() -> None:
    first, second = values(launch(2, _measure_link))
    assert first == second
    (latency_s, bytes_per_s), (_, _, turn_s) = first
    assert 0 < latency_s < 1
    assert 1e6 < bytes_per_s < 1e13
    assert 0 < turn_s < 1


def test_one_process_has_no_link() -> None:
    assert measure_link(torch.device("cpu")) is None
    assert measure_overlap("cpu", 64) is None


# --------------------------------------------------------------- passes in turns


@pytest.mark.parametrize(
    "known", [Overlap(), Overlap(skew=0.3), Overlap(slowdown=0.5), Overlap(0.2, 0.7, 1e-4), Overlap(turn_s=1e-4)]
)
def test_what_the_simulator_would_have_measured_is_found_again(known: Overlap) -> None:
    compute_s, sum_s = 2e-3, 1e-3
    passes = [(TimedSubgraph(compute_s, sum_s),) * 8] * 2
    apart_s, turns_s = (turns_timeline(passes, known, in_turns=way).makespan_s / 16 for way in (False, True))
    found = fitted_overlap(compute_s, sum_s, apart_s, turns_s, known.turn_s)
    assert found.skew == pytest.approx(known.skew, abs=1e-6)
    assert found.slowdown == pytest.approx(known.slowdown, abs=0.01)
    assert turns_timeline(passes, found).makespan_s == pytest.approx(16 * turns_s, rel=0.01)


_NUM_SUMS = 8
PASSES = [(*[TimedSubgraph(2e-3, 1e-3)] * _NUM_SUMS, TimedSubgraph(1e-3, 0.0))] * 2
ALONE = Overlap(skew=0.1, slowdown=0.3)


@pytest.mark.parametrize(("host_s", "turn_s"), [(0.0, 0.0), (5e-4, 4e-4)])
def test_the_costs_of_turns_that_the_simulator_would_have_measured_are_found_again(
    host_s: float, turn_s: float
) -> None:
    spread_s = host_s * _NUM_SUMS / len(PASSES[0])
    real = [tuple(one._replace(compute_s=one.compute_s + spread_s) for one in times) for times in PASSES]
    known = replace(ALONE, turn_s=turn_s)
    # Waiting for the slowest rank grows with the computing before it, the host's part included.
    apart_s = turns_timeline(PASSES, ALONE, in_turns=False).makespan_s + len(PASSES) * _NUM_SUMS * host_s
    found = fitted_costs(ALONE, PASSES, apart_s, turns_timeline(real, known).makespan_s, num_sums=_NUM_SUMS)
    assert found.host_s == pytest.approx(host_s, abs=1e-9)
    assert turns_timeline(real, found).makespan_s == pytest.approx(turns_timeline(real, known).makespan_s, rel=1e-3)
    assert (found.skew, found.slowdown) == (ALONE.skew, ALONE.slowdown)


def test_passes_that_are_faster_than_predicted_take_nothing_off_and_turns_beyond_prediction_stop_computing() -> None:
    assert fitted_overlap(1e-3, 1e-3, 2e-3, 1.0, 0.0).slowdown == pytest.approx(MOST_SLOWDOWN, abs=0.01)
    known = replace(ALONE, turn_s=1e-4)
    assert fitted_costs(known, PASSES, 0.0, 0.0, num_sums=_NUM_SUMS) == known


def _measure_turns(rank: int, folder: Path, arguments: dict[str, Any]) -> Profile:
    tasks, backbone = layout_cases.tasks_of("llama"), layout_cases.backbone("llama")
    trainer = make_trainer(tasks, folder, model=backbone, **arguments)
    return trainer.measure_profile(budget_s=0.2)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_shards_learn_the_same_of_their_passes(tmp_path: Path) -> None:
    first, second = values(launch(2, _measure_turns, tmp_path, {"tensor_parallel_size": 2}, limit_s=120))
    assert first.overlap is not None
    assert first.overlap == second.overlap
    assert first.overlap.turn_s > 0
    assert f"the host takes {1e6 * first.overlap.host_s:,.0f} us more" in profile_text(first)


@pytest.mark.slow
@pytest.mark.distributed
def test_replicas_that_hold_whole_layers_measure_turns_turns_of_products_alone(tmp_path: Path) -> None:
    first, _ = values(launch(2, _measure_turns, tmp_path, {}, limit_s=120))
    assert first.overlap is not None
    assert first.overlap.host_s == 0
