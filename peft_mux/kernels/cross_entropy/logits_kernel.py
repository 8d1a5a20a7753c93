"""Cross-entropy of a block of logits in one launch: the loss of each row, and the gradient over the logits.

One program works on one row and reads it twice. The first pass keeps a running maximum and a running sum of
exponentials; the second overwrites every logit with the derivative of the row's loss. There are no other buffers,
atomics or host synchronisation, and rows share no arithmetic: the bits of a row depend only on that row, and a NaN
stays in its row.

Importing this file imports Triton, so callers import it only if they use kernels.

Shape letters: M rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from peft_mux.kernels.cross_entropy import KERNEL_DTYPES

_MAX_BLOCK = 8192
_ROW_ALIGNMENT = 16  # elements


@triton.jit
def _transformed(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return the scaled and capped logits, and their derivative with respect to the raw ones."""
    logits = raw.to(tl.float32) * scale
    slope = scale
    if HAS_SOFTCAP:
        # tanh and its derivative from one exponential that cannot overflow; 1 - tanh^2 would cancel where it is small.
        decay = tl.exp(-2.0 * tl.abs(logits / softcap))
        inverse = 1.0 / (1.0 + decay)
        size = softcap * (1.0 - decay) * inverse
        slope = scale * 4.0 * decay * inverse * inverse
        logits = tl.where(logits < 0.0, -size, size)
    return logits, slope


@triton.jit
def _shift(maximum):
    """Return the value to subtract before exponentials: the maximum, or 0 where inf - inf would give NaN."""
    return tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)


@triton.jit
def _absorb(maximum, total, logits):
    """Return the running maximum and the sum of exponentials relative to it, extended by more logits."""
    raised = tl.maximum(maximum, tl.max(logits, axis=0))
    shift = _shift(raised)
    # If all logits so far are -inf, or there are none yet, the sum is 0, and 0 * exp(0 - shift) may be 0 * inf.
    decay = tl.where(maximum == float("-inf"), 0.0, tl.exp(_shift(maximum) - shift))
    return raised, total * decay + tl.sum(tl.exp(logits - shift), axis=0)


@triton.jit
def _derivative(logits, slope, columns, target, shift, factor):
    """Return d loss / d raw logits: (softmax - one-hot) times the slope of scale and soft-cap."""
    # exp(x - max) / sum and not exp(x - logsumexp): the latter rounds at the size of the logits.
    probabilities = tl.exp(logits - shift) * factor
    return tl.where(columns == target, probabilities - 1.0, probabilities) * slope


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    row_stride,
    scale,
    softcap,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
):
    """Write the loss of one row, and its gradient over the row's logits."""
    FULL: tl.constexpr = V // BLOCK
    TAIL: tl.constexpr = V - FULL * BLOCK
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    # A target outside the vocabulary cannot raise here; its row becomes NaN instead.
    known = (target >= 0) & (target < V)
    # Read before the first pass: its reductions are barriers, after which no warp can still be reading while
    # another one already overwrites.
    raw_target = tl.load(row_ptr + target, mask=known, other=0.0)
    target_logit = _transformed(raw_target, scale, softcap, HAS_SOFTCAP)[0]
    target_logit = tl.where(known, target_logit, float("nan"))

    maximum = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.full([], 0.0, dtype=tl.float32)
    for block in range(FULL):
        raw = tl.load(row_ptr + block * BLOCK + lanes)
        logits = _transformed(raw, scale, softcap, HAS_SOFTCAP)[0]
        maximum, total = _absorb(maximum, total, logits)
    if TAIL > 0:
        raw = tl.load(row_ptr + FULL * BLOCK + lanes, mask=lanes < TAIL, other=0.0)
        logits = _transformed(raw, scale, softcap, HAS_SOFTCAP)[0]
        maximum, total = _absorb(maximum, total, tl.where(lanes < TAIL, logits, float("-inf")))
    shift = _shift(maximum)
    # This order keeps the small loss of a row whose target is far ahead of all others.
    tl.store(losses_ptr + row, (shift - target_logit) + tl.log(total))

    if WITH_GRADIENT:
        factor = tl.where(known, 1.0 / total, float("nan"))
        # From the end back to the start, because the values read last are most likely still cached.
        if TAIL > 0:
            columns = FULL * BLOCK + lanes
            raw = tl.load(row_ptr + columns, mask=lanes < TAIL, other=0.0)
            logits, slope = _transformed(raw, scale, softcap, HAS_SOFTCAP)
            gradient = _derivative(logits, slope, columns, target, shift, factor)
            tl.store(row_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=lanes < TAIL)
        for block in range(FULL):
            columns = (FULL - 1 - block) * BLOCK + lanes
            raw = tl.load(row_ptr + columns)
            logits, slope = _transformed(raw, scale, softcap, HAS_SOFTCAP)
            gradient = _derivative(logits, slope, columns, target, shift, factor)
            tl.store(row_ptr + columns, gradient.to(logits_ptr.dtype.element_ty))


def launch_shape(vocab_size: int) -> tuple[int, int]:
    """Return the number of columns that a program handles at a time, and its number of warps.

    Both depend only on the vocabulary size, so that the order of sums in a row never depends on the other rows.
    """
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab_size))
    return block, min(16, max(1, block // 512))


def row_stride(vocab_size: int) -> int:
    """Return the row stride to allocate logits with, in elements: whole 16-byte words in every dtype.

    A vocabulary of odd size, packed densely, would be read one element at a time.
    """
    return -(-vocab_size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def cross_entropy_(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the negative log-likelihood of each row, and turn the logits into its gradient, in place.

    The loss is computed from `softcap * tanh(scale * logits / softcap)`, or `scale * logits` without a soft-cap; the
    gradient is with respect to the input `logits_MV`. A target outside the vocabulary makes its row NaN, because an
    exception would need a synchronisation with the host.

    Args:
        logits_MV: `[M, V]` in bf16, fp16 or fp32; columns adjacent, any row stride (`row_stride` returns a fast one).
            Holds `d loss / d logits` afterwards, unless `with_gradient` is false.
        targets_M: int64 `[M]`, index of each row's target in the vocabulary.
        scale: multiplies the logits.
        softcap: bounds the scaled logits smoothly; `None` for no bound.
        with_gradient: false to leave the logits unchanged.
        out: contiguous fp32 `[M]` to write the losses to; allocated by default.

    Returns:
        fp32 `[M]`, not differentiable.

    Raises:
        ValueError: if a shape, a dtype or the layout differs from the above.
    """
    losses = torch.empty(len(logits_MV), dtype=torch.float32, device=logits_MV.device) if out is None else out
    num_rows, vocab_size = logits_MV.shape
    if logits_MV.dtype not in KERNEL_DTYPES or (logits_MV.stride(1) != 1 and vocab_size > 1):
        raise ValueError(
            f"logits must be bf16, fp16 or fp32 with adjacent columns, got {logits_MV.dtype}, columns "
            f"{logits_MV.stride(1)} elements apart."
        )
    if targets_M.dtype != torch.int64 or targets_M.shape != (num_rows,) or not targets_M.is_contiguous():
        raise ValueError(
            f"targets must be contiguous int64 [{num_rows}], got {targets_M.dtype} of shape {tuple(targets_M.shape)}."
        )
    if losses.dtype != torch.float32 or losses.shape != (num_rows,) or not losses.is_contiguous():
        raise ValueError(
            f"out must be contiguous float32 [{num_rows}], got {losses.dtype} of shape {tuple(losses.shape)}."
        )
    if num_rows == 0:
        return losses
    block, num_warps = launch_shape(vocab_size)
    with torch.cuda.device_of(logits_MV):  # Triton launches on the current device, not on that of the tensors
        _cross_entropy_kernel[(num_rows,)](
            logits_MV,
            targets_M,
            losses,
            logits_MV.stride(0),
            float(scale),
            1.0 if softcap is None else float(softcap),
            V=vocab_size,
            BLOCK=block,
            HAS_SOFTCAP=softcap is not None,
            WITH_GRADIENT=with_gradient,
            num_warps=num_warps,  # pyright: ignore[reportCallIssue] - of the launch, not of the kernel
            enable_fp_fusion=True,  # pyright: ignore[reportCallIssue] - Triton 3.10 turns it off by default
        )
    return losses
