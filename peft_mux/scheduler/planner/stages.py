"""Plans for several pipeline stages: of all partitions of a policy, the one that simulates fastest (M §3.3, §3.4).

Every partition of the tasks into hTasks is grouped into buckets, ordered by a template and simulated
(`partition_search`). Where nothing fits into memory, the same is tried with twice as many micro-batches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.planner.admission import Admission
from peft_mux.scheduler.planner.fusion import fusion_order
from peft_mux.scheduler.planner.partition_search import PartitionSearch, SimulatedGrouping
from peft_mux.scheduler.planner.policies import Policy
from peft_mux.scheduler.planner.values import MICRO_BATCHES_PER_STAGE, MOST_DOUBLINGS, Budget, Outcome


def plan_on_stages(
    admission: Admission, cost: CostModel, memory: MemoryModel, budget: Budget, policy: Policy
) -> Outcome:
    """Return the fastest plan of a policy that fits.

    Args:
        admission: the tasks that run, and the most tokens of a pass.
        cost: predicts the seconds of two stages or more.
        memory: predicts the bytes of the same stages.
        budget: the memory, micro-batches and schedule that the plan may use.
        policy: says which partitions of the tasks are compared, and under which schedule.

    Raises:
        ValueError: if one micro-batch of some bucket does not fit, however small the micro-batches are made.
    """
    searched = _budget_of_search(budget, policy)
    fault: ValueError | None = None
    for count in _micro_batch_counts(budget, cost.num_stages):
        found: list[tuple[PartitionSearch, SimulatedGrouping]] = []
        latency_s = range_latencies_s(admission, cost, count)
        for partition in policy.partitions(latency_s, cost.num_stages, count):
            try:
                search = PartitionSearch(admission, cost, memory, searched, count, partition)
                found.append((search, search.fastest()))
            except ValueError as error:
                fault = error
        if found:
            # min takes the first of equally fast ones, as `Policy.partitions` promises.
            search, fastest = min(found, key=lambda item: item[1].simulation.makespan_s)
            if searched.schedule != budget.schedule:
                fastest = search.under_schedule(fastest, budget.schedule, budget.num_chunks)
            return search.outcome(fastest)
    assert fault is not None, "some number of micro-batches was tried"
    raise fault


def range_latencies_s(admission: Admission, cost: CostModel, num_micro_batches: int) -> np.ndarray:
    """Return the seconds of the hTask of every range of tasks, `[M, M]`; inf where a micro-batch would be too large.

    Args:
        admission: the M tasks that run, and the most tokens of a pass.
        cost: predicts the seconds of an hTask through all stages.
        num_micro_batches: C, passes of each hTask in a step.
    """
    loads = [admission.admitted[index] for index in fusion_order([load.tokens for load in admission.admitted])]
    tokens = np.array([load.tokens for load in loads], dtype=np.float64)
    ends = np.cumsum(tokens)
    # Tokens of the tasks i to j as differences of prefix sums.
    sums = ends[None, :] - (ends - tokens)[:, None]
    # A task whose own micro-batch is over the bound runs all the same, by itself: only company is refused.
    largest = max(admission.max_tokens, float(tokens.max()) / num_micro_batches)
    latency_s = cost.latency_matrix(loads, num_micro_batches, fits=None)
    return np.where(sums / num_micro_batches <= largest, latency_s, np.inf)


def _budget_of_search(budget: Budget, policy: Policy) -> Budget:
    """Return the budget under which groupings are compared: under the schedule of the policy, where it has one."""
    if policy.search_schedule in (None, budget.schedule):
        return budget
    return replace(budget, schedule=policy.search_schedule, num_chunks=1)


def _micro_batch_counts(budget: Budget, num_stages: int) -> list[int]:
    """Return the numbers of micro-batches to try: the one asked for, or more and more until they fit."""
    if budget.num_micro_batches is not None:
        return [budget.num_micro_batches]
    return [MICRO_BATCHES_PER_STAGE * num_stages * 2**doubling for doubling in range(MOST_DOUBLINGS)]
