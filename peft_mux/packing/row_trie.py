"""`RowTrie`: what the rows of a task's global batch begin with alike, for whoever puts rows into passes.

Rows that share a run of tokens form a *bundle*: in one pass they compute it once, in two passes twice. A bundle that no
pass holds is cut where its rows, sorted by their tokens, have least in common or fill the pass, and each piece has its
beginning for itself::

    bundle of 5 rows, 40 tokens in common and 10 of its own each    90 tokens computed, of 250
    bound of 75                                                      [40 10 10 10] [40 10 10]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.packing.shared_runs import MIN_RUN_TOKENS, Run, SortedRows, begin_alike, shared_runs, sort_rows


@dataclass(frozen=True, slots=True)
class RowTrie:
    """The trie of the sequences of some rows.

    Attributes:
        sequences: the sequences of all rows, sorted by their tokens.
        rows: the row that each sequence is of.
        lengths: tokens of each sequence.
        min_tokens: least tokens that are shared.
    """

    sequences: SortedRows
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    min_tokens: int = MIN_RUN_TOKENS

    def computed(self, chosen: Sequence[int]) -> dict[int, int]:
        """Return how many tokens each of some rows computes in one pass; what several share, the first of them does.

        Args:
            chosen: indices of rows.
        """
        found = dict.fromkeys(chosen, 0)
        order, runs = self._runs(chosen)
        for run in runs:
            found[min(order[run.first : run.last])] += run.end - run.start
        return found

    def num_computed(self, chosen: Sequence[int]) -> int:
        """Return how many tokens rows compute in one pass; `chosen` are their indices."""
        return sum(self.computed(chosen).values())

    def bundles(self, chosen: Sequence[int]) -> list[list[int]]:
        """Return rows by what they share, those of a bundle sorted by their tokens; a row that shares none is alone.

        Args:
            chosen: indices of rows.
        """
        order, runs = self._runs(chosen)
        bundle_of = {row: [row] for row in dict.fromkeys(order)}
        for run in runs:
            if run.parent >= 0:
                continue
            # Rows of several sequences tie together what these share.
            joined: list[int] = []
            for own in {id(bundle_of[row]): bundle_of[row] for row in order[run.first : run.last]}.values():
                joined += own
            bundle_of |= dict.fromkeys(joined, joined)
        return list({id(own): own for own in bundle_of.values()}.values())

    def pieces(self, bundle: Sequence[int], capacity: int) -> list[list[int]]:
        """Cut a bundle into pieces that passes hold, in the order of its tokens.

        Args:
            bundle: rows in the order in which they are cut, none of which computes more than a pass holds.
            capacity: the most tokens of a piece.
        """
        pieces, start = [], 0
        while start < len(bundle):
            # The most rows that fit: tokens only grow with rows, so that halving finds them.
            fits, fails = start + 1, len(bundle) + 1
            while fails - fits > 1:
                middle = (fits + fails) // 2
                if self.num_computed(bundle[start:middle]) <= capacity:
                    fits = middle
                else:
                    fails = middle
            pieces.append(list(bundle[start:fits]))
            start = fits
        return pieces

    def items(self, chosen: Sequence[int], capacity: int) -> list[list[int]]:
        """Return rows by what goes into one pass, or onto one replica: bundles, cut into pieces that are held.

        Args:
            chosen: indices of rows.
            capacity: the most tokens that an item computes; a row that computes more is one by itself.

        Returns:
            The rows of each item, ascending; items by their first rows.
        """
        # Beside others it would share, but it has a pass of its own or is cut, and then shares nothing.
        is_long = {row: self.num_computed([row]) > capacity for row in chosen}
        items = [[row] for row in chosen if is_long[row]]
        for bundle in self.bundles([row for row in chosen if not is_long[row]]):
            items += self.pieces(bundle, capacity)
        return sorted(map(sorted, items))

    def of_rows(self, chosen: Sequence[int]) -> RowTrie:
        """Return the trie of some rows, numbered anew in the order that is given.

        Args:
            chosen: indices of rows.
        """
        numbers = {row: number for number, row in enumerate(chosen)}
        kept = [index for index, row in enumerate(self.rows) if row in numbers]
        places = {index: place for place, index in enumerate(kept)}
        order, common = self.sequences.of(kept)
        return RowTrie(
            SortedRows(tuple(places[index] for index in order), common),
            tuple(numbers[self.rows[index]] for index in kept),
            tuple(self.lengths[index] for index in kept),
            self.min_tokens,
        )

    def _runs(self, chosen: Sequence[int]) -> tuple[list[int], list[Run]]:
        """Return the row of each sequence of some rows, sorted by their tokens, and the runs of these sequences."""
        wanted = set(chosen)
        found = self.sequences
        if len(wanted) < len(set(self.rows)):
            found = found.of(index for index, row in enumerate(self.rows) if row in wanted)
        lengths = [self.lengths[index] for index in found.order]
        return [self.rows[index] for index in found.order], shared_runs(lengths, found.common, self.min_tokens)


def row_trie(rows: Sequence[Sequence[np.ndarray]], *, min_tokens: int = MIN_RUN_TOKENS) -> RowTrie | None:
    """Return the trie of the rows of a global batch; `None` where no two of their sequences begin alike.

    Args:
        rows: int64 `[L]`, the token ids of each sequence of each row.
        min_tokens: least tokens that are shared.

    Example:
        >>> trie = row_trie([[np.arange(20)], [np.arange(30)], [np.arange(5)]])
        >>> trie.computed([0, 1, 2]), trie.bundles([0, 1, 2])
        ({0: 20, 1: 10, 2: 5}, [[2], [0, 1]])
    """
    sequences = [sequence for row in rows for sequence in row]
    if not begin_alike(sequences, min_tokens):
        return None
    owners = tuple(index for index, row in enumerate(rows) for _ in row)
    return RowTrie(sort_rows(sequences), owners, tuple(map(len, sequences)), min_tokens)
