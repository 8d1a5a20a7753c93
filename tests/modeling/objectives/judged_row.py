"""A row with what plain PEFT gives for each of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence


@dataclass(frozen=True)
class JudgedRow:
    """A row with what plain PEFT gives for each of its sequences.

    Attributes:
        row: the row.
        logits: `[L, V]` of each sequence, or `[C]` for classifiers, float64 with gradient.
        reference: the same of the backbone without adapters.
    """

    row: TokenSequence
    logits: Sequence[torch.Tensor]
    reference: Sequence[torch.Tensor]

    def logprobs(self, number: int = 0) -> torch.Tensor:
        """Return the log-probabilities of the targets of a sequence."""
        return self._logprobs(self.logits[number], number)

    def reference_logprobs(self, number: int = 0) -> torch.Tensor:
        """Return the same under the backbone without adapters."""
        return self._logprobs(self.reference[number], number)

    def column(self, name: str, number: int = 0) -> torch.Tensor:
        """Return a token column at the targets of a sequence, in float64."""
        start, end = self.row.sequence_bounds[number]
        chosen = self.row.labels[start + 1 : end] != IGNORE_INDEX
        return torch.tensor(self.row.token_columns[name][start + 1 : end][chosen])

    def target_logits(self, number: int = 0) -> torch.Tensor:
        """Return the logits `[M, V]` that predict the targets of a sequence."""
        start, end = self.row.sequence_bounds[number]
        chosen = torch.tensor(self.row.labels[start + 1 : end] != IGNORE_INDEX)
        return self.logits[number][:-1][chosen]

    def _logprobs(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        start, end = self.row.sequence_bounds[number]
        labels = torch.tensor(self.row.labels[start + 1 : end])
        return -F.cross_entropy(logits[:-1], labels, reduction="none", ignore_index=-100)[labels != -100]
