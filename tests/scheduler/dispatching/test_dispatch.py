"""Dispatch of one step: the example of L section 3, brute force on small cases, and no sequence lost or doubled."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.dispatching.ahead import plan_step
from peft_mux.scheduler.dispatching.bucketing import Bucketing, bucket_boundaries
from peft_mux.scheduler.dispatching.dispatch import Dispatch, Refined, assign_sequences, dispatch
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
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

# ------------------------------------------------------- the example of L section 3


def test_balanced_dispatch_of_figure_4_evens_out_what_dispatch_by_length_leaves_idle() -> None:
    groups = figure_4_groups((4, 2, 0, 1))
    by_length = dispatch(groups, FIGURE_4, TableModel(), policy="length")
    balanced = dispatch(groups, FIGURE_4, TableModel())
    assert by_length.counts == ((196, 0, 0, 0), (0, 62, 0, 0), (0, 0, 16, 4))
    idle = 1 - by_length.group_s[2] / by_length.makespan_s
    assert 0.4 < idle < 0.5, "L: 8 GPUs idle for 42 % of the time, 10.47 s of 18.20 s"
    assert balanced.makespan_s < 0.8 * by_length.makespan_s
    assert min(balanced.group_s) > 0.97 * balanced.makespan_s
    assert balanced.status == "optimal"
    assert_nothing_is_lost(groups, FIGURE_4, balanced)


def test_longer_sequences_of_figure_4_stay_where_they_fit_and_shorter_ones_move_up() -> None:
    first, second, last = dispatch(figure_4_groups((4, 2, 0, 1)), FIGURE_4, TableModel()).counts
    assert last[2:] == (16, 4)
    assert first[1:] == (0, 0, 0)
    assert second[2:] == (0, 0)
    assert second[0] > 0
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
@settings(max_examples=30, deadline=None)
def test_balanced_dispatch_is_as_fast_as_the_best_of_all_dispatches(
    case: tuple[list[ReplicaGroup], Bucketing],
) -> None:
    groups, bucketing = case
    model = MicroBatchModel(ceilings=False)
    found = dispatch(groups, bucketing, model, relative_gap=0.0)
    best_s = brute_force_eq_3(groups, bucketing, model)
    assert_nothing_is_lost(groups, bucketing, found)
    assert found.status == "optimal"
    assert found.makespan_s <= best_s * (1 + 1e-6), "replicas get no more than their ceilings"


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=80), st.sampled_from([None, RaisingSolver()]))
@settings(max_examples=20, deadline=None)
def test_balanced_dispatch_is_never_slower_than_dispatch_by_length(lengths: list[int], solver: Any) -> None:
    groups = some_groups((1, 1, 4, 1024), (1, 2, 2, 1024), (2, 1, 1, 2048), (4, 1, 1, 4096))
    bucketing = bucket_boundaries(lengths, 6, 256)
    model = MicroBatchModel()
    by_length = dispatch(groups, bucketing, model, policy="length")
    assert dispatch(groups, bucketing, model, solver=solver).makespan_s <= by_length.makespan_s


def test_dispatch_by_length_is_taken_where_all_else_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, bucketing = some_groups((1, 1, 6, 1024), (4, 1, 1, 4096)), Bucketing((512, 1024), (12, 6), 0)
    on_the_last = np.array([[0, 0], [12, 6]])
    monkeypatch.setattr(
        sys.modules["peft_mux.scheduler.dispatching.dispatch"], "refine", lambda *_: Refined(on_the_last, 0, True)
    )
    by_length = dispatch(groups, bucketing, MicroBatchModel(), policy="length")
    assert by_length.counts == ((12, 6), (0, 0))
    assert dispatch(groups, bucketing, MicroBatchModel()).counts == by_length.counts


def test_a_pipeline_that_gets_nothing_costs_nothing() -> None:
    groups = some_groups((4, 1, 1, 1000), (1, 16, 1, 1000))
    found = dispatch(groups, Bucketing((1000,), (1,), 0), MicroBatchModel(), relative_gap=0.0)
    assert found.counts == ((1,), (0,))
    assert found.group_s[1] == 0.0


@given(small_cases(), st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_a_warm_start_changes_the_makespan_by_no_more_than_the_gap(
    case: tuple[list[ReplicaGroup], Bucketing], factor: int
) -> None:
    groups, bucketing = case
    model = MicroBatchModel(ceilings=False)
    last = dispatch(groups, replace(bucketing, counts=tuple(factor * c for c in bucketing.counts)), model)
    warm = dispatch(groups, bucketing, model, warm_start=last, relative_gap=0.0)
    assert_nothing_is_lost(groups, bucketing, warm)
    assert warm.makespan_s <= brute_force_eq_3(groups, bucketing, model) * (1 + 1e-6)


# ------------------------------------------------------------------- all policies


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=120), st.sampled_from(POLICIES), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_every_sequence_is_trained_once_by_a_replica_that_supports_it(
    lengths: list[int], policy: Any, num_buckets: int
) -> None:
    work = plan_step(lengths, THREE_GROUPS, MicroBatchModel(), num_buckets=num_buckets, policy=policy)
    assert_nothing_is_lost(THREE_GROUPS, work.bucketing, work.dispatch)
    assert sorted(index for replica in work.assignment for index in replica) == list(range(len(lengths)))
    supported = [group.max_tokens for group in THREE_GROUPS for _ in range(group.count)]
    replicas = [replica for group in work.dispatch.replica_counts for replica in group]
    buckets = work.bucketing.bucket_of(lengths)
    for indices, max_tokens, counts in zip(work.assignment, supported, replicas, strict=True):
        assert list(indices) == sorted(indices)
        assert all(lengths[index] <= max_tokens for index in indices)
        assert np.bincount(buckets[list(indices)], minlength=len(counts)).tolist() == list(counts)


def test_dispatch_by_length_takes_the_smallest_configuration_that_supports_a_bucket() -> None:
    groups = some_groups((4, 1, 1, 8192), (1, 1, 3, 1024), (2, 1, 2, 2048))
    found = dispatch(groups, Bucketing((512, 1024, 2048, 4096), (9, 5, 4, 2), 0), MicroBatchModel(), policy="length")
    assert found.counts == ((0, 0, 0, 2), (9, 5, 0, 0), (0, 0, 4, 0))
    assert found.status == "by rule"


def test_dispatch_by_length_balances_groups_that_support_the_same_lengths() -> None:
    groups = some_groups((1, 1, 1, 1024), (1, 2, 1, 1024), (4, 1, 1, 4096))
    first, second, last = dispatch(groups, Bucketing((1024,), (40,), 0), MicroBatchModel(), policy="length").counts
    assert last == (0,)
    assert first[0] + second[0] == 40
    assert 12 <= first[0] <= 14, "two stages are twice as fast as one but for their bubble"


def test_uniform_dispatch_gives_equal_replicas_equal_counts_within_one() -> None:
    groups = some_groups((2, 1, 3, 2048), (2, 1, 2, 2048))
    found = dispatch(groups, Bucketing((512, 1024), (12, 23), 0), MicroBatchModel(), policy="uniform")
    totals = [sum(replica) for group in found.replica_counts for replica in group]
    assert sorted(totals) == [7] * 5


def test_the_same_input_gives_the_same_dispatch() -> None:
    lengths = np.random.default_rng(3).integers(10, 8000, size=60).tolist()
    first, second = (plan_step(lengths, THREE_GROUPS, MicroBatchModel()) for _ in range(2))
    assert first.assignment == second.assignment
    assert replace(first.dispatch, solve_s=0) == replace(second.dispatch, solve_s=0)


# ------------------------------------------------------------------------ fallback


@pytest.mark.parametrize(
    ("solver", "note"),
    [
        (RaisingSolver(), "the solver failed: PulpSolverError: licence expired"),
        (GivingUpSolver(), "the solver found no solution within the time limit"),
        ("GUROBI_CMD", "the solver failed"),
    ],
)
def test_a_solver_that_fails_leaves_a_greedy_dispatch_that_says_why(solver: Any, note: str) -> None:
    if isinstance(solver, str) and solver in pulp.listSolvers(onlyAvailable=True):
        pytest.skip(f"{solver} is installed")
    groups = figure_4_groups((4, 2, 0, 1))
    found = dispatch(groups, FIGURE_4, TableModel(), solver=solver)
    assert found.status == "greedy fallback"
    assert found.note.startswith(note)
    assert found.note in str(found)
    assert_nothing_is_lost(groups, FIGURE_4, found)
    assert found.makespan_s <= dispatch(groups, FIGURE_4, TableModel(), policy="length").makespan_s


def test_dispatch_works_where_pulp_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulp", None)
    found = dispatch(figure_4_groups((4, 2, 0, 1)), FIGURE_4, TableModel(), solver="HiGHS")
    assert found.status == "greedy fallback"
    assert "pulp" in found.note


def test_an_answer_that_is_not_proven_says_so() -> None:
    found = dispatch(figure_4_groups((4, 2, 0, 1)), FIGURE_4, TableModel(), solver=StoppedSolver())
    assert found.status == "feasible within the time limit"


def test_where_nothing_can_be_chosen_no_solver_is_asked() -> None:
    groups = some_groups((4, 1, 3, 8192))
    found = dispatch(groups, Bucketing((512, 4096), (7, 4), 0), MicroBatchModel(), solver=RaisingSolver())
    assert found.status == "optimal"
    assert found.counts == ((7, 4),)


# ----------------------------------------------------------------------- bad input


def test_a_bucket_longer_than_every_replica_supports_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padded to 9000 tokens; allowed: at most 8192, the longest that any replica"):
        dispatch(THREE_GROUPS, Bucketing((512, 9000), (1, 1), 0), MicroBatchModel())
    with pytest.raises(ValueError, match=r"lengths\[1\] is 9000; allowed: at most 8192"):
        plan_step([10, 9000], THREE_GROUPS, MicroBatchModel())


def test_an_empty_bucket_may_be_longer_than_every_replica_supports() -> None:
    found = dispatch(THREE_GROUPS, Bucketing((512, 9000), (4, 0), 0), MicroBatchModel())
    assert sum(row[0] for row in found.counts) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, 'policy is \'best\'; allowed: "balanced", "length" or "uniform"'),
        ({"time_limit_s": 0}, "time_limit_s is 0; allowed: more than 0"),
        ({"relative_gap": -1}, "relative_gap is -1; allowed: 0 or more"),
        ({"solver": "CBD"}, "solver is 'CBD'; allowed: a solver of PuLP. Installed here: .*PULP_CBC_CMD"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch(THREE_GROUPS, Bucketing((512,), (4,), 0), MicroBatchModel(), **options)


def test_no_groups_and_bad_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups is empty; allowed: one group of replicas or more"):
        dispatch([], Bucketing((512,), (4,), 0), MicroBatchModel())
    with pytest.raises(ValueError, match="count is 0; allowed: 1 or more"):
        ReplicaGroup(ParallelConfig(1, 1), 0, 100)
    with pytest.raises(ValueError, match="pp is 0; allowed: 1 or more"):
        ParallelConfig(1, 0)


def test_a_warm_start_over_other_groups_is_refused() -> None:
    bucketing = Bucketing((512,), (4,), 0)
    other = dispatch(some_groups((1, 1, 2, 1024)), bucketing, MicroBatchModel())
    with pytest.raises(ValueError, match=r"warm_start has groups of \[2\] replicas; allowed: \[3, 2, 1\]"):
        dispatch(THREE_GROUPS, bucketing, MicroBatchModel(), warm_start=other)


def test_lengths_of_another_step_are_not_assigned() -> None:
    work = plan_step([10, 20, 900], THREE_GROUPS, MicroBatchModel())
    with pytest.raises(ValueError, match="Pass the lengths of the same step"):
        assign_sequences(work.dispatch, work.bucketing, [10, 900, 900])


def test_a_time_model_that_answers_in_another_shape_is_named() -> None:
    model = MicroBatchModel()
    model.linear_terms = lambda *_: (np.zeros(5), 0.0)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"linear_terms of <1,1> gave .*allowed: 1 finite seconds"):
        dispatch(THREE_GROUPS, Bucketing((512,), (4,), 0), model)


# ---------------------------------------------------------------------------- values


def test_a_dispatch_comes_back_from_json_as_it_was() -> None:
    found = dispatch(THREE_GROUPS, Bucketing((512, 4096), (20, 3), 0), MicroBatchModel())
    assert Dispatch.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="format_version: got None; allowed: 1"):
        Dispatch.from_json("{}")


def test_a_printed_dispatch_shows_the_counts_and_seconds_of_each_group() -> None:
    found = dispatch(figure_4_groups((4, 2, 0, 1)), FIGURE_4, TableModel(), policy="length")
    lines = str(found).splitlines()
    assert lines[0].startswith(f"dispatch  length, by rule, {found.makespan_s:.3f} s a step")
    assert lines[2].split() == ["group", "0", "196", "0", "0", "0", f"{found.group_s[0]:.3f}", "s"]
    assert len(lines) == 5


def test_configurations_and_groups_print_as_in_the_paper() -> None:
    assert str(ReplicaGroup(ParallelConfig(2, 4), 3, 100)) == "<2,4>x3"
    assert ReplicaGroup(ParallelConfig(2, 4), 3, 100).num_gpus == 24
    assert sorted([ParallelConfig(2, 1), ParallelConfig(1, 8)])[0] == ParallelConfig(1, 8)
