"""`TimeCorrection`: learns how far measured times are from a profile (M §4), so that plans can be priced again.

A measured pass is a sum over parts. The profile predicts the seconds of each part: seconds = sum of factor times
predicted seconds. Factors are the least squares of relative errors over all passes, recent ones counting more
(recursive least squares with forgetting, stored as information, which is a sum over passes and so over processes).
Passes of one run are similar, so parts can be separated only as far as passes differ. A ridge decides the rest: it
pulls the factor of each part towards the one factor that fits all parts. Factors have a lower bound.

Communication grows with the tokens of a pass, as computing does, and has a fixed part, as a pass has, so the times of
passes cannot separate it from these two. It is measured separately where possible (`PassTime.waited_s`); elsewhere its
factor stays near its start, and slower links count as slower computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from peft_mux.data.packing.passes import PassRules
from peft_mux.engine.work import PassTime, StepTimes, TaskInPass
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.profile import AS_PROFILED, Parts
from peft_mux.scheduler.pipeline.list_scheduler import Links
from peft_mux.scheduler.pipeline.simulator import simulate, window_step_s
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.planned_passes import TurnTimes, cut_htask
from peft_mux.scheduler.subgraphs import Direction
from peft_mux.scheduler.units import MEASURED_TIME, seconds_text

# Tuned constants: prices of passes that ran, the least squares, and when to learn and to look.
_LEAST_SUMMED = 0.1
"""Smallest share of the wait for all-reduces that counts as their own time, however unequal the ranks are in the
profile."""
_NOISE = 0.1
"""Relative deviation of a measured pass that is noise: equal passes differ as much on a busy host."""
_FORGETTING = 0.99
"""Weight of a pass relative to the next one: about a hundred passes count."""
_RIDGE = 1.0
"""Deviation of a part's factor from the common one, relative to it, that is expected before anything is measured."""
_LEAST_SHARE = 0.1
"""The fixed time of a pass, and the time between passes, may be far from any profile: they may take this share of a
pass, however little was predicted. Times that grow with tokens and lengths may not: a factor of noise over almost
nothing would be extrapolated to the tokens of larger passes."""
_OVERHEADS = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
_ROUNDS = 4
"""Iterations: each widens the ridge of overheads to the factors found, so that it acts almost on their logarithms."""
_LEAST_FACTOR = 0.02
_LEAST_OF_COMMON = 0.1
"""Lower bound of a part's factor, relative to the one factor of all parts."""
_OUTLIER = 3.0
"""Passes whose residual is more than this many times the usual one count less."""
_KINDS = {Parts._fields.index("optimizer"): 1, Parts._fields.index("communication"): 2}
"""Kinds of measurements, whose noise differs, by the part with most of the predicted seconds; all others are of kind
0."""
_COMPUTED = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
"""The parts that one device computes, which are slower or faster together; links are independent of them."""

_MOST_PASSES = 4
"""Passes of each step that are learnt from, different ones in the next step: pricing a pass takes host time."""
_EVERY_STEP, _SOME_STEPS = 20, 5
"""The first 20 steps under a plan are learnt from, then every fifth: more of the same adds little."""
_SAME = 0.1
"""Factors whose logarithms differ by less do not justify looking for another plan."""
_FORECAST_STEPS = 5
"""Steps before a forecast is corrected; the first one under a plan does not count in the ratio."""


@dataclass(frozen=True, slots=True)
class PassPrices:
    """Predicts the time of passes that have run on this process from a profile, part by part.

    Attributes:
        cost: predicts seconds from the profile as it was measured or read off a data sheet.
        loads: the load of each task in a step, by its name; only its adapters count here, not its rows.
        stage: stage of the pipeline that this process holds.
        turns: times of passes in turns with what was learnt so far; `None` if all-reduces count in full.
        turns_factor: the learnt factor of communication.
    """

    cost: CostModel
    loads: Mapping[str, TaskLoad]
    stage: int
    turns: TurnTimes | None = None
    turns_factor: float = 1.0

    def of(self, timed: PassTime) -> Parts:
        """Return the predicted seconds of passes that were timed together."""
        rows = [self._rows(tasks_of_pass) for tasks_of_pass in timed.passes]
        parts = self._parts(self.cost, rows)
        # On one stage a single pass waits for its all-reduces in full, which is timed separately where possible.
        if self.turns is None or (self.cost.num_stages == 1 and len(rows) < 2):
            return parts
        # How much of the all-reduces is visible depends on how long they take, so the learnt times are used.
        turns, stage = self.turns, self.stage
        computed_s = self._parts(turns.cost, rows)._replace(communication=0.0).total
        between = [turns.cost.pass_parts(stage, turns.cost.pass_work(loads, [whole_pass(loads)])) for loads in rows]
        if turns.cost.num_stages == 1:
            taken_s = turns.group_s(between)
        else:
            tasks = [[load.name for load in loads] for loads in rows]
            ways: tuple[Direction, ...] = ("forward", "backward")
            taken_s = sum(turns.action_s(tasks, between, stage, way) for way in ways)
        return parts._replace(communication=max(0.0, taken_s - computed_s) / self.turns_factor)

    def summed_s(self, timed: PassTime) -> float:
        """Return the seconds that the all-reduces of a pass took, out of those that it waited for them.

        The rest of the wait was for slower ranks: on average as long as the profile says.
        """
        waited_s = timed.waited_s or 0.0
        skew = 0.0 if self.cost.profile.overlap is None else self.cost.profile.overlap.skew
        return max(waited_s - skew * (timed.seconds - waited_s), _LEAST_SUMMED * waited_s)

    def between(self, tasks: Iterable[str]) -> Parts:
        """Return the predicted seconds of a step of some tasks outside of its passes."""
        return Parts(optimizer=self.cost.outside_s([self.loads[name] for name in tasks if name in self.loads]))

    def _rows(self, rows: Sequence[TaskInPass]) -> list[TaskLoad]:
        """Return the loads of a pass: the adapters of each task, with the rows that it has in the pass."""
        return [
            replace(
                self.loads[row.task],
                lengths=row.lengths,
                shared=row.shared,
                num_targets=row.num_targets,
                longest_row_tokens=0,
                trie=None,
            )
            for row in rows
            if row.task in self.loads
        ]

    def _parts(self, cost: CostModel, passes: Sequence[Sequence[TaskLoad]]) -> Parts:
        """Return the seconds of passes of these rows, forward and backward, added up."""
        seconds = np.zeros(len(Parts._fields))
        for rows in passes:
            parts = cost.stage_parts(self.stage, cost.pass_work(rows, [whole_pass(rows)]))
            seconds += [float(np.sum(part)) for part in parts]
        return Parts(*seconds.tolist())


# ------------------------------------------------------------------- learning


class TimeCorrection:
    """Learns the ratio of measured to predicted time for each part of a step, across plans.

    Attributes:
        time_ratio: measured over predicted time of a step, smoothed; `None` before anything was observed.
        factors: what plans are made with now; all 1 unless measured times are applied.
        agreed: what was learnt on all processes together, as of the last `agree`.
        num_passes: measurements on all processes, as of the last `agree`.
    """

    def __init__(self) -> None:
        self.time_ratio: float | None = None
        self._log_ratio: float | None = None
        self._num_steps = self._num_compared = 0
        self.restore(AS_PROFILED)

    def restore(self, factors: Parts) -> None:
        """Start again, with factors that were in force when a run was saved."""
        self.factors = self.agreed = factors
        self.num_passes = self._num_learnt = 0
        self._start = np.array(factors)
        self._information = np.zeros((len(factors), len(factors)))
        self._evidence = np.zeros(len(factors))
        self._usual_residuals = [0.5, 0.5, 0.5]

    def begin_plan(self) -> None:
        """Mark the next step as the first one under a plan, which allocates what later steps reuse."""
        self._log_ratio, self._num_steps = None, 0

    # ------------------------------------------------------------ whole steps

    def observe(self, plan: Plan, num_tokens: int, seconds: float) -> None:
        """Compare a step with its prediction; the first one under a plan does not count.

        Args:
            plan: the plan that the step followed.
            num_tokens: tokens of the global batches of all tasks in the step.
            seconds: seconds that the step took, passes and updates.
        """
        self._num_steps += 1
        if self._num_steps == 1 or not plan.step_s or not num_tokens or seconds <= 0:
            return
        # Batches are drawn, so a step is compared with the plan's time for as many tokens as it had. Ratios are
        # averaged as logarithms: twice as slow and twice as fast then cancel.
        log_ratio = math.log(seconds / (plan.step_s * num_tokens / plan.tokens_per_step))
        mean = self._log_ratio
        self._log_ratio = log_ratio if mean is None else 0.8 * mean + 0.2 * log_ratio
        self.time_ratio = math.exp(self._log_ratio)

    def compare_with_plan(self, plan: Plan, steps_left: Mapping[str, int]) -> tuple[float, float, str] | None:
        """Return the corrected forecast once, after some steps, if they take longer or less than its band allows.

        Args:
            plan: the plan that the last step followed.
            steps_left: steps that each running task has still to take.

        Returns:
            Measured over predicted seconds of a step, the seconds that were predicted for all steps that are left, and
            the corrected forecast in words.
        """
        self._num_compared += 1
        ratio = self.time_ratio
        if self._num_compared != _FORECAST_STEPS or ratio is None or not plan.step_s or MEASURED_TIME.holds(ratio):
            return None
        tokens = sum(share.tokens_per_step * steps_left.get(share.name, 0) for share in plan.shares)
        predicted_s = plan.step_s * tokens / plan.tokens_per_step
        # Without a measured profile, the prediction was an order of magnitude.
        is_measured = plan.profile_source == "measured"
        against = f", {ratio:.2g} times the predicted {seconds_text(plan.step_s)}" if is_measured else ""
        line = (
            f"time: {seconds_text(plan.step_s * ratio, 2)} a step, measured{against};"
            f" {seconds_text(predicted_s * ratio, 2)} left"
        )
        return ratio, predicted_s, line

    # --------------------------------------------------------- part by part

    @property
    def learns_from_next_step(self) -> bool:
        """Whether `observe_passes` learns from the next step: only from some, and not from the first under a plan.

        Pricing passes takes host time.
        """
        is_late = self._num_steps >= _EVERY_STEP
        return self._num_steps > 0 and not (is_late and self._num_steps % _SOME_STEPS)

    def observe_passes(self, times: StepTimes, between_s: float, tasks: Iterable[str], prices: PassPrices) -> None:
        """Learn from what the passes of a step took here, and what lay between them; call this before `observe`.

        Does nothing for steps that are not learnt from (`learns_from_next_step`).

        Args:
            times: the passes of the step, as they were timed.
            between_s: seconds of the step outside of its passes, without waiting for other processes.
            tasks: names of the tasks that have taken the step.
            prices: what the profile predicts for each part of a pass.
        """
        if not self.learns_from_next_step:
            return
        stride = -(-len(times.passes) // _MOST_PASSES) or 1
        for timed in times.passes[self._num_steps % stride :: stride]:
            predicted = prices.of(timed)
            if timed.waited_s is None:
                self.learn(predicted, timed.seconds)
            else:
                self.learn(predicted._replace(communication=0.0), timed.seconds - timed.waited_s)
                self.learn(Parts(communication=predicted.communication), prices.summed_s(timed))
        self.learn(prices.between(tasks), between_s)

    def learn(self, predicted: Parts, seconds: float) -> None:
        """Learn from a measurement; one without seconds, or without a prediction, is ignored.

        Args:
            predicted: seconds of each part by the profile.
            seconds: seconds that all parts together have taken.
        """
        row = np.array(predicted)
        if not (0 < seconds < np.inf and 0 < row.sum() < np.inf):
            return
        expected = float(row @ np.array(self.learnt))
        kind, residual = _KINDS.get(int(np.argmax(row)), 0), abs(math.log(seconds / expected))
        usual = self._usual_residuals[kind]
        limit = _OUTLIER * usual
        weight = min(1.0, limit / residual) ** 2 if residual > 0 else 1.0
        # If all are off, the usual residual grows: the profile is wrong then, not the measurements.
        self._usual_residuals[kind] = max(_NOISE, usual + 0.1 * (min(residual, limit) - usual))
        # Relative to the larger of the two: neither a pass that stalled nor a tiny one outweighs the others.
        scale = _NOISE * max(seconds, expected)
        row = row / scale
        self._information = _FORGETTING * self._information + weight * np.outer(row, row)
        self._evidence = _FORGETTING * self._evidence + weight * row * (seconds / scale)
        self._num_learnt += 1

    @property
    def learnt(self) -> Parts:
        """The measured over the predicted seconds of each part, from the passes of this process."""
        return _best_factors(self._start, self._information, self._evidence)

    def numbers(self) -> list[float]:
        """Return what was learnt on this process as plain numbers, which `agree` takes."""
        return [float(self._num_learnt), *self._information.ravel().tolist(), *self._evidence.tolist()]

    def agree(self, everywhere: Sequence[Sequence[float]]) -> None:
        """Combine what all processes have learnt.

        Args:
            everywhere: `numbers` of each process, by rank: the rounding of sums depends on their order.
        """
        num_passes, *sums = np.sum(everywhere, axis=0)
        size = len(self._start)
        information, evidence = np.array(sums[: size * size]).reshape(size, size), np.array(sums[size * size :])
        self.agreed, self.num_passes = _best_factors(self._start, information, evidence), int(num_passes)

    @property
    def differs(self) -> bool:
        """Whether the time of a part differs from the one in plans by more than noise explains."""
        pairs = zip(self.factors, self.agreed, strict=True)
        return any(abs(math.log(now / before)) > _SAME for before, now in pairs)

    def __str__(self) -> str:
        """Return one line; "" if nothing was measured."""
        if not self.num_passes:
            return ""
        return f"measured / predicted time: {self.agreed} ({self.num_passes:,} measured)"


def _best_factors(start: NDArray[np.float64], information: NDArray[np.float64], evidence: NDArray[np.float64]) -> Parts:
    """Return the factors that fit best; those of the start if nothing was measured."""
    # The ridge pulls each computed part towards the one factor that fits all of them best.
    common, computed = 1.0, _COMPUTED * start
    curvature = computed @ information @ computed
    if curvature > 0:
        common = max(_LEAST_FACTOR, float(computed @ (evidence - information @ (start - computed)) / curvature))
    means = np.where(_COMPUTED > 0, common * start, start)
    separate, whole = np.diag(information), information.sum()
    ratios = np.sqrt(whole / np.where(separate > 0, separate, max(whole, 1.0)))
    least_overheads = means * np.maximum(1.0, _LEAST_SHARE * ratios)
    lower = np.maximum(_LEAST_FACTOR, _LEAST_OF_COMMON * means)
    factors = means
    for _ in range(_ROUNDS):
        deviations = _RIDGE * np.where(_OVERHEADS > 0, np.maximum(factors, least_overheads), means)
        precision = 1.0 / deviations**2
        matrix, target = information + np.diag(precision), evidence + precision * means
        # Entries below their bound are fixed there, one at a time, so that this ends at the optimum or close to it.
        free = np.ones(len(target), dtype=bool)
        while True:
            factors = lower.copy()
            held = matrix[np.ix_(free, ~free)] @ factors[~free]
            factors[free] = np.linalg.solve(matrix[np.ix_(free, free)], target[free] - held)
            below = np.where(free, factors - lower, 0.0)
            if (below >= 0).all():
                break
            free[int(np.argmin(below))] = False
    return Parts(*factors.tolist())


# -------------------------------------------------------------------- pricing


def repriced_s(
    plan: Plan,
    loads: Mapping[str, TaskLoad],
    cost: CostModel,
    rules: PassRules,
    *,
    links: Links = None,
    drains: bool = True,
    recomputes: bool = False,
) -> float:
    """Return the seconds of a step of a plan with other costs; its buckets and its template stay the same.

    Passes take turns as the plan says, and are priced as when plans are made.

    Args:
        plan: the plan, with a task or more.
        loads: what each task brings into a step, by its name.
        cost: predicts the seconds of the stages that the plan is for.
        rules: whether and how long rows are cut into passes.
        links: the links between neighbouring stages.
        drains: whether a pipeline is drained at the end of every step.
        recomputes: whether activations are recomputed in the backward.
    """
    assert plan.template is not None, "a plan with a task or more is priced"
    times = TurnTimes(cost, plan.passes_in_turns, recomputes=recomputes)
    priced = []
    for load, bucket in zip(plan.bucket_loads, plan.buckets, strict=True):
        cuts = []
        for htask in (plan.htasks[index] for index in bucket):
            fused = [loads[name] for name in htask.tasks]
            cuts.append(
                cut_htask(fused, cost, rules, plan.max_tokens_per_micro_batch, htask.micro_batches, stable=False)
            )
        priced.append(replace(load, **times.bucket_fields(cuts, load.num_micro_batches)))
    if cost.num_stages == 1:
        step_s = sum(load.num_micro_batches * (load.forward_s[0] + load.backward_s[0]) for load in priced)
    elif drains:
        step_s = simulate(plan.template, priced, links=links).makespan_s
    else:
        step_s = window_step_s(plan.template, priced, links=links)
    return step_s + cost.outside_s([loads[name] for htask in plan.htasks for name in htask.tasks])
