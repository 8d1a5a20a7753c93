"""`PassPrices`: what a profile says that passes which have run should have taken, part by part."""

# MERGED: `TimeCorrection`: what measured passes and steps say of a profile, and the factors that plans are made with.
# MERGED: `Forecast`: the predicted time of steps held once against what the first steps took, and corrected aloud.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from peft_mux.engine.work import PassTime, StepTimes, TaskInPass
from peft_mux.scheduler.costs.fit import PartFit
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.profile import AS_PROFILED, Parts, summed
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.times import TurnTimes
from peft_mux.scheduler.subgraphs.passes import Direction
from peft_mux.scheduler.units import MEASURED_TIME, seconds_text, time_band

_LEAST_SUMMED = 0.1
"""Part of the waiting for sums that the sums take themselves, however far ranks were apart by the profile."""


class PassPrices:
    """Prices the passes of this process.

    Args:
        cost: predicts seconds from the profile as it was measured or read off a data sheet.
        loads: what each task brings into a step, by its name; its adapters count here, and not its rows.
        stage: stage of the pipeline that lies in this process.
        learnt: returns what passes in turns take by all that was learnt so far, and the factor of communication among
            that; `None` where sums are charged in full.
        width: the most passes of a micro-batch of a pipeline that took turns.
    """

    def __init__(
        self,
        cost: CostModel,
        loads: Mapping[str, TaskLoad],
        stage: int,
        learnt: Callable[[], tuple[TurnTimes, float]] | None = None,
        *,
        width: int = 1,
    ) -> None:
        """Remember the models."""
        self.cost, self.loads, self.stage = cost, loads, min(stage, cost.num_stages - 1)
        self._learnt, self._width = learnt, width

    def of(self, timed: PassTime) -> Parts:
        """Return the predicted seconds of passes that were timed together.

        Args:
            timed: the passes, with the rows of each.
        """
        parts = summed(self.cost.parts_of_pass(self._rows(rows), stage=self.stage) for rows in timed.passes)
        # On one stage a pass by itself waits for its sums in full, which is timed apart where it can be.
        if self._learnt is None or (self.cost.num_stages == 1 and len(timed.passes) < 2):
            return parts
        turns, factor = self._learnt()
        return parts._replace(communication=self._shown_s(timed, turns) / factor)

    def _shown_s(self, timed: PassTime, turns: TurnTimes) -> float:
        """Return the seconds that passes in turns take beyond their computing: sums that show, and the turns' own.

        How much of them shows depends on how long they are, so that it is taken from what was learnt of that so far.
        """
        rows, stage, cost = [self._rows(own) for own in timed.passes], self.stage, turns.cost
        computed = summed(cost.parts_of_pass(own, stage=stage) for own in rows)._replace(communication=0.0)
        parts = [cost.pass_parts(own, 1, stage=stage) for own in rows]
        if cost.num_stages == 1:
            return max(0.0, turns.group_s(parts) - computed.total)
        tasks = [[one.task for one in own] for own in timed.passes]
        ways: tuple[Direction, ...] = ("forward", "backward")
        taken_s = sum(turns.action_s(tasks, parts, self._width, stage, way) for way in ways)
        return max(0.0, taken_s - computed.total)

    def summed_s(self, timed: PassTime) -> float:
        """Return the seconds that the sums of a pass took, of those in which it waited for them.

        Args:
            timed: a pass of which waiting was timed. Beside the sums themselves it has waited for ranks that came to
                them later, in the mean as long as the profile says, which plans count as such.
        """
        waited_s = timed.waited_s or 0.0
        skew = 0.0 if self.cost.profile.overlap is None else self.cost.profile.overlap.skew
        return max(waited_s - skew * (timed.seconds - waited_s), _LEAST_SUMMED * waited_s)

    def between(self, tasks: Iterable[str]) -> Parts:
        """Return the predicted seconds of a step outside of its passes.

        Args:
            tasks: names of the tasks that take the step.
        """
        return self.cost.update_parts([self.loads[name] for name in tasks if name in self.loads])

    def _rows(self, rows: Sequence[TaskInPass]) -> list[TaskLoad]:
        return [replace(self.loads[one.task], **self._seen(one)) for one in rows if one.task in self.loads]

    @staticmethod
    def _seen(one: TaskInPass) -> dict[str, Any]:
        """Return the fields of a load that a pass tells."""
        seen: dict[str, Any] = {"lengths": one.lengths, "shared": one.shared, "num_targets": one.num_targets}
        return {**seen, "longest_row_tokens": 0, "trie": None}


_MOST_PASSES = 4
"""Of each step so many passes are learnt from, others in the next one: pricing a pass takes the host some time."""
_EVERY_STEP, _SOME_STEPS = 20, 5
"""So many steps under a plan are all learnt from, then each fifth: by then more of the same tells little."""
_SAME = 0.1
"""Factors whose logarithms differ by less make no plan worth looking for."""


class TimeCorrection:
    """Learns what each part of a step takes over what the profile says, under one plan after another.

    Attributes:
        time_ratio: measured over predicted time of a step, smoothed; `None` before anything was observed.
        factors: what plans are made with now; all 1 until `take_up`.
        agreed: what was learnt on all processes together, as of the last `agree`.
        fit: what was learnt on this process.
        num_passes: measurements on all processes, as of the last `agree`.
    """

    def __init__(self) -> None:
        """Observe nothing yet."""
        self.time_ratio: float | None = None
        self.factors = self.agreed = AS_PROFILED
        self.fit = PartFit()
        self.num_passes = 0
        self._log_ratio: float | None = None
        self._num_steps = 0

    def begin_plan(self) -> None:
        """Let the next step be the first one under a plan, which allocates what the others find there."""
        self._log_ratio, self._num_steps = None, 0

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

    def observe_passes(self, times: StepTimes, between_s: float, tasks: Iterable[str], prices: PassPrices) -> None:
        """Learn from what the passes of a step took here, and what lay between them; to be called before `observe`.

        The first step under a plan does not count, and of later ones only some, as pricing them takes host time.

        Args:
            times: the passes of the step, as they were timed.
            between_s: seconds of the step outside of its passes, without waiting for other processes.
            tasks: names of the tasks that have taken the step.
            prices: what the profile predicts for each part of a pass.
        """
        is_late = self._num_steps >= _EVERY_STEP
        if self._num_steps == 0 or (is_late and self._num_steps % _SOME_STEPS):
            return
        stride = -(-len(times.passes) // _MOST_PASSES) or 1
        for timed in times.passes[self._num_steps % stride :: stride]:
            self._observe_pass(timed, prices)
        self.fit.observe(prices.between(tasks), between_s)

    def _observe_pass(self, timed: PassTime, prices: PassPrices) -> None:
        """Learn from one pass, or from several in turns: of its sums by themselves where waiting for them was timed."""
        predicted = prices.of(timed)
        if timed.waited_s is None:
            self.fit.observe(predicted, timed.seconds)
            return
        self.fit.observe(predicted._replace(communication=0.0), timed.seconds - timed.waited_s)
        self.fit.observe(Parts(communication=predicted.communication), prices.summed_s(timed))

    @property
    def differs(self) -> bool:
        """Whether a part takes another time than plans are made with, by more than noise makes it."""
        pairs = zip(self.factors, self.agreed, strict=True)
        return any(abs(math.log(now / before)) > _SAME for before, now in pairs)

    def agree(self, everywhere: Sequence[Sequence[float]]) -> None:
        """Take in what all processes have learnt, the same numbers on each of them.

        Args:
            everywhere: what `fit.numbers` gave on each process, by rank.
        """
        pooled = self.fit.pooled(everywhere)
        self.agreed, self.num_passes = pooled.factors(), pooled.num_passes

    def take_up(self) -> None:
        """Make plans with what all processes have agreed on, from now on."""
        self.factors = self.agreed

    def restore(self, factors: Parts) -> None:
        """Begin anew, with factors that were in force when a run was saved.

        Args:
            factors: what each part took over what the profile says.
        """
        self.factors = self.agreed = factors
        self.fit, self.num_passes = PartFit(factors), 0

    def __str__(self) -> str:
        """Return one line; "" where nothing was measured."""
        if not self.num_passes:
            return ""
        return f"times, measured over predicted: {self.agreed} ({self.num_passes:,} measured)"


_STEPS = 5
"""Steps that are looked at before anything is said; the first under a plan does not count in the ratio."""


class Correction(NamedTuple):
    """What measured steps make of a forecast.

    Attributes:
        ratio: measured over predicted seconds of a step.
        predicted_s: seconds that were predicted for all steps that are left.
        corrected_s: the same, corrected.
        line: this in words.
    """

    ratio: float
    predicted_s: float
    corrected_s: float
    line: str


class Forecast:
    """Speaks once, where steps take another time than a measured profile would be off by."""

    def __init__(self) -> None:
        """Have seen no step yet."""
        self._num_steps = 0

    def held_against(self, plan: Plan, ratio: float | None, steps_left: Mapping[str, int]) -> Correction | None:
        """Return the correction after some steps; `None` before, afterwards, and where the forecast holds.

        Args:
            plan: the plan that the last step followed.
            ratio: measured over predicted seconds of its steps; `None` where that is not known.
            steps_left: steps that each running task has still to take.
        """
        self._num_steps += 1
        if self._num_steps != _STEPS or ratio is None or not plan.step_s or MEASURED_TIME.holds(ratio):
            return None
        tokens = sum(share.tokens_per_step * steps_left.get(share.name, 0) for share in plan.shares)
        predicted_s = plan.step_s * tokens / plan.tokens_per_step
        band = time_band(plan.profile_source)
        step = f"{seconds_text(plan.step_s)} a step {band.words}, {band.source}"
        line = (
            f"time: measured {ratio:.2g}x of predicted ({step});"
            f" corrected ETA {seconds_text(predicted_s * ratio)}, before {seconds_text(predicted_s)}"
        )
        return Correction(ratio, predicted_s, predicted_s * ratio, line)
