"""`dpo`: direct preference optimisation and its relatives, with the backbone without adapters as the reference.

Shape letters: M targets, S sequences and R rows of a task in a micro-batch; S is 2R, chosen and rejected in turn.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from peft_mux.data.preferences.forms import PAIR_ROWS
from peft_mux.data.preferences.pair_rows import REFERENCE_COLUMNS
from peft_mux.modeling.objectives.language_head import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import TaskLoss, TokenOutputs
from peft_mux.modeling.objectives.preference.dpo_args import REFUSED_LOSSES, DPOArgs
from peft_mux.modeling.objectives.preference.dpo_losses import DPO_LOSSES, dpo_losses
from peft_mux.modeling.objectives.preference.pairs import Pairs

REWARD_STATISTICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""What losses of pairs log, under TRL's names; all are means over the pairs of the global batch."""


class DPOLoss(BaseObjective):
    """The losses of `trl.DPOTrainer` on rows with a chosen and a rejected answer; several may be added up."""

    name = "dpo"
    loss_types = tuple(DPO_LOSSES)
    refused_loss_types = REFUSED_LOSSES
    takes_several = True
    Args = DPOArgs
    head = LANGUAGE_HEAD
    row_form = PAIR_ROWS
    reference_columns = REFERENCE_COLUMNS
    has_logits = False

    def needs_reference(self, args: DPOArgs) -> bool:
        """Return that it does."""
        return True

    def statistic_names(self, args: DPOArgs) -> tuple[str, ...]:
        """Return the rewards and the log-probabilities."""
        return REWARD_STATISTICS

    def loss(self, outputs: TokenOutputs, args: DPOArgs) -> TaskLoss:
        """Return the mean over the pairs of the global batch."""
        pairs = _pairs(outputs, args)
        rewards = args.beta * pairs.chosen_logratios_R, args.beta * pairs.rejected_logratios_R
        statistics = reward_statistics(outputs, *rewards, pairs.chosen_R, pairs.rejected_R)
        return TaskLoss(outputs.mean_over_rows(dpo_losses(pairs, args)), statistics)


def reward_statistics(
    outputs: TokenOutputs,
    chosen_rewards_R: torch.Tensor,
    rejected_rewards_R: torch.Tensor,
    chosen_R: torch.Tensor,
    rejected_R: torch.Tensor,
) -> torch.Tensor:
    """Return the micro-batch's parts of `REWARD_STATISTICS`.

    Args:
        outputs: what the losses are of.
        chosen_rewards_R: reward of each chosen answer.
        rejected_rewards_R: reward of each rejected answer.
        chosen_R: log-probability of each chosen answer.
        rejected_R: log-probability of each rejected answer.
    """
    chosen, rejected = chosen_rewards_R.detach(), rejected_rewards_R.detach()
    figures = (chosen, rejected, (chosen > rejected).float(), chosen - rejected, chosen_R.detach(), rejected_R.detach())
    return torch.stack([outputs.mean_over_rows(figure_R) for figure_R in figures])


def _pairs(outputs: TokenOutputs, args: DPOArgs) -> Pairs:
    """Return the log-probabilities of the answers in sums over their tokens."""
    logprobs_M = outputs.logprobs_M
    plain_R2 = outputs.per_row(outputs.sequence_sums(logprobs_M))
    weights_M = None if args.ld_alpha is None else _weights(outputs, args.ld_alpha)
    sums_R2 = plain_R2 if weights_M is None else outputs.per_row(outputs.sequence_sums(logprobs_M * weights_M))
    tokens = max(outputs.totals["num_target_tokens/0"], 1.0)
    values = outputs.row_values
    return Pairs(
        *sums_R2.unbind(dim=1),
        *_references(outputs, weights_M),
        chosen_tokens_R=values["chosen_tokens"],
        rejected_tokens_R=values["rejected_tokens"],
        chosen_nll_R=-plain_R2[:, 0] * (outputs.totals["num_rows"] / tokens),
    )


def _references(outputs: TokenOutputs, weights_M: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return the reference log-probabilities of chosen and rejected answers, as rows bring them or as computed."""
    if all(name in outputs.row_values for name in REFERENCE_COLUMNS):
        return tuple(outputs.row_values[name] for name in REFERENCE_COLUMNS)
    reference_M = outputs.reference_logprobs_M
    assert reference_M is not None, "a pass without adapters comes before this loss"
    if weights_M is not None:
        reference_M = reference_M * weights_M
    return outputs.per_row(outputs.sequence_sums(reference_M)).unbind(dim=1)


def _weights(outputs: TokenOutputs, alpha: float) -> torch.Tensor:
    """Return the weight of each target `[M]`: 1 up to the length of the row's shorter answer, and `alpha` beyond."""
    weights: list[float] = []
    for chosen, rejected in list(pairwise((*outputs.sequence_counts, 0)))[::2]:
        shared = min(chosen, rejected)
        for count in (chosen, rejected):
            weights += [1.0] * shared + [alpha] * (count - shared)
    return torch.tensor(weights, dtype=torch.float32).to(outputs.nll_M.device, non_blocking=True)


register_objective(DPOLoss())
