"""The link between two processes is measured once and told to both."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from peft_mux.profiling.link import measure_link


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
