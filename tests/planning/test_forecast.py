"""The forecast is held against the first steps once, and says what they make of it."""

from __future__ import annotations

import pytest

from peft_mux.planning.learning import Correction, Forecast
from tests.scheduler.plan_cases import a_plan


def held(ratio: float | None, steps: int = 9) -> list[Correction]:
    plan, forecast = a_plan(), Forecast()
    left = {share.name: 10 for share in plan.shares}
    found = [forecast.held_against(plan, ratio, left) for _ in range(steps)]
    return [one for one in found if one is not None]


def test_steps_that_take_longer_are_told_once_with_the_corrected_time_that_is_left() -> None:
    (found,) = held(1.4)
    assert found.ratio == 1.4
    assert found.predicted_s == pytest.approx(12.5)
    assert found.corrected_s == pytest.approx(17.5)
    assert found.line == (
        "time: measured 1.4x of predicted (1.25 s a step (order of magnitude), analytic profile); "
        "corrected ETA 17.5 s, before 12.5 s"
    )
    assert len(held(0.5)) == 1


@pytest.mark.parametrize(("ratio", "steps"), [(1.1, 9), (None, 9), (1.4, 4)])
def test_a_forecast_that_holds_or_cannot_be_held_yet_says_nothing(ratio: float | None, steps: int) -> None:
    assert held(ratio, steps) == []
