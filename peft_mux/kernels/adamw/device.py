"""One AdamW step of all pages of all tasks in one launch: gradients, weights and moments move through memory once.

A table with one row a page says where its tensors lie and how its task steps. A program finds its page by the first
blocks of the rows, and reads from the device whether the task may step and how far its gradient is clipped, so that
the launch waits for nothing. In the same pass the weights are copied before they change, and the gradient is zeroed.

    program | 0       1       2       3         4       5
    page    | task 0  task 0  task 1  task 1's  task 2  task 2
    first   | 0               2       3         4

A row of the table (words of 8 bytes; the settings are fp32, two in a word):

    first block | elements | task | 5 addresses | 8 settings

Importing this file imports Triton; only the caller that has chosen it does so.

Shape letters: N tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from peft_mux.kernels.adamw.pages import DTYPES as PAGE_DTYPES
from peft_mux.kernels.adamw.pages import PageUpdate

DTYPES = dict(zip(PAGE_DTYPES, (tl.float32, tl.bfloat16, tl.float16), strict=True))
"""What pages may be held in; the arithmetic is fp32 in any case."""

BLOCK = 2048
NUM_WARPS = 8

_WORDS = tl.constexpr(12)
_ADDRESSES = tl.constexpr(3)
_SETTINGS = tl.constexpr(16)  # counted in fp32 numbers


@triton.jit
def _tensor_at(address_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer whose address lies in the table."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]
    if ALIGNED:  # not known of an address that was loaded, and needed for accesses of 16 bytes
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointer, lanes, numel, FULL: tl.constexpr):
    """Return the elements `lanes` of a page, 0 beyond its end."""
    if FULL:  # a mask by a number of elements that is no known multiple would split the access
        return tl.load(pointer + lanes)
    return tl.load(pointer + lanes, mask=lanes < numel, other=0.0)


@triton.jit
def _store(pointer, lanes, value, numel, FULL: tl.constexpr):
    """Write the elements `lanes` of a page, and nothing beyond its end."""
    if FULL:
        tl.store(pointer + lanes, value)
    else:
        tl.store(pointer + lanes, value, mask=lanes < numel)


@triton.jit
def _update_block(
    row_ptr, settings_ptr, factor, lanes, numel, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr
):
    """Update the elements `lanes` of a page, as `torch.optim.AdamW` does, in its order of operations."""
    values_ptr = _tensor_at(row_ptr + _ADDRESSES, DTYPE, ALIGNED)
    gradient_ptr = _tensor_at(row_ptr + _ADDRESSES + 1, DTYPE, ALIGNED)
    mean_ptr = _tensor_at(row_ptr + _ADDRESSES + 2, DTYPE, ALIGNED)
    square_ptr = _tensor_at(row_ptr + _ADDRESSES + 3, DTYPE, ALIGNED)
    copy_ptr = _tensor_at(row_ptr + _ADDRESSES + 4, DTYPE, ALIGNED)
    shrink = tl.load(settings_ptr)
    mean_weight = tl.load(settings_ptr + 1)
    square_decay = tl.load(settings_ptr + 2)
    square_weight = tl.load(settings_ptr + 3)
    eps = tl.load(settings_ptr + 4)
    step_size = tl.load(settings_ptr + 5)
    square_correction = tl.load(settings_ptr + 6)

    before = _load(values_ptr, lanes, numel, FULL)
    raw_gradient = _load(gradient_ptr, lanes, numel, FULL)
    mean = _load(mean_ptr, lanes, numel, FULL).to(tl.float32)
    square = _load(square_ptr, lanes, numel, FULL).to(tl.float32)
    # The clipped gradient exists in the dtype of the page where clipping is an operation of its own.
    gradient = (raw_gradient.to(tl.float32) * factor).to(DTYPE).to(tl.float32)

    change = gradient - mean
    # As torch's lerp: with a weight of 1 the mean is the gradient exactly.
    mean = tl.where(mean_weight < 0.5, mean + mean_weight * change, gradient - change * (1.0 - mean_weight))
    square = square * square_decay + gradient * gradient * square_weight
    # Root and quotients are rounded as IEEE asks and as torch does: the fast ones of a GPU are off by a bit or two.
    denominator = tl.div_rn(tl.sqrt_rn(square), square_correction) + eps
    values = before.to(tl.float32) * shrink - step_size * tl.div_rn(mean, denominator)

    _store(copy_ptr, lanes, before, numel, FULL)
    _store(values_ptr, lanes, values.to(DTYPE), numel, FULL)
    _store(mean_ptr, lanes, mean.to(DTYPE), numel, FULL)
    _store(square_ptr, lanes, square.to(DTYPE), numel, FULL)
    # Zeroed while it is at hand: the next backward pass adds to what is there.
    _store(gradient_ptr, lanes, tl.zeros_like(raw_gradient), numel, FULL)


# Not specialised: Triton would compile anew for counts of 1 and multiples of 16, as tasks come and go.
@triton.jit(do_not_specialize=["num_pages", "num_tasks"])
def multi_adamw_kernel(
    table_ptr,
    settings_ptr,
    verdicts_ptr,
    num_pages,
    num_tasks,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update one block of a page, if the page's task may step."""
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
    page_settings_ptr = settings_ptr + page * (2 * _WORDS) + _SETTINGS

    task = tl.load(row_ptr + 2)
    loss = tl.load(verdicts_ptr + task)
    norm = tl.load(verdicts_ptr + num_tasks + task)
    # Comparisons with NaN are false, so that neither NaN nor infinity passes.
    if (tl.abs(loss) < float("inf")) & (tl.abs(norm) < float("inf")):
        max_norm = tl.load(page_settings_ptr + 7)
        # 1e-6 is what `torch.nn.utils.clip_grads_with_norm_` adds.
        factor = tl.where(max_norm > 0.0, tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0), 1.0)
        start = (block - tl.load(row_ptr)) * BLOCK
        numel = tl.load(row_ptr + 1)
        lanes = start + tl.arange(0, BLOCK)
        if start + BLOCK <= numel:
            _update_block(row_ptr, page_settings_ptr, factor, lanes, numel, DTYPE, ALIGNED, True)  # pyright: ignore[reportArgumentType]
        else:
            _update_block(row_ptr, page_settings_ptr, factor, lanes, numel, DTYPE, ALIGNED, False)  # pyright: ignore[reportArgumentType]


def multi_adamw_(pages: Sequence[PageUpdate], verdicts_2N: torch.Tensor) -> None:
    """Step every page whose task has a finite loss and norm; the others stay bit for bit.

    Args:
        pages: the pages of all tasks that step now, on one device; the tensors of a page are contiguous and have one
            dtype.
        verdicts_2N: contiguous fp32 `[2, N]` on that device, loss and gradient norm of each task.

    Raises:
        ValueError: if a dtype, a size or a layout is not as above.
    """
    _check(pages, verdicts_2N)
    for dtype in dict.fromkeys(page.values.dtype for page in pages):
        _launch([page for page in pages if page.values.dtype == dtype], verdicts_2N, DTYPES[dtype])


def _launch(pages: list[PageUpdate], verdicts_2N: torch.Tensor, dtype: tl.dtype) -> None:
    """Step pages of one dtype."""
    table, num_blocks, is_aligned = build_table(pages)
    if num_blocks == 0:
        return
    device = verdicts_2N.device
    if device.type == "cuda":
        # Pinned memory comes from a cache that gives no part out again before the copy from it is done.
        table = table.pin_memory().to(device, non_blocking=True)
    with torch.cuda.device_of(verdicts_2N):  # Triton launches on the current device, whatever the tensors are on
        multi_adamw_kernel[(num_blocks,)](
            table,
            table.view(torch.float32),
            verdicts_2N,
            len(pages),
            verdicts_2N.shape[1],
            DTYPE=dtype,
            BLOCK=BLOCK,
            ALIGNED=is_aligned,
            num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue] - of the launch, not of the kernel
        )


def build_table(pages: Sequence[PageUpdate]) -> tuple[torch.Tensor, int, bool]:
    """Return the table of these pages, on the host.

    Returns:
        int64 `[pages, 12]`, the number of blocks of all pages, and whether all addresses are multiples of 16 bytes.
    """
    table = np.zeros((len(pages), _WORDS.value), dtype=np.int64)
    settings = table.view(np.float32)[:, _SETTINGS.value :]
    num_blocks = 0
    for row, row_settings, page in zip(table, settings, pages, strict=True):
        row[:8] = (num_blocks, page.values.numel(), page.task, *(tensor.data_ptr() for tensor in page.tensors))
        row_settings[:] = page.settings()
        num_blocks += triton.cdiv(page.values.numel(), BLOCK)
    return torch.from_numpy(table), num_blocks, not (table[:, 3:8] % 16).any()


def _check(pages: Sequence[PageUpdate], verdicts_2N: torch.Tensor) -> None:
    if verdicts_2N.ndim != 2 or len(verdicts_2N) != 2 or not verdicts_2N.is_contiguous():
        raise ValueError(f"verdicts have shape {tuple(verdicts_2N.shape)}; allowed: contiguous [2, tasks].")
    if verdicts_2N.dtype != torch.float32:
        raise ValueError(f"verdicts are {verdicts_2N.dtype}; allowed: float32.")
    for page in pages:
        kinds = {(tensor.dtype, tensor.device, tensor.numel()) for tensor in page.tensors}
        if len(kinds) != 1 or page.values.dtype not in DTYPES or page.values.device != verdicts_2N.device:
            raise ValueError(
                f"a page of task {page.task} has tensors of {sorted(map(str, kinds))}; allowed: one dtype of bf16, "
                "fp16 and fp32, one size, and the device of the verdicts."
            )
        if not all(tensor.is_contiguous() for tensor in page.tensors):
            raise ValueError(f"a page of task {page.task} has a tensor that is not contiguous; allowed: contiguous.")
        if not 0 <= page.task < verdicts_2N.shape[1]:
            raise ValueError(f"a page is of task {page.task}; allowed: 0 to {verdicts_2N.shape[1] - 1}.")
