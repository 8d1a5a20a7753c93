"""A run is killed at random points, by step or place in a write: in the end its files are those of an unharmed run."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from peft_mux import storage
from tests.attacks.attack_lab import COUNT, sampled
from tests.attacks.run_files import Whole, assert_same_files
from tests.checkpoint.kill_cases import Helper, assert_resumes

pytestmark = [
    pytest.mark.slow,  # `tests/checkpoint/test_kill.py` has some that are taken always
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs child processes that can be killed"),
    pytest.mark.timeout(180),
]

NUM_STEPS = 8


def random_kill(number: int) -> dict[str, Any]:
    """Return when a run is killed: a while after a step was reported, or at a place of a write."""
    rng = random.Random(number)
    if number % 2:
        return {"kill_at": rng.randint(1, NUM_STEPS - 1), "delay": rng.uniform(0.0, 0.04)}
    point = rng.choice(storage.CRASHPOINTS)
    return {"crashpoint": f"{point}:{rng.randint(1, 3 if point == 'after_move_aside' else 9)}"}


@pytest.mark.parametrize("number", sampled(range(30), fast=0, slow=10))
def test_a_run_killed_at_a_random_point_ends_in_the_same_files(
    number: int, helper: Helper, whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    killed = helper.run(folder, **random_kill(number))
    if killed.final is None:
        assert_resumes(helper, folder, killed, whole.outcome)
    else:  # it was over before its killer came
        assert killed.final == whole.outcome.final
    assert_same_files(folder, whole)


@pytest.mark.parametrize("seed", sampled(range(6), fast=0, slow=1))
def test_a_run_killed_again_and_again_ends_in_the_same_files(
    seed: int, helper: Helper, whole: Whole, tmp_path: Path, record_property: Any
) -> None:
    rng = random.Random(100 + seed)
    folder, num_kills = tmp_path / "run", 0
    for _ in range(5):
        is_saved = bool(list((folder / "state").glob("run-*.json")))
        killed = helper.run(folder, resume=is_saved, **random_kill(rng.randrange(1000)))
        if killed.signal != signal.SIGKILL:
            break
        num_kills += 1
        assert all(whole.outcome.steps[step] == entry for step, entry in killed.steps.items())
    is_saved = bool(list((folder / "state").glob("run-*.json")))
    last = helper.run(folder, resume=is_saved)
    assert last.final == whole.outcome.final
    assert_same_files(folder, whole)
    assert num_kills
    record_property(COUNT, num_kills)


def test_a_run_killed_before_its_first_save_trains_again_in_its_folder(
    helper: Helper, whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    killed = helper.run(folder, kill_at=1, delay=0.0)
    assert killed.signal == signal.SIGKILL
    assert helper.run(folder).final == whole.outcome.final
    assert_same_files(folder, whole)
