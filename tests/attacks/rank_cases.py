"""What each process of an attacked run of several does; started by `tests.engine.processes.cases.launch`."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from peft_mux import Task
from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import ATTACKED, OTHERS, nano_task, rows
from tests.invariants import mux_lab as lab

NUM_STEPS, STEP = 6, 2
TIMEOUT_S, SHORT_TIMEOUT_S = 20, 4
"""How long a process waits for another; the short one where one stands still for good."""


@dataclass
class Fault:
    """What goes wrong on one process.

    Attributes:
        settings: of the attacked task, there.
        at_begin: what happens there before a step.
        arguments: of the run, there.
        tasks: makes the tasks there, where they are others.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    at_begin: dict[int, Callable[[Any], Any]] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    tasks: Callable[[list[Task]], list[Task]] = lambda tasks: tasks


@dataclass
class Part:
    """What a run showed to one process."""

    losses: dict[str, list[float]]
    statuses: dict[str, str]
    reasons: dict[str, str]


class Stream:
    """A stream that fails at a row, or gives another one, where it is asked to."""

    def __init__(self, act: Callable[[], Any] | None = None) -> None:
        """Be sound by default."""
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        """Yield rows."""
        for number, row in enumerate(rows(1, 1000)):
            yield self.act() if self.act is not None and number == 2 * attacks.BATCH + 1 else row


def raises(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def callback(event: str, error: BaseException) -> dict[str, Any]:
    """Return the settings of a task whose own callback raises from a step on."""

    def fail(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= STEP:
            raise error

    own = TrainerCallback()
    setattr(own, event, fail)
    return {"callbacks": [own]}


def spoil_weights(trainer: Any) -> None:
    """Fill what this process holds of the attacked task's weights with NaN."""
    for weight in trainer.model.task_parameters(ATTACKED).values():
        weight.data.fill_(float("nan"))


def fill_the_disk(trainer: Any) -> None:
    """Let every flush fail from now on."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.fsync = fail


def die(trainer: Any) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(trainer: Any) -> None:
    """Be stopped, and killed only long after the time limit of the others."""
    own = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {4 * SHORT_TIMEOUT_S}; kill -KILL {own}"])
    os.kill(own, signal.SIGSTOP)


def register_alone(trainer: Any) -> None:
    """Register a task on this process alone."""
    trainer.register_tasks([nano_task("alone", 9)])


def fail_in_a_run_callback(trainer: Any) -> None:
    """Fail as a callback of the run, which is no task's."""
    raise OSError("the disk of this process is gone")


def sets_rate(event: str) -> dict[str, Any]:
    """Return the settings of a task whose own callback sets its rate."""
    own = TrainerCallback()
    setattr(own, event, lambda *_, optimizer, **__: optimizer.param_groups[0].update(lr=0.5))
    return {"callbacks": [own]}


EVALUATED = {"eval_dataset": rows(5, 4), "eval_steps": STEP}
METRIC = {**EVALUATED, "compute_metrics": lambda _: {"own": 1.0}}

ISOLATED: dict[str, Callable[[], tuple[Fault, dict[str, Any]]]] = {
    "a callback that raises": lambda: (Fault(callback("on_step_end", ValueError("boom"))), {}),
    "a callback that raises before a step": lambda: (Fault(callback("on_step_begin", KeyError("boom"))), {}),
    "a callback that exits": lambda: (Fault(callback("on_step_end", SystemExit(0))), {}),
    "a callback that raises KeyboardInterrupt": lambda: (Fault(callback("on_step_end", KeyboardInterrupt("boom"))), {}),
    "a metric that raises": lambda: (Fault({**METRIC, "compute_metrics": raises(ValueError("boom"))}), METRIC),
    "a metric that exits": lambda: (Fault({**METRIC, "compute_metrics": raises(SystemExit(0))}), METRIC),
    "a stream that raises": lambda: (
        Fault({"train_dataset": Stream(raises(OSError("boom")))}),
        {"train_dataset": Stream()},
    ),
    "a stream with a bad row": lambda: (Fault({"train_dataset": Stream(lambda: None)}), {"train_dataset": Stream()}),
    "a rate set there alone": lambda: (Fault(sets_rate("on_step_end")), {}),
    "a rate set there before a step": lambda: (Fault(sets_rate("on_step_begin")), {}),
    "weights of NaN": lambda: (Fault(at_begin={STEP: spoil_weights}), {}),
}
"""Faults of one task on one process, and the settings of that task on the others: the other tasks continue."""

FATAL: dict[str, Callable[[], Fault]] = {
    "killed": lambda: Fault(at_begin={STEP: die}),
    "a callback of the run that raises": lambda: Fault(at_begin={STEP: fail_in_a_run_callback}),
    "another seed": lambda: Fault(arguments={"seed": 7}),
    "another planner": lambda: Fault(arguments={"planner": "interleaved"}),
    "another rate of one task": lambda: Fault({"learning_rate": 1e-2}),
    "other rows of one task": lambda: Fault({"train_dataset": rows(99)}),
    "a task less": lambda: Fault(tasks=lambda tasks: tasks[:-1]),
    "another order of tasks": lambda: Fault(tasks=lambda tasks: tasks[::-1]),
    "a task registered there alone": lambda: Fault(at_begin={STEP: register_alone}),
    "a task removed there alone": lambda: Fault(at_begin={STEP: lambda trainer: trainer.remove_task(OTHERS[0])}),
    "stopped": lambda: Fault(at_begin={STEP: stop}),
    "late": lambda: Fault(at_begin={STEP: lambda _: time.sleep(2 * SHORT_TIMEOUT_S)}),
}
"""Faults of one process after which the run cannot continue: every other process says so, and names that one."""


def train(folder: Path, model: str, tasks: list[Task], at_begin: Any, **arguments: Any) -> Part:
    """Train, and return what this process saw."""
    watcher = attacks.Watcher(at_begin=at_begin, keep_weights=False)
    options = {"ddp_timeout": TIMEOUT_S, "save_strategy": "steps", "save_steps": 3, **arguments}
    trainer = attacks.make_trainer(tasks, folder, model=model, watcher=watcher, **options)
    trainer.train()
    return Part(
        losses=watcher.losses,
        statuses={run.name: run.status.value for run in trainer.table},
        reasons={run.name: run.reason for run in trainer.table},
    )


def tasks_with(**settings: Any) -> list[Task]:
    """Return two tasks and the one that is attacked."""
    others = [nano_task(name, 10 + number) for number, name in enumerate(OTHERS[:2])]
    return [others[0], nano_task(ATTACKED, 1, **settings), others[1]]


def healthy(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> Part:
    """Train without a fault."""
    return train(folder, model, tasks_with(), {}, **arguments)


def isolated(rank: int, folder: Path, model: str, arguments: dict[str, Any], name: str, victim: int) -> Part:
    """Train with a fault of one task on one process."""
    fault, elsewhere = ISOLATED[name]()
    here = fault if rank == victim else Fault(elsewhere)
    return train(folder, model, tasks_with(**here.settings), here.at_begin, **arguments)


def fatal(rank: int, folder: Path, model: str, arguments: dict[str, Any], name: str, victim: int) -> Part:
    """Train with a process that differs from the others."""
    fault = FATAL[name]() if rank == victim else Fault()
    timeout_s = SHORT_TIMEOUT_S if name in ("stopped", "late") else TIMEOUT_S
    options = {"ddp_timeout": timeout_s, **arguments, **fault.arguments}
    return train(folder, model, fault.tasks(tasks_with(**fault.settings)), fault.at_begin, **options)


def with_a_full_disk(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> Part:
    """Train while the disk of the process that writes is full."""
    acts = {STEP: fill_the_disk} if rank == 0 else {}
    return train(folder, model, tasks_with(), acts, **arguments)


def saved_model(folder: Path) -> str:
    """Return a folder with a backbone that can be cut in two, by layers and within them."""
    lab.fill(model := attacks.nano_llama(num_layers=2), 0)
    model.save_pretrained(folder)
    return str(folder)
