"""Where the processes of one attempt of torchrun exchange their addresses."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from accelerate import PartialState


def meet(*, is_cpu: bool, timeout_s: int) -> None:
    """Let the workers of one attempt of torchrun exchange addresses apart from those of the attempts before.

    torchrun keeps its store for all attempts. With torch 2.13, restarted workers find the addresses of dead ones there,
    and wait for them. No variable has the same number of the attempt on all nodes, so rank 0 names the attempt.

    Args:
        is_cpu: whether the processes train on CPUs.
        timeout_s: seconds that a process waits for the others.
    """
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shares_store or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or dist.is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("peft_mux", dist.TCPStore(address, port, is_master=False, timeout=timeout))
    attempt = uuid.uuid4().hex
    if rank > 0:
        # Answers to words of an earlier attempt have other names.
        store.set(f"hello/{rank}", attempt)
        attempt = store.get(f"welcome/{attempt}").decode()
        store.set(f"met/{attempt}/{rank}", "")
    else:
        missing, ends = set(range(1, world_size)), time.monotonic() + timeout_s
        while missing and time.monotonic() < ends:  # else the next meeting says who is missing
            for other in tuple(missing):
                if store.check([f"hello/{other}"]):
                    store.set(f"welcome/{store.get(f'hello/{other}').decode()}", attempt)
                if store.check([f"met/{attempt}/{other}"]):
                    missing.remove(other)
            time.sleep(0.02)
    # accelerate chooses the backend, and uses the group that it finds later on.
    PartialState(cpu=is_cpu, timeout=timeout, store=dist.PrefixStore(attempt, store))
