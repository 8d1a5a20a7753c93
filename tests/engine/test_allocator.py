"""Freed memory stays in the process while it trains, and goes back at the end; results do not change."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from peft_mux.engine import allocator
from peft_mux.engine.allocator import keeping_freed_memory

CHILD = """
import resource, torch
from contextlib import nullcontext
from peft_mux.engine.allocator import keeping_freed_memory

def faults(context):
    with context:
        for turn in range(4):
            if turn == 1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            blocks = [torch.ones(1_000_000) for _ in range(40)]  # 4 MB each, as activations are
            del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(nullcontext()), faults(keeping_freed_memory(torch.device("cpu"))))
"""


@pytest.mark.skipif(allocator._glibc() is None, reason="the C library is not glibc")
def test_memory_that_is_kept_costs_no_page_faults_the_next_time() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    default, kept = map(int, done.stdout.split())
    assert default > 10_000, "the C library gave nothing back, so this proves nothing"
    assert kept < default / 10


def test_another_device_or_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected() -> None:
        raise AssertionError("asked for the C library")

    with monkeypatch.context() as patch:
        patch.setattr(allocator, "_glibc", unexpected)
        with keeping_freed_memory(torch.device("cuda")):
            pass
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    with keeping_freed_memory(torch.device("cpu")):
        assert torch.ones(3).sum() == 3
