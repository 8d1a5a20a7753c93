"""Plans for one device: hTasks follow each other, each in the number of passes that is predicted to be fastest.

M sets one number C of micro-batches for all tasks by hand. On one device nothing ties hTasks to a common number, and
what a pass costs whatever its size makes few passes cheaper; the longest sequence and memory set the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.planner.admission import Admission
from peft_mux.scheduler.planner.fusion import fusion_order
from peft_mux.scheduler.planner.passes import CutHTask, PassCosts, planned_passes, slot_weights
from peft_mux.scheduler.planner.policies import Partition, Policy
from peft_mux.scheduler.planner.values import Budget, HTask, Outcome

_PASS_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of passes that are tried, closer together where one more makes a greater difference."""
LEAST_PASS_TOKENS = 64
"""An hTask is not split into passes of fewer tokens."""
_LARGEST_TO_MEAN_PASS = 1.5
"""The largest pass of a step over its mean pass; see `largest_pass_tokens`."""


def plan_on_one_device(
    admission: Admission, cost: CostModel, memory: MemoryModel, budget: Budget, policy: Policy
) -> Outcome:
    """Return the fastest plan of a policy.

    Args:
        admission: the tasks that run, and the most tokens of a pass.
        cost: predicts the seconds of a backbone of one stage.
        memory: predicts the bytes of the same backbone.
        budget: the number of passes, where it is given, and how rows are cut.
        policy: says which partitions of the tasks are compared.
    """
    loads = [admission.admitted[index] for index in fusion_order([load.tokens for load in admission.admitted])]
    cuts = _fastest_htasks(admission, loads, cost, budget, policy)
    htasks = tuple(
        HTask(admission.in_order_of_arrival(cut.loads), cut.num_passes, cut.mean_tokens, cut.pass_s) for cut in cuts
    )
    bucket_loads = tuple(_bucket_load(cut, number, cost, memory) for number, cut in enumerate(cuts, start=1))
    largest = max(largest_pass_tokens(cut, admission.max_tokens) for cut in cuts)
    estimate = memory.estimate(loads, largest)
    return Outcome(
        htasks=htasks,
        buckets=tuple((index,) for index in range(len(htasks))),
        # On one stage 1F1B runs each backward right after its forward: one pass in flight, as `estimate` counts.
        template=build_template(bucket_loads, "1f1b"),
        bucket_loads=bucket_loads,
        step_s=sum(float(cut.stage_s.sum()) for cut in cuts) + cost.outside_s(loads),
        peak_bytes=(estimate.peak_bytes,),
        waiting=admission.waiting,
        max_tokens=admission.max_tokens,
        memory=estimate,
        passes=planned_passes(htasks, loads, budget.rules, admission.max_tokens),
    )


def _fastest_htasks(
    admission: Admission, loads: Sequence[TaskLoad], cost: CostModel, budget: Budget, policy: Policy
) -> tuple[CutHTask, ...]:
    """Return the hTasks of the fastest partition, the one that takes longest first as in a template (M §3.4.1)."""
    latency_s, passes = cheapest_passes(loads, cost, admission.max_tokens, budget.num_micro_batches)

    def step_s(partition: Partition) -> float:
        return sum(float(latency_s[start, end - 1]) for start, end in partition.intervals)

    # C is 1, as the latencies hold all passes of a step already, in the number that suits each range.
    intervals = min(policy.partitions(latency_s, 1, 1), key=step_s).intervals
    # These are of mean passes; what rows really make of the number is known once they are cut.
    costs = PassCosts(loads, cost, budget.rules, admission.max_tokens)
    cuts = [costs.of(start, end, int(passes[start, end - 1])) for start, end in intervals]
    return tuple(sorted(cuts, key=lambda cut: -float(cut.stage_s.sum())))


def largest_pass_tokens(cut: CutHTask, max_tokens: int) -> int:
    """Return the tokens of the largest pass that may come of an hTask.

    A step of up to half as many tokens again as a typical one is cut into as many passes (`packing.passes`). No pass is
    larger than `max_tokens`, unless a single sequence is.
    """
    most_of_a_step = sum(len(load.lengths) * load.longest for load in cut.loads)
    largest = min(_LARGEST_TO_MEAN_PASS * cut.mean_tokens, most_of_a_step, max_tokens)
    return math.ceil(max(largest, cut.held_tokens))


def cheapest_passes(
    loads: Sequence[TaskLoad], cost: CostModel, max_tokens: int, asked: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return for every range of tasks the least latency `[M, M]` over numbers of passes, and that number."""
    if asked is not None:
        latency = cost.latency_matrix(loads, asked, fits=None) + asked * cost.profile.pass_overhead_s
        return latency, np.full(latency.shape, asked, dtype=np.int64)
    # Sums and maxima of all ranges [i, j] of tasks at once, as differences of prefix sums and running maxima.
    tokens = np.array([load.tokens for load in loads], dtype=np.float64)
    ends = np.cumsum(tokens)
    sums = ends[None, :] - (ends - tokens)[:, None]
    longest = np.array([load.longest for load in loads], dtype=np.float64)
    longest_of_range = np.maximum.accumulate(np.where(np.tri(len(loads)).T > 0, longest[None, :], 0.0), axis=1)
    best = np.full(sums.shape, np.inf)
    passes = np.ones(sums.shape, dtype=np.int64)
    for count in _pass_counts(float(ends[-1]), max_tokens):
        latency = cost.latency_matrix(loads, count, fits=None) + count * cost.profile.pass_overhead_s
        # A pass may be larger than allowed only where a single sequence is, and smaller than useful nowhere.
        fits = sums / count <= max_tokens
        useful = (count == 1) | (sums / count >= np.maximum(LEAST_PASS_TOKENS, longest_of_range))
        better = fits & useful & (latency < best)
        best, passes = np.where(better, latency, best), np.where(better, count, passes)
    # Beyond the numbers that were tried, the fewest passes that fit count as one of all tokens and their overheads.
    needs_more = ~np.isfinite(best) & (sums > 0)
    if needs_more.any():
        counts = np.ceil(sums / max_tokens)
        single = cost.latency_matrix(loads, 1, fits=None)
        best = np.where(needs_more, single + counts * cost.profile.pass_overhead_s, best)
        passes = np.where(needs_more, np.maximum(1, counts), passes).astype(np.int64)
    return best, passes


def _pass_counts(tokens: float, max_tokens: int) -> list[int]:
    """Return the numbers of passes that are tried, the least with which all tasks together fit among them."""
    least_for_all = int(np.ceil(tokens / max_tokens))
    return sorted({*_PASS_COUNTS, least_for_all})


def _bucket_load(cut: CutHTask, number: int, cost: CostModel, memory: MemoryModel) -> BucketLoad:
    forward_s = cost.profile.forward_fraction * cut.pass_s
    return BucketLoad(
        name=f"hTask {number}",
        forward_s=(forward_s,),
        backward_s=(cut.pass_s - forward_s,),
        activation_bytes=(int(memory.activation_bytes(max(cut.tokens, default=0), 0)),),
        num_micro_batches=cut.num_passes,
        weights=slot_weights(cut.stage_s[:, 0]),
    )
