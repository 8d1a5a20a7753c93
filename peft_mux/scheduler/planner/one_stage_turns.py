"""Plans for one stage whose devices share every layer: buckets of hTasks whose passes take turns (M §3.4.2, Eq. 7).

Sums hidden or not, latencies of hTasks no longer add up, so that the partition that Eq. 6 finds need not be the best:
partitions into every number of hTasks up to a bound are compared, each grouped by Eq. 7 into every number of buckets
that can fill their groups, and run through Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryEstimate, MemoryModel
from peft_mux.scheduler.costs.sums.pass_parts import PassParts
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.planner.admission import Admission, least_pass_tokens
from peft_mux.scheduler.planner.fusion import Interval, fuse_into, fusion_order
from peft_mux.scheduler.planner.grouping import group
from peft_mux.scheduler.planner.one_device import LEAST_PASS_TOKENS, cheapest_passes, largest_pass_tokens
from peft_mux.scheduler.planner.passes import CutHTask, PassCosts, planned_passes
from peft_mux.scheduler.planner.policies import Policy
from peft_mux.scheduler.planner.turn_times import TurnMember, TurnTimes, turn_plan
from peft_mux.scheduler.planner.values import Budget, HTask, Outcome

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
