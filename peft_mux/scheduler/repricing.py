"""What a plan that is followed would take by other costs than those that it was made with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from peft_mux.packing.passes import Member, PassRules, cut_into_passes
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.window import window_step_s
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.passes import task_rows
from peft_mux.scheduler.planner.turn_times import TurnMember, TurnTimes
from peft_mux.scheduler.planner.values import HTask


def repriced_s(
    plan: Plan,
    loads: Mapping[str, TaskLoad],
    cost: CostModel,
    rules: PassRules,
    *,
    drains: bool = True,
    recomputes: bool = False,
) -> float:
    """Return the seconds of a step of a plan, its buckets and its template as they are, each pass by other costs.

    Args:
        plan: the plan, with a task or more.
        loads: what each task brings into a step, by its name.
        cost: predicts the seconds of the stages that the plan is for.
        rules: whether and how long rows are cut into passes.
        drains: whether a pipeline is drained at the end of every step.
        recomputes: whether activations are recomputed in the backward.

    Raises:
        ValueError: for a plan without tasks, or for another number of stages.
    """
    if plan.template is None or plan.template.num_stages != cost.num_stages:
        raise ValueError(f"the plan has {plan.num_stages} stages; allowed: {cost.num_stages}, with a task or more.")

    def cut(members: Sequence[TaskLoad], num_passes: int) -> list[list[Member]]:
        rows = [task_rows(load) for load in members]
        return cut_into_passes(rows, rules, bound=plan.max_tokens_per_micro_batch, num_passes=num_passes)

    tasks = [loads[name] for htask in plan.htasks for name in htask.tasks]
    times = TurnTimes(cost, recomputes=recomputes)
    if cost.num_stages == 1 and times.is_known:
        return _in_turns_s(plan, loads, times, cut) + cost.outside_s(tasks)
    # Sums of several stages are charged in full, whoever takes turns there.
    priced = [
        _priced(bucket_load, [plan.htasks[index] for index in bucket], loads, cost, cut)
        for bucket_load, bucket in zip(plan.bucket_loads, plan.buckets, strict=True)
    ]
    if drains:
        passes_s = simulate(plan.template, priced, links=plan.link).makespan_s
    else:
        passes_s = window_step_s(plan.template, priced, links=plan.link)
    return passes_s + cost.outside_s(tasks)


def _in_turns_s(
    plan: Plan,
    loads: Mapping[str, TaskLoad],
    times: TurnTimes,
    cut: Callable[[Sequence[TaskLoad], int], list[list[Member]]],
) -> float:
    """Return the seconds of the passes of one stage, with what their turns hide of the sums over its devices."""

    def member(htask: HTask) -> TurnMember:
        own = [loads[name] for name in htask.tasks]
        num_passes = max(1, len(cut(own, htask.micro_batches)))
        return TurnMember(htask.tasks, num_passes, times.cost.pass_parts(own, num_passes), 0.0)

    members = [[member(plan.htasks[index]) for index in bucket] for bucket in plan.buckets]
    return math.fsum(second for own in members for second in times.bucket_s(own, plan.passes_in_turns)[1])


def _priced(
    bucket_load: BucketLoad,
    htasks: Sequence[HTask],
    loads: Mapping[str, TaskLoad],
    cost: CostModel,
    cut: Callable[[Sequence[TaskLoad], int], list[list[Member]]],
) -> BucketLoad:
    """Return a bucket's load with the seconds of its hTasks' passes on each stage; which of them is longest stays."""
    stage_s = np.zeros(cost.num_stages)
    for htask in htasks:
        members = [loads[name] for name in htask.tasks]
        stage_s += cost.passes_s(members, cut(members, htask.micro_batches)).sum(axis=0)
    mean_s, fraction = stage_s / bucket_load.num_micro_batches, cost.profile.forward_fraction
    return replace(
        bucket_load,
        forward_s=tuple(fraction * float(seconds) for seconds in mean_s),
        backward_s=tuple((1 - fraction) * float(seconds) for seconds in mean_s),
    )
