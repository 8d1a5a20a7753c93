"""`TaskRunTracker`: one task's run in a logger, kept as an object, of which a process may have many at once."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments

IDS_NAME = "logger_runs.json"
"""File in a task's folder: the id of its run in each logger."""


class Ending(NamedTuple):
    """How a task's run in a logger ends.

    Attributes:
        status: that of the task, or "interrupted" where its training ended before it did.
        reason: why; "" where there is nothing to say.
    """

    status: str
    reason: str


class TaskRunTracker(TrainerCallback, ABC):
    """Begins a task's run with its settings, gives it the numbers of the task, and ends it as the task has ended.

    A task that goes on from a checkpoint goes on with its run, whose id lies in the folder of the task. Callbacks of
    transformers know one run a process; the subclasses ask the libraries for run objects instead.
    """

    name: ClassVar[str]
    """The logger in `report_to`."""

    _run: Any = None
    """What the library has for the run; `None` before it begins and after it has ended."""

    @abstractmethod
    def begin(self, args: MultiTaskTrainingArguments, settings: dict[str, Any], run_id: str | None) -> str:
        """Set `_run` and return its id.

        Args:
            args: the task's arguments, whose `run_name` is `group/task`.
            settings: all settings of the task, as plain JSON.
            run_id: the run to go on with; `None` for a new one.
        """

    @abstractmethod
    def write(self, numbers: dict[str, Any], step: int) -> None:
        """Give numbers to the run, under Trainer's keys (`train/loss`), of a step of the task."""

    @abstractmethod
    def end(self, run: Any, ending: Ending) -> None:
        """End the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the run, or go on with it where the task goes on."""
        if self._run is not None:
            return
        place = Path(args.output_dir) / IDS_NAME
        ids = _read_ids(place)
        # A task that begins is another one than that whose run was kept under its name.
        run_id = ids.get(self.name) if state.global_step else None
        ids[self.name] = self.begin(args, kwargs["settings"](), run_id)
        place.parent.mkdir(parents=True, exist_ok=True)
        storage.write_file(place, json.dumps(ids).encode())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the numbers of a log or of an evaluation to the run."""
        if self._run is not None:
            self.write(integration_utils.rewrite_logs(kwargs["logs"]), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run, once."""
        run, self._run = self._run, None
        if run is not None:
            self.end(run, kwargs["ending"])


def group_of(args: MultiTaskTrainingArguments) -> str:
    """Return the name that the runs of all tasks of one training have in common."""
    return str(args.run_name).rpartition("/")[0]


def _read_ids(place: Path) -> dict[str, str]:
    """Return the ids of a task's runs, by logger; none where there is no file that we have written."""
    try:
        ids = json.loads(storage.read_regular(place))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in ids.items() if isinstance(value, str)} if isinstance(ids, Mapping) else {}
