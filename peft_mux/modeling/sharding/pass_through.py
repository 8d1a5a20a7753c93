"""Modules that stand where a stage of a pipeline holds nothing, and where its hidden states come in and go out.

Model code may do more with embeddings than look them up, and more with the output of the last layer than normalise it
(Granite scales both). So hidden states neither come in as embeddings nor go out as the model's output: they take the
place of what the layers before would have given, and are taken from the layer behind the stage's last one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class PassThrough(nn.Module):
    """Stands where a module of another stage was: returns what it is given first.

    Args:
        like: the module whose place it takes; model code reads plain attributes off layers, such as kinds of attention.
    """

    def __init__(self, like: nn.Module | None = None) -> None:
        """Take the plain attributes over."""
        super().__init__()
        for name, value in ({} if like is None else vars(like)).items():
            if isinstance(value, (str, int, float, bool)) and not name.startswith("_"):
                setattr(self, name, value)

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

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a scalar zero."""
        # A scalar: it is added to hidden states of any shape.
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
        return torch.zeros((), dtype=self.dtype, device=given[0].device)


class Handover:
    """The hidden states that come into a pass through a stage, and those that go out; each thread has its own."""

    def __init__(self) -> None:
        """Begin without any."""
        self._own = threading.local()  # passes that run in turns are in threads of their own

    @contextmanager
    def of_pass(self, received: torch.Tensor | None) -> Iterator[None]:
        """Hold the hidden states of a pass for the time of the `with` block.

        Args:
            received: `[1, T, D]` output of the layers before; `None` where there are none.
        """
        self._own.received, self._own.given = received, None
        try:
            yield
        finally:
            self._own.received = self._own.given = None

    @property
    def received(self) -> torch.Tensor:
        """`[1, T, D]` output of the layers before."""
        return self._own.received

    @property
    def given(self) -> torch.Tensor | None:
        """`[1, T, D]` output of the stage's last layer; `None` where the model's own output is what counts."""
        return self._own.given

    @given.setter
    def given(self, hidden_states: torch.Tensor) -> None:
        self._own.given = hidden_states


class Entrance(PassThrough):
    """Stands before the first layer of a later stage: returns what the stage before gave.

    Args:
        handover: holds it.
        like: the module whose place it takes.
    """

    def __init__(self, handover: Handover, like: nn.Module) -> None:
        """Remember where hidden states lie."""
        super().__init__(like)
        self._handover = handover

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states of the stage before."""
        return self._handover.received


class Exit(PassThrough):
    """Stands behind the last layer of a stage that others follow: keeps what it is given.

    Args:
        handover: takes it.
        like: the module whose place it takes.
    """

    def __init__(self, handover: Handover, like: nn.Module) -> None:
        """Remember where hidden states go."""
        super().__init__(like)
        self._handover = handover

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep the hidden states, and return them."""
        self._handover.given = hidden_states
        return hidden_states
