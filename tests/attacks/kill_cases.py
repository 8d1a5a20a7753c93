"""Runs in processes of their own that can be killed, and what must hold when they are resumed.

A resumed run is a process that has seen nothing of the killed one but its folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux import EarlyStopping, Task, storage
from tests.attacks.run_files import adapter_digests, loss_log
from tests.engine.processes.cases import server
from tests.invariants import mux_lab as lab
from tests.shortcuts import take_shortcuts

NUM_STEPS = 8


def tasks() -> list[Task]:
    """Return three tasks; the last is better at every evaluation, so that its "best" folder is replaced each time."""
    rule = EarlyStopping(patience=5)
    held_out = lab.rows(3, 2, 9, 9)
    return [
        lab.small_task("epochs", data_seed=1, lora_dropout=0.3, max_steps=NUM_STEPS, lr_scheduler_type="cosine"),
        lab.small_task("short", data_seed=2, length=9, rank=2, max_steps=5),
        lab.small_task(
            "stops",
            data_seed=3,
            length=9,
            max_steps=6,
            eval_dataset=held_out,
            eval_steps=1,
            learning_rate=1e-3,
            early_stopping=rule,
        ),
    ]


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: of its process; negative for a signal.
        steps: losses and digests of weights and optimizer state, by run step and task.
        final: digest of the weights and status of each task; `None` unless it came to its end.
    """

    exit_code: int | None = None
    steps: dict[int, dict[str, tuple[str, str]]] = field(default_factory=dict)
    final: dict[str, tuple[str, str]] | None = None


class Journal(lab.Recorder):
    """Reports every step while the run continues: a killed process has no last words."""

    sender: Any
    waits_for: Path | None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report losses and digests, and stand still after the third step where that is asked for."""
        super().on_step_end(args, state, control, **kwargs)
        entry = {name: (repr(self.losses[name][-1]), self.digests[name][-1]) for name in self._running}
        self.sender.send((state.global_step, entry))
        while self.waits_for is not None and state.global_step == 3 and not self.waits_for.exists():
            time.sleep(0.01)


def _train(sender: Any, folder: Path, resume: bool, crashpoint: str, waits_for: Path | None) -> None:
    torch.set_num_threads(1)
    take_shortcuts(pytest.MonkeyPatch(), is_rank=True)
    if crashpoint:
        os.environ["PEFT_MUX_CRASHPOINT"] = crashpoint
    journal = Journal()
    journal.sender, journal.waits_for = sender, waits_for
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    logging = {"logging_strategy": "steps", "logging_steps": 1}
    with contextlib.redirect_stdout(io.StringIO()):
        run = lab.train(tasks(), folder, recorder=journal, resume=resume, **saving, **logging)
    final = {one.name: (lab.digest(run.weights(one.name)), one.status.value) for one in run.trainer.table}
    sender.send(("final", final))


class Running:
    """A run in a process of its own.

    Args:
        folder: of the run.
        resume: whether it resumes.
        crashpoint: place of a write in which it kills itself.
        waits_for: path of a file for which it stands still after its third step.
    """

    def __init__(
        self, folder: Path, *, resume: bool = False, crashpoint: str = "", waits_for: Path | None = None
    ) -> None:
        """Start it."""
        context = server()
        self._receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_train, args=(sender, folder, resume, crashpoint, waits_for), daemon=True)
        self.process.start()
        sender.close()

    def finish(self, *, kill_at: int | None = None, delay: float = 0.0) -> Outcome:
        """Return how it ends; kill it a while after it has reported a step."""
        outcome = Outcome()
        with contextlib.suppress(EOFError, OSError):  # the second where it is killed in the middle of a report
            while True:
                key, entry = self._receiver.recv()
                if key == "final":
                    outcome.final = entry
                    continue
                outcome.steps[key] = entry
                if key == kill_at:
                    time.sleep(delay)
                    self.process.kill()
        self.process.join(60)
        outcome.exit_code = self.process.exitcode
        return outcome


def run(folder: Path, *, kill_at: int | None = None, delay: float = 0.0, **how: Any) -> Outcome:
    """Return what becomes of a run; `how` are arguments of `Running`."""
    return Running(folder, **how).finish(kill_at=kill_at, delay=delay)


def has_saved(folder: Path) -> bool:
    """Whether there is a state to resume from."""
    return bool(list((folder / "state").glob("run-*.json")))


@dataclass
class Whole:
    """A run that is not killed, and its folder."""

    folder: Path
    outcome: Outcome

    def assert_ended_alike(self, folder: Path, last: Outcome) -> None:
        """Assert that a run which was killed before ended in the same weights, adapters and loss log."""
        assert last.final == self.outcome.final
        assert adapter_digests(folder) == adapter_digests(self.folder)
        assert loss_log(folder) == loss_log(self.folder)
        assert not [path for path in folder.rglob("*") if path.name.startswith((".tmp-", ".old-"))]
        for manifest in folder.rglob("manifest.json"):
            storage.verify_folder(manifest.parent)

    def assert_began_alike(self, killed: Outcome) -> None:
        """Assert that a run was killed, and equal in losses, weights and moments until then."""
        assert killed.exit_code == -signal.SIGKILL, "it was not killed"
        assert killed.final is None
        assert all(self.outcome.steps[step] == entry for step, entry in killed.steps.items())

    def assert_resumes(self, folder: Path, killed: Outcome) -> None:
        """Assert that a killed run resumes somewhere after its last save, and ends in the same bits."""
        self.assert_began_alike(killed)
        is_saved = has_saved(folder)
        resumed = run(folder, resume=is_saved)
        assert resumed.exit_code == 0
        assert resumed.steps == {step: self.outcome.steps[step] for step in resumed.steps}
        assert min(resumed.steps) <= max(killed.steps) + 1, "a step was left out"
        assert is_saved == (min(resumed.steps) > 1)
        self.assert_ended_alike(folder, resumed)
