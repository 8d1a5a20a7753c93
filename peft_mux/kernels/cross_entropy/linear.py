"""Cross-entropy of an output head, in blocks of rows, without materialising the logits of the whole stream.

Only rows with a target are passed in. The gradient of the hidden states is computed in the forward pass, while a
block's logits are available; the head is frozen, so it gets no gradient. The libraries that fuse head and loss (Liger,
cut-cross-entropy) need Triton and reduce to one scalar; here there is a loss per row, on any device.

If the vocabulary is sharded (M section 3.4.2), shard s has the logits of its words. With the largest logit m_s, the sum
e_s = sum exp(z - m_s), and the target's logit t_s (0 if the target belongs to another shard), all `[rows]`::

    m = max_s m_s      log Z = m + log sum_s e_s exp(m_s - m)      loss = log Z - sum_s t_s

One all-reduce sends all three to every shard: each shard writes into its own part of a buffer of zeros. All shards then
compute the same bits. `d loss / d hidden` is also summed over shards, in the backward pass.

Label smoothing needs the *spread* of each target, the difference between its logit and the mean logit::

    mean_v -log p_v  =  log Z - mean_v z_v  =  nll + (z_t - mean_v z_v)

so that the loss of transformers' `LabelSmoother` is `(1 - epsilon) nll + epsilon (nll + spread)`. For a frozen linear
head the spread needs no logits: it is `h (W_t - mean_v W_v)`. Each shard has a part of every spread.

Rows do not influence one another, so a NaN stays in its task.

Shape letters: M rows with a target, D hidden features, V vocabulary (of this shard).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from peft_mux.kernels.availability import runs_kernels
from peft_mux.kernels.cross_entropy import KERNEL_DTYPES


class BlockSizes(NamedTuple):
    """How many rows of logits are computed at a time on one type of device.

    Attributes:
        fast_rows: number of rows with which the two products are near their maximum rate; with fewer rows, reading the
            head dominates. One core does 48 Gflop/s with 27 rows, 80 with 128 and 83 with 512 (151,936 words,
            `docs/log.md`), two do 150 with 128 and 177 with 384. On a GPU, 512 rows give the
            gradient of the hidden states 64 tiles (width 4,096) for 132 multiprocessors; 1,024 give 128.
        logits: small vocabularies use more rows, up to this many logits.
        most_logits: bound on memory for any vocabulary: 512 MiB, in fp32 on a CPU and in bf16 on a GPU.
    """

    fast_rows: int
    logits: int
    most_logits: int


_BLOCK_SIZES = {"cpu": BlockSizes(384, 2**22, 2**27)}
_DEFAULT_BLOCK_SIZES = BlockSizes(1024, 2**26, 2**28)
_LEAST_ROWS = 16
_TILE_ROWS = 128
COPIED_ROWS = 16
"""Rows whose exponentials are computed at once if only their sums are needed; few, because they are a copy."""


class Head(NamedTuple):
    """A frozen output head: `logits = softcap * tanh(scale * (h W^T + b) / softcap)`.

    Attributes:
        weight: the frozen weight `[V, D]`.
        bias: the frozen bias `[V]`, or `None`.
        scale: multiplies the logits (Cohere, Granite).
        softcap: bounds the logits smoothly (Gemma 2); `None` for none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_MD: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return `[M, V]` logits, in fp32 at least.

        Args:
            hidden_MD: `[M, D]` hidden states.
            out: logits of an earlier block of at least M rows, in whose memory these are made; new memory by default.
        """
        weight = self.weight.to(hidden_MD.dtype)
        bias = None if self.bias is None else self.bias.to(hidden_MD.dtype)
        if out is None:
            logits = F.linear(hidden_MD, weight, bias)
            # bf16 has 8 bits: exponentials and their sum need fp32. Logits in float64 stay as they are.
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        else:
            logits = out[: len(hidden_MD)]
            if out.dtype != hidden_MD.dtype:
                logits.copy_(F.linear(hidden_MD, weight, bias))
            elif bias is None:
                torch.mm(hidden_MD, weight.t(), out=logits)
            else:
                torch.addmm(bias, hidden_MD, weight.t(), out=logits)
        # In their own memory, unless autograd is to know how they were made.
        place = None if logits.requires_grad else logits
        if self.scale != 1.0:
            logits = torch.mul(logits, self.scale, out=place)
        if self.softcap is not None:
            capped = torch.tanh(torch.div(logits, self.softcap, out=place), out=place)
            logits = torch.mul(capped, self.softcap, out=place)
        return logits


def block_rows(vocab_size: int, device_type: str) -> int:
    """Return how many rows of logits are held at a time: enough to compute fast, within a bound on memory.

    The number depends only on the vocabulary and the device, never on the rows of a batch.

    Args:
        vocab_size: V, words of the head; with tensor parallelism, the words on one device.
        device_type: "cpu", or the type of a device with kernels.
    """
    sizes = _BLOCK_SIZES.get(device_type, _DEFAULT_BLOCK_SIZES)
    fast = min(sizes.fast_rows, sizes.most_logits // vocab_size)
    rows = max(_LEAST_ROWS, fast, sizes.logits // vocab_size)
    # Whole tiles of the two products: 523 rows would cost as much as 640.
    return rows // _TILE_ROWS * _TILE_ROWS if device_type != "cpu" and rows >= _TILE_ROWS else rows


def linear_cross_entropy(
    hidden_MD: torch.Tensor,
    head: Head,
    targets_M: torch.Tensor,
    *,
    first: int = 0,
    vocab_size: int | None = None,
    links: TensorParallelLinks | None = None,
    rows_per_block: int | None = None,
) -> torch.Tensor:
    """Return the negative log-likelihood of each row's target under a frozen head, or under one that is cut.

    Args:
        hidden_MD: `[M, D]` hidden states of the rows that have a target; the same on all shards.
        head: the frozen head that makes logits of them, or this shard's rows of it.
        targets_M: int64 `[M]`, index of each row's target in the whole vocabulary.
        first: index of this shard's first word in the whole vocabulary.
        vocab_size: number of words of all shards; by default those of `head`.
        links: how this shard sums with the other ones; `None` for a whole head.
        rows_per_block: rows of logits held at a time, the same on all shards; by default `block_rows` of the vocabulary
            and the device.

    Returns:
        fp32 `[M]`, differentiable in `hidden_MD`; the same on all shards.
    """
    # From the whole vocabulary: parts differ by a word, and all shards must cut the same blocks.
    num_words = -(-(vocab_size or len(head.weight)) // (1 if links is None else links.size))
    rows = rows_per_block or block_rows(num_words, hidden_MD.device.type)
    # The dtype follows from the hidden states, in both passes; autocast would cast each product by itself.
    with torch.autocast(hidden_MD.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden_MD, head, targets_M, rows, first, links)


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the losses and, block by block, this shard's part of `d loss / d hidden`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        head: Head,
        targets_M: torch.Tensor,
        rows_per_block: int,
        first: int,
        links: TensorParallelLinks | None,
    ) -> torch.Tensor:
        """Compute the losses; keep the gradient of each row, to be scaled in the backward pass."""
        # Filled in the forward pass; otherwise the backward pass would have to recompute the logits.
        gradient = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        losses = hidden_MD.new_empty(len(hidden_MD), dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
        # There is no fused kernel for a sharded vocabulary.
        if links is None and runs_kernels(hidden_MD.device) and hidden_MD.dtype in KERNEL_DTYPES:
            _fused_blocks(hidden_MD, head, targets_M, rows_per_block, losses, gradient)
        else:
            block = None
            for start in range(0, len(hidden_MD), rows_per_block):
                rows = slice(start, start + rows_per_block)
                # In the memory of the block before, as the C library rarely gives a freed block of one size out again.
                block = logits = head.logits(hidden_MD[rows], out=block)
                if links is None:
                    local, is_here = targets_M[rows, None], None
                    log_normaliser = torch.cat(
                        [part.logsumexp(dim=-1, keepdim=True) for part in logits.split(COPIED_ROWS)]
                    )
                    losses[rows] = (log_normaliser - logits.gather(1, local)).squeeze(1)
                else:
                    local, is_here = targets = Targets.of(targets_M[rows], first, logits.shape[1])
                    log_normaliser, losses[rows] = _normaliser_and_losses(logits, targets, links)
                if gradient is not None:
                    gradient[rows] = _hidden_gradient(logits, log_normaliser, local, head, hidden_MD.dtype, is_here)
        # Rows are weighted in the backward pass, when their weights are known: a task divides by its global batch.
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.links = links
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_losses_M: torch.Tensor) -> tuple[Any, ...]:
        """Scale each row's gradient by the gradient of its loss, and add the shards' parts up."""
        (gradient,) = ctx.saved_tensors
        d_hidden_MD = gradient * d_losses_M[:, None].to(gradient.dtype)
        if ctx.links is not None:
            # Each shard has the part of its own words; the hidden states and their gradient are the same on all shards.
            ctx.links.all_reduce(d_hidden_MD).wait()
        return d_hidden_MD, None, None, None, None, None


def _fused_blocks(
    hidden_MD: torch.Tensor,
    head: Head,
    targets_M: torch.Tensor,
    rows_per_block: int,
    losses_M: torch.Tensor,
    gradient_MD: torch.Tensor | None,
) -> None:
    """Fill losses and gradient with three launches per block: logits, loss over them in place, and back."""
    # Imported here, because it needs Triton.
    from peft_mux.kernels.cross_entropy.logits_kernel import cross_entropy_, row_stride

    weight = head.weight.to(hidden_MD.dtype)
    bias = None if head.bias is None else head.bias.to(hidden_MD.dtype)
    # One buffer for the logits of all blocks; its rows are aligned for any vocabulary size.
    buffer = hidden_MD.new_empty(min(len(hidden_MD), rows_per_block), row_stride(len(weight)))[:, : len(weight)]
    for start in range(0, len(hidden_MD), rows_per_block):
        rows = slice(start, start + rows_per_block)
        hidden = hidden_MD[rows]
        logits = buffer[: len(hidden)]
        if bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden, weight.t(), out=logits)
        needs_gradient = gradient_MD is not None
        scale, softcap = head.scale, head.softcap
        cross_entropy_(
            logits, targets_M[rows], scale=scale, softcap=softcap, with_gradient=needs_gradient, out=losses_M[rows]
        )
        if gradient_MD is not None:
            torch.mm(logits, weight, out=gradient_MD[rows])


def _hidden_gradient(
    logits: torch.Tensor,
    log_normaliser: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    hidden_dtype: torch.dtype,
    is_here: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `d loss / d hidden` of a block, `[M, D]`; overwrites the logits.

    Args:
        logits: `[M, V]` logits of a block of rows, for all words or for those of a shard.
        log_normaliser: `[M, 1]`, logarithm of the softmax's denominator over all words.
        targets: int64 `[M, 1]`, index of each target among the words of `logits`.
        head: the head that computed the logits.
        hidden_dtype: the dtype of the hidden states and of the result.
        is_here: bool `[M, 1]`, whether a target is among these words; by default all are.
    """
    # Computed from the capped logits before they are overwritten: 1 - tanh^2 is the derivative of tanh.
    slope = None
    if head.softcap is not None:
        slope = (logits / head.softcap).square_().neg_().add_(1.0).mul_(head.scale)
    probabilities = logits.sub_(log_normaliser).exp_()
    ones = torch.ones_like(targets) if is_here is None else is_here
    probabilities.scatter_add_(1, targets, -ones.to(probabilities.dtype))
    if slope is not None:
        probabilities.mul_(slope)
    elif head.scale != 1.0:
        probabilities.mul_(head.scale)
    return probabilities.to(hidden_dtype) @ head.weight.to(hidden_dtype)


class Waitable(Protocol):
    """A pending sum over the shards."""

    def wait(self) -> None:
        """Wait until the sum is complete."""
        ...


class TensorParallelLinks(Protocol):
    """Communication between the shards of one stage, which consists of sums only (all-reduce)."""

    @property
    def index(self) -> int:
        """Number of this shard."""
        ...

    @property
    def size(self) -> int:
        """Number of shards of the vocabulary."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Start to replace a contiguous tensor by its sum over the shards, with the same bits on all of them.

        All shards must start their sums in the same order. The tensor must not be used until `wait` returns.
        """
        ...


class Targets(NamedTuple):
    """The targets of rows, relative to a shard's vocabulary.

    Attributes:
        local_M: int64 `[M, 1]`, index within this shard's vocabulary; 0 if the target belongs to another shard.
        is_here_M: bool `[M, 1]`, whether the target is in this shard's vocabulary.
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
        # Any valid index works for another shard's word, because the value is replaced by 0.
        return cls(local_M.where(is_here_M, 0), is_here_M)


def _normaliser_and_losses(
    logits_MV: torch.Tensor, targets: Targets, links: TensorParallelLinks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the softmax's denominator over all shards `[M, 1]`, and the losses `[M]`.

    Args:
        logits_MV: logits of this shard's words, in fp32 at least.
        targets: the targets of the rows.
        links: sums over the shards.
    """
    # Each shard writes into its own part of a zero buffer, so that the sum acts as an all-gather; adding 0 is exact.
    parts = logits_MV.new_zeros(links.size, 3, len(logits_MV))
    top_M = logits_MV.amax(dim=1)
    part_of_shard = parts[links.index]
    part_of_shard[0] = top_M
    rows = zip(logits_MV.split(COPIED_ROWS), top_M.split(COPIED_ROWS), strict=True)
    part_of_shard[1] = torch.cat([(part - top[:, None]).exp_().sum(dim=1) for part, top in rows])
    part_of_shard[2] = logits_MV.gather(1, targets.local_M).where(targets.is_here_M, 0.0).squeeze(1)
    links.all_reduce(parts).wait()
    tops, sums, target_logits = parts.unbind(dim=1)
    # Subtract the largest logit of all shards, so that no exponential overflows.
    top_M = tops.amax(dim=0)
    log_normaliser_M = top_M + (sums * (tops - top_M).exp()).sum(dim=0).log()
    return log_normaliser_M[:, None], log_normaliser_M - target_logits.sum(dim=0)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The same from logits, for heads that tasks adapt: differentiable in this shard's logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: torch.Tensor, targets_M: torch.Tensor, first: int, links: TensorParallelLinks
    ) -> torch.Tensor:
        """Return `[M]` losses, the same on all shards.

        Args:
            ctx: the autograd context.
            logits_MV: logits of this shard's words, in fp32 at least.
            targets_M: int64 `[M]`, indices into the whole vocabulary.
            first: index of this shard's first word in the whole vocabulary.
            links: sums over the shards.
        """
        targets = Targets.of(targets_M, first, logits_MV.shape[1])
        log_normaliser, losses_M = _normaliser_and_losses(logits_MV, targets, links)
        ctx.save_for_backward(logits_MV, log_normaliser, *targets)
        return losses_M

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_losses_M: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of this shard's logits."""
        logits_MV, log_normaliser, local_M, is_here_M = ctx.saved_tensors
        # In a copy, because the saved tensors may be used by another backward pass.
        errors_MV = logits_MV.clone().sub_(log_normaliser).exp_()
        errors_MV.scatter_add_(1, local_M, -is_here_M.to(logits_MV.dtype))
        return errors_MV.mul_(d_losses_M[:, None]), None, None, None


_WORDS_AT_ONCE = 4096
"""Rows of a head that are summed at once; an fp32 copy of the whole head would take too much memory."""


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
    # Same dtype as the hidden states, as in the losses to which this is added.
    with torch.autocast(hidden_MD.device.type, enabled=False):
        if head.softcap is not None:
            return _CappedSpreads.apply(hidden_MD, head, targets, size)
        # Products with differences of the head's rows.
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


def spreads_of_logits(logits_MV: torch.Tensor, targets: Targets, vocab_size: int) -> torch.Tensor:
    """Return this shard's part `[M]` of the spreads of targets, from logits and differentiable in these.

    Args:
        logits_MV: `[M, V]` logits of this shard's words.
        targets: the targets of the rows.
        vocab_size: number of words of all shards.
    """
    of_target_M = logits_MV.gather(1, targets.local_M).where(targets.is_here_M, 0.0).squeeze(1)
    return of_target_M - logits_MV.sum(dim=1) / vocab_size


class _CappedSpreads(torch.autograd.Function):
    """The spreads under a head with a soft-cap, from logits that are computed block by block and not kept."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: torch.Tensor, head: Head, targets: Targets, size: int) -> torch.Tensor:
        """Compute the spreads and their gradients, because the logits are not available in the backward pass."""
        assert head.softcap is not None, "heads without one need no logits"
        spreads_M = hidden_MD.new_empty(len(hidden_MD), dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
        gradient_MD = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        step = block_rows(len(head.weight), hidden_MD.device.type)
        for start in range(0, len(hidden_MD), step):
            rows = slice(start, start + step)
            targets_of_rows = Targets(targets.local_M[rows], targets.is_here_M[rows])
            logits = head.logits(hidden_MD[rows])
            spreads_M[rows] = spreads_of_logits(logits, targets_of_rows, size)
            if gradient_MD is not None:
                above = torch.full_like(logits, -1.0 / size)
                above.scatter_add_(1, targets_of_rows.local_M, targets_of_rows.is_here_M.to(logits.dtype))
                # 1 - tanh^2 is the derivative of tanh.
                above.mul_(logits.div_(head.softcap).square_().neg_().add_(1.0).mul_(head.scale))
                gradient_MD[rows] = above.to(hidden_MD.dtype) @ head.weight.to(hidden_MD.dtype)
        if gradient_MD is not None:
            ctx.save_for_backward(gradient_MD)
        return spreads_M

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_spreads_M: torch.Tensor) -> tuple[Any, ...]:
        """Scale each gradient by the gradient of its spread."""
        (gradient_MD,) = ctx.saved_tensors
        return gradient_MD * d_spreads_M[:, None].to(gradient_MD.dtype), None, None, None
