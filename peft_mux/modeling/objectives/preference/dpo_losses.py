"""Direct preference optimisation: the losses of TRL's `DPOTrainer` as functions of log-probabilities.

Shape letters: R rows, each a pair of answers to one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from peft_mux.modeling.objectives.preference.dpo_args import DPOArgs
from peft_mux.modeling.objectives.preference.pairs import DIVERGENCES, Pairs


def dpo_losses(pairs: Pairs, args: DPOArgs) -> torch.Tensor:
    """Return the loss `[R]` of each pair; the loss of a batch is their mean.

    Args:
        pairs: log-probabilities of the answers.
        args: which losses, and their options.
    """
    score = DIVERGENCES[args.f_divergence_type]
    scores = _Scores(
        score(pairs.chosen_logratios_R, args.f_alpha_divergence_coef),
        score(pairs.rejected_logratios_R, args.f_alpha_divergence_coef),
    )
    weights = args.loss_weights or (1.0,) * len(args.loss_types)
    losses = [
        DPO_LOSSES[name](pairs, scores, args) * weight for name, weight in zip(args.loss_types, weights, strict=True)
    ]
    return torch.stack(losses).sum(dim=0)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Log-ratios as the f-divergence shapes them; with the reverse Kullback-Leibler divergence as they are."""

    chosen_R: torch.Tensor
    rejected_R: torch.Tensor

    @property
    def delta_R(self) -> torch.Tensor:
        return self.chosen_R - self.rejected_R

    def mean_delta_R(self, pairs: Pairs) -> torch.Tensor:
        """Return the difference of the means over tokens."""
        return self.chosen_R / pairs.chosen_tokens_R.clamp(min=1) - self.rejected_R / pairs.rejected_tokens_R.clamp(
            min=1
        )


def sigmoid(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of DPO (arXiv 2305.18290, equation 7), with label smoothing that of cDPO."""
    logits_R, flipped = args.beta * scores.delta_R, args.label_smoothing
    return -(1 - flipped) * F.logsigmoid(logits_R) - flipped * F.logsigmoid(-logits_R)


def sigmoid_norm(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of DPO on means over tokens rather than sums."""
    return -F.logsigmoid(args.beta * scores.mean_delta_R(pairs))


def hinge(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the hinge loss of SLiC (arXiv 2305.10425)."""
    return torch.relu(1 - args.beta * scores.delta_R)


def ipo(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of IPO (arXiv 2310.12036, equation 17) on means over tokens."""
    return (scores.mean_delta_R(pairs) - 1 / (2 * args.beta)) ** 2


def exo_pair(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of EXO for pairs (arXiv 2402.00856, equation 16)."""
    logits_R, flipped = args.beta * scores.delta_R, args.label_smoothing
    chosen_R = torch.sigmoid(logits_R) * (F.logsigmoid(logits_R) - math.log1p(-flipped))
    return chosen_R + torch.sigmoid(-logits_R) * (F.logsigmoid(-logits_R) - math.log(flipped))


def nca_pair(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of noise contrastive alignment for pairs (arXiv 2402.05369)."""
    chosen_R, rejected_R = args.beta * pairs.chosen_logratios_R, args.beta * pairs.rejected_logratios_R
    return -F.logsigmoid(chosen_R) - 0.5 * F.logsigmoid(-chosen_R) - 0.5 * F.logsigmoid(-rejected_R)


def robust(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of robust DPO (arXiv 2403.00409): unbiased where a known share of labels is wrong."""
    logits_R, flipped = args.beta * scores.delta_R, args.label_smoothing
    clean_R, wrong_R = -(1 - flipped) * F.logsigmoid(logits_R), -flipped * F.logsigmoid(-logits_R)
    return (clean_R - wrong_R) / (1 - 2 * flipped)


def bco_pair(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of binary classifier optimisation for pairs (arXiv 2404.04656)."""
    return -F.logsigmoid(args.beta * pairs.chosen_logratios_R) - F.logsigmoid(-args.beta * pairs.rejected_logratios_R)


def sppo_hard(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of SPPO with certain preferences (arXiv 2405.00675, equation 4.7)."""
    half = 0.5 / args.beta
    return (pairs.chosen_logratios_R - half) ** 2 + (pairs.rejected_logratios_R + half) ** 2


def apo_zero(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of APO where chosen answers are better than the model's own (arXiv 2408.06266, equation 7)."""
    chosen_R = 1 - torch.sigmoid(args.beta * pairs.chosen_logratios_R)
    return chosen_R + torch.sigmoid(args.beta * pairs.rejected_logratios_R)


def apo_down(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of APO where chosen answers are worse than the model's own (arXiv 2408.06266, equation 8)."""
    chosen_R, rejected_R = pairs.chosen_logratios_R, pairs.rejected_logratios_R
    return torch.sigmoid(args.beta * chosen_R) + 1 - torch.sigmoid(args.beta * (chosen_R - rejected_R))


def discopop(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the loss of DiscoPOP (arXiv 2406.08414, equation 5): a blend of a logistic and an exponential loss."""
    logits_R = args.beta * scores.delta_R
    blend_R = torch.sigmoid(logits_R / args.discopop_tau)
    return -F.logsigmoid(logits_R) * (1 - blend_R) + torch.exp(-logits_R) * blend_R


def sft(pairs: Pairs, scores: _Scores, args: DPOArgs) -> torch.Tensor:
    """Return the negative log-likelihood of the chosen answers, whose mean is one over tokens."""
    return pairs.chosen_nll_R


DPO_LOSSES: Mapping[str, Callable[[Pairs, _Scores, DPOArgs], torch.Tensor]] = {
    loss.__name__: loss
    for loss in (
        sigmoid,
        hinge,
        ipo,
        exo_pair,
        nca_pair,
        robust,
        bco_pair,
        sppo_hard,
        apo_zero,
        apo_down,
        discopop,
        sft,
        sigmoid_norm,
    )
}
"""Each loss by TRL's name of it: from log-probabilities, their scores and options to the losses `[R]`."""
