"""What M is compared with: all tasks in one batch, every task by itself in each step, and one task after another."""

from __future__ import annotations

import numpy as np

from peft_mux.scheduler.pipeline.template import Schedule
from peft_mux.scheduler.planner.policies.policy import Partition, apart, together


class Together:
    """One hTask of all tasks, as SL-PEFT has it."""

    name = "together"
    words = "all tasks in one batch"
    runs_alone = False
    search_schedule: Schedule | None = None

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        """Return the one partition that puts all tasks together."""
        return [together(len(latency_s))]


class Interleaved:
    """One hTask for each task; each is a bucket of its own, so that buckets alone are interleaved."""

    name = "interleaved"
    words = "every task by itself, one after another in each step"
    runs_alone = False
    search_schedule: Schedule | None = None

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        """Return the one partition that keeps all tasks apart."""
        return [apart(len(latency_s))]


class Sequential:
    """One task after another to its end, as a trainer of single tasks has it."""

    name = "sequential"
    words = "one task at a time"
    runs_alone = True
    search_schedule: Schedule | None = None

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        """Return the one partition of the single task that is admitted."""
        return [apart(len(latency_s))]
