"""Keeps processes in agreement: compares facts when a run begins or tasks change, and task states at every step.

Each process applies the same rules to the same numbers, so processes should agree; they exchange digests to verify it.
If digests differ because a task failed on one process (its stream broke, its callback raised), the task fails on all
of them, and the other tasks continue. Any other difference ends the run with an error on every process, so that none
waits for an all-reduce that never starts.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import Fault, ProcessError, raise_faults
from peft_mux.task import TaskStatus

_MAX_CHARACTERS = 120
_NONE = "nothing"
_ENDED = "ended"
_MERGEABLE = ("failed", "stopped_early")
"""Statuses that a task's own callbacks and metrics can cause on one process only."""

_CALL_EVERYWHERE = (
    "Call register_tasks, remove_task, pause_task and resume_task on every process, not only on one (callbacks run on "
    "all of them)."
)
_SET_EVERYWHERE = "Let callbacks set it on every process."


def require_consistent(processes: Processes, facts: Mapping[str, Any]) -> None:
    """Compare facts over all processes; all processes must call this.

    Args:
        processes: the processes of the run, connected.
        facts: plain values by name, in nested mappings of any depth; errors use dotted names.

    Raises:
        ConfigError: on every process, if facts differ; the message names each rank and fact that differs from the
            majority.
    """
    if processes.is_alone:
        return
    given = [_flatten(json.loads(text)) for text in processes.gather(json.dumps(facts, default=str, sort_keys=True))]
    faults = []
    for name in dict.fromkeys(name for facts_of_rank in given for name in facts_of_rank):
        values = [facts_of_rank.get(name, _NONE) for facts_of_rank in given]
        # The majority counts as right, so that the error names the process that differs.
        usual = Counter(values).most_common(1)[0][0]
        shown = [
            value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}..." for value in (*values, usual)
        ]
        faults += [
            Fault(
                f"rank {rank}: {name}",
                shown[rank],
                f"{shown[-1]}, as on the other processes",
                "Start every process with the same script, arguments, data and packages.",
            )
            for rank, value in enumerate(values)
            if value != usual
        ]
    raise_faults(faults)


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(item)
    return flat


@torch.no_grad()
def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the bits, shapes and dtypes of tensors by name; their order does not matter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # As raw bytes, since numpy has no bfloat16, and since -0.0 and 0.0 are different weights.
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


class Agreement:
    """Keeps the processes of a run in agreement.

    Args:
        processes: the processes of the run, connected.

    Attributes:
        slowest_s: the longest `last_step_s` of all processes, in seconds, as of the last `on_tasks`.
        passes_s: `last_passes_s` of every process, in seconds, by rank, as of the last `on_tasks`.
        has_commands: whether any process had pending commands, as of the last `on_tasks`.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.slowest_s = 0.0
        self.passes_s: tuple[float, ...] = ()
        self.has_commands = False

    def on_tasks(
        self,
        step: int,
        tasks: Iterable[ActiveTask],
        *,
        wants_stop: bool,
        replicas: str = "",
        last_step_s: float = 0.0,
        last_passes_s: float = 0.0,
        num_commands: int = 0,
        requests: Sequence[str] = (),
    ) -> tuple[dict[str, tuple[TaskStatus, str]], bool]:
        """Agree on the tasks and their states, before a step.

        Args:
            step: number of the step within the run.
            tasks: all tasks of the run, in stream order.
            wants_stop: whether this process was asked to stop.
            replicas: the replicas to which this process was asked to move, in LobRA's notation; "" for none.
            last_step_s: seconds that the previous step took on this process.
            last_passes_s: seconds of that step from the start of the first pass to the end of the last one.
            num_commands: number of commands of other threads that are pending on this process.
            requests: what callbacks have asked for, in words; carried out by all processes together.

        Returns:
            Tasks that have failed or were stopped on another process but are running here, and tasks whose learning
            rate differs, with their status and the reason; and whether any process was asked to stop.

        Raises:
            ProcessError: on every process, if processes differ in anything else.
        """
        self.slowest_s, self.has_commands, self.passes_s = last_step_s, num_commands > 0, (last_passes_s,)
        if self.processes.is_alone:
            return {}, wants_stop
        tasks = list(tasks)
        # All final statuses count as equal here; they are merged below only if another process still runs the task.
        standing = [
            [task.name, _ENDED if task.status.is_final else str(task.status), task.step, _rates(task)] for task in tasks
        ]
        microseconds = (round(seconds * 1e6) for seconds in (last_step_s, last_passes_s))
        digest = _digest([step, standing, replicas, list(requests)])
        seen = self.processes.exchange([digest, int(wants_stop), num_commands, *microseconds])
        stops = any(numbers[1] for numbers in seen)
        self.has_commands = any(numbers[2] for numbers in seen)
        self.slowest_s = max(numbers[3] for numbers in seen) / 1e6
        self.passes_s = tuple(numbers[4] / 1e6 for numbers in seen)
        # In the usual case a few numbers are enough; objects are gathered only if processes differ.
        if _are_equal([numbers[0] for numbers in seen]):
            return {}, stops
        ends = [[task.status.value, task.reason] for task in tasks]
        gathered = self.processes.gather([step, standing, ends, replicas, ", ".join(requests) or "none"])
        steps, standings, endings, targets, asked = zip(*gathered, strict=True)
        _require_equal("replicas to move to", [target or "none" for target in targets])
        _require_equal("step of the run", steps)
        _require_equal("tasks", [", ".join(name for name, *_ in standing_of_rank) for standing_of_rank in standings])
        _require_equal("requests of callbacks", asked)
        merged: dict[str, tuple[TaskStatus, str]] = {}
        for place, task in enumerate(tasks):
            states = [standing_of_rank[place][1:3] for standing_of_rank in standings]
            if _are_equal(states):
                rates = [standing_of_rank[place][3] for standing_of_rank in standings]
                if not _are_equal(rates):
                    merged[task.name] = TaskStatus.FAILED, _difference("learning_rate", rates, _SET_EVERYWHERE)
                continue
            # The lowest rank's reason, so that every process reports the same one.
            ended = [rank for rank, (state, _) in enumerate(states) if state == _ENDED]
            status, reason = endings[ended[0]][place] if ended else ("", "")
            if status not in _MERGEABLE or any(state not in (_ENDED, "running") for state, _ in states):
                pairs = zip(states, (ends_of_rank[place] for ends_of_rank in endings), strict=True)
                shown = [f"{status} at step {own_step}" for (_, own_step), (status, _) in pairs]
                raise ProcessError(_difference(f'task "{task.name}"', shown, _CALL_EVERYWHERE))
            if self.processes.rank not in ended:
                merged[task.name] = TaskStatus(status), f"{reason} (on rank {ended[0]})"
        return merged, stops

    def on_batches(
        self, batches: dict[str, TaskBatch], failures: dict[str, str], order: Sequence[str], tasks: Iterable[ActiveTask]
    ) -> tuple[dict[str, TaskBatch], dict[str, str]]:
        """Agree on the rows of a step, and on learning rates, which callbacks may have set since `on_tasks`.

        Args:
            batches: the global batch of each task, by name.
            failures: reasons why the rows of tasks could not be read, by task name.
            order: names of the tasks, in the order in which the plan runs them.
            tasks: the tasks that take the step.

        Returns:
            The batches that every process could read, and the failures of all processes.

        Raises:
            ProcessError: on every process, if the rows of a task or the plans differ between processes.
        """
        if self.processes.is_alone:
            return batches, failures
        own_rows = {name: _digest_of_rows(batch) for name, batch in batches.items()}
        rates = {task.name: _rates(task) for task in tasks}
        digest = _digest([list(own_rows.items()), failures, list(order), rates])
        if _are_equal([numbers[0] for numbers in self.processes.exchange([digest])]):
            return batches, failures
        everywhere = self.processes.gather([own_rows, failures, list(order), rates])
        # Processes that could read a task's rows must have read the same ones. A task with neither rows nor a
        # failure has failed in a callback in the meantime.
        merged: dict[str, str] = {}
        for name in dict.fromkeys(name for rows, failed, *_ in everywhere for name in (*rows, *failed)):
            read = [rows[name] for rows, *_ in everywhere if name in rows]
            if read and not _are_equal(read):
                shown = [
                    f"{rows[name][1]} tokens, digest {rows[name][2]:08x}" if name in rows else "none"
                    for rows, *_ in everywhere
                ]
                fix = "Give every process the same rows in the same order; each global batch is divided among them."
                raise ProcessError(_difference(f'rows of task "{name}"', shown, fix))
            rates_of_all = [seen[3].get(name) for seen in everywhere]
            if None not in rates_of_all and not _are_equal(rates_of_all):
                merged[name] = _difference("learning_rate", rates_of_all, _SET_EVERYWHERE)
            for rank, (rows, failed, *_) in enumerate(everywhere):
                if name in failed:
                    merged.setdefault(name, f"{failed[name]} (on rank {rank})")
                elif name not in rows:
                    merged.setdefault(name, f"failed on rank {rank}")
        # Checked after failures, because a task that failed on one process is missing from its plan.
        orders = [", ".join(name for name in seen[2] if name not in merged) for seen in everywhere]
        _require_equal("plan", orders, "Use equal devices.")
        return {name: batch for name, batch in batches.items() if name not in merged}, merged


def _rates(task: ActiveTask) -> str:
    """Return the learning rates of a task; those of LoRA+ differ between pipeline stages, so that none is returned."""
    if task.optimizer is None or task.hyper.loraplus_lr_ratio is not None:
        return ""
    return ", ".join(sorted({str(group.get("lr")) for group in task.optimizer.optimizer.param_groups}))


def _require_equal(what: str, values: Sequence[Any], fix: str = _CALL_EVERYWHERE) -> None:
    if not _are_equal(values):
        raise ProcessError(_difference(what, values, fix))


def _difference(what: str, values: Sequence[Any], fix: str) -> str:
    listed = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    return f"{what} must be the same on every process, got {listed}. {fix}"


def _are_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _digest(value: Any) -> int:
    """Return a 56-bit digest of a plain value; an exchange can carry up to 63 bits."""
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=7).digest(), "big")


def _digest_of_rows(batch: TaskBatch) -> list[int]:
    """Return step, number of tokens, and a checksum of tokens and labels."""
    check = 0
    for sequence in batch.sequences:
        # A checksum instead of a cryptographic digest, because it covers all rows of every step.
        check = zlib.crc32(sequence.input_ids.tobytes(), check)
        check = zlib.crc32(sequence.labels.tobytes(), check)
        check = zlib.crc32(repr(sequence.class_label).encode(), check)
    return [batch.step, batch.num_tokens, check]
