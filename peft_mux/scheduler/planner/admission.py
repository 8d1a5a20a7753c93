"""Which tasks may run now: those that fit into memory together, by priority; the others wait (M §3.3, Eq. 5).

A running task is never put out for one that arrives: its optimizer state is there already, and its owner was promised
progress. What is predicted to fit one at a time is admitted in the order of priority, then of arrival, skipping a task
that is too large for what is left rather than stopping at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.planner.values import Waiting
from peft_mux.scheduler.units import bytes_text


@dataclass(frozen=True, slots=True)
class Admission:
    """Which tasks run, and in how large passes.

    Attributes:
        admitted: the loads of the tasks that run, in the order of admission.
        in_order: the same loads, in the order in which the tasks came.
        waiting: the tasks that do not run, each with its reason.
        max_tokens: the most tokens of a pass: as asked for, or what fits into memory, but at least the longest
            sequence.
    """

    admitted: tuple[TaskLoad, ...]
    in_order: tuple[TaskLoad, ...]
    waiting: tuple[Waiting, ...]
    max_tokens: int

    def in_order_of_arrival(self, members: Sequence[TaskLoad]) -> tuple[str, ...]:
        """Return the names of tasks in the order in which they came.

        That is their order in the stream of a pass, which is part of its rounding.

        Args:
            members: the loads of some of the tasks that run.
        """
        own = {load.name for load in members}
        return tuple(load.name for load in self.in_order if load.name in own)


class DoesNotFitError(ValueError):
    """Not even one task fits into memory.

    Attributes:
        task: name of the task that needs least.
        peak_bytes: bytes that it needs on a device by itself.
        limit_bytes: bytes that a device may hold.
    """

    def __init__(self, name: str, peak_bytes: int, limit_bytes: int) -> None:
        """Write the message."""
        self.task, self.peak_bytes, self.limit_bytes = name, peak_bytes, limit_bytes
        super().__init__(
            f"task {name!r} alone needs {bytes_text(peak_bytes)} on a device; allowed: {bytes_text(limit_bytes)}."
        )


def admit(
    loads: Sequence[TaskLoad],
    memory: MemoryModel,
    limit_bytes: int | None,
    max_tokens: int,
    *,
    running: Sequence[str] = (),
    one_only: bool = False,
) -> Admission:
    """Choose the tasks that run.

    Args:
        loads: the loads of all tasks that could run, in the order in which the tasks came; one or more.
        memory: predicts the bytes of each stage.
        limit_bytes: memory of a device that may be filled, in bytes; `None` admits all.
        max_tokens: the most tokens of a pass, as asked for.
        running: names of tasks that run already.
        one_only: whether a single task is admitted, for running task by task.

    Raises:
        DoesNotFitError: if no task fits, not even by itself.
    """
    admitted, waiting = _choose(loads, memory, limit_bytes, running, one_only)
    if not admitted:
        raise _smallest_does_not_fit(loads, memory, limit_bytes)
    bound = max_tokens if limit_bytes is None else min(max_tokens, _fitting_tokens(admitted, memory, limit_bytes))
    place = {load.name: number for number, load in enumerate(loads)}
    return Admission(
        admitted=tuple(admitted),
        in_order=tuple(sorted(admitted, key=lambda load: place[load.name])),
        waiting=tuple(sorted(waiting, key=lambda one: place[one.name])),
        max_tokens=bound,
    )


def _choose(
    loads: Sequence[TaskLoad], memory: MemoryModel, limit_bytes: int | None, running: Sequence[str], one_only: bool
) -> tuple[list[TaskLoad], list[Waiting]]:
    """Return the loads of the tasks that run, in the order of admission, and the tasks that wait."""
    admitted: list[TaskLoad] = []
    waiting: list[Waiting] = []
    for load in _order_of_admission(loads, running):
        reason = ""
        if one_only and admitted:
            reason = f"tasks run one at a time, and {admitted[0].name} runs now"
        elif load.name not in running:  # one that runs stays: its state is there, and predictions may be wrong
            reason = _reason_to_wait(load, admitted, memory, limit_bytes)
        if reason:
            waiting.append(Waiting(load.name, reason))
        else:
            admitted.append(load)
    return admitted, waiting


def _smallest_does_not_fit(loads: Sequence[TaskLoad], memory: MemoryModel, limit_bytes: int | None) -> DoesNotFitError:
    """Return the error that names the task that needs least, which does not fit by itself."""
    needed = [_needed_bytes([load], memory) for load in loads]
    least = min(range(len(loads)), key=needed.__getitem__)
    return DoesNotFitError(loads[least].name, needed[least], limit_bytes or 0)


def _order_of_admission(loads: Sequence[TaskLoad], running: Sequence[str]) -> list[TaskLoad]:
    """Return the loads of running tasks, then of the others by priority; equal ones in the order of arrival."""
    return sorted(loads, key=lambda load: (load.name not in running, -load.priority))


def _reason_to_wait(load: TaskLoad, admitted: Sequence[TaskLoad], memory: MemoryModel, limit_bytes: int | None) -> str:
    """Return what a task lacks beside those that are admitted; empty where it fits."""
    lacking = 0 if limit_bytes is None else _needed_bytes([*admitted, load], memory) - limit_bytes
    if lacking <= 0:
        return ""
    company = ", ".join(one.name for one in admitted) or "the backbone"
    return f"{bytes_text(lacking)} too much beside {company}; runs when others end"


def least_pass_tokens(loads: Sequence[TaskLoad]) -> int:
    """Return the tokens of the smallest pass that serves these tasks: their longest sequence, which is not split.

    Args:
        loads: the loads of the tasks that the pass serves.
    """
    return max([1, *(load.longest for load in loads)])


def _needed_bytes(loads: Sequence[TaskLoad], memory: MemoryModel) -> int:
    """Return the peak of the fullest stage with the smallest possible pass."""
    tokens = least_pass_tokens(loads)
    # With one micro-batch in flight, or as many as take turns: the template later keeps what is in flight within the
    # same limit.
    in_flight = memory.passes_in_turns
    return max(int(memory.peak_bytes(loads, tokens, in_flight, stage=s)) for s in range(memory.num_stages))


def _fitting_tokens(loads: Sequence[TaskLoad], memory: MemoryModel, limit_bytes: int) -> int:
    """Return the most tokens of a pass that fit into memory, at least those of the longest sequence."""
    in_flight = memory.passes_in_turns
    fitting = min(int(memory.max_tokens(loads, limit_bytes, in_flight, stage=s)) for s in range(memory.num_stages))
    return max(fitting, least_pass_tokens(loads))
