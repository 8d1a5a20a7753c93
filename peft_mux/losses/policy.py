"""The losses of a policy on given rollouts: importance sampling, PPO, GRPO with TRL's normalisations, CISPO.

A row is a rollout: its tokens, of which those with a label were sampled; the log-probability that each had when it was
sampled (`old_logprobs`), and its advantage (`advantages`, a number a row or a token). Names, formulas and defaults are
those of `trl.GRPOConfig` and of `GRPOTrainer`'s loss in TRL 1.16.

Shape letters: M targets, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from peft_mux.data.formats import LANGUAGE_ROWS, DataFormat, TokenColumn
from peft_mux.errors import Fault
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import (
    REFERENCE,
    LossArgs,
    Objective,
    TaskLoss,
    TokenOutputs,
    above,
    argument,
    at_least,
    register_objective,
)

_CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "ppo")


@dataclass(frozen=True, kw_only=True)
class PolicyArgs(LossArgs):
    """Arguments of `PolicyLoss`, as `trl.GRPOConfig` has them.

    Attributes:
        epsilon: by how much a ratio may fall below 1 before it is clipped.
        epsilon_high: by how much it may exceed 1, by default `epsilon`; for "cispo" the greatest ratio itself.
        delta: greatest ratio on the side that is not clipped; `None` for no bound.
        beta: weight of the divergence from the backbone without adapters, or from `ref_logprobs` of the rows.
        importance_sampling_level: whether ratios are of tokens or, as in GSPO, geometric means over rows.
        max_completion_length: tokens by which "dr_grpo" divides each row.
        use_bias_correction_kl: whether the divergence is multiplied with the ratio.
        temperature: of the sampling; log-probabilities are those of logits divided by it, also those that rows bring.
        entropy_coef: by how much of the mean entropy of the tokens the loss is lower.
    """

    epsilon: float = at_least(0.0, 0.2)
    epsilon_high: float | None = at_least(0.0, None)
    delta: float | None = above(0.0, None)
    beta: float = at_least(0.0, 0.0)
    importance_sampling_level: Literal["token", "sequence"] = "token"
    max_completion_length: int = argument(512, "an integer of at least 1", lambda value: value >= 1)
    use_bias_correction_kl: bool = True
    temperature: float = above(0.0, 1.0)
    entropy_coef: float = 0.0

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        """Whether the divergence counts."""
        return self.beta != 0

    @property
    def high(self) -> float:
        """`epsilon_high`, or `epsilon` if it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def faults(self, where: str) -> list[Fault]:
        """Return which arguments this variant would ignore."""
        faults = []
        if self.loss_type not in _CLIPPED and self.delta is not None:
            faults.append(Fault(f"{where}.delta", str(self.delta), f'None with loss_type "{self.loss_type}"'))
        if self.loss_type != "dr_grpo" and self.max_completion_length != 512:
            got = str(self.max_completion_length)
            faults.append(Fault(f"{where}.max_completion_length", got, 'its default, unless loss_type is "dr_grpo"'))
        if self.loss_type == "cispo" and self.high == 0:
            faults.append(Fault(f"{where}.epsilon_high", "0", "the greatest ratio, above 0"))
        if self.beta == 0 and not self.use_bias_correction_kl:
            faults.append(Fault(f"{where}.use_bias_correction_kl", "False", "its default where beta is 0"))
        return faults


class PolicyLoss(Objective):
    """Minus the advantage times the ratio of probabilities, in the variants that TRL has; see the module."""

    name = "policy"
    balances_routers = True
    loss_types = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "ppo", "importance_sampling")
    refused_loss_types: ClassVar[Mapping[str, str]] = {
        "sapo": 'its soft gate in the place of clipping is not computed here; the nearest is "grpo"',
        "vespo": 'its weights of whole rollouts are not computed here; the nearest is "cispo"',
        "luspo": 'set "dr_grpo" with max_completion_length=1, which is the same',
    }
    other_names: ClassVar[Mapping[str, str]] = {
        "grpo": 'Set objective="policy", loss_type="grpo" (or the default "dapo", as in TRL), for given rollouts.',
        "gspo": 'Set objective="policy", objective_args={"importance_sampling_level": "sequence"}, for given rollouts.',
        "rloo": 'Set objective="policy", loss_type="dr_grpo", for rollouts with the advantages of leave-one-out.',
    }
    head = LANGUAGE_HEAD
    row_form = replace(
        LANGUAGE_ROWS,
        formats=(DataFormat.TOKENIZED,),
        is_one_term=True,
        token_columns={
            "advantages": TokenColumn(is_required=True, may_be_row=True),
            "old_logprobs": TokenColumn(is_logprob=True),
            REFERENCE: TokenColumn(is_logprob=True),
        },
        marks=("input_ids", "advantages"),
    )
    Args = PolicyArgs
    reference_columns = (REFERENCE,)

    def statistic_names(self, args: PolicyArgs) -> tuple[str, ...]:
        """Return TRL's names of the divergence, of the shares of clipped ratios, and of the two parts of the loss."""
        names: tuple[str, ...] = ("kl",) if args.beta != 0 else ()
        if args.loss_type in _CLIPPED:
            names += ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
        names += ("cispo_clip_ratio",) if args.loss_type == "cispo" else ()
        return (*names, "entropy", "policy_loss") if args.entropy_coef != 0 else names

    def loss(self, outputs: TokenOutputs, args: PolicyArgs) -> TaskLoss:
        """Return the mean over the rollouts of the global batch, as the variant takes it."""
        logprobs_M, advantages_M = outputs.logprobs_M, outputs.columns["advantages"]
        log_ratio_M = logprobs_M - outputs.columns.get("old_logprobs", logprobs_M.detach())
        if args.importance_sampling_level == "sequence" and outputs.row_counts:
            # Split and joined, not scattered: a NaN of one row stays there.
            rows = log_ratio_M.split(list(outputs.row_counts))
            log_ratio_M = torch.cat([row.mean().expand(len(row)) for row in rows])
        ratio_M = torch.exp(log_ratio_M)
        statistics = []
        kl_M = None
        if args.beta != 0:
            reference_M = outputs.reference_logprobs_M
            assert reference_M is not None, "rows bring it, or a pass without adapters"
            # The unbiased estimate of the divergence that is never negative (Schulman's k3).
            difference_M = reference_M - logprobs_M
            kl_M = torch.exp(difference_M) - difference_M - 1
            kl_M = kl_M * ratio_M if args.use_bias_correction_kl else kl_M
            statistics.append(outputs.mean_over_tokens(kl_M.detach()))
        if args.loss_type == "cispo":
            terms_M = -ratio_M.clamp(max=args.high).detach() * advantages_M * logprobs_M
            statistics.append(_clipped_share((ratio_M > args.high) & (advantages_M > 0), outputs, args))
        elif args.loss_type == "importance_sampling":
            terms_M = -ratio_M * advantages_M
        else:
            clipped_M = ratio_M.clamp(1 - args.epsilon, 1 + args.high)
            ratio_M = ratio_M if args.delta is None else ratio_M.clamp(max=args.delta)
            terms_M = -torch.min(ratio_M * advantages_M, clipped_M * advantages_M)
            low_M = (ratio_M < 1 - args.epsilon) & (advantages_M < 0)
            high_M = (ratio_M > 1 + args.high) & (advantages_M > 0)
            statistics += [_clipped_share(clips_M, outputs, args) for clips_M in (low_M, high_M, low_M | high_M)]
        if kl_M is not None:
            terms_M = terms_M + args.beta * kl_M
        if args.loss_type == "grpo":
            loss = outputs.mean_over_rows(_row_means(terms_M, outputs))
        elif args.loss_type == "dr_grpo":
            loss = outputs.mean_over_rows(outputs.row_sums(terms_M)) / args.max_completion_length
        else:
            loss = outputs.mean_over_tokens(terms_M)
        if args.entropy_coef != 0:
            assert outputs.entropy_M is not None, "the head knows which tasks read it"
            entropy = outputs.mean_over_tokens(outputs.entropy_M)
            statistics += [entropy.detach(), loss.detach()]
            loss = loss - args.entropy_coef * entropy
        return TaskLoss(loss, torch.stack(statistics) if statistics else None)


def _clipped_share(clips_M: torch.Tensor, outputs: TokenOutputs, args: PolicyArgs) -> torch.Tensor:
    """Return this micro-batch's part of the share of ratios that are clipped: of tokens, or of rows."""
    if args.importance_sampling_level == "token":
        return outputs.mean_over_tokens(clips_M.float())
    # All ratios of a row are equal; advantages of its tokens may still differ.
    return outputs.mean_over_rows(_row_means(clips_M.float(), outputs))


def _row_means(values_M: torch.Tensor, outputs: TokenOutputs) -> torch.Tensor:
    counts = torch.tensor(outputs.row_counts, dtype=values_M.dtype, device=values_M.device)
    return outputs.row_sums(values_M) / counts.clamp(min=1)


register_objective(PolicyLoss())
