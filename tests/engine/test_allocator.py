"""Freed memory stays in the process while it trains, and goes back at the end; results do not change."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from peft_mux.engine import allocator
from peft_mux.engine.allocator import keeping_freed_memory, use_expandable_segments
from tests.children import run_code

CHILD = """
import resource, torch
from contextlib import nullcontext
from peft_mux.engine.allocator import keeping_freed_memory

def faults(context):
    with context:
        for turn in range(4):
            if turn == 1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            # 4 MB each, as activations are, and one as logits of a large vocabulary
            blocks = [torch.ones(1_000_000) for _ in range(40)] + [torch.ones(20_000_000)]
            del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(nullcontext()), faults(keeping_freed_memory(torch.device("cpu"))))
"""

HUGE_CHILD = """
import re, resource, torch
from pathlib import Path
from peft_mux.engine.allocator import keeping_freed_memory

if IS_LIMITED:
    resource.setrlimit(resource.RLIMIT_AS, (64 * 2**30, resource.RLIM_INFINITY))
with keeping_freed_memory(torch.device("cpu")):
    blocks = [torch.ones(1_000_000) for _ in range(40)]
    print(1024 * int(re.search(r"AnonHugePages: *([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text())[1]))
"""
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
IS_GLIBC = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
HUGE_PAGES = _SETTING.read_text(encoding="ascii") if _SETTING.exists() else "[never]"


@pytest.mark.slow
@pytest.mark.skipif(not IS_GLIBC, reason="the C library is not glibc")
def test_memory_that_is_kept_costs_no_page_faults_the_next_time() -> None:
    default, kept = map(int, run_code(CHILD).split())
    assert default > 10_000, "the C library gave nothing back, so this proves nothing"
    assert kept < default / 10


@pytest.mark.slow
@pytest.mark.skipif(not IS_GLIBC, reason="the C library is not glibc")
@pytest.mark.skipif("[madvise]" not in HUGE_PAGES, reason="the system makes no huge pages, or without being asked")
def test_what_is_allocated_while_training_is_in_huge_pages() -> None:
    kept, limited = (int(run_code(HUGE_CHILD.replace("IS_LIMITED", is_limited))) for is_limited in ("False", "True"))
    assert kept > 100 * 2**20, "of 160 MB"
    assert limited == 0, "where a process may hold so many addresses and no more, none are held back"


def test_another_device_or_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(name: object) -> None:
        raise AssertionError("asked for the C library")

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", unexpected)
        with keeping_freed_memory(torch.device("cuda")):
            pass
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with keeping_freed_memory(torch.device("cpu")):
        assert torch.ones(3).sum() == 3


@pytest.mark.skipif(not IS_GLIBC, reason="the C library is not glibc")
def test_a_system_that_hides_how_it_counts_memory_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It exists and cannot be read, as in some containers.
    monkeypatch.setattr(allocator, "_OVERCOMMIT", tmp_path)
    with keeping_freed_memory(torch.device("cpu")):
        assert torch.ones(3).sum() == 3


@pytest.mark.parametrize(
    ("environment", "platform", "wanted"),
    [
        ({}, "linux", ["expandable_segments:True"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "linux", []),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "linux", []),
        ({}, "win32", []),
    ],
)
def test_segments_of_cuda_are_expandable_unless_the_user_has_set_them(
    environment: dict[str, str], platform: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    use_expandable_segments()
    assert settings == wanted
