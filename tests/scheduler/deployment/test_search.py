"""Deployment planning: against trying everything, against Theorem 1, and against the plan that the paper prints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.deployment.baselines import lobra_sequential, task_fused, task_sequential
from peft_mux.scheduler.deployment.bounds import cheapest_bound_s, dual_bound_s, length_based_bound_s
from peft_mux.scheduler.deployment.deployment_plan import DeploymentPlan
from peft_mux.scheduler.deployment.search import expected_bucketing, plan_deployment
from peft_mux.scheduler.deployment.solve import SolverOptions, solve_plan
from peft_mux.scheduler.deployment.space import (
    TaskLengths,
    benchmark_lengths,
    count_plans,
    enumerate_plans,
    propose_configurations,
)
from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.dispatching.problem import build_problem
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import (
    LayerFit,
    ReplicaGroup,
    ReplicaTimeModel,
    fit_layer,
    read_layer_profile,
    read_max_tokens,
)
from tests.scheduler.deployment.exhaustive import exact_step_s

EXACT = SolverOptions(solver=None, time_limit_s=10.0, relative_gap=0.0, budget_s=None)
INTERVAL = 512
SHORT, MIDDLE, LONG = 512, 1536, 3072


def theorem_1_s(groups: Sequence[ReplicaGroup], bucketing: Bucketing, model: ReplicaTimeModel) -> float:
    """Return sum_i N_i t_i / N of one deployment under length-based dispatch (L Theorem 1), in seconds."""
    problem = build_problem(groups, bucketing, model)
    return float(length_based_bound_s(problem, problem.num_replicas[None, :])[0])


def make_model(
    slowdowns: tuple[float, ...] = (1.2, 1.3), quadratic: float = 1.0, pipeline: bool = False
) -> ReplicaTimeModel:
    """Return a model with tp 1, 2 and 4 at 1024 tokens a GPU; each doubling spends `slowdown` times the GPU seconds."""
    fits = {}
    cost = 1.0
    for tp, slowdown in zip((1, 2, 4), (1.0, *slowdowns), strict=True):
        cost *= slowdown
        fits[tp] = LayerFit((2e-10 * quadratic * cost / tp, 0.0, 1e-6 * cost / tp, 0.0, 0.0, 2e-4 * cost / tp))
    limits = {ParallelConfig(tp, 1): 1024 * tp for tp in (1, 2, 4)}
    if pipeline:
        limits[ParallelConfig(1, 2)] = 2048
    return ReplicaTimeModel(fits, 8, limits)


models = st.builds(
    make_model, st.tuples(st.floats(1.05, 1.6), st.floats(1.05, 1.6)), st.floats(0.1, 3.0), st.booleans()
)
MANY = [SHORT] * 41 + [MIDDLE] * 9 + [LONG] * 3


def batches(short: int = 12, middle: int = 5, long: int = 3) -> st.SearchStrategy[list[int]]:
    """Draw lengths of up to so many sequences of each kind, one short one at least."""
    counts = st.tuples(st.integers(1, short), st.integers(0, middle), st.integers(0, long))
    return counts.map(lambda drawn: [SHORT] * drawn[0] + [MIDDLE] * drawn[1] + [LONG] * drawn[2])


def plan(lengths: list[int], num_gpus: int, model: ReplicaTimeModel, **options: object) -> DeploymentPlan:
    """Plan for a batch that is the sample itself, exactly."""
    settings_ = {"interval": INTERVAL, "relative_gap": 0.0, **options}
    return plan_deployment(lengths, len(lengths), num_gpus, model, **settings_)  # type: ignore[arg-type]


def best_s(planned: DeploymentPlan) -> float:
    """Return the seconds of a step of the chosen deployment."""
    found = planned.candidates[0].step_s
    assert found is not None
    return found


@given(st.integers(1, 14), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_enumeration_is_every_deployment_that_leaves_no_room_for_a_replica(num_gpus: int, sizes: list[int]) -> None:
    found = [tuple(row) for block in enumerate_plans(num_gpus, sizes, at_once=3) for row in block.tolist()]
    wanted = {
        counts
        for counts in itertools.product(*(range(num_gpus // size + 1) for size in sizes))
        if 0 <= num_gpus - np.dot(counts, sizes) < min(sizes)
    }
    assert sorted(found) == sorted(wanted)
    assert count_plans(num_gpus, sizes) == len(wanted)


def test_many_deployments_are_counted_and_refused_without_making_them() -> None:
    assert count_plans(64, [1, 2, 4, 8]) == 969  # partitions of 64 into powers of two up to eight
    assert count_plans(256, [1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 16, 16, 16, 16]) > 10**11
    with pytest.raises(ValueError, match="there must be at most max_plans = 3 combinations of replicas, got 9"):
        plan([SHORT, LONG], 8, make_model(), max_plans=3)


def test_a_configuration_that_is_always_slower_or_too_large_is_not_proposed() -> None:
    one, pipeline, two, four = (ParallelConfig(*sizes) for sizes in ((1, 1), (1, 2), (2, 1), (4, 1)))
    slow_pipeline = make_model((1.02, 1.3), pipeline=True)
    assert propose_configurations(slow_pipeline, 4, [1024, 2048, 4096]) == (one, two, four)
    assert propose_configurations(slow_pipeline, 3, [1024, 2048]) == (one, two)
    model = make_model((1.3, 1.3), pipeline=True)
    assert pipeline not in propose_configurations(model, 2, [2048], num_micro_batches=2)
    assert pipeline in propose_configurations(model, 2, [2048], num_micro_batches=64)


@pytest.mark.parametrize(("longest", "num_gpus", "most"), [(4096, 2, 2048), (5000, 4, 4096), (3000, 2, 2048)])
def test_a_length_that_nothing_supports_is_refused_with_the_longest_that_is(
    longest: int, num_gpus: int, most: int
) -> None:
    limit = f"at most {most} tokens, the most that a replica on {num_gpus} GPUs supports, got {longest}"
    for make in (
        lambda: propose_configurations(make_model(), num_gpus, [longest]),
        lambda: plan([longest], num_gpus, make_model()),
    ):
        with pytest.raises(ValueError, match=f"the longest sequence must have {limit}"):
            make()


BETWEEN = ReplicaTimeModel(
    {tp: LayerFit((0.0, 0.0, 1e-6 / tp**0.6, 0.0, 0.0, 0.0)) for tp in (1, 2)},
    num_layers=8,
    max_tokens={ParallelConfig(1, 1): 2400, ParallelConfig(2, 1): 8192},
)
"""The limit of one GPU lies inside an interval of 512 tokens, whose end is 2560."""


def test_rounding_up_takes_no_sequence_away_from_the_replica_that_holds_it() -> None:
    lengths = [300] * 6 + [2350] * 2
    alone, two = plan(lengths, 1, BETWEEN), plan(lengths, 2, BETWEEN)
    assert (alone.layout, two.layout) == ("<1,1>x1", "<1,1>x2")
    assert two.bucketing.boundaries == (512, 2400)
    assert two.longest == 2350
    fused = task_fused([TaskLengths("only", tuple(lengths), len(lengths))], 2, BETWEEN, interval=INTERVAL)
    assert fused.deployments == (two.groups,)
    # The limit of two GPUs, inside an interval too, is nothing to one GPU.
    model = replace(BETWEEN, max_tokens={ParallelConfig(1, 1): 2560, ParallelConfig(2, 1): 2400})
    assert expected_bucketing([2350], 1, model, 1, interval=INTERVAL).boundaries == (2560,)
    assert expected_bucketing([2350], 1, model, 2, interval=INTERVAL).boundaries == (2400,)
    rounded = expected_bucketing([SHORT] * 97 + [LONG] * 3, 10, make_model(), 4, interval=INTERVAL)
    assert (rounded.boundaries, rounded.counts) == ((512, 3072), (10, 1)), "counts are rounded up, as in Eq. 2"


@settings(max_examples=6)
@given(models, batches(), st.integers(4, 8))
def test_the_filtered_plan_is_the_unfiltered_one_unless_the_least_bound_is_off_by_more_than_the_threshold(
    model: ReplicaTimeModel, lengths: list[int], num_gpus: int
) -> None:
    everything = plan(lengths, num_gpus, model, lower_bound_filter=False)
    filtered, default = (plan(lengths, num_gpus, model, **options) for options in ({"threshold": 1.0}, {}))
    assert best_s(filtered) == pytest.approx(best_s(everything), rel=1e-6)
    assert filtered.groups == everything.groups
    assert everything.statistics.num_over_threshold == everything.statistics.num_out_of_reach == 0
    assert best_s(default) >= best_s(everything) * (1 - 1e-6)
    if best_s(default) > best_s(everything) * (1 + 1e-6):
        least = min(everything.candidates, key=lambda candidate: candidate.length_based_s)
        assert least.step_s is not None
        assert least.step_s > 1.15 * least.length_based_s


@settings(max_examples=15)
@given(models, batches(), st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 2)))
def test_bounds_never_exceed_the_solved_time(
    model: ReplicaTimeModel, lengths: list[int], counts: tuple[int, ...]
) -> None:
    """Theorem 1: here a smaller replica always spends fewer GPU seconds on a sequence, which is its premise."""
    configs = [ParallelConfig(1, 1), ParallelConfig(2, 1), ParallelConfig(4, 1)]
    groups = [ReplicaGroup(c, p, model.max_tokens[c]) for c, p in zip(configs, counts, strict=True) if p]
    bucketing = expected_bucketing(lengths, len(lengths), model, 4, interval=INTERVAL)
    problem = build_problem(groups, bucketing, model)
    row = problem.num_replicas[None, :]
    gpu_s = problem.sequence_s * problem.num_gpus[:, None]
    premise = all((np.diff(column[np.isfinite(column)]) >= -1e-12).all() for column in gpu_s.T)
    solved_s = solve_plan(problem, 0.0, EXACT).step_s * (1 + 1e-6)
    if premise:
        assert theorem_1_s(groups, bucketing, model) <= solved_s
    assert cheapest_bound_s(problem, row)[0] <= solved_s
    assert dual_bound_s(problem, row, rounding=False)[0] <= solved_s
    assert dual_bound_s(problem, row)[0] <= solved_s


def test_theorem_1_is_the_gpu_seconds_of_length_based_dispatch_over_the_gpus() -> None:
    """Two of <1,1> take the short sequences, <4,1> the long ones: (2 t_1 + 4 t_2) / 6 by hand."""
    model = make_model()
    small, large = ParallelConfig(1, 1), ParallelConfig(4, 1)
    bucketing = Bucketing((512, 3072), (8, 2), 0)
    small_s = model.step_s(small, [4], [512], 1024)
    large_s = model.step_s(large, [2], [3072], 4096)
    groups = [ReplicaGroup(small, 2, 1024), ReplicaGroup(large, 1, 4096)]
    assert theorem_1_s(groups, bucketing, model) == pytest.approx((2 * small_s + 4 * large_s) / 6)
    # Where a large replica is the more efficient one, which breaks the premise, this is no bound.
    model, short = make_model((0.5, 0.5)), Bucketing((512,), (40,), 0)
    groups = [replace(groups[0], count=1), groups[1]]
    assert theorem_1_s(groups, short, model) > solve_plan(build_problem(groups, short, model), 0.0, EXACT).step_s


@settings(max_examples=6)
@given(models, batches(5, 3, 2), st.integers(4, 6))
def test_the_plan_is_as_fast_as_the_best_of_everything(
    model: ReplicaTimeModel, lengths: list[int], num_gpus: int
) -> None:
    exact_s = exact_step_s(lengths, len(lengths), num_gpus, model, interval=INTERVAL)
    planned = plan(lengths, num_gpus, model, proposal=False, threshold=1.0)
    assert best_s(planned) == pytest.approx(exact_s, rel=1e-6)


def test_a_solver_that_fails_leaves_a_plan_by_the_rules() -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("no solver here")

    planned = plan(MANY, 8, make_model(), lower_bound_filter=False, solver=Broken())
    stats = planned.statistics
    assert stats.num_failed == stats.num_solved > 0
    assert stats.num_time_limits == 0
    assert stats.first_error == "RuntimeError: no solver here"
    solved = plan(MANY, 8, make_model(), lower_bound_filter=False, relative_gap=0.0)
    assert best_s(solved) >= best_s(planned) * (1 - stats.gap) - 1e-9
    said = f"the solver failed on {stats.num_failed} of {stats.num_solved} deployments, which are timed by rules alone"
    assert f"{said}; first error: RuntimeError: no solver here" in planned.summary()
    assert "not to the end" not in planned.summary()
    assert all(str(group) in planned.summary() and str(group) in planned.picture() for group in planned.groups)
    assert all(f" {boundary}" in planned.picture() for boundary in planned.bucketing.boundaries)
    assert sum(map(sum, planned.expected.counts)) == len(MANY)


def test_a_search_whose_time_is_spent_says_by_how_much_its_plan_may_miss_the_best() -> None:
    whole, planned = (plan(MANY, 12, make_model(), budget_s=budget_s, proposal=False) for budget_s in (None, 1e-9))
    stats = planned.statistics
    assert whole.statistics.num_unreached == whole.statistics.gap == 0
    assert stats.num_solved + stats.num_bound_met < whole.statistics.num_solved + whole.statistics.num_bound_met
    assert stats.num_unreached > 0
    assert planned.candidates[0].verdict == "chosen"
    assert best_s(whole) >= best_s(planned) * (1 - stats.gap) - 1e-9
    spent = f"the time for planning was spent before {stats.num_unreached} deployments were tried; "
    assert (
        f"{spent}no deployment that was not solved to the end is more than {stats.gap:.1%} faster" in planned.summary()
    )
    assert [row.verdict for row in planned.candidates].count("not tried: the time for planning was spent") > 0


TASKS = (TaskLengths("chat", (SHORT,) * 48, 24), TaskLengths("minutes", (SHORT,) * 75 + (LONG,) * 5, 16))


def test_task_fused_takes_what_the_longest_sequence_needs_and_tasks_in_turn_have_deployments_of_their_own() -> None:
    fused, alone, mixed = (
        baseline(TASKS, 8, make_model(), interval=INTERVAL)
        for baseline in (task_fused, task_sequential, lobra_sequential)
    )
    assert fused.deployments == ((ReplicaGroup(ParallelConfig(4, 1), 2, 4096),),)
    assert fused.gpu_seconds == pytest.approx(8 * fused.step_s[0])
    assert [groups[0].config for groups in alone.deployments] == [ParallelConfig(1, 1), ParallelConfig(4, 1)]
    assert alone.gpu_seconds == pytest.approx(8 * sum(alone.step_s))
    assert [len(groups) > 1 for groups in mixed.deployments] == [False, True]
    assert mixed.gpu_seconds <= alone.gpu_seconds


def lognormal_lengths(mean: float, skewness: float, longest: int, number: int, rng: np.random.Generator) -> list[int]:
    """Draw lengths of a lognormal distribution by its mean and skewness; longer ones are drawn again."""
    low, high = 1.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle + 2) * np.sqrt(middle - 1) < skewness else (low, middle)
    sigma = np.sqrt(np.log(low))
    lengths: list[int] = []
    while len(lengths) < number:
        drawn = np.ceil(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, number)).astype(int)
        lengths += drawn[drawn <= longest].tolist()
    return lengths[:number]


@pytest.fixture(scope="module")
def real_model(shared_data: Path) -> ReplicaTimeModel:
    folder = shared_data / "lobra"
    if not folder.is_dir():
        pytest.skip("../shared/data/lobra absent")
    fits = fit_layer(read_layer_profile(folder / "profile_time_llama_7B.csv"))
    return ReplicaTimeModel(fits, 32, read_max_tokens(folder / "max_tokens_llama_7B_6tasks.csv"))


def real_tasks(folder: Path, seed: int) -> list[TaskLengths]:
    """Draw the paper's six tasks for the 7B model: 100 batches each, cut at the context length of its configuration."""
    published = json.loads((folder / "paper_tables.json").read_text())["table4_datasets_mean_skew_kurt_batch"]
    names = ("databricks-dolly-15k", "Evol-Instruct", "XSum", "CommitPackFt", "MeetingBank", "python_code_instructions")
    contexts = [task["context_length"] for task in json.loads((folder / "exp_task6.json").read_text())["task"]]
    rng = np.random.default_rng(seed)
    tasks = []
    for name, longest in zip(names, contexts, strict=True):
        mean, skewness, _, batch = published[name]
        lengths = lognormal_lengths(mean, skewness, longest, 100 * batch, rng)
        tasks.append(TaskLengths(name, tuple(lengths), batch))
    return tasks


def test_the_real_profile_proposes_the_four_configurations_without_a_pipeline(real_model: ReplicaTimeModel) -> None:
    proposed = propose_configurations(real_model, 16, benchmark_lengths(real_model, 16384))
    assert list(map(str, proposed)) == ["<1,1>", "<2,1>", "<4,1>", "<8,1>"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_sixteen_gpus_get_the_deployment_of_the_paper_over_the_proposed_configurations(
    real_model: ReplicaTimeModel, shared_data: Path, seed: int
) -> None:
    tasks = real_tasks(shared_data / "lobra", seed)
    lengths = [length for task in tasks for length in task.lengths]
    planned = plan_deployment(lengths, sum(task.batch_size for task in tasks), 16, real_model)
    table_2 = json.loads((shared_data / "lobra" / "paper_tables.json").read_text())["table2_end_to_end"]
    wanted = [(ParallelConfig(*config), count) for config, count in table_2["7B_16xA100-40"]["lobra"]]
    assert [(group.config, group.count) for group in planned.groups] == wanted
    fused = task_fused(tasks, 16, real_model)
    assert [(group.config, group.count) for group in fused.deployments[0]] == [(ParallelConfig(8, 1), 2)]
    assert planned.gpu_seconds < 0.8 * fused.gpu_seconds
    if seed == 0:
        unfiltered, unproposed = (
            plan_deployment(lengths, 832, 16, real_model, **options)
            for options in ({"lower_bound_filter": False}, {"proposal": False})
        )
        assert unfiltered.groups == planned.groups
        # Without the proposal the model prefers a pipeline of eight stages, at which it is known to be optimistic.
        assert ParallelConfig(1, 8) in [group.config for group in unproposed.groups]
        assert unproposed.expected_step_s < planned.expected_step_s
