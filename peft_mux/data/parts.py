"""Parts of a long sequence that lie in consecutive micro-batches (M §3.5, Figure 12c: chunks with KV reuse).

A sequence of 11 tokens, at most 5 in a pass, chunks of 2; and two short ones::

    micro-batch m      | 0 1 2 3 | x      0 tokens before it
    micro-batch m + 1  | 4 5 6 7 | y      4, whose keys and values the layers still hold
    micro-batch m + 2  | 8 9 10  |        8

Positions, targets (3 predicts 4), loss weights and places are those of the unsplit sequence.
"""

from __future__ import annotations

from typing import NamedTuple


class SequencePart(NamedTuple):
    """Which tokens of a row of a task's global batch a sequence of a stream is.

    Attributes:
        task: name of the task.
        row: index of the row within the task's global batch; -1 for padding.
        start: first token within the row, which is the number of tokens before it.
        end: one past the last token.
        num_tokens: number of tokens of the whole row.
    """

    task: str
    row: int
    start: int
    end: int
    num_tokens: int

    @property
    def sequence(self) -> tuple[str, int]:
        """Which sequence of the step it is a part of."""
        return self.task, self.row

    @property
    def has_more(self) -> bool:
        """Whether more of the sequence follows in the next micro-batch."""
        return self.end < self.num_tokens

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its sequence."""
        return self.start == 0 and not self.has_more
