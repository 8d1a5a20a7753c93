"""Which replica trains which sequences: none is lost, all fit, all processes agree, and solving runs ahead."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.steps import BatchesAhead
from peft_mux.errors import ConfigError, DataError
from peft_mux.parallel.dispatch import DispatchedShares
from peft_mux.parallel.layout import parse_layout
from peft_mux.scheduler.parallel_layout import ParallelConfig
from tests.engine.processes import cases as parallel_cases
from tests.parallel.replicas import dispatch_cases as cases
from tests.scheduler.dispatching.cases import GivingUpSolver, RaisingSolver

LAYOUT = parse_layout(cases.LAYOUT)
LIMITS = [cases.LIMITS[config] for config in LAYOUT.replicas]
MANY_SHORT = {"short": tuple(range(20, 120)), "long": (900, 700, 400)}
_ROWS = st.lists(st.integers(1, 1024), max_size=12)


def shares_of(**options: Any) -> DispatchedShares:
    return DispatchedShares(LAYOUT, cases.times(), **options)


def lengths_by_replica(divided: list[list[list[int]]], batches: list[TaskBatch]) -> list[list[int]]:
    return [
        [len(batch.sequences[row]) for batch, rows in zip(batches, share, strict=True) for row in rows]
        for share in divided
    ]


def assert_complete(divided: list[list[list[int]]], batches: list[TaskBatch]) -> None:
    for task, batch in enumerate(batches):
        rows = [row for share in divided for row in share[task]]
        assert sorted(rows) == list(range(len(batch.sequences))), f"rows of {batch.task} are lost or doubled"
        assert all(share[task] == sorted(share[task]) for share in divided)


# ---------------------------------------------------------------- unlike replicas


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), _ROWS, min_size=1))
def test_every_sequence_goes_to_one_replica_that_can_hold_it(tasks: dict[str, list[int]]) -> None:
    batches = cases.batches_of(tasks)
    shares = shares_of(policy="balanced")
    divided = shares.divide(batches)
    shares.close()
    assert_complete(divided, batches)
    for lengths, limit in zip(lengths_by_replica(divided, batches), LIMITS, strict=True):
        assert max(lengths, default=0) <= limit


@pytest.mark.parametrize("policy", ["balanced", "length", "uniform"])
def test_the_same_lengths_are_divided_equally_each_time(policy: Any) -> None:
    batches = cases.batches_of(cases.SKEWED)
    first, second = shares_of(policy=policy), shares_of(policy=policy)
    assert first.divide(batches) == second.divide(batches)
    assert_complete(first.divide(batches), batches)


def test_a_step_that_is_shorter_than_a_solver_takes_to_start_is_divided_by_moves() -> None:
    batches = cases.batches_of(MANY_SHORT)
    short, solved = shares_of(solver=RaisingSolver()), shares_of(least_solved_s=0.0)
    assert_complete(short.divide(batches), batches)
    solved.begin(batches)
    assert short.solved is not None
    assert (short.solved.status, short.solved.note) == ("by moves", "")
    assert max(short.expected_s) < 1.1 * max(solved.expected_s)


def test_the_sequences_of_a_bucket_are_dealt_evenly_over_tasks() -> None:
    tasks = {"a": (100,) * 12, "b": (100,) * 6, "long": (1000,)}
    divided = shares_of(policy="uniform").divide(cases.batches_of(tasks))
    assert sorted(len(share[0]) for share in divided) == [3, 3, 3, 3]
    assert sorted(len(share[1]) for share in divided) == [1, 1, 2, 2]


@pytest.mark.parametrize("solver", [GivingUpSolver(), RaisingSolver()])
def test_a_step_is_divided_although_the_solver_finds_nothing(solver: Any) -> None:
    batches = cases.batches_of(cases.SKEWED)
    shares = shares_of(solver=solver, least_solved_s=0.0)
    divided = shares.divide(batches)
    assert_complete(divided, batches)
    assert shares.solved is not None
    assert shares.solved.status == "greedy fallback"
    assert max(max(own, default=0) for own in lengths_by_replica(divided, batches)) == 900


def test_rows_that_are_cut_go_to_the_largest_replica_whatever_their_length() -> None:
    batches = [cases.batch_of("chat", (10, 200, 31)), cases.batch_of("books", (20, 5000, 1025))]
    shares = shares_of(cuts_rows=True)
    assert [shares.refusal(batch) for batch in batches] == [None, None]
    divided = shares.divide(batches)
    assert_complete(divided, batches)
    own = lengths_by_replica(divided, batches)
    assert {1025, 5000} <= set(own[2])
    assert max(max(own[replica], default=0) for replica in (0, 1, 3)) <= 256
    shares.prepare([cases.batch_of("books", (5000,), step=1)])
    shares.begin([cases.batch_of("books", (4000,), step=1)])  # both are cut, and so cost the same
    assert shares.clock.num_ahead == 1
    shares.close()


def test_rows_and_replicas_that_do_not_fit_are_refused_by_name() -> None:
    shares, limit = shares_of(), r"must have at most 1024 tokens, the maximum of the replicas <1,1>x2, <2,1>x1, <1,1>x1"
    batches = [cases.batch_of("chat", (10, 1024)), cases.batch_of("books", (20, 1025))]
    assert shares.refusal(batches[0]) is None, "it can be asked before a step"
    assert re.search(rf"row 1 {limit}, got 1025", shares.refusal(batches[1]) or "")
    with pytest.raises(ConfigError, match=rf"tasks\.books: row 1 {limit}"):
        shares.begin(batches)
    alike = DispatchedShares(parse_layout("<1,1>x2"))
    assert alike.refusal(cases.batch_of("chat", (10**6,))) is None
    with pytest.raises(ConfigError, match="<1,1>x1 differ, which needs a time model that has each of them"):
        DispatchedShares(LAYOUT)
    with pytest.raises(ConfigError, match=r"of which <2,1> cannot hold any sequence"):
        DispatchedShares(LAYOUT, cases.times({ParallelConfig(1, 1): 256}))


# ------------------------------------------------------------------ htask by htask


def test_what_begin_decides_is_reported_for_each_htask() -> None:
    batches = cases.batches_of(cases.SKEWED)
    whole, parts = shares_of(), shares_of()
    divided = whole.divide(batches)
    parts.begin(batches)
    for place, batch in enumerate(batches):
        assert parts.divide([batch]) == [[share[place]] for share in divided]
    assert parts.clock.num_steps == 1


# -------------------------------------------------------------------- ahead of time


def test_a_step_that_was_prepared_is_not_solved_again() -> None:
    shares = shares_of()
    first, second = (cases.batches_of(cases.SKEWED, step) for step in range(2))
    shares.begin(first)
    assert (shares.clock.num_steps, shares.clock.num_ahead) == (1, 0)
    shares.prepare(second)
    shares.begin(second)
    assert (shares.clock.num_steps, shares.clock.num_ahead) == (2, 1)
    cold = shares_of()
    cold.begin(first)
    cold.begin(second)
    assert cold.divide(second) == shares.divide(second)
    assert cold.clock.num_ahead == 0
    shares.close()
    cold.close()


def test_a_step_that_turns_out_another_one_is_solved_when_it_begins() -> None:
    shares = shares_of()
    shares.prepare(cases.batches_of(cases.SKEWED, 1))
    left = {name: lengths for name, lengths in cases.SKEWED.items() if name != "books"}
    batches = cases.batches_of(left, 1)
    divided = shares.divide(batches)
    assert_complete(divided, batches)
    assert (shares.clock.num_steps, shares.clock.num_ahead) == (1, 0)


def test_preparing_returns_while_the_solver_still_runs_and_the_wait_is_counted() -> None:
    released = threading.Event()

    class SlowSolver(GivingUpSolver):
        def actualSolve(self, lp: Any, **arguments: Any) -> int:
            assert released.wait(20)
            return super().actualSolve(lp, **arguments)

    shares = shares_of(solver=SlowSolver())
    batches = cases.batches_of(cases.SKEWED)
    shares.prepare(batches)  # would never return if it solved
    released.set()
    assert_complete(shares.divide(batches), batches)
    assert shares.clock.num_ahead == 1
    assert shares.clock.waited_s > 0
    assert 0 <= shares.clock.hidden_share <= 1
    assert "1 steps, 1 solved ahead" in str(shares.clock)


# --------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.distributed
def test_real_processes_dispatch_three_steps_as_rank_0_does_and_solve_ahead_and_refuse_together() -> None:
    found = parallel_cases.values(parallel_cases.launch(3, cases.three_steps_over_gloo))
    batches = cases.batches_of(cases.SKEWED)
    for key in ("divided", "expected_s", "max_tokens", "refused"):
        assert found[0][key] == found[1][key] == found[2][key]
    for divided in found[0]["divided"]:
        assert_complete(divided, batches)
    assert found[0]["max_tokens"] == (256, 256, 924, 256)
    assert "at most 924" in found[0]["refused"]
    assert [one["num_ahead"] for one in found] == [2, 0, 0]
    assert [one["has_solved"] for one in found] == [True, False, False]
    assert found[0]["solve_s"] > 0
    assert found[1]["solve_s"] == 0


# ------------------------------------------------------------------ batches ahead


class LoaderOfThree:
    """Reads steps before the third."""

    def batch(self, step: int) -> TaskBatch:
        if step == 3:
            raise DataError("row 7 has nothing")
        return cases.batch_of("a", (5,), step)


def test_rows_that_cannot_be_read_early_fail_the_step_that_they_are_of() -> None:
    task: Any = SimpleNamespace(name="a", num_steps=5, step=2, loader=LoaderOfThree())
    ahead = BatchesAhead()
    assert ahead.read([task]) == []
    assert ahead.take(task).step == 2
    ahead.read([task])
    task.step = 3
    with pytest.raises(DataError, match="row 7"):
        ahead.take(task)
