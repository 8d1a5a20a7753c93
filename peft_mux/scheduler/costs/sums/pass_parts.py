"""`PassParts`: what one pass computes between the sums over the devices of a stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PassParts:
    """Seconds of the parts of one pass on each of the devices that share its layers.

    Forward and backward together where nothing else is said.

    Attributes:
        tokens: tokens of the pass.
        targets: loss terms of the pass.
        attention_s: norm, q/k/v, attention and output projection of one layer, adapters included.
        mlp_s: norm, MLP and adapters of one layer.
        first_s: what lies before the layers.
        head_s: output head and loss.
        overhead_s: what the pass takes whatever its size.
        sum_s: one sum of hidden states `[T, D]` over the devices.
        head_sum_s: one sum of three numbers a target, for one block of the loss.
        head_gradient_sum_s: the sum of the gradient of the targets' hidden states.
        head_block_rows: rows of a block of the loss.
        forward_fraction: the part of a layer's seconds that is its forward.
    """

    tokens: float
    targets: float
    attention_s: float
    mlp_s: float
    first_s: float
    head_s: float
    overhead_s: float
    sum_s: float
    head_sum_s: float
    head_gradient_sum_s: float
    head_block_rows: int
    forward_fraction: float

    @property
    def num_head_blocks(self) -> int:
        """Blocks of rows in which the loss is computed, one at least."""
        return max(1, math.ceil(self.targets / self.head_block_rows))

    def computed_share(self, num_layers: int) -> float:
        """Return the part of a pass that is left where all sums are hidden.

        Args:
            num_layers: layers of the whole model.
        """
        computed_s = num_layers * (self.attention_s + self.mlp_s) + self.first_s + self.head_s + self.overhead_s
        sums_s = 4 * num_layers * self.sum_s + self.num_head_blocks * self.head_sum_s + self.head_gradient_sum_s
        return computed_s / (computed_s + sums_s) if computed_s else 0.0

    def of_size(self, tokens: float, targets: float) -> PassParts:
        """Return the parts of a pass of another size, in proportion: enough to order subgraphs by.

        Args:
            tokens: tokens of the other pass.
            targets: loss terms of the other pass.
        """
        by_tokens = tokens / self.tokens if self.tokens else 1.0
        by_targets = targets / self.targets if self.targets else 1.0
        scaled = {name: by_tokens * getattr(self, name) for name in ("attention_s", "mlp_s", "first_s", "sum_s")}
        scaled |= {name: by_targets * getattr(self, name) for name in ("head_s", "head_gradient_sum_s")}
        return replace(self, tokens=float(tokens), targets=float(targets), **scaled)
