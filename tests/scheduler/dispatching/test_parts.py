"""The parts of dispatch: the programme, the moves before and after it, and the split within a group."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.dispatching import dispatch as dispatch_refine
from peft_mux.scheduler.dispatching import ilp as dispatch_ilp
from peft_mux.scheduler.dispatching.ahead import plan_step
from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.dispatching.dispatch import dispatch, predict_replica_s, refine, split_within_group
from peft_mux.scheduler.dispatching.problem import (
    build_problem,
    carried_over,
    ceilings_of,
    counts_from_ceilings,
    length_based,
    relocate,
)
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from tests.scheduler.dispatching.cases import (
    THREE_GROUPS,
    MicroBatchModel,
    StoppedSolver,
    brute_force_eq_3,
    small_cases,
    some_groups,
)


@given(small_cases())
@settings(max_examples=30, deadline=None)
def test_the_programme_has_the_optimum_of_equation_3(case: tuple[list[ReplicaGroup], Bucketing]) -> None:
    groups, bucketing = case
    model = MicroBatchModel()
    problem = build_problem(groups, bucketing, model)
    by_length = np.array(dispatch(groups, bucketing, model, policy="length").counts)
    answer = dispatch_ilp.solve_ilp(problem, ceilings_of(problem, by_length), time_limit_s=10, relative_gap=0.0)
    assert answer is not None
    assert answer.proven
    found_s = float(problem.group_s(answer.ceilings).max())
    assert found_s == pytest.approx(brute_force_eq_3(groups, bucketing, model), rel=1e-6)


@given(small_cases())
@settings(max_examples=20, deadline=None)
def test_moving_work_off_the_slowest_group_loses_nothing_and_slows_nothing(
    case: tuple[list[ReplicaGroup], Bucketing],
) -> None:
    groups, bucketing = case
    problem = build_problem(groups, bucketing, MicroBatchModel())
    by_length = length_based(problem)
    moved = relocate(problem, by_length)
    assert (problem.num_replicas @ moved >= problem.num_sequences).all()
    assert (moved[~problem.fits] == 0).all()
    assert problem.group_s(moved).max() <= problem.group_s(ceilings_of(problem, by_length)).max()


@given(small_cases())
@settings(max_examples=20, deadline=None)
def test_no_single_move_makes_a_refined_dispatch_faster(case: tuple[list[ReplicaGroup], Bucketing]) -> None:
    groups, bucketing = case
    model = MicroBatchModel()
    problem = build_problem(groups, bucketing, model)
    start = ceilings_of(problem, length_based(problem))
    found = refine(problem, groups, model, start)
    assert found.is_final
    refined = found.ceilings

    def makespan_s(ceilings: np.ndarray) -> float:
        return max(
            predict_replica_s(problem, group, model, row) for group, row in zip(groups, ceilings.tolist(), strict=True)
        )

    assert (problem.num_replicas @ refined >= problem.num_sequences).all()
    assert makespan_s(refined) <= makespan_s(start)
    for giver, receiver in product(range(len(groups)), repeat=2):
        for bucket in range(bucketing.num_buckets):
            moved = refined.copy()
            moved[giver, bucket] -= 1
            lacking = max(0, int(problem.num_sequences[bucket] - problem.num_replicas @ moved[:, bucket]))
            moved[receiver, bucket] += -(-lacking // groups[receiver].count)
            if moved[giver, bucket] >= 0 and (giver != receiver) and (problem.fits[receiver, bucket] or not lacking):
                assert makespan_s(moved) >= makespan_s(refined) * (1 - 1e-6)


class StartReader(pulp.LpSolver):
    """Takes the first solution that it is given for its answer, and remembers which constraints that breaks."""

    name = "START_READER"

    def actualSolve(self, lp: Any, **arguments: Any) -> int:
        # PuLP 4 gives a list for a call, PuLP 2 a mapping.
        held = lp.constraints
        constraints = cast("Any", held() if callable(held) else held.values())
        self.broken = [str(constraint) for constraint in constraints if not constraint.valid(1e-9)]
        self.unset = [variable.name for variable in lp.variables() if variable.varValue is None]
        self.outside = [variable.name for variable in lp.variables() if not self.unset and not variable.valid(1e-9)]
        lp.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
        return pulp.LpStatusOptimal


@given(small_cases())
@settings(max_examples=30, deadline=None)
def test_a_known_dispatch_is_a_feasible_start_of_the_whole_programme(
    case: tuple[list[ReplicaGroup], Bucketing],
) -> None:
    problem = build_problem(*case, MicroBatchModel())
    known, reader = relocate(problem, length_based(problem)), StartReader()
    options = {"solver": reader, "time_limit_s": 1.0, "relative_gap": 0.0, "start_from_known": True}
    answer = dispatch_ilp.solve_ilp(problem, known, **options)
    assert (reader.unset, reader.outside, reader.broken) == ([], [], [])
    assert answer is not None
    assert (answer.ceilings == known).all()


def test_cbc_accepts_the_start_where_a_pipeline_is_deployed(tmp_path: Path) -> None:
    groups = some_groups((1, 1, 3, 1024), (1, 4, 2, 4096), (2, 1, 2, 4096), (4, 1, 2, 8192))
    problem = build_problem(
        groups, Bucketing((300, 500, 1000, 2000, 3000, 8000), (91, 40, 21, 13, 7, 1), 0), MicroBatchModel()
    )
    known = relocate(problem, length_based(problem))
    assert problem.constant_s.any(), "no group has a variable for its use"
    assert known[1].any(), "the pipeline is idle in the start"
    log = tmp_path / "cbc.log"
    name = next(name for name in ("PULP_CBC_CMD", "COIN_CMD") if name in pulp.listSolvers())
    solver = pulp.getSolver(name, msg=False, warmStart=True, logPath=str(log), timeLimit=10)
    dispatch_ilp.solve_ilp(problem, known, solver=solver, time_limit_s=10, relative_gap=0.0, start_from_known=True)
    said = log.read_text(encoding="utf-8")
    assert "MIPStart provided solution with cost" in said
    assert float(said.partition("MIPStart provided solution with cost ")[2].split()[0]) == pytest.approx(1.0, rel=1e-4)


def test_moves_see_the_micro_batch_that_the_linear_form_does_not() -> None:
    groups = some_groups((1, 1, 1, 1000), (1, 1, 1, 1000))
    bucketing = Bucketing((100, 1000), (30, 1), padding_tokens=0)

    class DearPass(MicroBatchModel):
        def _pass_s(self, config: ParallelConfig, sequences: int, length: int) -> float:
            return 100.0 + sequences if sequences else 0.0

    model = DearPass()
    problem = build_problem(groups, bucketing, model)
    uneven = np.array([[11, 1], [19, 0]])
    assert [predict_replica_s(problem, groups[0], model, row) for row in uneven.tolist()] == [312.0, 219.0]
    assert refine(problem, groups, model, uneven).ceilings.tolist() == [[10, 1], [20, 0]]


def test_moves_that_are_stopped_by_their_number_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, bucketing = THREE_GROUPS, Bucketing((500, 1000, 2000), (60, 21, 7), 0)
    whole = dispatch(groups, bucketing, MicroBatchModel(), solver=StoppedSolver())
    problem = build_problem(groups, bucketing, MicroBatchModel())
    start = ceilings_of(problem, length_based(problem))
    needed = refine(problem, groups, MicroBatchModel(), start)
    assert needed.is_final
    assert needed.num_moves > 1
    assert whole.note == ""
    monkeypatch.setattr(dispatch_refine, "_MOST_MOVES", needed.num_moves - 1)
    stopped = refine(problem, groups, MicroBatchModel(), start)
    assert not stopped.is_final
    assert stopped.num_moves == needed.num_moves - 1
    monkeypatch.setattr(dispatch_refine, "_MOST_MOVES", 0)
    said = dispatch(groups, bucketing, MicroBatchModel(), solver=StoppedSolver()).summary()
    assert "note  moves were stopped after 0, more may help" in said


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.integers(1, 9),
    st.lists(st.floats(0.0, 10.0), min_size=8, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_replicas_of_a_group_differ_by_at_most_the_costliest_sequence(
    counts: list[int], num_replicas: int, seconds: list[float]
) -> None:
    costs = seconds[: len(counts)]
    shares = split_within_group(counts, num_replicas, costs)
    assert [sum(column) for column in zip(*shares, strict=True)] == counts
    for share in shares:
        for part, total in zip(share, counts, strict=True):
            assert part in (total // num_replicas, -(-total // num_replicas))
    loads = [float(np.dot(share, costs)) for share in shares]
    assert max(loads) - min(loads) <= max(costs) + 1e-9


def test_sequences_of_a_bucket_are_dealt_in_all_lengths() -> None:
    lengths = list(range(1, 101))
    groups = some_groups((1, 1, 4, 128))
    work = plan_step(lengths, groups, MicroBatchModel(), num_buckets=1, interval=128)
    tokens = [sum(lengths[index] for index in replica) for replica in work.assignment]
    assert max(tokens) - min(tokens) <= 100, "dealing by position alone would leave some 1,250 between two replicas"


def test_ceilings_with_room_take_it_off_the_slowest_group() -> None:
    groups = some_groups((1, 1, 2, 1000), (1, 1, 1, 1000))
    problem = build_problem(groups, Bucketing((500,), (8,), padding_tokens=0), MicroBatchModel())
    assert counts_from_ceilings(problem, np.array([[3], [3]])).tolist() == [[5], [3]]
    assert counts_from_ceilings(problem, np.array([[2], [5]])).tolist() == [[4], [4]]


def test_a_carried_over_dispatch_keeps_the_shares_of_the_nearest_bucket() -> None:
    problem = build_problem(THREE_GROUPS, Bucketing((768, 1792, 8192), (10, 7, 3), 0), MicroBatchModel())
    last = np.array([[12, 4, 0], [6, 0, 2], [0, 0, 4]])
    carried = carried_over(problem, np.array([512, 1024, 2048]), last)
    assert carried.tolist() == [[7, 0, 0], [3, 2, 0], [0, 5, 3]]


@given(small_cases(), small_cases())
@settings(max_examples=30, deadline=None)
def test_a_carried_over_dispatch_loses_nothing_whatever_the_last_step_was(
    case: tuple[list[ReplicaGroup], Bucketing], other: tuple[list[ReplicaGroup], Bucketing]
) -> None:
    groups, bucketing = case
    problem = build_problem(groups, bucketing, MicroBatchModel())
    last = dispatch(groups, replace(other[1], boundaries=(100, 300, 500)[: other[1].num_buckets]), MicroBatchModel())
    carried = carried_over(problem, np.array(last.boundaries), np.array(last.counts))
    assert (carried.sum(axis=0) == problem.num_sequences).all()
    assert (carried[~problem.fits] == 0).all()


@pytest.mark.parametrize(("tp", "kept"), [(2, 1), (4, 2)])
def test_work_moves_to_an_idle_pipeline_only_where_its_bubble_is_paid_for(tp: int, kept: int) -> None:
    groups = some_groups((tp, 1, 1, 1000), (1, 8, 1, 1000))
    problem = build_problem(groups, Bucketing((1000,), (2,), padding_tokens=0), MicroBatchModel())
    alone_s, shared_s = (float(problem.group_s(np.array(x)).max()) for x in ([[2], [0]], [[1], [1]]))
    assert (shared_s < alone_s) == (kept == 1)
    assert relocate(problem, np.array([[2], [0]])).tolist() == [[kept], [2 - kept]]
