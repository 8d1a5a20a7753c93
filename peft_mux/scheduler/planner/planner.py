"""The planner: which tasks run now, which share their passes, in how many passes, and in which order on which stage.

    admit      tasks that fit, by priority (M §3.3, memory model Eq. 5); the others wait
    fuse       sorted tasks into hTasks, as the policy says: by dynamic programming over predicted latency (Eq. 6)
    group      hTasks into buckets, for every number of buckets (Eq. 7)
    template   of each grouping, simulated; the fastest that fits is the plan (§3.4.1)

Where the devices of a stage sum over one another (tensor parallelism), several passes may take turns: how many is
decided by plans for one width after another (`widths`), on one stage by `one_stage_turns`.

On one device grouping and template are trivial (`one_device`). On several stages all of this is done for several
numbers C of micro-batches, which M sets by hand, and the fastest is taken (`stages`). Passes are those that the rows of
a typical step make, cut as the engine cuts them (`passes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.planner.admission import admit
from peft_mux.scheduler.planner.one_device import plan_on_one_device
from peft_mux.scheduler.planner.one_stage_turns import plan_in_turns
from peft_mux.scheduler.planner.policies import POLICIES, policy_named
from peft_mux.scheduler.planner.stages import plan_on_stages
from peft_mux.scheduler.planner.turn_times import TurnTimes
from peft_mux.scheduler.planner.values import Budget, Outcome
from peft_mux.scheduler.planner.widths import plan_with_turns

__all__ = ["POLICIES", "Budget", "Outcome", "plan_tasks"]


def plan_tasks(
    loads: Sequence[TaskLoad],
    cost: CostModel,
    memory: MemoryModel,
    budget: Budget,
    *,
    policy: str = "mux",
    running: Sequence[str] = (),
) -> Outcome:
    """Decide what runs together.

    Args:
        loads: the loads of all tasks that could run, in the order in which the tasks came.
        cost: predicts the seconds of passes and steps; its stages are those of the plan.
        memory: predicts the bytes of the same stages.
        budget: the tokens, memory and schedule that the plan may use.
        policy: how tasks are put together, one of `policy_names()`.
        running: names of tasks that run already; they are admitted before others, whatever their priority.

    Raises:
        ValueError: for an unknown policy, two tasks of one name, or when not even one task fits.
    """
    chosen = policy_named(policy)
    names = [load.name for load in loads]
    if len(set(names)) < len(names):
        raise ValueError(f"tasks are {', '.join(names)}; allowed: every name once.")
    if not loads:
        return Outcome((), (), None, (), 0.0, (), (), budget.max_tokens, None)

    def plan_at(width: int) -> Outcome:
        own, fixed = replace(memory, passes_in_turns=width), replace(budget, interleaved_passes=width)
        limit = budget.limit_bytes
        admission = admit(loads, own, limit, budget.max_tokens, running=running, one_only=chosen.runs_alone)
        if cost.num_stages > 1:
            return plan_on_stages(admission, cost, own, fixed, chosen)
        if width > 1 or TurnTimes(cost).is_known:
            return plan_in_turns(admission, cost, own, fixed, chosen)
        return plan_on_one_device(admission, cost, own, fixed, chosen)

    return plan_with_turns(plan_at, cost, budget)
