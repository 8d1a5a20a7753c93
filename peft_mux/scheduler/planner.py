"""The planner: which tasks run now, which share their passes, in how many passes, and in which order on which stage.

    admit      tasks that fit, by priority (M §3.3, memory model Eq. 5); the others wait
    fuse       sorted tasks into hTasks by dynamic programming over predicted latency (Eq. 6)
    group      hTasks into buckets, for every number of buckets (Eq. 7)
    template   of each grouping, simulated; the fastest that fits is the plan (§3.4.1)

On one device hTasks simply follow each other, so grouping and template are trivial, and the planner chooses for each
hTask the number of passes that is predicted to be fastest. M sets one number C of micro-batches for all tasks by
hand; on several stages it is an argument here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from peft_mux.scheduler.admission import Admission, admit
from peft_mux.scheduler.cost_model import CostModel
from peft_mux.scheduler.fusion import fusion_order
from peft_mux.scheduler.loads import TaskLoad
from peft_mux.scheduler.memory import MemoryModel
from peft_mux.scheduler.pipeline_load import BucketLoad
from peft_mux.scheduler.pipeline_template import build_template
from peft_mux.scheduler.plan import POLICIES, HTask
from peft_mux.scheduler.planner_stages import choose_intervals, plan_on_stages
from peft_mux.scheduler.planner_values import Budget, Outcome

__all__ = ["POLICIES", "Budget", "Outcome", "plan_tasks"]

_PASS_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_LEAST_PASS_TOKENS = 64
_LARGEST_TO_MEAN_PASS = 1.5


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
        loads: of all tasks that could run, in the order in which they came.
        cost: predicts latencies.
        memory: predicts bytes.
        budget: what may be used.
        policy: one of `POLICIES`.
        running: names of tasks that run already; they are admitted before others of their priority.

    Raises:
        ValueError: for an unknown policy, two tasks of one name, or when not even one task fits.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; allowed: {', '.join(POLICIES)}.")
    names = [load.name for load in loads]
    if len(set(names)) < len(names):
        raise ValueError(f"tasks are {', '.join(names)}; allowed: every name once.")
    if not loads:
        return Outcome((), (), None, (), 0.0, (), (), budget.max_tokens, None)
    admission = admit(
        loads, memory, budget.limit_bytes, budget.max_tokens, running=running, one_only=policy == "sequential"
    )
    if cost.num_stages == 1:
        return _on_one_device(admission, cost, memory, budget, policy)
    return plan_on_stages(admission, cost, memory, budget, policy)


# ------------------------------------------------------------------ one device


def _on_one_device(admission: Admission, cost: CostModel, memory: MemoryModel, budget: Budget, policy: str) -> Outcome:
    loads = [admission.admitted[index] for index in fusion_order([load.tokens for load in admission.admitted])]
    latency, passes = _cheapest_passes(loads, cost, admission.max_tokens)
    intervals = choose_intervals(latency, policy, num_stages=1, num_micro_batches=1)
    htasks = []
    for start, end in intervals:
        members = loads[start:end]
        count = int(passes[start, end - 1])
        tokens = sum(load.tokens for load in members) / count
        names = admission.in_order_of_arrival(members)
        htasks.append(HTask(names, count, tokens, cost.pass_s(members, count)))
    htasks.sort(key=lambda htask: -htask.micro_batches * htask.pass_s)
    bucket_loads = tuple(
        _one_device_bucket(htask, number, cost, memory) for number, htask in enumerate(htasks, start=1)
    )
    template = build_template(bucket_loads, "1f1b")
    by_name = {load.name: load for load in loads}
    step_s = cost.step_s([([by_name[name] for name in htask.tasks], htask.micro_batches) for htask in htasks])
    largest = max(_largest_pass_tokens(htask, by_name, admission.max_tokens) for htask in htasks)
    estimate = memory.estimate(loads, largest)
    return Outcome(
        htasks=tuple(htasks),
        buckets=tuple((index,) for index in range(len(htasks))),
        template=template,
        bucket_loads=bucket_loads,
        step_s=step_s,
        peak_bytes=(estimate.peak_bytes,),
        waiting=admission.waiting,
        max_tokens=admission.max_tokens,
        memory=estimate,
    )


def _largest_pass_tokens(htask: HTask, loads: Mapping[str, TaskLoad], max_tokens: int) -> int:
    """Return the tokens of the largest pass that may come of an hTask.

    A step has as many passes as its tokens make up means, rounded (`engine.dispatcher`), so that one holds up to half a
    mean more. No pass is larger than `max_tokens`, unless a single sequence is.
    """
    members = [loads[name] for name in htask.tasks]
    most_of_a_step = sum(len(load.lengths) * load.longest for load in members)
    largest = min(_LARGEST_TO_MEAN_PASS * htask.tokens_per_micro_batch, most_of_a_step, max_tokens)
    return math.ceil(max(largest, *(load.longest for load in members)))


def _cheapest_passes(loads: Sequence[TaskLoad], cost: CostModel, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for every range of tasks the least latency `[M, M]` over numbers of passes, and that number."""
    tokens = np.array([load.tokens for load in loads], dtype=np.float64)
    ends = np.cumsum(tokens)
    sums = ends[None, :] - (ends - tokens)[:, None]
    longest = np.array([load.longest for load in loads], dtype=np.float64)
    longest_of_range = np.maximum.accumulate(np.where(np.tri(len(loads)).T > 0, longest[None, :], 0.0), axis=1)
    best = np.full(sums.shape, np.inf)
    passes = np.ones(sums.shape, dtype=np.int64)
    for count in _counts(float(ends[-1]), max_tokens):
        latency = cost.latency_matrix(loads, count, fits=None) + count * cost.profile.pass_overhead_s
        # A pass may be larger than allowed only where a single sequence is, and smaller than useful nowhere.
        fits = sums / count <= max_tokens
        useful = (count == 1) | (sums / count >= np.maximum(_LEAST_PASS_TOKENS, longest_of_range))
        better = fits & useful & (latency < best)
        best, passes = np.where(better, latency, best), np.where(better, count, passes)
    needs_more = ~np.isfinite(best) & (sums > 0)
    if needs_more.any():
        counts = np.ceil(sums / max_tokens)
        single = cost.latency_matrix(loads, 1, fits=None)
        best = np.where(needs_more, single + counts * cost.profile.pass_overhead_s, best)
        passes = np.where(needs_more, np.maximum(1, counts), passes).astype(np.int64)
    return best, passes


def _counts(tokens: float, max_tokens: int) -> list[int]:
    """Return the numbers of passes worth trying."""
    least_for_all = int(np.ceil(tokens / max_tokens))
    return sorted({*_PASS_COUNTS, least_for_all})


def _one_device_bucket(htask: HTask, number: int, cost: CostModel, memory: MemoryModel) -> BucketLoad:
    forward_s = cost.profile.forward_fraction * htask.pass_s
    return BucketLoad(
        name=f"hTask {number}",
        forward_s=(forward_s,),
        backward_s=(htask.pass_s - forward_s,),
        activation_bytes=(int(memory.activation_bytes(htask.tokens_per_micro_batch, 0)),),
        num_micro_batches=htask.micro_batches,
    )
