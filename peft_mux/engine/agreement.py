"""Consistency of processes: what must be the same on all of them, compared when a run begins or tasks change."""

# MERGED: `Agreement`: what all processes must agree on at every step: whether there is one, of which tasks, on which
# MERGED: rows.
# MERGED: Each process follows the same rules on the same numbers, so that they agree by themselves; they exchange
# MERGED: digests to be
# MERGED: sure. Where digests differ, a task that failed on one process (its stream broke there, its callback raised)
# MERGED: is given up
# MERGED: on all of them, and its neighbours go on. Any other difference ends the run with an error on every process,
# MERGED: before
# MERGED: anybody waits for an all-reduce that never comes.

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.processes import Processes
from peft_mux.errors import Fault, ProcessError, raise_faults
from peft_mux.task import TaskStatus

_MAX_CHARACTERS = 120
_NONE = "nothing"


def require_consistent(processes: Processes, facts: Mapping[str, Any]) -> None:
    """Compare facts over all processes, which all call this.

    Args:
        processes: the processes of the run, connected.
        facts: plain values by name, nested in mappings as deep as one likes; faults name them with dots.

    Raises:
        ConfigError: on every process, naming each rank and fact that differs from what most processes have.
    """
    if processes.is_alone:
        return
    given = [_flatten(json.loads(one)) for one in processes.gather(json.dumps(facts, default=str, sort_keys=True))]
    faults = [
        Fault(
            f"rank {rank}: {name}",
            _shown(own[name]) if name in own else _NONE,
            f"{_shown(usual)}, as on the other processes",
            "Start every process with the same script, arguments, data and packages.",
        )
        for name in dict.fromkeys(name for own in given for name in own)
        # Most processes are taken to be right, so that the error names the odd one out, and not all the others.
        for usual in [_usual([own.get(name, _NONE) for own in given])]
        for rank, own in enumerate(given)
        if own.get(name, _NONE) != usual
    ]
    raise_faults(faults)


@torch.no_grad()
def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the bits, shapes and dtypes of tensors.

    Args:
        tensors: the tensors by name; their order does not matter.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        own = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(own.shape)} {own.dtype}".encode())
        # As raw bytes, since numpy has no bfloat16, and since -0.0 and 0.0 are other weights.
        digest.update(own.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(item)
    return flat


def _usual(values: list[str]) -> str:
    """Return the value that most processes have; of several such values that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]


def _shown(value: str) -> str:
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}..."


_ENDED = "ended"
_MERGEABLE = ("failed", "stopped_early")
"""What a task's own callbacks and metrics can bring about on one process alone."""


class StandingTask(Protocol):
    """What processes compare of a task."""

    @property
    def name(self) -> str:
        """Name of the task."""
        ...

    @property
    def status(self) -> TaskStatus:
        """Whether the task runs, waits or has ended, and how."""
        ...

    @property
    def reason(self) -> str:
        """Why the task has that status."""
        ...

    @property
    def step(self) -> int:
        """Number of optimizer steps that the task has taken."""
        ...


class Ending(NamedTuple):
    """How a task has ended on another process.

    Attributes:
        status: final status of the task there.
        reason: why it ended, with the rank.
    """

    status: TaskStatus
    reason: str


class Agreement:
    """Keeps the processes of a run together.

    Args:
        processes: the processes of the run, connected.

    Attributes:
        slowest_s: the longest `last_step_s` of all processes, in seconds, as of the last `on_tasks`.
        passes_s: `last_passes_s` of every process, in seconds, by rank, as of the last `on_tasks`.
        has_commands: whether commands waited on any process, as of the last `on_tasks`.
    """

    def __init__(self, processes: Processes) -> None:
        """Remember the processes; communicate with nobody yet."""
        self.processes = processes
        self.slowest_s = 0.0
        self.passes_s: tuple[float, ...] = ()
        self.has_commands = False

    def on_tasks(
        self,
        step: int,
        tasks: Iterable[StandingTask],
        *,
        wants_stop: bool,
        replicas: str = "",
        last_step_s: float = 0.0,
        last_passes_s: float = 0.0,
        num_commands: int = 0,
    ) -> tuple[dict[str, Ending], bool]:
        """Agree on which tasks there are and where they stand, before a step.

        Args:
            step: number of the step within the run.
            tasks: all tasks of the run, in stream order.
            wants_stop: whether this process was asked to stop.
            replicas: the replicas to which this process was asked to move, in LobRA's notation; "" for none.
            last_step_s: seconds that the step before this one took on this process.
            last_passes_s: seconds of these from the first pass to the end of the last one.
            num_commands: how many commands of other threads wait on this process.

        Returns:
            Tasks that have failed or were stopped on another process and are running here; and whether any process
            was asked to stop.

        Raises:
            ProcessError: if processes differ in anything else; on every process.
        """
        self.slowest_s, self.has_commands, self.passes_s = last_step_s, num_commands > 0, (last_passes_s,)
        if self.processes.is_alone:
            return {}, wants_stop
        tasks = list(tasks)
        # All final statuses count as one: how a task ended is merged below only where another process still runs it.
        standing = [[task.name, _ENDED if task.status.is_final else str(task.status), task.step] for task in tasks]
        microseconds = (round(seconds * 1e6) for seconds in (last_step_s, last_passes_s))
        numbers = [_digest([step, standing, replicas]), int(wants_stop), num_commands, *microseconds]
        seen = self.processes.exchange(numbers)
        stops = any(one[1] for one in seen)
        self.has_commands = any(one[2] for one in seen)
        self.slowest_s = max(one[3] for one in seen) / 1e6
        self.passes_s = tuple(one[4] / 1e6 for one in seen)
        # The usual case, settled by a few numbers; words are gathered only to say what differs.
        if _are_equal([one[0] for one in seen]):
            return {}, stops
        everywhere = self.processes.gather(
            [step, standing, [[task.status.value, task.reason] for task in tasks], replicas]
        )
        return self._merged_endings(everywhere), stops

    def on_batches(
        self, batches: dict[str, TaskBatch], failures: dict[str, str], order: Sequence[str]
    ) -> tuple[dict[str, TaskBatch], dict[str, str]]:
        """Agree on the rows of a step.

        Args:
            batches: the global batch of each task, by name.
            failures: why the rows of a task could not be read, by name of the task.
            order: names of the tasks, in the order in which the plan runs them.

        Returns:
            The batches that every process could read, and the failures of all processes.

        Raises:
            ProcessError: if the rows of a task, or the plans, differ between processes; on every process.
        """
        if self.processes.is_alone:
            return batches, failures
        rows = {name: _digest_of_rows(batch) for name, batch in batches.items()}
        if _are_equal(
            [one[0] for one in self.processes.exchange([_digest([list(rows.items()), failures, list(order)])])]
        ):
            return batches, failures
        everywhere = self.processes.gather([rows, failures, list(order)])
        self._require_equal_rows([one[0] for one in everywhere])
        # Before plans are compared: a task that one process lost is missing from its plan, which is no disagreement.
        merged = _merged_failures(everywhere)
        orders = [[name for name in one[2] if name not in merged] for one in everywhere]
        if not _are_equal(orders):
            raise ProcessError(_difference("plan", [", ".join(order) for order in orders], "Use equal devices."))
        return {name: batch for name, batch in batches.items() if name not in merged}, merged

    def _merged_endings(self, everywhere: list[Any]) -> dict[str, Ending]:
        """Return the tasks that run here and have ended elsewhere by a callback or metric of their own."""
        steps, standings, endings, replicas = zip(*everywhere, strict=True)
        if not _are_equal(replicas):
            raise ProcessError(
                _difference("replicas to move to", [one or "none" for one in replicas], _CALL_EVERYWHERE)
            )
        if not _are_equal(steps):
            raise ProcessError(_difference("step of the run", steps, _CALL_EVERYWHERE))
        names = [[name for name, _, _ in one] for one in standings]
        if not _are_equal(names):
            raise ProcessError(_difference("tasks", [", ".join(one) for one in names], _CALL_EVERYWHERE))
        merged: dict[str, Ending] = {}
        for place, name in enumerate(names[0]):
            states = [one[place][1:] for one in standings]
            if _are_equal(states):
                continue
            # The lowest rank's reason, so that every process takes up the same one.
            ended = [rank for rank, (state, _) in enumerate(states) if state == _ENDED]
            status, reason = endings[ended[0]][place] if ended else ("", "")
            if status not in _MERGEABLE or any(state not in (_ENDED, "running") for state, _ in states):
                shown = [f"{status} at step {step}" for (_, step), (status, _) in _side_by_side(states, endings, place)]
                raise ProcessError(_difference(f'task "{name}"', shown, _CALL_EVERYWHERE))
            if self.processes.rank not in ended:
                merged[name] = Ending(TaskStatus(status), f"{reason} (on rank {ended[0]})")
        return merged

    def _require_equal_rows(self, rows: list[dict[str, list[int]]]) -> None:
        """Require that processes which could read a task's rows have read the same ones."""
        for name in dict.fromkeys(name for one in rows for name in one):
            own = [one[name] for one in rows if name in one]
            if not _are_equal(own):
                shown = [f"{one[name][1]} tokens, digest {one[name][2]:08x}" if name in one else "none" for one in rows]
                raise ProcessError(
                    _difference(
                        f'rows of task "{name}"',
                        shown,
                        "Give every process the same rows in the same order; each global batch is divided among them.",
                    )
                )


_CALL_EVERYWHERE = (
    "Call register_tasks, remove_task, pause_task and resume_task on every process, as callbacks are; not only on one."
)


def _side_by_side(states: list[Any], endings: Sequence[Any], place: int) -> Iterable[Any]:
    return zip(states, (one[place] for one in endings), strict=True)


def _difference(what: str, found: Sequence[Any], fix: str) -> str:
    listed = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
    return f"{what}: got {listed}; allowed: the same on every process. {fix}"


def _merged_failures(everywhere: list[Any]) -> dict[str, str]:
    """Return the failures of all processes; a task without rows or a reason has failed in a callback since."""
    merged: dict[str, str] = {}
    names = dict.fromkeys(name for rows, failures, _ in everywhere for name in (*rows, *failures))
    for name in names:
        for rank, (rows, failures, _) in enumerate(everywhere):
            if name in failures:
                merged.setdefault(name, f"{failures[name]} (on rank {rank})")
            elif name not in rows:
                merged.setdefault(name, f"failed on rank {rank}")
    return merged


def _digest_of_rows(batch: TaskBatch) -> list[int]:
    """Return step, number of tokens, and a checksum of tokens and labels."""
    check = 0
    for sequence in batch.sequences:
        # A checksum, not a cryptographic digest: it runs over all rows of every step, and nobody forges them.
        check = zlib.crc32(sequence.input_ids.tobytes(), check)
        check = zlib.crc32(sequence.labels.tobytes(), check)
        check = zlib.crc32(repr(sequence.class_label).encode(), check)
    return [batch.step, batch.num_tokens, check]


def _digest(value: Any) -> int:
    """Return 56 bits of a plain value."""
    # Less than the 63 bits that an exchange carries.
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=7).digest(), "big")


def _are_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)
