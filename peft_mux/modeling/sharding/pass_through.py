"""Modules that stand where a stage of a pipeline holds nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PassThrough(nn.Module):
    """Stands where a module of another stage was: returns what it is given first."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `hidden_states`."""
        return hidden_states


class NoPositions(nn.Module):
    """Stands for learned positions behind the first stage, where hidden states hold them already.

    Args:
        dtype: dtype of the hidden states, so that adding zero promotes nothing.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Remember the dtype."""
        super().__init__()
        self.dtype = dtype

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return a scalar zero."""
        # A scalar: it is added to hidden states of any shape.
        return torch.zeros((), dtype=self.dtype, device=position_ids.device)
