"""What keeps a task's numerical failure its own: verdicts before any step, and a way back (promise 2 of the design).

A step is taken only when a task's loss and gradient norm are both finite. The weights that passed this test are kept
aside before the step changes them, so that a task whose step blew it up can be put back to its last good adapter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class LastGood:
    """A copy of a task's weights from when its loss and gradients were last seen to be finite.

    Args:
        parameters: the task's parameters by name; copied at once when they are finite.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the initial weights."""
        self._parameters = dict(parameters)
        # The initial weights are good: a task that fails at its first step goes back to them.
        self._copy = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def keep(self) -> None:
        """Take over the present weights, which have just proven good."""
        # In place, as updates and checkpoints hold these very tensors.
        torch._foreach_copy_(list(self._copy.values()), [p.detach() for p in self._parameters.values()])

    @torch.no_grad()
    def restore(self) -> None:
        """Put the kept weights back."""
        torch._foreach_copy_([p.detach() for p in self._parameters.values()], list(self._copy.values()))

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the kept copy of a parameter, for an update that keeps and steps in one pass.

        Raises:
            KeyError: if the parameter is not among those that are kept.
        """
        for name, own in self._parameters.items():
            if own is parameter:
                return self._copy[name]
        raise KeyError("the parameter is not among those of this task")

    def state(self) -> dict[str, torch.Tensor]:
        """Return the kept weights by name."""
        return self._copy

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over weights that `state` returned."""
        for name, tensor in self._copy.items():
            tensor.copy_(state[name])


def non_finite_reason(loss: float, gradient_norm: float) -> str | None:
    """Return why a task must not step, or `None` when its loss and gradient norm are finite."""
    for what, value in (("loss", loss), ("gradient norm", gradient_norm)):
        if value != value or value in (float("inf"), float("-inf")):
            return f"non_finite: {what} is {value}"
    return None
