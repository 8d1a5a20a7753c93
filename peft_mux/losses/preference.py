"""Losses of preferences: DPO and its relatives, KTO, CPO, ORPO and reward models, as TRL's trainers compute them.

    dpo      pairs of answers to one prompt, with the backbone without adapters as the reference; several losses may be
             added up
    kto      answers that are good or bad, each for itself (also the unpaired form of APO), with the same reference
    cpo      contrastive preference optimisation, SimPO, AlphaPO: no reference, and the chosen answer is learnt as well
    orpo     odds ratio preference optimisation: no reference, and the chosen row is learnt as well
    reward   models with one output that score texts, learnt from pairs of a better and a worse one

Each takes the means over the pairs or answers of the task's global batch, and logs statistics under TRL's names.

Shape letters: M targets, S sequences and R rows of a task in a micro-batch. In pairs S is 2R, chosen and rejected in
turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch.nn import functional as F

from peft_mux.data.formats import RowForm
from peft_mux.errors import Fault, shown
from peft_mux.losses.classification import CLASSIFICATION_HEAD
from peft_mux.losses.preference_rows import (
    JOINED_ROWS,
    KTO_ROWS,
    ODDS_ROWS,
    PAIR_ROWS,
    REFERENCE_COLUMNS,
    SCORED_ROWS,
    SINGLE_ROWS,
)
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import (
    SEVERAL,
    LossArgs,
    Objective,
    SequenceOutputs,
    TaskLoss,
    TokenOutputs,
    above,
    at_least,
    between,
    register_objective,
)

REWARD_STATISTICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""Statistics of losses of pairs, under TRL's names; all are means over the pairs of the global batch."""


def reward_statistics(
    outputs: TokenOutputs,
    chosen_rewards_R: torch.Tensor,
    rejected_rewards_R: torch.Tensor,
    chosen_R: torch.Tensor,
    rejected_R: torch.Tensor,
) -> torch.Tensor:
    """Return the micro-batch's parts of `REWARD_STATISTICS`, from rewards and log-probabilities of the answers."""
    chosen, rejected = chosen_rewards_R.detach(), rejected_rewards_R.detach()
    figures = (chosen, rejected, (chosen > rejected).float(), chosen - rejected, chosen_R.detach(), rejected_R.detach())
    return torch.stack([outputs.mean_over_rows(figure_R) for figure_R in figures])


# ------------------------------------------------------------------------ DPO

DISABLE_DROPOUT = "the dropout of each task is that of its peft_config; set lora_dropout=0 there, as TRL would"
"""Why `disable_dropout` of TRL's configurations is no option here."""
_LARGEST_EXPONENT = 80.0
"""Below the natural logarithm of the greatest fp32 number, about 88.7; the same bound as in TRL."""
_LEAST_POWER = 1e-6
_DIVERGING = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_SMOOTHED = {"sigmoid", "exo_pair", "robust"}


@dataclass(frozen=True, kw_only=True)
class DPOArgs(LossArgs):
    """Options of DPO, by their names in `trl.DPOConfig`.

    Attributes:
        beta: how strongly the reference holds the model; the regularisation `tau` of IPO.
        label_smoothing: share of labels that is taken to be wrong: cDPO for `sigmoid` (TRL passes it over there), below
            0.5 for `robust`, above 0 for `exo_pair`.
        loss_weights: weight of each loss where `loss_type` names several; by default 1.
        f_divergence_type: what holds the model near the reference, one of TRL's names, see `f_divergence`.
        f_alpha_divergence_coef: the order of `alpha_divergence`.
        discopop_tau: temperature of the blend of `discopop`.
        ld_alpha: weight of tokens beyond the shorter answer's length (LD-DPO), from 0 to 1; `None` for 1. Reference
            log-probabilities that rows bring are taken as they are.
    """

    beta: float = above(0, 0.1)
    label_smoothing: float = between(0, 0.5, 0.0)
    loss_weights: tuple[float, ...] | None = None
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = above(0, 0.05)
    ld_alpha: float | None = between(0, 1, None)

    needs_reference: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = {
        "use_weighting": "it needs the probabilities of all words at each token, which are never held; leave it out",
        "sync_ref_model": "the reference is the backbone without adapters, which stays as it is; leave it out",
        "disable_dropout": DISABLE_DROPOUT,
        "precompute_ref_log_probs": "rows may bring ref_chosen_logps and ref_rejected_logps; else they are computed",
        "reference_free": "TRL has taken it out, too; objective='cpo' and 'orpo' train without a reference",
        "rpo_alpha": 'TRL has taken it out, too; loss_type=["sigmoid", "sft"] with loss_weights=[1.0, alpha]',
        "truncation_mode": "it is a field of Task",
    }

    @property
    def loss_types(self) -> tuple[str, ...]:
        """Names of the losses that are added up."""
        return tuple((self.loss_type or "sigmoid").split(SEVERAL))

    def faults(self, where: str) -> list[Fault]:
        """Return which options do not fit together, also those that none of the losses would read."""
        chosen, faults = set(self.loss_types), []

        def unread(name: str, readers: set[str]) -> Fault:
            got = f"{shown(getattr(self, name))}, which no loss here reads"
            return Fault(f"{where}.{name}", got, f"left out without one of the losses {', '.join(sorted(readers))}")

        smoothing = f"{where}.label_smoothing"
        if self.label_smoothing == 0.5 and "robust" in chosen:
            got, allowed = "0.5 for the loss robust", "a number below 0.5"
            faults.append(Fault(smoothing, got, allowed, "At 0.5 labels carry no information."))
        elif self.label_smoothing == 0 and "exo_pair" in chosen:
            got, allowed = "0 for the loss exo_pair", "a number above 0"
            faults.append(Fault(smoothing, got, allowed, "Its paper recommends 1e-3."))
        elif self.label_smoothing and not chosen & _SMOOTHED:
            faults.append(unread("label_smoothing", _SMOOTHED))
        divergence = self.f_divergence_type
        if divergence != "reverse_kl" and not chosen <= _DIVERGING:
            got = f"{divergence!r} for {', '.join(sorted(chosen - _DIVERGING))}"
            allowed = f"reverse_kl except with only losses of {', '.join(sorted(_DIVERGING))}"
            faults.append(Fault(f"{where}.f_divergence_type", got, allowed))
        elif divergence != "alpha_divergence" and self.f_alpha_divergence_coef != DPOArgs.f_alpha_divergence_coef:
            got, allowed = (
                shown(self.f_alpha_divergence_coef),
                "left out unless f_divergence_type is 'alpha_divergence'",
            )
            faults.append(Fault(f"{where}.f_alpha_divergence_coef", got, allowed))
        weights = self.loss_weights
        if weights is not None and len(weights) != len(self.loss_types):
            allowed = f"a list of {len(self.loss_types)} numbers, one for each of loss_type"
            faults.append(Fault(f"{where}.loss_weights", shown(list(weights)), allowed))
        if self.discopop_tau != DPOArgs.discopop_tau and "discopop" not in chosen:
            faults.append(unread("discopop_tau", {"discopop"}))
        if chosen == {"sft"} and self.ld_alpha is not None:
            got = f"{self.ld_alpha}, which sft does not read"
            faults.append(Fault(f"{where}.ld_alpha", got, "left out with sft alone"))
        return faults


REFUSED_LOSSES: Mapping[str, str] = dict.fromkeys(
    ("aot", "aot_unpaired"),
    'it sorts the answers of a whole batch, which micro-batches and processes share out; the nearest is "sigmoid"',
)
"""Losses of `DPOTrainer` that are not trained towards, and why."""


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


DPO_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)
"""The losses by TRL's names."""


def f_divergence(name: str, logratios_R: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Return the derivative `f'(t)` of the f-divergence that holds the model near the reference (f-DPO).

    Args:
        name: TRL's name of it; for the reverse Kullback-Leibler divergence the log-ratios themselves are the scores.
        logratios_R: logarithms of the ratios `t` of probabilities.
        coefficient: the order of `alpha_divergence`.
    """
    match name:
        case "forward_kl":  # 1 - 1 / t
            return 1 - torch.exp(-logratios_R)
        case "js_divergence":  # log(2t / (t + 1))
            return math.log(2) + F.logsigmoid(logratios_R)
        # (t^(a-1) - 1) / (a - 1), and its limit log(t) at a = 1
        case "alpha_divergence" if abs(coefficient - 1.0) >= _LEAST_POWER:
            power = coefficient - 1.0
            return (torch.exp(torch.clamp(power * logratios_R, max=_LARGEST_EXPONENT)) - 1.0) / power
    return logratios_R


def dpo_losses(pairs: Pairs, args: DPOArgs) -> torch.Tensor:
    """Return the loss `[R]` of each pair, the sum of the losses that are chosen; the loss of a batch is their mean."""
    weights = args.loss_weights or (1.0,) * len(args.loss_types)
    losses = [dpo_loss(name, pairs, args) * weight for name, weight in zip(args.loss_types, weights, strict=True)]
    return torch.stack(losses).sum(dim=0)


def dpo_loss(name: str, pairs: Pairs, args: DPOArgs) -> torch.Tensor:
    """Return one of `DPO_LOSSES` for each pair, `[R]`."""
    beta, flipped = args.beta, args.label_smoothing
    chosen_R = pairs.chosen_R - pairs.reference_chosen_R
    rejected_R = pairs.rejected_R - pairs.reference_rejected_R
    score_chosen_R = f_divergence(args.f_divergence_type, chosen_R, args.f_alpha_divergence_coef)
    score_rejected_R = f_divergence(args.f_divergence_type, rejected_R, args.f_alpha_divergence_coef)
    delta_R = score_chosen_R - score_rejected_R
    logits_R = beta * delta_R
    match name:
        case "sigmoid":  # DPO (arXiv 2305.18290, equation 7), with label smoothing cDPO
            return -(1 - flipped) * F.logsigmoid(logits_R) - flipped * F.logsigmoid(-logits_R)
        case "hinge":  # SLiC (arXiv 2305.10425)
            return torch.relu(1 - logits_R)
        case "exo_pair":  # EXO for pairs (arXiv 2402.00856, equation 16)
            right_R = torch.sigmoid(logits_R) * (F.logsigmoid(logits_R) - math.log1p(-flipped))
            return right_R + torch.sigmoid(-logits_R) * (F.logsigmoid(-logits_R) - math.log(flipped))
        case "nca_pair":  # noise contrastive alignment (arXiv 2402.05369)
            chosen, rejected = beta * chosen_R, beta * rejected_R
            return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)
        case "robust":  # robust DPO (arXiv 2403.00409): unbiased if a known share of labels is wrong
            clean_R, wrong_R = -(1 - flipped) * F.logsigmoid(logits_R), -flipped * F.logsigmoid(-logits_R)
            return (clean_R - wrong_R) / (1 - 2 * flipped)
        case "bco_pair":  # binary classifier optimisation (arXiv 2404.04656)
            return -F.logsigmoid(beta * chosen_R) - F.logsigmoid(-beta * rejected_R)
        case "sppo_hard":  # SPPO with certain preferences (arXiv 2405.00675, equation 4.7)
            return (chosen_R - 0.5 / beta) ** 2 + (rejected_R + 0.5 / beta) ** 2
        case "apo_zero":  # chosen answers are better than the model's own (arXiv 2408.06266, equation 7)
            return 1 - torch.sigmoid(beta * chosen_R) + torch.sigmoid(beta * rejected_R)
        case "apo_down":  # chosen answers are worse than the model's own (arXiv 2408.06266, equation 8)
            return torch.sigmoid(beta * chosen_R) + 1 - torch.sigmoid(beta * (chosen_R - rejected_R))
        case "discopop":  # a blend of a logistic and an exponential loss (arXiv 2406.08414, equation 5)
            blend_R = torch.sigmoid(logits_R / args.discopop_tau)
            return -F.logsigmoid(logits_R) * (1 - blend_R) + torch.exp(-logits_R) * blend_R
        case "sft":  # the negative log-likelihood of the chosen answers, whose mean is one over tokens
            return pairs.chosen_nll_R
    # The remaining losses read means over tokens rather than sums.
    mean_chosen_R = score_chosen_R / pairs.chosen_tokens_R.clamp(min=1)
    mean_delta_R = mean_chosen_R - score_rejected_R / pairs.rejected_tokens_R.clamp(min=1)
    if name == "ipo":  # IPO (arXiv 2310.12036, equation 17)
        return (mean_delta_R - 1 / (2 * beta)) ** 2
    return -F.logsigmoid(beta * mean_delta_R)


class DPOLoss(Objective):
    """The losses of `trl.DPOTrainer` on rows with a chosen and a rejected answer; several may be added up."""

    name = "dpo"
    balances_routers = True
    loss_types = DPO_LOSSES
    refused_loss_types = REFUSED_LOSSES
    other_names: ClassVar[Mapping[str, str]] = {
        "bco": 'Set objective="dpo", loss_type="bco_pair", for pairs; single answers are objective="kto".',
        **dict.fromkeys(
            ("online_dpo", "xpo", "nash_md"),
            'No answers are sampled in training: set objective="dpo" for pairs that were sampled before.',
        ),
    }
    takes_several = True
    Args = DPOArgs
    head = LANGUAGE_HEAD
    row_form = PAIR_ROWS
    reference_columns = REFERENCE_COLUMNS
    statistics = REWARD_STATISTICS

    def loss(self, outputs: TokenOutputs, args: DPOArgs) -> TaskLoss:
        """Return the mean over the pairs of the global batch."""
        logprobs_M, reference_M = outputs.logprobs_M, outputs.reference_logprobs_M
        plain_R2 = sums_R2 = outputs.per_row(outputs.sequence_sums(logprobs_M))
        if args.ld_alpha is not None:
            # Targets beyond the length of the row's shorter answer count less.
            weights: list[float] = []
            for chosen, rejected in list(pairwise((*outputs.sequence_counts, 0)))[::2]:
                shared = min(chosen, rejected)
                for count in (chosen, rejected):
                    weights += [1.0] * shared + [args.ld_alpha] * (count - shared)
            weights_M = torch.tensor(weights, dtype=torch.float32).to(logprobs_M.device, non_blocking=True)
            sums_R2 = outputs.per_row(outputs.sequence_sums(logprobs_M * weights_M))
            reference_M = None if reference_M is None else reference_M * weights_M
        if all(name in outputs.row_values for name in REFERENCE_COLUMNS):
            reference_chosen_R, reference_rejected_R = (outputs.row_values[name] for name in REFERENCE_COLUMNS)
        else:
            assert reference_M is not None, "a pass without adapters comes before this loss"
            reference_R2 = outputs.per_row(outputs.sequence_sums(reference_M))
            reference_chosen_R, reference_rejected_R = reference_R2.unbind(dim=1)
        chosen_R, rejected_R = sums_R2.unbind(dim=1)
        pairs = Pairs(
            chosen_R,
            rejected_R,
            reference_chosen_R,
            reference_rejected_R,
            chosen_tokens_R=outputs.row_values["chosen_tokens"],
            rejected_tokens_R=outputs.row_values["rejected_tokens"],
            chosen_nll_R=-plain_R2[:, 0]
            * (outputs.totals["num_rows"] / max(outputs.totals["num_target_tokens/0"], 1.0)),
        )
        rewards = args.beta * (chosen_R - reference_chosen_R), args.beta * (rejected_R - reference_rejected_R)
        statistics = reward_statistics(outputs, *rewards, chosen_R, rejected_R)
        return TaskLoss(outputs.mean_over_rows(dpo_losses(pairs, args)), statistics)


# ------------------------------------------------------------------------ KTO


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

    needs_reference: ClassVar[bool] = True
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


class KTOLoss(Objective):
    """The losses of `trl.KTOTrainer` on rows with an answer and a verdict.

    With `kto`, how far the model has moved from the reference is estimated on answers to other prompts of the same
    global batch: each prompt with the answer before it, which is the second sequence of a row (`mismatched`). Only the
    passes without gradient read those sequences. This differs from TRL if batches come from several processes or are
    accumulated: there each micro-batch has pairs and an estimate of its own, here the global batch has one.
    """

    name = "kto"
    balances_routers = True
    loss_types = ("kto", "apo_zero_unpaired")
    Args = KTOArgs
    head = LANGUAGE_HEAD
    row_form = SINGLE_ROWS
    has_logits = False
    prepass_sequence = 1
    statistics = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")

    def rows(self, args: KTOArgs) -> RowForm:
        """Return rows with answers to other prompts for `kto`."""
        return KTO_ROWS if args.loss_type == "kto" else SINGLE_ROWS

    def num_batch_values(self, args: KTOArgs) -> int:
        """Return two numbers for the variant that measures how far the model has moved."""
        return 2 if args.loss_type == "kto" else 0

    def batch_values(self, outputs: TokenOutputs, args: KTOArgs) -> torch.Tensor:
        """Return the sum over the mismatched answers of their log-ratios, and the number of these."""
        reference_M = outputs.reference_logprobs_M
        assert reference_M is not None, "a pass without adapters comes before this loss"
        logratios_R = outputs.sequence_sums(outputs.logprobs_M - reference_M)
        return torch.stack([logratios_R.sum(), logratios_R.new_tensor(float(len(logratios_R)))])

    def loss(self, outputs: TokenOutputs, args: KTOArgs) -> TaskLoss:
        """Return the mean over the answers of the global batch."""
        logprobs_R = outputs.sequence_sums(outputs.logprobs_M)
        reference_R = outputs.row_values.get("ref_logps")
        if reference_R is None:
            reference_M = outputs.reference_logprobs_M
            assert reference_M is not None, "a pass without adapters comes before this loss"
            reference_R = outputs.sequence_sums(reference_M)
        logratios_R, desirable_R = logprobs_R - reference_R, outputs.row_values["desirable"] > 0
        # The mean log-ratio of the mismatched answers of the global batch, at least 0; 0 if it has none.
        sums = outputs.batch_values
        kl = outputs.nll_M.new_zeros(()) if sums is None else (sums[0] / sums[1]).clamp(min=0)
        losses_R = kto_losses(logratios_R, desirable_R, kl, args)
        num_good = outputs.totals["desirable"]
        groups = ((desirable_R, num_good), (~desirable_R, outputs.totals["num_rows"] - num_good))
        # Parts of means over the good and the bad answers of the global batch; NaN if it has none of them.
        rewards, logps = (
            [torch.where(mask_R, figure_R, 0.0).sum() / (count or math.nan) for mask_R, count in groups]
            for figure_R in (args.beta * logratios_R.detach(), logprobs_R.detach())
        )
        moved = outputs.mean_over_rows(kl.expand(len(logprobs_R)))
        statistics = torch.stack([*rewards, rewards[0] - rewards[1], *logps, moved])
        return TaskLoss(outputs.mean_over_rows(losses_R), statistics)

    def metrics(self, loss: float, statistics: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss and the statistics, without those of good or bad answers if there are none."""
        return super().metrics(loss, {name: value for name, value in statistics.items() if not math.isnan(value)})


# ------------------------------------------------------------------------ CPO

_LIMITED_TO_ENCODER_DECODERS = "it is of encoder-decoders; max_length of the task limits prompt and answer together"


@dataclass(frozen=True, kw_only=True)
class CPOArgs(LossArgs):
    """Options of CPO, by their names in `trl.experimental.cpo.CPOConfig`.

    Attributes:
        beta: factor of the difference of rewards; the regularisation `tau` of IPO.
        label_smoothing: share of labels that is taken to be wrong, for `sigmoid` and `simpo`.
        cpo_alpha: weight of the negative log-likelihood of the chosen answers; 0 in SimPO and AlphaPO.
        simpo_gamma: margin by which `simpo` wants the reward of the chosen answer to be greater.
        alpha: shape of AlphaPO's rewards `(1 - p^-alpha) / alpha`; 0 for their limit `log p`.
    """

    beta: float = above(0, 0.1)
    label_smoothing: float = between(0, 0.5, 0.0)
    cpo_alpha: float = at_least(0, 1.0)
    simpo_gamma: float = 0.5
    alpha: float = 0.0

    refused: ClassVar[Mapping[str, str]] = {
        "disable_dropout": DISABLE_DROPOUT,
        "max_completion_length": _LIMITED_TO_ENCODER_DECODERS,
    }

    def faults(self, where: str) -> list[Fault]:
        """Return which options this variant would ignore."""
        faults = []
        if self.label_smoothing and self.loss_type in ("hinge", "ipo"):
            allowed = f'0 with loss_type "{self.loss_type}"'
            faults.append(Fault(f"{where}.label_smoothing", shown(self.label_smoothing), allowed))
        if self.simpo_gamma != CPOArgs.simpo_gamma and self.loss_type != "simpo":
            allowed = 'its default, unless loss_type is "simpo"'
            faults.append(Fault(f"{where}.simpo_gamma", shown(self.simpo_gamma), allowed))
        return faults


def cpo_losses(rewards_R2: torch.Tensor, args: CPOArgs) -> torch.Tensor:
    """Return the loss `[R]` of each pair; the loss of a batch is their mean, plus that of the chosen answers.

    Args:
        rewards_R2: rewards of the chosen and of the rejected answers, before they are multiplied by `beta`.
        args: options of the loss.
    """
    ahead_R = rewards_R2[:, 0] - rewards_R2[:, 1]
    if args.loss_type == "hinge":  # SLiC (arXiv 2305.10425)
        return torch.relu(1 - args.beta * ahead_R)
    if args.loss_type == "ipo":  # IPO (arXiv 2310.12036, equation 17)
        return (ahead_R - 1 / (2 * args.beta)) ** 2
    # CPO (arXiv 2401.08417, equation 3) and SimPO (arXiv 2405.14734, equation 6)
    logits_R = args.beta * ahead_R - (args.simpo_gamma if args.loss_type == "simpo" else 0.0)
    flipped = args.label_smoothing
    return -(1 - flipped) * F.logsigmoid(logits_R) - flipped * F.logsigmoid(-logits_R)


class CPOLoss(Objective):
    """The losses of `trl.experimental.cpo.CPOTrainer`: pairs without a reference, and the chosen answers are learnt.

    Rewards are sums over the tokens of answers, and means for `ipo` and `simpo`. The negative log-likelihood is a mean
    over all tokens of the chosen answers.
    """

    name = "cpo"
    loss_types = ("sigmoid", "hinge", "ipo", "simpo")
    refused_loss_types: ClassVar[Mapping[str, str]] = {
        "alphapo": 'TRL trains loss_type="simpo" with cpo_alpha=0.0 for it; set these two, and alpha'
    }
    other_names: ClassVar[Mapping[str, str]] = {
        "simpo": 'Set objective="cpo", loss_type="simpo", objective_args={"cpo_alpha": 0.0}.',
        "alphapo": 'Set objective="cpo", loss_type="simpo", objective_args={"cpo_alpha": 0.0, "alpha": 0.25}.',
    }
    Args = CPOArgs
    head = LANGUAGE_HEAD
    row_form = JOINED_ROWS
    has_logits = False

    def statistic_names(self, args: CPOArgs) -> tuple[str, ...]:
        """Return the rewards and the log-probabilities, and the part of the chosen answers if it counts."""
        return (*REWARD_STATISTICS, "nll_loss") if args.cpo_alpha else REWARD_STATISTICS

    def loss(self, outputs: TokenOutputs, args: CPOArgs) -> TaskLoss:
        """Return the mean over the pairs and over the chosen tokens of the global batch."""
        logps_R2 = sums_R2 = outputs.per_row(outputs.sequence_sums(outputs.logprobs_M))
        if args.loss_type in ("ipo", "simpo"):
            logps_R2 = sums_R2 / outputs.per_row(outputs.sequence_sums(torch.ones_like(outputs.nll_M)))
        # AlphaPO (arXiv 2501.03884): (1 - p^-alpha) / alpha, without p itself, which underflows.
        rewards_R2 = -torch.expm1(-args.alpha * logps_R2) / args.alpha if args.alpha else logps_R2
        loss = outputs.mean_over_rows(cpo_losses(rewards_R2, args))
        scaled = (args.beta * rewards_R2).unbind(dim=1)
        statistics = reward_statistics(outputs, *scaled, *logps_R2.unbind(dim=1))
        if args.cpo_alpha:
            nll = -sums_R2[:, 0].sum() / max(outputs.totals["num_target_tokens/0"], 1.0)
            loss, statistics = loss + args.cpo_alpha * nll, torch.cat([statistics, nll.detach()[None]])
        return TaskLoss(loss, statistics)


# ----------------------------------------------------------------------- ORPO


@dataclass(frozen=True, kw_only=True)
class ORPOArgs(LossArgs):
    """Options of ORPO, by their names in `trl.experimental.orpo.ORPOConfig`.

    Attributes:
        beta: weight of the odds ratio next to the negative log-likelihood; lambda in the paper.
    """

    beta: float = at_least(0, 0.1)

    refused: ClassVar[Mapping[str, str]] = {
        "disable_dropout": DISABLE_DROPOUT,
        "max_completion_length": _LIMITED_TO_ENCODER_DECODERS,
    }


def log_odds(chosen_R: torch.Tensor, rejected_R: torch.Tensor) -> torch.Tensor:
    """Return the logarithms `[R]` of the odds ratios of pairs of answers (arXiv 2403.07691, equations 4 and 7).

    Args:
        chosen_R: mean log-probability of the tokens of each chosen answer, in nats.
        rejected_R: the same of the rejected answers.
    """
    return (chosen_R - rejected_R) - (_log1mexp(chosen_R) - _log1mexp(rejected_R))


def _log1mexp(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) of negative numbers, by whichever form cancels less."""
    near_zero = values >= -math.log(2)
    # Each form gets numbers that it can take: a derivative that is not finite would be NaN even where it is not chosen.
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, values)))
    near = torch.log(-torch.expm1(torch.where(near_zero, values, -math.log(2))))
    return torch.where(near_zero, near, far)


class ORPOLoss(Objective):
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
    statistics = (*REWARD_STATISTICS, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def loss(self, outputs: TokenOutputs, args: ORPOArgs) -> TaskLoss:
        """Return the mean over the chosen tokens and over the pairs of the global batch."""
        nll_R = outputs.per_row(outputs.sequence_sums(outputs.nll_M))[:, 0]
        nll = nll_R.sum() / max(outputs.totals["num_target_tokens/0"], 1.0)
        is_answer_M = outputs.columns["is_answer"] > 0
        sums_S = outputs.sequence_sums(torch.where(is_answer_M, outputs.logprobs_M, 0.0))
        means_R2 = outputs.per_row(sums_S / outputs.sequence_sums(is_answer_M.float()))
        chosen_R, rejected_R = means_R2.unbind(dim=1)
        odds_R = log_odds(chosen_R, rejected_R)
        log_ratio_R = F.logsigmoid(odds_R)
        loss = nll + outputs.mean_over_rows(-args.beta * log_ratio_R)
        rewards = reward_statistics(outputs, args.beta * chosen_R, args.beta * rejected_R, chosen_R, rejected_R)
        figures = (nll, outputs.mean_over_rows(log_ratio_R), outputs.mean_over_rows(odds_R))
        return TaskLoss(loss, torch.cat([rewards, torch.stack(figures).detach()]))


# --------------------------------------------------------------------- rewards


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
        margins_R: by how much the better one must be ahead; `None` for 0.
        args: options of the loss.
    """
    ahead_R = chosen_R - rejected_R
    losses_R = -F.logsigmoid(ahead_R if margins_R is None else ahead_R - margins_R)
    if args.center_rewards_coefficient is None:
        return losses_R
    return losses_R + args.center_rewards_coefficient * (chosen_R + rejected_R) ** 2


class RewardLoss(Objective):
    """The loss of `trl.RewardTrainer` on a classifier with one output."""

    name = "reward"
    loss_types = ("bradley_terry",)
    Args = RewardArgs
    head = CLASSIFICATION_HEAD
    row_form = SCORED_ROWS
    has_logits = False
    statistics = ("mean_reward", "accuracy", "margin")

    def loss(self, outputs: SequenceOutputs, args: RewardArgs) -> TaskLoss:
        """Return the mean over the pairs of the global batch."""
        # In fp32: differences of scores lose too many bits in half precision.
        chosen_R, rejected_R = outputs.logits_SC[:, 0].float().view(-1, 2).unbind(dim=1)
        losses_R = reward_losses(chosen_R, rejected_R, outputs.row_values.get("margin"), args)
        chosen, rejected = chosen_R.detach(), rejected_R.detach()
        figures = (0.5 * (chosen + rejected), (chosen > rejected).float(), chosen - rejected)
        statistics = torch.stack([figure_R.sum() for figure_R in figures]) * outputs.loss_weight
        return TaskLoss(losses_R.sum() * outputs.loss_weight, statistics)


for _loss in (DPOLoss(), KTOLoss(), CPOLoss(), ORPOLoss(), RewardLoss()):
    register_objective(_loss)
