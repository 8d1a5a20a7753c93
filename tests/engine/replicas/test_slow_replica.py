"""A slow replica gets fewer rows within a few steps where measured times decide, and no result changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peft_mux.data.packing.passes import even_shares
from peft_mux.engine.dispatch import DispatchedShares
from peft_mux.engine.layout import ParallelLayout
from peft_mux.scheduler.dispatching.rates import ReplicaRates
from peft_mux.trainer.plan_follower import slow_replica
from tests.engine.processes.cases import launch, values
from tests.engine.replicas import dispatch_cases, slow_cases
from tests.records import run_records

LAYOUT = ParallelLayout.parse(dispatch_cases.LAYOUT)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "slow"),
    [pytest.param({}, 1, id="three equal"), pytest.param({"replicas": "<1,2>, <1,1>"}, 2, id="unequal")],
)
def test_a_slow_replica_gets_fewer_rows_within_a_few_steps(
    arguments: dict[str, Any], slow: int, tmp_path: Path
) -> None:
    deciding = {"measured_times": "plan", **arguments}
    found = values(launch(3, slow_cases.train_with_a_slow_process, tmp_path / "plan", slow, deciding))
    tokens = found[slow].tokens
    assert sum(tokens[-4:]) < 0.6 * sum(tokens[:2]) * 2, f"of each step {tokens}"
    told = values(launch(3, slow_cases.train_with_a_slow_process, tmp_path / "report", slow, arguments))
    assert sum(told[slow].tokens[-4:]) > 0.7 * sum(tokens[:2]) * 2, "by default rows stay where they were"
    for name, losses in told[0].losses.items():
        assert found[0].losses[name] == pytest.approx(losses, rel=1e-5)
    (slow_rank,) = run_records(tmp_path / "report", "slow_rank")
    assert slow_rank["ranks"] == [slow]
    assert slow_rank["share"] > 0.4, "it takes four times as long"


@pytest.mark.distributed
@pytest.mark.slow
def test_a_process_that_is_stopped_once_is_named_with_the_time_that_the_others_waited(tmp_path: Path) -> None:
    one, other = values(launch(2, slow_cases.train_with_a_process_that_is_stopped_once, tmp_path))
    assert one == other
    (slow_rank,) = run_records(tmp_path, "slow_rank")
    assert slow_rank["ranks"] == [1]
    assert 2.5 < slow_rank["waited_s"] < 10


@pytest.mark.distributed
@pytest.mark.slow
def test_a_slow_pipeline_is_named_by_all_its_ranks(tmp_path: Path) -> None:
    values(launch(4, slow_cases.train_with_a_slow_stage, tmp_path, 2))
    (slow_rank,) = run_records(tmp_path, "slow_rank")
    assert slow_rank["ranks"] == [2, 3]
    assert slow_rank["share"] > 0.2


def test_replicas_that_are_equally_fast_are_not_reported() -> None:
    steps = [(1.0 + 0.05 * (step % 2), 1.05 - 0.05 * (step % 2), 1.0) for step in range(20)]
    assert slow_replica(steps) is None
    assert slow_replica([]) is None


def test_the_wait_for_a_slow_replica_is_the_time_after_the_next_slowest() -> None:
    assert slow_replica([(1.0, 2.0, 1.5)] * 4) == (1, 2.0, 0.25)


def test_rows_follow_the_rate_of_a_replica_among_others_of_its_configuration() -> None:
    rates = ReplicaRates(LAYOUT.num_replicas)
    shares = DispatchedShares(LAYOUT, dispatch_cases.times(), rates=rates)
    tokens = []
    for step in range(8):
        batches = dispatch_cases.batches_of({"short": tuple(range(20, 120))}, step)
        divided = shares.divide(batches)
        shares.prepare(dispatch_cases.batches_of({"short": tuple(range(20, 120))}, step + 1))
        tokens.append([sum(len(batches[0].sequences[row]) for row in share[0]) for share in divided])
        # Processes 0 and 1 are replicas of their own, 2 and 3 make one up, 4 is the last: at the stated speed, except
        # one.
        busy = [shares.expected_s[replica] for replica in (0, 1, 2, 2, 3)]
        shares.observe([3 * busy[0], *busy[1:]])
    shares.close()
    assert rates.slowness[0] > 2.5
    assert rates.slowness[1:] == (1.0, 1.0, 1.0)
    assert tokens[0][0] == pytest.approx(tokens[0][1], rel=0.1)
    assert tokens[-1][0] < 0.5 * tokens[-1][1]
    assert sum(tokens[-1]) == sum(tokens[0])


def test_without_rates_nothing_is_learnt() -> None:
    shares = DispatchedShares(LAYOUT, dispatch_cases.times())
    batches = dispatch_cases.batches_of(dispatch_cases.SKEWED)
    first = shares.divide(batches)
    shares.observe([100.0, 1.0, 1.0, 1.0, 1.0])
    assert shares.divide(batches) == first
    shares.close()


def test_equal_replicas_divide_rows_by_time_where_one_is_slow() -> None:
    lengths = [[10] * 12, [20] * 6]
    shares = even_shares(lengths, 3, (1.0, 2.0, 1.0))
    tokens = [sum(lengths[task][row] for task in (0, 1) for row in share[task]) for share in shares]
    assert sum(tokens) == 240
    assert tokens[1] <= 0.6 * min(tokens[0], tokens[2]), "half as fast, but for a row"
    assert even_shares(lengths, 3, (1.0, 1.0, 1.0)) == even_shares(lengths, 3)
