"""What planning a deployment gives: `DeploymentPlan`, a frozen value that prints, draws and serialises.

`Redeployment` says whether other replicas would pay, now that tasks have come or gone (L section 5.1, "dynamic
batches"). The paper restarts whenever the new plan differs; here the saving over the steps that are left is compared
with what the restart costs. The trainer carries a decision out.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.dispatching.dispatch import Dispatch, dispatch
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel, layout_text
from peft_mux.scheduler.units import aligned

DEFAULT_RESTART_S = 180.0
"""L section 5.1: "consistently less than 3 minutes in practice"; a measured time should take its place."""
DEFAULT_STORAGE_GB_PER_S = 1.0
"""Speed at which checkpoints are assumed to be written."""

_SUMMARY_CANDIDATES = 10
_BAR_WIDTH = 48
_MIX_WIDTH = 32
_BLOCK = 8
"""Padded lengths that stand side by side, so that rows have at most 80 characters."""
_BUCKET_SIGNS = string.ascii_letters + string.digits
"""One sign for each bucket of a picture; they repeat after 62."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deployment that was considered.

    Attributes:
        counts: replicas of each of the plan's `configurations`.
        length_based_s: the bound of L Theorem 1 on the seconds of a step.
        bound_s: a bound on the seconds of a step that needs no premises.
        step_s: seconds of a step in the form of L Eq. 2; None if it was not solved.
        verdict: "chosen", or why another was.
    """

    counts: tuple[int, ...]
    length_based_s: float
    bound_s: float
    step_s: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class PlanningStatistics:
    """Statistics of planning: the candidates considered and the time spent.

    Attributes:
        num_configurations: configurations that the time model knows.
        num_proposed: how many of these were combined into deployments.
        num_enumerated: deployments that there are of them.
        num_too_short: deployments of which no replica supports the longest bucket.
        num_over_threshold: deployments dropped by Theorem 1 and the threshold.
        num_out_of_reach: deployments dropped as their bound exceeds a time that was reached.
        num_unreached: deployments for which the budget left no time, though they might be faster.
        gap: part of the plan's time, in the form of L Eq. 2, by which an unreached deployment, or one that was not
            solved to the end, could be faster at most.
        num_solved: deployments that were given to the solver.
        num_bound_met: deployments settled without the solver, as a rule was as fast as the bound.
        num_time_limits: solved deployments that were stopped by the time limit.
        num_failed: solved deployments that were left to the rules as the solver failed.
        first_error: the solver's first error; empty if it never failed.
        filter_s: seconds of everything before solving.
        solve_s: seconds that solving took.
    """

    num_configurations: int
    num_proposed: int
    num_enumerated: int
    num_too_short: int
    num_over_threshold: int
    num_out_of_reach: int
    num_unreached: int
    gap: float
    num_solved: int
    num_bound_met: int
    num_time_limits: int
    num_failed: int
    first_error: str
    filter_s: float
    solve_s: float


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """The replicas to deploy, and their expected work and time.

    Attributes:
        groups: the replicas to deploy, by configuration.
        num_gpus: GPUs that may be used; those of `groups` may be fewer.
        global_batch: sequences of one step of all tasks together.
        bucketing: padded lengths of the expected batch, and how many sequences each has.
        longest: tokens of the longest sequence, which its bucket rounds up.
        expected: the dispatch of the expected batch; each step has its own.
        configurations: the configurations that were combined into deployments.
        candidates: deployments that were considered: those solved by time, then others by bound; the first of them
            if they are many.
        statistics: how many deployments were considered, and the outcomes.
        exchange_s: seconds of a step in which replicas add their gradients; 0 if that is taken as free, as in L.
    """

    groups: tuple[ReplicaGroup, ...]
    num_gpus: int
    global_batch: int
    bucketing: Bucketing
    longest: int
    expected: Dispatch
    configurations: tuple[ParallelConfig, ...]
    candidates: tuple[Candidate, ...]
    statistics: PlanningStatistics
    exchange_s: float = 0.0

    @property
    def expected_step_s(self) -> float:
        """Predicted seconds of the expected batch (L Eq. 10 to 12), with `exchange_s`."""
        return self.expected.makespan_s + self.exchange_s

    @property
    def gpu_seconds(self) -> float:
        """GPU seconds of a step; idle GPUs count."""
        return self.expected_step_s * self.num_gpus

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the step that the slowest replica of each group computes, 0 to 1."""
        return tuple(seconds / self.expected_step_s for seconds in self.expected.group_s)

    @property
    def layout(self) -> str:
        """Return the replicas in the paper's notation."""
        return layout_text(self.groups)

    def __str__(self) -> str:
        """Return the plan, its groups and the best candidates as a table."""
        stats = self.statistics
        idle = self.num_gpus - sum(group.num_gpus for group in self.groups)
        lines = [
            f"deployment  {self.layout}" + (f", {idle} GPUs idle" if idle else ""),
            f"  expected {self.expected_step_s:.3f} s a step, {self.gpu_seconds:.1f} GPU seconds, {self.global_batch} "
            f"sequences on {self.num_gpus} GPUs",
            f"  planned in {stats.filter_s + stats.solve_s:.2f} s: {stats.num_proposed} of {stats.num_configurations} "
            f"configurations, {stats.num_enumerated} deployments; {stats.num_too_short} too short, "
            f"{stats.num_over_threshold} over the threshold, {stats.num_out_of_reach} out of reach, "
            f"{stats.num_bound_met} settled by bound, {stats.num_solved} solved"
            + (f", of which {stats.num_time_limits} not to the end" if stats.num_time_limits else ""),
        ]
        if stats.gap:
            spent = f"the time for planning was spent before {stats.num_unreached} deployments were tried; "
            lines.append(
                f"  {spent if stats.num_unreached else ''}no deployment that was not solved to the end is more than "
                f"{stats.gap:.1%} faster"
            )
        if stats.num_failed:
            # A plan by the rules alone must not look like a solved one.
            lines.append(
                f"  the solver failed on {stats.num_failed} of {stats.num_solved} deployments, which are timed by rules"
                f" alone; first error: {stats.first_error}"
            )
        groups = zip(self.groups, self.expected.counts, self.expected.group_s, self.utilisation, strict=True)
        rows = [("group", "GPUs", "max tokens", "sequences", "seconds", "busy")]
        for group, counts, seconds, share in groups:
            numbers = str(group.num_gpus), str(group.max_tokens), str(sum(counts)), f"{seconds:.3f}", f"{share:.1%}"
            rows.append((str(group), *numbers))
        lines += ["", *aligned(rows, indent="  ")]
        rows = [("candidate", "Theorem 1", "bound s", "step s", "verdict")]
        for candidate in self.candidates[:_SUMMARY_CANDIDATES]:
            counts = zip(self.configurations, candidate.counts, strict=True)
            replicas = ", ".join(f"{config}x{count}" for config, count in counts if count)
            step = "-" if candidate.step_s is None else f"{candidate.step_s:.3f}"
            rows.append(
                (replicas, f"{candidate.length_based_s:.3f}", f"{candidate.bound_s:.3f}", step, candidate.verdict)
            )
        lines += ["", *aligned(rows, (0, 4), "  ")]
        considered = stats.num_enumerated - stats.num_too_short
        if considered > _SUMMARY_CANDIDATES:
            lines.append(f"  and {considered - min(_SUMMARY_CANDIDATES, len(self.candidates))} more")
        return "\n".join(lines)

    summary = __str__

    def picture(self) -> str:
        """Return bars as in L Figure 9: seconds of each group, with the part of each bucket in it."""
        boundaries = self.bucketing.boundaries
        signs = [_BUCKET_SIGNS[index % len(_BUCKET_SIGNS)] for index in range(len(boundaries))]
        totals = list(map(sum, zip(*self.expected.counts, strict=True)))
        seconds_lines, mix_lines = [], []
        share_rows = []
        for group, counts, seconds in zip(self.groups, self.expected.counts, self.expected.group_s, strict=True):
            filled = round(_BAR_WIDTH * seconds / self.expected_step_s)
            seconds_lines.append(f"  {group!s:<12} |{'#' * filled}{'.' * (_BAR_WIDTH - filled)}| {seconds:.3f}")
            shares = [f"{count / total:.0%}" if count else "-" for count, total in zip(counts, totals, strict=True)]
            share_rows.append(shares)
            # Each sign as wide as its bucket's share of the group's tokens.
            tokens = [count * boundary for count, boundary in zip(counts, boundaries, strict=True)]
            ends = [round(_MIX_WIDTH * sum(tokens[: index + 1]) / max(1, sum(tokens))) for index in range(len(tokens))]
            bar = "".join(sign * (end - start) for sign, start, end in zip(signs, [0, *ends], ends, strict=False))
            mix_lines.append(f"  {group!s:<12} |{bar or '.' * _MIX_WIDTH}|")
        share_lines = []
        for first in range(0, len(boundaries), _BLOCK):
            block = slice(first, first + _BLOCK)
            heads = [f"{boundary:>6}" for boundary in boundaries[block]]
            rows = [[f"{group!s:<12}", *shares[block]] for group, shares in zip(self.groups, share_rows, strict=True)]
            share_lines += aligned([["", *heads], *rows], indent="  ")
        legend = ", ".join(f"{sign} {boundary}" for sign, boundary in zip(signs, boundaries, strict=True))
        return "\n".join(
            [
                f"seconds a step (full width = {self.expected_step_s:.3f} s)",
                *seconds_lines,
                "tokens by padded length (share of a bucket's tokens on each group)",
                *share_lines,
                "tokens of each group by padded length, short to long",
                *mix_lines,
                f"  {legend}",
            ]
        )


@dataclass(frozen=True, slots=True)
class FailureOverhead:
    """What failures and checkpoints cost, if checkpoints are saved as often as is best (in neither paper).

    The interval is Young's: with c seconds a checkpoint and a failure every m seconds, sqrt(2 c m) loses the least.

    Attributes:
        failures_per_day: failures of any of the devices.
        checkpoint_s: seconds in which a checkpoint is written and no step is taken.
        restart_s: seconds from a failure to the next step.
        save_every_s: seconds between checkpoints.
        lost_share: part of the time in which no step is taken, or one whose result is lost; at most 1.
    """

    failures_per_day: float
    checkpoint_s: float
    restart_s: float
    save_every_s: float
    lost_share: float

    @classmethod
    def of(
        cls,
        failures_per_day: float,
        checkpoint_bytes: float,
        restart_s: float = DEFAULT_RESTART_S,
        storage_gb_per_s: float = DEFAULT_STORAGE_GB_PER_S,
    ) -> FailureOverhead:
        """Return the overhead of so many failures.

        Args:
            failures_per_day: more than 0.
            checkpoint_bytes: bytes of a checkpoint.
            restart_s: seconds from a failure to the next step.
            storage_gb_per_s: speed at which checkpoints are written.
        """
        failure_s = 86_400 / failures_per_day
        checkpoint_s = checkpoint_bytes / (storage_gb_per_s * 1e9)
        save_every_s = math.sqrt(2 * checkpoint_s * failure_s)
        lost = (checkpoint_s / save_every_s if save_every_s else 0.0) + (restart_s + save_every_s / 2) / failure_s
        return cls(failures_per_day, checkpoint_s, restart_s, save_every_s, min(1.0, lost))


@dataclass(frozen=True, slots=True)
class Redeployment:
    """A decision and its reasons.

    Attributes:
        old: the present replicas, in LobRA's notation.
        new: the replicas that would be fastest, in LobRA's notation; as `old` if nothing is faster.
        old_step_s: predicted seconds of a step of all present tasks on the old replicas; infinite if a sequence fits
            none of them.
        new_step_s: predicted seconds of a step of all present tasks on the new replicas.
        remaining_steps: the work that is left, in steps of all present tasks.
        restart_s: seconds that the restart costs.
    """

    old: str
    new: str
    old_step_s: float
    new_step_s: float
    remaining_steps: float
    restart_s: float

    @property
    def saving_s(self) -> float:
        """Seconds that the new replicas save over the remaining steps, before the cost of the restart."""
        # No steps times an infinite difference would be NaN.
        if self.old == self.new or not self.remaining_steps:
            return 0.0
        return (self.old_step_s - self.new_step_s) * self.remaining_steps

    @property
    def is_needed(self) -> bool:
        """Whether the old replicas cannot hold a sequence of the present tasks."""
        return math.isinf(self.old_step_s)

    @property
    def pays(self) -> bool:
        """Whether to restart: if it is needed, or saves more than it costs."""
        return self.is_needed or self.saving_s > self.restart_s

    def __str__(self) -> str:
        """Return one line with both sides of the decision."""
        if self.is_needed:
            return f"redeploy {self.old} -> {self.new}: the old replicas cannot hold the longest sequence"
        if self.old == self.new:
            return f"keep {self.old}: no other replicas are faster"
        verb = "redeploy" if self.pays else "keep"
        return (
            f"{verb} {self.old} -> {self.new}: {self.old_step_s:.4f} s a step becomes {self.new_step_s:.4f} s, which "
            f"saves {self.saving_s:.1f} s over {self.remaining_steps:.0f} steps; a restart costs {self.restart_s:.1f} s"
        )


def decide_redeployment(
    old: Sequence[ParallelConfig],
    plan: DeploymentPlan,
    time_model: ReplicaTimeModel,
    *,
    remaining: Sequence[tuple[int, float]],
    restart_s: float,
    exchange: GradientExchange | None = None,
) -> Redeployment:
    """Compare a plan for the present tasks with the present replicas.

    Tasks end one by one, and a step without some of them costs less: what is left is counted in steps of all of them,
    by tokens.

    Args:
        old: the configuration of each present replica, in any order.
        plan: the deployment that was planned for the present tasks, on the same devices.
        time_model: predicts the seconds of one replica; it knows the old configurations too, if they hold anything.
        remaining: the steps that each task has left, and its tokens in a step.
        restart_s: seconds that the restart costs.
        exchange: predicts the exchange of gradients; `None` if the plan was made without.
    """
    tokens_per_step = sum(tokens for _, tokens in remaining)
    tokens_left = sum(max(0, steps) * tokens for steps, tokens in remaining)
    groups = time_model.groups(Counter(old))
    supported = max((group.max_tokens for group in groups), default=0)
    old_step_s = math.inf
    if supported >= plan.longest:
        # A plan that did not know the old replicas may round the longest sequences up past what these hold.
        *shorter, last = plan.bucketing.boundaries
        bucketing = replace(plan.bucketing, boundaries=(*shorter, min(last, supported)))
        old_step_s = dispatch(groups, bucketing, time_model).makespan_s
        old_step_s += 0.0 if exchange is None else exchange.seconds_of(groups)
    planned = [group.config for group in plan.groups for _ in range(group.count)]
    # Both are found by heuristics: the present replicas may be as good as what was planned.
    stays = sorted(old) == sorted(planned) or old_step_s <= plan.expected_step_s
    old_layout, new_layout = (
        ", ".join(f"{config}x{count}" for config, count in Counter(configs).items()) for configs in (old, planned)
    )
    return Redeployment(
        old=old_layout,
        new=old_layout if stays else new_layout,
        old_step_s=old_step_s,
        new_step_s=old_step_s if stays else plan.expected_step_s,
        remaining_steps=tokens_left / tokens_per_step if tokens_per_step else 0.0,
        restart_s=restart_s,
    )
