"""What the steps of a run take when they are under way."""

from __future__ import annotations

import pytest

from peft_mux.reporting.pass_report import StepSeconds


def test_first_steps_under_a_plan_count_as_the_mean_of_the_others() -> None:
    seconds = StepSeconds()
    seconds.add(35.0, 1, is_first=True)
    seconds.add(20.0, 1, is_first=False)
    seconds.add(22.0, 3, is_first=False)
    assert seconds.settled_s == pytest.approx(5 * (20 + 3 * 22) / 4)


def test_steps_of_which_none_has_followed_another_count_as_they_were_taken() -> None:
    seconds = StepSeconds()
    assert seconds.settled_s == 0.0
    seconds.add(35.0, 1, is_first=True)
    seconds.add(30.0, 1, is_first=True)
    assert seconds.settled_s == pytest.approx(65.0)
