"""`TurnLinks`: the links of a tensor parallel rank, where whoever waits for an all-reduce gives its turn away.

It stands between the layers and any links (`peft_mux.kernels.cross_entropy.vocab_parallel.TensorParallelLinks`), so
neither has to know of turns. Outside a group of passes it waits as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from peft_mux.engine.tensor.turns import Turns
from peft_mux.kernels.cross_entropy.vocab_parallel import TensorParallelLinks, Waitable


class _AllReduceInTurns(NamedTuple):
    """An all-reduce that is under way."""

    pending: Waitable
    links: TurnLinks

    def wait(self) -> None:
        """Return when the sum is there, and it is this pass's turn."""
        self.links.waiting(self.pending.wait)


class TurnLinks:
    """Links whose all-reduces are waited for in turns.

    Args:
        links: the links that communicate.

    Attributes:
        links: the links that communicate.
        waiting: how an all-reduce is waited for; it is called with a function that waits.

    Example:
        >>> links = TurnLinks(TensorLinks(layout.tensor_groups, processes))  # doctest: +SKIP
        >>> parallel = cut_model(model, links)  # doctest: +SKIP
    """

    def __init__(self, links: TensorParallelLinks) -> None:
        """Wait as the links do, until `in_turns` says otherwise."""
        self.links = links
        self.waiting: Callable[[Callable[[], object]], None] = _at_once

    @property
    def index(self) -> int:
        """Rank of this process within its tensor parallel group."""
        return self.links.index

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.links.size

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace a tensor by its sum over the group.

        Args:
            tensor: contiguous tensor on the device, of one shape on every rank.
        """
        return _AllReduceInTurns(self.links.all_reduce(tensor), self)

    @contextmanager
    def in_turns(self, turns: Turns[Any]) -> Iterator[None]:
        """Let passes give their turns away for the time of the `with` block.

        Args:
            turns: decides which pass runs when one of them waits.
        """
        # One attribute for all layers: they hold these links, and none of them knows of turns.
        self.waiting = turns.wait
        try:
            yield
        finally:
            self.waiting = _at_once


def _at_once(wait: Callable[[], object]) -> None:
    wait()
