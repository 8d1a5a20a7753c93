"""Runs in processes of their own that can be killed, and what must hold when they are resumed.

One helper process imports the package, trains nothing itself, and forks for every run; so a resumed run is a process
that has seen nothing of the killed one but its folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft_mux import storage
from tests.paths import ROOT

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
    """Reports every step while the run continues: a killed process has no last words."""

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        entry = {name: [repr(self.losses[name][-1]), self.digests[name][-1]] for name in self._running}
        os.write(self.pipe, (json.dumps([state.global_step, entry]) + "\\n").encode())
        while self.waits_for and state.global_step == 3 and not Path(self.waits_for).exists():
            time.sleep(0.01)

def child(job, pipe):
    if job.get("crashpoint"):
        os.environ["PEFT_MUX_CRASHPOINT"] = job["crashpoint"]
    journal = Journal()
    journal.pipe, journal.waits_for = pipe, job.get("waits_for")
    run = lab.train(tasks(), Path(job["folder"]), recorder=journal, resume=job["resume"],
                    save_strategy="steps", save_steps=2, save_total_limit=2,
                    logging_strategy="steps", logging_steps=1)
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
    # On a line of its own: a run that was killed while it printed has left a part of one.
    print("\\n" + json.dumps(obey(json.loads(line))), flush=True)
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
        self.start(folder, **job)
        return self.finish()

    def start(self, folder: Path, **job: Any) -> None:
        """Begin a run; with `waits_for`, it stands still after its third step until a file of that path is there."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), "resume": False, **job}) + "\n")
        self.process.stdin.flush()

    def finish(self) -> Outcome:
        """Return what has become of the run that was begun."""
        assert self.process.stdout is not None
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
