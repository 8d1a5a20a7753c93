"""`RunRecord`: which checkpoints of a run belong together, which tasks were removed, and what decided its bits.

A record is sealed JSON. Its seal tells what was changed by chance; what was sealed by others is not believed either:
every field is checked before anything is done with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft_mux import storage
from peft_mux.errors import CheckpointError
from peft_mux.task import TaskStatus
from peft_mux.task_names import name_fault

FORMAT_VERSION = 3
READABLE_VERSIONS = (2, 3)
"""Format 2 knew neither removed tasks nor what decided the bits."""
_FILE_NAME = re.compile(r"run-(\d{8,})\.json")
_MOST_STEPS = 2**53


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """Where a task stood.

    Attributes:
        status: where in its life.
        reason: why it failed, stopped or was removed.
        step: number of optimizer steps taken, which is the number of its checkpoint.
        generation: how many tasks of this name were removed before it.
    """

    status: TaskStatus
    reason: str
    step: int
    generation: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields; format 2 had no generation, so the first one is not written."""
        fields = {"status": self.status.value, "reason": self.reason, "step": self.step}
        return {**fields, "generation": self.generation} if self.generation else fields


class Generations:
    """Which tasks were removed from a run, and how many of its name were there before a task that came later.

    Attributes:
        removed: tasks that were removed and have not come again, by name.
    """

    def __init__(self, record: RunRecord | None = None) -> None:
        """Begin with what a record knows; by default nobody was removed."""
        self.removed: dict[str, RecordedTask] = {} if record is None else dict(record.removed)
        tasks = {} if record is None else record.tasks
        self._numbers = {name: task.generation for name, task in tasks.items() if task.generation}

    def of(self, name: str) -> int:
        """Return how many tasks of a name were removed before the present one."""
        return self._numbers.get(name, 0)

    def has(self, name: str, task: RecordedTask) -> bool:
        """Whether a task of a record is still the one of its name."""
        return name not in self.removed and task.generation == self.of(name)

    def note_removed(self, name: str, reason: str, step: int) -> None:
        """Remember that a task was removed, why, and after how many of its steps."""
        self.removed[name] = RecordedTask(TaskStatus.REMOVED, reason, step, self.of(name))

    def note_arrival(self, name: str) -> bool:
        """Remember that a task begins; return whether it has the name of a removed one, whose files are not its own."""
        before = self.removed.pop(name, None)
        if before is not None:
            self._numbers[name] = before.generation + 1
        return before is not None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The state of a run at one of its steps.

    Attributes:
        run_step: steps of the run.
        version: format of the file; one that this version does not read has no other field.
        backbone: digest of the frozen weights.
        tasks: the tasks of the run, in the order of the stream.
        removed: tasks that were removed, and have not come again.
        numerics: settings and versions on which the last bits of a result depend.
    """

    run_step: int
    version: int = FORMAT_VERSION
    backbone: str = ""
    tasks: Mapping[str, RecordedTask] = field(default_factory=dict)
    removed: Mapping[str, RecordedTask] = field(default_factory=dict)
    numerics: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the record as sealed JSON."""
        return storage.sealed_json(
            {
                "format_version": FORMAT_VERSION,
                "run_step": self.run_step,
                "backbone": self.backbone,
                "order": list(self.tasks),
                "tasks": {name: task.to_json() for name, task in self.tasks.items()},
                "removed": {name: task.to_json() for name, task in self.removed.items()},
                "numerics": dict(self.numerics),
            }
        )


def record_path(folder: Path, run_step: int) -> Path:
    """Return the file of the record of a step."""
    return folder / f"run-{run_step:08d}.json"


def record_paths(folder: Path) -> list[Path]:
    """Return the records of a folder, valid or not, oldest first."""
    return sorted(folder.glob("run-*.json"), key=lambda path: (len(path.name), path.name))


def read_records(folder: Path, warn: Callable[[str], None] | None = None) -> list[tuple[RunRecord, Path]]:
    """Return the valid records of a folder, oldest first.

    Args:
        folder: the folder that the records lie in.
        warn: told of each one that is not valid.
    """
    found = []
    for path in record_paths(folder):
        try:
            found.append((read_record(path), path))
        except CheckpointError as error:
            if warn is not None:
                warn(f"{error} Trying the record before it.")
    # By the number in the record, never by the time of the file, which copying changes.
    return sorted(found, key=lambda item: item[0].run_step)


def read_record(path: Path) -> RunRecord:
    """Return a record.

    Raises:
        CheckpointError: naming the file, if it is missing, torn or changed, or a field is not what we write.
    """
    value = storage.unsealed_json(path)
    try:
        return _parsed(value, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: got a file that is no record of a run ({error}); allowed: one that a run has written."
        ) from error


def _parsed(value: Any, path: Path) -> RunRecord:
    named = _FILE_NAME.fullmatch(path.name)
    if named is None:
        raise ValueError("its name is not one that is written")
    version = count(value["format_version"], "format_version")
    # Nothing more is known of other formats; whoever would go on from one refuses it by its version.
    if version not in READABLE_VERSIONS:
        return RunRecord(int(named[1]), version)
    run_step = count(value["run_step"], "run_step")
    if record_path(path.parent, run_step).name != path.name:
        raise ValueError(f"it is of step {run_step}")
    tasks, order = _tasks(value["tasks"]), value["order"]
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order) or set(order) != tasks.keys():
        raise ValueError("its order is not that of its tasks")
    removed = _tasks(value.get("removed", {}))
    if removed.keys() & tasks.keys():
        raise ValueError("a task is removed and in the run")
    numerics = value.get("numerics", {})
    if not isinstance(numerics, dict) or any(isinstance(item, (dict, list)) for item in numerics.values()):
        raise ValueError("numerics are not plain values")
    return RunRecord(
        run_step,
        version,
        text(value["backbone"], "backbone"),
        {name: tasks[name] for name in order},
        removed,
        numerics,
    )


def _tasks(value: Any) -> dict[str, RecordedTask]:
    if not isinstance(value, dict):
        raise TypeError(f"tasks are a {type(value).__name__}")
    tasks = {}
    for name, entry in value.items():
        if (fault := name_fault(name, "task")) is not None:  # not written by us; it may lead out of the folder
            raise ValueError(str(fault))
        tasks[name] = RecordedTask(
            TaskStatus(text(entry["status"], "status")),
            text(entry["reason"], "reason"),
            count(entry["step"], "step"),
            count(entry.get("generation", 0), "generation"),
        )
    return tasks


def count(value: Any, name: str) -> int:
    """Return a number of steps or tokens as it was read.

    Raises:
        ValueError: if it is not an integer of at least 0, or a number that no run reaches.
    """
    if type(value) is not int or not 0 <= value < _MOST_STEPS:
        raise ValueError(f"{name} is not a count")
    return value


def text(value: Any, name: str) -> str:
    """Return a string as it was read.

    Raises:
        ValueError: if it is none, or cannot be printed.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    value.encode()  # half of a surrogate pair could not be printed
    return value
