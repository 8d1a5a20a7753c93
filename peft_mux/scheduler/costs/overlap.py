"""`Overlap`: what passes in turns cost on a device, and how far sums are hidden there (M §3.4.2, §3.4.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a profile knows of passes that take turns.

    Attributes:
        skew: how much longer than it takes by itself each sum is waited for, as a part of the computing before it:
            ranks never end that at one time, and one after another all of them wait for the last.
        slowdown: part of its speed that computing loses while a sum is under way, from 0 (nothing, as with sums that
            the network makes) to 0.99 (it all but stands still, as where the same cores compute and sum).
        turn_s: seconds of handing the turn to another pass.

    Raises:
        ValueError: for numbers out of range.
    """

    skew: float = 0.0
    slowdown: float = 0.0
    turn_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("skew", "turn_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: 0 or more, and finite. Measure again.")
        if not 0 <= self.slowdown <= MOST_SLOWDOWN:
            raise ValueError(f"slowdown is {self.slowdown}; allowed: 0 to {MOST_SLOWDOWN}. Measure again.")


MOST_SLOWDOWN = 0.99
"""Computing beside a sum goes on, however slowly."""
