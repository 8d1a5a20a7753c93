"""`RowItems`: what of a step is dispatched as a whole: single rows, and rows that share tokens (bundles, or pieces).

A bundle is a sequence to whoever dispatches, of the tokens that it computes. One that is larger than an item may be is
cut, and each piece computes its beginning anew where it has a replica for itself. As pieces on one replica share it
again, all of them are priced by what they compute on as many replicas as there are::

    a bundle of 3 pieces   [40 10 10] [40 10 10] [40 10]         170 tokens apart, 90 together
    on two replicas        90 + (170 - 90) / (3 - 1) = 130        of which a piece of 60 counts 60 / 170
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from peft_mux.packing.row_trie import RowTrie


class BatchRows(NamedTuple):
    """The rows of one task's global batch, as far as a dispatch depends on them.

    Attributes:
        task: name of the task.
        step: step of the task.
        lengths: tokens of each row.
        trie: what rows begin with alike; `None` where they share nothing.
    """

    task: str
    step: int
    lengths: tuple[int, ...]
    trie: RowTrie | None = None

    def alone(self, row: int) -> int:
        """Return the tokens that a row computes by itself."""
        return self.lengths[row] if self.trie is None else min(self.lengths[row], self.trie.num_computed([row]))


class RowItems(NamedTuple):
    """The rows of a step by what is dispatched as a whole.

    Attributes:
        rows: for each batch, the rows of each item.
        tokens: for each batch, the tokens that each item counts.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item, batch after batch."""
        return [tokens for own in self.tokens for tokens in own]


def row_items(batches: Sequence[BatchRows], num_replicas: int, least_tokens: int) -> list[RowItems]:
    """Return the items of a step: large ones, which spare most, and then smaller ones, which come out more even.

    Args:
        batches: the rows.
        num_replicas: number of replicas, over which pieces of a bundle may come to lie.
        least_tokens: the least of what replicas hold in a pass, so that any of them holds an item of several rows.
    """
    total = sum(_together(one) for one in batches)
    found = []
    for parts in (num_replicas, _SMALLER * num_replicas):
        capacity = min(least_tokens, math.ceil(total / parts))
        items = [_of_batch(one, num_replicas, capacity, least_tokens) for one in batches]
        found.append(RowItems(tuple(rows for rows, _ in items), tuple(tokens for _, tokens in items)))
    return list(dict.fromkeys(found))


_SMALLER = 4
"""By how much the smaller items are smaller: so that replicas of unequal speed come out within some per cent."""


def _together(batch: BatchRows) -> int:
    """Return the tokens that the rows of a batch compute in one pass."""
    return sum(batch.lengths) if batch.trie is None else batch.trie.num_computed(range(len(batch.lengths)))


def _of_batch(
    batch: BatchRows, num_replicas: int, capacity: int, least_tokens: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the rows of each item of a batch, and its tokens."""
    trie, everything = batch.trie, range(len(batch.lengths))
    if trie is None:
        return tuple((row,) for row in everything), batch.lengths
    rows = tuple(map(tuple, trie.items(everything, capacity)))
    apart = [batch.alone(own[0]) if len(own) == 1 else trie.num_computed(own) for own in rows]
    number = {row: place for place, own in enumerate(rows) for row in own}
    tokens = list(apart)
    for bundle in trie.bundles(everything):
        # What some replicas do not hold goes by what it is, so that it comes to none of them.
        pieces = [one for one in sorted({number[row] for row in bundle}) if apart[one] <= least_tokens]
        if len(pieces) < 2:
            continue
        all_apart = sum(apart[one] for one in pieces)
        joint = trie.num_computed([row for one in pieces for row in rows[one]])
        counted = joint + (all_apart - joint) * (min(num_replicas, len(pieces)) - 1) / (len(pieces) - 1)
        for one in pieces:
            tokens[one] = max(1, min(apart[one], round(apart[one] * counted / all_apart)))
    return rows, tuple(tokens)
