"""The loss of sequence classifiers and of regressions on sequences.

Shape letters: S sequences, C classes.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from peft_mux.data.formats import LABELLED_ROWS
from peft_mux.modeling.objectives.arguments import LossArgs
from peft_mux.modeling.objectives.classification_head import CLASSIFICATION_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import SequenceOutputs, TaskLoss


class ClassificationLoss(BaseObjective):
    """Negative log-likelihood of the class, or squared error of the value, one term for each sequence."""

    name = "classification"
    loss_types = ("nll",)
    head = CLASSIFICATION_HEAD
    row_form = LABELLED_ROWS
    is_default = True
    uses_totals = False
    eager_reason = "a classifier takes the loss of each task on its own"

    def loss(self, outputs: SequenceOutputs, args: LossArgs) -> TaskLoss:
        """Return the mean over the sequences of the global batch."""
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


register_objective(ClassificationLoss())
