"""Plans for one device: hTasks follow each other, each in the number of passes that is predicted to be fastest.

M sets one number C of micro-batches for all tasks by hand. On one device nothing ties hTasks to a common number, and
what a pass costs whatever its size makes few passes cheaper; the longest sequence and memory set the bounds.
"""

# MERGED: Plans for one stage whose devices share every layer: buckets of hTasks whose passes take turns (M §3.4.2,
# MERGED: Eq. 7).
# MERGED: Sums hidden or not, latencies of hTasks no longer add up, so that the partition that Eq. 6 finds need not be
# MERGED: the best:
# MERGED: partitions into every number of hTasks up to a bound are compared, each grouped by Eq. 7 into every number
# MERGED: of buckets
# MERGED: that can fill their groups, and run through Algorithm 1.
# MERGED: How many passes take turns: plans are made for one width after another, and the fastest that fits is taken.
# MERGED: More passes in turns hide more of the sums over the devices of a stage, and hold the memory of all of them:
# MERGED: each plan is
# MERGED: made with that memory, so that a width for which passes would have to be too small loses by its time, and
# MERGED: one that does
# MERGED: not fit at all is left out.
# MERGED: The planner: which tasks run now, which share their passes, in how many passes, and in which order on which
# MERGED: stage.
# MERGED:     admit      tasks that fit, by priority (M §3.3, memory model Eq. 5); the others wait
# MERGED: fuse       sorted tasks into hTasks, as the policy says: by dynamic programming over predicted latency (Eq.
# MERGED: 6)
# MERGED:     group      hTasks into buckets, for every number of buckets (Eq. 7)
# MERGED:     template   of each grouping, simulated; the fastest that fits is the plan (§3.4.1)
# MERGED: Where the devices of a stage sum over one another (tensor parallelism), several passes may take turns: how
# MERGED: many is
# MERGED: decided by plans for one width after another (`widths`), on one stage by `one_stage_turns`.
# MERGED: On one device grouping and template are trivial (`one_device`). On several stages all of this is done for
# MERGED: several
# MERGED: numbers C of micro-batches, which M sets by hand, and the fastest is taken (`stages`). Passes are those that
# MERGED: the rows of
# MERGED: a typical step make, cut as the engine cuts them (`passes`).

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryEstimate, MemoryModel
from peft_mux.scheduler.costs.sums import PassParts
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.planner.admission import Admission, admit, least_pass_tokens
from peft_mux.scheduler.planner.fusion import Interval, fuse_into, fusion_order
from peft_mux.scheduler.planner.grouping import group
from peft_mux.scheduler.planner.passes import CutHTask, PassCosts, planned_passes, slot_weights
from peft_mux.scheduler.planner.policies import POLICIES, Partition, Policy, policy_named
from peft_mux.scheduler.planner.stages import plan_on_stages
from peft_mux.scheduler.planner.times import TurnMember, TurnTimes, turn_plan
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


_MOST_HTASKS = 8
"""Of partitions that are compared beside those of the policy."""
_MOST_OVER_MEAN = 1.25
"""The longest hTask over the mean one in partitions of like hTasks."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One hTask of a partition: its passes of a step, and what a mean one of them computes."""

    cut: CutHTask
    parts: PassParts

    @property
    def loads(self) -> Sequence[TaskLoad]:
        return self.cut.loads

    @property
    def count(self) -> int:
        return self.cut.num_passes

    @property
    def member(self) -> TurnMember:
        return TurnMember(tuple(load.name for load in self.loads), self.count, self.parts, self.cut.pass_s)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """hTasks whose passes take turns, the groups of these, and the seconds of each group."""

    members: tuple[_Part, ...]
    groups: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return math.fsum(self.seconds)

    def pass_members(self) -> list[_Part]:
        """Return the hTask of each pass of a step, in the order of the work."""
        return [part for part in self.members for _ in range(part.count)]


def plan_in_turns(
    admission: Admission, cost: CostModel, memory: MemoryModel, budget: Budget, policy: Policy
) -> Outcome:
    """Return the fastest plan of a policy for one number of passes in turns.

    A policy that keeps its buckets apart (`Partition.is_grouped`) has them grouped all the same: whoever asks for a
    number of passes in turns asks for groups.

    Args:
        admission: the tasks that run, and the most tokens of a pass of which so many are held.
        cost: predicts the seconds of a backbone of one stage.
        memory: predicts the bytes of the same backbone with so many passes in turns.
        budget: says how many passes take turns.
        policy: says which partitions of the tasks are compared.
    """
    search = _Search(admission, cost, budget, policy)
    return search.outcome(search.fastest(), memory)


class _Search:
    """The partitions, buckets and groups that are compared."""

    def __init__(self, admission: Admission, cost: CostModel, budget: Budget, policy: Policy) -> None:
        assert budget.interleaved_passes != "auto", "widths are tried one by one"
        self.admission, self.cost, self.policy, self.width = admission, cost, policy, budget.interleaved_passes
        self.loads = [admission.admitted[i] for i in fusion_order([load.tokens for load in admission.admitted])]
        self.budget = budget
        self.costs = PassCosts(self.loads, cost, budget.rules, admission.max_tokens)
        asked = budget.num_micro_batches
        self.latency_s, self.passes = cheapest_passes(self.loads, cost, admission.max_tokens, asked)
        self.times = TurnTimes(cost, recomputes=budget.recomputes)
        # On a GPU two passes of one task are never in a group: their streams would add to the same gradients.
        self.may_repeat = cost.profile.device.startswith("cpu")
        self._parts: dict[tuple[Interval, int], _Part] = {}

    def fastest(self) -> tuple[_Bucket, ...]:
        """Return the buckets of least seconds; of equally fast ones the first, which has the fewest hTasks."""
        best: tuple[_Bucket, ...] = ()
        best_s = math.inf
        for members in self._partitions():
            if self._least_s(members) >= best_s:
                continue
            for num_buckets in range(-(-len(members) // self.width), len(members) + 1):
                buckets = self._buckets(members, num_buckets)
                seconds = math.fsum(bucket.step_s for bucket in buckets)
                if seconds < best_s * (1 - 1e-9):
                    best, best_s = buckets, seconds
        return best

    def outcome(self, buckets: Sequence[_Bucket], memory: MemoryModel) -> Outcome:
        """Return buckets as a plan."""
        parts = [part for bucket in buckets for part in bucket.members]
        ends = np.cumsum([0, *(len(bucket.members) for bucket in buckets)])
        bucket_loads = tuple(self._bucket_load(bucket, number, memory) for number, bucket in enumerate(buckets, 1))
        estimate = max((self._estimate(bucket, memory) for bucket in buckets), key=lambda one: one.peak_bytes)
        passes_s = math.fsum(bucket.step_s for bucket in buckets)
        apart_s = math.fsum(part.count * self._alone_s(part) for part in parts)
        htasks = tuple(self._htask(part) for part in parts)
        return Outcome(
            htasks=htasks,
            buckets=tuple(tuple(range(start, end)) for start, end in pairwise(ends.tolist())),
            # On one stage 1F1B runs the backward of a group right after its forward.
            template=build_template(bucket_loads, "1f1b"),
            bucket_loads=bucket_loads,
            step_s=passes_s + self.cost.outside_s(self.loads),
            peak_bytes=(estimate.peak_bytes,),
            waiting=self.admission.waiting,
            max_tokens=self.admission.max_tokens,
            memory=estimate,
            passes=planned_passes(htasks, self.loads, self.budget.rules, self.admission.max_tokens),
            turns=turn_plan(self.width, [part.parts for part in parts], apart_s - passes_s),
        )

    # ------------------------------------------------------------- partitions

    def _partitions(self) -> Iterator[list[_Part]]:
        """Yield what the policy puts together, and where it fuses by cost the best of every number of hTasks."""
        partitions = self.policy.partitions(self.latency_s, 1, 1)
        intervals = [partition.intervals for partition in partitions]
        if any(partition.is_grouped for partition in partitions):
            for count in range(1, min(len(self.loads), _MOST_HTASKS) + 1):
                # Of least seconds, and of like seconds: what is longer than its neighbours hides no more of theirs.
                even_s = _MOST_OVER_MEAN * self.latency_s[0, -1] / count
                for latency_s in (self.latency_s, np.where(self.latency_s <= even_s, self.latency_s, np.inf)):
                    with suppress(ValueError):  # so few hTasks, or such even ones, there are none
                        intervals.append(fuse_into(latency_s, 1, count).intervals)
        for ranges in dict.fromkeys(tuple(one) for one in intervals):
            # More passes of the same hTasks have neighbours to take turns with, where one task's may be neighbours.
            can_be_more = self.may_repeat and self.budget.num_micro_batches is None
            for factor in (1, self.width) if can_be_more else (1,):
                yield [self._part(own, factor) for own in ranges]

    def _part(self, interval: Interval, factor: int) -> _Part:
        start, end = interval
        members = self.loads[start:end]
        least = max(LEAST_PASS_TOKENS, least_pass_tokens(members))
        tokens = sum(load.tokens for load in members)
        count = int(self.passes[start, end - 1])
        count = max(count, min(factor * count, tokens // least))
        key = interval, count
        if key not in self._parts:
            cut = self.costs.of(start, end, count)
            self._parts[key] = _Part(cut, self.cost.pass_parts(cut.loads, cut.num_passes))
        return self._parts[key]

    def _least_s(self, members: Sequence[_Part]) -> float:
        """Return the seconds that a partition computes, with every sum hidden."""
        layers = self.cost.shape.num_layers
        return math.fsum(
            one.count * (layers * (one.parts.attention_s + one.parts.mlp_s) + one.parts.first_s + one.parts.head_s)
            for one in members
        )

    # ----------------------------------------------------------------- groups

    def _buckets(self, members: Sequence[_Part], num_buckets: int) -> tuple[_Bucket, ...]:
        chosen = group([float(one.cut.stage_s.sum()) for one in members], num_buckets)
        return tuple(self._bucket([members[index] for index in bucket]) for bucket in chosen)

    def _alone_s(self, part: _Part) -> float:
        return self.times.bucket_s([part.member._replace(num_passes=1)], 1)[1][0]

    def _bucket(self, members: Sequence[_Part]) -> _Bucket:
        groups, seconds = self.times.bucket_s([part.member for part in members], self.width)
        return _Bucket(tuple(members), tuple(groups), tuple(seconds))

    # ------------------------------------------------------------------- plan

    def _htask(self, part: _Part) -> HTask:
        cut = part.cut
        return HTask(self.admission.in_order_of_arrival(cut.loads), cut.num_passes, cut.mean_tokens, cut.pass_s)

    def _bucket_load(self, bucket: _Bucket, number: int, memory: MemoryModel) -> BucketLoad:
        """Return a bucket whose micro-batches are its groups, as they run: all their forwards, then their backwards."""
        group_s = bucket.step_s / len(bucket.groups)
        forward_s = self.cost.profile.forward_fraction * group_s
        passes = bucket.pass_members()
        held = max(sum(memory.activation_bytes(passes[i].parts.tokens, 0) for i in own) for own in bucket.groups)
        return BucketLoad(
            name=f"bucket {number}",
            forward_s=(forward_s,),
            backward_s=(group_s - forward_s,),
            activation_bytes=(held,),
            num_micro_batches=len(bucket.groups),
        )

    def _estimate(self, bucket: _Bucket, memory: MemoryModel) -> MemoryEstimate:
        """Return the peak of a bucket: as many passes at once as its widest group has, each as large as any."""
        tokens = max(largest_pass_tokens(part.cut, self.admission.max_tokens) for part in bucket.members)
        return memory.estimate(self.loads, tokens, in_flight=max(len(own) for own in bucket.groups))


MOST_PASSES_IN_TURNS = 4
"""Of numbers that are searched for; M §5.3 interleaves 2 to 4."""
_LEAST_GAIN = 0.01
"""Part of a step that turns have to save: predictions tell no less apart, and turns hold more memory."""


class TurnsDoNotFitError(ValueError):
    """The number of passes in turns that was asked for does not fit into memory."""


def plan_with_turns(plan_at: Callable[[int], Outcome], cost: CostModel, budget: Budget) -> Outcome:
    """Return the plan for as many passes in turns as were asked for, or for the number that is fastest.

    Args:
        plan_at: plans for a number of passes in turns; it raises `ValueError` where that does not fit.
        cost: predicts the seconds of the same stages.
        budget: says how many passes may take turns.

    Raises:
        TurnsDoNotFitError: if so many as were asked for do not fit, naming how many do.
        ValueError: as `plan_at` for one pass after another, where not even that fits.
    """
    asked = budget.interleaved_passes
    if asked != "auto":
        return _plan_as_asked(plan_at, asked)
    best = plan_at(1)
    # Nothing is gained where no pass waits for others, or where nobody knows what is gained.
    if cost.devices_per_stage == 1 or cost.profile.overlap is None:
        return best
    for width in range(2, MOST_PASSES_IN_TURNS + 1):
        try:
            found = plan_at(width)
        except ValueError:  # memory, of which a wider group holds more still
            break
        # Fewer tasks, or a running one that is too large for so many passes, is no faster plan of the same step.
        if found.waiting != best.waiting or not _fits(found, budget):
            break
        if found.step_s >= best.step_s * (1 - _LEAST_GAIN):
            # One more pass hides no more once sums are hidden, or computing stands still beside them.
            break
        best = found
    return best


def _fits(outcome: Outcome, budget: Budget) -> bool:
    return budget.limit_bytes is None or max(outcome.peak_bytes, default=0) <= budget.limit_bytes


def _plan_as_asked(plan_at: Callable[[int], Outcome], asked: int) -> Outcome:
    try:
        return plan_at(asked)
    except ValueError as fault:
        if asked == 1:
            raise
        for width in range(min(asked - 1, MOST_PASSES_IN_TURNS), 0, -1):
            try:
                plan_at(width)
            except ValueError:
                continue
            raise TurnsDoNotFitError(
                f'interleaved_passes is {asked}; allowed: "auto", or an integer up to {width}. With {asked}: {fault}'
            ) from fault
        raise


__all__ = ["POLICIES", "Budget", "Outcome", "plan_tasks"]


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
        policy: how tasks are put together, one of `policy_names()`.
        running: names of tasks that run already; they are admitted before others, whatever their priority.

    Raises:
        ValueError: for an unknown policy, two tasks of one name, or when not even one task fits.
    """
    chosen = policy_named(policy)
    names = [load.name for load in loads]
    if len(set(names)) < len(names):
        raise ValueError(f"tasks are {', '.join(names)}; allowed: every name once.")
    if not loads:
        return Outcome((), (), None, (), 0.0, (), (), budget.max_tokens, None)

    def plan_at(width: int) -> Outcome:
        own, fixed = replace(memory, passes_in_turns=width), replace(budget, interleaved_passes=width)
        limit = budget.limit_bytes
        admission = admit(loads, own, limit, budget.max_tokens, running=running, one_only=chosen.runs_alone)
        if cost.num_stages > 1:
            return plan_on_stages(admission, cost, own, fixed, chosen)
        if width > 1 or TurnTimes(cost).is_known:
            return plan_in_turns(admission, cost, own, fixed, chosen)
        return plan_on_one_device(admission, cost, own, fixed, chosen)

    return plan_with_turns(plan_at, cost, budget)
