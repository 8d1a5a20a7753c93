"""The Triton kernel of `adamw.py`: one AdamW step of the pages of all tasks, in one launch.

A table with one row per page says where its tensors are and how its task steps. A program finds its page by the first
blocks of the rows, and reads from the device whether the task may step and how far its gradient is clipped, so the
launch waits for nothing. The same pass over memory keeps the weights from before the update and zeroes the gradient.

A row of the table (words of 8 bytes; the settings are fp32, two in a word):

    first block | elements | task | 5 addresses | 8 settings

Importing this file imports Triton.

Shape letters: N tasks.
"""

# Triton's annotations of scalars are values and not types.
# pyright: reportArgumentType=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from peft_mux.kernels.lora.tables import copy_to_device

BLOCK = 2048
NUM_WARPS = 8

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WORDS = tl.constexpr(12)
_ADDRESSES = tl.constexpr(3)
_SETTINGS = tl.constexpr(16)  # counted in fp32 numbers


@triton.jit
def _pointer(address_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer whose address is in the table."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # unknown for an address that was loaded, and necessary for accesses of 16 bytes
        pointer = tl.multiple_of(pointer, 16)
    return pointer


# Not specialised, because Triton would compile again for counts of 1 and multiples of 16 as tasks come and go.
@triton.jit(do_not_specialize=["num_pages", "num_tasks"])
def adamw_kernel(
    table_ptr,
    settings_ptr,
    verdicts_ptr,
    num_pages,
    num_tasks,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update one block of a page if the page's task may step, in the order of operations of `torch.optim.AdamW`."""
    block = tl.program_id(0)
    page = tl.full([], 0, dtype=tl.int32)
    end = num_pages
    # Bisection over the first blocks of the pages.
    while end - page > 1:
        middle = (page + end) // 2
        is_behind = tl.load(table_ptr + middle * _WORDS) > block
        page = tl.where(is_behind, page, middle)
        end = tl.where(is_behind, middle, end)
    row_ptr = table_ptr + page * _WORDS
    settings_ptr += page * (2 * _WORDS) + _SETTINGS
    task = tl.load(row_ptr + 2)
    loss = tl.load(verdicts_ptr + task)
    norm = tl.load(verdicts_ptr + num_tasks + task)
    # Comparisons with NaN are false, so neither NaN nor infinity passes.
    if (tl.abs(loss) < float("inf")) & (tl.abs(norm) < float("inf")):
        numel = tl.load(row_ptr + 1)
        if ALIGNED:
            numel = tl.multiple_of(numel, 8)
        lane = (block - tl.load(row_ptr)) * BLOCK + tl.arange(0, BLOCK)
        mask = lane < numel
        values_ptr = _pointer(row_ptr + _ADDRESSES, DTYPE, ALIGNED) + lane
        gradient_ptr = _pointer(row_ptr + _ADDRESSES + 1, DTYPE, ALIGNED) + lane
        mean_ptr = _pointer(row_ptr + _ADDRESSES + 2, DTYPE, ALIGNED) + lane
        square_ptr = _pointer(row_ptr + _ADDRESSES + 3, DTYPE, ALIGNED) + lane
        last_good_ptr = _pointer(row_ptr + _ADDRESSES + 4, DTYPE, ALIGNED) + lane
        before = tl.load(values_ptr, mask=mask, other=0.0)
        gradient = tl.load(gradient_ptr, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr, mask=mask, other=0.0).to(tl.float32)
        square = tl.load(square_ptr, mask=mask, other=0.0).to(tl.float32)

        max_norm = tl.load(settings_ptr + 7)
        if max_norm > 0.0:  # 1e-6 is what `torch.nn.utils.clip_grads_with_norm_` adds
            # Rounded to the page's dtype, because torch stores the clipped gradient.
            gradient = (gradient * tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0)).to(DTYPE).to(tl.float32)
        # Products and sums are fused where torch's CUDA operators fuse them, and nowhere else.
        mean_weight = tl.load(settings_ptr + 1)
        change = gradient - mean
        near_mean = tl.fma(mean_weight, change, mean)
        # As in `lerp`: with a weight of 1 the mean is exactly the gradient.
        mean = tl.where(mean_weight < 0.5, near_mean, tl.fma(mean_weight - 1.0, change, gradient))
        square = tl.fma(tl.load(settings_ptr + 3), gradient * gradient, square * tl.load(settings_ptr + 2))
        # Roots and quotients are rounded correctly, as in torch; those that GPUs compute faster are not.
        denominator = tl.div_rn(tl.sqrt_rn(square), tl.load(settings_ptr + 6)) + tl.load(settings_ptr + 4)
        decayed = before.to(tl.float32) * tl.load(settings_ptr)
        values = tl.fma(-tl.load(settings_ptr + 5), tl.div_rn(mean, denominator), decayed)

        # First, because it is the memory of the weights if none are kept.
        tl.store(last_good_ptr, before, mask=mask)
        tl.store(values_ptr, values.to(DTYPE), mask=mask)
        tl.store(mean_ptr, mean.to(DTYPE), mask=mask)
        tl.store(square_ptr, square.to(DTYPE), mask=mask)
        tl.store(gradient_ptr, tl.zeros_like(before), mask=mask)


def launch(table: np.ndarray, verdicts_2N: torch.Tensor, dtype: torch.dtype, num_blocks: int) -> None:
    """Start the update of pages of one dtype, without waiting for the device.

    Args:
        table: int64 `[pages, 12]`, on the host.
        verdicts_2N: contiguous fp32 `[2, N]` on the device, loss and gradient norm of each task.
        dtype: of the pages.
        num_blocks: blocks of all pages.
    """
    on_device = copy_to_device(table, torch.empty(table.shape, dtype=torch.int64, device=verdicts_2N.device))
    with torch.cuda.device_of(verdicts_2N):  # Triton launches on the current device, which may not hold the tensors
        adamw_kernel[(num_blocks,)](
            on_device,
            on_device.view(torch.float32),
            verdicts_2N,
            len(table),
            verdicts_2N.shape[1],
            DTYPE=_TYPES[dtype],
            BLOCK=BLOCK,
            ALIGNED=not (table[:, 3:8] % 16).any() and not (table[:, 1] % 8).any(),
            num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue] - of the launch, not of the kernel
            enable_fp_fusion=False,  # pyright: ignore[reportCallIssue]
        )
