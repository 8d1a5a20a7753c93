"""The loss of sequence classifiers and of regressions on sequences.

Shape letters: S sequences, C classes.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from peft_mux.data.formats import LABELLED_ROWS
from peft_mux.data.rows.labelled_rows import CLASS_LABELS
from peft_mux.modeling.objectives.arguments import LossArgs
from peft_mux.modeling.objectives.classification_head import CLASSIFICATION_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import SequenceOutputs, TaskLoss


class ClassificationLoss(BaseObjective):
    """Negative log-likelihood of the class, or squared error of the value, one term for each sequence.

    Rows with a list of numbers have one for each class: multi-label classification, or a regression on several values
    where the backbone's configuration says so (`problem_type="regression"`).
    """

    name = "classification"
    loss_types = ("nll",)
    head = CLASSIFICATION_HEAD
    row_form = LABELLED_ROWS
    is_default = True
    uses_totals = False
    eager_reason = "a classifier takes the loss of each task on its own"

    def loss(self, outputs: SequenceOutputs, args: LossArgs) -> TaskLoss:
        """Return the mean over the sequences of the global batch."""
        if CLASS_LABELS in outputs.row_values:
            terms_S = value_terms(outputs.logits_SC, outputs.row_values[CLASS_LABELS], outputs.problem_type)
            return TaskLoss(terms_S.sum() * outputs.loss_weight)
        assert outputs.class_labels is not None, "a classification batch carries class labels"
        return TaskLoss(class_terms(outputs.logits_SC, outputs.class_labels).sum() * outputs.loss_weight)


def class_terms(logits_SC: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the `[S]` losses: cross-entropy for classes, squared error for values.

    Args:
        logits_SC: `[S, C]`, of one task.
        labels: class or value of each sequence, `[S]`.
    """
    # In fp32: a sum of exponentials loses too many bits in half precision.
    scores = logits_SC.float()
    # One output means a regression, as in transformers.
    if scores.shape[1] == 1:
        return (scores[:, 0] - labels.float()) ** 2
    return F.cross_entropy(scores, labels.long(), reduction="none")


def value_terms(logits_SC: torch.Tensor, labels_SC: torch.Tensor, problem_type: str | None) -> torch.Tensor:
    """Return the `[S]` losses of rows with a number for each class, means over the classes as in transformers.

    Args:
        logits_SC: `[S, C]`, of one task.
        labels_SC: `[S, C]`, from 0 to 1; for a regression any numbers.
        problem_type: "regression" for squared errors; else binary cross-entropy of each class (multi-label).
    """
    scores = logits_SC.float()
    labels = labels_SC.to(scores.dtype)
    if problem_type == "regression":
        return ((scores - labels) ** 2).mean(dim=1)
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(dim=1)


register_objective(ClassificationLoss())
