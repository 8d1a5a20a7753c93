"""Plans for several pipeline stages: hTasks, their buckets, and the template that simulates fastest (M §3.3, §3.4).

M plans by one fusion (Eq. 6), which charges an hTask by its share of the steady phase. With few micro-batches, or few
tasks, keeping all tasks apart or putting all together can be faster than what that finds; both are tried as well, and
the simulation decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from peft_mux.scheduler.admission import Admission
from peft_mux.scheduler.cost_model import CostModel
from peft_mux.scheduler.fusion import fuse, fusion_order
from peft_mux.scheduler.grouping import group
from peft_mux.scheduler.loads import TaskLoad
from peft_mux.scheduler.memory import MemoryModel
from peft_mux.scheduler.pipeline_bounds import lower_bound_s
from peft_mux.scheduler.pipeline_load import BucketLoad
from peft_mux.scheduler.pipeline_template import PipelineTemplate, build_template
from peft_mux.scheduler.plan import HTask
from peft_mux.scheduler.planner_values import Budget, Outcome
from peft_mux.scheduler.simulator import Simulation, simulate, verify

_MICRO_BATCHES_PER_STAGE = 4
_MOST_DOUBLINGS = 5


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
    fault: ValueError | None = None
    for count in _counts(budget, cost.num_stages):
        outcomes = []
        for partition in ("mux", "interleaved", "together") if policy == "mux" else (policy,):
            try:
                search = _Search(admission, cost, memory, budget, count, partition)
                outcomes.append(search.outcome(every_grouping=partition == "mux"))
            except ValueError as error:
                fault = error
        if outcomes:
            return min(outcomes, key=lambda outcome: outcome.step_s)
    assert fault is not None, "some number of micro-batches was tried"
    raise fault


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
    return [_MICRO_BATCHES_PER_STAGE * num_stages * 2**doubling for doubling in range(_MOST_DOUBLINGS)]


class _Found(NamedTuple):
    buckets: tuple[tuple[int, ...], ...]
    loads: tuple[BucketLoad, ...]
    template: PipelineTemplate
    simulation: Simulation


class _Search:
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
        largest = max(self._tokens(part) for part in self.members)
        # What is transient while a micro-batch computes lies beside all that are in flight.
        self.workspace = tuple(int(memory.workspace_bytes(largest, stage)) for stage in self.stages)
        self.static = tuple(int(memory.static_bytes(self.loads, stage)) for stage in self.stages)
        self.limits = None if budget.limit_bytes is None else (budget.limit_bytes,) * cost.num_stages

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes of each stage besides the micro-batches in flight."""
        return tuple(own + workspace for own, workspace in zip(self.static, self.workspace, strict=True))

    def outcome(self, *, every_grouping: bool) -> Outcome:
        """Return the fastest grouping.

        Args:
            every_grouping: try every number of buckets (M §3.4); the baselines do not share clocks.

        Raises:
            ValueError: if none fits.
        """
        found = self._fastest(range(1, len(self.members) + 1) if every_grouping else [len(self.members)])
        verify(found.template, found.loads, memory_limit_bytes=self.limits, static_bytes=self.held)
        ratio = 1.0 / self.cost.profile.forward_fraction
        htasks = tuple(
            HTask(self.admission.in_order_of_arrival(part), self.count, self._tokens(part), ratio * sum(stages))
            for part, stages in zip(self.members, self.stage_s, strict=True)
        )
        peaks = tuple(own + peak for own, peak in zip(self.held, found.simulation.peak_bytes, strict=True))
        step_s = found.simulation.makespan_s + self.cost.optimizer_s(self.loads) + self.cost.profile.step_overhead_s
        return Outcome(htasks, found.buckets, found.template, found.loads, step_s, peaks, self.admission.waiting)

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
        return BucketLoad(
            name=f"bucket {number}",
            forward_s=forward,
            backward_s=tuple(seconds * (1.0 - fraction) / fraction for seconds in forward),
            activation_bytes=tuple(int(self.memory.activation_bytes(tokens, stage)) for stage in self.stages),
            output_bytes=int(tokens * self.cost.shape.hidden_size * self.cost.shape.activation_bytes),
            num_micro_batches=self.count,
        )

    def _tokens(self, part: Sequence[TaskLoad]) -> float:
        """Return the tokens of one micro-batch of an hTask."""
        return sum(load.tokens for load in part) / self.count
