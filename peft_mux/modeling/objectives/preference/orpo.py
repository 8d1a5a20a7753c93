"""`orpo`: odds ratio preference optimisation, which needs no reference.

Shape letters: M targets and R rows of a task in a micro-batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from peft_mux.data.preferences.forms import ODDS_ROWS
from peft_mux.modeling.objectives.language_head import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import TaskLoss, TokenOutputs
from peft_mux.modeling.objectives.preference.dpo import REWARD_STATISTICS, reward_statistics
from peft_mux.modeling.objectives.preference.orpo_losses import ORPOArgs, log_odds, odds_ratio_losses


class ORPOLoss(BaseObjective):
    """The loss of `trl.experimental.orpo.ORPOTrainer`: log-likelihood of the chosen rows, and odds against the others.

    The negative log-likelihood is a mean over all tokens of the chosen rows, their prompts too; the odds are of means
    over the tokens of answers.
    """

    name = "orpo"
    loss_types = ("odds_ratio",)
    Args = ORPOArgs
    head = LANGUAGE_HEAD
    row_form = ODDS_ROWS
    has_logits = False

    def statistic_names(self, args: ORPOArgs) -> tuple[str, ...]:
        """Return the rewards, the log-probabilities, and the two parts of the loss."""
        return (*REWARD_STATISTICS, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def loss(self, outputs: TokenOutputs, args: ORPOArgs) -> TaskLoss:
        """Return the mean over the chosen tokens and over the pairs of the global batch."""
        nll_R = outputs.per_row(outputs.sequence_sums(outputs.nll_M))[:, 0]
        nll = nll_R.sum() / max(outputs.totals["num_target_tokens/0"], 1.0)
        chosen_R, rejected_R = _mean_logprobs(outputs).unbind(dim=1)
        odds_R = log_odds(chosen_R, rejected_R)
        loss = nll + outputs.mean_over_rows(odds_ratio_losses(odds_R, args))
        rewards = reward_statistics(outputs, args.beta * chosen_R, args.beta * rejected_R, chosen_R, rejected_R)
        figures = (nll, outputs.mean_over_rows(F.logsigmoid(odds_R)), outputs.mean_over_rows(odds_R))
        return TaskLoss(loss, torch.cat([rewards, torch.stack(figures).detach()]))


def _mean_logprobs(outputs: TokenOutputs) -> torch.Tensor:
    """Return the mean log-probability of the tokens of each answer, `[R, 2]`."""
    is_answer_M = outputs.columns["is_answer"] > 0
    sums_S = outputs.sequence_sums(torch.where(is_answer_M, outputs.logprobs_M, 0.0))
    return outputs.per_row(sums_S / outputs.sequence_sums(is_answer_M.float()))


register_objective(ORPOLoss())
