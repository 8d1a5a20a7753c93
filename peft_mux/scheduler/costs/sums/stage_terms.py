"""`StageTerms`: the seconds of a stage of any layers, from which the layers of a backbone are cut into stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTerms:
    """Forward and backward seconds of one micro-batch: a stage takes its layers' and, at the ends, its end's.

    Attributes:
        added_s: seconds of the layers before each of L layers and after the last one, `[L + 1]`; the backward of layers
            below all adapters is not in them.
        first_s: seconds of what lies before the layers.
        last_s: seconds of what lies after the layers, the loss included, less what the last layer spares.
    """

    added_s: tuple[float, ...]
    first_s: float
    last_s: float

    def stage_s(self, first_layer: int, num_layers: int) -> float:
        """Return the seconds of a stage.

        Args:
            first_layer: the lowest layer of the stage, counted from 0.
            num_layers: layers of the stage.
        """
        end = first_layer + num_layers
        ends_s = (first_layer == 0) * self.first_s + (end == len(self.added_s) - 1) * self.last_s
        return self.added_s[end] - self.added_s[first_layer] + ends_s
