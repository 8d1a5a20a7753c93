"""The loss of causal language models: the negative log-likelihood of every target token.

Rows may weigh their targets: `weights` w of a token, or several `target_ids` of a token with `target_weights`. Then the
loss of a step is the weighted mean over its global batch, `sum(w * nll) / sum(w)`.

With `label_smoothing_factor` epsilon, the loss is that of transformers' `LabelSmoother`: `(1 - epsilon)` times this
mean, plus epsilon times the same mean of the average over all words of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import LossArgs, Objective, TaskLoss, TokenOutputs, register_objective

_GREATEST_EXPONENT = 700.0
"""Just below the natural logarithm of the greatest float, about 709.8."""


class LanguageLoss(Objective):
    """Mean negative log-likelihood of the target tokens (supervised fine-tuning)."""

    name = "sft"
    loss_types = ("nll",)
    head = LANGUAGE_HEAD
    row_form = LANGUAGE_ROWS
    is_default = True
    uses_totals = False
    eager_reason = None
    takes_smoothing = True

    def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
        """Return the sum over the targets, divided by the number or the weights of the targets of the global batch."""
        if "weights" in outputs.columns or outputs.word_logprobs_MK is None:
            nll = self._mean(outputs, outputs.nll_M)
        else:
            weighted_MK = outputs.word_logprobs_MK * outputs.columns["target_weights"]
            nll = -weighted_MK.sum() / (outputs.totals["target_weights"] or 1.0)
        share = args.label_smoothing_factor
        if not share:
            return TaskLoss(nll)
        assert outputs.spread_M is not None, "the head is told which tasks smooth their labels"
        of_all_words = self._mean(outputs, outputs.nll_M + outputs.spread_M)
        return TaskLoss((1 - share) * nll + share * of_all_words, nll.detach()[None])

    def _mean(self, outputs: TokenOutputs, terms_M: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's part of the mean of terms, each with the weight of its target."""
        if "weights" in outputs.columns:
            return (terms_M * outputs.columns["weights"]).sum() / (outputs.totals["weights"] or 1.0)
        if outputs.word_logprobs_MK is not None:
            weights_M = outputs.columns["target_weights"].sum(dim=1)
            return (terms_M * weights_M).sum() / (outputs.totals["target_weights"] or 1.0)
        return terms_M.sum() * outputs.loss_weight

    def statistic_names(self, args: LossArgs) -> tuple[str, ...]:
        """Return the name of the mean without smoothing, if the loss is another one."""
        return ("nll",) if args.label_smoothing_factor else ()

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss, and the exponential of the mean negative log-likelihood, the perplexity."""
        nll = statistics.get("nll", loss)
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(nll, _GREATEST_EXPONENT))}

    def metric_names(self, args: LossArgs) -> tuple[str, ...]:
        """Return the names of these two."""
        return ("eval_loss", "eval_perplexity")


register_objective(LanguageLoss())
