"""The loss that a user writes: `Task(objective=my_function)`, run under the guard of `own_code`.

The function's own backward runs at once, up to the log-probabilities that it was given; so whatever it raises, there or
in its forward, fails its task alone, and never the backward pass that all tasks share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.errors import DataError, shown
from peft_mux.modeling.objectives.arguments import LossArgs
from peft_mux.modeling.objectives.language_head import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import OWN, BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import TaskLoss, TokenOutputs
from peft_mux.own_code import own_code


@dataclass(frozen=True, kw_only=True)
class OwnArgs(LossArgs):
    """Arguments of a function of the task's own.

    Attributes:
        function: takes `TokenOutputs`; returns a scalar that is this micro-batch's part of the mean over the global
            batch (`outputs.mean_over_rows(...)`, `outputs.mean_over_tokens(...)`), or a term of each target, `[M]`,
            whose mean over the targets of the global batch is the loss.
        needs_reference: whether `outputs.reference_logprobs_M` shall be there.
    """

    function: Callable[[Any], Any]
    needs_reference: bool = False


class OwnLoss(BaseObjective):
    """Whatever a function makes of the log-probabilities of a task's targets; rows are never split among passes."""

    name = OWN
    loss_types = ("own",)
    head = LANGUAGE_HEAD
    row_form = replace(LANGUAGE_ROWS, is_one_term=True)
    Args = OwnArgs

    def needs_reference(self, args: OwnArgs) -> bool:
        """Return what the task says."""
        return args.needs_reference

    def loss(self, outputs: TokenOutputs, args: OwnArgs) -> TaskLoss:
        """Return what the function makes of the targets.

        Raises:
            OwnCodeError: whatever the function raises, or what is wrong with what it returns.
        """
        with own_code(outputs.task, "objective"), torch.enable_grad():
            nll_M = outputs.nll_M.detach().requires_grad_()
            loss = _checked(args.function(replace(outputs, nll_M=nll_M)), outputs)
            gradient_M = None
            if loss.requires_grad and outputs.nll_M.requires_grad:
                (gradient_M,) = torch.autograd.grad(loss, nll_M, allow_unused=True)
            gradient_M = torch.zeros_like(nll_M) if gradient_M is None else gradient_M
        return TaskLoss(_WithGradient.apply(outputs.nll_M, loss.detach(), gradient_M))


def _checked(value: Any, outputs: TokenOutputs) -> torch.Tensor:
    """Return what a function has returned as the scalar that it stands for."""
    num_targets = len(outputs.nll_M)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        if value.ndim == 0:
            return value.float()
        if value.shape == (num_targets,):
            return outputs.mean_over_tokens(value.float())
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
    raise DataError(
        f"the objective returned {got}; allowed: a scalar of floats, or one term for each of the {num_targets} "
        "targets. Return outputs.mean_over_rows(terms) for one term a row."
    )


class _WithGradient(torch.autograd.Function):
    """A number with a gradient that is known already."""

    @staticmethod
    def forward(ctx: Any, nll_M: torch.Tensor, loss: torch.Tensor, gradient_M: torch.Tensor) -> torch.Tensor:
        """Return the number."""
        ctx.save_for_backward(gradient_M)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient, times what flows into the number."""
        (gradient_M,) = ctx.saved_tensors
        return gradient_M * d_loss, None, None


register_objective(OwnLoss())
