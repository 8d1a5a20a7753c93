"""How many passes take turns: plans are made for one width after another, and the fastest that fits is taken.

More passes in turns hide more of the sums over the devices of a stage, and hold the memory of all of them: each plan is
made with that memory, so that a width for which passes would have to be too small loses by its time, and one that does
not fit at all is left out.
"""

from __future__ import annotations

from collections.abc import Callable

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.planner.values import Budget, Outcome

MOST_PASSES_IN_TURNS = 4
"""Of numbers that are searched for; M §5.3 interleaves 2 to 4."""
_LEAST_GAIN = 0.01
"""Part of a step that turns have to save: predictions tell no less apart, and turns hold more memory."""


class TurnsDoNotFitError(ValueError):
    """The number of passes in turns that was asked for does not fit into memory."""


def plan_with_turns(plan_at: Callable[[int], Outcome], cost: CostModel, budget: Budget) -> Outcome:
    """Return the plan for as many passes in turns as were asked for, or for the number that is fastest.

    Args:
        plan_at: plans for a number of passes in turns; it raises `ValueError` where that does not fit.
        cost: predicts the seconds of the same stages.
        budget: says how many passes may take turns.

    Raises:
        TurnsDoNotFitError: if so many as were asked for do not fit, naming how many do.
        ValueError: as `plan_at` for one pass after another, where not even that fits.
    """
    asked = budget.interleaved_passes
    if asked != "auto":
        return _plan_as_asked(plan_at, asked)
    best = plan_at(1)
    # Nothing is gained where no pass waits for others, or where nobody knows what is gained.
    if cost.devices_per_stage == 1 or cost.profile.overlap is None:
        return best
    for width in range(2, MOST_PASSES_IN_TURNS + 1):
        try:
            found = plan_at(width)
        except ValueError:  # memory, of which a wider group holds more still
            break
        # Fewer tasks, or a running one that is too large for so many passes, is no faster plan of the same step.
        if found.waiting != best.waiting or not _fits(found, budget):
            break
        if found.step_s >= best.step_s * (1 - _LEAST_GAIN):
            # One more pass hides no more once sums are hidden, or computing stands still beside them.
            break
        best = found
    return best


def _fits(outcome: Outcome, budget: Budget) -> bool:
    return budget.limit_bytes is None or max(outcome.peak_bytes, default=0) <= budget.limit_bytes


def _plan_as_asked(plan_at: Callable[[int], Outcome], asked: int) -> Outcome:
    try:
        return plan_at(asked)
    except ValueError as fault:
        if asked == 1:
            raise
        for width in range(min(asked - 1, MOST_PASSES_IN_TURNS), 0, -1):
            try:
                plan_at(width)
            except ValueError:
                continue
            raise TurnsDoNotFitError(
                f'interleaved_passes is {asked}; allowed: "auto", or an integer up to {width}. With {asked}: {fault}'
            ) from fault
        raise
