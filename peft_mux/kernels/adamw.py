"""One AdamW step for the pages of all tasks together, with the bits of each task's own `torch.optim.AdamW`.

On CUDA the step is one launch for all tasks (`adamw_device.py`), which reads and writes each number once; where Triton
kernels cannot run, it is one sequence of torch's multi-tensor operations. On a CPU each task's own optimizer steps,
because torch's fused step is limited by memory bandwidth and a joint step was measured to be no faster.

Shape letters: N tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from peft_mux.kernels.availability import runs_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of pages that can step jointly."""


class PageUpdate(NamedTuple):
    """What the update of one page (a flat tensor with parameters of one task) reads and writes.

    Attributes:
        values: the weights, 1-D; the other tensors have their size, dtype and device.
        gradient: the gradient of the weights, zeroed by the update.
        exp_avg: the first moment, updated in place.
        exp_avg_sq: the second moment, updated in place.
        last_good: receives a copy of the weights before the update; `values` itself for no copy.
        task: column of the task's loss and gradient norm in `verdicts_2N`.
        step: number of this update; 1 for the first.
        rate: learning rate of this update.
        betas: decay of the two moments, each in [0, 1).
        eps: the number added to the denominator.
        weight_decay: decoupled weight decay, multiplied by the rate.
        max_grad_norm: norm to which the task's gradient is clipped; 0 for no clipping.
    """

    values: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    last_good: torch.Tensor
    task: int
    step: int
    rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


JointUpdate = Callable[[Sequence[PageUpdate], torch.Tensor], list[list[float]]]


def joint_update(device: torch.device) -> JointUpdate | None:
    """Return the function that steps all tasks on a device together; `None` if each task steps by itself."""
    if device.type != "cuda":
        return None
    return kernel_update if runs_kernels(device) else foreach_update


def kernel_update(pages: Sequence[PageUpdate], verdicts_2N: torch.Tensor) -> list[list[float]]:
    """Do the same as `foreach_update` in one launch per dtype, before it waits for the verdicts.

    Rounding may differ from torch's in the last bit of each operation.
    """
    # Imported here, because it needs Triton.
    from peft_mux.kernels.adamw_device import BLOCK, launch

    for dtype in dict.fromkeys(page.values.dtype for page in pages):
        group = [page for page in pages if page.values.dtype == dtype]
        table, num_blocks = np.zeros((len(group), 12), dtype=np.int64), 0
        for row, settings, page in zip(table, table.view(np.float32)[:, 16:], group, strict=True):
            addresses = (tensor.data_ptr() for tensor in page[:5])
            row[:8] = (num_blocks, page.values.numel(), page.task, *addresses)
            beta1, beta2 = page.betas
            # Differences from 1 are taken here in float64: in fp32, 1 - 0.999 would keep only four digits.
            settings[:] = (
                1 - page.rate * page.weight_decay,
                1 - beta1,
                beta2,
                1 - beta2,
                page.eps,
                page.rate / (1 - beta1**page.step),
                (1 - beta2**page.step) ** 0.5,
                page.max_grad_norm,
            )
            num_blocks += -(-page.values.numel() // BLOCK)
        launch(table, verdicts_2N, dtype, num_blocks)
    return verdicts_2N.tolist()


@torch.no_grad()
def foreach_update(pages: Sequence[PageUpdate], verdicts_2N: torch.Tensor) -> list[list[float]]:
    """Step every page whose task has a finite loss and gradient norm; leave the other pages untouched.

    Args:
        pages: the pages of all tasks that step now.
        verdicts_2N: fp32 `[2, N]`, loss and gradient norm of each task.

    Returns:
        The verdicts as Python numbers. Reading them is the only synchronisation with the device.
    """
    verdicts = verdicts_2N.tolist()
    # In fp32, like clipping in torch.
    losses, norms = (np.asarray(row, dtype=np.float32) for row in verdicts)
    groups: dict[object, list[PageUpdate]] = defaultdict(list)
    for page in pages:
        if np.isfinite(losses[page.task]) and np.isfinite(norms[page.task]):
            groups[page.values.dtype, page.betas, page.eps].append(page)
    for group in groups.values():
        _step_group(group, norms)
    return verdicts


def _step_group(pages: list[PageUpdate], norms: np.ndarray) -> None:
    """Step pages that share dtype, betas and epsilon, in the order of operations of `torch.optim.AdamW`."""
    columns = zip(*(page[:5] for page in pages), strict=True)
    values, gradients, exp_avgs, exp_avg_sqs, last_good = (list(column) for column in columns)
    (beta1, beta2), eps = pages[0].betas, pages[0].eps
    torch._foreach_copy_(last_good, values)
    clip_factors = []
    for page in pages:
        # Rounded where `clip_grads_with_norm_` rounds.
        quotient = float(np.float32(page.max_grad_norm) / (norms[page.task] + np.float32(1e-6)))
        clip_factors.append(min(1.0, quotient) if page.max_grad_norm > 0 else 1.0)
    # Skip a multiplication by 1, which would read and write all gradients.
    if min(clip_factors) < 1:
        torch._foreach_mul_(gradients, clip_factors)
    torch._foreach_mul_(values, [1 - page.rate * page.weight_decay for page in pages])
    torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, [(1 - beta2**page.step) ** 0.5 for page in pages])
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(values, exp_avgs, denominators, [-(page.rate / (1 - beta1**page.step)) for page in pages])
    torch._foreach_zero_(gradients)


def total_norms(gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the 2-norm of each task's gradients, in one call for all tasks and without waiting for the device.

    Args:
        gradients: for each task, the gradients of all its parameters.

    Returns:
        A scalar for each task (on the CPU if it has no gradients), equal to `torch.nn.utils.get_total_norm` of this
        task alone.
    """
    by_kind: dict[object, list[torch.Tensor]] = defaultdict(list)
    for tensors in gradients:
        for tensor in tensors:
            by_kind[tensor.device, tensor.dtype].append(tensor)
    # One call per dtype, because torch processes tensors of mixed dtypes one by one.
    norms = {kind: iter(torch._foreach_norm(tensors, 2.0)) for kind, tensors in by_kind.items()}
    totals = []
    for tensors in gradients:
        parts = [next(norms[tensor.device, tensor.dtype]) for tensor in tensors]
        if len(parts) == 1:
            totals.append(parts[0])
        else:
            totals.append(torch.linalg.vector_norm(torch.stack(parts), 2.0) if parts else torch.zeros(()))
    return totals
