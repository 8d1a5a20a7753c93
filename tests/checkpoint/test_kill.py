"""A run that is killed, at a moment of chance or at the worst places of a write, resumes to the same last bit."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from peft_mux import storage
from tests.checkpoint.kill_cases import Helper, Outcome, assert_resumes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs child processes that can be killed")


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    """Start the process that forks."""
    started = Helper(tmp_path_factory.mktemp("helper"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def whole(helper: Helper, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that is never killed."""
    outcome = helper.run(tmp_path_factory.mktemp("whole") / "run")
    assert (outcome.signal, outcome.exit) == (0, 0)
    assert list(outcome.steps) == [str(step) for step in range(1, 9)]
    assert outcome.final is not None
    assert [status for _, status in outcome.final.values()] == ["succeeded"] * 3
    return outcome


# The count is that of writes of the place: the first ones fall into the first save, the others between later ones.
CRASHES = [
    "before_fill:1",
    "after_fill:9",
    "after_manifest:4",
    "after_fsync:12",
    "after_move_aside:4",
    "after_rename:7",
    "after_cleanup:10",
]


FAST_CRASHES = ("before_fill:1", "after_move_aside:4", "after_rename:7")


def test_every_crash_point_has_its_case() -> None:
    assert {crash.partition(":")[0] for crash in CRASHES} == set(storage.CRASHPOINTS)


@pytest.mark.parametrize(
    "crash",
    [crash if crash in FAST_CRASHES else pytest.param(crash, marks=pytest.mark.slow) for crash in CRASHES],
)
def test_a_run_killed_in_a_write_resumes_to_the_same_bits(
    crash: str, helper: Helper, whole: Outcome, tmp_path: Path
) -> None:
    killed = helper.run(tmp_path / "run", crashpoint=crash)
    assert_resumes(helper, tmp_path / "run", killed, whole)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_run_killed_at_a_moment_of_chance_resumes_to_the_same_bits(
    seed: int, helper: Helper, whole: Outcome, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    # The step is reported before it is evaluated and saved; the delay lets the kill fall into either.
    killed = helper.run(tmp_path / "run", kill_at=rng.randint(2, 6), delay=rng.uniform(0.0, 0.03))
    assert_resumes(helper, tmp_path / "run", killed, whole)


def test_a_run_killed_twice_resumes_to_the_same_bits(helper: Helper, whole: Outcome, tmp_path: Path) -> None:
    assert helper.run(tmp_path / "run", kill_at=5, delay=0.0).signal == signal.SIGKILL
    # The second one is killed in the first save after the resumption.
    killed = helper.run(tmp_path / "run", resume=True, crashpoint="after_manifest:2")
    assert_resumes(helper, tmp_path / "run", killed, whole)
