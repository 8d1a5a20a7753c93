"""Times of all steps in turn and together, of tasks that end at different steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.plan import run_times

OVERHEAD_S = 0.5
"""What a pass takes whatever it holds."""


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 9.0)), min_size=2, max_size=8))
def test_of_passes_with_a_fixed_overhead_the_time_together_is_that_of_steps_as_tasks_end(
    tasks: list[tuple[int, float]],
) -> None:
    step_s = OVERHEAD_S + sum(work_s for _, work_s in tasks)
    times = run_times([steps for steps, _ in tasks], [OVERHEAD_S + work_s for _, work_s in tasks], step_s)
    assert times is not None
    running = [[work_s for steps, work_s in tasks if steps > step] for step in range(max(steps for steps, _ in tasks))]
    assert times.together_s == pytest.approx(sum(OVERHEAD_S + sum(one) for one in running))
    assert times.in_turn_s == pytest.approx(sum(steps * (OVERHEAD_S + work_s) for steps, work_s in tasks))
    assert times.ratio == pytest.approx(times.in_turn_s / times.together_s)


def test_company_makes_no_task_faster_than_it_is_alone() -> None:
    times = run_times([10, 10, 1], [4.0, 1.0, 4.0], 4.5)
    assert times is not None
    assert times.together_s == pytest.approx(4.5 + 9 * 4.0)


@pytest.mark.parametrize(
    ("alone_s", "step_s"), [((1.0,), 1.0), ((1.0, 0.0), 1.0), ((1.0, 1.0), 0.0), ((), 0.0)], ids=str
)
def test_nothing_is_reported_of_one_task_or_where_a_time_is_unknown(alone_s: tuple[float, ...], step_s: float) -> None:
    assert run_times([3] * len(alone_s), alone_s, step_s) is None
