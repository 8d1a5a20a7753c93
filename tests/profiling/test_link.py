"""The link between two processes is measured once and told to both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from peft_mux.planning.profiling.links import fitted_overlap, measure_link, measure_overlap
from peft_mux.scheduler.costs.hardware import MOST_SLOWDOWN, Overlap
from peft_mux.scheduler.subgraphs import TimedSubgraph, turns_timeline


def _measure(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    link = measure_link("cpu")
    assert link is not None
    Path(folder, f"{rank}.json").write_text(json.dumps([link.latency_s, link.bytes_per_s]), encoding="utf-8")
    dist.destroy_process_group()


def test_two_processes_learn_the_same_link(tmp_path: Path) -> None:
    multiprocessing.spawn(_measure, args=(str(tmp_path),), nprocs=2)  # type: ignore[attr-defined]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second
    latency_s, bytes_per_s = first
    assert 0 < latency_s < 1
    assert 1e6 < bytes_per_s < 1e13


def test_one_process_has_no_link() -> None:
    assert measure_link(torch.device("cpu")) is None


# --------------------------------------------------------------- passes in turns


def _measure_turns(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    overlap = measure_overlap("cpu", 64)
    assert overlap is not None
    Path(folder, f"{rank}.json").write_text(json.dumps([overlap.skew, overlap.slowdown, overlap.turn_s]))
    dist.destroy_process_group()


def test_two_processes_learn_the_same_of_turns(tmp_path: Path) -> None:
    multiprocessing.spawn(_measure_turns, args=(str(tmp_path),), nprocs=2)  # type: ignore[attr-defined]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert 0 < first[2] < 1
    assert measure_overlap("cpu", 64) is None, "alone"


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
