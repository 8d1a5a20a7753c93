"""Measures the link between processes: how long an empty message takes, and how fast a long one goes."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from peft_mux.scheduler.costs.link import Link

_SMALL_ELEMENTS = 2
_LARGE_ELEMENTS = 2**22
_REPEATS = 7


def measure_link(device: torch.device | str) -> Link | None:
    """Return the link from rank 0 to rank 1 of the default process group; `None` where there is no second process.

    Every rank of the group must call this, and each gets the same answer: half of the time of a message there and back.

    Args:
        device: the device on which messages lie, one that the group's backend serves.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    device = torch.device(device)
    small_s, large_s = (_one_way_s(device, count) for count in (_SMALL_ELEMENTS, _LARGE_ELEMENTS))
    found = torch.tensor([small_s, large_s], device=device, dtype=torch.float64)
    # One answer for all: with times of their own, processes would make different plans.
    dist.broadcast(found, src=0)
    small_s, large_s = found.tolist()
    num_bytes = 4 * (_LARGE_ELEMENTS - _SMALL_ELEMENTS)
    # The difference of the two, so that the latency is not counted in the bandwidth as well.
    return Link(latency_s=small_s, bytes_per_s=num_bytes / max(large_s - small_s, 1e-9))


def _one_way_s(device: torch.device, count: int) -> float:
    """Return the median seconds of a message of `count` fp32 numbers from rank 0 to rank 1; 0 on other ranks."""
    message = torch.zeros(count, device=device)
    taken = []
    for _ in range(_REPEATS):
        dist.barrier()  # else the wait for a process that comes late would count
        start_s = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        elif dist.get_rank() == 1:
            dist.recv(message, 0)
            dist.send(message, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start_s) / 2)
    # The first message opens the connection.
    return statistics.median(taken[1:]) if dist.get_rank() == 0 else 0.0
