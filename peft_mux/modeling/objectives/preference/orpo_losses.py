"""Odds ratio preference optimisation, as in TRL's `ORPOTrainer`: no reference, and the chosen row is learnt as well.

Shape letters: R rows, each a pair of answers to one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from peft_mux.modeling.objectives.arguments import LossArgs, at_least
from peft_mux.modeling.objectives.preference.dpo_args import DISABLE_DROPOUT


@dataclass(frozen=True, kw_only=True)
class ORPOArgs(LossArgs):
    """Options of ORPO, by their names in `trl.experimental.orpo.ORPOConfig`.

    Attributes:
        beta: weight of the odds ratio beside the negative log-likelihood; lambda in the paper.
    """

    beta: float = at_least(0, 0.1)

    refused: ClassVar[Mapping[str, str]] = {
        "disable_dropout": DISABLE_DROPOUT,
        "max_completion_length": "it is of encoder-decoders; max_length of the task limits prompt and answer together",
    }


def log_odds(chosen_R: torch.Tensor, rejected_R: torch.Tensor) -> torch.Tensor:
    """Return the logarithms `[R]` of the odds ratios of pairs of answers (arXiv 2403.07691, equations 4 and 7).

    Args:
        chosen_R: mean log-probability of the tokens of each chosen answer, in nats.
        rejected_R: the same of the rejected answers.
    """
    return (chosen_R - rejected_R) - (_log1mexp(chosen_R) - _log1mexp(rejected_R))


def odds_ratio_losses(log_odds_R: torch.Tensor, args: ORPOArgs) -> torch.Tensor:
    """Return the losses `[R]` of odds ratios, which are added to the negative log-likelihood of the chosen rows."""
    return -args.beta * F.logsigmoid(log_odds_R)


def _log1mexp(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) of negative numbers, by whichever form cancels less."""
    near_zero = values >= -math.log(2)
    # Each form gets numbers that it can take: a derivative that is not finite would be NaN even where it is not chosen.
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, values)))
    near = torch.log(-torch.expm1(torch.where(near_zero, values, -math.log(2))))
    return torch.where(near_zero, near, far)
