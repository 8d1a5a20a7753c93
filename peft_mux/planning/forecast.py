"""`Forecast`: the predicted time of steps held once against what the first steps took, and corrected aloud."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from peft_mux.scheduler.bands import MEASURED_TIME, time_band
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.units import seconds_text

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
