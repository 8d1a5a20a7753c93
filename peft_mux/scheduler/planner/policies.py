"""`Policy`: decides which tasks share their passes, and the registry in which each policy is found by its name.

The policies are `Mux`, M's planner (M §3.3, §3.4), and what M compares it with: all tasks in one batch, every task by
itself in each step, and one task after another. To add one, subclass `Policy` and call `register_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from peft_mux.scheduler.names import POLICY_NAMES, Schedule
from peft_mux.scheduler.planner.fusion import Interval, fuse


class Partition(NamedTuple):
    """One way to put all tasks into hTasks.

    Attributes:
        intervals: the half-open range of tasks of each hTask, ascending; together they hold every task once. Tasks are
            counted from 0 by ascending tokens.
        is_grouped: whether hTasks may share a bucket: groupings into every number of buckets are then simulated
            (M §3.4), and the fastest is taken. Otherwise every hTask is a bucket by itself.
    """

    intervals: tuple[Interval, ...]
    is_grouped: bool = False


class Policy:
    """How tasks are put together.

    Attributes:
        name: what a user types, and what a plan is stored with.
        words: the phrase that a printed plan shows in place of the name.
        runs_alone: whether a single task is admitted at a time, while all others wait for its end.
        search_schedule: the schedule under which groupings are compared on several stages, whichever schedule is then
            built over the buckets of the fastest; `None` compares them under the schedule that is run.
    """

    name: str
    words: str
    runs_alone: bool = False
    search_schedule: Schedule | None = None

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> Sequence[Partition]:
        """Return the partitions to be compared, at least one; the earlier one is taken of two that are equally fast.

        Args:
            latency_s: seconds of the hTask of each range of tasks, `[M, M]` as in `fusion.fuse`: entry [i, j] is of
                tasks i to j, both included; inf if they do not fit into one pass.
            num_stages: S, pipeline stages; on one, hTasks follow each other and their latencies add up.
            num_micro_batches: C, passes of each hTask in a step; 1 on one stage, where `latency_s` holds all passes.
        """
        raise NotImplementedError


class Together(Policy):
    """One hTask of all tasks, as SL-PEFT has it."""

    name = "together"
    words = "all tasks in one batch"

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        """Return the one partition that puts all tasks together."""
        return [Partition(((0, len(latency_s)),))]


class Interleaved(Policy):
    """One hTask for each task; each is a bucket by itself, so that only buckets are interleaved."""

    name = "interleaved"
    words = "every task by itself, one after another in each step"

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        """Return the one partition that keeps all tasks apart."""
        return [Partition(tuple((index, index + 1) for index in range(len(latency_s))))]


class Sequential(Interleaved):
    """One task after another to its end, as a trainer of single tasks has it."""

    name = "sequential"
    words = "one task at a time"
    runs_alone = True


class Mux(Policy):
    """M's planner.

    M plans by one fusion (Eq. 6), which charges an hTask by its share of the steady phase. With few micro-batches, or
    few tasks, keeping all tasks apart or putting all together can be faster than what that finds
    (`docs/log.md`); both are tried as well, and the simulation decides.
    """

    name = "mux"
    words = "tasks fused and interleaved by predicted cost"
    search_schedule: Schedule | None = "mux"

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        """Return what Eq. 6 fuses and, on several stages, all tasks apart and all together."""
        # On one stage latencies add up and Eq. 6 counts each of them whole: its answer is the best of all partitions.
        others: list[Partition] = []
        if num_stages > 1:
            for baseline in (Interleaved(), Together()):
                others += baseline.partitions(latency_s, num_stages, num_micro_batches)
        try:
            fused = fuse(latency_s, num_stages, num_micro_batches=num_micro_batches)
        except ValueError:
            # A task that fills a micro-batch by itself may round to just above its bound, which Eq. 6 refuses.
            if not others:
                raise
            return others
        return [Partition(fused, is_grouped=True), *others]


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Mux(), Together(), Interleaved(), Sequential())}
"""All policies by name: those of the package, then those that `register_policy` added."""


def register_policy(policy: Policy) -> None:
    """Make a policy known under its name.

    Raises:
        ValueError: if another policy has this name.
    """
    if policy.name in POLICIES:
        raise ValueError(f"a policy is already named {policy.name!r}. Choose another name.")
    POLICIES[policy.name] = policy
    POLICY_NAMES.append(policy.name)


def policy_named(name: str) -> Policy:
    """Return the policy of a name.

    Raises:
        ValueError: if no policy has this name.
    """
    if name not in POLICIES:
        raise ValueError(f"policy must be {', '.join(POLICIES)}, got {name!r}.")
    return POLICIES[name]
