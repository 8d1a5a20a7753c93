"""`TurnLinks`: the links of a shard, where whoever waits for a sum gives the turn to another pass.

It stands between the layers and any links (`peft_mux.kernels.sharded_cross_entropy.ShardLinks`), so neither has to know
of turns. Outside a group of passes it waits as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from peft_mux.engine.turns import Turns
from peft_mux.kernels.sharded_cross_entropy import ShardLinks, Waitable


class _SumInTurns(NamedTuple):
    """A sum that is under way."""

    pending: Waitable
    links: TurnLinks

    def wait(self) -> None:
        """Return when it is there, and it is this pass's turn."""
        self.links.waiting(self.pending.wait)


class TurnLinks:
    """Links whose sums are waited for in turns.

    Args:
        links: that do the sums.

    Attributes:
        links: that do the sums.
        waiting: how a sum is waited for; it gets a function that waits.

    Example:
        >>> links = TurnLinks(TensorLinks(layout.tensor_groups, processes))  # doctest: +SKIP
        >>> shards = TensorShards(model, links)  # doctest: +SKIP
    """

    def __init__(self, links: ShardLinks) -> None:
        """Wait as the links do."""
        self.links = links
        self.waiting: Callable[[Callable[[], object]], None] = _at_once

    @property
    def index(self) -> int:
        """Number of this shard."""
        return self.links.index

    @property
    def size(self) -> int:
        """Number of shards."""
        return self.links.size

    def sum(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace a tensor by its sum over the shards.

        Args:
            tensor: contiguous, on the device.
        """
        return _SumInTurns(self.links.sum(tensor), self)

    @contextmanager
    def in_turns(self, turns: Turns[Any]) -> Iterator[None]:
        """Let passes give their turns away for the time of the `with` block."""
        self.waiting = turns.wait
        try:
            yield
        finally:
            self.waiting = _at_once


def _at_once(wait: Callable[[], object]) -> None:
    wait()
