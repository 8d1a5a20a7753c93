"""`kto`: answers that are good or bad, each for itself, with the backbone without adapters as the reference.

How far the model has moved from the reference is estimated on answers to other prompts of the same global batch: each
prompt with the answer before it, which is the second sequence of a row (`mismatched`). Those sequences are read in the
passes without gradient only.

Shape letters: M targets and R rows of a task in a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from peft_mux.data.formats import RowForm
from peft_mux.data.preferences.forms import KTO_ROWS, SINGLE_ROWS
from peft_mux.modeling.objectives.language_head import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import TaskLoss, TokenOutputs
from peft_mux.modeling.objectives.preference.unpaired_losses import KTO_LOSSES, KTOArgs, kto_losses


class KTOLoss(BaseObjective):
    """The losses of `trl.KTOTrainer` on rows with an answer and a verdict.

    With `kto` it differs from TRL where batches are of several processes or accumulated: there each micro-batch of TRL
    has pairs and an estimate of its own, here the global batch has one.
    """

    name = "kto"
    loss_types = KTO_LOSSES
    Args = KTOArgs
    head = LANGUAGE_HEAD
    row_form = SINGLE_ROWS
    has_logits = False
    num_batch_values = 2
    prepass_sequence = 1

    def rows(self, args: KTOArgs) -> RowForm:
        """Return rows with answers to other prompts for `kto`."""
        return KTO_ROWS if args.loss_type == "kto" else SINGLE_ROWS

    def needs_reference(self, args: KTOArgs) -> bool:
        """Return that it does."""
        return True

    def needs_batch_values(self, args: KTOArgs) -> bool:
        """Return whether the variant measures how far the model has moved."""
        return args.loss_type == "kto"

    def statistic_names(self, args: KTOArgs) -> tuple[str, ...]:
        """Return the rewards, the log-probabilities and how far the model has moved."""
        return ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")

    def batch_values(self, outputs: TokenOutputs, args: KTOArgs) -> torch.Tensor:
        """Return the sum over the mismatched answers of their log-ratios, and the number of these."""
        logratios_R = outputs.sequence_sums(outputs.logprobs_M - _reference(outputs))
        return torch.stack([logratios_R.sum(), logratios_R.new_tensor(float(len(logratios_R)))])

    def loss(self, outputs: TokenOutputs, args: KTOArgs) -> TaskLoss:
        """Return the mean over the answers of the global batch."""
        logprobs_R = outputs.sequence_sums(outputs.logprobs_M)
        logratios_R = logprobs_R - _answer_references(outputs)
        desirable_R, kl = outputs.row_values["desirable"] > 0, _moved(outputs)
        losses_R = kto_losses(logratios_R, desirable_R, kl, args)
        rewards_R, logps_R = args.beta * logratios_R.detach(), logprobs_R.detach()
        good = outputs.totals["desirable"]
        counts = ((desirable_R, good), (~desirable_R, outputs.totals["num_rows"] - good))
        rewards, logps = (
            [_mean(figure_R, mask_R, count) for mask_R, count in counts] for figure_R in (rewards_R, logps_R)
        )
        moved = outputs.mean_over_rows(kl.expand(len(logps_R)))
        statistics = torch.stack([*rewards, rewards[0] - rewards[1], *logps, moved])
        return TaskLoss(outputs.mean_over_rows(losses_R), statistics)

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss and the statistics, without those of good or bad answers where there are none."""
        return super().metrics(loss, {name: value for name, value in statistics.items() if not math.isnan(value)})


def _mean(figures_R: torch.Tensor, mask_R: torch.Tensor, count: float) -> torch.Tensor:
    """Return this micro-batch's part of a mean over some rows of the global batch; NaN where it has none of them."""
    return torch.where(mask_R, figures_R, 0.0).sum() / (count or math.nan)


def _reference(outputs: TokenOutputs) -> torch.Tensor:
    reference_M = outputs.reference_logprobs_M
    assert reference_M is not None, "a pass without adapters comes before this loss"
    return reference_M


def _answer_references(outputs: TokenOutputs) -> torch.Tensor:
    """Return the reference log-probability of each answer, as rows bring it or as computed."""
    given = outputs.row_values.get("ref_logps")
    return outputs.sequence_sums(_reference(outputs)) if given is None else given


def _moved(outputs: TokenOutputs) -> torch.Tensor:
    """Return the mean log-ratio of the mismatched answers of the global batch, at least 0; 0 where it has none."""
    sums = outputs.batch_values
    return outputs.nll_M.new_zeros(()) if sums is None else (sums[0] / sums[1]).clamp(min=0)


register_objective(KTOLoss())
