"""`VocabParallelHead`: an output head of which each tensor parallel rank holds some words (M section 3.4.2).

Called as a module, the head gives the logits of all words, for evaluation and `generate`; losses are computed from the
parts (`peft_mux.kernels.cross_entropy.vocab_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.cross_entropy.vocab_parallel import TensorParallelLinks


class VocabParallelHead:
    """Which words of a vocabulary-parallel head this process holds.

    Args:
        links: all-reduces over the tensor parallel group.
        first: first word of this rank.
        end: index behind the last word of this rank.
        vocab_size: number of words over all ranks.
    """

    def __init__(self, links: TensorParallelLinks, first: int, end: int, vocab_size: int) -> None:
        """Remember the range; the head gives the logits of all words at first."""
        self.links = links
        self.first, self.end, self.vocab_size = first, end, vocab_size
        self._is_local = False

    @contextmanager
    def local(self) -> Iterator[None]:
        """Let the head give the logits of this rank's words alone for the time of the `with` block."""
        # Losses put parts together by themselves, with sums of a few numbers a row instead of all logits.
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def outputs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `[..., V]` logits of all words.

        Args:
            logits: logits of this rank's words, `[..., V/n]`.

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
        # A sum of zero-padded logits, not an all-gather: where n does not divide V, ranks differ by a word.
        whole = logits.new_zeros(*logits.shape[:-1], self.vocab_size)
        whole[..., self.first : self.end] = logits
        self.links.all_reduce(whole).wait()
        return whole


def vocab_parallel_head(head: nn.Module) -> VocabParallelHead | None:
    """Return which words a head holds; `None` for a whole head.

    Args:
        head: the output head, plain or wrapped by an adapter.
    """
    return getattr(getattr(head, "base_layer", head), "vocab_parallel_head", None)


def complete_logits(head: nn.Module, words: VocabParallelHead) -> Any:
    """Let a head give the logits of all words when it is called.

    Args:
        head: the head that model code calls, adapters included.
        words: which words it holds.

    Returns:
        The handle of the hook, whose `remove` takes this back.
    """

    def complete(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        return words.outputs(output)

    return head.register_forward_hook(complete)
