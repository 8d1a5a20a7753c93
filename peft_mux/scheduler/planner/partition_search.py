"""`PartitionSearch`: the fastest grouping into buckets of one partition of the tasks into hTasks (M §3.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peft_mux.scheduler.costs.memory import MemoryEstimate, MemoryModel
from peft_mux.scheduler.pipeline.bounds import lower_bound_s, steady_lower_bound_s
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate, verify
from peft_mux.scheduler.pipeline.template import PipelineTemplate, Schedule, build_template
from peft_mux.scheduler.pipeline.window import window_step_s
from peft_mux.scheduler.planner.admission import Admission
from peft_mux.scheduler.planner.grouping import group
from peft_mux.scheduler.planner.passes import PassCosts, planned_passes
from peft_mux.scheduler.planner.policies import Partition
from peft_mux.scheduler.planner.slot_times import SlotTimes
from peft_mux.scheduler.planner.turn_times import turn_plan
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
