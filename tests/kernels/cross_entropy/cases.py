"""Heads and errors that the tests of cross-entropy share."""

from __future__ import annotations

from typing import Any

import torch

TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.25},
    "soft-cap": {"softcap": 2.0},
    "scale and soft-cap": {"scale": 3.0, "softcap": 1.5},
}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the second (absolute where that is 0)."""
    return ((found.double() - wanted.double()).norm() / (wanted.double().norm() or 1.0)).item()
