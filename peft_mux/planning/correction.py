"""`TimeCorrection`: how far measured steps are from their predictions, and what that makes of a profile (M §4)."""

from __future__ import annotations

import math

from peft_mux.scheduler.costs.profile import Profile, corrected
from peft_mux.scheduler.plan import Plan


class TimeCorrection:
    """Follows the ratio of measured to predicted times under one plan after another.

    Attributes:
        time_ratio: measured over predicted time of a step, smoothed; `None` before anything was observed.
    """

    def __init__(self) -> None:
        """Observe nothing yet."""
        self.time_ratio: float | None = None
        self._log_ratio: float | None = None
        self._is_first_step = True

    def observe(self, plan: Plan, num_tokens: int, seconds: float) -> None:
        """Compare a step with its prediction.

        The first step under a plan allocates what the others find there, so it does not count.

        Args:
            plan: the plan that the step followed.
            num_tokens: tokens of the global batches of all tasks in the step.
            seconds: seconds that the step took, passes and updates.
        """
        if self._is_first_step or not plan.step_s or not num_tokens or seconds <= 0:
            self._is_first_step = False
            return
        # Batches are drawn, so a step is compared with the plan's time for as many tokens as it had. Ratios are
        # averaged as logarithms: twice as slow and twice as fast then cancel.
        log_ratio = math.log(seconds / (plan.step_s * num_tokens / plan.tokens_per_step))
        mean = self._log_ratio
        self._log_ratio = log_ratio if mean is None else 0.8 * mean + 0.2 * log_ratio
        self.time_ratio = math.exp(self._log_ratio)

    def take_into(self, profile: Profile | None) -> Profile | None:
        """Return a profile scaled by what was observed since the last call, which is forgotten then.

        Args:
            profile: the profile that the observed steps were predicted with; `None` where there is none yet.
        """
        log_ratio, self._log_ratio, self._is_first_step = self._log_ratio, None, True
        if profile is None or log_ratio is None:
            return profile
        ratio = math.exp(log_ratio)
        # Taken in full: the ratios were smoothed while they were observed, and smoothing twice would lag.
        return corrected(profile, 1.0, ratio, smoothing=1.0, largest_change=max(ratio, 1 / ratio))
