"""The loss of causal language models: the negative log-likelihood of every target token.

Rows may weigh their targets: `weights` w of a token, or several `target_ids` of a token with `target_weights`. Then the
loss of a step is the weighted mean over its global batch, `sum(w * nll) / sum(w)`.
"""

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
    is_default = True
    uses_totals = False
    eager_reason = None

    def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
        """Return the sum over the targets, divided by the number or the weights of the targets of the global batch."""
        if "weights" in outputs.columns:
            weights_M = outputs.columns["weights"]
            return TaskLoss((outputs.nll_M * weights_M).sum() / (outputs.totals["weights"] or 1.0))
        if outputs.word_logprobs_MK is not None:
            weights_MK = outputs.columns["target_weights"]
            return TaskLoss(-(outputs.word_logprobs_MK * weights_MK).sum() / (outputs.totals["target_weights"] or 1.0))
        return TaskLoss(outputs.nll_M.sum() * outputs.loss_weight)

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss and its exponential, the perplexity."""
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, _GREATEST_EXPONENT))}

    def metric_names(self, args: LossArgs) -> tuple[str, ...]:
        """Return the names of these two."""
        return ("eval_loss", "eval_perplexity")


register_objective(LanguageLoss())
