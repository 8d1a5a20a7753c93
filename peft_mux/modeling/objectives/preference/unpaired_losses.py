"""Losses of single answers that are good or bad: KTO and the unpaired form of APO, as in TRL's `KTOTrainer`.

Shape letters: R rows, each one answer to one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from peft_mux.modeling.objectives.arguments import LossArgs, above, at_least
from peft_mux.modeling.objectives.preference.dpo_args import DISABLE_DROPOUT

KTO_LOSSES = ("kto", "apo_zero_unpaired")
"""The losses by TRL's names; the first one measures answers by how far the model has moved on others."""


@dataclass(frozen=True, kw_only=True)
class KTOArgs(LossArgs):
    """Options of KTO, by their names in `trl.KTOConfig`.

    Attributes:
        beta: how strongly the reference holds the model.
        desirable_weight: weight of good answers.
        undesirable_weight: weight of bad answers.
    """

    beta: float = above(0, 0.1)
    desirable_weight: float = at_least(0, 1.0)
    undesirable_weight: float = at_least(0, 1.0)

    refused: ClassVar[Mapping[str, str]] = {
        "sync_ref_model": "the reference is the backbone without adapters, which stays as it is; leave it out",
        "disable_dropout": DISABLE_DROPOUT,
        "precompute_ref_log_probs": "rows may bring ref_logps; else they are computed",
    }


def kto_losses(
    logratios_R: torch.Tensor, desirable_R: torch.Tensor, kl: torch.Tensor | float, args: KTOArgs
) -> torch.Tensor:
    """Return the loss `[R]` of each answer; the loss of a batch is their mean (arXiv 2402.01306, equation 7).

    Args:
        logratios_R: log of how much likelier than under the reference each answer is, in nats.
        desirable_R: bool, which answers are good.
        kl: how far the model has moved from the reference on answers to other prompts, at least 0, without a gradient;
            0 for `apo_zero_unpaired` (arXiv 2408.06266, equation 7).
        args: options of the loss.
    """
    signs_R = torch.where(desirable_R, 1.0, -1.0)
    weights_R = torch.where(desirable_R, args.desirable_weight, args.undesirable_weight)
    return weights_R * (1 - torch.sigmoid(args.beta * (logratios_R - kl) * signs_R))
