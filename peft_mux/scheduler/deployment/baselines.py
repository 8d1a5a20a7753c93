"""What LobRA is compared with: Task-Fused, Task-Sequential and LobRA-Sequential (L section 5.1), in GPU seconds a step.

Every result counts all GPUs for as long as a step of all tasks takes, so that they compare; see `step_gpu_seconds` for
the same measure on a batch that was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft_mux.scheduler.deployment.search import expected_bucketing, plan_deployment
from peft_mux.scheduler.deployment.space import TaskLengths, check_tasks, configurations_that_fit, joint_sample
from peft_mux.scheduler.dispatching.bucketing import (
    DEFAULT_INTERVAL_TOKENS,
    DEFAULT_NUM_BUCKETS,
    bucket_boundaries,
    fixed_bucketing,
)
from peft_mux.scheduler.dispatching.dispatch import Policy, dispatch
from peft_mux.scheduler.replicas.configs import DeployableTimeModel, ReplicaGroup, TimeModel


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a way of running the tasks costs in expectation.

    Attributes:
        name: what the paper calls this way.
        deployments: the replicas of each deployment: one for each task, or one for all together.
        step_s: predicted seconds of a step on each deployment.
        gpu_seconds: GPU seconds of one step of every task, idle GPUs included.
    """

    name: str
    deployments: tuple[tuple[ReplicaGroup, ...], ...]
    step_s: tuple[float, ...]
    gpu_seconds: float


def task_fused(
    tasks: Sequence[TaskLengths],
    num_gpus: int,
    time_model: DeployableTimeModel,
    *,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
) -> Baseline:
    """Return all tasks fused on equal replicas, of the best configuration that supports the longest (L Figure 4(b)).

    Args:
        tasks: the tasks that are trained, each with a sample of its lengths.
        num_gpus: GPUs that all tasks share (N in L).
        time_model: predicts the seconds of one replica, and knows the configurations to choose from.
        num_buckets: most buckets of padded lengths (R in L).
        interval: distance of candidate boundaries of buckets, in tokens.

    Raises:
        ValueError: for no tasks, or lengths that no configuration supports.
    """
    check_tasks(tasks)
    lengths, global_batch = joint_sample(tasks)
    groups, step_s = _best_homogeneous(lengths, global_batch, num_gpus, time_model, num_buckets, interval)
    return Baseline("Task-Fused", (groups,), (step_s,), step_s * num_gpus)


def task_sequential(
    tasks: Sequence[TaskLengths],
    num_gpus: int,
    time_model: DeployableTimeModel,
    *,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
) -> Baseline:
    """Return the tasks one after another, each on equal replicas of its own best configuration (L Figure 4(a)).

    Args:
        tasks: the tasks that are trained, each with a sample of its lengths.
        num_gpus: GPUs that each task has in its turn (N in L).
        time_model: predicts the seconds of one replica, and knows the configurations to choose from.
        num_buckets: most buckets of padded lengths (R in L).
        interval: distance of candidate boundaries of buckets, in tokens.

    Raises:
        ValueError: for no tasks, or lengths that no configuration supports.
    """
    check_tasks(tasks)
    best = [
        _best_homogeneous(task.lengths, task.batch_size, num_gpus, time_model, num_buckets, interval) for task in tasks
    ]
    return _one_after_another("Task-Sequential", best, num_gpus)


def lobra_sequential(
    tasks: Sequence[TaskLengths],
    num_gpus: int,
    time_model: DeployableTimeModel,
    *,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
    **planning: Any,
) -> Baseline:
    """Return the tasks one after another, each on a deployment planned for it alone.

    Args:
        tasks: the tasks that are trained, each with a sample of its lengths.
        num_gpus: GPUs that each task has in its turn (N in L).
        time_model: predicts the seconds of one replica, and knows the configurations to choose from.
        num_buckets: most buckets of padded lengths (R in L).
        interval: distance of candidate boundaries of buckets, in tokens.
        planning: further options of `plan_deployment`.

    Raises:
        ValueError: for no tasks, and for what `plan_deployment` refuses.
    """
    check_tasks(tasks)
    plans = [
        plan_deployment(
            task.lengths, task.batch_size, num_gpus, time_model, num_buckets=num_buckets, interval=interval, **planning
        )
        for task in tasks
    ]
    return _one_after_another("LobRA-Sequential", [(plan.groups, plan.expected_step_s) for plan in plans], num_gpus)


def step_gpu_seconds(
    groups: Sequence[ReplicaGroup],
    lengths: Sequence[int],
    num_gpus: int,
    time_model: TimeModel,
    *,
    policy: Policy = "balanced",
    boundaries: Sequence[int] | None = None,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
    **solving: Any,
) -> float:
    """Return the predicted GPU seconds of one step on a deployment, idle GPUs included.

    Args:
        groups: the replicas that are deployed, by configuration.
        lengths: lengths of the sequences of this step, in tokens.
        num_gpus: GPUs that are paid for, idle ones included.
        time_model: predicts the seconds of one replica.
        policy: the policy by which sequences are dispatched.
        boundaries: fixed padded lengths in tokens; by default they are chosen for the step (L Eq. 4).
        num_buckets: most buckets where boundaries are chosen (R in L).
        interval: distance of candidate boundaries where they are chosen, in tokens.
        solving: further options of `dispatch`.

    Raises:
        ValueError: for a length that no group or bucket holds.
    """
    if boundaries is None:
        limits = [group.max_tokens for group in groups]
        bucketing = bucket_boundaries(lengths, num_buckets, interval, limits=limits)
    else:
        bucketing = fixed_bucketing(lengths, boundaries)
    return dispatch(groups, bucketing, time_model, policy=policy, **solving).makespan_s * num_gpus


def _best_homogeneous(
    lengths: Sequence[int],
    global_batch: int,
    num_gpus: int,
    time_model: DeployableTimeModel,
    num_buckets: int,
    interval: int,
) -> tuple[tuple[ReplicaGroup, ...], float]:
    """Return equal replicas on as many GPUs as they fill, and the seconds of the expected batch, evenly spread."""
    bucketing = expected_bucketing(
        lengths, global_batch, time_model, num_gpus, num_buckets=num_buckets, interval=interval
    )
    longest = bucketing.boundaries[-1]
    timed = []
    for config in configurations_that_fit(time_model, num_gpus, longest):
        if time_model.max_tokens[config] >= longest:
            groups = (ReplicaGroup(config, num_gpus // config.num_gpus, time_model.max_tokens[config]),)
            # GPUs that no further replica fits on stay idle, and are paid for all the same.
            timed.append((groups, dispatch(groups, bucketing, time_model, policy="uniform").makespan_s))
    # Of equally fast ones the first, on fewer GPUs a replica, is taken.
    return min(timed, key=lambda pair: pair[1])


def _one_after_another(name: str, best: Sequence[tuple[tuple[ReplicaGroup, ...], float]], num_gpus: int) -> Baseline:
    """Return the baseline whose tasks take turns, each with its replicas and the seconds of its step."""
    step_s = tuple(seconds for _, seconds in best)
    return Baseline(name, tuple(groups for groups, _ in best), step_s, sum(step_s) * num_gpus)
