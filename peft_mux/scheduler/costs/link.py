"""`Link`: a connection between two devices, and `Overlap`: how far sums over it are hidden by computing."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices, with the same figures in both directions.

    Each direction carries one message at a time and is taken for the whole of `transfer_s`.

    Attributes:
        latency_s: seconds that a message takes however small it is.
        bytes_per_s: bandwidth in one direction; inf for a link on which only latency counts.

    Raises:
        ValueError: for a latency that is negative or not finite, or a bandwidth that is not above 0.

    Example:
        >>> Link(latency_s=1.0, bytes_per_s=10.0).transfer_s(20)
        3.0
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s is {self.latency_s}; allowed: 0 or more, and finite. Give seconds.")
        if not self.bytes_per_s > 0:
            raise ValueError(
                f"bytes_per_s is {self.bytes_per_s}; allowed: more than 0 (inf for a link on which only latency "
                "counts). Give bytes per second."
            )

    def transfer_s(self, num_bytes: float) -> float:
        """Return the seconds that a message takes; one of no bytes is a signal, which takes the latency.

        Args:
            num_bytes: bytes of the message.
        """
        return self.latency_s + num_bytes / self.bytes_per_s

    def slowed(self, factor: float) -> Link:
        """Return the link on which every message takes so many times as long.

        Args:
            factor: what seconds are multiplied by, above 0.
        """
        return Link(self.latency_s * factor, self.bytes_per_s / factor)


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a profile knows of passes that take turns.

    Attributes:
        skew: how much longer than it takes by itself each sum is waited for, as a part of the computing before it:
            ranks never end that at one time, and one after another all of them wait for the last.
        slowdown: part of its speed that computing loses while a sum is under way, from 0 (nothing, as with sums that
            the network makes) to 0.99 (it all but stands still, as where the same cores compute and sum).
        turn_s: seconds of handing the turn to another pass.
        host_s: seconds that each stretch between two sums takes beyond its part of a layer: a layer that is divided is
            launched in as many operators as a whole one, and adds its sums.

    Raises:
        ValueError: for numbers out of range.
    """

    skew: float = 0.0
    slowdown: float = 0.0
    turn_s: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("skew", "turn_s", "host_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: 0 or more, and finite. Measure again.")
        if not 0 <= self.slowdown <= MOST_SLOWDOWN:
            raise ValueError(f"slowdown is {self.slowdown}; allowed: 0 to {MOST_SLOWDOWN}. Measure again.")


MOST_SLOWDOWN = 0.99
"""Computing beside a sum goes on, however slowly."""
