"""Dispatch of one step: the example of L section 3, brute force on small cases, and no sequence lost or doubled."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.dispatching.bucketing import Bucketing, bucket_boundaries
from peft_mux.scheduler.dispatching.dispatch import (
    Dispatch,
    ReplicaRates,
    deal_buckets,
    dispatch,
    predict_replica_s,
    refine,
    split_within_group,
)
from peft_mux.scheduler.dispatching.ilp import solve_ilp
from peft_mux.scheduler.dispatching.problem import (
    build_problem,
    carried_over,
    ceilings_of,
    counts_from_ceilings,
    length_based,
    relocate,
)
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import ReplicaGroup
from tests.scheduler.dispatching.cases import (
    FIGURE_4,
    POLICIES,
    THREE_GROUPS,
    GivingUpSolver,
    MicroBatchModel,
    RaisingSolver,
    StoppedSolver,
    TableModel,
    assert_nothing_is_lost,
    brute_force_eq_3,
    figure_4_groups,
    small_cases,
    some_groups,
)

Case = tuple[list[ReplicaGroup], Bucketing]
MODEL = MicroBatchModel()
GROUPS = figure_4_groups((4, 2, 0, 1))
PIPELINE_GROUPS = some_groups((1, 1, 3, 1024), (1, 4, 2, 4096), (2, 1, 2, 4096), (4, 1, 2, 8192))

# ------------------------------------------------------- the example of L section 3


def in_figure_4(**options: Any) -> Dispatch:
    return dispatch(GROUPS, FIGURE_4, TableModel(), **options)


def test_balanced_dispatch_of_figure_4_uses_the_gpus_that_dispatch_by_length_leaves_idle() -> None:
    by_length, balanced = in_figure_4(policy="length"), in_figure_4()
    assert by_length.counts == ((196, 0, 0, 0), (0, 62, 0, 0), (0, 0, 16, 4))
    idle = 1 - by_length.group_s[2] / by_length.makespan_s
    assert 0.4 < idle < 0.5, "L: 8 GPUs idle for 42 % of the time, 10.47 s of 18.20 s"
    assert balanced.makespan_s < 0.8 * by_length.makespan_s
    assert min(balanced.group_s) > 0.97 * balanced.makespan_s
    assert balanced.status == "optimal"
    assert_nothing_is_lost(GROUPS, FIGURE_4, balanced)
    first, second, last = balanced.counts
    assert (first[1:], second[2:], last[2:]) == ((0, 0, 0), (0, 0), (16, 4)), "longer ones stay where they fit"
    assert second[0] > 0, "shorter ones move up"
    assert last[1] > 0


def test_the_replicas_that_the_paper_names_for_figure_4_are_the_best_of_all_on_16_gpus() -> None:
    gpus = (1, 2, 4, 8)
    plans = [
        plan
        for plan in product(*(range(16 // each + 1) for each in gpus))
        if sum(count * each for count, each in zip(plan, gpus, strict=True)) == 16 and plan[3]
    ]
    makespans = {
        plan: dispatch(figure_4_groups(plan), FIGURE_4, TableModel(), relative_gap=1e-3).makespan_s for plan in plans
    }
    assert len(plans) == 10
    assert min(makespans, key=makespans.__getitem__) == (4, 2, 0, 1)


# ------------------------------------------------------------------ optimality


@given(small_cases())
@settings(max_examples=10)
def test_balanced_dispatch_and_its_programme_reach_the_optimum_of_equation_3(case: Case) -> None:
    groups, bucketing = case
    model = MicroBatchModel(ceilings=False)
    best_s = brute_force_eq_3(groups, bucketing, model)
    last = dispatch(groups, replace(bucketing, counts=tuple(3 * count for count in bucketing.counts)), model)
    for warm_start in (None, last):
        found = dispatch(groups, bucketing, model, warm_start=warm_start, relative_gap=0.0)
        assert_nothing_is_lost(groups, bucketing, found)
        assert found.status == "optimal"
        assert found.makespan_s <= best_s * (1 + 1e-6), "replicas get no more than their ceilings"
    problem = build_problem(groups, bucketing, model)
    answer = solve_ilp(problem, ceilings_of(problem, length_based(problem)), time_limit_s=10, relative_gap=0.0)
    assert answer is not None
    ceilings, is_proven = answer
    assert is_proven
    assert float(problem.group_s(ceilings).max()) == pytest.approx(best_s, rel=1e-6)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=80), st.sampled_from([None, RaisingSolver()]))
@settings(max_examples=8)
def test_balanced_dispatch_is_never_slower_than_dispatch_by_length(lengths: list[int], solver: Any) -> None:
    groups = some_groups((1, 1, 4, 1024), (1, 2, 2, 1024), (2, 1, 1, 2048), (4, 1, 1, 4096))
    bucketing = bucket_boundaries(lengths, 6, 256)
    by_length = dispatch(groups, bucketing, MODEL, policy="length")
    assert dispatch(groups, bucketing, MODEL, solver=solver).makespan_s <= by_length.makespan_s


def test_dispatch_by_length_is_taken_if_all_else_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, bucketing = some_groups((1, 1, 6, 1024), (4, 1, 1, 4096)), Bucketing((512, 1024), (12, 6), 0)
    on_the_last = np.array([[0, 0], [12, 6]])
    monkeypatch.setattr(sys.modules[dispatch.__module__], "refine", lambda *_: (on_the_last, 0))
    by_length = dispatch(groups, bucketing, MODEL, policy="length")
    assert by_length.counts == ((12, 6), (0, 0))
    assert dispatch(groups, bucketing, MODEL).counts == by_length.counts


# ------------------------------------------------------------------- all policies


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=120), st.sampled_from(POLICIES), st.integers(1, 8))
@settings(max_examples=12)
def test_every_sequence_is_trained_once_by_a_replica_that_supports_it(
    lengths: list[int], policy: Any, num_buckets: int
) -> None:
    bucketing = bucket_boundaries(lengths, num_buckets, limits=[group.max_tokens for group in THREE_GROUPS])
    found = dispatch(THREE_GROUPS, bucketing, MODEL, policy=policy)
    assert_nothing_is_lost(THREE_GROUPS, bucketing, found)
    assert replace(dispatch(THREE_GROUPS, bucketing, MODEL, policy=policy), solve_s=0) == replace(found, solve_s=0)
    replicas = [replica for group in found.replica_counts for replica in group]
    buckets = bucketing.bucket_of(lengths)
    owners = deal_buckets(np.argsort(lengths, kind="stable"), buckets, replicas)
    for number, counts in enumerate(replicas):
        assert np.bincount(buckets[owners == number], minlength=len(counts)).tolist() == list(counts)


def test_dispatch_by_length_takes_the_smallest_configuration_that_supports_a_bucket() -> None:
    groups = some_groups((4, 1, 1, 8192), (1, 1, 3, 1024), (2, 1, 2, 2048))
    found = dispatch(groups, Bucketing((512, 1024, 2048, 4096), (9, 5, 4, 2), 0), MODEL, policy="length")
    assert found.counts == ((0, 0, 0, 2), (9, 5, 0, 0), (0, 0, 4, 0))
    assert found.status == "by rule"
    # Two stages are twice as fast as one, except for their bubble; two replicas of one stage together too.
    for count, expected in ((1, (13, 27)), (2, (20, 20))):
        alike = some_groups((1, 1, count, 1024), (1, 2, 1, 1024), (4, 1, 1, 4096))
        first, second, last = dispatch(alike, Bucketing((1024,), (40,), 0), MODEL, policy="length").counts
        assert (first[0], second[0], last[0]) == (*expected, 0)


def test_uniform_dispatch_gives_equal_replicas_equal_counts_within_one() -> None:
    groups = some_groups((2, 1, 3, 2048), (2, 1, 2, 2048))
    found = dispatch(groups, Bucketing((512, 1024), (12, 23), 0), MODEL, policy="uniform")
    assert [sum(replica) for group in found.replica_counts for replica in group] == [7] * 5


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.integers(1, 9),
    st.lists(st.floats(0.0, 10.0), min_size=8, max_size=8),
)
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


# ---------------------------------------------------------- moves and the programme


def test_cbc_accepts_the_start_of_a_deployment_with_a_pipeline(tmp_path: Path) -> None:
    bucketing = Bucketing((300, 500, 1000, 2000, 3000, 8000), (91, 40, 21, 13, 7, 1), 0)
    problem = build_problem(PIPELINE_GROUPS, bucketing, MODEL)
    known = relocate(problem, length_based(problem))
    assert problem.constant_s.any(), "no group has a variable for its use"
    assert known[1].any(), "the pipeline is idle in the start"
    log = tmp_path / "cbc.log"
    name = next(name for name in ("PULP_CBC_CMD", "COIN_CMD") if name in pulp.listSolvers())
    solver = pulp.getSolver(name, msg=False, warmStart=True, logPath=str(log), timeLimit=10, gapRel=0.01)
    solve_ilp(problem, known, solver=solver, time_limit_s=10, relative_gap=0.01, start_from_known=True)
    said = log.read_text(encoding="utf-8")
    assert "MIPStart provided solution with cost" in said
    assert float(said.partition("MIPStart provided solution with cost ")[2].split()[0]) == pytest.approx(1.0, rel=1e-4)


def test_moves_see_the_micro_batch_that_the_linear_form_does_not() -> None:
    class DearPass(MicroBatchModel):
        def _pass_s(self, config: ParallelConfig, sequences: int, length: int) -> float:
            return 100.0 + sequences if sequences else 0.0

    groups = some_groups((1, 1, 1, 1000), (1, 1, 1, 1000))
    problem = build_problem(groups, Bucketing((100, 1000), (30, 1), padding_tokens=0), DearPass())
    uneven = np.array([[11, 1], [19, 0]])
    assert [predict_replica_s(problem, groups[0], DearPass(), row) for row in uneven.tolist()] == [312.0, 219.0]
    assert refine(problem, groups, DearPass(), uneven)[0].tolist() == [[10, 1], [20, 0]]


def test_ceilings_with_room_take_it_off_the_slowest_group() -> None:
    groups = some_groups((1, 1, 2, 1000), (1, 1, 1, 1000))
    problem = build_problem(groups, Bucketing((500,), (8,), padding_tokens=0), MODEL)
    assert counts_from_ceilings(problem, np.array([[3], [3]])).tolist() == [[5], [3]]
    assert counts_from_ceilings(problem, np.array([[2], [5]])).tolist() == [[4], [4]]


@given(small_cases(), small_cases())
@settings(max_examples=8)
def test_a_carried_over_dispatch_loses_nothing_whatever_the_last_step_was(case: Case, other: Case) -> None:
    groups, bucketing = case
    problem = build_problem(groups, bucketing, MODEL)
    last = dispatch(groups, replace(other[1], boundaries=(100, 300, 500)[: other[1].num_buckets]), MODEL)
    carried = carried_over(problem, np.array(last.boundaries), np.array(last.counts))
    assert (carried.sum(axis=0) == problem.num_sequences).all()
    assert (carried[~problem.fits] == 0).all()


def test_a_carried_over_dispatch_keeps_the_shares_of_the_nearest_bucket() -> None:
    problem = build_problem(THREE_GROUPS, Bucketing((768, 1792, 8192), (10, 7, 3), 0), MODEL)
    last = np.array([[12, 4, 0], [6, 0, 2], [0, 0, 4]])
    carried = carried_over(problem, np.array([512, 1024, 2048]), last)
    assert carried.tolist() == [[7, 0, 0], [3, 2, 0], [0, 5, 3]]


# ------------------------------------------------------------------------ fallback


@pytest.mark.parametrize(
    ("solver", "note"),
    [
        (RaisingSolver(), "the solver failed: PulpSolverError: licence expired"),
        (GivingUpSolver(), "the solver found no solution within the time limit"),
        ("CBD", "the solver failed: PulpSolverError: The solver CBD does not exist in PuLP"),
        (None, "the solver failed: ModuleNotFoundError: import of pulp"),
    ],
)
def test_a_solver_that_fails_or_no_pulp_leaves_a_greedy_dispatch_that_says_why(
    solver: Any, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if solver is None:
        monkeypatch.setitem(sys.modules, "pulp", None)
    found = in_figure_4(solver=solver)
    assert found.status == "greedy fallback"
    assert found.note.startswith(note)
    assert_nothing_is_lost(GROUPS, FIGURE_4, found)
    assert found.makespan_s <= in_figure_4(policy="length").makespan_s


def test_the_status_says_whether_an_answer_is_proven_or_needed_no_solver() -> None:
    found = in_figure_4(solver=StoppedSolver())
    assert found.status == "feasible within the time limit"
    alone = some_groups((4, 1, 3, 8192))
    found = dispatch(alone, Bucketing((512, 4096), (7, 4), 0), MODEL, solver=RaisingSolver())
    assert (found.status, found.counts) == ("optimal", ((7, 4),))


def test_bad_arguments_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match='policy must be "balanced", "length" or "uniform", got \'best\''):
        in_figure_4(policy="best")
    with pytest.raises(ValueError, match="a bucket must be padded to at most 8192 tokens, the longest that any"):
        dispatch(THREE_GROUPS, Bucketing((512, 9000), (4, 4), 0), MODEL)
    empty = dispatch(THREE_GROUPS, Bucketing((512, 9000), (4, 0), 0), MODEL)
    assert sum(row[0] for row in empty.counts) == 4, "an empty bucket may be longer than every replica supports"
    other = dispatch(some_groups((1, 1, 2, 1024)), Bucketing((512,), (4,), 0), MODEL)
    with pytest.raises(ValueError, match=r"warm_start must have groups of \[3, 2, 1\] replicas, got \[2\]"):
        dispatch(THREE_GROUPS, Bucketing((512,), (4,), 0), MODEL, warm_start=other)
    with pytest.raises(ValueError, match=r"pp must be 1 or more.*got 0"):
        ParallelConfig(1, 0)


# ------------------------------------------------------------------ measured rates

SHARES = st.lists(st.floats(0.1, 10), min_size=3, max_size=3)


@given(st.lists(SHARES, min_size=8, max_size=8), st.floats(1.5, 8), st.floats(0.01, 100))
def test_a_slow_replica_is_recognised_whatever_the_shares_and_the_unit(
    steps: list[list[float]], slower: float, unit: float
) -> None:
    rates = ReplicaRates(3)
    for shares in steps:
        rates.observe([unit * share for share in shares], [shares[0], slower * shares[1], shares[2]])
    first, second, third = rates.slowness
    assert first == third == 1.0
    assert slower**0.7 < second <= 1.06 * slower


@pytest.mark.parametrize("measured", [[1.0, 1.02], [0.0, 3.0], [0.0, 0.0]])
def test_noise_a_replica_by_itself_and_one_odd_step_leave_replicas_equal(measured: list[float]) -> None:
    rates, odd = ReplicaRates(2), ReplicaRates(3)
    odd.observe([1, 1, 1], [1, 300, 1])
    assert max(odd.slowness) < 1.6
    for _ in range(20):
        rates.observe([1, 1], measured)
    assert rates.slowness == (1.0, 1.0)
