"""`PassClock`: what each pass of a step has taken on this process, read without making a device wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from peft_mux.data.batch import MuxBatch


class TaskInPass(NamedTuple):
    """What a task has in a pass.

    Attributes:
        task: name of the task.
        lengths: tokens of each of its sequences.
        num_targets: number of rows of its activations that its loss reads, or of its loss terms where these are fewer.
        shared: how many tokens of each sequence are computed for another one; empty where none are.
    """

    task: str
    lengths: tuple[int, ...]
    num_targets: int
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PassTime:
    """What one pass took, or several that ran in turns and can only be timed together.

    Attributes:
        passes: for each pass what each of its tasks has in it.
        seconds: seconds of forward and backward on this process, without waiting for other stages.
        waited_s: those of them in which this process waited for sums over the devices of its stage; `None` where it
            waits for none, or where that is not known: on a GPU, and where several passes ran in turns.
    """

    passes: tuple[tuple[TaskInPass, ...], ...]
    seconds: float
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What the passes of a step took on this process.

    Attributes:
        passes: those that were timed.
        span_s: seconds from the beginning of the first pass to the end of the last one; 0 where there was none.
    """

    passes: tuple[PassTime, ...] = ()
    span_s: float = 0.0


class PassClock:
    """Times passes: on a CPU by the host's clock, on a GPU by events that are read after the step.

    Args:
        device: the device that passes run on.

    Example:
        >>> clock = PassClock(torch.device("cpu"))
        >>> with clock.timing([]):
        ...     pass
        >>> len(clock.take().passes)
        1
    """

    def __init__(self, device: torch.device) -> None:
        """Have timed nothing."""
        self.device = device
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of the step before."""
        self._timed: list[tuple[tuple[tuple[TaskInPass, ...], ...], Any, Any, float | None]] = []
        self._acted: list[PassTime] = []
        self._part_s: dict[Hashable, float] = {}
        self._acted_s = 0.0

    @contextmanager
    def timing(self, micro_batches: Sequence[MuxBatch], waited_s: Callable[[], float] | None = None) -> Iterator[None]:
        """Time the passes of the `with` block.

        Args:
            micro_batches: the micro-batches that pass in it.
            waited_s: returns the seconds that this process has waited for others so far, where all that it waits for
                within the block are sums of these passes, one after another; not asked on a GPU, whose host goes on.
        """
        begin = self._mark()
        before_s = waited_s() if waited_s is not None and self.device.type == "cpu" else None
        yield
        in_sums_s = None if waited_s is None or before_s is None else waited_s() - before_s
        self._timed.append((tuple(map(rows_of, micro_batches)), begin, self._mark(), in_sums_s))

    def add(self, key: Hashable, seconds: float) -> None:
        """Add to a pass that is taken in several parts, as in a pipeline, by the host's clock.

        Args:
            key: tells the passes of a step apart.
            seconds: seconds of the part, without waiting for others.
        """
        self._part_s[key] = self._part_s.get(key, 0.0) + seconds

    def end(self, key: Hashable, micro_batches: Sequence[MuxBatch]) -> None:
        """Let the parts of a pass be all; on a GPU nothing comes of it, as there the host's seconds are of launches.

        Args:
            key: as it was added to.
            micro_batches: the micro-batches of the pass.
        """
        seconds = self._part_s.pop(key, 0.0)
        if self.device.type == "cpu":
            self._acted.append(PassTime(tuple(map(rows_of, micro_batches)), seconds))

    def spanned(self, seconds: float) -> None:
        """Note how long the parts of all passes took with waiting among them.

        Args:
            seconds: seconds from the first part of the step to its last one.
        """
        self._acted_s = seconds if self.device.type == "cpu" else 0.0

    def take(self) -> StepTimes:
        """Return the times of the step, once; to be read when the device is done with it."""
        timed, acted, span_s = self._timed, self._acted, self._acted_s
        self.start_step()
        passes = tuple(PassTime(rows, self._seconds(begin, end), in_sums_s) for rows, begin, end, in_sums_s in timed)
        if timed:
            span_s = self._seconds(timed[0][1], timed[-1][2])
        return StepTimes((*passes, *acted), span_s)

    def _mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return end - begin if self.device.type == "cpu" else begin.elapsed_time(end) / 1e3


def rows_of(micro_batch: MuxBatch) -> tuple[TaskInPass, ...]:
    """Return what each task has in a micro-batch.

    Args:
        micro_batch: the micro-batch of a pass.
    """
    lengths, shared_rows = micro_batch.sequence_lengths, micro_batch.shared
    # The head and the last layer compute a row once, whatever the number of sequences that have it in common.
    targets = micro_batch.target_offsets if shared_rows is None else shared_rows.target_offsets
    bounds, shared = pairwise(micro_batch.sequence_offsets), _shared_of_sequences(micro_batch)
    return tuple(
        TaskInPass(name, tuple(lengths[start:end]), targets[number + 1] - targets[number], shared[start:end])
        for number, (name, (start, end)) in enumerate(zip(micro_batch.task_names, bounds, strict=True))
    )


def _shared_of_sequences(micro_batch: MuxBatch) -> tuple[int, ...]:
    """Return how many tokens of each sequence are computed for another one; nothing where none are."""
    if micro_batch.shared is None:
        return ()
    rows = micro_batch.shared.tree.row_offsets((0, *accumulate(micro_batch.sequence_lengths)))
    pairs = zip(micro_batch.sequence_lengths, pairwise(rows), strict=True)
    return tuple(length - (end - start) for length, (start, end) in pairs)
