"""The loss of causal language models: the negative log-likelihood of every target token."""

from __future__ import annotations

import math
from collections.abc import Mapping

from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.modeling.objectives.arguments import LossArgs
from peft_mux.modeling.objectives.language_head import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import TaskLoss, TokenOutputs

_GREATEST_EXPONENT = 700.0
"""Just below the natural logarithm of the greatest float, about 709.8."""


class LanguageLoss(BaseObjective):
    """Mean negative log-likelihood of the target tokens (supervised fine-tuning)."""

    name = "sft"
    loss_types = ("nll",)
    head = LANGUAGE_HEAD
    row_form = LANGUAGE_ROWS
    uses_totals = False
    eager_reason = None

    def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
        """Return the sum over the targets, divided by the number of targets of the global batch."""
        return TaskLoss(outputs.nll_M.sum() * outputs.loss_weight)

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss and its exponential, the perplexity."""
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, _GREATEST_EXPONENT))}

    def metric_names(self, args: LossArgs) -> tuple[str, ...]:
        """Return the names of these two."""
        return ("eval_loss", "eval_perplexity")


register_objective(LanguageLoss())
