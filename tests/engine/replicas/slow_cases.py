"""A run of several real processes of which one is slow, for the tests of rows that follow measured rates."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.engine.executor import Executor
from peft_mux.engine.pipeline.stage import StageModel
from tests.engine.processes import cases
from tests.invariants import mux_lab as lab

NUM_STEPS = 12
SECONDS_PER_TOKEN = 2e-3
"""Longer than all of the real work, even on a busy host."""


class Followed(NamedTuple):
    """What a run showed to one process.

    Attributes:
        tokens: that this process has passed in each step.
        losses: of each task by its steps.
    """

    tokens: list[int]
    losses: dict[str, list[float]]


def train_with_a_slow_process(rank: int, folder: Path, slow: int, arguments: dict[str, Any]) -> Followed:
    """Train over replicas; each token takes some time everywhere, and four times as long on one process."""
    tokens: list[int] = []
    run, passes = Executor.run, Executor.run_chain

    def count(self: Executor, work: Any) -> Any:
        tokens.append(sum(micro_batch.num_tokens for micro_batch in work.micro_batches))
        return run(self, work)

    def slowly(self: Executor, chain: Any, most_passes: int = 0) -> Any:
        num_tokens = sum(micro_batch.num_tokens for micro_batch in chain)
        time.sleep(num_tokens * SECONDS_PER_TOKEN * (4 if rank == slow else 1))
        return passes(self, chain, most_passes)

    Executor.run, Executor.run_chain = count, slowly
    tasks = [
        lab.small_task(name, data_seed=seed, length=8 + seed, train_batch_size=8, max_steps=NUM_STEPS)
        for seed, name in enumerate(("a", "b"))
    ]
    recorder = lab.Recorder(keep_weights=False)
    lab.train(tasks, folder, recorder=recorder, ddp_timeout=cases.TIMEOUT_S, **arguments)
    return Followed(tokens, recorder.losses)


def train_with_a_slow_stage(rank: int, folder: Path, slow: int) -> None:
    """Train over two pipelines of two stages; one stage sleeps in each of its passes."""
    forward = StageModel.forward

    def slowly(self: StageModel, *arguments: Any) -> Any:
        time.sleep(0.2 if rank == slow else 0.0)
        return forward(self, *arguments)

    StageModel.forward = slowly
    task = lab.small_task("a", data_seed=0, length=8, train_batch_size=8, max_steps=NUM_STEPS)
    lab.train([task], folder, ddp_timeout=cases.TIMEOUT_S, replicas="<1,2>x2")


def train_with_a_process_that_is_stopped_once(rank: int, folder: Path) -> list[float]:
    """Train over two replicas; rank 1 is stopped for three seconds within a pass, as a debugger or a full host does."""
    passes, calls = Executor.run_chain, []

    def stopped_at_the_third(self: Executor, chain: Any, most_passes: int = 0) -> Any:
        calls.append(rank)
        if rank == 1 and len(calls) == 3:
            subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
            time.sleep(0.5)  # during which the signal comes
        return passes(self, chain, most_passes)

    Executor.run_chain = stopped_at_the_third
    tasks = [lab.small_task("a", data_seed=1, length=8, train_batch_size=4, max_steps=6)]
    recorder = lab.Recorder(keep_weights=False)
    lab.train(tasks, folder, recorder=recorder, ddp_timeout=cases.TIMEOUT_S)
    return recorder.losses["a"]
