"""`PartitionSearch`: the fastest grouping into buckets of one partition of the tasks into hTasks (M §3.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryEstimate, MemoryModel
from peft_mux.scheduler.pipeline.bounds import lower_bound_s
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate, verify
from peft_mux.scheduler.pipeline.template import PipelineTemplate, Schedule, build_template
from peft_mux.scheduler.planner.admission import Admission
from peft_mux.scheduler.planner.fusion import fusion_order
from peft_mux.scheduler.planner.grouping import group
from peft_mux.scheduler.planner.policies import Partition
from peft_mux.scheduler.planner.values import Budget, HTask, Outcome


class SimulatedGrouping(NamedTuple):
    """A grouping of hTasks into buckets under a template, and what simulating it has shown.

    Attributes:
        buckets: for each bucket the indices of its hTasks.
        bucket_loads: what each bucket costs on each stage.
        template: what each stage runs, in order.
        simulation: when each action of the template runs, and what each stage holds.
    """

    buckets: tuple[tuple[int, ...], ...]
    bucket_loads: tuple[BucketLoad, ...]
    template: PipelineTemplate
    simulation: Simulation


class PartitionSearch:
    """The groupings of one partition of the tasks into hTasks, with one number of micro-batches.

    Args:
        admission: the tasks that run, and the most tokens of a pass.
        cost: predicts the seconds of two stages or more.
        memory: predicts the bytes of the same stages.
        budget: the memory that may be used, and the schedule under which groupings are compared.
        count: C, micro-batches of each hTask in a step.
        partition: which tasks share an hTask, and whether hTasks share buckets.
    """

    def __init__(
        self,
        admission: Admission,
        cost: CostModel,
        memory: MemoryModel,
        budget: Budget,
        count: int,
        partition: Partition,
    ) -> None:
        self.admission, self.cost, self.memory, self.budget, self.count = admission, cost, memory, budget, count
        self.is_grouped = partition.is_grouped
        self.stages = range(cost.num_stages)
        self.loads = [admission.admitted[i] for i in fusion_order([load.tokens for load in admission.admitted])]
        self.members = [self.loads[start:end] for start, end in partition.intervals]
        self.stage_s = [
            tuple(cost.stage_latency_s(part, num_micro_batches=count, stage=stage) for stage in self.stages)
            for part in self.members
        ]
        largest = max(self._held_tokens(part) for part in self.members)
        # What is transient while a micro-batch computes lies beside all that are in flight.
        self.workspace = tuple(
            self._with_margin(memory.workspace_bytes(largest, stage, self.loads)) for stage in self.stages
        )
        self.static = tuple(int(memory.static_bytes(self.loads, stage)) for stage in self.stages)
        self.limits = None if budget.limit_bytes is None else (budget.limit_bytes,) * cost.num_stages

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes of each stage besides the micro-batches in flight."""
        return tuple(own + workspace for own, workspace in zip(self.static, self.workspace, strict=True))

    def fastest(self) -> SimulatedGrouping:
        """Return the grouping of least makespan, into any number of buckets where hTasks may share them.

        Raises:
            ValueError: if none fits.
        """
        num_htasks = len(self.members)
        best: SimulatedGrouping | None = None
        fault: ValueError | None = None
        for num_buckets in range(1 if self.is_grouped else num_htasks, num_htasks + 1):
            # Eq. 7 balances first-stage latencies for a given P; which P is best only the simulation tells.
            buckets = group([stages[0] for stages in self.stage_s], num_buckets)
            bucket_loads = tuple(self._bucket_load(bucket, number) for number, bucket in enumerate(buckets, start=1))
            # Building and simulating a template costs far more than the bound that it cannot beat.
            if best is not None and (
                lower_bound_s(bucket_loads, num_chunks=self.budget.num_chunks) >= best.simulation.makespan_s
            ):
                continue
            try:
                templates = self._templates(bucket_loads)
            except ValueError as error:  # one micro-batch of some bucket does not fit
                fault = error
                continue
            for template in templates:
                simulation = simulate(template, bucket_loads, links=self.budget.links)
                # Of equally fast ones the first stays: fewer buckets, and M's template before plain 1F1B.
                if best is None or simulation.makespan_s < best.simulation.makespan_s:
                    best = SimulatedGrouping(buckets, bucket_loads, template, simulation)
        if best is None:
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
        simulation = simulate(template, found.bucket_loads, links=self.budget.links)
        return SimulatedGrouping(found.buckets, found.bucket_loads, template, simulation)

    def outcome(self, found: SimulatedGrouping) -> Outcome:
        """Return a grouping as a plan, after its template is verified.

        Args:
            found: the grouping that was chosen.
        """
        verify(found.template, found.bucket_loads, memory_limit_bytes=self.limits, static_bytes=self.held)
        # Stages are timed by their forwards (Eq. 3); a pass is forward and backward.
        ratio = 1.0 / self.cost.profile.forward_fraction
        htasks = tuple(
            HTask(self.admission.in_order_of_arrival(part), self.count, self._tokens(part), ratio * sum(stages))
            for part, stages in zip(self.members, self.stage_s, strict=True)
        )
        # It was simulated without static bytes: these peaks are of micro-batches in flight alone.
        in_flight_bytes = found.simulation.peak_bytes
        peaks = tuple(own + peak for own, peak in zip(self.held, in_flight_bytes, strict=True))
        return Outcome(
            htasks=htasks,
            buckets=found.buckets,
            template=found.template,
            bucket_loads=found.bucket_loads,
            step_s=found.simulation.makespan_s + self.cost.optimizer_s(self.loads) + self.cost.profile.step_overhead_s,
            peak_bytes=peaks,
            waiting=self.admission.waiting,
            max_tokens=self._most_tokens(in_flight_bytes),
            memory=self._memory_by_part(peaks.index(max(peaks)), in_flight_bytes),
        )

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
        largest = max(self._held_tokens(part) for part in self.members)
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
            # Hidden states [T, D] go up the pipeline, and gradients of the same size come down.
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
