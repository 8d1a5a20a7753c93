"""Gates of Diff Pruning: the hard-concrete distribution and how many of its draws are not zero.

    s = sigmoid(log u - log(1 - u) + alpha)        z = min(1, max(0, s * (upper - lower) + lower))
    E[z > 0] = sigmoid(alpha - log(-lower / upper))

Shape letters: K output features, D input features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch


class Stretch(NamedTuple):
    """The interval that draws are stretched to before they are cut off at 0 and 1.

    Attributes:
        lower: its beginning, below 0.
        upper: its end, above 1.
    """

    lower: float
    upper: float


class Relaxed(NamedTuple):
    """The trained tensors of one target.

    Attributes:
        delta_KD: what is added to the weight where a gate is open.
        alpha_KD: location of each element's gate.
        row_alpha_K: location of each row's gate; `None` where rows have none.
    """

    delta_KD: torch.Tensor
    alpha_KD: torch.Tensor
    row_alpha_K: torch.Tensor | None = None


class Noise(NamedTuple):
    """What moves the locations of gates when they are drawn: `log u - log(1 - u)`, for `u` uniform in (0, 1).

    Attributes:
        noise_KD: one for each element.
        noise_K: one for each row; `None` where rows have no gate.
    """

    noise_KD: torch.Tensor
    noise_K: torch.Tensor | None = None


def gates(alpha: torch.Tensor, stretch: Stretch, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Return gates in [0, 1] of the shape of `alpha`.

    Args:
        alpha: their locations.
        stretch: the interval of the distribution.
        noise: what moves them, of the same shape; `None` for nothing.
    """
    # In place where autograd keeps nothing of what is written over: each tensor here is as large as a weight.
    opened = torch.sigmoid(alpha) if noise is None else (alpha + noise).sigmoid_()
    stretched = (opened * (stretch.upper - stretch.lower)).add_(stretch.lower)
    return stretched.clamp(0.0, 1.0) if torch.is_grad_enabled() else stretched.clamp_(0.0, 1.0)


def gated_delta(parts: Relaxed, stretch: Stretch, noise: Noise | None = None) -> torch.Tensor:
    """Return what is added to the weight: `[K, D]`.

    Args:
        parts: the trained tensors.
        stretch: the interval of the distribution.
        noise: what the gates are drawn with; `None` for those of no noise.
    """
    delta_KD = parts.delta_KD * gates(parts.alpha_KD, stretch, None if noise is None else noise.noise_KD)
    if parts.row_alpha_K is None:
        return delta_KD
    rows_K = gates(parts.row_alpha_K, stretch, None if noise is None else noise.noise_K)
    return delta_KD * rows_K[:, None]


def expected_l0(parts: Relaxed, stretch: Stretch) -> torch.Tensor:
    """Return how many elements of the difference are to be expected other than zero, as a scalar."""
    shift = math.log(-stretch.lower / stretch.upper)
    open_KD = torch.sigmoid(parts.alpha_KD - shift)
    if parts.row_alpha_K is None:
        return open_KD.sum()
    # Both gates have to be open, and they are drawn apart.
    return (open_KD.sum(1) * torch.sigmoid(parts.row_alpha_K - shift)).sum()


def greatest(deltas: Mapping[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Return which elements are kept of each difference: those of greatest magnitude over all.

    It is the L0-ball projection of the paper.

    Args:
        deltas: differences by name, of any shapes.
        share: share of all elements that is kept; at least one is.

    Returns:
        int32 places within each difference taken row by row, ascending.
    """
    count = max(1, round(share * sum(delta.numel() for delta in deltas.values())))
    best = {name: _best(delta, count) for name, delta in deltas.items()}
    # Of all differences only the best of each can be among the best of all, so they are never laid side by side.
    magnitudes = torch.cat([values for values, _ in best.values()])
    chosen = torch.zeros(len(magnitudes), dtype=torch.bool)
    chosen[magnitudes.topk(count).indices] = True
    parts = chosen.split([len(values) for values, _ in best.values()])
    return {
        name: places[is_chosen].sort().values.to(torch.int32)
        for (name, (_, places)), is_chosen in zip(best.items(), parts, strict=True)
    }


def _best(delta: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    magnitudes = delta.detach().flatten().abs().float()
    values, places = magnitudes.topk(min(count, len(magnitudes)))
    return values.cpu(), places.cpu()


def total(scalars: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of scalars, of which there is one at least."""
    return torch.stack(list(scalars)).sum()
