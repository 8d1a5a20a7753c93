"""`Team`: the processes of a run from the trainer's point of view. Where there is one process, it costs nothing.

All processes build the same trainer over the same tasks. They compare what they were given at the start, agree before
every step on where each task stands, and tell at the end what each of them has done.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint import task_settings
from peft_mux.engine.agreement import Agreement
from peft_mux.engine.alike import require_alike, tensors_digest
from peft_mux.engine.processes import Processes
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.shape import backbone_fingerprint
from peft_mux.task import TaskStatus
from peft_mux.task_run import TaskRun, TaskTable

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "peft-mux")
_OWN_ARGUMENTS = frozenset({"local_rank", "log_level", "log_level_replica", "logging_dir"})
"""Arguments that may differ between processes."""


class RankRecord(NamedTuple):
    """What one process has done in a run.

    Attributes:
        rank: of the process.
        tokens: that went through its backbone.
        seconds: that it trained.
        waited_seconds: of these, spent waiting for other processes on the host.
    """

    rank: int
    tokens: int
    seconds: float
    waited_seconds: float


class Team:
    """Keeps the processes of a run alike.

    Args:
        args: of the run.
        table: all tasks.

    Attributes:
        processes: who they are.
        records: of the last training, one a process; empty before it.
    """

    def __init__(self, args: MultiTaskTrainingArguments, table: TaskTable) -> None:
        """Remember the run; speak with nobody yet."""
        self.args, self.table = args, table
        self.processes = Processes.of(args)
        self.records: tuple[RankRecord, ...] = ()
        self._agreement = Agreement(self.processes)
        self._compared: set[str] = set()

    def begin(self, model: MultiTaskPeftModel, *, resume: str | bool | None) -> None:
        """Connect, and compare versions, arguments, tasks and frozen weights.

        Args:
            model: with its weights.
            resume: what `train` was told to go on with.

        Raises:
            ConfigError: on every process, naming each rank and field that differs.
            ProcessError: if another process does not come.
        """
        self.processes.connect()
        if self.processes.is_alone:
            return
        arguments = {key: value for key, value in self.args.to_dict().items() if key not in _OWN_ARGUMENTS}
        facts = {
            "version": {name: _version(name) for name in _PACKAGES},
            "args": {**arguments, "resume_from_checkpoint": resume or None},
            "tasks": {run.name: task_settings(run) for run in self.table},
        }
        require_alike(self.processes, facts)
        require_alike(self.processes, {"model": {"frozen weights (digest)": backbone_fingerprint(model.backbone)}})

    def goes_on(self, step: int, model: MultiTaskPeftModel, *, wants_stop: bool) -> bool:
        """Agree on whether there is another step, and of which tasks.

        A task that a callback or metric of its own has ended on one process ends on all.

        Args:
            step: of the run.
            model: with the adapters.
            wants_stop: whether this process was asked to stop; then all of them stop here.

        Raises:
            ProcessError: on every process, if tasks differ otherwise.
            ConfigError: on every process, if new tasks differ in settings or initial weights.
        """
        endings, stops = self._agreement.on_tasks(step, self.table, wants_stop=wants_stop)
        for name, (status, reason) in endings.items():
            run = self.table[name]
            if status is TaskStatus.FAILED:
                run.quarantine(reason)
            else:
                run.end(status, reason)
        self._compare_new(self.table.running, model)
        return bool(self.table.running) and not stops

    def finish(self, num_tokens: int, seconds: float) -> tuple[RankRecord, ...]:
        """Tell what this process has done, and return what each one has; all are done with everything then."""
        own = RankRecord(self.processes.rank, num_tokens, seconds, self.processes.waited_s)
        self.processes.waited_s = 0.0
        self.records = tuple(RankRecord(*record) for record in self.processes.gather(own))
        return self.records

    def _compare_new(self, runs: Iterable[TaskRun], model: MultiTaskPeftModel) -> None:
        new = [run for run in runs if run.name not in self._compared]
        if not new or self.processes.is_alone:
            return
        self._compared |= {run.name for run in new}
        facts: dict[str, Any] = {}
        for run in new:
            weights = {name: weight.data for name, weight in model.task_parameters(run.name).items()}
            facts[run.name] = {**task_settings(run), "initial weights (digest)": tensors_digest(weights)}
        require_alike(self.processes, {"tasks": facts})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return "not installed"
