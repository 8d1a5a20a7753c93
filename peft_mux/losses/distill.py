"""Distillation from given log-probabilities of a teacher, such as those of its K likeliest words for each target.

With p the teacher's probabilities of the K words of a target and q the student's, over the whole vocabulary:

    cross_entropy      - sum_k p_k log q_k
    forward_kl         sum_k p_k (log p_k - log q_k)
    forward_kl_tail    the same, and all other words as one more: p = 1 - sum_k p_k, q likewise

If K is the whole vocabulary, the last two are the divergence itself. Terms are averaged over the target tokens of
the global batch. There is no temperature: with it, the softmax over the words that were not given would be needed.

Shape letters: M targets, K words a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from peft_mux.data.formats import LANGUAGE_ROWS, DataFormat, TokenColumn
from peft_mux.errors import Fault
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import LossArgs, Objective, TaskLoss, TokenOutputs, register_objective

_LEAST_TAIL = 1e-6
"""Least probability of all other words: below it, rounding in fp32 decides."""


@dataclass(frozen=True, kw_only=True)
class DistillArgs(LossArgs):
    """Arguments of `DistillLoss`.

    Attributes:
        renormalize: whether the teacher's probabilities of the given words are divided by their sum.
    """

    renormalize: bool = False

    def faults(self, where: str) -> list[Fault]:
        """Return a fault for `forward_kl_tail` with renormalised probabilities, which leave nothing for other words."""
        if self.renormalize and self.loss_type == "forward_kl_tail":
            return [Fault(f"{where}.renormalize", "True", 'False with loss_type "forward_kl_tail"')]
        return []


class DistillLoss(Objective):
    """Divergence of the student's distribution of each target from the teacher's; see the module."""

    name = "distill"
    loss_types = ("forward_kl", "forward_kl_tail", "cross_entropy")
    other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("gkd", "gold", "minillm", "distillation"),
        'Set objective="distill", for rows with teacher_ids and teacher_logprobs: GKD with beta=0 and lmbda=0.',
    )
    head = LANGUAGE_HEAD
    row_form = replace(
        LANGUAGE_ROWS,
        formats=(DataFormat.TOKENIZED,),
        token_columns={
            "teacher_ids": TokenColumn(is_required=True, is_ids=True, is_wide=True, requires="teacher_logprobs"),
            "teacher_logprobs": TokenColumn(is_required=True, is_wide=True, is_logprob=True, requires="teacher_ids"),
        },
        marks=("input_ids", "teacher_ids", "teacher_logprobs"),
    )
    Args = DistillArgs
    statistics = ("teacher_mass", "student_mass")

    def loss(self, outputs: TokenOutputs, args: DistillArgs) -> TaskLoss:
        """Return the mean over the targets of the global batch."""
        student_MK = outputs.word_logprobs_MK
        assert student_MK is not None, "rows name the words"
        teacher_MK = outputs.columns["teacher_logprobs"].to(student_MK.dtype)
        mass_M = teacher_MK.exp().sum(dim=1)
        if args.renormalize:
            teacher_MK = teacher_MK.log_softmax(dim=1)
        if args.loss_type == "forward_kl_tail":
            teacher_MK, student_MK = _with_tail(teacher_MK), _with_tail(student_MK)
        terms_MK = -student_MK if args.loss_type == "cross_entropy" else teacher_MK - student_MK
        loss = outputs.mean_over_tokens((teacher_MK.exp() * terms_MK).sum(dim=1))
        masses = mass_M, outputs.word_logprobs_MK.detach().exp().sum(dim=1)  # type: ignore[union-attr]
        return TaskLoss(loss, torch.stack([outputs.mean_over_tokens(mass) for mass in masses]))


def _with_tail(logprobs_MK: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities `[M, K + 1]` of the words, and of all others together."""
    rest_M = (1.0 - logprobs_MK.exp().sum(dim=1)).clamp(min=_LEAST_TAIL)
    return torch.cat([logprobs_MK, rest_M.log()[:, None]], dim=1)


register_objective(DistillLoss())
