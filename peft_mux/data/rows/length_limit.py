"""What becomes of rows longer than a task's limit: cut, left out or refused; and the counts of what became of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peft_mux.data.cells import RowCells


@dataclass(slots=True)
class RowCounts:
    """What became of the rows so far.

    Attributes:
        num_truncated: rows that were cut to the limit.
        num_dropped_long: rows that were left out because they are longer than the limit.
        num_without_targets: rows that were left out because no token of theirs carries loss.
        num_masked: those rows without targets whose labels were all masked before any cut.
    """

    num_truncated: int = 0
    num_dropped_long: int = 0
    num_without_targets: int = 0
    num_masked: int = 0


class LengthLimit:
    """Applies a task's policy to rows that are too long, and counts what it does.

    Args:
        num_tokens: longest sequence that is kept whole.
        why: what sets that limit, for messages: `max_length` or the backbone's positions.
        policy: "truncate", "drop" or "error".
        cells: makes the error that names the row.
        counts: receives the numbers of rows cut and left out.
    """

    def __init__(self, num_tokens: int, why: str, policy: str, cells: RowCells, counts: RowCounts) -> None:
        """Keep the limit, its policy and where to count."""
        self.num_tokens = num_tokens
        self.why = why
        self.policy = policy
        self._cells = cells
        self._counts = counts

    def cut(self, ids: np.ndarray, labels: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return token ids and labels within the limit, or `None` where the row is left out.

        Raises:
            DataError: if the row is too long and the policy is "error".
        """
        if len(ids) <= self.num_tokens:
            return ids, labels
        if self.drops(index, len(ids)):
            return None
        # The beginning is kept, as TRL does.
        return ids[: self.num_tokens], labels[: self.num_tokens]

    def drops(self, index: int, length: int) -> bool:
        """Count a row that is too long as left out or as cut; return whether it is left out.

        Raises:
            DataError: if the policy is "error".
        """
        if self.policy == "error":
            raise self._cells.error(
                index,
                "input_ids",
                f"{length} tokens or more",
                f"at most {self.num_tokens} ({self.why}); shorten the row",
            )
        if self.policy == "drop":
            self._counts.num_dropped_long += 1
            return True
        self._counts.num_truncated += 1
        return False
