"""The values of a step: `StepWork` goes into an executor, `StepResult` comes out, `PassClock` times the passes.

`StepSums` adds up losses and statistics of the tasks over micro-batches. `PassClock` reads what each pass took on this
process without making a device wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.model import MultiTaskPeftModel, MuxOutput


class StepSums:
    """Sums of what the passes of a step gave for each task.

    Args:
        model: the model, which knows the statistics of each task's loss.
        tasks: names of the tasks of the step, also of those without rows in this process.
        device: device of the sums.

    Attributes:
        losses: mean loss of each task, as far as its parts were added.
        statistics: statistics `[K]` of each task whose loss has some, likewise.
    """

    def __init__(self, model: MultiTaskPeftModel, tasks: Sequence[str], device: torch.device) -> None:
        """Begin with zeros."""
        counts = {name: len(model.statistic_names(name)) for name in tasks}
        self.losses = {name: torch.zeros((), device=device) for name in tasks}
        self.statistics = {name: torch.zeros(count, device=device) for name, count in counts.items() if count}

    def add(self, output: MuxOutput) -> None:
        """Add what one pass gave."""
        for name, loss in zip(output.task_names, output.losses.unbind(), strict=True):
            self.losses[name] = self.losses[name] + loss
        for name, own in zip(output.task_names, output.statistics, strict=False):
            if own is not None:
                self.statistics[name] = self.statistics[name] + own


def pack(losses: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return losses and statistics in one float32 tensor, which travels in one message."""
    losses_N = torch.stack([loss.float() for loss in losses.values()])
    return torch.cat([losses_N, *statistics.values()]) if statistics else losses_N


def unpack(
    figures: torch.Tensor, losses: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and statistics from a tensor that `pack` has made of some of the same tasks and sizes."""
    losses_N, *rest = figures.split([len(losses), *map(len, statistics.values())])
    return dict(zip(losses, losses_N.unbind(), strict=True)), dict(zip(statistics, rest, strict=True))


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
    """Return what each task has in the micro-batch of a pass."""
    lengths, shared_rows, shared = micro_batch.sequence_lengths, micro_batch.shared, ()
    targets = micro_batch.target_offsets
    if shared_rows is not None:
        # The head and the last layer compute a row once, whatever the number of sequences that have it in common.
        targets = shared_rows.target_offsets
        rows = shared_rows.tree.row_offsets((0, *accumulate(lengths)))
        shared = tuple(length - (end - start) for length, (start, end) in zip(lengths, pairwise(rows), strict=True))
    bounds = zip(micro_batch.task_names, pairwise(micro_batch.sequence_offsets), pairwise(targets), strict=True)
    return tuple(
        TaskInPass(name, tuple(lengths[start:end]), last - first, shared[start:end])
        for name, (start, end), (first, last) in bounds
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """The global batch of every task that takes a step now, as micro-batches.

    Attributes:
        tasks: names of the tasks, in stream order.
        micro_batches: micro-batches of this process, to be run in this order; the gradients of a task add up over them.
        num_tokens: tokens of each task's global batch, by name of the task.
        failures: why the data of a task could not be read, by name of the task; these tasks take no step.
        sync_order: the tasks in the order in which the plan is done with them, the same on every process.
    """

    tasks: tuple[str, ...]
    micro_batches: tuple[MuxBatch, ...]
    num_tokens: dict[str, int]
    failures: dict[str, str] = field(default_factory=dict)
    sync_order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the multiplexed passes of a step gave; gradients lie in the parameters.

    Attributes:
        losses: mean loss of each task over its global batch, as device scalars (not yet waited for).
        num_tokens: tokens of each task's global batch, by name of the task.
        num_stream_tokens: tokens that went through the backbone of this process, padding included.
        failures: why the data of a task could not be read, passed on from the work.
        norms: gradient norm of each task over all processes, where this one holds only a part of the adapters;
            `None` where it holds all of them.
        statistics: what is logged beside the loss of a task, `[K]` over its global batch, as device tensors in the
            order of its loss's `statistic_names`; of tasks whose loss has some.
        loss_failures: why the loss function of a task's own has failed, by name of the task.
    """

    losses: dict[str, torch.Tensor]
    num_tokens: dict[str, int]
    num_stream_tokens: int
    failures: dict[str, str] = field(default_factory=dict)
    norms: dict[str, torch.Tensor] | None = None
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        work: StepWork,
        sums: StepSums,
        *,
        norms: dict[str, torch.Tensor] | None = None,
        loss_failures: dict[str, str] | None = None,
    ) -> StepResult:
        """Return the result of this process after its passes, whose losses and statistics were summed up."""
        return cls(
            sums.losses,
            work.num_tokens,
            sum(micro_batch.num_tokens for micro_batch in work.micro_batches),
            work.failures,
            norms,
            sums.statistics,
            loss_failures or {},
        )
