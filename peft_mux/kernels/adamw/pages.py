"""What one update needs to know of one page: a flat tensor that holds parameters of one task."""

from __future__ import annotations

from typing import NamedTuple

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What pages that step jointly may be held in."""


class PageUpdate(NamedTuple):
    """What the update of one page reads and writes.

    Attributes:
        values: the weights, 1-D; the other tensors have their size, dtype and device.
        gradient: the gradient of the weights, zeroed by the update.
        exp_avg: the first moment, updated in place.
        exp_avg_sq: the second moment, updated in place.
        last_good: takes the weights as they are before the update.
        task: column of the task's loss and gradient norm among the verdicts.
        step: number of this update; 1 for the first.
        rate: learning rate of this update.
        betas: decay of the two moments, each in [0, 1).
        eps: what is added to the denominator.
        weight_decay: decoupled weight decay, which the rate multiplies.
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

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in the order of the attributes."""
        return self[:5]

    @property
    def shrink(self) -> float:
        """What weight decay multiplies the weights by."""
        return 1 - self.rate * self.weight_decay

    @property
    def step_size(self) -> float:
        """Rate over the bias correction of the first moment, in float64 as torch has it."""
        return self.rate / (1 - self.betas[0] ** self.step)

    @property
    def square_correction(self) -> float:
        """Root of the bias correction of the second moment."""
        return (1 - self.betas[1] ** self.step) ** 0.5

    def settings(self) -> tuple[float, ...]:
        """Return the eight numbers that the kernel computes with."""
        beta1, beta2 = self.betas
        # Differences from 1 are taken here in float64: in fp32, 1 - 0.999 would keep only four digits.
        return (
            self.shrink,
            1 - beta1,
            beta2,
            1 - beta2,
            self.eps,
            self.step_size,
            self.square_correction,
            self.max_grad_norm,
        )
