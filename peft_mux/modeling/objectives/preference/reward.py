"""`reward`: models that score texts, learnt from pairs of a better and a worse one.

Shape letters: S sequences and R rows of a task in a micro-batch; S is 2R, chosen and rejected in turn.
"""

from __future__ import annotations

import torch

from peft_mux.data.preferences.forms import SCORED_ROWS
from peft_mux.modeling.objectives.classification_head import CLASSIFICATION_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import SequenceOutputs, TaskLoss
from peft_mux.modeling.objectives.preference.reward_losses import RewardArgs, reward_losses


class RewardLoss(BaseObjective):
    """The loss of `trl.RewardTrainer` on a classifier with one output."""

    name = "reward"
    loss_types = ("bradley_terry",)
    Args = RewardArgs
    head = CLASSIFICATION_HEAD
    row_form = SCORED_ROWS
    has_logits = False

    def statistic_names(self, args: RewardArgs) -> tuple[str, ...]:
        """Return TRL's names of the mean score, the share of pairs in the right order, and how far they are apart."""
        return ("mean_reward", "accuracy", "margin")

    def loss(self, outputs: SequenceOutputs, args: RewardArgs) -> TaskLoss:
        """Return the mean over the pairs of the global batch."""
        # In fp32: differences of scores lose too many bits in half precision.
        chosen_R, rejected_R = outputs.logits_SC[:, 0].float().view(-1, 2).unbind(dim=1)
        losses_R = reward_losses(chosen_R, rejected_R, outputs.row_values.get("margin"), args)
        chosen, rejected = chosen_R.detach(), rejected_R.detach()
        figures = (0.5 * (chosen + rejected), (chosen > rejected).float(), chosen - rejected)
        statistics = torch.stack([figure_R.sum() for figure_R in figures]) * outputs.loss_weight
        return TaskLoss(losses_R.sum() * outputs.loss_weight, statistics)


register_objective(RewardLoss())
