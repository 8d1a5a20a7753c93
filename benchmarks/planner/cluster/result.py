"""What a cluster replay found: what became of each task, throughput, waiting and completion times, use of the GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What became of one task.

    Attributes:
        index: position of the task in the trace, from 0.
        submit_s: when it was submitted, in seconds since the start of the trace.
        start_s: when it was placed, in seconds since the start of the trace; `None` if never.
        end_s: when its work was done, in seconds since the start of the trace; `None` if not before the horizon.
        rejected: whether it found the queue full.
        trained_tokens: effective tokens by the end of the replay.
    """

    index: int
    submit_s: float
    start_s: float | None
    end_s: float | None
    rejected: bool
    trained_tokens: float


@dataclass(frozen=True, slots=True)
class Replay:
    """One system on one trace.

    Attributes:
        system: name of the system, one of `SYSTEMS` in `instance.py`.
        num_gpus: GPUs of the whole cluster.
        gpus_per_instance: GPUs of each instance.
        elapsed_s: seconds from the start of the trace to the horizon or the last end.
        records: what became of each task, in the order of submission.
        allocated_gpu_s: GPU seconds of instances that held a task.
        busy_gpu_s: GPU seconds in which a stage of an instance computed, padding included.
        computed_tokens: tokens that all instances computed, padding included.
        timeline: (seconds since the start, tasks running, tasks waiting, effective tokens/s) after each change.
        assumptions: what the replay takes for granted, in sentences.
    """

    system: str
    num_gpus: int
    gpus_per_instance: int
    elapsed_s: float
    records: tuple[TaskRecord, ...]
    allocated_gpu_s: float
    busy_gpu_s: float
    computed_tokens: float
    timeline: tuple[tuple[float, int, int, float], ...]
    assumptions: tuple[str, ...]

    @property
    def trained_tokens(self) -> float:
        """Effective tokens of all tasks: those that users asked for."""
        return math.fsum(record.trained_tokens for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        """Effective throughput of the cluster."""
        return self.trained_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def waiting_s(self) -> tuple[float, ...]:
        """Seconds from submission to placement of the tasks that were placed."""
        return tuple(record.start_s - record.submit_s for record in self.records if record.start_s is not None)

    @property
    def completion_s(self) -> tuple[float, ...]:
        """Seconds from submission to end of the tasks that ended."""
        return tuple(record.end_s - record.submit_s for record in self.records if record.end_s is not None)

    @property
    def num_rejected(self) -> int:
        """Tasks that found the queue full."""
        return sum(record.rejected for record in self.records)

    @property
    def allocation(self) -> float:
        """Part of the cluster's GPU time that belonged to instances with tasks."""
        return self._part(self.allocated_gpu_s)

    @property
    def utilization(self) -> float:
        """Part of the cluster's GPU time in which a stage computed."""
        return self._part(self.busy_gpu_s)

    def summary(self) -> dict[str, Any]:
        """Return the figures as JSON types, times in minutes; `None` where no task gives a figure."""
        return {
            "system": self.system,
            "tokens_per_s": self.tokens_per_s,
            "computed_tokens_per_s": self.computed_tokens / self.elapsed_s if self.elapsed_s else 0.0,
            "submitted": len(self.records),
            "started": len(self.waiting_s),
            "ended": len(self.completion_s),
            "rejected": self.num_rejected,
            "waiting_minutes": _distribution(self.waiting_s),
            "completion_minutes": _distribution(self.completion_s),
            "allocation": self.allocation,
            "utilization": self.utilization,
            "elapsed_s": self.elapsed_s,
        }

    def to_json(self) -> str:
        """Return figures, records and assumptions as JSON."""
        return json.dumps({**asdict(self), "summary": self.summary()}, indent=1)

    def _part(self, gpu_s: float) -> float:
        return gpu_s / (self.num_gpus * self.elapsed_s) if self.elapsed_s else 0.0


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean and percentiles in minutes, by linear interpolation."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    figures = {"mean": math.fsum(ordered) / len(ordered) / 60}
    for percent in (50, 90, 99):
        place = percent / 100 * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        figures[f"p{percent}"] = (ordered[low] + (place - low) * (ordered[high] - ordered[low])) / 60
    return figures
