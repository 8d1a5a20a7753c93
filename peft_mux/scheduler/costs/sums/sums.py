"""`Sums`: what the tasks of an hTask amount to in M Eq. 3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peft_mux.scheduler.costs.model_shape import MOST_READ
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.costs.sums.depth import Depth


@dataclass(frozen=True, slots=True)
class Sums:
    """What an hTask's mean micro-batch amounts to: numbers, or arrays over many hTasks.

    Attributes:
        tokens: tokens of the micro-batch.
        targets: loss terms of the micro-batch.
        products_s: seconds of one layer's products with frozen weights, and of its norms, on one device.
        attention_s: seconds of one layer's attention product on one device.
        calls_s: seconds of the launches of one layer's attention calls.
        adapters_s: seconds of all adapters of one layer that every task adapts, fused as in Eq. 3.
        depth: in how many layers of each stage adapters lie, and what a backward leaves out below.
    """

    tokens: Any
    targets: Any
    products_s: Any
    attention_s: Any
    calls_s: Any
    adapters_s: Any
    depth: Depth

    @property
    def forward(self) -> Sums:
        """The same for a forward, which goes through all layers."""
        return replace(self, depth=self.depth.forward)

    def unread_s(self, profile: Profile, share: float, devices: int) -> tuple[Any, Any]:
        """Return what the last layer spares that computes some rows alone: seconds of its products and its adapters.

        Args:
            profile: seconds of the parts of a step on one device.
            share: part of a layer's products that is made for the rows alone that a loss reads.
            devices: devices that share each layer.
        """
        if not share:
            return 0.0, 0.0
        read = np.minimum(self.targets, self.tokens)
        share = share * ((read > 0) & (read <= MOST_READ * self.tokens))
        products_s = share * (self.products_s - profile.layer_s(read)) / devices
        return products_s, share * self.adapters_s * (1 - read / np.maximum(self.tokens, 1e-9))
