"""The values of a step: `StepWork` is the input of an executor, `StepResult` its output, `PassClock` times the passes.

`StepSums` adds up losses and statistics of the tasks over micro-batches. `PassClock` measures each pass on this process
without synchronising with a device.
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
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.task_objective import MuxOutput


class StepSums:
    """Sums of losses and statistics of each task over the passes of a step.

    Args:
        model: the model, which defines the statistics of each task's loss.
        tasks: names of the tasks of the step, including tasks without rows in this process.
        device: device of the sums.

    Attributes:
        losses: mean loss of each task, summed over the passes added so far.
        statistics: statistics `[K]` of each task whose loss has some, summed in the same way.
    """

    def __init__(self, model: MultiTaskPeftModel, tasks: Sequence[str], device: torch.device) -> None:
        counts = {name: len(model.statistic_names(name)) for name in tasks}
        self.losses = {name: torch.zeros((), device=device) for name in tasks}
        self.statistics = {name: torch.zeros(count, device=device) for name, count in counts.items() if count}

    def add(self, output: MuxOutput) -> None:
        """Add the result of one pass."""
        for name, loss in zip(output.task_names, output.losses.unbind(), strict=True):
            self.losses[name] = self.losses[name] + loss
        for name, statistics_K in zip(output.task_names, output.statistics, strict=False):
            if statistics_K is not None:
                self.statistics[name] = self.statistics[name] + statistics_K


def pack(losses: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return losses and statistics in one float32 tensor, to be sent in one message."""
    losses_N = torch.stack([loss.float() for loss in losses.values()])
    return torch.cat([losses_N, *statistics.values()]) if statistics else losses_N


def unpack(
    figures: torch.Tensor, losses: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and statistics from a tensor that `pack` has created for the same tasks and sizes."""
    losses_N, *rest = figures.split([len(losses), *map(len, statistics.values())])
    return dict(zip(losses, losses_N.unbind(), strict=True)), dict(zip(statistics, rest, strict=True))


class TaskInPass(NamedTuple):
    """The size of a task in a pass.

    Attributes:
        task: name of the task.
        lengths: number of tokens of each of its sequences.
        num_targets: number of rows of its activations that its loss reads, or number of its loss terms if smaller.
        shared: number of tokens of each sequence that are computed for another sequence; empty if there are none.
    """

    task: str
    lengths: tuple[int, ...]
    num_targets: int
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PassTime:
    """The time of one pass, or of several interleaved passes that can only be timed together.

    Attributes:
        passes: for each pass the sizes of its tasks.
        seconds: seconds of forward and backward on this process, without waiting for other stages.
        waited_s: the part of `seconds` in which this process waited for all-reduces of its stage; `None` if there are
            none, or if it is unknown (on a GPU, and for interleaved passes).
    """

    passes: tuple[tuple[TaskInPass, ...], ...]
    seconds: float
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of the passes of a step on this process.

    Attributes:
        passes: the timed passes.
        span_s: seconds from the start of the first pass to the end of the last one; 0 if there was none.
    """

    passes: tuple[PassTime, ...] = ()
    span_s: float = 0.0


class PassClock:
    """Times passes: on a CPU with the host's clock, on a GPU with events that are read after the step.

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
        self.device = device
        self.start_step()

    def start_step(self) -> None:
        """Discard the passes of the previous step."""
        self._timed: list[tuple[tuple[tuple[TaskInPass, ...], ...], Any, Any, float | None]] = []
        self._acted: list[PassTime] = []
        self._part_s: dict[Hashable, float] = {}
        self._acted_s = 0.0

    @contextmanager
    def timing(self, micro_batches: Sequence[MuxBatch], waited_s: Callable[[], float] | None = None) -> Iterator[None]:
        """Time the passes of the `with` block.

        Args:
            micro_batches: the micro-batches that pass in it.
            waited_s: returns the seconds that this process has waited for others so far. Pass it only if the block
                waits for nothing but sums of these passes, one after another. Not called on a GPU, where the host does
                not wait.
        """
        begin = self._mark()
        before_s = waited_s() if waited_s is not None and self.device.type == "cpu" else None
        yield
        in_sums_s = None if waited_s is None or before_s is None else waited_s() - before_s
        self._timed.append((tuple(map(rows_of, micro_batches)), begin, self._mark(), in_sums_s))

    def add(self, key: Hashable, seconds: float) -> None:
        """Add the time of a part of a pass that runs in several parts, as in a pipeline, by the host's clock.

        Args:
            key: identifies the pass within the step.
            seconds: seconds of the part, without waiting for others.
        """
        self._part_s[key] = self._part_s.get(key, 0.0) + seconds

    def end(self, key: Hashable, micro_batches: Sequence[MuxBatch]) -> None:
        """Finish a pass that was timed in parts; a no-op on a GPU, where the host's clock measures only launches.

        Args:
            key: the key of the pass.
            micro_batches: the micro-batches of the pass.
        """
        seconds = self._part_s.pop(key, 0.0)
        if self.device.type == "cpu":
            self._acted.append(PassTime(tuple(map(rows_of, micro_batches)), seconds))

    def spanned(self, seconds: float) -> None:
        """Set the duration of all parts, including waiting times.

        Args:
            seconds: seconds from the start of the first part of the step to the end of the last one.
        """
        self._acted_s = seconds if self.device.type == "cpu" else 0.0

    def take(self) -> StepTimes:
        """Return the times of the step and reset; to be called when the device has finished the step."""
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
    """Return the size of each task in the micro-batch of a pass."""
    lengths, shared_rows, shared = micro_batch.sequence_lengths, micro_batch.shared, ()
    targets = micro_batch.target_offsets
    if shared_rows is not None:
        # The head computes a row once, even if several sequences share it.
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
    """The global batches of all tasks that take a step, as micro-batches.

    Attributes:
        tasks: names of the tasks, in stream order.
        micro_batches: micro-batches of this process, in execution order; the gradients of a task add up over them.
        num_tokens: number of tokens of each task's global batch, by task name.
        failures: reasons why the data of tasks could not be read, by task name; these tasks take no step.
        sync_order: the tasks in the order in which the plan finishes them, the same on every process.
    """

    tasks: tuple[str, ...]
    micro_batches: tuple[MuxBatch, ...]
    num_tokens: dict[str, int]
    failures: dict[str, str] = field(default_factory=dict)
    sync_order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of the multiplexed passes of a step; gradients are in the parameters.

    Attributes:
        losses: mean loss of each task over its global batch, as device scalars (not synchronised).
        num_tokens: number of tokens of each task's global batch, by task name.
        num_stream_tokens: number of tokens that went through the backbone of this process, including padding.
        failures: reasons why the data of tasks could not be read, copied from the work.
        norms: gradient norm of each task over all processes, if this one holds only a part of the adapters; `None` if
            it holds all of them.
        statistics: statistics that are logged with the loss of a task, `[K]` over its global batch, as device tensors
            in the order of its loss's `statistic_names`; only for tasks whose loss has some.
        loss_failures: reasons why custom loss functions of tasks have failed, by task name.
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
        """Return the result of this process from the summed losses and statistics of its passes."""
        return cls(
            sums.losses,
            work.num_tokens,
            sum(micro_batch.num_tokens for micro_batch in work.micro_batches),
            work.failures,
            norms,
            sums.statistics,
            loss_failures or {},
        )
