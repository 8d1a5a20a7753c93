"""A slow replica gets fewer rows within a few steps where measured times decide, and no result changes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from peft_mux.data.packing.passes import even_shares
from peft_mux.engine.executor import Executor
from peft_mux.planning.measurements import slow_replica
from tests.engine.processes import cases
from tests.engine.processes.cases import launch, values
from tests.invariants import mux_lab as lab
from tests.records import run_records

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

    def count(self: Executor, work: Any, *args: Any) -> Any:
        tokens.append(sum(micro_batch.num_tokens for micro_batch in work.micro_batches))
        return run(self, work, *args)

    def slowly(self: Executor, chain: Any) -> Any:
        num_tokens = sum(micro_batch.num_tokens for micro_batch in chain)
        time.sleep(num_tokens * SECONDS_PER_TOKEN * (4 if rank == slow else 1))
        return passes(self, chain)

    Executor.run, Executor.run_chain = count, slowly
    tasks = [
        lab.small_task(name, data_seed=seed, length=8 + seed, train_batch_size=8, max_steps=NUM_STEPS)
        for seed, name in enumerate(("a", "b"))
    ]
    recorder = lab.Recorder(keep_weights=False)
    lab.train(tasks, folder, recorder=recorder, ddp_timeout=cases.TIMEOUT_S, **arguments)
    return Followed(tokens, recorder.losses)


def train_with_a_process_that_is_stopped_once(rank: int, folder: Path) -> list[float]:
    """Train over two replicas; rank 1 is stopped for three seconds within a pass, as a debugger or a full host does."""
    passes, calls = Executor.run_chain, []

    def stopped_at_the_third(self: Executor, chain: Any) -> Any:
        calls.append(rank)
        if rank == 1 and len(calls) == 3:
            subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"])
            time.sleep(0.5)  # during which the signal comes
        return passes(self, chain)

    Executor.run_chain = stopped_at_the_third
    tasks = [lab.small_task("a", data_seed=1, length=8, train_batch_size=4, max_steps=6)]
    recorder = lab.Recorder(keep_weights=False)
    lab.train(tasks, folder, recorder=recorder, ddp_timeout=cases.TIMEOUT_S)
    return recorder.losses["a"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        pytest.param({}, 1, id="three equal", marks=pytest.mark.nightly),
        pytest.param({"replicas": "<1,2>, <1,1>"}, 2, id="unequal", marks=pytest.mark.slow),
    ],
)
def test_a_slow_replica_gets_fewer_rows_within_a_few_steps(
    arguments: dict[str, Any], slow: int, tmp_path: Path
) -> None:
    deciding = {"measured_times": "plan", **arguments}
    found = values(launch(3, train_with_a_slow_process, tmp_path / "plan", slow, deciding))
    tokens = found[slow].tokens
    assert sum(tokens[-4:]) < 0.6 * sum(tokens[:2]) * 2, f"of each step {tokens}"
    seen = values(launch(3, train_with_a_slow_process, tmp_path / "report", slow, arguments))
    assert sum(seen[slow].tokens[-4:]) > 0.7 * sum(tokens[:2]) * 2, "by default rows stay where they were"
    for name, losses in seen[0].losses.items():
        assert found[0].losses[name] == pytest.approx(losses, rel=1e-5)
    (slow_rank,) = run_records(tmp_path / "report", "slow_rank")
    assert slow_rank["ranks"] == [slow]
    assert slow_rank["share"] > 0.4, "it takes four times as long"


@pytest.mark.distributed
@pytest.mark.slow
def test_a_process_that_is_stopped_once_is_named_with_the_time_that_the_others_waited(tmp_path: Path) -> None:
    one, other = values(launch(2, train_with_a_process_that_is_stopped_once, tmp_path))
    assert one == other
    (slow_rank,) = run_records(tmp_path, "slow_rank")
    assert slow_rank["ranks"] == [1]
    assert 2.5 < slow_rank["waited_s"] < 10


def test_replicas_that_are_equally_fast_are_not_reported() -> None:
    steps = [(1.0 + 0.05 * (step % 2), 1.05 - 0.05 * (step % 2), 1.0) for step in range(20)]
    assert slow_replica(steps) is None
    assert slow_replica([]) is None


def test_the_wait_for_a_slow_replica_is_the_time_after_the_next_slowest() -> None:
    assert slow_replica([(1.0, 2.0, 1.5)] * 4) == (1, 2.0, 0.25)


def test_equal_replicas_divide_rows_by_time_where_one_is_slow() -> None:
    lengths = [[10] * 12, [20] * 6]
    shares = even_shares(lengths, 3, (1.0, 2.0, 1.0))
    tokens = [sum(lengths[task][row] for task in (0, 1) for row in share[task]) for share in shares]
    assert sum(tokens) == 240
    assert tokens[1] <= 0.6 * min(tokens[0], tokens[2]), "half as fast, but for a row"
    assert even_shares(lengths, 3, (1.0, 1.0, 1.0)) == even_shares(lengths, 3)
