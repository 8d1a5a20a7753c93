"""Cross-entropy of an output head whose vocabulary is cut into shards, exact, in blocks of rows (M section 3.4.2).

Shard s holds the logits of its own vocabulary. With the greatest logit m_s, the sum e_s = sum exp(z - m_s), and the
target's logit t_s (0 where the target lies elsewhere), all of `[rows]`::

    m = max_s m_s      log Z = m + log sum_s e_s exp(m_s - m)      loss = log Z - sum_s t_s

One sum over the shards brings all three to everybody: each writes into its own part of a buffer of zeros. All shards
then compute the same bits. `d loss / d hidden` is a sum over shards too, made in the backward pass. Nothing of a row
enters another row, so a NaN stays in its task.

There is no fused kernel for a part of a vocabulary: on a GPU too, this takes several passes over a block of logits.

Shape letters: M rows with a target, D hidden features, V vocabulary of this shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from peft_mux.kernels.cross_entropy.linear import COPIED_ROWS, Head, block_rows, hidden_gradient


class Waitable(Protocol):
    """A sum over the shards that was begun and may not be done."""

    def wait(self) -> None:
        """Return when the sum is there to be read."""
        ...


class TensorParallelLinks(Protocol):
    """How the shards of one stage communicate: all that they exchange are sums (all-reduce)."""

    @property
    def index(self) -> int:
        """Number of this shard."""
        ...

    @property
    def size(self) -> int:
        """Number of shards of the vocabulary."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace a contiguous tensor by its sum over the shards, with the same bits on all of them.

        All shards begin their sums in the same order. Nobody touches the tensor before `wait` has returned.
        """
        ...


class Targets(NamedTuple):
    """Where the targets of rows lie.

    Attributes:
        local_M: int64 `[M, 1]`, index within this shard's vocabulary; 0 where the target is another shard's.
        is_here_M: bool `[M, 1]`, whether the target lies in this shard's vocabulary.
    """

    local_M: torch.Tensor
    is_here_M: torch.Tensor

    @classmethod
    def of(cls, targets_M: torch.Tensor, first: int, vocab_size: int) -> Targets:
        """Find the targets of a shard.

        Args:
            targets_M: int64 `[M]`, indices into the whole vocabulary.
            first: index of this shard's first word in the whole vocabulary.
            vocab_size: number of words of this shard, V.
        """
        local_M = targets_M[:, None] - first
        is_here_M = (local_M >= 0) & (local_M < vocab_size)
        # Any valid index will do for another shard's word: what is read there is replaced by 0.
        return cls(local_M.where(is_here_M, 0), is_here_M)


def vocab_parallel_linear_cross_entropy(
    hidden_MD: torch.Tensor,
    head: Head,
    targets_M: torch.Tensor,
    *,
    first: int,
    vocab_size: int,
    links: TensorParallelLinks,
    rows_per_block: int | None = None,
) -> torch.Tensor:
    """Return the negative log-likelihood of each row's target under a frozen head.

    Args:
        hidden_MD: `[M, D]` hidden states of the rows that have a target; the same on all shards.
        head: this shard's rows of the whole head.
        targets_M: int64 `[M]`, indices into the whole vocabulary.
        first: index of this shard's first word in the whole vocabulary.
        vocab_size: number of words of all shards.
        links: how this shard sums with the other ones.
        rows_per_block: rows of logits held at a time, the same on all shards; by default from the vocabulary and the
            device.

    Returns:
        fp32 `[M]`, differentiable in `hidden_MD`; the same on all shards.
    """
    # From the whole vocabulary: parts differ by a word, and all shards must cut the same blocks.
    rows = rows_per_block or block_rows(-(-vocab_size // links.size), hidden_MD.device.type)
    with torch.autocast(hidden_MD.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden_MD, head, targets_M, first, links, rows)


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the losses and, block by block, this shard's part of `d loss / d hidden`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        head: Head,
        targets_M: torch.Tensor,
        first: int,
        links: TensorParallelLinks,
        rows_per_block: int,
    ) -> torch.Tensor:
        """Compute the losses; keep this shard's part of the gradient of each row."""
        gradient = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        losses = hidden_MD.new_empty(len(hidden_MD), dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
        for start in range(0, len(hidden_MD), rows_per_block):
            rows = slice(start, start + rows_per_block)
            logits = head.logits(hidden_MD[rows])
            targets = Targets.of(targets_M[rows], first, logits.shape[1])
            log_normaliser, losses[rows] = normaliser_and_losses(logits, targets, links)
            if gradient is not None:
                gradient[rows] = hidden_gradient(
                    logits, log_normaliser, targets.local_M, head, hidden_MD.dtype, targets.is_here_M
                )
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.links = links
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_losses_M: torch.Tensor) -> tuple[Any, ...]:
        """Scale each row's gradient by what flows into its loss, and add the shards' parts up."""
        (gradient,) = ctx.saved_tensors
        d_hidden_MD = gradient * d_losses_M[:, None].to(gradient.dtype)
        # Each shard has the part of its own words; the hidden states, and so their gradient, are the same on all.
        ctx.links.all_reduce(d_hidden_MD).wait()
        return d_hidden_MD, None, None, None, None, None


def normaliser_and_losses(
    logits_MV: torch.Tensor, targets: Targets, links: TensorParallelLinks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the softmax's denominator over all shards `[M, 1]`, and the losses `[M]`.

    Args:
        logits_MV: logits of this shard's words, in fp32 at least.
        targets: where the targets of the rows lie.
        links: how this shard sums with the other ones.
    """
    # Each shard writes into zeros of its own, so that the sum is a gathering: adding 0 changes no bit.
    parts = logits_MV.new_zeros(links.size, 3, len(logits_MV))
    top_M = logits_MV.amax(dim=1)
    own = parts[links.index]
    own[0] = top_M
    rows = zip(logits_MV.split(COPIED_ROWS), top_M.split(COPIED_ROWS), strict=True)
    own[1] = torch.cat([(part - top[:, None]).exp_().sum(dim=1) for part, top in rows])
    own[2] = logits_MV.gather(1, targets.local_M).where(targets.is_here_M, 0.0).squeeze(1)
    links.all_reduce(parts).wait()
    tops, sums, target_logits = parts.unbind(dim=1)
    # The greatest logit of all shards is taken off, so that no exponential overflows.
    top_M = tops.amax(dim=0)
    log_normaliser_M = top_M + (sums * (tops - top_M).exp()).sum(dim=0).log()
    return log_normaliser_M[:, None], log_normaliser_M - target_logits.sum(dim=0)


def _softmax_minus_one_hot(logits: torch.Tensor, log_normaliser: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return `softmax - one_hot` of this shard's words, in the memory of the logits."""
    probabilities = logits.sub_(log_normaliser).exp_()
    return probabilities.scatter_add_(1, targets.local_M, -targets.is_here_M.to(logits.dtype))


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The same from logits, for heads that tasks adapt: differentiable in this shard's logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int, links: TensorParallelLinks
    ) -> torch.Tensor:
        """Return `[M]` losses, the same on all shards.

        Args:
            ctx: what autograd keeps for the backward pass.
            logits_MV: logits of this shard's words, in fp32 at least.
            targets_M: int64 `[M]`, indices into the whole vocabulary.
            first: index of this shard's first word in the whole vocabulary.
            links: how this shard sums with the other ones.
        """
        targets = Targets.of(targets_M, first, logits_MV.shape[1])
        log_normaliser, losses_M = normaliser_and_losses(logits_MV, targets, links)
        ctx.save_for_backward(logits_MV, log_normaliser, *targets)
        return losses_M

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_losses_M: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of this shard's logits."""
        logits_MV, log_normaliser, local_M, is_here_M = ctx.saved_tensors
        # In a copy: what was saved for the backward pass may be asked for again.
        errors_MV = _softmax_minus_one_hot(logits_MV.clone(), log_normaliser, Targets(local_M, is_here_M))
        return errors_MV.mul_(d_losses_M[:, None]), None, None, None
