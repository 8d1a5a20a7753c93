"""Batches, time models and processes for the tests of dispatch over replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.errors import ConfigError
from peft_mux.parallel.dispatch import DispatchedShares
from peft_mux.parallel.layout import parse_layout
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import LayerFit, ReplicaTimeModel
from tests.engine.processes.cases import connected

LAYOUT = "<1,1>x2, <2,1>x1, <1,1>"
"""Four replicas of two configurations, which do not lie side by side."""
LIMITS = {ParallelConfig(1, 1): 256, ParallelConfig(2, 1): 1024, ParallelConfig(1, 2): 512}
SKEWED = {"chat": (12, 30, 18, 250, 40, 33, 21, 17), "books": (900, 700, 64, 80), "code": (130, 90, 256, 1, 500)}


def times(limits: dict[ParallelConfig, int] = LIMITS) -> ReplicaTimeModel:
    """Return a model in which two devices are less than twice as fast as one."""
    fits = {tp: LayerFit((1e-9 / tp, 0, 1e-6 / tp**0.7, 0, 0, 1e-6)) for tp in (1, 2)}
    return ReplicaTimeModel(fits, num_layers=2, max_tokens=limits)


def batch_of(task: str, lengths: Sequence[int], step: int = 0) -> TaskBatch:
    rows = (TokenSequence(np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), i) for i, n in enumerate(lengths))
    return TaskBatch(task, step, seed=0, sequences=tuple(rows))


def batches_of(tasks: dict[str, Sequence[int]], step: int = 0) -> list[TaskBatch]:
    return [batch_of(task, lengths, step) for task, lengths in tasks.items()]


def three_steps_over_gloo(rank: int) -> dict[str, Any]:
    """Dispatch three steps on a real process, each prepared while the one before it runs; then what no replica holds.

    Ranks but the first have another policy: what rank 0 finds must count.
    """
    processes = connected(20.0)
    # Another limit on another machine: the least of all must count.
    limits = {**LIMITS, ParallelConfig(1, 1): 256 + 64 * rank, ParallelConfig(2, 1): 1024 - 50 * rank}
    policy: Any = "balanced" if rank == 0 else "length"
    shares = DispatchedShares(parse_layout(LAYOUT), times(limits), processes, policy=policy)
    divided = []
    for step in range(3):
        batches = batches_of(SKEWED, step)
        shares.begin(batches)
        shares.prepare(batches_of(SKEWED, step + 1))
        divided.append(shares.divide(batches))
        time.sleep(0.3)  # the passes of the step
    found = {
        "divided": divided,
        "expected_s": shares.expected_s,
        "max_tokens": shares.max_tokens,
        "num_ahead": shares.clock.num_ahead,
        "has_solved": shares.solved is not None,
        "solve_s": shares.clock.solve_s,
    }
    with pytest.raises(ConfigError) as refused:
        shares.begin([batch_of("books", (1000,))])
    shares.close()
    return {**found, "refused": str(refused.value)}
