"""The planner puts tasks together by predicted cost: what it admits, fuses, splits, orders, on one device and many."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.pipeline.simulator import simulate, window_step_s
from peft_mux.scheduler.planner.planner import Budget, DoesNotFitError, Outcome, admit, plan_tasks
from peft_mux.scheduler.planner.policies import POLICIES
from tests.scheduler.planner.cases import A40, load, loads_of, models, simulated, tasks_of

LIMIT = A40.device.memory_bytes


def mixes(lengths: list[int], most_rows: int, most_tasks: int) -> st.SearchStrategy[list[TaskLoad]]:
    pairs = st.tuples(st.sampled_from(lengths), st.integers(1, most_rows))
    return st.lists(pairs, min_size=1, max_size=most_tasks).map(loads_of)


MIXES = mixes([16, 64, 128, 256], 16, 6)


# ------------------------------------------------------------------ one device


@given(mixes([16, 64, 256], 8, 4))
@settings(max_examples=10)
def test_on_one_device_the_plan_is_the_best_of_all_partitions_and_numbers_of_passes(loads: list[TaskLoad]) -> None:
    cost, memory = models()
    counts = (1, 2, 3, 4, 6, 8)
    best = min(
        sum(
            min(cost.latency_matrix(part, n)[0, -1] for n in counts if n == 1 or sum(x.tokens for x in part) / n >= 256)
            for part in partition
        )
        for partition in partitions(loads)
    )
    outcome = plan_tasks(loads, cost, memory, Budget(100_000))
    assert sum(h.micro_batches * h.pass_s for h in outcome.htasks) <= best * 1.001


def partitions(items: list) -> list[list[list]]:
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    found = []
    for others in partitions(rest):
        found.append([[first], *others])
        found += [[*others[:i], [first, *part], *others[i + 1 :]] for i, part in enumerate(others)]
    return found


def test_the_predicted_step_is_what_its_template_takes_and_the_updates_and_passes_are_no_larger_than_allowed() -> None:
    loads = [load("b"), load("a", 3000, 4), load("c", 256, 4)]
    cost, memory = models()
    outcome = plan_tasks(loads, cost, memory, Budget(1024))
    rest = cost.optimizer_s(loads) + cost.profile.step_overhead_s
    assert outcome.step_s == pytest.approx(simulated(outcome).makespan_s + rest, rel=1e-6)
    assert all(one.tokens_per_micro_batch <= 1024 or one.tasks == ("a",) for one in outcome.htasks)
    together = plan_tasks(loads, cost, memory, Budget(8192), policy="together")
    assert together.htasks[0].tasks == ("b", "a", "c"), "in the order in which they came"


def test_nothing_to_run_is_an_empty_plan_and_what_cannot_be_planned_is_refused() -> None:
    outcome = plan_tasks([], *models(), Budget(4096))
    assert (outcome.htasks, outcome.template, outcome.step_s) == ((), None, 0.0)
    with pytest.raises(ValueError, match="tasks must have unique names, got a, a"):
        plan_tasks([load("a"), load("a")], *models(), Budget(4096))


# -------------------------------------------------------------------- admission


def limit_for(loads: list[TaskLoad], *, spare: int = 1 << 20) -> int:
    memory = models()[1]
    return int(memory.peak_bytes(loads, max(one.longest for one in loads), 1, 0)) + spare


def test_tasks_that_do_not_fit_wait_by_priority_and_say_how_much_is_lacking() -> None:
    first, urgent, small = load("first", rank=64), load("urgent", rank=64, priority=1), load("small", rank=1)
    limit = limit_for([urgent, small])
    outcome = plan_tasks([first, urgent, small], *models(), Budget(4096, limit))
    assert tasks_of(outcome) == ["small", "urgent"]
    (waiting,) = outcome.waiting
    assert waiting.name == "first"
    assert "iB too much next to urgent" in waiting.reason


def test_a_running_task_is_put_out_neither_for_one_of_higher_priority_nor_where_memory_is_predicted_short() -> None:
    running, urgent = load("running", rank=64), load("urgent", rank=64, priority=9)
    for limit in (limit_for([running]), limit_for([load("x", rank=1)])):
        outcome = plan_tasks([running, urgent], *models(), Budget(4096, limit), running=["running"])
        assert tasks_of(outcome) == ["running"]


def test_where_not_even_one_task_fits_the_smallest_is_named_with_its_need() -> None:
    with pytest.raises(DoesNotFitError, match=r"task 'small' alone needs 13\.16 GiB on a device, which has 1\.00 GiB"):
        plan_tasks([load("large", rank=64), load("small", rank=1)], *models(), Budget(4096, 2**30))


@given(MIXES, st.integers(0, 400))
@settings(max_examples=15)
def test_what_is_admitted_fits_and_a_smaller_limit_admits_no_more(loads: list[TaskLoad], spare_mib: int) -> None:
    memory = models()[1]
    limit = limit_for([loads[0]], spare=spare_mib << 20)
    admission = admit(loads, memory, limit, 4096)
    assert memory.peak_bytes(admission.admitted, admission.max_tokens, 1, 0) <= limit
    assert len(admission.admitted) <= len(admit(loads, memory, limit + (1 << 30), 4096).admitted)


# --------------------------------------------------------------- several stages


@given(MIXES, st.sampled_from([(1, None), (1, 3), (2, 2), (2, 8), (4, 4), (8, 4)]))
@settings(max_examples=10)
def test_a_plan_comes_to_its_end_within_its_limit_and_no_baseline_is_predicted_to_be_faster(
    loads: list[TaskLoad], numbers: tuple[int, int | None]
) -> None:
    num_stages, num_micro_batches = numbers
    budget = Budget(8192, LIMIT, num_micro_batches=num_micro_batches)
    outcomes = [plan_tasks(loads, *models(num_stages), budget, policy=policy) for policy in POLICIES]
    for outcome in outcomes:
        assert sorted(itertools.chain(*outcome.buckets)) == list(range(len(outcome.htasks)))
        assert all(peak <= LIMIT for peak in outcome.peak_bytes)
        assert outcome.step_s >= simulated(outcome).makespan_s
    planned, *baselines = (outcome.step_s for outcome in outcomes if not outcome.waiting)
    assert planned <= min(baselines) * (1 + 1e-9)


@given(
    mixes([32, 64, 256], 8, 4),
    st.sampled_from([2, 4]),
    st.sampled_from([256, 1024, 8192]),
    st.sampled_from(["mux", "together"]),
)
@settings(max_examples=4)
def test_the_number_of_micro_batches_that_is_found_is_near_the_best_of_all(
    loads: list[TaskLoad], num_stages: int, bound: int, policy: str
) -> None:
    rows = sum(len(one.lengths) for one in loads)
    found, *tried = (
        plan_tasks(loads, *models(num_stages), Budget(bound, LIMIT, num_micro_batches=count), policy=policy).step_s
        for count in (None, *range(1, rows + 1))
    )
    assert found <= 1.05 * min(tried)


def test_micro_batches_that_grow_to_the_bound_of_a_pipeline_still_fit() -> None:
    loads = [load("a", 256, 16), load("b", 64, 64)]
    cost, memory = models(2)
    free = plan_tasks(loads, cost, memory, Budget(100_000, num_micro_batches=8))
    limit = int(1.02 * max(free.peak_bytes))
    outcome = plan_tasks(loads, cost, memory, Budget(100_000, limit, num_micro_batches=8))
    largest = max(htask.tokens_per_micro_batch for htask in outcome.htasks)
    assert free.max_tokens == 100_000
    assert largest <= outcome.max_tokens < 2 * largest
    growth = outcome.max_tokens / largest
    grown = [
        replace(one, activation_bytes=tuple(int(growth * b) for b in one.activation_bytes))
        for one in outcome.bucket_loads
    ]
    assert outcome.template is not None
    in_flight = simulate(outcome.template, grown).peak_bytes
    assert all(
        memory.static_bytes(loads, stage) + in_flight[stage] + memory.workspace_bytes(outcome.max_tokens, stage)
        <= limit
        for stage in range(2)
    )


def test_a_pipeline_keeps_memory_for_the_longest_sequence_although_micro_batches_are_shorter_on_average() -> None:
    cost, memory = models(2)
    budget = Budget(100_000, num_micro_batches=8)
    bare = plan_tasks([load("a")], cost, replace(memory, allocator_margin=0.0), budget)
    margined = plan_tasks([load("a")], cost, memory, budget)
    assert margined.memory is not None
    assert margined.memory.peak_bytes == max(margined.peak_bytes) > max(bare.peak_bytes)
    short, long = (plan_tasks([load("a", length, 1)], cost, memory, budget) for length in (512, 4096))
    for stage in range(2):
        assert long.bucket_loads[0].activation_bytes[stage] >= memory.activation_bytes(4096, stage)
        assert short.bucket_loads[0].activation_bytes[stage] >= memory.activation_bytes(512, stage)


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
def test_another_schedule_is_built_over_the_buckets_that_the_planner_chose(schedule: str, num_chunks: int) -> None:
    loads = loads_of([(length, 8) for length in (64, 128, 256, 1024)])
    budget = Budget(8192, LIMIT, num_micro_batches=4)
    planned, other = (
        plan_tasks(loads, *models(4), one)
        for one in (budget, replace(budget, schedule=schedule, num_chunks=num_chunks))  # type: ignore[arg-type]
    )
    assert other.template is not None
    assert (other.buckets, other.htasks, other.bucket_loads) == (planned.buckets, planned.htasks, planned.bucket_loads)
    assert (other.template.schedule, other.template.num_chunks) == (schedule, num_chunks)


# ----------------------------------------------- pipelines that are not drained


def steady_s(outcome: Outcome) -> float:
    assert outcome.template is not None
    return window_step_s(outcome.template, outcome.bucket_loads)


def test_steps_that_are_not_drained_are_predicted_as_they_overlap_and_fill_stages_with_fewer_passes() -> None:
    loads = loads_of([(128 + 8 * index, 4) for index in range(6)])
    cost, memory = models(4)
    drained, flowing = (plan_tasks(loads, cost, memory, Budget(4096, drains=drains)) for drains in (True, False))
    assert flowing.step_s == pytest.approx(steady_s(flowing) + cost.outside_s(loads))
    assert flowing.step_s <= drained.step_s * (1 + 1e-9)
    assert len(flowing.passes) < len(drained.passes)
    assert len(flowing.buckets) > len(drained.buckets)
    assert steady_s(flowing) < 0.95 * steady_s(drained)
    limit = int(0.97 * max(flowing.peak_bytes))
    assert max(plan_tasks(loads, cost, memory, Budget(4096, limit, drains=False)).peak_bytes) <= limit
