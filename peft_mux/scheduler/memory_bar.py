"""`MemoryBar`: what the predicted peak of a plan's fullest stage is made of, against the memory of a device."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from peft_mux.scheduler.pipeline.svg import ALARM, FREE, MEMORY_COLORS, NEARLY_FULL, PALETTE, shows_size
from peft_mux.scheduler.units import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LETTERS = "#ao+w"
"""What stands for the parts in text, in their order; what is free is "."."""
_INDENT = " " * 8


class MemoryBar(NamedTuple):
    """The parts of a peak, and the memory that they have to fit into.

    Attributes:
        parts: name and bytes of each part, in the order in which they are drawn.
        size_bytes: bytes that there are; `None` where that is not known.
        is_device: whether these are all of a device's, rather than as many as a plan may fill of it.
    """

    parts: tuple[tuple[str, int], ...]
    size_bytes: int | None
    is_device: bool = True

    @property
    def peak_bytes(self) -> int:
        """Sum of all parts."""
        return sum(size for _, size in self.parts)

    @property
    def is_nearly_full(self) -> bool:
        """Whether the peak takes more than 95 % of what there is, which drawings show in red."""
        return self.size_bytes is not None and self.peak_bytes > NEARLY_FULL * self.size_bytes

    def lines(self, width: int = 50) -> list[str]:
        """Return the bar in characters, what is free, and what its letters stand for.

        Args:
            width: characters of the bar.
        """
        whole = max(self.peak_bytes, self.size_bytes or 0, 1)
        ends = [math.ceil(width * at / whole) for at in accumulate((size for _, size in self.parts), initial=0)]
        drawn = "".join(letter * (end - start) for letter, (start, end) in zip(_LETTERS, pairwise(ends), strict=True))
        legend = [f"{letter} {name}" for letter, (name, _) in zip(_LETTERS, self.parts, strict=True)]
        if self.size_bytes is None:
            return [f"{_INDENT}[{drawn:.<{width}}]", f"{_INDENT}{', '.join(legend)}"]
        of = "the device's" if self.is_device else "the"
        free = self.size_bytes - self.peak_bytes
        room = f"{bytes_text(free)} free" if free >= 0 else f"{bytes_text(-free)} too much"
        full = "; NEARLY FULL: more than 95 %" if self.is_nearly_full else ""
        share = f"{self.peak_bytes / self.size_bytes:.0%} of {of} {bytes_text(self.size_bytes)}"
        return [
            f"{_INDENT}[{drawn:.<{width}}]  {share}, {room}{full}",
            f"{_INDENT}{', '.join([*legend, '. free'])}",
        ]

    def draw(self, axes: Axes) -> None:
        """Draw the bar into a picture, in GiB, or MiB where it is less; framed in red where it is nearly full."""
        unit, name_of_unit = (2**30, "GiB") if self.peak_bytes >= 2**30 else (2**20, "MiB")
        edge: dict[str, Any] = {"edgecolor": "white"}
        if self.is_nearly_full:
            edge = {"edgecolor": ALARM, "linewidth": 2.0}
        at = 0.0
        for color, (name, size) in zip(MEMORY_COLORS, self.parts, strict=False):
            label = f"{name} {size / unit:.2f}"
            axes.barh(0, size / unit, left=at, color=PALETTE[color], label=label, **edge)
            at += size / unit
        title = f"memory of the fullest stage: {self.peak_bytes / unit:.2f} {name_of_unit}"
        if self.size_bytes is not None:
            free = self.size_bytes / unit - at
            # A device far larger than what is used would leave nothing to be seen of the parts.
            if free > 0 and shows_size(self.size_bytes, self.peak_bytes):
                axes.barh(0, free, left=at, color=PALETTE[FREE], alpha=0.3, label=f"free {free:.2f}", **edge)
            title += f" of {self.size_bytes / unit:.2f}, {self.peak_bytes / self.size_bytes:.0%}"
        axes.set_title(title, color=ALARM if self.is_nearly_full else "black")
        axes.set_yticks([])
        axes.set_xlabel(name_of_unit)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
