"""How far targets lie above the other words, which is what label smoothing adds to a cross-entropy.

With logits z over V words, the mean over all words of their negative log-likelihood is that of the target, plus how far
its logit lies above the mean logit, its *spread*::

    mean_v -log p_v  =  log Z - mean_v z_v  =  nll + (z_t - mean_v z_v)

So the loss of transformers' `LabelSmoother`, `(1 - epsilon) nll + epsilon mean_v -log p_v`, needs the logit of the
target and the mean logit alone. A frozen linear head gives their difference without any logits: it is
`h (W_t - mean_v W_v)`. Where a vocabulary is cut into shards, each has a part of every spread, and their sum is the
whole.

Shape letters: M targets, D hidden features, V words of this shard.
"""

from __future__ import annotations

from typing import Any

import torch

from peft_mux.kernels.cross_entropy.linear import Head, block_rows
from peft_mux.kernels.cross_entropy.vocab_parallel import Targets

_WORDS_AT_ONCE = 4096
"""Rows of a head that are added up at once: the whole of it in fp32 would be as large as the head again."""


def linear_spreads(
    hidden_MD: torch.Tensor, head: Head, targets_M: torch.Tensor, *, first: int = 0, vocab_size: int | None = None
) -> torch.Tensor:
    """Return this shard's part of the spread of each target under a frozen head.

    Args:
        hidden_MD: `[M, D]` hidden states of the rows that have a target.
        head: the frozen head, or this shard's rows of it.
        targets_M: int64 `[M]`, indices into the whole vocabulary.
        first: index of this shard's first word in the whole vocabulary.
        vocab_size: number of words of all shards; by default those of `head`.

    Returns:
        fp32 `[M]`, differentiable in `hidden_MD`.
    """
    size = len(head.weight) if vocab_size is None else vocab_size
    targets = Targets.of(targets_M, first, len(head.weight))
    # The dtype follows from the hidden states, as in the losses that this is added to.
    with torch.autocast(hidden_MD.device.type, enabled=False):
        if head.softcap is not None:
            return _CappedSpreads.apply(hidden_MD, head, targets, size)
        return _linear_spreads(hidden_MD, head, targets, size)


def spreads_of_logits(logits_MV: torch.Tensor, targets: Targets, vocab_size: int) -> torch.Tensor:
    """Return this shard's part `[M]` of the spreads of targets, from logits and differentiable in these.

    Args:
        logits_MV: `[M, V]` logits of this shard's words.
        targets: where the targets lie.
        vocab_size: number of words of all shards.
    """
    of_target_M = logits_MV.gather(1, targets.local_M).where(targets.is_here_M, 0.0).squeeze(1)
    return of_target_M - logits_MV.sum(dim=1) / vocab_size


def _linear_spreads(hidden_MD: torch.Tensor, head: Head, targets: Targets, size: int) -> torch.Tensor:
    """Return the spreads under a head without a soft-cap: products with differences of its rows."""
    dtype = torch.promote_types(hidden_MD.dtype, torch.float32)
    total_D = sum(part.to(dtype).sum(dim=0) for part in head.weight.split(_WORDS_AT_ONCE))
    own_M = targets.local_M.squeeze(1)
    above_MD = head.weight.index_select(0, own_M).to(dtype).where(targets.is_here_M, 0.0) - total_D / size
    spreads_M = (hidden_MD.to(dtype) * above_MD).sum(dim=1)
    if head.bias is not None:
        bias = head.bias.to(dtype)
        of_target_M = bias.index_select(0, own_M).where(targets.is_here_M.squeeze(1), 0.0)
        spreads_M = spreads_M + of_target_M - bias.sum() / size
    return spreads_M * head.scale


class _CappedSpreads(torch.autograd.Function):
    """The spreads under a head with a soft-cap: of logits that are made block by block, and not kept."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: torch.Tensor, head: Head, targets: Targets, size: int) -> torch.Tensor:
        """Compute the spreads; keep the gradient of each, as the logits are not there in the backward pass."""
        spreads_M = hidden_MD.new_empty(len(hidden_MD), dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
        gradient_MD = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        step = block_rows(len(head.weight), hidden_MD.device.type)
        for start in range(0, len(hidden_MD), step):
            rows = slice(start, start + step)
            own = Targets(targets.local_M[rows], targets.is_here_M[rows])
            logits = head.logits(hidden_MD[rows])
            spreads_M[rows] = spreads_of_logits(logits, own, size)
            if gradient_MD is not None:
                gradient_MD[rows] = _capped_gradient(logits, own, head, size, hidden_MD.dtype)
        if gradient_MD is not None:
            ctx.save_for_backward(gradient_MD)
        return spreads_M

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_spreads_M: torch.Tensor) -> tuple[Any, ...]:
        """Scale each gradient by what flows into its spread."""
        (gradient_MD,) = ctx.saved_tensors
        return gradient_MD * d_spreads_M[:, None].to(gradient_MD.dtype), None, None, None


def _capped_gradient(
    logits: torch.Tensor, targets: Targets, head: Head, size: int, hidden_dtype: torch.dtype
) -> torch.Tensor:
    """Return `d spread / d hidden` of a block, `[M, D]`; overwrites the logits."""
    assert head.softcap is not None, "heads without one need no logits"
    above = torch.full_like(logits, -1.0 / size)
    above.scatter_add_(1, targets.local_M, targets.is_here_M.to(logits.dtype))
    # 1 - tanh^2 is the derivative of tanh.
    above.mul_(logits.div_(head.softcap).square_().neg_().add_(1.0).mul_(head.scale))
    return above.to(hidden_dtype) @ head.weight.to(hidden_dtype)
