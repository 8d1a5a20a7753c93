"""`TaskLengths`: what planning a deployment needs to know of a task, and one sample of the lengths of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskLengths:
    """What planning needs to know of a task.

    Attributes:
        name: name of the task, for messages.
        lengths: lengths of a sample of its sequences, in tokens.
        batch_size: sequences of the task in one step.
    """

    name: str
    lengths: tuple[int, ...]
    batch_size: int


def joint_sample(tasks: Sequence[TaskLengths]) -> tuple[list[int], int]:
    """Return one sample of the lengths of all tasks, each in proportion to its batch, and the batch of all together."""
    return joint_rows(tasks)[0], sum(task.batch_size for task in tasks)


def joint_rows(tasks: Sequence[TaskLengths]) -> tuple[list[int], list[int]]:
    """Return one sample of the lengths of all tasks, each in proportion to its batch, and the task of each length.

    Each task's sample is repeated in full, and the rest taken evenly along it, so that no draw takes part.

    Args:
        tasks: the sampled lengths of each task, and its batch.
    """
    # As many batches as the largest sample makes, so that no sample is cut.
    draws = max(-(-len(task.lengths) // task.batch_size) for task in tasks)
    lengths: list[int] = []
    owners: list[int] = []
    for number, task in enumerate(tasks):
        wanted = draws * task.batch_size
        whole, rest = divmod(wanted, len(task.lengths))
        lengths += task.lengths * whole
        lengths += [task.lengths[index * len(task.lengths) // rest] for index in range(rest)]
        owners += [number] * wanted
    return lengths, owners


def check_tasks(tasks: Sequence[TaskLengths]) -> None:
    """Refuse no tasks at all, and a task without lengths or without a batch."""
    if not tasks:
        raise ValueError("tasks is empty; allowed: one task or more.")
    for task in tasks:
        if not task.lengths or task.batch_size < 1:
            raise ValueError(
                f"task {task.name!r} has {len(task.lengths)} lengths and batch_size {task.batch_size}; "
                "allowed: 1 or more of both."
            )
