"""Plans for several pipeline stages: of all numbers of micro-batches and partitions, what simulates fastest (M §3.3).

M sets the number C of micro-batches by hand, and four for each stage is common. Few micro-batches leave stages idle at
both ends of a step; many pay the fixed part of a pass again and again, and more than a task has rows there cannot be.
Here C is searched: for each candidate the policy's partitions are cut into the passes that their rows really make
(`passes`), those that cannot beat the best one so far are left out, and the others are grouped into buckets, ordered by
a template and simulated under the limit of memory (`partition_search`). Around the best the search is then refined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.pipeline.window import MOST_STEPS
from peft_mux.scheduler.planner.admission import Admission
from peft_mux.scheduler.planner.fusion import fusion_order
from peft_mux.scheduler.planner.partition_search import PartitionSearch, SimulatedGrouping
from peft_mux.scheduler.planner.passes import PassCosts
from peft_mux.scheduler.planner.policies import Policy
from peft_mux.scheduler.planner.values import Budget, Outcome

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of micro-batches that are tried, closer together where one more makes a greater difference."""
_WORTH_MORE = 0.995
"""Part of the makespan found so far that another number has to beat: simulating many micro-batches takes seconds."""
_MOST_ACTIONS = 8_000
"""Actions of steps between which a pipeline is not drained, beyond which such steps are not searched for: in so long
ones draining costs little, and planning would take seconds."""
_MOST_PER_STAGE = 64
"""The most micro-batches for each stage that are tried: four, after four doublings."""


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
    search = _CountSearch(admission, cost, memory, _budget_of_search(budget, policy), policy)
    search.try_numbers(budget.num_micro_batches)
    part, fastest = search.best()
    if not budget.drains and MOST_STEPS * sum(map(len, fastest.template.actions)) <= _MOST_ACTIONS:
        # Begun with the fastest that is drained: most others are then known to be slower, and are not simulated.
        search.begin_again_without_draining()
        search.try_numbers(budget.num_micro_batches)
        part, fastest = search.best()
    if search.budget.schedule != budget.schedule:
        fastest = part.under_schedule(fastest, budget.schedule, budget.num_chunks)
    return part.outcome(fastest)


class _CountSearch:
    """The fastest of all numbers of micro-batches that were tried.

    Args:
        admission: the tasks that run, and the most tokens of a pass.
        cost: predicts the seconds of two stages or more.
        memory: predicts the bytes of the same stages.
        budget: the budget under which groupings are compared.
        policy: says which partitions of the tasks are compared.
    """

    def __init__(
        self, admission: Admission, cost: CostModel, memory: MemoryModel, budget: Budget, policy: Policy
    ) -> None:
        self.admission, self.memory, self.budget, self.policy = admission, memory, budget, policy
        order = fusion_order([load.tokens for load in admission.admitted])
        loads = [admission.admitted[index] for index in order]
        self.costs = PassCosts(loads, cost, budget.rules, admission.max_tokens)
        self.latencies = RangeLatencies(admission, cost)
        self._found: tuple[PartitionSearch, SimulatedGrouping, int] | None = None
        self._fault: ValueError | None = None
        self._known: set[object] = set()

    def try_numbers(self, asked: int | None) -> None:
        """Simulate what the policy makes of each number of micro-batches, and of some around the best one.

        Args:
            asked: C, where it is given.
        """
        counts = self.candidates(asked)
        self.try_all(counts)
        if asked is None:
            self.try_all(self.between(counts))

    def begin_again_without_draining(self) -> None:
        """Compare by steps between which the pipeline is not drained from now on, with what was found so far."""
        self.budget, self._known = replace(self.budget, drains=False), set()
        if self._found is not None:
            search, fastest, count = self._found
            self._found = search, search.without_draining(fastest), count

    def candidates(self, asked: int | None) -> list[int]:
        """Return the numbers to try: the one that is asked for, or those up to the rows of all tasks.

        Args:
            asked: C, where it is given.
        """
        if asked is not None:
            return [asked]
        num_rows = sum(len(load.lengths) for load in self.costs.loads)
        most = min(_MOST_PER_STAGE * self.costs.cost.num_stages, num_rows)
        if self.budget.rules.split_long_sequences:  # there may be more passes than rows
            most = _MOST_PER_STAGE * self.costs.cost.num_stages
        return [count for count in _COUNTS if count < most] + [max(1, most)]

    def between(self, counts: Iterable[int]) -> list[int]:
        """Return numbers between the best one and its neighbours.

        Args:
            counts: the numbers that were tried.
        """
        if self._found is None:
            return []
        best = self._found[2]
        lower = max((count for count in counts if count < best), default=best)
        upper = min((count for count in counts if count > best), default=best)
        middles = {(lower + best) // 2, (best + upper) // 2}
        return sorted(count for count in middles if lower < count < upper and count != best)

    def try_all(self, counts: Iterable[int]) -> None:
        """Simulate what the policy makes of each number, until none can be faster than what was found.

        Args:
            counts: numbers of micro-batches, ascending.
        """
        num_slower = 0
        for count in counts:
            searches = list(self._new(count))
            # Where the bound of a pass asks for more, small numbers all come to the same passes, which tells nothing.
            if not searches:
                continue
            # The work of a step grows with its passes. Not quite evenly, as rows are whole, hence two in a row.
            num_slower = num_slower + 1 if self._try(searches, count) else 0
            if num_slower == 2:
                return

    def _try(self, searches: Iterable[PartitionSearch], count: int) -> bool:
        """Simulate what the policy makes of a number; return whether all of it was sure to be slower."""
        is_slower = True
        for search in searches:
            most_s = math.inf if self._found is None else self._found[1].step_s
            if self._found is not None and self._found[2] != count:
                most_s *= _WORTH_MORE
            if search.least_s >= most_s:
                continue
            is_slower = False
            try:
                fastest = search.fastest(most_s)
            except ValueError as error:  # one micro-batch of some bucket does not fit
                self._fault = error
                continue
            if fastest is not None:
                self._found = search, fastest, count
        return is_slower

    def best(self) -> tuple[PartitionSearch, SimulatedGrouping]:
        """Return the fastest partition that was found, and its grouping.

        Raises:
            ValueError: if none fits.
        """
        if self._found is None:
            assert self._fault is not None, "some number of micro-batches was tried"
            raise self._fault
        return self._found[:2]

    def _new(self, count: int) -> Iterator[PartitionSearch]:
        """Yield the partitions of a number that were not seen before, under this or another number."""
        for partition in self.policy.partitions(self.latencies.of(count), self.costs.cost.num_stages, count):
            search = PartitionSearch(self.admission, self.costs, self.memory, self.budget, count, partition)
            # Numbers above that of rows come to the same passes.
            if (search.key, partition.is_grouped) not in self._known:
                self._known.add((search.key, partition.is_grouped))
                yield search


class RangeLatencies:
    """Seconds of the hTask of every range of tasks, for any number of micro-batches; remembers what it has computed.

    Args:
        admission: the M tasks that run, and the most tokens of a pass.
        cost: predicts the seconds of an hTask through all stages.
    """

    def __init__(self, admission: Admission, cost: CostModel) -> None:
        self.cost, self.max_tokens = cost, admission.max_tokens
        self.loads = [admission.admitted[i] for i in fusion_order([load.tokens for load in admission.admitted])]
        self._tokens = np.array([load.tokens for load in self.loads], dtype=np.float64)
        self._sums = _range_sums(self._tokens)
        self._rows = _range_sums(np.array([len(load.lengths) for load in self.loads], dtype=np.float64))
        self._even: dict[int, np.ndarray] = {}

    def of(self, num_micro_batches: int) -> np.ndarray:
        """Return the seconds of each range, `[M, M]`; inf where a micro-batch would be too large.

        Args:
            num_micro_batches: C, passes of each hTask in a step; one that has fewer rows has fewer.
        """
        seconds = self._of_even(1)
        for count in [*(count for count in _COUNTS[1:] if count < num_micro_batches), num_micro_batches]:
            seconds = np.where(self._rows >= count, self._of_even(count), seconds)
        return seconds

    def _of_even(self, count: int) -> np.ndarray:
        """Return the seconds of each range in so many equal passes."""
        if count not in self._even:
            overheads_s = (self.cost.num_stages - 1 + count) * self.cost.profile.pass_overhead_s
            latency_s = self.cost.latency_matrix(self.loads, count, fits=None) + overheads_s
            # A task whose own micro-batch is over the bound runs all the same, by itself: only company is refused.
            largest = max(self.max_tokens, float(self._tokens.max()) / count)
            self._even[count] = np.where(self._sums / count <= largest, latency_s, np.inf)
        return self._even[count]


def _range_sums(values: np.ndarray) -> np.ndarray:
    """Return the sums over the tasks i to j as differences of prefix sums, `[M, M]`."""
    ends = np.cumsum(values)
    return ends[None, :] - (ends - values)[:, None]


def _budget_of_search(budget: Budget, policy: Policy) -> Budget:
    """Return the budget under which groupings are compared: under the schedule of the policy, where it has one."""
    drained = replace(budget, drains=True)
    if policy.search_schedule in (None, budget.schedule):
        return drained
    return replace(drained, schedule=policy.search_schedule, num_chunks=1)
