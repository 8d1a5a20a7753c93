"""What LobRA is compared with: Task-Fused, Task-Sequential and LobRA-Sequential (L section 5.1), in GPU seconds a step.

Every result counts all GPUs for as long as a step of all tasks takes, so that they compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft_mux.scheduler.deployment.search import expected_bucketing, plan_deployment
from peft_mux.scheduler.deployment.space import TaskLengths, configurations_that_fit, joint_sample
from peft_mux.scheduler.dispatching.bucketing import DEFAULT_INTERVAL_TOKENS
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel


@dataclass(frozen=True, slots=True)
class Baseline:
    """An alternative way to run the same tasks on the same GPUs.

    Attributes:
        name: what the paper calls this way.
        deployments: the replicas of each deployment: one for each task, or one for all together.
        step_s: predicted seconds of a step on each deployment.
        gpu_seconds: GPU seconds of one step of every task, idle GPUs included.
        note: why there is no such way, without deployments; empty otherwise.
    """

    name: str
    deployments: tuple[tuple[ReplicaGroup, ...], ...] = ()
    step_s: tuple[float, ...] = ()
    gpu_seconds: float = 0.0
    note: str = ""

    @classmethod
    def of(cls, name: str, timed: Sequence[tuple[tuple[ReplicaGroup, ...], float]], num_gpus: int) -> Baseline:
        """Return deployments that take turns on the same GPUs, given the replicas and the seconds of a step of each."""
        step_s = tuple(seconds for _, seconds in timed)
        return cls(name, tuple(groups for groups, _ in timed), step_s, sum(step_s) * num_gpus)


def task_fused(
    tasks: Sequence[TaskLengths],
    num_gpus: int,
    time_model: ReplicaTimeModel,
    *,
    interval: int = DEFAULT_INTERVAL_TOKENS,
    exchange: GradientExchange | None = None,
) -> Baseline:
    """Return all tasks fused on equal replicas, of the best configuration that supports the longest (L Figure 4(b)).

    Args:
        tasks: the tasks that are trained, each with a sample of its lengths.
        num_gpus: GPUs that all tasks share (N in L).
        time_model: predicts the seconds of one replica, and knows the configurations to choose from.
        interval: distance of candidate boundaries of buckets, in tokens.
        exchange: predicts the exchange of gradients; `None` if it is free.

    Raises:
        ValueError: for lengths that no configuration supports.
    """
    best = _best_equal(*joint_sample(tasks), num_gpus, time_model, interval, exchange)
    return Baseline.of("Task-Fused", [best], num_gpus)


def task_sequential(
    tasks: Sequence[TaskLengths],
    num_gpus: int,
    time_model: ReplicaTimeModel,
    *,
    interval: int = DEFAULT_INTERVAL_TOKENS,
    exchange: GradientExchange | None = None,
) -> Baseline:
    """Return the tasks one after another, each on equal replicas of the best configuration for it (L Figure 4(a)).

    Arguments and errors are those of `task_fused`.
    """
    best = [
        _best_equal(task.lengths, task.batch_size, num_gpus, time_model, interval, exchange and exchange.of(task.name))
        for task in tasks
    ]
    return Baseline.of("Task-Sequential", best, num_gpus)


def lobra_sequential(
    tasks: Sequence[TaskLengths],
    num_gpus: int,
    time_model: ReplicaTimeModel,
    *,
    exchange: GradientExchange | None = None,
    **planning: Any,
) -> Baseline:
    """Return the tasks one after another, each on a deployment planned for it alone.

    Arguments and errors are those of `task_fused`, and `planning` further options of `plan_deployment`.
    """
    plans = [
        plan_deployment(
            task.lengths,
            task.batch_size,
            num_gpus,
            time_model,
            exchange=exchange and exchange.of(task.name),
            **planning,
        )
        for task in tasks
    ]
    return Baseline.of("LobRA-Sequential", [(plan.groups, plan.expected_step_s) for plan in plans], num_gpus)


def _best_equal(
    lengths: Sequence[int],
    global_batch: int,
    num_gpus: int,
    time_model: ReplicaTimeModel,
    interval: int,
    exchange: GradientExchange | None,
) -> tuple[tuple[ReplicaGroup, ...], float]:
    """Return equal replicas on as many GPUs as they fill, and the seconds of the expected batch, evenly spread."""
    bucketing = expected_bucketing(lengths, global_batch, time_model, num_gpus, interval=interval)
    longest = bucketing.boundaries[-1]
    timed = []
    for config in configurations_that_fit(time_model, num_gpus, longest):
        if time_model.max_tokens[config] >= longest:
            groups = time_model.groups({config: num_gpus // config.num_gpus})
            # GPUs that no further replica fits on stay idle, but are paid for.
            exchange_s = 0.0 if exchange is None else exchange.seconds_of(groups)
            timed.append((groups, dispatch(groups, bucketing, time_model, policy="uniform").makespan_s + exchange_s))
    # Of equally fast ones the first, on fewer GPUs a replica, is taken.
    return min(timed, key=lambda pair: pair[1])
