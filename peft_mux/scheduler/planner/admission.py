"""Which tasks may run now: those that fit into memory together, by priority; the others wait (M §3.3, Eq. 5).

A running task is never stopped for one that arrives: its optimizer state is there already, and its user was promised
progress. The others are admitted in the order of priority, then of arrival, as long as they are predicted to fit. A
task that is too large for what is left is skipped and does not hold up the others.
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
            f"task {name!r} alone needs {bytes_text(peak_bytes)} on a device, which has {bytes_text(limit_bytes)}."
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
    # The template later keeps what is in flight within the same limit, so that one micro-batch counts here.
    in_flight, stages = memory.passes_in_turns, range(memory.num_stages)

    def needed_bytes(members: Sequence[TaskLoad]) -> int:
        """Return the peak of the fullest stage with the smallest possible pass."""
        tokens = least_pass_tokens(members)
        return max(memory.peak_bytes(members, tokens, in_flight, stage) for stage in stages)

    admitted: list[TaskLoad] = []
    waiting: list[Waiting] = []
    for load in sorted(loads, key=lambda load: (load.name not in running, -load.priority)):
        if one_only and admitted:
            waiting.append(Waiting(load.name, f"tasks run one at a time, and {admitted[0].name} runs now"))
            continue
        # A running task stays: its state is there, and predictions may be wrong.
        if limit_bytes is not None and load.name not in running:
            lacking = needed_bytes([*admitted, load]) - limit_bytes
            if lacking > 0:
                company = ", ".join(one.name for one in admitted) or "the backbone"
                reason = f"{bytes_text(lacking)} too much next to {company}; runs when others end"
                waiting.append(Waiting(load.name, reason))
                continue
        admitted.append(load)
    if not admitted:
        needed = [needed_bytes([load]) for load in loads]
        least = needed.index(min(needed))
        raise DoesNotFitError(loads[least].name, needed[least], limit_bytes or 0)
    if limit_bytes is not None:
        fitting = min(memory.max_tokens(admitted, limit_bytes, in_flight, stage) for stage in stages)
        max_tokens = min(max_tokens, max(fitting, least_pass_tokens(admitted)))
    place = {load.name: number for number, load in enumerate(loads)}
    return Admission(
        admitted=tuple(admitted),
        in_order=tuple(sorted(admitted, key=lambda load: place[load.name])),
        waiting=tuple(sorted(waiting, key=lambda one: place[one.name])),
        max_tokens=max_tokens,
    )


def least_pass_tokens(loads: Sequence[TaskLoad]) -> int:
    """Return the tokens of the smallest pass that serves these tasks: their longest sequence, which is not split."""
    return max([1, *(load.longest for load in loads)])
