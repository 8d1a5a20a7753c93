"""The link between two processes is measured once and told to both."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from peft_mux.planning.profiling.links import fitted_overlap, measure_link, measure_overlap
from peft_mux.scheduler.costs.hardware import MOST_SLOWDOWN, Overlap
from peft_mux.scheduler.subgraphs import TimedSubgraph, turns_timeline
from tests.engine.processes.cases import launch, values


def _measure(rank: int) -> tuple[tuple[float, float], tuple[float, float, float]]:
    dist.init_process_group("gloo")
    link, overlap = measure_link("cpu"), measure_overlap("cpu", 64)
    assert link is not None
    assert overlap is not None
    return (link.latency_s, link.bytes_per_s), (overlap.skew, overlap.slowdown, overlap.turn_s)


@pytest.mark.distributed
def test_two_processes_learn_the_same_of_their_link_and_of_turns() -> None:
    first, second = values(launch(2, _measure))
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


def test_turns_that_took_longer_than_anything_predicts_stop_all_computing() -> None:
    assert fitted_overlap(1e-3, 1e-3, 2e-3, 1.0, 0.0).slowdown == pytest.approx(MOST_SLOWDOWN, abs=0.01)
