"""Losses that the package does not have, which ask for all that one may ask for: pairs, a reference, batch values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.data.task_batch import TokenSequence
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import LossArgs, Objective, TaskLoss, TokenOutputs, above
from tests.invariants import mux_lab as lab
from tests.modeling.objectives.judged_row import JudgedRow


@dataclass(frozen=True, kw_only=True)
class PairArgs(LossArgs):
    """Arguments of `PairLoss`."""

    beta: float = above(0.0, 0.5)
    needs_reference: ClassVar[bool] = True


class PairLoss(Objective):
    """Prefers the first sequence of each row to the second, by more than the backbone does and the batch does."""

    name = "toy-pairs"
    loss_types = ("pair",)
    head = LANGUAGE_HEAD
    row_form = replace(LANGUAGE_ROWS, is_one_term=True)
    Args = PairArgs
    reference_columns = ("ref_first", "ref_second")
    has_logits = False

    def num_batch_values(self, args: PairArgs) -> int:
        """Return two numbers."""
        return 2

    def statistic_names(self, args: PairArgs) -> tuple[str, ...]:
        """Return the names."""
        return ("margin", "first_tokens")

    def batch_values(self, outputs: TokenOutputs, args: PairArgs) -> torch.Tensor:
        """Return the sum and the number of the margins."""
        margins_R = self._margins(outputs)
        return torch.stack([margins_R.sum(), torch.tensor(float(len(margins_R)))])

    def loss(self, outputs: TokenOutputs, args: PairArgs) -> TaskLoss:
        """Return the mean logistic loss of the margins, less half of the mean margin."""
        assert outputs.batch_values is not None, "a pass before has made them"
        margins_R = self._margins(outputs)
        mean = outputs.batch_values[0] / outputs.batch_values[1]
        scale_R = outputs.row_values["scale"]
        loss = outputs.mean_over_rows(-F.logsigmoid(args.beta * scale_R * (margins_R - mean / 2)))
        first = torch.tensor(float(sum(outputs.sequence_counts[::2]))) / outputs.totals["num_target_tokens/0"]
        return TaskLoss(loss, torch.stack([outputs.mean_over_rows(margins_R), first]).detach())

    def _margins(self, outputs: TokenOutputs) -> torch.Tensor:
        reference_M = outputs.reference_logprobs_M
        assert reference_M is not None, "a pass before has made it"
        sums_R2 = outputs.per_row(outputs.sequence_sums(outputs.logprobs_M - reference_M))
        return sums_R2[:, 0] - sums_R2[:, 1]


def pair_rows(rng: np.random.Generator, objective: Objective) -> list[TokenSequence]:
    """Return rows of two sequences each."""
    rows = []
    for index, (first, second) in enumerate(((5, 7), (4, 2), (9, 3), (2, 6))):
        ids = rng.integers(1, lab.VOCABULARY, size=first + second)
        labels = np.where(rng.random(len(ids)) < 0.2, -100, ids)
        labels[[1, first + 1]] = ids[[1, first + 1]]
        values = {"scale": float(rng.uniform(0.5, 2.0))}
        rows.append(TokenSequence(ids, labels, index, is_one_term=True, starts=(first,), row_values=values))
    return rows


def judge_pairs(rows: Sequence[JudgedRow], args: PairArgs) -> torch.Tensor:
    """Return the loss of `PairLoss` by its formula."""
    margins = torch.stack(
        [
            (row.logprobs(0) - row.reference_logprobs(0)).sum() - (row.logprobs(1) - row.reference_logprobs(1)).sum()
            for row in rows
        ]
    )
    scales = torch.tensor([row.row.row_values["scale"] for row in rows])
    return -F.logsigmoid(args.beta * scales * (margins - margins.mean().detach() / 2)).mean()
