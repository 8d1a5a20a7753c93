"""The loss of sequence classifiers and of regressions on sequences.

Shape letters: S sequences, C classes.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.data.formats import LABELLED_ROWS
from peft_mux.modeling.objectives.classification_head import CLASSIFICATION_HEAD, task_logits
from peft_mux.modeling.objectives.head import HeadPass
from peft_mux.modeling.objectives.objective import register_objective, sequence_counts


class ClassificationLoss:
    """Negative log-likelihood of the class, or squared error of the value, one term for each sequence."""

    name = "classification"
    loss_type = "nll"
    head = CLASSIFICATION_HEAD
    row_form = LABELLED_ROWS
    metric_names = ("eval_loss",)
    needs_reference = False
    eager_reason = "a classifier takes the loss of each task on its own"

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Return the losses `[S]` of the sequences, sorted by task."""
        return task_losses(task_logits(hidden_TD, batch, head), batch)

    def counts(self, batch: MuxBatch) -> list[int]:
        """Return the number of sequences of each task."""
        return sequence_counts(batch)

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the mean loss."""
        return {"eval_loss": loss}


def task_losses(logits: list[torch.Tensor], batch: MuxBatch) -> torch.Tensor:
    """Return the `[S]` losses: cross-entropy for classes, squared error for values.

    Args:
        logits: `[S_task, C_task]` of each task, from `task_logits`.
        batch: the micro-batch with its `class_labels`.
    """
    assert batch.class_labels is not None, "a classification batch carries class labels"
    losses = []
    for index, task_logits_SC in enumerate(logits):
        labels = batch.class_labels[batch.sequence_offsets[index] : batch.sequence_offsets[index + 1]]
        # In fp32: a sum of exponentials loses too many bits in half precision.
        scores = task_logits_SC.float()
        # One output means a regression, as in transformers.
        if scores.shape[1] == 1:
            losses.append((scores[:, 0] - labels.float()) ** 2)
        else:
            losses.append(F.cross_entropy(scores, labels.long(), reduction="none"))
    return torch.cat(losses)


register_objective(ClassificationLoss())
