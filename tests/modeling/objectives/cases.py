"""One case for each variant of each loss: rows as the loss reads them, and the loss by its formula in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers.trainer_pt_utils import LabelSmoother

from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.modeling.objectives.objective import OBJECTIVES, LossArgs, Objective, read_args
from tests.invariants import mux_lab as lab
from tests.modeling.objectives import rollouts, targets
from tests.modeling.objectives.judged_row import JudgedRow

NUM_CLASSES = 3


Judge = Callable[[Sequence[JudgedRow], Any], torch.Tensor]
"""Returns the loss of a global batch from its rows and the arguments of the loss."""


@dataclass(frozen=True)
class LossCase:
    """One variant of a loss.

    Attributes:
        name: name of the loss.
        loss_type: the variant.
        judge: the loss by its formula.
        args: arguments that are set.
        rows: makes the rows of a global batch.
        label: distinguishes cases of one variant.
    """

    name: str
    loss_type: str
    judge: Judge
    args: dict[str, Any] = field(default_factory=dict)
    rows: Callable[[np.random.Generator, Objective], Sequence[TokenSequence]] | None = None
    label: str = ""

    def __str__(self) -> str:
        """Return the name of the case."""
        return "-".join(part for part in (self.name, self.loss_type, self.label) if part)

    @property
    def objective(self) -> Objective:
        """The loss."""
        return OBJECTIVES[self.name]

    @property
    def loss_args(self) -> LossArgs:
        """The arguments as the loss reads them."""
        args, faults = read_args(self.objective.Args, self.args, self.loss_type, "objective_args")
        assert args is not None, faults
        return args

    def batch(self, task: str, seed: int) -> TaskBatch:
        """Return a global batch of rows of unequal lengths."""
        make = self.rows or plain_rows
        return TaskBatch(task, 0, 0, tuple(make(np.random.default_rng(seed), self.objective)))


def plain_rows(rng: np.random.Generator, objective: Objective) -> list[TokenSequence]:
    """Return rows of tokens, some of whose labels are masked, with a class where the loss asks for one."""
    sequences = []
    for index, length in enumerate((9, 4, 2, 17, 6)):
        ids = rng.integers(1, lab.VOCABULARY, size=length)
        labels = np.where(np.arange(length) < index, -100, ids)
        label = int(rng.integers(NUM_CLASSES)) if objective.row_form.needs_label else None
        one_term = objective.row_form.is_one_term
        sequences.append(TokenSequence(ids, ids if index > 1 else labels, index, label, is_one_term=one_term))
    return sequences


def mean_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the mean negative log-likelihood of the targets."""
    return -torch.cat([row.logprobs() for row in rows]).mean()


@dataclass(frozen=True)
class SmoothedCase(LossCase):
    """A loss with smoothed labels."""

    @property
    def loss_args(self) -> LossArgs:
        """The arguments with a share for all words."""
        return replace(super().loss_args, label_smoothing_factor=0.3)


def mean_class_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the mean negative log-likelihood of the classes, as transformers smooths it."""
    labels, logits = torch.tensor([row.row.class_label for row in rows]), torch.stack([row.logits[0] for row in rows])
    return LabelSmoother(args.label_smoothing_factor)({"logits": logits}, labels)


def rows_with_a_number_for_each_class(rng: np.random.Generator, objective: Objective) -> list[TokenSequence]:
    """Return rows with a label from 0 to 1 for each class."""
    labels = [rng.integers(0, 2, size=NUM_CLASSES).astype(np.float32) for _ in range(5)]
    plain = plain_rows(rng, objective)
    return [
        replace(row, class_label=0, row_values={"class_labels": own}) for row, own in zip(plain, labels, strict=True)
    ]


def multi_label(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the mean binary cross-entropy over rows and classes."""
    labels = torch.tensor(np.stack([row.row.row_values["class_labels"] for row in rows])).double()
    return F.binary_cross_entropy_with_logits(torch.stack([row.logits[0] for row in rows]), labels)


def tagged_rows(rng: np.random.Generator, objective: Objective) -> list[TokenSequence]:
    """Return rows with a class for each token, the first and the last one included, except some."""
    found = []
    for index, length in enumerate((9, 4, 2, 17, 6)):
        tags = rng.integers(0, NUM_CLASSES, size=length)
        tags[1:-1][rng.random(max(length - 2, 0)) < 0.3] = -100
        found.append(TokenSequence(rng.integers(1, lab.VOCABULARY, size=length), tags, index, labels_itself=True))
    return found


def mean_tag_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the mean negative log-likelihood of the classes of tokens, as transformers takes it."""
    labels, logits = torch.cat([torch.tensor(row.row.labels) for row in rows]), [row.logits[0] for row in rows]
    return LabelSmoother(args.label_smoothing_factor)({"logits": torch.cat(logits)}, labels)


CASES: list[LossCase] = [
    LossCase("sft", "nll", mean_nll),
    LossCase("sft", "nll", targets.weighted_nll, rows=targets.weighted_rows, label="weights"),
    LossCase("sft", "nll", targets.several_nll, rows=targets.rows_with_several_targets, label="several-targets"),
    LossCase("sft", "dft", targets.dynamic_nll),
    LossCase("sft", "dft", targets.dynamic_nll, rows=targets.weighted_rows, label="weights"),
    LossCase("sft", "dft", targets.dynamic_nll, rows=targets.rows_with_several_targets, label="several-targets"),
    SmoothedCase("sft", "nll", targets.smoothed_nll, label="smoothed"),
    SmoothedCase("sft", "nll", targets.smoothed_nll, rows=targets.weighted_rows, label="smoothed-weights"),
    SmoothedCase("sft", "nll", targets.smoothed_nll, rows=targets.rows_with_several_targets, label="smoothed-several"),
    LossCase("classification", "nll", mean_class_nll),
    SmoothedCase("classification", "nll", mean_class_nll, label="smoothed"),
    SmoothedCase("token_classification", "nll", mean_tag_nll, rows=tagged_rows, label="smoothed"),
    LossCase("classification", "nll", multi_label, rows=rows_with_a_number_for_each_class, label="multi-label"),
    LossCase("token_classification", "nll", mean_tag_nll, rows=tagged_rows),
    *[
        LossCase("distill", kind, targets.distilled, rows=targets.taught_rows)
        for kind in ("forward_kl", "forward_kl_tail", "cross_entropy")
    ],
    LossCase("distill", "cross_entropy", targets.distilled, {"renormalize": True}, targets.taught_rows, "renormalized"),
    *[
        LossCase("policy", kind, rollouts.judged, rows=rollouts.rows)
        for kind in ("grpo", "bnpo", "dapo", "ppo", "cispo", "importance_sampling")
    ],
    LossCase("policy", "dr_grpo", rollouts.judged, {"max_completion_length": 20, "beta": 0.1}, rollouts.rows),
    LossCase("policy", "grpo", rollouts.judged, rollouts.SEQUENCE_LEVEL, rollouts.rows, "sequence-level"),
    LossCase("policy", "cispo", rollouts.judged, rollouts.CISPO, rollouts.rows_with_reference, "reference"),
    LossCase("policy", "dapo", rollouts.judged, rollouts.COOLER, rollouts.rows, "temperature"),
    LossCase("policy", "grpo", rollouts.judged, {**rollouts.COOLER, "entropy_coef": 0.3}, rollouts.rows, "entropy"),
]
"""A loss of the package comes with a case for each of its variants."""
