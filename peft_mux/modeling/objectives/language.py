"""The loss of causal language models: the negative log-likelihood of every target token.

Rows may weigh their targets: `weights` w of a token, or several `target_ids` of a token with `target_weights`. Then the
loss of a step is the weighted mean over its global batch, `sum(w * nll) / sum(w)`.

With `dft` each term is multiplied by the probability of its target, through which no gradient flows.

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
    """Mean negative log-likelihood of the target tokens (supervised fine-tuning).

    `dft` is dynamic fine-tuning (arXiv 2508.05629), as `trl.SFTTrainer` has it.
    """

    name = "sft"
    loss_types = ("nll", "dft")
    smoothed_loss_types = ("nll",)
    head = LANGUAGE_HEAD
    row_form = LANGUAGE_ROWS
    is_default = True
    uses_totals = False
    balances_routers = True

    def eager_reason(self, args: LossArgs) -> str | None:
        """Return a reason if labels are smoothed or terms weighted."""
        if args.label_smoothing_factor:
            return "a task smooths its labels (label_smoothing_factor)"
        return 'a task weighs its targets by their probabilities (loss_type="dft")' if args.loss_type == "dft" else None

    def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
        """Return the sum over the targets, divided by the number or the weights of the targets of the global batch."""
        nll = self._of_targets(outputs, is_dynamic=False)
        if args.loss_type == "dft":
            return TaskLoss(self._of_targets(outputs, is_dynamic=True), nll.detach()[None])
        share = args.label_smoothing_factor
        if not share:
            return TaskLoss(nll)
        assert outputs.spread_M is not None, "the head knows which tasks smooth their labels"
        of_all_words = self._mean(outputs, outputs.nll_M + outputs.spread_M)
        return TaskLoss((1 - share) * nll + share * of_all_words, nll.detach()[None])

    def _of_targets(self, outputs: TokenOutputs, *, is_dynamic: bool) -> torch.Tensor:
        """Return this micro-batch's part of the mean over the targets, each weighed by its probability if dynamic."""
        words_MK = outputs.word_logprobs_MK
        if "weights" in outputs.columns or words_MK is None:
            nll_M = outputs.nll_M
            return self._mean(outputs, nll_M * (-nll_M.detach()).exp() if is_dynamic else nll_M)
        weighted_MK = words_MK * outputs.columns["target_weights"]
        weighted_MK = weighted_MK * words_MK.detach().exp() if is_dynamic else weighted_MK
        return -weighted_MK.sum() / (outputs.totals["target_weights"] or 1.0)

    def _mean(self, outputs: TokenOutputs, terms_M: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's part of the mean of terms, each with the weight of its target."""
        if "weights" in outputs.columns:
            return (terms_M * outputs.columns["weights"]).sum() / (outputs.totals["weights"] or 1.0)
        if outputs.word_logprobs_MK is not None:
            weights_M = outputs.columns["target_weights"].sum(dim=1)
            return (terms_M * weights_M).sum() / (outputs.totals["target_weights"] or 1.0)
        return terms_M.sum() * outputs.loss_weight

    def statistic_names(self, args: LossArgs) -> tuple[str, ...]:
        """Return the name of the plain mean, if the loss is another one."""
        return ("nll",) if args.label_smoothing_factor or args.loss_type == "dft" else ()

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss, and the exponential of the mean negative log-likelihood, the perplexity."""
        nll = statistics.get("nll", loss)
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(nll, _GREATEST_EXPONENT))}

    def metric_names(self, args: LossArgs) -> tuple[str, ...]:
        """Return the names of these two."""
        return ("eval_loss", "eval_perplexity")


register_objective(LanguageLoss())
