"""Plans for several pipeline stages: hTasks, their buckets, and the template that simulates fastest (M §3.3, §3.4).

M plans by one fusion (Eq. 6), which charges an hTask by its share of the steady phase. With few micro-batches, or few
tasks, keeping all tasks apart or putting all together can be faster than what that finds; both are tried as well, and
the simulation decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from peft_mux.scheduler.admission import Admission
from peft_mux.scheduler.cost_model import CostModel
from peft_mux.scheduler.fusion import fuse, fusion_order
from peft_mux.scheduler.grouping import group
from peft_mux.scheduler.loads import TaskLoad
from peft_mux.scheduler.memory import MemoryEstimate, MemoryModel
from peft_mux.scheduler.pipeline_bounds import lower_bound_s
from peft_mux.scheduler.pipeline_load import BucketLoad
from peft_mux.scheduler.pipeline_template import PipelineTemplate, Schedule, build_template
from peft_mux.scheduler.plan import HTask
from peft_mux.scheduler.planner_values import MICRO_BATCHES_PER_STAGE, MOST_DOUBLINGS, Budget, Outcome
from peft_mux.scheduler.simulator import Simulation, simulate, verify


def plan_on_stages(admission: Admission, cost: CostModel, memory: MemoryModel, budget: Budget, policy: str) -> Outcome:
    """Return the fastest plan of a policy that fits.

    Args:
        admission: who runs.
        cost: with two stages or more.
        memory: of the same stages.
        budget: what may be used.
        policy: one of `plan.POLICIES`.

    Raises:
        ValueError: if one micro-batch of some bucket does not fit, however small the micro-batches are made.
    """
    searched = budget if policy != "mux" else replace(budget, **_own_schedule(budget))
    fault: ValueError | None = None
    for count in _counts(budget, cost.num_stages):
        found: list[tuple[float, PartitionSearch, _Found]] = []
        for partition in ("mux", "interleaved", "together") if policy == "mux" else (policy,):
            try:
                search = PartitionSearch(admission, cost, memory, searched, count, partition)
                fastest = search.fastest(every_grouping=partition == "mux")
                found.append((fastest.simulation.makespan_s, search, fastest))
            except ValueError as error:
                fault = error
        if found:
            _, search, fastest = min(found, key=lambda item: item[0])
            if searched.schedule != budget.schedule:
                fastest = search.under(budget.schedule, budget.num_chunks, fastest)
            return search.outcome(fastest)
    assert fault is not None, "some number of micro-batches was tried"
    raise fault


def _own_schedule(budget: Budget) -> dict[str, Any]:
    """Return the schedule under which M's buckets are chosen: its own, whatever template is built over them."""
    return {} if budget.schedule == "mux" else {"schedule": "mux", "num_chunks": 1}


def choose_intervals(
    latency: np.ndarray, policy: str, *, num_stages: int, num_micro_batches: int
) -> tuple[tuple[int, int], ...]:
    """Return which consecutive tasks make an hTask.

    Args:
        latency: `[M, M]` seconds of the hTask of each range of tasks.
        policy: one of `plan.POLICIES`.
        num_stages: S.
        num_micro_batches: C.
    """
    count = len(latency)
    if policy == "together":
        return ((0, count),)
    if policy in ("interleaved", "sequential"):
        return tuple((index, index + 1) for index in range(count))
    return fuse(latency, num_stages, num_micro_batches=num_micro_batches).intervals


def _counts(budget: Budget, num_stages: int) -> list[int]:
    """Return the numbers of micro-batches to try: the one asked for, or more and more until they fit."""
    if budget.num_micro_batches is not None:
        return [budget.num_micro_batches]
    return [MICRO_BATCHES_PER_STAGE * num_stages * 2**doubling for doubling in range(MOST_DOUBLINGS)]


class _Found(NamedTuple):
    buckets: tuple[tuple[int, ...], ...]
    loads: tuple[BucketLoad, ...]
    template: PipelineTemplate
    simulation: Simulation


class PartitionSearch:
    """The groupings of one partition of the tasks into hTasks, with a number of micro-batches."""

    def __init__(
        self,
        admission: Admission,
        cost: CostModel,
        memory: MemoryModel,
        budget: Budget,
        count: int,
        policy: str,
    ) -> None:
        self.admission, self.cost, self.memory, self.budget, self.count = admission, cost, memory, budget, count
        self.stages = range(cost.num_stages)
        self.loads = [admission.admitted[i] for i in fusion_order([load.tokens for load in admission.admitted])]
        intervals = choose_intervals(self._latency(), policy, num_stages=cost.num_stages, num_micro_batches=count)
        self.members = [self.loads[start:end] for start, end in intervals]
        self.stage_s = [
            tuple(cost.stage_latency_s(part, num_micro_batches=count, stage=stage) for stage in self.stages)
            for part in self.members
        ]
        largest = max(self._held_tokens(part) for part in self.members)
        # What is transient while a micro-batch computes lies beside all that are in flight.
        self.workspace = tuple(self._with_margin(memory.workspace_bytes(largest, stage)) for stage in self.stages)
        self.static = tuple(int(memory.static_bytes(self.loads, stage)) for stage in self.stages)
        self.limits = None if budget.limit_bytes is None else (budget.limit_bytes,) * cost.num_stages

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes of each stage besides the micro-batches in flight."""
        return tuple(own + workspace for own, workspace in zip(self.static, self.workspace, strict=True))

    def fastest(self, *, every_grouping: bool) -> _Found:
        """Return the fastest grouping.

        Args:
            every_grouping: try every number of buckets (M §3.4); the baselines do not share clocks.

        Raises:
            ValueError: if none fits.
        """
        return self._fastest(range(1, len(self.members) + 1) if every_grouping else [len(self.members)])

    def under(self, schedule: Schedule, num_chunks: int, found: _Found) -> _Found:
        """Return the same buckets under another schedule.

        Args:
            schedule: of the template.
            num_chunks: virtual stages of a device.
            found: tells the buckets.

        Raises:
            ValueError: for a number of chunks that the schedule does not know.
        """
        template = build_template(
            found.loads,
            schedule,
            num_chunks=num_chunks,
            memory_limit_bytes=self.limits,
            static_bytes=self.held,
            links=self.budget.links,
        )
        return _Found(found.buckets, found.loads, template, simulate(template, found.loads, links=self.budget.links))

    def outcome(self, found: _Found) -> Outcome:
        """Return a grouping as a plan, after its template is verified."""
        verify(found.template, found.loads, memory_limit_bytes=self.limits, static_bytes=self.held)
        ratio = 1.0 / self.cost.profile.forward_fraction
        htasks = tuple(
            HTask(self.admission.in_order_of_arrival(part), self.count, self._tokens(part), ratio * sum(stages))
            for part, stages in zip(self.members, self.stage_s, strict=True)
        )
        in_flight_bytes = found.simulation.peak_bytes
        peaks = tuple(own + peak for own, peak in zip(self.held, in_flight_bytes, strict=True))
        return Outcome(
            htasks=htasks,
            buckets=found.buckets,
            template=found.template,
            bucket_loads=found.loads,
            step_s=found.simulation.makespan_s + self.cost.optimizer_s(self.loads) + self.cost.profile.step_overhead_s,
            peak_bytes=peaks,
            waiting=self.admission.waiting,
            max_tokens=self._bound_tokens(in_flight_bytes),
            memory=self._by_part(peaks.index(max(peaks)), in_flight_bytes),
        )

    def _bound_tokens(self, in_flight_bytes: Sequence[int]) -> int:
        """Return the tokens up to which all micro-batches in flight could grow together and still fit."""
        most = self.admission.max_tokens
        if self.limits is None:
            return most
        growth = min(
            (limit - static) / max(1, workspace + in_flight)
            for limit, static, workspace, in_flight in zip(
                self.limits, self.static, self.workspace, in_flight_bytes, strict=True
            )
        )
        largest = max(self._held_tokens(part) for part in self.members)
        return max(1, min(most, int(growth * largest)))

    def _by_part(self, stage: int, in_flight_bytes: Sequence[int]) -> MemoryEstimate:
        empty = self.memory.estimate_stage(self.loads, 0, 0, stage)
        return replace(empty, activation_bytes=in_flight_bytes[stage], workspace_bytes=self.workspace[stage])

    def _fastest(self, bucket_counts: Sequence[int]) -> _Found:
        best: _Found | None = None
        fault: ValueError | None = None
        for num_buckets in bucket_counts:
            buckets = group([stages[0] for stages in self.stage_s], num_buckets)
            loads = tuple(self._bucket(bucket, number) for number, bucket in enumerate(buckets, start=1))
            if best is not None and (
                lower_bound_s(loads, num_chunks=self.budget.num_chunks) >= best.simulation.makespan_s
            ):
                continue
            try:
                templates = self._templates(loads)
            except ValueError as error:  # one micro-batch of some bucket does not fit
                fault = error
                continue
            for template in templates:
                simulation = simulate(template, loads, links=self.budget.links)
                if best is None or simulation.makespan_s < best.simulation.makespan_s:
                    best = _Found(buckets, loads, template, simulation)
        if best is None:
            assert fault is not None, "some grouping was tried"
            raise fault
        return best

    def _latency(self) -> np.ndarray:
        """Return `[M, M]` seconds of every range of tasks; inf where a micro-batch would be too large."""
        tokens = np.array([load.tokens for load in self.loads], dtype=np.float64)
        ends = np.cumsum(tokens)
        sums = ends[None, :] - (ends - tokens)[:, None]
        largest = max(self.admission.max_tokens, float(tokens.max()) / self.count)
        return np.where(
            sums / self.count <= largest, self.cost.latency_matrix(self.loads, self.count, fits=None), np.inf
        )

    def _templates(self, loads: tuple[BucketLoad, ...]) -> list[PipelineTemplate]:
        """Return the templates worth simulating: M's, and plain 1F1B, which is faster for some very unequal buckets."""
        budget, links = self.budget, self.budget.links
        templates = [
            build_template(
                loads,
                budget.schedule,
                num_chunks=budget.num_chunks,
                memory_limit_bytes=self.limits,
                static_bytes=self.held,
                links=links,
            )
        ]
        if budget.schedule == "mux" and budget.num_chunks == 1:
            plain = build_template(loads, "1f1b", memory_limit_bytes=self.limits, static_bytes=self.held, links=links)
            templates.append(plain)
        return templates

    def _bucket(self, bucket: Sequence[int], number: int) -> BucketLoad:
        forward = tuple(sum(self.stage_s[index][stage] for index in bucket) for stage in self.stages)
        fraction = self.cost.profile.forward_fraction
        tokens = sum(self._tokens(self.members[index]) for index in bucket)
        held_tokens = sum(self._held_tokens(self.members[index]) for index in bucket)
        return BucketLoad(
            name=f"bucket {number}",
            forward_s=forward,
            backward_s=tuple(seconds * (1.0 - fraction) / fraction for seconds in forward),
            activation_bytes=tuple(
                self._with_margin(self.memory.activation_bytes(held_tokens, stage)) for stage in self.stages
            ),
            output_bytes=int(tokens * self.cost.shape.hidden_size * self.cost.shape.activation_bytes),
            num_micro_batches=self.count,
        )

    def _tokens(self, part: Sequence[TaskLoad]) -> float:
        """Return the tokens of one micro-batch of an hTask."""
        return sum(load.tokens for load in part) / self.count

    def _held_tokens(self, part: Sequence[TaskLoad]) -> float:
        """Return the tokens that memory is kept for: a micro-batch, or the longest sequence, which is not split."""
        return max(self._tokens(part), *(load.longest for load in part))

    def _with_margin(self, num_bytes: int) -> int:
        """Return bytes and what the allocator holds beyond them."""
        return math.ceil((1.0 + self.memory.margin) * num_bytes)
