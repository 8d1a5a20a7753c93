"""`VocabularyShard`: an output head of which each shard holds the rows of some words (M section 3.4.2).

Called as a module, the head gives the logits of all words, for evaluation and `generate`; losses are computed from the
parts (`peft_mux.kernels.sharded_cross_entropy`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.sharded_cross_entropy import ShardLinks


class VocabularyShard:
    """The words of a shard.

    Args:
        links: to the other shards.
        first: word of this shard.
        end: one past its last word.
        vocab_size: words of all shards.
    """

    def __init__(self, links: ShardLinks, first: int, end: int, vocab_size: int) -> None:
        """Remember where they lie."""
        self.links = links
        self.first, self.end, self.vocab_size = first, end, vocab_size
        self._is_local = False

    @contextmanager
    def local(self) -> Iterator[None]:
        """Let the head give this shard's logits alone for the time of the `with` block."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def outputs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `[..., V]` logits of all words from those of this shard.

        Raises:
            UnsupportedModelError: if they shall be differentiated, which only losses of the stream can be.
        """
        if self._is_local:
            return logits
        if torch.is_grad_enabled() and logits.requires_grad:
            raise UnsupportedModelError(
                "logits of a head that is cut for tensor parallelism were asked for with gradients; allowed: losses of"
                " a MuxBatch, or logits under torch.no_grad()."
            )
        whole = logits.new_zeros(*logits.shape[:-1], self.vocab_size)
        whole[..., self.first : self.end] = logits
        self.links.sum(whole).wait()
        return whole


def vocabulary_shard(head: nn.Module) -> VocabularyShard | None:
    """Return which words a head holds, also one that a task adapts; `None` for a whole head."""
    return getattr(getattr(head, "base_layer", head), "vocabulary_shard", None)


def sum_words(head: nn.Module, shard: VocabularyShard) -> Any:
    """Let a head give the logits of all words when it is called; return the handle that takes this back."""

    def complete(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        return shard.outputs(output)

    return head.register_forward_hook(complete)
