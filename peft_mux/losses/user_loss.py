"""The loss that a user writes: `Task(objective=my_function)`, run under the guard of `guard_user_code`.

It is given copies, and its own backward runs at once, up to them. So whatever it raises or does to them, there or in
its forward, fails only its task, and never the backward pass that all tasks share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.errors import DataError, shown
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import OWN, LossArgs, Objective, TaskLoss, TokenOutputs, register_objective
from peft_mux.user_code import guard_user_code


@dataclass(frozen=True, kw_only=True)
class UserLossArgs(LossArgs):
    """Arguments of a user's function.

    Attributes:
        function: takes `TokenOutputs`; returns a scalar that is this micro-batch's part of the mean over the global
            batch (`outputs.mean_over_rows(...)`, `outputs.mean_over_tokens(...)`), or a term of each target, `[M]`,
            whose mean over the targets of the global batch is the loss.
        needs_reference: whether `outputs.reference_logprobs_M` is needed.
    """

    function: Callable[[Any], Any]
    needs_reference: bool = False


class UserLoss(Objective):
    """The result of a user's function for the log-probabilities of a task's targets; rows stay whole in a pass."""

    name = OWN
    loss_types = ("own",)
    head = LANGUAGE_HEAD
    row_form = replace(LANGUAGE_ROWS, is_one_term=True)
    Args = UserLossArgs

    def loss(self, outputs: TokenOutputs, args: UserLossArgs) -> TaskLoss:
        """Return the result of the function for the targets.

        Raises:
            UserCodeError: what the function raises, or what is wrong with what it returns.
        """
        words_MK = outputs.word_logprobs_MK
        given = [outputs.nll_M] if words_MK is None else [outputs.nll_M, words_MK]
        # Copies: what a function writes, resizes or frees would reach the outputs, and the backward pass, of all tasks.
        copies = _with_copies(outputs)
        nll_M, *words = leaves = [_copy_of(values).requires_grad_() for values in given]
        # Plain tensors made before, like the losses of the other tasks, whatever the function computes with, and where.
        number = outputs.nll_M.detach().new_empty(())
        gradients = [torch.zeros_like(values.detach()) for values in given]
        with guard_user_code(outputs.task, "objective"), torch.enable_grad():
            value = args.function(replace(copies, nll_M=nll_M, word_logprobs_MK=words[0] if words else None))
            for name, leaf, values in zip(("nll_M", "word_logprobs_MK"), leaves, given, strict=False):
                if leaf.shape != values.shape:
                    raise DataError(
                        f"outputs.{name} must keep its shape {list(values.shape)}, got {list(leaf.shape)}. Compute new "
                        "tensors from it instead of assigning to its data."
                    )
            num_targets = len(nll_M)
            is_floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            if is_floats and value.ndim == 0:
                loss = value.float()
            elif is_floats and value.shape == (num_targets,):
                loss = outputs.mean_over_tokens(value.float())
            else:
                got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
                raise DataError(
                    f"the objective must return a scalar of floats, or one term for each of the {num_targets} "
                    f"targets, got {got}. Return outputs.mean_over_rows(terms) for one term per row."
                )
            if outputs.nll_M.requires_grad and num_targets:
                _require_outputs_alone(loss, leaves)
                computed = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
                for gradient, values in zip(gradients, computed, strict=True):
                    gradient.copy_(values.detach())
            number.copy_(loss.detach())
        return TaskLoss(_WithGradients.apply(number, *gradients, *given))


def _require_outputs_alone(loss: Tensor, leaves: list[Tensor]) -> None:
    """Raise a `DataError` if a loss depends on none of its inputs, or on other tensors that require a gradient.

    The loss is called once for every micro-batch and on every process that has rows, so that a penalty on weights would
    count as often.
    """
    seen, waiting, inputs = set(), [loss.grad_fn], [loss] if loss.is_leaf and loss.requires_grad else []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if isinstance(node, torch._C._functions.AccumulateGrad):
            inputs.append(node.variable)
    others = [tensor for tensor in inputs if all(tensor is not leaf for leaf in leaves)]
    if others:
        raise DataError(
            f"the objective must be computed from its outputs alone, got one that also reads a tensor of shape "
            f"{list(others[0].shape)} that requires a gradient, such as a weight, which would get none. Detach it; "
            "weight_decay penalises weights."
        )
    if not inputs:
        raise DataError("the objective must depend on outputs.nll_M with a gradient, got one that trains nothing.")


def _with_copies(outputs: TokenOutputs) -> TokenOutputs:
    """Return outputs with copies of all tensors without gradient, and a micro-batch without the columns of rows."""
    batch = outputs.batch
    if batch is not None:
        tensors = {item.name: value for item in fields(batch) if isinstance(value := getattr(batch, item.name), Tensor)}
        copies = {name: _copy_of(value) for name, value in tensors.items()}
        batch = replace(batch, target_columns=(), row_values=(), totals=(), shared=None, **copies)
    sums = outputs.batch_values
    return replace(
        outputs,
        batch=batch,
        columns={name: _copy_of(value) for name, value in outputs.columns.items()},
        row_values={name: _copy_of(value) for name, value in outputs.row_values.items()},
        totals=dict(outputs.totals),
        batch_values=None if sums is None else _copy_of(sums),
    )


def _copy_of(values: Tensor) -> Tensor:
    """Return a copy without gradient in memory that cannot be resized: reading what was freed ends the process."""
    return torch.from_dlpack(values.detach().clone())


class _WithGradients(torch.autograd.Function):
    """A number whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *gradients_and_inputs: torch.Tensor) -> torch.Tensor:
        """Return the number; given the gradients, and after them the tensors that they are with respect to."""
        ctx.save_for_backward(*gradients_and_inputs[: len(gradients_and_inputs) // 2])
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients, times what flows into the number."""
        gradients = ctx.saved_tensors
        return None, *(None for _ in gradients), *(gradient * d_loss for gradient in gradients)


register_objective(UserLoss())
