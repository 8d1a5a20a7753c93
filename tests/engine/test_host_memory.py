"""The memory that a process may have: the host's, or the limit of its container or job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from peft_mux.engine import allocator
from peft_mux.engine.allocator import memory_now
from peft_mux.planning.targets import device_memory_bytes

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder of control groups of a host of 64 GiB."""
    monkeypatch.setattr(allocator, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(allocator, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    return tmp_path / "cgroup"


def limit(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def be_in(groups: Path, *lines: str) -> None:
    groups.with_name("own").write_text("\n".join(lines) + "\n")


def test_a_job_has_the_least_of_its_own_limit_and_those_around_it(groups: Path) -> None:
    be_in(groups, "0::/slurm/job_7/step_0")
    limit(groups / "slurm" / "memory.max", "max")
    limit(groups / "slurm" / "job_7" / "memory.max", str(8 * GIB))
    limit(groups / "slurm" / "job_7" / "step_0" / "memory.max", str(16 * GIB))
    assert allocator.host_memory_bytes() == 8 * GIB


@pytest.mark.parametrize("path", ["/", "/../../docker/0123abcd"])
def test_a_container_that_sees_its_own_group_on_top_has_the_limit_of_that(groups: Path, path: str) -> None:
    be_in(groups, f"0::{path}")
    limit(groups / "memory.max", str(4 * GIB))
    assert allocator.host_memory_bytes() == 4 * GIB


def test_groups_of_version_1_are_those_of_the_memory_controller(groups: Path) -> None:
    be_in(groups, "5:cpu,cpuacct:/a", "4:memory:/b", "0::/")
    limit(groups / "memory" / "a" / "memory.limit_in_bytes", str(GIB))
    limit(groups / "memory" / "b" / "memory.limit_in_bytes", str(2 * GIB))
    assert allocator.host_memory_bytes() == 2 * GIB


@pytest.mark.parametrize("text", ["max", str(2**63 - 4096), "", "0", "many"])
def test_without_a_limit_below_it_the_memory_is_that_of_the_host(groups: Path, text: str) -> None:
    be_in(groups, "4:memory:/b", "0::/b", "nothing")
    assert allocator.host_memory_bytes() == 64 * GIB, "there are no control groups"
    limit(groups / "b" / "memory.max", text)
    assert allocator.host_memory_bytes() == 64 * GIB


def test_without_a_known_limit_nothing_is_reported(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError

    monkeypatch.setattr(psutil, "virtual_memory", fails)
    assert allocator.host_memory_bytes() is None
    assert device_memory_bytes(torch.device("cpu")) is None
    assert memory_now(torch.device("cpu")) is None


def test_plans_and_screens_compare_a_run_with_the_limit(groups: Path) -> None:
    be_in(groups, "0::/")
    limit(groups / "memory.max", str(4 * GIB))
    assert device_memory_bytes(torch.device("cpu")) == 4 * GIB
    now = memory_now(torch.device("cpu"))
    assert now is not None
    assert now[1] == 4 * GIB
