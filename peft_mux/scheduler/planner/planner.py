"""The planner: which tasks run now, which share their passes, in how many passes, and in which order on which stage.

    admit      tasks that fit, by priority (M §3.3, memory model Eq. 5); the others wait
    fuse       sorted tasks into hTasks, as the policy says: by dynamic programming over predicted latency (Eq. 6)
    cut        the rows of each hTask into passes, as the engine cuts them (`passes`)
    group      hTasks into buckets, for every number of buckets (Eq. 7)
    template   of each grouping, simulated; the fastest that fits is the plan (§3.4.1)

A running task is never stopped for one that arrives: its optimizer state is there already, and its user was promised
progress. The others are admitted in the order of priority, then of arrival, as long as they are predicted to fit. A
task that is too large for what is left is skipped and does not hold up the others.

A single device is a pipeline of one stage. What differs there: nothing ties hTasks to a common number of passes, so
that each range of tasks has the number that is predicted to be fastest for it, and any order of buckets is as fast.

M sets the number C of micro-batches by hand, and four for each stage is common. Few micro-batches leave stages idle at
both ends of a step; many pay the fixed part of a pass again and again, and there are no more than a task has rows. On
several stages C is searched: candidates that cannot beat the best one so far are left out, and around the best the
search is refined.

If the devices of a stage sum over one another (tensor parallelism), several passes may take turns (M §3.4.2). More
passes in turns hide more of the sums, and hold the memory of all of them. Plans are made for one width after another,
each with that memory, and the fastest that fits is taken. Sums hidden or not, latencies of hTasks then no longer add
up: on one stage partitions into every number of hTasks are compared, each grouped by Eq. 7 into every number of
buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peft_mux.data.packing.passes import PassRules
from peft_mux.scheduler.costs.latency import CostModel, computed_share, range_sums
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.pipeline.list_scheduler import Links
from peft_mux.scheduler.pipeline.simulator import (
    MOST_STEPS,
    Simulation,
    lower_bound_s,
    simulate,
    simulate_one_stage,
    steady_lower_bound_s,
    window_step_s,
)
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import BucketLoad, HTask, MemoryEstimate, PipelineTemplate, PlannedPass, TurnPlan, Waiting
from peft_mux.scheduler.planner.fusion import Buckets, Interval, cheapest_partition, group
from peft_mux.scheduler.planner.planned_passes import CutHTask, TurnTimes, cut_htask, planned_passes
from peft_mux.scheduler.planner.policies import Policy, policy_named
from peft_mux.scheduler.units import RELATIVE_ROUNDING, bytes_text

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of micro-batches that are tried, closer together where one more makes a greater difference."""
_MOST_COUNT_OF_ONE_STAGE = 128
MOST_PER_STAGE = 64
"""The most micro-batches for each stage that are tried: four, after four doublings."""
_LEAST_PASS_TOKENS = 64
"""On one stage an hTask is not split into passes of fewer tokens."""
_HOPELESS = 1.15
"""How much longer than the best M's template may take for plain 1F1B over the same buckets to be tried: it was at most
11.6 % faster on 2,000 random instances (`docs/log.md`)."""
_LARGEST_TO_MEAN_PASS = 1.5
"""A step of up to half as many tokens again as a typical one is cut into as many passes (`data.packing.passes`)."""
_WORTH_MORE = 0.995
"""Part of the makespan found so far that another number must beat: simulating many micro-batches takes seconds."""
_LARGE_ACTIONS = 2_000
"""Actions of a step from which simulating every number of micro-batches would take seconds; the search ends earlier."""
_MOST_ACTIONS = 8_000
"""Actions of steps between which a pipeline is not drained, beyond which such steps are not searched for: in so long
ones draining costs little, and planning would take seconds."""
_MOST_HTASKS = 8
"""Of partitions that are compared in addition to the policy's, with passes in turns on one stage."""
_MOST_OVER_MEAN = 1.25
"""The longest hTask over the mean one in partitions of similar hTasks."""
MOST_PASSES_IN_TURNS = 4
"""Of numbers that are searched for; M §5.3 interleaves 2 to 4."""
_LEAST_GAIN_OF_TURNS = 0.01
"""Part of a step that turns have to save: predictions are no more accurate, and turns hold more memory."""


def chunks_per_device(schedule: Schedule, num_stages: int) -> int:
    """Return the virtual stages of each device in a run: two if the schedule interleaves them, else one."""
    return 2 if schedule == "interleaved_1f1b" and num_stages > 1 else 1


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may use.

    Attributes:
        max_tokens: the most tokens of one pass; only a single sequence that is longer makes a longer pass.
        limit_bytes: memory of a device that the plan may fill, in bytes; `None` for no limit.
        num_micro_batches: C, passes of each hTask that has as many rows; by default the number is searched for with
            which the predicted step is shortest and fits into memory.
        schedule: the schedule that a pipeline runs. A policy that searches under its own schedule (such as "mux")
            chooses its buckets under that one in any case; this one is then built over them.
        num_chunks: virtual stages of a device, for schedules that interleave them.
        links: the links between neighbouring stages.
        rules: whether rows are cut, and how long chunks are, as the engine's collator has it.
        interleaved_passes: the most passes that take turns while they wait for sums over the devices of a stage;
            "auto" for the number that is predicted to be fastest and fits.
        recomputes: whether activations are recomputed in the backward, as its sums then are.
        drains: whether a pipeline is drained at the end of every step; else plans are compared by steps between which
            it is not, which need fewer micro-batches to keep stages busy.
    """

    max_tokens: int
    limit_bytes: int | None = None
    num_micro_batches: int | None = None
    schedule: Schedule = "mux"
    num_chunks: int = 1
    links: Links = None
    rules: PassRules = field(default_factory=PassRules)
    interleaved_passes: int | Literal["auto"] = 1
    recomputes: bool = False
    drains: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the planner decided, without the particulars of a run that `Plan` adds.

    Attributes:
        htasks: the hTasks of a step, in the order in which they run.
        buckets: for each bucket the indices of the hTasks that share its pipeline clock (M §3.4).
        template: what each stage runs, in order; `None` if nothing runs.
        bucket_loads: what each bucket costs on each stage, as the template was timed with.
        step_s: predicted seconds of a step of all tasks, updates included.
        peak_bytes: predicted peak of each stage, in bytes of one device.
        waiting: the tasks that are left out, each with its reason.
        max_tokens: the most tokens of a pass, as asked for or as fits into memory; more only if a sequence is
            longer.
        memory: the peak of the fullest stage by part; `None` if nothing runs.
        passes: the passes of a typical step, as its rows are cut.
        turns: how passes take turns; `None` if they run one after another.
    """

    htasks: tuple[HTask, ...]
    buckets: tuple[tuple[int, ...], ...]
    template: PipelineTemplate | None
    bucket_loads: tuple[BucketLoad, ...]
    step_s: float
    peak_bytes: tuple[int, ...]
    waiting: tuple[Waiting, ...]
    max_tokens: int
    memory: MemoryEstimate | None
    passes: tuple[PlannedPass, ...] = ()
    turns: TurnPlan | None = None


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
        policy: how tasks are put together, one of `policies.POLICIES`.
        running: names of tasks that run already; they are admitted before others, whatever their priority.

    Raises:
        ValueError: for an unknown policy, two tasks of one name, if not even one task fits, or if the number of passes
            in turns that was asked for does not.
    """
    chosen = policy_named(policy)
    names = [load.name for load in loads]
    if len(set(names)) < len(names):
        raise ValueError(f"tasks must have unique names, got {', '.join(names)}.")
    if not loads:
        return Outcome((), (), None, (), 0.0, (), (), budget.max_tokens, None)

    def plan_at(width: int) -> Outcome:
        memory_in_turns = replace(memory, passes_in_turns=width)
        limit = budget.limit_bytes
        admission = admit(
            loads, memory_in_turns, limit, budget.max_tokens, running=running, single_task=chosen.runs_alone
        )
        search = _Search(admission, cost, memory_in_turns, replace(budget, interleaved_passes=width), chosen)
        return search.outcome(search.fastest())

    asked = budget.interleaved_passes
    if asked != "auto":
        try:
            return plan_at(asked)
        except ValueError as fault:
            for width in range(min(asked - 1, MOST_PASSES_IN_TURNS), 0, -1):
                try:
                    plan_at(width)
                except ValueError:
                    continue
                raise ValueError(
                    f'interleaved_passes must be "auto", or an integer up to {width}, got {asked}. With {asked}: '
                    f"{fault}"
                ) from fault
            raise
    best = plan_at(1)
    # Nothing is gained if no pass waits for others, or if it is unknown what is gained.
    if cost.devices_per_stage == 1 or cost.profile.overlap is None:
        return best
    for width in range(2, MOST_PASSES_IN_TURNS + 1):
        try:
            outcome = plan_at(width)
        except ValueError:  # memory; a wider group holds even more
            break
        fits = budget.limit_bytes is None or max(outcome.peak_bytes, default=0) <= budget.limit_bytes
        # Fewer tasks, or a running one that is too large for so many passes, is no faster plan of the same step. And if
        # sums are hidden, or computing stands still during them, one more pass hides no more.
        if not fits or outcome.waiting != best.waiting or outcome.step_s >= best.step_s * (1 - _LEAST_GAIN_OF_TURNS):
            break
        best = outcome
    return best


class _Grouping(NamedTuple):
    """hTasks grouped into buckets under a template, and what simulating it has shown."""

    cuts: list[CutHTask]
    buckets: Buckets
    bucket_loads: tuple[BucketLoad, ...]
    template: PipelineTemplate
    simulation: Simulation
    step_s: float
    """Seconds of a step: of the simulation, or of several steps between which the pipeline is not drained."""


class _Search:
    """Compares partitions, numbers of passes and groupings of the tasks that run, and keeps the fastest.

    Args:
        admission: the tasks that run, and the most tokens of a pass.
        cost: predicts the seconds of the stages.
        memory: predicts the bytes of the same stages, with the given number of passes in turns.
        budget: the memory, micro-batches and schedule that the plan may use; it names the number of passes in turns.
        policy: says which partitions of the tasks are compared, and under which schedule.
    """

    def __init__(
        self, admission: Admission, cost: CostModel, memory: MemoryModel, budget: Budget, policy: Policy
    ) -> None:
        assert budget.interleaved_passes != "auto", "widths are tried one by one"
        self.admission, self.cost, self.memory, self.budget, self.policy = admission, cost, memory, budget, policy
        # Fusion joins neighbours in the order of token counts (M §3.3).
        self.loads = sorted(admission.admitted, key=lambda load: load.tokens)
        self.stages = range(cost.num_stages)
        self.width = budget.interleaved_passes
        self.times = TurnTimes(cost, self.width, recomputes=budget.recomputes)
        # On one stage admission keeps every pass within the limit, and one micro-batch or group is in flight.
        self.limits = None
        if budget.limit_bytes is not None and cost.num_stages > 1:
            self.limits = (budget.limit_bytes,) * cost.num_stages
        self.static_bytes = tuple(memory.static_bytes(self.loads, stage) for stage in self.stages)
        self.schedule: Schedule = policy.search_schedule or budget.schedule
        self.num_chunks = budget.num_chunks if self.schedule == budget.schedule else 1
        self.drains = True
        self._best: _Grouping | None = None
        self._best_count = 0
        self._fault: ValueError | None = None
        self._seen: set[object] = set()
        self._cuts: dict[tuple[int, int, int], CutHTask] = {}
        self._latencies: dict[int, NDArray[np.float64]] = {}

    def fastest(self) -> _Grouping:
        """Return the grouping of the shortest step.

        Raises:
            ValueError: if one micro-batch of some bucket does not fit, however small the micro-batches are made.
        """
        if self.cost.num_stages == 1:
            self._try_one_stage()
            assert self._best is not None, "on one stage everything that is admitted fits"
            return self._best
        self._try_numbers()
        best = self._best
        num_actions = 0 if best is None else sum(map(len, best.template.actions))
        if best is not None and not self.budget.drains and MOST_STEPS * num_actions <= _MOST_ACTIONS:
            # Begun with the fastest that is drained: most others are then known to be slower, and not simulated.
            self.drains, self._seen = False, set()
            step_s = window_step_s(best.template, best.bucket_loads, links=self.budget.links)
            self._best = best._replace(step_s=step_s)
            self._try_numbers()
            best = self._best
        if best is None:
            assert self._fault is not None, "some number of micro-batches was tried"
            raise self._fault
        if (self.schedule, self.num_chunks) == (self.budget.schedule, self.budget.num_chunks):
            return best
        schedule, num_chunks = self.budget.schedule, self.budget.num_chunks
        return self._scheduled(best.cuts, best.buckets, best.bucket_loads, schedule, num_chunks)

    # ------------------------------------------------------- what is compared

    def _try_numbers(self) -> None:
        """Compare the policy's plans for each number of micro-batches, and for some around the best one."""
        asked = self.budget.num_micro_batches
        if asked is not None:
            self._try_counts([asked])
            return
        most = MOST_PER_STAGE * self.cost.num_stages
        if not self.budget.rules.split_long_sequences:  # otherwise there may be more passes than rows
            most = max(1, min(most, sum(len(load.lengths) for load in self.loads)))
        counts = [*(count for count in _COUNTS if count < most), most]
        self._try_counts(counts)
        best = self._best_count
        if self._best is not None:
            lower = max((count for count in counts if count < best), default=best)
            upper = min((count for count in counts if count > best), default=best)
            middles = {(lower + best) // 2, (best + upper) // 2} - {lower, best, upper}
            self._try_counts(sorted(middles))

    def _try_counts(self, counts: Iterable[int]) -> None:
        """Compare the policy's plans for ascending numbers, until none can be faster than the best one so far."""
        num_slower = 0
        for count in counts:
            is_new, is_slower, best = False, True, self._best
            latency_s = self._range_latencies(count)
            for partition in self.policy.partitions(latency_s, self.cost.num_stages, count):
                cuts = [self._cut(interval, count) for interval in partition.intervals]
                key = tuple((tuple(load.name for load in cut.loads), cut.num_passes) for cut in cuts)
                # Numbers above that of rows come to the same passes.
                if (key, partition.is_grouped) in self._seen:
                    continue
                self._seen.add((key, partition.is_grouped))
                is_new = True
                most_s = math.inf if self._best is None else self._best.step_s
                if count != self._best_count:
                    most_s *= _WORTH_MORE
                if self._least_s(cuts) < most_s:
                    is_slower = False
                    self._compare(cuts, count, most_s, is_grouped=partition.is_grouped)
            # Where the bound of a pass asks for more, small numbers all come to the same passes, which shows nothing.
            # The work of a step grows with its passes. Not quite evenly, as rows are whole, hence two in a row.
            if is_new:
                num_actions = 0 if best is None else sum(map(len, best.template.actions))
                if num_actions > _LARGE_ACTIONS and self._best is best:
                    is_slower = True
                num_slower = num_slower + 1 if is_slower else 0
            if num_slower == 2:
                return

    def _try_one_stage(self) -> None:
        """Compare the partitions for a single stage, each hTask in the number of passes that suits it."""
        latency_s, counts = self._cheapest_counts()
        # C is 1, as the latencies hold all passes of a step already.
        partitions = self.policy.partitions(latency_s, 1, 1)
        tried = [partition.intervals for partition in partitions]
        in_turns = self.times.is_known or self.width > 1
        if in_turns and any(partition.is_grouped for partition in partitions):
            for num_htasks in range(1, min(len(self.loads), _MOST_HTASKS) + 1):
                # Of least seconds, and of similar seconds: what is longer than its neighbours hides no more of theirs.
                even_s = _MOST_OVER_MEAN * latency_s[0, -1] / num_htasks
                for cost in (latency_s, np.where(latency_s <= even_s, latency_s, np.inf)):
                    intervals = cheapest_partition(cost, num_htasks)
                    tried += [] if intervals is None else [intervals]
        # More passes of the same hTasks have neighbours to take turns with, if passes of one task may be neighbours.
        is_free = in_turns and self.times.may_repeat and self.budget.num_micro_batches is None
        for intervals in dict.fromkeys(tried):
            for factor in (1, self.width) if is_free else (1,):
                cuts = []
                for start, end in intervals:
                    fused, count = self.loads[start:end], int(counts[start, end - 1])
                    least_tokens = max(_LEAST_PASS_TOKENS, least_pass_tokens(fused))
                    more = min(factor * count, sum(load.tokens for load in fused) // least_tokens)
                    cuts.append(self._cut((start, end), max(count, more)))
                most_s = math.inf if self._best is None else self._best.step_s
                if self._least_s(cuts) < most_s:
                    # Without turns hTasks follow each other, longest first, and a bucket for each of them.
                    self._compare(cuts, 1, most_s * (1 - RELATIVE_ROUNDING), is_grouped=self.width > 1)

    def _cut(self, interval: Interval, count: int) -> CutHTask:
        """Return the hTask of some tasks cut into about `count` passes; remembers what it has cut."""
        fused = self.loads[interval[0] : interval[1]]
        if not self.budget.rules.split_long_sequences:  # more passes than rows are as many as rows
            count = max(1, min(count, sum(len(load.lengths) for load in fused)))
        key = (*interval, count)
        if key not in self._cuts:
            self._cuts[key] = cut_htask(fused, self.cost, self.budget.rules, self.admission.max_tokens, count)
        return self._cuts[key]

    # --------------------------------------------- seconds of ranges of tasks

    def _range_latencies(self, num_micro_batches: int) -> NDArray[np.float64]:
        """Return the seconds of each range of tasks on several stages, `[M, M]`; inf if a micro-batch is too large.

        An hTask that has fewer rows than micro-batches has fewer of these.
        """
        num_rows = range_sums(np.array([len(load.lengths) for load in self.loads], dtype=float))
        tokens = np.array([load.tokens for load in self.loads], dtype=float)
        latency_s = np.full(num_rows.shape, np.inf)
        for count in (*(count for count in _COUNTS if count < num_micro_batches), num_micro_batches):
            if count not in self._latencies:
                # A task whose own micro-batch is over the bound still runs, but alone.
                largest = max(self.admission.max_tokens, float(tokens.max()) / count)
                seconds = self.cost.latency_matrix(self.loads, count)
                self._latencies[count] = np.where(range_sums(tokens) / count <= largest, seconds, np.inf)
            latency_s = np.where((num_rows >= count) | (count == 1), self._latencies[count], latency_s)
        return latency_s

    def _cheapest_counts(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return for one stage the least seconds of each range of tasks over numbers of passes, and that number."""
        asked = self.budget.num_micro_batches
        if asked is not None:
            latency_s = self.cost.latency_matrix(self.loads, asked)
            return latency_s, np.full(latency_s.shape, asked)
        max_tokens = self.admission.max_tokens
        tokens = range_sums(np.array([load.tokens for load in self.loads], dtype=float))
        longest = np.maximum.accumulate(np.triu([[load.longest for load in self.loads]] * len(self.loads)), axis=1)
        # Beyond the numbers that are tried, the fewest passes that fit count as one of all tokens and their overheads.
        counts = np.maximum(1, np.ceil(tokens / max_tokens)).astype(np.int64)
        beyond_s = self.cost.latency_matrix(self.loads, 1) + (counts - 1) * self.cost.profile.pass_s
        best_s = np.full(tokens.shape, np.inf)
        for count in sorted({*(n for n in _COUNTS if n <= _MOST_COUNT_OF_ONE_STAGE), int(counts[0, -1])}):
            latency_s = self.cost.latency_matrix(self.loads, count)
            # A pass may be larger than allowed only if a single sequence is, and never smaller than is useful.
            is_useful = (count == 1) | (tokens / count >= np.maximum(_LEAST_PASS_TOKENS, longest))
            is_better = (tokens / count <= max_tokens) & is_useful & (latency_s < best_s)
            best_s, counts = np.where(is_better, latency_s, best_s), np.where(is_better, count, counts)
        return np.where(np.isfinite(best_s), best_s, beyond_s), counts

    # ---------------------------------------------------- groupings of hTasks

    def _least_s(self, cuts: Sequence[CutHTask]) -> float:
        """Return about the seconds that no grouping beats: a stage's work, the first pass's way to it, the last's back.

        If the pipeline is not drained, the work alone counts. Templates run the longest bucket first (M Lemma 1), which
        is at least as long as the longest hTask.
        """
        stages_s = [cut.stage_s for cut in cuts if cut.passes]
        if not stages_s:
            return 0.0
        work_s = sum(stage_s.sum(axis=0) for stage_s in stages_s)
        shortest_s = np.min([stage_s.min(axis=0) for stage_s in stages_s], axis=0)
        longest_s = max(stages_s, key=lambda stage_s: stage_s[:, 0].mean()).min(axis=0)
        fraction = self.cost.profile.forward_fraction
        way_s = fraction * longest_s + (1.0 - fraction) * shortest_s
        before_s = np.concatenate(([0.0], np.cumsum(way_s)[:-1])) * self.drains
        least_s = float(np.max(work_s + before_s / self.num_chunks))
        if not self.times.is_known or self.width == 1:
            return least_s
        # Turns may hide all sums, and nothing else.
        parts = [self.times.parts_of(cut, stage) for cut in cuts for stage in self.stages]
        return least_s * min(computed_share(part, self.cost.shape.num_layers) for part in parts)

    def _compare(self, cuts: list[CutHTask], count: int, most_s: float, *, is_grouped: bool) -> None:
        """Simulate the groupings of a partition into each number of buckets; keep one that takes less than `most_s`."""
        # Eq. 7 balances the latencies of a clock; a step has as many clocks as the hTask with most passes. It does so
        # for a given P; which P is best only the simulation shows.
        clocks = max(cut.num_chains for cut in cuts)
        first_stage_s = [float(cut.stage_s[:, 0].sum()) / clocks for cut in cuts]
        schedules: list[tuple[Schedule, int]] = [(self.schedule, self.num_chunks)]
        if schedules == [("mux", 1)]:
            schedules.append(("1f1b", 1))  # faster for some very unequal buckets
        if self.cost.num_stages == 1:
            schedules = [("1f1b", 1)]  # each backward right after its forward
        known: dict[tuple[int, ...], BucketLoad] = {}
        for num_buckets in range(1 if is_grouped else len(cuts), len(cuts) + 1):
            buckets = group(first_stage_s, num_buckets)
            for bucket in buckets:
                if bucket not in known:  # other numbers of buckets have some of the same
                    known[bucket] = self._bucket_load(cuts, bucket)
            unit = "bucket" if self.cost.num_stages > 1 or self.width > 1 else "hTask"
            bucket_loads = tuple(
                replace(known[bucket], name=f"{unit} {number}") for number, bucket in enumerate(buckets, 1)
            )
            if self.cost.num_stages > 1:
                # Building and simulating a template costs far more than the bound that it cannot beat.
                bound = lower_bound_s if self.drains else steady_lower_bound_s
                if bound(bucket_loads, num_chunks=self.num_chunks) >= most_s:
                    continue
            for schedule in schedules:
                try:
                    grouping = self._scheduled(cuts, buckets, bucket_loads, *schedule)
                except ValueError as error:  # one micro-batch of some bucket does not fit
                    self._fault = error
                    break
                # Of equally fast ones the first stays: fewer buckets, and M's template before plain 1F1B.
                if grouping.step_s < most_s:
                    self._best, self._best_count, most_s = grouping, count, grouping.step_s
                elif grouping.step_s > _HOPELESS * most_s:
                    break

    def _bucket_load(self, cuts: Sequence[CutHTask], bucket: Sequence[int]) -> BucketLoad:
        """Return the cost of a bucket, without a name: its hTasks run within one clock, and their times add up."""
        members = [cuts[index] for index in bucket]
        fields = self.times.bucket_fields(members)
        # A clock may hold the largest passes of all its hTasks at once.
        held_tokens = sum(cut.held_tokens for cut in members)
        # Hidden states [T, D] go up the pipeline, and gradients of the same size come down.
        sent_tokens = sum(sum(cut.tokens) for cut in members) / fields["num_micro_batches"]
        return BucketLoad(
            name="",
            activation_bytes=tuple(
                self._with_margin(self.memory.activation_bytes(held_tokens, stage)) for stage in self.stages
            ),
            output_bytes=int(sent_tokens * self.cost.shape.hidden_size * self.cost.shape.activation_bytes),
            **fields,
        )

    def _scheduled(
        self,
        cuts: list[CutHTask],
        buckets: Buckets,
        bucket_loads: tuple[BucketLoad, ...],
        schedule: Schedule,
        num_chunks: int,
    ) -> _Grouping:
        """Build a template and time it.

        Raises:
            ValueError: if one micro-batch of some bucket does not fit.
        """
        if self.cost.num_stages == 1:
            simulation = simulate_one_stage(bucket_loads)
            template = PipelineTemplate(schedule, 1, 1, (tuple(span.action for span in simulation.spans),))
            return _Grouping(cuts, buckets, bucket_loads, template, simulation, simulation.makespan_s)
        links = self.budget.links
        template = build_template(
            bucket_loads,
            schedule,
            num_chunks=num_chunks,
            memory_limit_bytes=self.limits,
            static_bytes=self._held_bytes(cuts),
            links=links,
        )
        simulation = simulate(template, bucket_loads, links=links)
        step_s = simulation.makespan_s if self.drains else window_step_s(template, bucket_loads, links=links)
        return _Grouping(cuts, buckets, bucket_loads, template, simulation, step_s)

    def _with_margin(self, num_bytes: int) -> int:
        """Return bytes and what the allocator holds beyond them."""
        return math.ceil((1.0 + self.memory.margin) * num_bytes)

    def _held_bytes(self, cuts: Sequence[CutHTask]) -> tuple[int, ...]:
        """Return the bytes of each stage in addition to the micro-batches in flight: static, and transient ones."""
        largest = max(cut.held_tokens for cut in cuts)
        return tuple(
            static + self._with_margin(self.memory.workspace_bytes(largest, stage, self.loads))
            for stage, static in enumerate(self.static_bytes)
        )

    # ------------------------------------------------------------------- plan

    def outcome(self, grouping: _Grouping) -> Outcome:
        """Return a grouping as a plan, with what it holds."""
        cuts, buckets, max_tokens = grouping.cuts, grouping.buckets, self.admission.max_tokens
        if self.cost.num_stages == 1:
            # hTasks are in the order in which they run.
            cuts = [cuts[index] for bucket in buckets for index in bucket]
            ends = itertools.accumulate(map(len, buckets), initial=0)
            buckets = tuple(tuple(range(start, end)) for start, end in itertools.pairwise(ends))
            memory = self._memory_of_one_stage(cuts, buckets)
            peak_bytes = (memory.peak_bytes,)
        else:
            memory, peak_bytes, max_tokens = self._memory_of_pipeline(grouping)
        # Tasks are in the stream of a pass in the order of their arrival, which affects its rounding.
        arrived = [load.name for load in self.admission.in_order]
        htasks = tuple(
            HTask(
                tuple(sorted((load.name for load in cut.loads), key=arrived.index)),
                cut.num_passes,
                cut.mean_tokens,
                cut.pass_s,
            )
            for cut in cuts
        )
        return Outcome(
            htasks=htasks,
            buckets=buckets,
            template=grouping.template,
            bucket_loads=grouping.bucket_loads,
            step_s=grouping.step_s + self.cost.outside_s(self.loads),
            peak_bytes=peak_bytes,
            waiting=self.admission.waiting,
            max_tokens=max_tokens,
            memory=memory,
            passes=planned_passes(htasks, self.loads, self.budget.rules, max_tokens),
            turns=None if self.width == 1 else self._turn_plan(cuts, grouping.bucket_loads),
        )

    def _memory_of_one_stage(self, cuts: Sequence[CutHTask], buckets: Buckets) -> MemoryEstimate:
        """Return the peak of the only stage, on which one micro-batch, or group of passes in turns, is in flight."""
        # Any pass may be as large as allowed. None is larger than `max_tokens`, unless a single sequence is.
        largest = 0
        for cut in cuts:
            most_of_a_step = sum(len(load.lengths) * load.longest for load in cut.loads)
            likely = min(_LARGEST_TO_MEAN_PASS * cut.mean_tokens, most_of_a_step, self.admission.max_tokens)
            largest = max(largest, math.ceil(max(likely, cut.held_tokens)))
        in_flight = 1
        if self.width > 1:
            in_flight = max(
                len(group) for bucket in buckets for group in self.times.groups_of([cuts[i] for i in bucket])
            )
        return self.memory.estimate(self.loads, largest, in_flight)

    def _memory_of_pipeline(self, grouping: _Grouping) -> tuple[MemoryEstimate, tuple[int, ...], int]:
        """Return the peak of the fullest stage, those of all stages, and the most tokens of a pass that still fit."""
        max_tokens = self.admission.max_tokens
        held_bytes = self._held_bytes(grouping.cuts)
        workspace_bytes = [held - static for held, static in zip(held_bytes, self.static_bytes, strict=True)]
        # These peaks are of micro-batches in flight alone.
        in_flight_bytes = grouping.simulation.peak_bytes
        peak_bytes = tuple(held + peak for held, peak in zip(held_bytes, in_flight_bytes, strict=True))
        if self.limits is not None:
            pairs = zip(peak_bytes, self.limits, strict=True)
            assert all(peak <= limit for peak, limit in pairs), "templates keep within their limits"
        fullest = peak_bytes.index(max(peak_bytes))
        memory = replace(
            self.memory.estimate_stage(self.loads, 0, 0, fullest),
            activation_bytes=in_flight_bytes[fullest],
            workspace_bytes=workspace_bytes[fullest],
        )
        if self.limits is not None:
            # All micro-batches in flight could grow together. Activations and workspace grow in proportion to
            # tokens or more slowly; static bytes do not grow.
            growth = min(
                (limit - static) / max(1, workspace + in_flight)
                for limit, static, workspace, in_flight in zip(
                    self.limits, self.static_bytes, workspace_bytes, in_flight_bytes, strict=True
                )
            )
            max_tokens = max(1, min(max_tokens, int(growth * max(cut.held_tokens for cut in grouping.cuts))))
        return memory, peak_bytes, max_tokens

    def _turn_plan(self, cuts: Sequence[CutHTask], bucket_loads: Sequence[BucketLoad]) -> TurnPlan:
        """Return how passes take turns, and the seconds that this saves on the busiest stage."""
        saved_s = 0.0
        if self.times.is_known:
            directions = ("both",) if self.cost.num_stages == 1 else ("forward", "backward")
            for stage in self.stages:
                apart_s = sum(
                    cut.num_passes * self.times.group_s([self.times.parts_of(cut, stage)], stage, direction)
                    for cut in cuts
                    for direction in directions
                )
                together_s = sum(
                    load.num_micro_batches * (load.forward_s[stage] + load.backward_s[stage]) for load in bucket_loads
                )
                saved_s = max(saved_s, apart_s - together_s)
        return TurnPlan(self.width, tuple(self.times.parts_of(cut) for cut in cuts), saved_s)


@dataclass(frozen=True, slots=True)
class Admission:
    """Which tasks run, and in how large passes.

    Attributes:
        admitted: the loads of the tasks that run, in the order of admission.
        in_order: the same loads, in the order in which the tasks came.
        waiting: the tasks that do not run, each with its reason.
        max_tokens: the most tokens of a pass: as asked for, or what fits into memory, but at least the longest
            sequence.
    """

    admitted: tuple[TaskLoad, ...]
    in_order: tuple[TaskLoad, ...]
    waiting: tuple[Waiting, ...]
    max_tokens: int


class DoesNotFitError(ValueError):
    """Not even one task fits into memory.

    Attributes:
        task: name of the task that needs least.
        peak_bytes: bytes that it needs on a device alone.
        limit_bytes: bytes that a device may hold.
    """

    def __init__(self, name: str, peak_bytes: int, limit_bytes: int) -> None:
        self.task, self.peak_bytes, self.limit_bytes = name, peak_bytes, limit_bytes
        super().__init__(
            f"task {name!r} alone needs {bytes_text(peak_bytes)} on a device, which has {bytes_text(limit_bytes)}."
        )


def admit(
    loads: Sequence[TaskLoad],
    memory: MemoryModel,
    limit_bytes: int | None,
    max_tokens: int,
    *,
    running: Sequence[str] = (),
    single_task: bool = False,
) -> Admission:
    """Choose the tasks that run.

    Args:
        loads: the loads of all tasks that could run, in the order in which the tasks came; one or more.
        memory: predicts the bytes of each stage.
        limit_bytes: memory of a device that may be filled, in bytes; `None` admits all.
        max_tokens: the most tokens of a pass, as asked for.
        running: names of tasks that run already.
        single_task: whether a single task is admitted, for running task by task.

    Raises:
        DoesNotFitError: if no task fits, not even alone.
    """
    # The template later keeps what is in flight within the same limit, so that one micro-batch counts here.
    in_flight, stages = memory.passes_in_turns, range(memory.num_stages)

    def needed_bytes(members: Sequence[TaskLoad]) -> int:
        """Return the peak of the fullest stage with the smallest possible pass."""
        tokens = least_pass_tokens(members)
        return max(memory.peak_bytes(members, tokens, in_flight, stage) for stage in stages)

    admitted: list[TaskLoad] = []
    waiting: list[Waiting] = []
    for load in sorted(loads, key=lambda load: (load.name not in running, -load.priority)):
        if single_task and admitted:
            waiting.append(Waiting(load.name, f"tasks run one at a time, and {admitted[0].name} runs now"))
            continue
        # A running task stays: its state is there, and predictions may be wrong.
        if limit_bytes is not None and load.name not in running:
            lacking = needed_bytes([*admitted, load]) - limit_bytes
            if lacking > 0:
                company = ", ".join(neighbour.name for neighbour in admitted) or "the backbone"
                reason = f"{bytes_text(lacking)} too much next to {company}; runs when others end"
                waiting.append(Waiting(load.name, reason))
                continue
        admitted.append(load)
    if not admitted:
        needed = [needed_bytes([load]) for load in loads]
        least = needed.index(min(needed))
        raise DoesNotFitError(loads[least].name, needed[least], limit_bytes or 0)
    if limit_bytes is not None:
        fitting = min(memory.max_tokens(admitted, limit_bytes, in_flight, stage) for stage in stages)
        max_tokens = min(max_tokens, max(fitting, least_pass_tokens(admitted)))
    place = {load.name: number for number, load in enumerate(loads)}
    return Admission(
        admitted=tuple(admitted),
        in_order=tuple(sorted(admitted, key=lambda load: place[load.name])),
        waiting=tuple(sorted(waiting, key=lambda task: place[task.name])),
        max_tokens=max_tokens,
    )


def least_pass_tokens(loads: Sequence[TaskLoad]) -> int:
    """Return the tokens of the smallest pass that serves these tasks: their longest sequence, which is not split."""
    return max([1, *(load.longest for load in loads)])
