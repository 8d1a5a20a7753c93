"""Reward modelling: the losses of TRL's `RewardTrainer`, of the scores that a model with one output gives to two texts.

Shape letters: R rows, each a pair of texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from peft_mux.modeling.objectives.arguments import LossArgs, at_least
from peft_mux.modeling.objectives.preference.dpo_args import DISABLE_DROPOUT


@dataclass(frozen=True, kw_only=True)
class RewardArgs(LossArgs):
    """Options of reward modelling, by their names in `trl.RewardConfig`.

    Attributes:
        center_rewards_coefficient: weight of the squared sum of a pair's scores, which draws scores towards 0 on the
            mean (arXiv 2312.09244, equation 2); `None` for 0.
    """

    center_rewards_coefficient: float | None = at_least(0, None)

    refused: ClassVar[Mapping[str, str]] = {"disable_dropout": DISABLE_DROPOUT}


def reward_losses(
    chosen_R: torch.Tensor, rejected_R: torch.Tensor, margins_R: torch.Tensor | None, args: RewardArgs
) -> torch.Tensor:
    """Return the loss `[R]` of each pair, that of Bradley and Terry; the loss of a batch is their mean.

    Args:
        chosen_R: scores of the better texts.
        rejected_R: scores of the worse texts.
        margins_R: by how much the better one shall be ahead; `None` for 0.
        args: options of the loss.
    """
    ahead_R = chosen_R - rejected_R
    losses_R = -F.logsigmoid(ahead_R if margins_R is None else ahead_R - margins_R)
    if args.center_rewards_coefficient is None:
        return losses_R
    return losses_R + args.center_rewards_coefficient * (chosen_R + rejected_R) ** 2
