"""What holds for every policy of the registry, and what it takes to add one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.scheduler import plan_tasks
from peft_mux.scheduler.names import POLICY_NAMES
from peft_mux.scheduler.plan import Plan, TaskShare
from peft_mux.scheduler.planner.planner import Budget, Outcome
from peft_mux.scheduler.planner.policies import (
    POLICIES,
    Partition,
    Policy,
    policy_named,
    register_policy,
)
from tests.scheduler.planner.cases import load, models, tasks_of

LOADS = [load("long", 512, 4), load("b", 64, 16), load("c", 128), load("d", 32, 4), load("e", 256)]
every_policy = pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))


def plan_of(outcome: Outcome, policy: str) -> Plan:
    assert outcome.memory is not None
    return Plan(
        htasks=outcome.htasks,
        shares=tuple(TaskShare(name, 8, 1024.0, 10, 100) for htask in outcome.htasks for name in htask.tasks),
        max_tokens_per_micro_batch=outcome.max_tokens,
        chunk_size=64,
        pad_to_chunks=False,
        memory=outcome.memory,
        device="A40",
        policy=policy,
        template=outcome.template,
        bucket_loads=outcome.bucket_loads,
        step_s=outcome.step_s,
        profile_source="analytic",
    )


# ---------------------------------------------------------------- every policy


@every_policy
@pytest.mark.parametrize("num_stages", [1, 4])
def test_every_task_is_placed_unless_tasks_run_alone_and_the_plan_is_printed_and_comes_back_from_json(
    policy: Policy, num_stages: int
) -> None:
    for count in range(1, 7):
        latency_s = np.where(np.tri(count).T > 0, np.arange(1.0, count + 1), np.inf)
        for partition in policy.partitions(latency_s, num_stages, 4):
            assert [task for start, end in partition.intervals for task in range(start, end)] == list(range(count))
            assert all(start < end for start, end in partition.intervals), "an hTask without tasks"
    outcome = plan_tasks(LOADS, *models(num_stages), Budget(4096), policy=policy.name)
    waiting = [one.name for one in outcome.waiting if one.reason]
    assert sorted([*tasks_of(outcome), *waiting]) == sorted(one.name for one in LOADS)
    assert len(waiting) == (len(LOADS) - 1 if policy.runs_alone else 0)
    assert sorted(itertools.chain(*outcome.buckets)) == list(range(len(outcome.htasks)))
    assert outcome == plan_tasks(LOADS, *models(num_stages), Budget(4096), policy=policy.name)
    made = plan_of(outcome, policy.name)
    assert f"tokens/s; {policy.words}\n" in str(made)
    assert Plan.from_json(made.to_json()) == made


# ------------------------------------------------------------- those that come


def test_the_policies_that_come_with_the_package_keep_their_names_and_their_order() -> None:
    assert list(POLICIES) == POLICY_NAMES == ["mux", "together", "interleaved", "sequential"]


def test_baselines_have_one_partition_and_mux_compares_its_fusion_with_theirs_where_stages_are_many() -> None:
    latency_s = np.where(np.tri(3).T > 0, 2.0, np.inf)
    partitions = {name: policy.partitions(latency_s, 2, 4) for name, policy in POLICIES.items()}
    assert partitions["together"] == [Partition(((0, 3),))]
    assert partitions["interleaved"] == partitions["sequential"] == [Partition(((0, 1), (1, 2), (2, 3)))]
    fused, apart, together = policy_named("mux").partitions(latency_s, 2, 4)
    assert fused == Partition(((0, 3),), is_grouped=True)
    assert [len(apart.intervals), len(together.intervals)] == [3, 1]
    assert policy_named("mux").partitions(latency_s, 1, 1) == [fused]
    too_large = np.array([[1.0, np.inf], [np.inf, np.inf]])
    assert len(policy_named("mux").partitions(too_large, 2, 4)) == 2, "fusion finds none"
    with pytest.raises(ValueError, match="does not fit in memory even"):
        policy_named("mux").partitions(too_large, 1, 1)


# ------------------------------------------------------------------ a newcomer


class Pairs(Policy):
    """Neighbours in the order of token counts, two by two."""

    name = "pairs"
    words = "tasks fused two by two"

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        starts = range(0, len(latency_s), 2)
        return [Partition(tuple((start, min(start + 2, len(latency_s))) for start in starts))]


@pytest.fixture
def pairs() -> Iterator[Policy]:
    policy = Pairs()
    register_policy(policy)
    yield policy
    if POLICIES.pop(policy.name, None):
        POLICY_NAMES.remove(policy.name)


def test_a_policy_that_is_registered_plans_and_prints_with_nothing_else_touched(pairs: Policy) -> None:
    outcome = plan_tasks(LOADS, *models(2), Budget(4096), policy="pairs")
    assert sorted(len(htask.tasks) for htask in outcome.htasks) == [1, 2, 2]
    assert {"d", "b"} in [set(htask.tasks) for htask in outcome.htasks], "the two of fewest tokens"
    assert "; tasks fused two by two\n" in str(plan_of(outcome, "pairs"))
    assert "tokens/s; elsewhere\n" in str(plan_of(outcome, "elsewhere")), "a policy that is not known here"
    with pytest.raises(ValueError, match="a policy is already named 'pairs'"):
        register_policy(Pairs())
    with pytest.raises(ValueError, match="policy must be mux, together, interleaved, sequential, pairs, got 'fastest'"):
        policy_named("fastest")


def test_a_run_accepts_a_policy_as_long_as_it_is_registered(pairs: Policy) -> None:
    assert MultiTaskTrainingArguments(planner="pairs", use_cpu=True).planner == "pairs"
    POLICIES.pop("pairs")
    POLICY_NAMES.remove("pairs")
    with pytest.raises(
        ConfigError, match=r"args\.planner must be one of mux, together, interleaved, sequential, got 'pairs'"
    ):
        MultiTaskTrainingArguments(planner="pairs", use_cpu=True)
    with pytest.raises(ValueError, match=r"policy must be mux, together, interleaved, sequential.*got 'pairs'"):
        plan_tasks(LOADS, *models(), Budget(4096), policy="pairs")
