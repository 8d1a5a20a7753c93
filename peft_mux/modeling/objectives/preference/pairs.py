"""What losses of pairs read: log-probabilities of the chosen and of the rejected answers, and of a reference.

Shape letters: R rows, each a pair of answers to one prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

_LARGEST_EXPONENT = 80.0
"""Below the natural logarithm of the greatest fp32 number, about 88.7; the same bound as in TRL."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Log-probabilities of pairs of answers, each a sum over the tokens of the answer.

    Attributes:
        chosen_R: fp32 `[R]`, of the chosen answers under the trained model, in nats.
        rejected_R: the same of the rejected answers.
        reference_chosen_R: of the chosen answers under the reference.
        reference_rejected_R: of the rejected answers under the reference.
        chosen_tokens_R: number of tokens of each chosen answer.
        rejected_tokens_R: number of tokens of each rejected answer.
        chosen_nll_R: negative log-likelihood of each chosen answer, scaled so that its mean over the rows of the global
            batch is the mean over that batch's chosen tokens.
    """

    chosen_R: torch.Tensor
    rejected_R: torch.Tensor
    reference_chosen_R: torch.Tensor
    reference_rejected_R: torch.Tensor
    chosen_tokens_R: torch.Tensor
    rejected_tokens_R: torch.Tensor
    chosen_nll_R: torch.Tensor

    @property
    def chosen_logratios_R(self) -> torch.Tensor:
        """Log of how much likelier than under the reference each chosen answer is."""
        return self.chosen_R - self.reference_chosen_R

    @property
    def rejected_logratios_R(self) -> torch.Tensor:
        """Log of how much likelier than under the reference each rejected answer is."""
        return self.rejected_R - self.reference_rejected_R


def reverse_kl(logratios_R: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return the log-ratios themselves: the scores of DPO as it was published."""
    return logratios_R


def forward_kl(logratios_R: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return `f'(t) = 1 - 1/t` of the ratios `t`."""
    return 1 - torch.exp(-logratios_R)


def js_divergence(logratios_R: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return `f'(t) = log(2t / (t + 1))` of the ratios `t`."""
    return math.log(2) + F.logsigmoid(logratios_R)


def alpha_divergence(logratios_R: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return `f'(t) = (t^(a-1) - 1) / (a - 1)` of the ratios `t`, and its limit `log(t)` at a = 1."""
    power = coefficient - 1.0
    if abs(power) < 1e-6:
        return logratios_R
    return (torch.exp(torch.clamp(power * logratios_R, max=_LARGEST_EXPONENT)) - 1.0) / power


DIVERGENCES = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}
"""Derivatives of the f-divergences that may hold the model near the reference (f-DPO), by TRL's names."""
