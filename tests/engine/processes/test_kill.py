"""A process that is killed at any moment: the others end with an error, and any layout resumes from there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from peft_mux import storage
from tests.engine.processes.cases import Outcome, Part, assert_as_one, launch, named_in, values
from tests.parallel.replicas import layout_cases as cases
from tests.parallel.replicas.layout_cases import Watcher, saved_backbone, train_five

_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Kill:
    """Which process is killed when.

    Attributes:
        rank: of the process.
        step: at whose beginning, counted from 0, the killer starts.
        delay_s: that the killer waits.
        crashpoint: of a write at which the process dies instead, as `PEFT_MUX_CRASHPOINT` has it.
    """

    rank: int
    step: int = 0
    delay_s: float = 0.0
    crashpoint: str | None = None


def killed(rank: int, folder: Path, model: str, arguments: dict[str, Any], kill: Kill) -> Part:
    """Train with checkpoints; one process is killed on the way."""
    acts = {}
    if rank == kill.rank and kill.crashpoint is not None:
        os.environ["PEFT_MUX_CRASHPOINT"] = kill.crashpoint
    elif rank == kill.rank:
        # The last step waits for the killer, so that it also works on fast machines.
        acts = {kill.step: lambda trainer: _start_killer(kill.delay_s), 7: lambda trainer: time.sleep(_PATIENCE_S)}
    return cases.train(
        folder, model, cases.tasks_of("llama"), watcher=Watcher(at_begin=acts), save_steps=2, **arguments
    )


def go_on(rank: int, folder: Path, model: str, arguments: dict[str, Any], is_saved: bool) -> Part:
    """Resume the run of a folder; start from the beginning if nothing was saved."""
    return cases.train(folder, model, cases.tasks_of("llama"), resume=is_saved, save_steps=2, **arguments)


def _start_killer(delay_s: float) -> None:
    """Let another process kill this one after a delay."""
    subprocess.Popen(["sh", "-c", f"sleep {delay_s:.3f}; kill -KILL {os.getpid()}"])


pytestmark = pytest.mark.distributed

LIMIT_S = 90.0
"""For all processes of a launch together; more than the time limit of one that waits for another."""


LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {}),
    (2, {"pipeline_parallel_size": 2}),
    (4, {"pipeline_parallel_size": 2}),
    (3, {"replicas": "<1,2>, <1,1>"}),
)
"""Processes and arguments."""
CRASHPOINTS = tuple(name for name in storage.CRASHPOINTS if name != "after_move_aside")
"""Places of a write that every new folder passes."""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_backbone("llama", tmp_path_factory.mktemp("backbone") / "llama")


@pytest.fixture(scope="module")
def whole(backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Part:
    """The run of one process that is never killed."""
    return train_five(0, tmp_path_factory.mktemp("whole"), backbone, "llama", {})


def chance(number: int, world_size: int) -> Kill:
    """Return a rank and a moment: any moment of a step, or, every third time, a place of a write."""
    rng = random.Random(number)
    if number % 3 == 2:
        return Kill(rank=0, crashpoint=f"{rng.choice(CRASHPOINTS)}:{rng.randint(1, 14)}")
    return Kill(rank=rng.randrange(world_size), step=rng.randint(1, 6), delay_s=rng.uniform(0.0, 0.06))


def assert_ended_cleanly(outcomes: list[Outcome], killed: int) -> None:
    """Assert that one process was killed, and that every other one names it in its error."""
    for rank, outcome in enumerate(outcomes):
        if rank == killed:
            assert outcome.exit_code == -signal.SIGKILL, f"rank {rank} was not killed: {outcome}"
            assert outcome.error == "", "it was killed by the test's limit"
            continue
        assert outcome.exit_code == 0, f"rank {rank}: {outcome}"
        assert outcome.error.startswith("ProcessError"), f"rank {rank}: {outcome.error}"
        assert named_in(outcome.error) == {killed}, f"rank {rank} blames another one: {outcome.error}"
        assert "train(resume_from_checkpoint=True)" in outcome.error


def assert_whole_files(folder: Path) -> int:
    """Assert that everything not marked as unfinished is complete; return the step to resume from, 0 for none."""
    finished = [path for path in folder.rglob("*") if not any(part.startswith(".tmp-") for part in path.parts)]
    for path in finished:
        if path.name == "manifest.json":
            storage.verify_folder(path.parent)
        elif path.suffix == ".safetensors":
            load_file(path)  # refuses a file that is cut off
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    records = sorted((folder / "state").glob("run-*.json"))
    steps = [storage.unsealed_json(path)["run_step"] for path in records]
    return max(steps, default=0)


def assert_survives(
    kill: Kill, before: tuple[int, Any], after: tuple[int, Any], backbone: str, whole: Part, folder: Path
) -> None:
    """Kill a process of a run, and resume with another layout."""
    outcomes = launch(before[0], killed, folder, backbone, before[1], kill, limit_s=LIMIT_S)
    assert_ended_cleanly(outcomes, kill.rank)
    step = assert_whole_files(folder)
    parts = values(launch(after[0], go_on, folder, backbone, after[1], bool(step), limit_s=LIMIT_S))
    assert all(part.losses == parts[0].losses for part in parts)
    assert_as_one(parts[0], whole, from_step=step)
    assert assert_whole_files(folder) == whole.step
    left_over = [path.name for path in folder.rglob("*") if path.name.startswith((".tmp-", ".old-"))]
    assert not left_over


@pytest.mark.slow
def test_a_writer_killed_in_a_write_costs_only_the_steps_since_the_last_save(
    backbone: str, whole: Part, tmp_path: Path
) -> None:
    assert_survives(Kill(rank=0, crashpoint="after_manifest:8"), LAYOUTS[3], LAYOUTS[1], backbone, whole, tmp_path)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=pytest.mark.slow if number in (1, 6, 7) else pytest.mark.nightly)
        for number in range(20)
    ],
)
def test_a_process_killed_at_a_random_moment_costs_only_the_steps_since_the_last_save(
    number: int, backbone: str, whole: Part, tmp_path: Path
) -> None:
    before = LAYOUTS[number % len(LAYOUTS)]
    after = LAYOUTS[(number + number // len(LAYOUTS)) % len(LAYOUTS)]  # the same four times, then others
    assert_survives(chance(number, before[0]), before, after, backbone, whole, tmp_path)
