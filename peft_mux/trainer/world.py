"""`World`: all processes of a run, as the trainer sees them. Where there is one process, it costs nothing.

All processes build the same trainer over the same tasks. They compare what they were given at the start, agree before
every step on where each task stands, and tell at the end what each of them has done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.records import task_settings
from peft_mux.engine.agreement import Agreement, Ending, require_consistent, tensors_digest
from peft_mux.engine.layout import ParallelLayout, layout_of
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.task_run import TaskTable
from peft_mux.errors import Fault, installed_version, raise_faults
from peft_mux.modeling.backbone.shape import fingerprint
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.reporting.report import RankRecord
from peft_mux.reporting.screen import peak_bytes
from peft_mux.task import TaskStatus

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "peft-mux")
_OWN_ARGUMENTS = frozenset({"local_rank", "log_level", "log_level_replica", "logging_dir"})
"""Arguments that may differ between processes."""


class World:
    """Keeps the processes of a run alike.

    Args:
        args: the arguments of the run, which say how its processes are laid out.
        table: all tasks of the run.

    Attributes:
        processes: connects the processes and passes values between them.
        layout: which of them makes up which replica.
        records: what each process did in the last training, by rank; empty before it.
    """

    def __init__(self, args: MultiTaskTrainingArguments, table: TaskTable) -> None:
        """Remember the run; speak with nobody yet."""
        self.args, self.table = args, table
        self.processes = Processes.of(args)
        self.layout = layout_of(args)
        self.records: tuple[RankRecord, ...] = ()
        self._agreement = Agreement(self.processes)
        self._compared: set[str] = set()

    def connect(self, *, resume: str | bool | None) -> None:
        """Connect, and compare versions, arguments and tasks.

        Args:
            resume: the checkpoint that `train` was told to go on with, which must be the same everywhere.

        Raises:
            ConfigError: on every process, naming each rank and field that differs.
            ProcessError: if another process does not come.
        """
        self.processes.connect()
        if self.processes.is_alone:
            return
        # What `train` was told replaces the argument of the same name, which it takes precedence over.
        arguments = {key: value for key, value in self.args.to_dict().items() if key not in _OWN_ARGUMENTS}
        facts: dict[str, Any] = {
            "version": {name: installed_version(name) or "not installed" for name in _PACKAGES},
            "args": {**arguments, "resume_from_checkpoint": resume or None},
            "tasks": {run.name: task_settings(run) for run in self.table},
        }
        require_consistent(self.processes, facts)

    def set_layout(self, layout: ParallelLayout) -> None:
        """Lay the same processes out in another way, from now on; every process calls this alike.

        Args:
            layout: which process makes up which replica, for as many processes as there are.
        """
        self.layout = layout

    def compare_frozen_weights(self, kind: str, samples: Mapping[str, str]) -> str:
        """Compare the frozen weights of all processes; return the digest of the whole backbone.

        Args:
            kind: name of the class of the backbone.
            samples: a digest of each weight that this process holds, from `weight_samples`.

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
            whole = {**own, **whole}  # the first process that holds a weight sets the rule for the others
        raise_faults(faults)
        return fingerprint(kind, whole)

    def agree_on_tasks(
        self,
        step: int,
        *,
        wants_stop: bool,
        replicas: str = "",
        last_step_s: float = 0.0,
        last_passes_s: float = 0.0,
        num_commands: int = 0,
    ) -> bool:
        """Agree on which tasks there are and where they stand, and on whether to stop.

        A task that a callback or metric of its own has ended on one process ends on all.

        Args:
            step: steps that the run has taken, the same number on every process.
            wants_stop: whether this process was asked to stop; then all of them stop here.
            replicas: replicas to which this process was asked to move, in LobRA's notation; "" for none.
            last_step_s: seconds that the last step took here; `slowest_s` is then that of the slowest process.
            last_passes_s: seconds of these from its first pass to the end of its last one; `passes_s` has those of all.
            num_commands: how many commands of other threads wait here; see `shared_commands`.

        Returns:
            Whether any process was asked to stop.

        Raises:
            ProcessError: on every process, if tasks differ otherwise.
        """
        endings, stops = self._agreement.on_tasks(
            step,
            self.table,
            wants_stop=wants_stop,
            replicas=replicas,
            last_step_s=last_step_s,
            last_passes_s=last_passes_s,
            num_commands=num_commands,
        )
        self._apply_endings(endings)
        return stops

    def shared_commands(self, labels: Sequence[str]) -> list[str]:
        """Return the commands that wait on every process, in the order of the first; to be read after `agree_on_tasks`.

        Other threads ask at a time of their own on each process. What has not come to all of them yet waits.

        Args:
            labels: the commands that wait here, in words.
        """
        if not self._agreement.has_commands:
            return []
        everywhere = self.processes.gather(list(labels))
        counts = Counter(everywhere[0])
        for one in everywhere[1:]:
            counts &= Counter(one)
        shared = []
        for label in everywhere[0]:
            if counts[label] > 0:
                counts[label] -= 1
                shared.append(label)
        return shared

    @property
    def slowest_s(self) -> float:
        """Seconds of the last step on the slowest process, the same number on all; to be read after `agree_on_step`.

        `agree_on_requests` exchanges no times and leaves 0 here.
        """
        return self._agreement.slowest_s

    @property
    def passes_s(self) -> tuple[float, ...]:
        """Seconds of the passes of the last step on every process, by rank; to be read after `agree_on_tasks`."""
        return self._agreement.passes_s

    def agree_on_requests(self, step: int, asked: Sequence[bool]) -> list[bool]:
        """Agree on what callbacks have just done: a task that one process has ended ends on all.

        Args:
            step: steps that the run has taken, the same number on every process.
            asked: what callbacks on this process wish for, in the same order on every one.

        Returns:
            Whether any process has each of the wishes.

        Raises:
            ProcessError: on every process, if tasks differ otherwise.
        """
        # A wish to stop waits for `agree_on_step`, which is where all processes stop alike.
        self._apply_endings(self._agreement.on_tasks(step, self.table, wants_stop=False)[0])
        return [any(wishes) for wishes in zip(*self.processes.exchange([int(wish) for wish in asked]), strict=True)]

    def _apply_endings(self, endings: Mapping[str, Ending]) -> None:
        """End here the tasks that have ended on another process, for the same reason."""
        for name, (status, reason) in endings.items():
            run = self.table[name]
            if status is TaskStatus.FAILED:
                run.quarantine(reason)
            else:
                run.end(status, reason)

    def gather_records(self, num_tokens: int, seconds: float, waited_s: float) -> tuple[RankRecord, ...]:
        """Return what each process has done; all of them call this when they are done with everything else.

        Args:
            num_tokens: tokens that went through the backbone of this process.
            seconds: seconds that this process trained.
            waited_s: seconds of these that it spent waiting for others.
        """
        rank = self.processes.rank
        own = RankRecord(rank, num_tokens, seconds, waited_s, peak_bytes(self.args.device), self._part_of(rank))
        self.records = tuple(RankRecord(*record) for record in self.processes.gather(own))
        return self.records

    def _part_of(self, rank: int) -> str:
        """Return in words which part of the model a process holds."""
        place = self.layout.place(rank)
        replica = self.layout.replicas[place.replica]
        words = [f"replica {place.replica + 1} of {self.layout.num_replicas}"]
        words += [f"stage {place.stage + 1} of {replica.pp}"] if replica.pp > 1 else []
        words += [f"shard {place.tp_rank + 1} of {replica.tp}"] if replica.tp > 1 else []
        return ", ".join(words)

    def compare_new_tasks(self, model: MultiTaskPeftModel) -> None:
        """Require that tasks which run for the first time have equal settings and initial weights on all processes.

        Args:
            model: the model of this process, with the adapters of all tasks.

        Raises:
            ConfigError: on every process, if new tasks differ in settings or initial weights.
        """
        new = [run for run in self.table.running if run.name not in self._compared]
        if not new or self.processes.is_alone:
            return
        self._compared |= {run.name for run in new}
        facts: dict[str, Any] = {}
        for run in new:
            facts[run.name] = task_settings(run)
            # Elsewhere processes hold different parts of the weights, which have nothing to be compared with.
            if self.layout.is_data_parallel:
                weights = {name: weight.data for name, weight in model.task_parameters(run.name).items()}
                facts[run.name]["initial weights (digest)"] = tensors_digest(weights)
        require_consistent(self.processes, {"tasks": facts})
