"""One AdamW step for the pages of all tasks together, each as its own `torch.optim.AdamW` would take it.

On CUDA this is one Triton launch (`device.py`), or, where kernels cannot run, torch's multi-tensor operations
with a number per tensor. On a CPU nothing is joined: torch's fused step of one page is one pass at the speed of memory,
and handing it all pages at once was measured to be no faster, so each task's own optimizer steps there.

Shape letters: N tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from peft_mux.kernels.adamw.pages import PageUpdate
from peft_mux.kernels.availability import runs_kernels

JointUpdate = Callable[[Sequence[PageUpdate], torch.Tensor], list[list[float]]]


def joint_update(device: torch.device) -> JointUpdate | None:
    """Return what updates the pages of many tasks on a device at once; `None` where each task does so by itself.

    It takes the pages and the verdicts: fp32 `[2, N]` on the device, loss and gradient norm of each task. It returns
    the verdicts as numbers, for which it waits once, and leaves the pages of tasks that are not finite untouched.
    """
    if device.type != "cuda":
        return None
    return kernel_update if runs_kernels(device) else foreach_update


def kernel_update(pages: Sequence[PageUpdate], verdicts_2N: torch.Tensor) -> list[list[float]]:
    """Launch first and wait then: the kernel reads the verdicts where they are."""
    if pages:
        _device_kernel()(pages, verdicts_2N)
    return verdicts_2N.tolist()


def _device_kernel() -> Callable[[Sequence[PageUpdate], torch.Tensor], None]:
    """Return the launcher of the kernel."""
    # Imported here, as it needs Triton, without which this file has to be importable.
    from peft_mux.kernels.adamw.device import multi_adamw_

    return multi_adamw_


def foreach_update(pages: Sequence[PageUpdate], verdicts_2N: torch.Tensor) -> list[list[float]]:
    """Wait first: which tensors take part is the host's to say."""
    verdicts = verdicts_2N.tolist()
    reference_multi_adamw_(pages, verdicts)
    return verdicts


@torch.no_grad()
def reference_multi_adamw_(pages: Sequence[PageUpdate], verdicts: Sequence[Sequence[float]]) -> None:
    """Step every page whose task has a finite loss and norm, in torch's multi-tensor operations.

    Args:
        pages: the pages of all tasks that step now.
        verdicts: two rows of N numbers, the loss and the gradient norm of each task.
    """
    # In fp32, in which the kernel and torch clip too.
    losses, norms = (np.asarray(row, dtype=np.float32) for row in verdicts)
    groups: dict[object, list[PageUpdate]] = defaultdict(list)
    for page in pages:
        if np.isfinite(losses[page.task]) and np.isfinite(norms[page.task]):
            groups[page.values.dtype, page.betas, page.eps].append(page)
    for group in groups.values():
        _step_group(group, [_clip_factor(page.max_grad_norm, norms[page.task]) for page in group])


def _clip_factor(max_norm: float, norm: np.float32) -> float:
    """Return what `clip_grads_with_norm_` multiplies gradients by, rounded where it rounds."""
    return min(1.0, float(np.float32(max_norm) / (norm + np.float32(1e-6)))) if max_norm > 0 else 1.0


def _step_group(pages: list[PageUpdate], clip_factors: list[float]) -> None:
    """Step pages of one dtype, betas and epsilon: what differs between them has operations with a number per tensor."""
    columns = zip(*(page.tensors for page in pages), strict=True)
    values, gradients, exp_avgs, exp_avg_sqs, last_good = (list(column) for column in columns)
    (beta1, beta2), eps = pages[0].betas, pages[0].eps
    # The order of operations is that of `torch.optim.AdamW`, so that each page gets the bits of a step of its own.
    torch._foreach_copy_(last_good, values)
    # Left out where nothing is clipped: products by 1 would read and write all gradients for nothing.
    if min(clip_factors) < 1:
        torch._foreach_mul_(gradients, clip_factors)
    torch._foreach_mul_(values, [page.shrink for page in pages])
    torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, [page.square_correction for page in pages])
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(values, exp_avgs, denominators, [-page.step_size for page in pages])
    torch._foreach_zero_(gradients)


def total_norms(gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the 2-norm of each task's gradients, in one call over all tasks and without waiting for the device.

    Args:
        gradients: for each task, the gradients of all its parameters.

    Returns:
        A scalar for each task (on the CPU if it has no gradients), as `torch.nn.utils.get_total_norm` computes it for
        this task alone.
    """
    by_kind: dict[object, list[torch.Tensor]] = defaultdict(list)
    for tensors in gradients:
        for tensor in tensors:
            by_kind[tensor.device, tensor.dtype].append(tensor)
    # One call a dtype: tensors of several would be gone through one by one.
    norms = {kind: iter(torch._foreach_norm(tensors, 2.0)) for kind, tensors in by_kind.items()}
    parts = [[next(norms[tensor.device, tensor.dtype]) for tensor in tensors] for tensors in gradients]
    return [_norm_of_norms(own) for own in parts]


def _norm_of_norms(norms: list[torch.Tensor]) -> torch.Tensor:
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), 2.0)
