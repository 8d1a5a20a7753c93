"""`DispatchClock`: what dividing rows among unlike replicas has cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DispatchClock:
    """What dispatching has cost on the process that solves; zeros on the others.

    Attributes:
        num_steps: steps that were dispatched.
        num_ahead: how many of these steps were solved from lengths that were known in advance.
        solve_s: seconds of solving, on whichever thread it ran.
        waited_s: seconds that steps waited for solving to end.
    """

    num_steps: int = 0
    num_ahead: int = 0
    solve_s: float = 0.0
    waited_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Part of the solving time that no step waited for, 0 to 1; 1 where nothing was solved."""
        return max(0.0, 1 - self.waited_s / self.solve_s) if self.solve_s > 0 else 1.0

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"dispatch  {self.num_steps} steps, {self.num_ahead} solved ahead; {self.solve_s:.3f} s of solving, of "
            f"which steps waited {self.waited_s:.3f} s ({self.hidden_share:.0%} hidden)"
        )
