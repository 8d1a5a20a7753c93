"""`Team`: the processes of a run from the trainer's point of view. Where there is one process, it costs nothing.

All processes build the same trainer over the same tasks. They compare what they were given at the start, agree before
every step on where each task stands, and tell at the end what each of them has done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint import task_settings
from peft_mux.engine.agreement import Agreement, Ending
from peft_mux.engine.alike import require_alike, tensors_digest
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.processes import Processes
from peft_mux.errors import ConfigError, Fault, raise_faults
from peft_mux.modeling.fingerprint import fingerprint
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import TaskStatus
from peft_mux.task_run import TaskRun, TaskTable

try:
    import resource
except ImportError:  # Windows has none
    resource = None

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "peft-mux")
_OWN_ARGUMENTS = frozenset({"local_rank", "log_level", "log_level_replica", "logging_dir"})
"""Arguments that may differ between processes."""


def layout_of(args: MultiTaskTrainingArguments) -> ParallelLayout:
    """Return how the processes of a run are laid out.

    Raises:
        ConfigError: if they cannot be divided as the arguments say.
    """
    tp, pp, world_size = args.tensor_parallel_size, args.pipeline_parallel_size, args.world_size
    if args.replicas is None:
        unit = tp * pp
        if world_size % unit:
            raise ConfigError(
                f"args.tensor_parallel_size, args.pipeline_parallel_size: got {tp} and {pp} in a run of {world_size}"
                f" processes; allowed: sizes whose product divides the number of processes. Start {unit} processes or a"
                f" multiple: torchrun --nproc-per-node {unit} script.py, or accelerate launch --multi_gpu"
                f" --num_processes {unit} script.py."
            )
        return ParallelLayout.of(world_size, tp=tp, pp=pp)
    if (tp, pp) != (1, 1):
        raise ConfigError(
            f"args.replicas: got {args.replicas!r} beside tensor_parallel_size={tp} and pipeline_parallel_size={pp};"
            " allowed: either the one or the others. Leave the two sizes at 1: replicas has its own."
        )
    return layout_of_text(args.replicas, world_size)


def layout_of_text(replicas: str, world_size: int) -> ParallelLayout:
    """Return the layout that LobRA's notation stands for.

    Raises:
        ConfigError: if it cannot be read, or is of another number of processes.
    """
    try:
        layout = ParallelLayout.parse(replicas)
    except ValueError as error:
        raise ConfigError(f"args.{error}") from error
    if layout.world_size != world_size:
        raise ConfigError(
            f"args.replicas: got {layout}, which takes {layout.world_size} processes, in a run of {world_size};"
            f" allowed: as many as there are. Start {layout.world_size} processes, or name other replicas."
        )
    return layout


class RankRecord(NamedTuple):
    """What one process has done in a run.

    Attributes:
        rank: of the process.
        tokens: that went through its backbone.
        seconds: that it trained.
        waited_seconds: of these, spent waiting for other processes on the host.
        peak_bytes: most memory that the process has held: of its GPU, else of the host.
        part: of the model that it held.
    """

    rank: int
    tokens: int
    seconds: float
    waited_seconds: float
    peak_bytes: int
    part: str


class Team:
    """Keeps the processes of a run alike.

    Args:
        args: of the run.
        table: all tasks.

    Attributes:
        processes: who they are.
        layout: which of them makes up which replica.
        records: of the last training, one a process; empty before it.
        waited_s: time of the last training that this process spent waiting for others.
    """

    def __init__(self, args: MultiTaskTrainingArguments, table: TaskTable) -> None:
        """Remember the run; speak with nobody yet."""
        self.args, self.table = args, table
        self.processes = Processes.of(args)
        self.layout = layout_of(args)
        self.records: tuple[RankRecord, ...] = ()
        self.waited_s = 0.0
        self._agreement = Agreement(self.processes)
        self._compared: set[str] = set()

    def begin(self, *, resume: str | bool | None) -> None:
        """Connect, and compare versions, arguments and tasks.

        Args:
            resume: what `train` was told to go on with.

        Raises:
            ConfigError: on every process, naming each rank and field that differs.
            ProcessError: if another process does not come.
        """
        self.processes.connect()
        if self.processes.is_alone:
            return
        arguments = {key: value for key, value in self.args.to_dict().items() if key not in _OWN_ARGUMENTS}
        facts: dict[str, Any] = {
            "version": {name: _version(name) for name in _PACKAGES},
            "args": {**arguments, "resume_from_checkpoint": resume or None},
            "tasks": {run.name: task_settings(run) for run in self.table},
        }
        require_alike(self.processes, facts)

    def fingerprint(self, kind: str, samples: Mapping[str, str]) -> str:
        """Compare the frozen weights of all processes; return the digest of the whole backbone.

        Args:
            kind: name of the backbone's class.
            samples: of the weights that this process holds, from `weight_samples`.

        Raises:
            ConfigError: on every process, naming a weight that several of them hold and that differs.
        """
        whole: dict[str, str] = {}
        faults = []
        for rank, own in enumerate(self.processes.gather(dict(samples))):
            odd = next((name for name in own if whole.get(name, own[name]) != own[name]), None)
            if odd is not None:
                faults.append(
                    Fault(
                        f"rank {rank}: model.frozen weights (digest) of {odd}",
                        own[odd],
                        f"{whole[odd]}, as on the processes before it",
                        "Start every process with the same model.",
                    )
                )
            whole = {**own, **whole}
        raise_faults(faults)
        return fingerprint(kind, whole)

    def goes_on(
        self,
        step: int,
        model: MultiTaskPeftModel,
        *,
        wants_stop: bool,
        replicas: str = "",
        last_step_s: float = 0.0,
    ) -> bool:
        """Agree on whether there is another step, and of which tasks.

        A task that a callback or metric of its own has ended on one process ends on all.

        Args:
            step: of the run.
            model: with the adapters.
            wants_stop: whether this process was asked to stop; then all of them stop here.
            replicas: to which this process was asked to move.
            last_step_s: that the step before this one took here; `slowest_s` is then that of the slowest process.

        Raises:
            ProcessError: on every process, if tasks differ otherwise.
            ConfigError: on every process, if new tasks differ in settings or initial weights.
        """
        endings, stops = self._agreement.on_tasks(
            step, self.table, wants_stop=wants_stop, replicas=replicas, last_step_s=last_step_s
        )
        self._end_together(endings)
        self._compare_new(self.table.running, model)
        return bool(self.table.running) and not stops

    @property
    def slowest_s(self) -> float:
        """Seconds of the last step on the slowest process, the same number on all, as of the last `goes_on`."""
        return self._agreement.slowest_s

    def settle(self, step: int, asked: Sequence[bool]) -> list[bool]:
        """Agree on what callbacks have just done: a task that one process has ended ends on all.

        Args:
            step: of the run.
            asked: wishes of this process, as many on every one.

        Returns:
            Which of them any process has.

        Raises:
            ProcessError: on every process, if tasks differ otherwise.
        """
        self._end_together(self._agreement.on_tasks(step, self.table, wants_stop=False)[0])
        return [any(wishes) for wishes in zip(*self.processes.exchange([int(wish) for wish in asked]), strict=True)]

    def _end_together(self, endings: Mapping[str, Ending]) -> None:
        for name, (status, reason) in endings.items():
            run = self.table[name]
            if status is TaskStatus.FAILED:
                run.quarantine(reason)
            else:
                run.end(status, reason)

    def finish(self, num_tokens: int, seconds: float) -> tuple[RankRecord, ...]:
        """Tell what this process has done, and return what each one has; all are done with everything then."""
        rank = self.processes.rank
        own = RankRecord(rank, num_tokens, seconds, self.waited_s, _peak_bytes(self.args.device), self._part_of(rank))
        self.records = tuple(RankRecord(*record) for record in self.processes.gather(own))
        return self.records

    def _part_of(self, rank: int) -> str:
        """Return in words which part of the model a process holds."""
        place = self.layout.place(rank)
        replica = self.layout.replicas[place.replica]
        words = [f"replica {place.replica + 1} of {self.layout.num_replicas}"]
        words += [f"stage {place.stage + 1} of {replica.pp}"] if replica.pp > 1 else []
        words += [f"shard {place.shard + 1} of {replica.tp}"] if replica.tp > 1 else []
        return ", ".join(words)

    def _compare_new(self, runs: Iterable[TaskRun], model: MultiTaskPeftModel) -> None:
        new = [run for run in runs if run.name not in self._compared]
        if not new or self.processes.is_alone:
            return
        self._compared |= {run.name for run in new}
        facts: dict[str, Any] = {}
        for run in new:
            facts[run.name] = task_settings(run)
            if self.layout.is_data_parallel:
                weights = {name: weight.data for name, weight in model.task_parameters(run.name).items()}
                facts[run.name]["initial weights (digest)"] = tensors_digest(weights)
        require_alike(self.processes, {"tasks": facts})


def _peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: of its GPU, else of the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return "not installed"
