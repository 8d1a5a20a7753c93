"""Losses of single answers that are good or bad: KTO and the unpaired form of APO, as in TRL's `KTOTrainer`.

Shape letters: R rows, each one answer to one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peft_mux.errors import Fault
from peft_mux.modeling.objectives.preference.dpo_args import number_fault

KTO_LOSSES = ("kto", "apo_zero_unpaired")
"""The losses by TRL's names; the first one measures answers by how far the model has moved on others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOArgs:
    """Options of KTO, by their names in `trl.KTOConfig`.

    Attributes:
        beta: how strongly the reference holds the model.
        desirable_weight: weight of good answers.
        undesirable_weight: weight of bad answers.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


def kto_faults(args: KTOArgs, where: str) -> list[Fault]:
    """Return what is wrong with options.

    Args:
        args: the options.
        where: the task, for messages: `tasks.sql`.
    """
    where = f"{where}.objective_args"
    faults = number_fault(f"{where}.beta", args.beta, 0, low_allowed=False)
    faults += number_fault(f"{where}.desirable_weight", args.desirable_weight, 0, low_allowed=True)
    return faults + number_fault(f"{where}.undesirable_weight", args.undesirable_weight, 0, low_allowed=True)


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
