"""Cross-entropy of a frozen output head, in blocks of rows: the logits of the whole stream never exist.

Only rows with a target are passed in. The gradient of the hidden states is computed in the forward pass, while a
block's logits are at hand; the head is frozen, so it gets no gradient. Own code because the libraries that fuse head
and loss (Liger, cut-cross-entropy) need Triton and reduce to one scalar, and we need a loss per row on any device.

Shape letters: M rows with a target, D hidden features, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from peft_mux.kernels.availability import runs_kernels


class BlockSizes(NamedTuple):
    """How many rows of logits are made at a time on one kind of device.

    Attributes:
        fast_rows: with as many rows the two products are near the rate that they have with any number: fewer read the
            whole head for too little work. One core does 48 Gflop/s with 27 rows, 80 with 128 and 83 with 512
            (151,936 words, `benchmarks.training.cpu_choices`), two do 150 with 128 and 177 with 384; a GPU has 512
            flop for each byte of a head in bf16.
        logits: of small vocabularies more rows are taken, up to this many logits.
        most_logits: bound on memory, whatever the vocabulary: 512 MiB, in fp32 on a CPU and in bf16 on a GPU.
    """

    fast_rows: int
    logits: int
    most_logits: int


_BLOCK_SIZES = {"cpu": BlockSizes(384, 2**22, 2**27)}
_DEFAULT_BLOCK_SIZES = BlockSizes(512, 2**26, 2**28)
_LEAST_ROWS = 16
_TILE_ROWS = 128
COPIED_ROWS = 16
"""Rows of logits whose exponentials are made at once where only their sums are wanted; few, as they are a copy."""


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

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return `[M, V]` logits, in fp32 at least."""
        bias = None if self.bias is None else self.bias.to(hidden_MD.dtype)
        logits = F.linear(hidden_MD, self.weight.to(hidden_MD.dtype), bias)
        # bf16 has 8 bits: exponentials and their sum need fp32. Logits in float64 stay as they are.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # In their own memory, unless autograd is to know how they were made.
        out = None if logits.requires_grad else logits
        if self.scale != 1.0:
            logits = torch.mul(logits, self.scale, out=out)
        if self.softcap is not None:
            capped = torch.tanh(torch.div(logits, self.softcap, out=out), out=out)
            logits = torch.mul(capped, self.softcap, out=out)
        return logits


def block_rows(vocab_size: int, device_type: str) -> int:
    """Return how many rows of logits are held at a time: enough to compute fast, within a bound on memory.

    It follows from the vocabulary and the device alone, never from the rows that there are.

    Args:
        vocab_size: V, words of the head; where tensor parallelism cuts it, those of one device.
        device_type: "cpu", or the kind of a device with kernels.
    """
    sizes = _BLOCK_SIZES.get(device_type, _DEFAULT_BLOCK_SIZES)
    fast = min(sizes.fast_rows, sizes.most_logits // vocab_size)
    rows = max(_LEAST_ROWS, fast, sizes.logits // vocab_size)
    # Whole tiles of the two products: 523 rows would cost as much as 640.
    return rows // _TILE_ROWS * _TILE_ROWS if device_type != "cpu" and rows >= _TILE_ROWS else rows


@functools.cache
def _device_kernel() -> Any:
    """Return the file with the fused loss, imported when it is first wanted."""
    from peft_mux.kernels.cross_entropy import device

    return device


def _fused_kernel(hidden_MD: torch.Tensor) -> Any | None:
    """Return the fused loss if it runs on this device and in this dtype."""
    kernel = _device_kernel() if runs_kernels(hidden_MD.device) else None
    return kernel if kernel is not None and hidden_MD.dtype in kernel.DTYPES else None


def linear_cross_entropy(
    hidden_MD: torch.Tensor, head: Head, targets_M: torch.Tensor, *, rows_per_block: int | None = None
) -> torch.Tensor:
    """Return the negative log-likelihood of each row's target.

    Args:
        hidden_MD: `[M, D]` hidden states of the rows that have a target.
        head: the frozen head that makes logits of them.
        targets_M: int64 `[M]`, index of each row's target in the vocabulary.
        rows_per_block: rows of logits held at a time; by default `block_rows` of the vocabulary and the device.

    Returns:
        fp32 `[M]`, differentiable in `hidden_MD`.
    """
    rows = rows_per_block or block_rows(head.weight.shape[0], hidden_MD.device.type)
    # The dtype follows from the hidden states, in both passes; autocast would cast each product by itself.
    with torch.autocast(hidden_MD.device.type, enabled=False):
        return LinearCrossEntropyFunction.apply(hidden_MD, head, targets_M, rows)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Forward computes the losses and, block by block, `d loss / d hidden` before the row weights are known."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: torch.Tensor, head: Head, targets_M: torch.Tensor, rows_per_block: int
    ) -> torch.Tensor:
        """Compute the losses; keep the gradient of each row, to be scaled in the backward pass."""
        needs_gradient = ctx.needs_input_grad[0]
        # Filled in the forward pass: the backward one would have to make the logits again.
        gradient = torch.empty_like(hidden_MD) if needs_gradient else None
        losses = hidden_MD.new_empty(len(hidden_MD), dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
        kernel = _fused_kernel(hidden_MD)
        blocks = [slice(start, start + rows_per_block) for start in range(0, len(hidden_MD), rows_per_block)]
        if kernel is not None:
            _fused_blocks(kernel, hidden_MD, head, targets_M, blocks, losses, gradient)
            blocks = []
        for rows in blocks:
            logits, targets = head.logits(hidden_MD[rows]), targets_M[rows, None]
            parts = [part.logsumexp(dim=-1, keepdim=True) for part in logits.split(COPIED_ROWS)]
            log_normaliser = torch.cat(parts)
            losses[rows] = (log_normaliser - logits.gather(1, targets)).squeeze(1)
            if gradient is not None:
                gradient[rows] = hidden_gradient(logits, log_normaliser, targets, head, hidden_MD.dtype)
        # Rows are weighted in the backward pass, where their weights arrive: a task divides by its global batch.
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_losses_M: torch.Tensor) -> tuple[Any, ...]:
        """Scale each row's gradient by what flows into its loss."""
        (gradient,) = ctx.saved_tensors
        return gradient * d_losses_M[:, None].to(gradient.dtype), None, None, None


def _fused_blocks(
    kernel: Any,
    hidden_MD: torch.Tensor,
    head: Head,
    targets_M: torch.Tensor,
    blocks: list[slice],
    losses_M: torch.Tensor,
    gradient_MD: torch.Tensor | None,
) -> None:
    """Fill losses and gradient with three launches a block: logits, loss over them in place, and back."""
    weight = head.weight.to(hidden_MD.dtype)
    bias = None if head.bias is None else head.bias.to(hidden_MD.dtype)
    num_rows = min(len(hidden_MD), blocks[0].stop) if blocks else 0
    # One buffer for the logits of all blocks; its rows begin on whole words, whatever the size of the vocabulary.
    buffer = hidden_MD.new_empty(num_rows, kernel.row_stride(len(weight)))[:, : len(weight)]
    for rows in blocks:
        hidden = hidden_MD[rows]
        logits = buffer[: len(hidden)]
        if bias is None:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden, weight.t(), out=logits)
        kernel.cross_entropy_(
            logits,
            targets_M[rows],
            scale=head.scale,
            softcap=head.softcap,
            with_gradient=gradient_MD is not None,
            out=losses_M[rows],
        )
        if gradient_MD is not None:
            torch.mm(logits, weight, out=gradient_MD[rows])


def hidden_gradient(
    logits: torch.Tensor,
    log_normaliser: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    hidden_dtype: torch.dtype,
    is_here: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `d loss / d hidden` of a block, `[M, D]`; overwrites the logits.

    Args:
        logits: `[M, V]` logits of a block of rows, or those of a shard's words.
        log_normaliser: `[M, 1]`, logarithm of the softmax's denominator over all words.
        targets: int64 `[M, 1]`, index of each target among the words of `logits`.
        head: the head that made the logits.
        hidden_dtype: the dtype of the hidden states, and so of the result.
        is_here: bool `[M, 1]`, whether a target is among these words; by default all are.
    """
    # From the capped logits, before they are overwritten: 1 - tanh^2 is the derivative of tanh.
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


def reference_linear_cross_entropy(hidden_MD: torch.Tensor, head: Head, targets_M: torch.Tensor) -> torch.Tensor:
    """Return the same as `linear_cross_entropy`, with all logits at once and left to autograd."""
    return F.cross_entropy(head.logits(hidden_MD), targets_M, reduction="none")
