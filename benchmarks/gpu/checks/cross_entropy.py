"""Checks of `benchmarks.gpu`: fused cross entropy against float64, and each row alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.problem import TOLERANCES, relative_error


def cross_entropy_rows(settings: Settings) -> Iterator[Row]:
    """Yield losses and gradients of each dtype."""
    from peft_mux.kernels.cross_entropy.logits_kernel import cross_entropy_, row_stride

    num_rows, vocab_size = (5, 97) if settings.is_rehearsal else (300, 128256)
    for dtype in (torch.float32,) if settings.is_rehearsal else (torch.bfloat16, torch.float32):
        storage = 3 * torch.randn(num_rows, row_stride(vocab_size), device=settings.device)
        logits = storage.to(dtype)[:, :vocab_size]
        targets = torch.randint(vocab_size, (num_rows,), device=settings.device)
        leaf = logits.double().requires_grad_()
        wanted = F.cross_entropy(leaf, targets, reduction="none")
        (gradient,) = torch.autograd.grad(wanted.sum(), leaf)
        mine = logits.clone()
        losses = cross_entropy_(mine, targets)
        single = logits[2:3].clone()
        same = torch.equal(cross_entropy_(single, targets[2:3]), losses[2:3]) and torch.equal(single, mine[2:3])
        found = {"loss": relative_error(losses, wanted.detach()), "gradient": relative_error(mine, gradient)}
        is_right = found["loss"] <= 1e-5 and found["gradient"] <= TOLERANCES[dtype] and same
        kind = str(dtype).removeprefix("torch.")
        yield f"cross entropy {kind}", {**found, "is_same_alone": same, "is_right": is_right}
