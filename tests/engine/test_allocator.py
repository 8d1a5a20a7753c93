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


@pytest.mark.skipif(not IS_GLIBC, reason="the C library is not glibc")
@pytest.mark.skipif("[madvise]" not in HUGE_PAGES, reason="the system makes no huge pages, or without being asked")
def test_what_is_allocated_while_training_is_in_huge_pages() -> None:
    kept, limited = (_huge_page_bytes(limit) for limit in (False, True))
    assert kept > 100 * 2**20, "of 160 MB"
    assert limited == 0, "where a process may hold so many addresses and no more, none are held back"


def _huge_page_bytes(is_limited: bool) -> int:
    """Return how much of the memory that a process allocates while it trains is in huge pages."""
    code = HUGE_CHILD.replace("IS_LIMITED", str(is_limited))
    return int(run_code(code))


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


class Library:
    """Stands for a broken C library; records the settings that it gets."""

    def __init__(self) -> None:
        self.settings: dict[int, int] = {}

    gnu_get_libc_version = None

    def mallopt(self, name: int, value: int) -> None:
        self.settings[name] = value

    def malloc_trim(self, pad: int) -> None:
        pass


def test_settings_are_put_back_if_asking_for_huge_pages_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("no other system has these settings")
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)

    def ask(own: Library) -> None:
        assert set(own.settings.values()) == {0, -1}
        raise OSError("no memory for it")

    monkeypatch.setattr(allocator, "_ask_for_huge_pages", ask)
    with pytest.raises(OSError, match="no memory for it"), keeping_freed_memory(torch.device("cpu")):
        raise AssertionError("the block has begun")
    assert set(library.settings.values()) == {65_536, 128 * 2**10}


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
