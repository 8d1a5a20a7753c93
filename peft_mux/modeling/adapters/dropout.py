"""The backbone's own dropout, with draws that belong to each task."""

from __future__ import annotations

from typing import Any

import torch

from peft_mux.kernels import philox
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward


class MultiplexedDropout(MultiplexedForward):
    """The backbone's own dropout with draws that belong to each task, so that neighbours never shift them."""

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, dropped in training."""
        dropout: Any = self.module
        if not dropout.training or dropout.p == 0.0:
            return x
        x_TK = self.rows(x, x.shape[-1])
        # Task by task: seeds differ, and slices keep one task's NaN from the others.
        parts = [
            philox.dropout(
                x_NK, self.stream.places[segment.start : segment.end], dropout.p, segment.draw_seed(self.name)
            )
            for segment, x_NK in zip(self.stream.segments, self.by_segment(x_TK), strict=True)
        ]
        return torch.cat(parts).view_as(x)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass can be captured while this module drops: each task draws on its own rows."""
        drops = self.module.training and getattr(self.module, "p", 0.0) > 0.0
        return f"the backbone's own dropout ({self.name}) draws for each task on its own" if drops else None
