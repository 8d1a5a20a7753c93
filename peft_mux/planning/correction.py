"""`TimeCorrection`: what measured passes and steps say of a profile, and the factors that plans are made with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from peft_mux.engine.pass_clock import PassTime, StepTimes
from peft_mux.planning.pass_prices import PassPrices
from peft_mux.scheduler.costs.measured.fit import PartFit
from peft_mux.scheduler.costs.measured.parts import AS_PROFILED, Parts
from peft_mux.scheduler.plan import Plan

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
