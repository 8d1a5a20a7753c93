"""`PartitionSearch`: the fastest grouping into buckets of one partition of the tasks into hTasks (M §3.4)."""

# MERGED: Plans for several pipeline stages: of all numbers of micro-batches and partitions, what simulates fastest (M
# MERGED: §3.3).
# MERGED: M sets the number C of micro-batches by hand, and four for each stage is common. Few micro-batches leave
# MERGED: stages idle at
# MERGED: both ends of a step; many pay the fixed part of a pass again and again, and more than a task has rows there
# MERGED: cannot be.
# MERGED: Here C is searched: for each candidate the policy's partitions are cut into the passes that their rows
# MERGED: really make
# MERGED: (`passes`), those that cannot beat the best one so far are left out, and the others are grouped into
# MERGED: buckets, ordered by
# MERGED: a template and simulated under the limit of memory (`partition_search`). Around the best the search is then
# MERGED: refined.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.memory import MemoryEstimate, MemoryModel
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import (
    MOST_STEPS,
    Simulation,
    lower_bound_s,
    simulate,
    steady_lower_bound_s,
    verify,
    window_step_s,
)
from peft_mux.scheduler.pipeline.template import PipelineTemplate, Schedule, build_template
from peft_mux.scheduler.planner.admission import Admission
from peft_mux.scheduler.planner.fusion import fusion_order
from peft_mux.scheduler.planner.grouping import group
from peft_mux.scheduler.planner.passes import PassCosts, planned_passes
from peft_mux.scheduler.planner.policies import Partition, Policy
from peft_mux.scheduler.planner.times import SlotTimes, turn_plan
from peft_mux.scheduler.planner.values import Budget, HTask, Outcome, TurnPlan


class SimulatedGrouping(NamedTuple):
    """A grouping of hTasks into buckets under a template, and what simulating it has shown.

    Attributes:
        buckets: for each bucket the indices of its hTasks.
        bucket_loads: what each bucket costs on each stage.
        template: what each stage runs, in order.
        simulation: when each action of the template runs, and what each stage holds.
        step_s: seconds of a step: of the simulation, or of several steps between which the pipeline is not drained.
    """

    buckets: tuple[tuple[int, ...], ...]
    bucket_loads: tuple[BucketLoad, ...]
    template: PipelineTemplate
    simulation: Simulation
    step_s: float


class PartitionSearch:
    """The groupings of one partition of the tasks into hTasks, with one number of micro-batches.

    Args:
        admission: the tasks that run, and the most tokens of a pass.
        costs: cuts hTasks into passes, and predicts their seconds on two stages or more.
        memory: predicts the bytes of the same stages.
        budget: the memory that may be used, and the schedule under which groupings are compared.
        count: C, micro-batches of each hTask in a step; those of few rows have fewer.
        partition: which tasks share an hTask, and whether hTasks share buckets.

    Attributes:
        cuts: the passes of each hTask.
        is_grouped: whether hTasks may share buckets.
    """

    def __init__(
        self,
        admission: Admission,
        costs: PassCosts,
        memory: MemoryModel,
        budget: Budget,
        count: int,
        partition: Partition,
    ) -> None:
        self.admission, self.cost, self.memory, self.budget = admission, costs.cost, memory, budget
        self.is_grouped = partition.is_grouped
        self.stages = range(self.cost.num_stages)
        self.loads = costs.loads
        self.cuts = [costs.of(start, end, count) for start, end in partition.intervals]
        # Eq. 7 balances the latencies of a clock, of which a step has as many as the hTask with most passes.
        clocks = max(cut.num_chains for cut in self.cuts)
        self._first_stage_s = [float(cut.stage_s[:, 0].sum()) / clocks for cut in self.cuts]
        largest = max(cut.held_tokens for cut in self.cuts)
        # What is transient while a micro-batch computes lies beside all that are in flight.
        self.workspace = tuple(
            self._with_margin(memory.workspace_bytes(largest, stage, self.loads)) for stage in self.stages
        )
        self.static = tuple(int(memory.static_bytes(self.loads, stage)) for stage in self.stages)
        assert budget.interleaved_passes != "auto", "widths are tried one by one"
        self.width = budget.interleaved_passes
        self.times = SlotTimes(self.cost, self.width, recomputes=budget.recomputes)
        self.limits = None if budget.limit_bytes is None else (budget.limit_bytes,) * self.cost.num_stages

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes of each stage besides the micro-batches in flight."""
        return tuple(own + workspace for own, workspace in zip(self.static, self.workspace, strict=True))

    @property
    def least_s(self) -> float:
        """About the time that no grouping beats: a stage's work, the way of the first pass to it, and of the last back.

        Where the pipeline is not drained, the work alone counts. Templates run the longest bucket first (M Lemma 1),
        which is at least as long as the longest hTask.
        """
        own = [cut.stage_s for cut in self.cuts if len(cut.passes)]
        if not own:
            return 0.0
        work_s = sum(stage_s.sum(axis=0) for stage_s in own)
        shortest_s = np.min([stage_s.min(axis=0) for stage_s in own], axis=0)
        longest_s = max(own, key=lambda stage_s: stage_s[:, 0].mean()).min(axis=0)
        fraction = self.cost.profile.forward_fraction
        way_s = fraction * longest_s + (1.0 - fraction) * shortest_s
        before_s = np.concatenate(([0.0], np.cumsum(way_s)[:-1])) * self.budget.drains
        least_s = float(np.max(work_s + before_s / self.budget.num_chunks))
        if not self.times.turns.is_known or self.width == 1:
            return least_s
        # Turns may hide all sums, and nothing else.
        parts = [own for cut in self.cuts for own in self.times.parts_of(cut)]
        return least_s * min(own.computed_share(self.cost.shape.num_layers) for own in parts)

    @property
    def key(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """What the search depends on: the tasks of each hTask and the number of its passes."""
        return tuple((tuple(load.name for load in cut.loads), cut.num_passes) for cut in self.cuts)

    def fastest(self, most_s: float = math.inf) -> SimulatedGrouping | None:
        """Return the grouping of the shortest step, into any number of buckets where hTasks may share them.

        Args:
            most_s: seconds from which on a step is of no use; `None` is returned where none is shorter.

        Raises:
            ValueError: if none fits.
        """
        num_htasks = len(self.cuts)
        best: SimulatedGrouping | None = None
        fault: ValueError | None = None
        fits = False
        for num_buckets in range(1 if self.is_grouped else num_htasks, num_htasks + 1):
            # Eq. 7 balances first-stage latencies for a given P; which P is best only the simulation tells.
            buckets = group(self._first_stage_s, num_buckets)
            bucket_loads = tuple(self._bucket_load(bucket, number) for number, bucket in enumerate(buckets, start=1))
            # Building and simulating a template costs far more than the bound that it cannot beat.
            bound = lower_bound_s if self.budget.drains else steady_lower_bound_s
            if bound(bucket_loads, num_chunks=self.budget.num_chunks) >= most_s:
                fits = True
                continue
            try:
                templates = self._templates(bucket_loads)
            except ValueError as error:  # one micro-batch of some bucket does not fit
                fault = error
                continue
            for template in templates:
                found = self._simulated(buckets, bucket_loads, template)
                # Of equally fast ones the first stays: fewer buckets, and M's template before plain 1F1B.
                if found.step_s < most_s:
                    best, most_s = found, found.step_s
                fits = True
        if best is None and not fits:
            assert fault is not None, "some grouping was tried"
            raise fault
        return best

    def under_schedule(self, found: SimulatedGrouping, schedule: Schedule, num_chunks: int) -> SimulatedGrouping:
        """Return the same buckets under another schedule.

        Args:
            found: the grouping whose buckets are kept.
            schedule: the schedule that the new template follows.
            num_chunks: virtual stages of a device.

        Raises:
            ValueError: for a number of chunks that the schedule does not know.
        """
        template = self._template(found.bucket_loads, schedule, num_chunks)
        return self._simulated(found.buckets, found.bucket_loads, template)

    def without_draining(self, found: SimulatedGrouping) -> SimulatedGrouping:
        """Return a grouping with the seconds of a step where the pipeline is not drained between steps.

        Args:
            found: the grouping, whose buckets and template are kept.
        """
        step_s = window_step_s(found.template, found.bucket_loads, links=self.budget.links)
        return found._replace(step_s=step_s)

    def _simulated(
        self, buckets: tuple[tuple[int, ...], ...], bucket_loads: tuple[BucketLoad, ...], template: PipelineTemplate
    ) -> SimulatedGrouping:
        simulation = simulate(template, bucket_loads, links=self.budget.links)
        found = SimulatedGrouping(buckets, bucket_loads, template, simulation, simulation.makespan_s)
        return found if self.budget.drains else self.without_draining(found)

    def outcome(self, found: SimulatedGrouping) -> Outcome:
        """Return a grouping as a plan, after its template is verified.

        Args:
            found: the grouping that was chosen.
        """
        verify(found.template, found.bucket_loads, memory_limit_bytes=self.limits, static_bytes=self.held)
        htasks = tuple(
            HTask(self.admission.in_order_of_arrival(cut.loads), cut.num_passes, cut.mean_tokens, cut.pass_s)
            for cut in self.cuts
        )
        max_tokens = self._most_tokens(found.simulation.peak_bytes)
        # It was simulated without static bytes: these peaks are of micro-batches in flight alone.
        in_flight_bytes = found.simulation.peak_bytes
        peaks = tuple(own + peak for own, peak in zip(self.held, in_flight_bytes, strict=True))
        return Outcome(
            htasks=htasks,
            buckets=found.buckets,
            template=found.template,
            bucket_loads=found.bucket_loads,
            step_s=found.step_s + self.cost.outside_s(self.loads),
            peak_bytes=peaks,
            waiting=self.admission.waiting,
            max_tokens=max_tokens,
            memory=self._memory_by_part(peaks.index(max(peaks)), in_flight_bytes),
            passes=planned_passes(htasks, self.loads, self.budget.rules, max_tokens),
            turns=self._turn_plan(found.buckets),
        )

    def _turn_plan(self, buckets: Sequence[Sequence[int]]) -> TurnPlan | None:
        if self.width == 1:
            return None
        # For the order of turns: what a stage spares of its layers makes no difference to it.
        parts = [self.times.parts_of(cut)[0] for cut in self.cuts]
        return turn_plan(self.width, parts, self._saved_s(buckets))

    def _saved_s(self, buckets: Sequence[Sequence[int]]) -> float:
        """Return the seconds that turns save on the busiest stage."""
        if not self.times.turns.is_known:
            return 0.0

        def stage_s(groupings: Sequence[Sequence[int]]) -> NDArray[Any]:
            return sum((self._step_s(own) for own in groupings), np.zeros(len(self.stages)))

        apart = [(index,) for bucket in buckets for index in bucket]
        return float(np.max(stage_s(apart) - stage_s(buckets)))

    def _step_s(self, bucket: Sequence[int]) -> NDArray[Any]:
        """Return the seconds of all actions of a bucket on each stage, `[S]`."""
        cuts = [self.cuts[index] for index in bucket]
        seconds = self.times.bucket_s(cuts, max(cut.num_chains for cut in cuts))
        return (seconds.forward_s + seconds.backward_s).sum(axis=0)

    def _most_tokens(self, in_flight_bytes: Sequence[int]) -> int:
        """Return the tokens up to which all micro-batches in flight could grow together and still fit."""
        most = self.admission.max_tokens
        if self.limits is None:
            return most
        # Activations and workspace grow in proportion to tokens or more slowly; static bytes do not grow.
        growth = min(
            (limit - static) / max(1, workspace + in_flight)
            for limit, static, workspace, in_flight in zip(
                self.limits, self.static, self.workspace, in_flight_bytes, strict=True
            )
        )
        largest = max(cut.held_tokens for cut in self.cuts)
        return max(1, min(most, int(growth * largest)))

    def _memory_by_part(self, stage: int, in_flight_bytes: Sequence[int]) -> MemoryEstimate:
        # The simulation knows what is in flight; the model of memory adds what lies there besides.
        empty = self.memory.estimate_stage(self.loads, 0, 0, stage)
        return replace(empty, activation_bytes=in_flight_bytes[stage], workspace_bytes=self.workspace[stage])

    def _templates(self, bucket_loads: tuple[BucketLoad, ...]) -> list[PipelineTemplate]:
        """Return the templates worth simulating: M's, and plain 1F1B, which is faster for some very unequal buckets."""
        budget = self.budget
        templates = [self._template(bucket_loads, budget.schedule, budget.num_chunks)]
        if budget.schedule == "mux" and budget.num_chunks == 1:
            templates.append(self._template(bucket_loads, "1f1b", 1))
        return templates

    def _template(self, bucket_loads: tuple[BucketLoad, ...], schedule: Schedule, num_chunks: int) -> PipelineTemplate:
        return build_template(
            bucket_loads,
            schedule,
            num_chunks=num_chunks,
            memory_limit_bytes=self.limits,
            static_bytes=self.held,
            links=self.budget.links,
        )

    def _bucket_load(self, bucket: Sequence[int], number: int) -> BucketLoad:
        # hTasks of a bucket run within one clock: their seconds, tokens and bytes in flight add up.
        cuts = [self.cuts[index] for index in bucket]
        count = max(cut.num_chains for cut in cuts)
        tokens = sum(sum(cut.tokens) for cut in cuts) / count
        # A clock may hold the largest passes of all its hTasks at once.
        held_tokens = sum(cut.held_tokens for cut in cuts)
        return BucketLoad(
            name=f"bucket {number}",
            activation_bytes=tuple(
                self._with_margin(self.memory.activation_bytes(held_tokens, stage)) for stage in self.stages
            ),
            # Hidden states [T, D] go up the pipeline, and gradients of the same size come down.
            output_bytes=int(tokens * self.cost.shape.hidden_size * self.cost.shape.activation_bytes),
            num_micro_batches=count,
            **self.times.bucket_s(cuts, count).fields,
        )

    def _with_margin(self, num_bytes: int) -> int:
        """Return bytes and what the allocator holds beyond them."""
        return math.ceil((1.0 + self.memory.margin) * num_bytes)


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
