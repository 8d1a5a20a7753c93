"""What a plan that is followed would take by other costs than those that it was made with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from peft_mux.data.packing.passes import PassRules, cut_into_passes
from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.pipeline.simulator import simulate, window_step_s
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.passes import CutHTask, costed, task_rows
from peft_mux.scheduler.planner.times import SlotTimes, TurnMember, TurnTimes
from peft_mux.scheduler.planner.values import HTask

CutOf = Callable[[HTask], CutHTask]
"""Cuts the rows of an hTask into passes, by the rules and the bound of a plan."""


def repriced_s(
    plan: Plan,
    loads: Mapping[str, TaskLoad],
    cost: CostModel,
    rules: PassRules,
    *,
    links: Link | None = None,
    drains: bool = True,
    recomputes: bool = False,
) -> float:
    """Return the seconds of a step of a plan, its buckets and its template as they are, each pass by other costs.

    Passes take turns as the plan says, and are priced as when plans are made.

    Args:
        plan: the plan, with a task or more.
        loads: what each task brings into a step, by its name.
        cost: predicts the seconds of the stages that the plan is for.
        rules: whether and how long rows are cut into passes.
        links: the link between neighbouring stages; `None` where messages take no time.
        drains: whether a pipeline is drained at the end of every step.
        recomputes: whether activations are recomputed in the backward.

    Raises:
        ValueError: for a plan without tasks, or for another number of stages.
    """
    if plan.template is None or plan.template.num_stages != cost.num_stages:
        raise ValueError(f"the plan has {plan.num_stages} stages; allowed: {cost.num_stages}, with a task or more.")

    def cut(htask: HTask) -> CutHTask:
        own = [loads[name] for name in htask.tasks]
        rows, bound = [task_rows(load) for load in own], plan.max_tokens_per_micro_batch
        return costed(own, cut_into_passes(rows, rules, bound=bound, num_passes=htask.micro_batches), cost)

    outside_s = cost.outside_s([loads[name] for htask in plan.htasks for name in htask.tasks])
    times = SlotTimes(cost, plan.passes_in_turns, recomputes=recomputes)
    if cost.num_stages == 1 and times.turns.is_known:
        return _on_one_stage_s(plan, times.turns, cut) + outside_s
    pairs = zip(plan.bucket_loads, plan.buckets, strict=True)
    priced = [
        replace(load, **times.bucket_s([cut(plan.htasks[i]) for i in bucket], load.num_micro_batches).fields)
        for load, bucket in pairs
    ]
    if drains:
        return simulate(plan.template, priced, links=links).makespan_s + outside_s
    return window_step_s(plan.template, priced, links=links) + outside_s


def _on_one_stage_s(plan: Plan, turns: TurnTimes, cut: CutOf) -> float:
    """Return the seconds of the passes of one stage, which groups of a bucket's passes go through in turns."""

    def member(htask: HTask) -> TurnMember:
        found = cut(htask)
        return TurnMember(htask.tasks, found.num_passes, turns.cost.pass_parts(found.loads, found.num_passes), 0.0)

    members = [[member(plan.htasks[index]) for index in bucket] for bucket in plan.buckets]
    return math.fsum(second for own in members for second in turns.bucket_s(own, plan.passes_in_turns)[1])
