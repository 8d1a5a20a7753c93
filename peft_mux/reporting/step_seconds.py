"""`StepSeconds`: how long the steps of a run take when they are under way."""

from __future__ import annotations


class StepSeconds:
    """Adds up what steps take; the first ones under a plan count as the mean of the others.

    The first touches memory and makes the optimizers' state, once for however many steps follow. In a run of few steps
    that would outweigh what is told of them, and a prediction knows nothing of it.
    """

    def __init__(self) -> None:
        """Have seen no step."""
        self._first = self._later = (0.0, 0)

    def add(self, seconds: float, num_steps: int, *, is_first: bool) -> None:
        """Count steps.

        Args:
            seconds: what each of them took.
            num_steps: so many took this time.
            is_first: whether they are the first under their plan.
        """
        before_s, before = self._first if is_first else self._later
        total = before_s + seconds * num_steps, before + num_steps
        self._first, self._later = (total, self._later) if is_first else (self._first, total)

    @property
    def settled_s(self) -> float:
        """Seconds of all steps; where there were none but first ones, as they were taken."""
        (first_s, num_first), (later_s, num_later) = self._first, self._later
        return later_s / num_later * (num_first + num_later) if num_later else first_s
