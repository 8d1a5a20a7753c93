"""A `forward` that reads the stream: what all attached modules share (M §3.2)."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.stream import Stream

_WRAPPING = re.compile(r"\.modules_to_save\.[^.]+|\.t\d{6}$|\.base_layer(?=\.|$)")
"""Parts of names on which no draw may depend: a task's internal id, and which other layers lie around this one."""


class MultiplexedForward:
    """A `forward` that reads the stream, and gives way to the module's own while the stream is idle.

    Args:
        module: the module whose `forward` this is.
        name: the module's name within the backbone.
        stream: what tells the module which rows are whose.

    Attributes:
        module: the module whose `forward` this is.
        name: within the backbone, as if the module were the only one that was put there.
        stream: what tells the module which rows are whose.
        original: the module's own `forward`.
        adds_own_biases: whether it adds what tasks have of the biases of the frozen layer inside the module.
        group: the layers that are computed together with this one; `None` where there is nothing of the sort.
    """

    group: Any = None
    adds_own_biases: bool = False

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        self.module = module
        # Draws depend on the name, which must be the same alone and beside adapters of other types.
        self.name = _WRAPPING.sub("", name)
        self.stream = stream
        # Bound before it is replaced: merging, saving and `generate` go on through it.
        self.original = module.forward

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the module returns for `x`, row by row of the stream where one is read."""
        if self.stream.is_idle:
            return self.original(x, *args, **kwargs)
        return self.multiplexed(x)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's output for the rows of the stream in flight."""
        raise NotImplementedError

    def reason_against_graphs(self) -> str | None:
        """Return a clause that says why no pass through this module can be captured now; `None` where it can."""
        return None

    def by_segment(self, x: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Return the rows of each of the stream's segments, out of all rows that modules see now.

        Args:
            x: activations, with the rows of the stream in one dimension.
            dim: that dimension.
        """
        # Together and not one by one: in the backward pass each slice would make a gradient as tall as the stream.
        return x.split([segment.end - segment.start for segment in self.stream.segments], dim)

    def rows(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return `x` as `[rows, width]`, having checked that its rows are the stream's."""
        self.check_rows(x, width)
        return x.reshape(-1, width)

    def check_rows(self, x: torch.Tensor, width: int) -> None:
        """Refuse an `x` whose rows are not the stream's."""
        if x.numel() != self.stream.num_rows * width:
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) was called with a tensor of shape {list(x.shape)}, which "
                f"is not one row for each of the {self.stream.num_rows} rows of the stream; allowed: layers that see "
                "every token once, in order. Take this module out of target_modules (experts of a mixture, for one, "
                "see tokens that were regrouped), or set the dropout to 0."
            )
