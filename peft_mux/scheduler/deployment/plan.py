"""What planning a deployment gives: a frozen value that prints, draws and serialises. It plans nothing."""

# MERGED: Whether other replicas would pay, now that tasks have come or gone (L section 5.1, "dynamic batches").
# MERGED: The paper restarts whenever the new plan differs. Here the saving over the steps that are left is held
# MERGED: against what the
# MERGED: restart costs. The trainer carries a decision out.

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.dispatching.dispatch import Dispatch, dispatch
from peft_mux.scheduler.replicas.configs import DeployableTimeModel, ParallelConfig, ReplicaGroup

FORMAT_VERSION = 3

_SUMMARY_CANDIDATES = 10
_BAR_WIDTH = 48
_MIX_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deployment that was considered.

    Attributes:
        counts: replicas of each of the plan's `configurations`.
        length_based_s: the bound of L Theorem 1 on the seconds of a step.
        bound_s: a bound on the seconds of a step that needs no premises.
        step_s: seconds of a step in the form of L Eq. 2; None where it was not solved.
        verdict: "chosen", or why another was.
    """

    counts: tuple[int, ...]
    length_based_s: float
    bound_s: float
    step_s: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class PlanningStatistics:
    """What planning looked at, and what it took.

    Attributes:
        num_configurations: configurations that the time model knows.
        num_proposed: how many of these were combined into deployments.
        num_enumerated: deployments that there are of them.
        num_too_short: deployments of which no replica supports the longest bucket.
        num_over_threshold: deployments dropped by Theorem 1 and the threshold.
        num_out_of_reach: deployments dropped as their bound exceeds a time that was reached.
        num_unreached: deployments that the budget left no time for, though they might be faster.
        gap: part of the plan's time, in the form of L Eq. 2, by which an unreached deployment, or one that was not
            solved to the end, could be faster at most.
        num_solved: deployments that were given to the solver.
        num_bound_met: deployments settled without the solver, as a rule was as fast as the bound.
        num_time_limits: solved deployments that were stopped by the time limit.
        num_failed: solved deployments that were left to the rules as the solver failed.
        first_error: what the solver complained of first; empty where it never failed.
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
    """The replicas to deploy, and what they are expected to do.

    Attributes:
        groups: the replicas to deploy, by configuration.
        num_gpus: GPUs that may be used; those of `groups` may be fewer.
        global_batch: sequences of one step of all tasks together.
        bucketing: padded lengths of the expected batch, and how many sequences each has.
        longest: tokens of the longest sequence, which its bucket rounds up.
        expected: the dispatch of the expected batch; each step has its own.
        configurations: the configurations that were combined into deployments.
        candidates: deployments that were considered: those solved by time, then others by bound; the first of them
            where they are many.
        statistics: how many deployments were considered, and what became of them.
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

    @property
    def expected_step_s(self) -> float:
        """Predicted seconds of the expected batch (L Eq. 10 to 12), without the exchange of gradients."""
        return self.expected.makespan_s

    @property
    def gpu_seconds(self) -> float:
        """GPU seconds of a step; idle GPUs count."""
        return self.expected_step_s * self.num_gpus

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the step that each group is busy, 0 to 1: that of its slowest replica."""
        return tuple(seconds / self.expected_step_s for seconds in self.expected.group_s)

    @property
    def layout(self) -> str:
        """Return the replicas in the paper's notation."""
        return ", ".join(map(str, self.groups))

    def summary(self) -> str:
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
            *_budget_lines(stats),
            *_failure_lines(stats),
            "",
            *self._group_lines(),
            "",
            *self._candidate_lines(),
        ]
        return "\n".join(lines)

    def _group_lines(self) -> list[str]:
        """Return a table of the groups and their part of the expected batch."""
        lines = [f"  {'group':<14} {'GPUs':>5} {'max tokens':>10} {'sequences':>9} {'seconds':>8} {'busy':>6}"]
        rows = zip(self.groups, self.expected.counts, self.expected.group_s, self.utilisation, strict=True)
        for group, counts, seconds, share in rows:
            lines.append(
                f"  {group!s:<14} {group.num_gpus:>5} {group.max_tokens:>10} {sum(counts):>9} {seconds:>8.3f} "
                f"{share:>6.1%}"
            )
        return lines

    def _candidate_lines(self) -> list[str]:
        """Return a table of the best candidates."""
        lines = [f"  {'candidate':<44} {'Theorem 1':>9} {'bound s':>8} {'step s':>8}  verdict"]
        for candidate in self.candidates[:_SUMMARY_CANDIDATES]:
            step = "-" if candidate.step_s is None else f"{candidate.step_s:.3f}"
            lines.append(
                f"  {self._layout_of(candidate):<44} {candidate.length_based_s:>9.3f} {candidate.bound_s:>8.3f}"
                f" {step:>8}  {candidate.verdict}"
            )
        considered = self.statistics.num_enumerated - self.statistics.num_too_short
        if considered > _SUMMARY_CANDIDATES:
            lines.append(f"  and {considered - min(_SUMMARY_CANDIDATES, len(self.candidates))} more")
        return lines

    def picture(self) -> str:
        """Return bars as in L Figure 9: seconds of each group, and what of each bucket lies on it."""
        lines = [f"seconds a step (full width = {self.expected_step_s:.3f} s)"]
        for group, seconds in zip(self.groups, self.expected.group_s, strict=True):
            filled = round(_BAR_WIDTH * seconds / self.expected_step_s)
            lines.append(f"  {group!s:<12} |{'#' * filled}{'.' * (_BAR_WIDTH - filled)}| {seconds:.3f}")
        lines.append("tokens by padded length (share of a bucket's tokens on each group)")
        lines.append("  " + " " * 12 + " " + " ".join(f"{boundary:>6}" for boundary in self.bucketing.boundaries))
        for group, counts in zip(self.groups, self.expected.counts, strict=True):
            shares = [
                f"{count / total:>6.0%}" if count else f"{'-':>6}"
                for count, total in zip(counts, map(sum, zip(*self.expected.counts, strict=True)), strict=True)
            ]
            lines.append(f"  {group!s:<12} " + " ".join(shares))
        lines.append("tokens of each group by padded length, short to long")
        for group, counts in zip(self.groups, self.expected.counts, strict=True):
            lines.append(f"  {group!s:<12} |{self._mix_bar(counts)}|")
        legend = ", ".join(f"{_letter(index)} {boundary}" for index, boundary in enumerate(self.bucketing.boundaries))
        return "\n".join([*lines, f"  {legend}"])

    def __str__(self) -> str:
        """Return `summary()`."""
        return self.summary()

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "num_gpus": self.num_gpus,
                "global_batch": self.global_batch,
                "groups": [
                    {"config": asdict(group.config), "count": group.count, "max_tokens": group.max_tokens}
                    for group in self.groups
                ],
                "bucketing": asdict(self.bucketing),
                "longest": self.longest,
                "expected": json.loads(self.expected.to_json()),
                "configurations": [asdict(config) for config in self.configurations],
                "candidates": [asdict(candidate) for candidate in self.candidates],
                "statistics": asdict(self.statistics),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> DeploymentPlan:
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: for another format version.
        """
        data: dict[str, Any] = json.loads(text)
        if data.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format_version: got {data.get('format_version')!r}; allowed: {FORMAT_VERSION}.")
        bucketing = data["bucketing"]
        return cls(
            groups=tuple(
                ReplicaGroup(ParallelConfig(**row["config"]), row["count"], row["max_tokens"]) for row in data["groups"]
            ),
            num_gpus=data["num_gpus"],
            global_batch=data["global_batch"],
            bucketing=Bucketing(
                tuple(bucketing["boundaries"]), tuple(bucketing["counts"]), bucketing["padding_tokens"]
            ),
            longest=data["longest"],
            expected=Dispatch.from_json(json.dumps(data["expected"])),
            configurations=tuple(ParallelConfig(**row) for row in data["configurations"]),
            candidates=tuple(Candidate(**{**row, "counts": tuple(row["counts"])}) for row in data["candidates"]),
            statistics=PlanningStatistics(**data["statistics"]),
        )

    def _layout_of(self, candidate: Candidate) -> str:
        """Return a candidate's replicas in the paper's notation."""
        pairs = zip(self.configurations, candidate.counts, strict=True)
        return ", ".join(f"{config}x{count}" for config, count in pairs if count)

    def _mix_bar(self, counts: tuple[int, ...]) -> str:
        """Return a bar whose letters stand for buckets, each as wide as its share of the group's tokens."""
        tokens = [count * boundary for count, boundary in zip(counts, self.bucketing.boundaries, strict=True)]
        if not sum(tokens):
            return "." * _MIX_WIDTH
        ends = [round(_MIX_WIDTH * sum(tokens[: index + 1]) / sum(tokens)) for index in range(len(tokens))]
        return "".join(
            _letter(index) * (end - start) for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        )


def _budget_lines(stats: PlanningStatistics) -> list[str]:
    """Return what is not known of a plan whose search was ended by its time, or a solver by its own."""
    if not stats.gap:
        return []
    spent = f"the time for planning was spent before {stats.num_unreached} deployments were tried; "
    return [
        f"  {spent if stats.num_unreached else ''}no deployment that was not solved to the end is more than "
        f"{stats.gap:.1%} faster"
    ]


def _failure_lines(stats: PlanningStatistics) -> list[str]:
    """Return what a solver that failed should say: a plan by the rules alone must not look like a solved one."""
    if not stats.num_failed:
        return []
    return [
        f"  the solver failed on {stats.num_failed} of {stats.num_solved} deployments, which are timed by rules alone; "
        f"first error: {stats.first_error}"
    ]


def _letter(index: int) -> str:
    """Return one sign for a bucket; they repeat after 62."""
    signs = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return signs[index % len(signs)]


DEFAULT_RESTART_S = 180.0
"""L section 5.1: "consistently less than 3 minutes in practice"; what was measured should take its place."""


@dataclass(frozen=True, slots=True)
class Redeployment:
    """A decision, and what it rests on.

    Attributes:
        old: the replicas that there are, in LobRA's notation.
        new: the replicas that would be fastest, in LobRA's notation; as `old` where nothing is faster.
        old_step_s: predicted seconds of a step of all present tasks on the old replicas; infinite where a sequence
            fits none of them.
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
        """Seconds that the new replicas save over what is left, the restart not yet paid."""
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
        """Whether to restart: where it is needed, or saves more than it costs."""
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
    time_model: DeployableTimeModel,
    *,
    remaining: Sequence[tuple[int, float]],
    restart_s: float,
) -> Redeployment:
    """Hold a plan for the present tasks against the replicas that there are.

    Tasks end one by one, and a step without some of them costs less: what is left is counted in steps of all of them,
    by tokens.

    Args:
        old: the configuration of each replica that there is, in any order.
        plan: the deployment that was planned for the present tasks, on the same devices.
        time_model: predicts the seconds of one replica; it knows the old configurations too, where they hold anything.
        remaining: the steps that each task has left, and its tokens in a step.
        restart_s: seconds that the restart costs.

    Raises:
        ValueError: for a negative cost.
    """
    if not 0 <= restart_s < math.inf:
        raise ValueError(f"restart_s is {restart_s}; allowed: 0 or more. Give seconds.")
    groups = groups_of(old, time_model)
    tokens_per_step = sum(tokens for _, tokens in remaining)
    tokens_left = sum(max(0, steps) * tokens for steps, tokens in remaining)
    old_layout, new_layout = _notation(old), _notation(_replica_configs(plan))
    old_step_s = _step_s(groups, plan, time_model)
    # Both are found by heuristics: what there is may be as good as what was planned.
    stays = sorted(old) == sorted(_replica_configs(plan)) or old_step_s <= plan.expected_step_s
    return Redeployment(
        old=old_layout,
        new=old_layout if stays else new_layout,
        old_step_s=old_step_s,
        new_step_s=old_step_s if stays else plan.expected_step_s,
        remaining_steps=tokens_left / tokens_per_step if tokens_per_step else 0.0,
        restart_s=restart_s,
    )


def groups_of(configs: Sequence[ParallelConfig], time_model: DeployableTimeModel) -> tuple[ReplicaGroup, ...]:
    """Return the replicas by configuration; those that hold nothing are left out.

    Args:
        configs: the configuration of each replica, in any order.
        time_model: knows the most tokens of a micro-batch on each configuration.
    """
    return tuple(
        ReplicaGroup(config, list(configs).count(config), time_model.max_tokens[config])
        for config in sorted(set(configs), key=lambda config: (config.num_gpus, config))
        if config in time_model.max_tokens
    )


def _step_s(groups: Sequence[ReplicaGroup], plan: DeploymentPlan, time_model: DeployableTimeModel) -> float:
    """Return the seconds of the plan's expected batch on other replicas; infinite where they cannot hold it."""
    supported = max((group.max_tokens for group in groups), default=0)
    if supported < plan.longest:
        return math.inf
    # A plan that did not know the old replicas may round the longest sequences up past what these hold.
    *shorter, last = plan.bucketing.boundaries
    bucketing = replace(plan.bucketing, boundaries=(*shorter, min(last, supported)))
    return dispatch(groups, bucketing, time_model).makespan_s


def _replica_configs(plan: DeploymentPlan) -> list[ParallelConfig]:
    """Return the configuration of each planned replica."""
    return [group.config for group in plan.groups for _ in range(group.count)]


def _notation(configs: Sequence[ParallelConfig]) -> str:
    """Return replicas in the paper's notation, such as <1,1>x4, <2,1>x1."""
    return ", ".join(f"{config}x{list(configs).count(config)}" for config in dict.fromkeys(configs))
