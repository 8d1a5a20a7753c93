"""Shared runs: which tokens rows begin with alike, as a trie that is read off the rows in sorted order.

    rows, sorted       a b c        in common with the row before   0
                       a b d e                                      2
                       a b d f                                      3
                       x                                            0

    runs of at least 1       [a b] --- [c]            of at least 2       [a b] --- [c]
                                   --- [d] --- [e]                              --- [d e]
                                           --- [f]                              --- [d f]
                             [x]                                          [x]

Where a branch is shorter than the least run, the rows that share it each have it for themselves. Lengths and numbers of
tokens in common tell everything, so that a plan counts with them what a step does with tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

MIN_RUN_TOKENS = 6
"""Least tokens of a shared run; rows that have fewer in common each compute them.

Of 4, 6, 8, 12 and 16 on one thread of a CPU with hidden sizes 128 and 384, 4 and 6 gain most; 1 or 2 tie rows together
that have a first word in common, whose trees then cost more than the word. On a GPU a node is taken to cost no more.
"""


class SortedRows(NamedTuple):
    """Rows in the order of their tokens, so that those that begin alike lie side by side.

    Attributes:
        order: indices of the rows.
        common: for each of them, in that order, how many tokens it has in common with the one before; 0 for the first.
    """

    order: tuple[int, ...]
    common: tuple[int, ...]

    def of(self, chosen: Iterable[int]) -> SortedRows:
        """Return some of the rows, still in order.

        Args:
            chosen: indices of the rows that stay.
        """
        kept = set(chosen)
        order: list[int] = []
        common: list[int] = []
        # What two rows have in common is the least of what neighbours between them have.
        since: list[int] = []
        for index, own in zip(self.order, self.common, strict=True):
            since.append(own)
            if index in kept:
                common.append(min(since) if order else 0)
                order.append(index)
                since = []
        return SortedRows(tuple(order), tuple(common))


class Run(NamedTuple):
    """Tokens that some rows have in common, or that one row has for itself.

    Attributes:
        first: number of its first row, in sorted order.
        last: one past the number of its last row.
        start: place of its first token within each of the rows.
        end: one past the place of its last token.
        parent: number of the run before it, -1 where its first token is a row's first.
    """

    first: int
    last: int
    start: int
    end: int
    parent: int


def sort_rows(rows: Sequence[np.ndarray]) -> SortedRows:
    """Sort rows by their tokens.

    Args:
        rows: int64 `[L]`, the token ids of each row; none negative.

    Example:
        >>> sort_rows([np.array([7, 8]), np.array([5]), np.array([7, 8, 9])])
        SortedRows(order=(1, 0, 2), common=(0, 0, 2))
    """
    # Most significant byte first, so that bytes compare as the numbers do; ties by index, for all processes alike.
    keys = [np.asarray(row).astype(">u8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda index: (keys[index], index))
    common = [0] * min(len(rows), 1)
    common += [_num_common(rows[before], rows[index]) for before, index in zip(order[:-1], order[1:], strict=True)]
    return SortedRows(tuple(order), tuple(common))


def begin_alike(rows: Iterable[np.ndarray], min_tokens: int = MIN_RUN_TOKENS) -> bool:
    """Return whether two rows have their first tokens in common: a look that costs next to nothing.

    Args:
        rows: int64 `[L]`, the token ids of each row.
        min_tokens: number of tokens to look at.
    """
    seen = set()
    for row in rows:
        if len(row) < min_tokens:
            continue
        key = row[:min_tokens].tobytes()
        if key in seen:
            return True
        seen.add(key)
    return False


def shared_runs(lengths: Sequence[int], common: Sequence[int], min_tokens: int = MIN_RUN_TOKENS) -> list[Run]:
    """Return the runs of rows in sorted order, those before a run first.

    Args:
        lengths: tokens of each row.
        common: tokens that each row has in common with the one before.
        min_tokens: least tokens of a run of several rows.

    Returns:
        The runs; each token of each row lies in exactly one, and none is empty.
    """
    runs: list[Run] = []
    # A stack instead of recursion: rows of a dialogue, each a beginning of the next, nest as deep as there are rows.
    todo = [(0, len(lengths), 0, -1)]
    while todo:
        first, last, start, parent = todo.pop()
        if last - first == 1:
            if lengths[first] > start:
                runs.append(Run(first, last, start, lengths[first], parent))
            continue
        if last == first:
            continue
        end = min(common[first + 1 : last])
        cuts = [first, *(place for place in range(first + 1, last) if common[place] == end), last]
        if end - start >= max(min_tokens, 1):
            runs.append(Run(first, last, start, end, parent))
            start, parent = end, len(runs) - 1
        todo += [(own, after, start, parent) for own, after in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return runs


def num_computed(lengths: Sequence[int], common: Sequence[int], min_tokens: int = MIN_RUN_TOKENS) -> int:
    """Return how many tokens of rows in sorted order are computed; arguments as for `shared_runs`."""
    return sum(run.end - run.start for run in shared_runs(lengths, common, min_tokens))


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    """Return with how many tokens two rows begin alike."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
