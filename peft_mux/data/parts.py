"""Parts of a long sequence that lie in consecutive micro-batches (M §3.5, Figure 12c: chunks with KV reuse).

A sequence of 11 tokens, at most 5 in a pass, chunks of 2; and two short ones::

    micro-batch m      | 0 1 2 3 | x      0 tokens before it
    micro-batch m + 1  | 4 5 6 7 | y      4, whose keys and values the layers still hold
    micro-batch m + 2  | 8 9 10  |        8

Positions, targets (3 predicts 4), loss weights and places are those of the unsplit sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from peft_mux.data.chunking import round_up


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


class Member(NamedTuple):
    """Tokens of a sequence that lie in one micro-batch.

    Attributes:
        task: index of the task's batch among the batches.
        index: index of the sequence within the batch.
        start: first token within the sequence.
        end: one past the last token.
    """

    task: int
    index: int
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens that lie in the micro-batch."""
        return self.end - self.start


def part_bounds(num_tokens: int, max_tokens: int, chunk_size: int) -> list[tuple[int, int]]:
    """Cut a sequence into parts that a pass holds, as even as whole chunks are; the last one may be short.

    Where chunks are long against a pass, that can be one part more than the fewest possible.

    Args:
        num_tokens: number of tokens of the sequence.
        max_tokens: largest number of tokens of a part.
        chunk_size: parts are whole chunks of this many tokens, but for the last one, and for chunks that are longer
            than a pass.

    Returns:
        Start and end of each part.

    Example:
        >>> part_bounds(11, 5, 2)
        [(0, 4), (4, 8), (8, 11)]
    """
    # A chunk that no pass holds cannot be a unit; then parts are cut at any token.
    step = chunk_size if chunk_size <= max_tokens else 1
    # Even parts rather than full ones and a short rest: a pass costs its launches however few tokens it has.
    num_parts = -(-num_tokens // max_tokens)
    tokens = min(round_up(-(-num_tokens // num_parts), step), max_tokens // step * step)
    return [(start, min(start + tokens, num_tokens)) for start in range(0, num_tokens, tokens)]
