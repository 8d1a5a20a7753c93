"""A run is killed with SIGKILL, in a write or at any moment: resumed, it ends in the bits and files of a whole run."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from peft_mux import storage
from tests.attacks.attack_lab import COUNT, sampled
from tests.attacks.kill_cases import NUM_STEPS, Whole, has_saved, run

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs child processes that can be killed"),
    pytest.mark.timeout(180),
]

# Each place comes with a number: the run is killed at that write. The first writes belong to the first save.
CRASHES = [
    "after_move_aside:4",
    "before_fill:1",
    "after_fill:9",
    "after_manifest:4",
    "after_fsync:12",
    "after_rename:7",
    "after_cleanup:10",
]


def test_every_crash_point_has_its_case() -> None:
    assert {crash.partition(":")[0] for crash in CRASHES} == set(storage.CRASHPOINTS)


@pytest.mark.parametrize("crash", sampled(CRASHES, fast=1))
def test_a_run_killed_in_a_write_resumes_to_the_same_bits(crash: str, whole: Whole, tmp_path: Path) -> None:
    killed = run(tmp_path / "run", crashpoint=crash)
    whole.assert_resumes(tmp_path / "run", killed)


def at_random(seed: int) -> dict[str, Any]:
    """Return when a run is killed: a while after a step was reported, so before it is evaluated and saved, or in it."""
    rng = random.Random(seed)
    return {"kill_at": rng.randint(1, NUM_STEPS - 1), "delay": rng.uniform(0.0, 0.04)}


@pytest.mark.parametrize("seed", sampled(range(16), fast=1, ci=3))
def test_a_run_killed_at_a_random_moment_resumes_to_the_same_bits(seed: int, whole: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = run(folder, **at_random(seed))
    if killed.final is None:
        whole.assert_resumes(folder, killed)
    else:  # it was over before its killer came
        whole.assert_ended_alike(folder, killed)


@pytest.mark.parametrize("seed", sampled(range(6), fast=0, ci=1))
def test_a_run_killed_again_and_again_ends_in_the_same_files(
    seed: int, whole: Whole, tmp_path: Path, record_property: Any
) -> None:
    rng = random.Random(100 + seed)
    folder, num_kills = tmp_path / "run", 0
    for number in range(5):
        # Every second time in a write, as the first save after a resumption.
        how = at_random(rng.randrange(1000)) if number % 2 else {"crashpoint": f"after_manifest:{rng.randint(1, 3)}"}
        killed = run(folder, resume=has_saved(folder), **how)
        if killed.exit_code != -signal.SIGKILL:
            break
        num_kills += 1
        whole.assert_began_alike(killed)
    whole.assert_ended_alike(folder, run(folder, resume=has_saved(folder)))
    assert num_kills
    record_property(COUNT, num_kills)


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_trains_again_in_its_folder(whole: Whole, tmp_path: Path) -> None:
    assert run(tmp_path / "run", kill_at=1).exit_code == -signal.SIGKILL
    whole.assert_ended_alike(tmp_path / "run", run(tmp_path / "run"))
