"""Which tasks may run now: those that fit into memory together, by priority; the others wait (M §3.3, Eq. 5).

A running task is never put out for one that arrives: its optimizer state is there already, and its owner was promised
progress. What is predicted to fit one at a time is admitted in the order of priority, then of arrival, skipping a task
that is too large for what is left rather than stopping at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.loads import TaskLoad
from peft_mux.scheduler.memory import MemoryModel
from peft_mux.scheduler.plan import Waiting
from peft_mux.scheduler.units import bytes_text


@dataclass(frozen=True, slots=True)
class Admission:
    """Who runs.

    Attributes:
        admitted: in the order of admission.
        in_order: the same, in the order of arrival.
        waiting: the others, with reasons.
        max_tokens: of a pass: as asked for, or what fits into memory, but at least the longest sequence.
    """

    admitted: tuple[TaskLoad, ...]
    in_order: tuple[TaskLoad, ...]
    waiting: tuple[Waiting, ...]
    max_tokens: int

    def in_order_of_arrival(self, members: Sequence[TaskLoad]) -> tuple[str, ...]:
        """Return names in the order in which tasks came: the order of the stream is part of its rounding."""
        own = {load.name for load in members}
        return tuple(load.name for load in self.in_order if load.name in own)


class DoesNotFitError(ValueError):
    """Not even one task fits; `peak_bytes` and `limit_bytes` say by how much."""

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
        loads: of all that could, in the order of arrival; one or more.
        memory: predicts bytes.
        limit_bytes: of a device; `None` admits all.
        max_tokens: of a pass, as asked for.
        running: names of tasks that run already.
        one_only: admit a single task, for running task by task.

    Raises:
        DoesNotFitError: if no task fits, not even by itself.
    """
    order = sorted(
        range(len(loads)),
        key=lambda index: (loads[index].name not in running, -loads[index].priority, index),
    )
    admitted: list[TaskLoad] = []
    waiting: dict[str, str] = {}
    for index in order:
        load = loads[index]
        if one_only and admitted:
            waiting[load.name] = f"tasks run one at a time, and {admitted[0].name} runs now"
            continue
        lacking = 0 if limit_bytes is None else _needed_bytes([*admitted, load], memory) - limit_bytes
        if lacking <= 0 or load.name in running:
            admitted.append(load)
        else:
            company = ", ".join(one.name for one in admitted) or "the backbone"
            waiting[load.name] = f"{bytes_text(lacking)} too much beside {company}; runs when others end"
    if not admitted:
        needed = [_needed_bytes([load], memory) for load in loads]
        least = min(range(len(loads)), key=needed.__getitem__)
        raise DoesNotFitError(loads[least].name, needed[least], limit_bytes or 0)
    chosen = {load.name for load in admitted}
    bound = max_tokens if limit_bytes is None else min(max_tokens, _fitting_tokens(admitted, memory, limit_bytes))
    return Admission(
        admitted=tuple(admitted),
        in_order=tuple(load for load in loads if load.name in chosen),
        waiting=tuple(Waiting(load.name, waiting[load.name]) for load in loads if load.name in waiting),
        max_tokens=bound,
    )


def least_pass_tokens(loads: Sequence[TaskLoad]) -> int:
    """Return the tokens of the smallest pass that serves these tasks: their longest sequence, which is not split."""
    return max([1, *(load.longest for load in loads)])


def _needed_bytes(loads: Sequence[TaskLoad], memory: MemoryModel) -> int:
    """Return the peak of the fullest stage with the smallest possible pass."""
    tokens = least_pass_tokens(loads)
    return max(int(memory.peak_bytes(loads, tokens, in_flight=1, stage=s)) for s in range(memory.num_stages))


def _fitting_tokens(loads: Sequence[TaskLoad], memory: MemoryModel, limit_bytes: int) -> int:
    fitting = min(int(memory.max_tokens(loads, limit_bytes, in_flight=1, stage=s)) for s in range(memory.num_stages))
    return max(fitting, least_pass_tokens(loads))
