"""A run that is killed, at a moment of chance or at the worst places of a write, resumes to the same last bit.

One helper process imports the package, trains nothing itself, and forks for every run; so a resumed run is a process
that has seen nothing of the killed one but its folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peft_mux import storage
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs child processes that can be killed")

SCRIPT = '''
import json, os, signal, sys, time
from pathlib import Path
from tests.invariants import mux_lab as lab
from peft_mux.task import EarlyStopping

def tasks():
    return [
        lab.small_task("epochs", data_seed=1, lora_dropout=0.3, max_steps=8, lr_scheduler_type="cosine"),
        lab.small_task("short", data_seed=2, length=9, rank=2, max_steps=5),
        # Evaluated and better at every step, so that its "best" folder is replaced again and again.
        lab.small_task("stops", data_seed=3, length=9, max_steps=6, eval_dataset=lab.rows(3, 2, 9, 9), eval_steps=1,
                       learning_rate=1e-3, early_stopping=EarlyStopping(patience=5)),
    ]

class Journal(lab.Recorder):
    """Tells of every step while the run goes on: a killed process has no last words."""

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        entry = {name: [repr(self.losses[name][-1]), self.digests[name][-1]] for name in self._running}
        os.write(self.pipe, (json.dumps([state.global_step, entry]) + "\\n").encode())

def child(job, pipe):
    if job.get("crashpoint"):
        os.environ["PEFT_MUX_CRASHPOINT"] = job["crashpoint"]
    journal = Journal()
    journal.pipe = pipe
    run = lab.train(tasks(), Path(job["folder"]), recorder=journal, resume=job["resume"],
                    save_strategy="steps", save_steps=2, save_total_limit=2)
    final = {r.name: [lab.digest(run.weights(r.name)), r.status.value] for r in run.trainer.table}
    os.write(pipe, (json.dumps(["final", final]) + "\\n").encode())

def obey(job):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(job, writer)
            status = 0
        except BaseException as error:
            os.write(2, repr(error).encode())
        finally:
            os._exit(status)
    os.close(writer)
    steps, final = {}, None
    with os.fdopen(reader) as lines:
        for line in lines:
            if not line.endswith("\\n"):
                break
            key, entry = json.loads(line)
            if key == "final":
                final = entry
                continue
            steps[key] = entry
            if key == job.get("kill_at"):
                time.sleep(job["delay"])
                os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return {"signal": status & 127, "exit": status >> 8, "steps": steps, "final": final}

# Building a trainer imports what is imported late, once for all runs.
lab.make_trainer(tasks(), Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(obey(json.loads(line))), flush=True)
'''


@dataclass(frozen=True)
class Outcome:
    """How a forked run ended.

    Attributes:
        signal: that killed it; 0 for none.
        exit: status of the process.
        steps: losses and digests of weights and optimizer state, by run step and task.
        final: digest of the weights and status of each task; `None` unless it came to its end.
    """

    signal: int
    exit: int
    steps: dict[str, dict[str, list[str]]]
    final: dict[str, list[str]] | None


class Helper:
    """A process that forks runs."""

    def __init__(self, folder: Path) -> None:
        script = folder / "forks_runs.py"
        script.write_text(SCRIPT, encoding="utf-8")
        paths = [str(ROOT)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environment.pop("PEFT_MUX_CRASHPOINT", None)
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder / "unused")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, folder: Path, **job: Any) -> Outcome:
        """Return what becomes of one run; runs one after another."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), "resume": False, **job}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):  # "ready", and what libraries print
            line = self.process.stdout.readline()
        assert line, "the helper process has died"
        return Outcome(**json.loads(line))

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


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


def assert_resumes(helper: Helper, folder: Path, killed: Outcome, whole: Outcome) -> None:
    """Assert that the killed run had gone as it should, and that a resumed one ends in the same bits."""
    assert killed.signal == signal.SIGKILL, "it was not killed"
    assert killed.final is None
    assert all(whole.steps[step] == entry for step, entry in killed.steps.items())
    is_saved = bool(list((folder / "state").glob("run-*.json")))
    resumed = helper.run(folder, resume=is_saved)
    assert (resumed.signal, resumed.exit) == (0, 0)
    # It begins somewhere after the last save, and is equal from there on in losses, weights and moments.
    assert resumed.steps == {step: whole.steps[step] for step in resumed.steps}
    assert resumed.final == whole.final
    first, last = min(map(int, resumed.steps)), max(map(int, killed.steps))
    assert first <= last + 1, "a step was left out"
    assert is_saved == (first > 1)
    left_over = [path.name for path in folder.rglob("*") if path.name.startswith((".tmp-", ".old-"))]
    assert not left_over
    for manifest in folder.rglob("manifest.json"):
        storage.verify_folder(manifest.parent)


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


def test_every_crash_point_has_its_case() -> None:
    assert {crash.partition(":")[0] for crash in CRASHES} == set(storage.CRASHPOINTS)


@pytest.mark.parametrize("crash", CRASHES)
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
    # The step is said before it is evaluated and saved; the delay lets the kill fall into either.
    killed = helper.run(tmp_path / "run", kill_at=rng.randint(2, 6), delay=rng.uniform(0.0, 0.03))
    assert_resumes(helper, tmp_path / "run", killed, whole)


def test_a_run_killed_twice_resumes_to_the_same_bits(helper: Helper, whole: Outcome, tmp_path: Path) -> None:
    assert helper.run(tmp_path / "run", kill_at=5, delay=0.0).signal == signal.SIGKILL
    # The second one is killed in the first save after the resumption.
    killed = helper.run(tmp_path / "run", resume=True, crashpoint="after_manifest:2")
    assert_resumes(helper, tmp_path / "run", killed, whole)
