"""Two answers to one prompt as one row: cut to the limit, and side by side as two sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from peft_mux.data.rows.row_reader import RowTools
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence


class Answer(NamedTuple):
    """A prompt and one answer to it.

    Attributes:
        ids: int64, token ids of both.
        start: number of tokens of the prompt.
    """

    ids: np.ndarray
    start: int

    def labels(self) -> np.ndarray:
        """Return the ids as labels, ignored in the prompt."""
        labels = self.ids.copy()
        labels[: self.start] = IGNORE_INDEX
        return labels

    @property
    def has_targets(self) -> bool:
        """Whether a token of the answer is predicted; the first token of a sequence is by none."""
        return len(self.ids) > max(self.start, 1)


def cut_answers(answers: tuple[Answer, ...], index: int, tools: RowTools) -> tuple[Answer, ...] | None:
    """Return answers within the limit, or `None` where the row is left out (and counted).

    Args:
        answers: the answers of a row.
        index: index of the row.
        tools: what the rows of the dataset are read with.

    Raises:
        DataError: if one is too long and the policy is "error", or if a token id lies outside the vocabulary.
    """
    for answer in answers:
        tools.cells.checked_ids(answer.ids, index, "input_ids")
    longest, limit = max(len(answer.ids) for answer in answers), tools.limit.num_tokens
    if all(answer.has_targets for answer in answers):
        if longest > limit and tools.limit.drops(index, longest):
            return None
        # The beginning is kept, as TRL does.
        answers = tuple(Answer(answer.ids[:limit], answer.start) for answer in answers)
    else:
        tools.counts.num_masked += 1
    if all(answer.has_targets for answer in answers):
        return answers
    tools.counts.num_without_targets += 1
    return None


def pair_of(chosen: Answer, rejected: Answer, index: int, values: Mapping[str, float]) -> TokenSequence:
    """Return a row of two sequences, the chosen one first, each with loss on its answer.

    Args:
        chosen: prompt and chosen answer.
        rejected: prompt and rejected answer.
        index: index of the row.
        values: numbers of the row.
    """
    return TokenSequence(
        np.concatenate((chosen.ids, rejected.ids)),
        np.concatenate((chosen.labels(), rejected.labels())),
        index,
        is_one_term=True,
        starts=(len(chosen.ids),),
        row_values=values,
    )
