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

# MERGED: `RowTrie`: what the rows of a task's global batch begin with alike, for whoever puts rows into passes.
# MERGED: Rows that share a run of tokens form a *bundle*: in one pass they compute it once, in two passes twice. A
# MERGED: bundle that no
# MERGED: pass holds is cut where its rows, sorted by their tokens, have least in common or fill the pass, and each
# MERGED: piece has its
# MERGED: beginning for itself::
# MERGED:     bundle of 5 rows, 40 tokens in common and 10 of its own each    90 tokens computed, of 250
# MERGED:     bound of 75                                                      [40 10 10 10] [40 10 10]
# MERGED: `PrefixTree`: which tokens of a stream are computed, where rows of a task begin with the same tokens.
# MERGED: The stream stays as it is; only its *computed rows* go through the layers. A node is a run of tokens that
# MERGED: some sequences
# MERGED: have in common, or that one has for itself; its tokens are those of the first of these sequences::
# MERGED:     stream            a b c | a b d | a b d e | x y          tokens 0 .. 11
# MERGED:     computed rows     0 1 2       5         9   10 11
# MERGED:     row of a token    0 1 2 | 0 1 3 | 0 1 3 4 | 5 6
# MERGED:     nodes   number   rows   parent   depth        (minimum 1)
# MERGED:             0        0 1    -1       0            a b
# MERGED:             1        2       0       2            c
# MERGED:             2        3       0       2            d
# MERGED:             3        4       2       3            e
# MERGED:             4        5 6    -1       0            x y
# MERGED: A query of a node attends to the keys of its ancestors, from the root on, and causally to those of its own
# MERGED: node. Rows of
# MERGED: an ancestor need not lie right before those of a node: another sequence's may lie between them.
# MERGED: Shape letters: T tokens of the stream, U computed rows, S sequences.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


class Node(NamedTuple):
    """Consecutive computed rows that have the same tokens before them.

    Attributes:
        start: number of its first computed row.
        length: number of its rows, at least 1.
        parent: number of the node before it; -1 where its first token is a sequence's first.
        depth: place of its first token within its sequences, the sum of the lengths of its ancestors.
    """

    start: int
    length: int
    parent: int
    depth: int


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Which tokens of a stream are computed, and which computed row stands for each token of the stream.

    Attributes:
        computed: int64 `[U]`, the token of the stream that each computed row is; ascending, so task by task.
        row_of_token: int64 `[T]`, the computed row that stands for each token of the stream.
        nodes: all computed rows, in their order; parents before children.
    """

    computed: np.ndarray
    row_of_token: np.ndarray
    nodes: tuple[Node, ...]

    @property
    def num_rows(self) -> int:
        """Number U of computed rows."""
        return len(self.computed)

    @property
    def num_tokens(self) -> int:
        """Number T of tokens of the stream."""
        return len(self.row_of_token)

    def path(self, number: int) -> tuple[int, ...]:
        """Return the numbers of the nodes from the root to a node, itself included.

        Args:
            number: number of the node.
        """
        path = [number]
        while (parent := self.nodes[path[-1]].parent) >= 0:
            path.append(parent)
        return tuple(reversed(path))

    def row_offsets(self, token_offsets: Sequence[int]) -> tuple[int, ...]:
        """Return before how many computed rows tokens of the stream lie, for bounds of tasks or of sequences.

        Args:
            token_offsets: numbers of tokens, from 0 to T.
        """
        return tuple(np.searchsorted(self.computed, np.asarray(token_offsets, dtype=np.int64)).tolist())


def build_prefix_tree(
    sequences: Sequence[np.ndarray], groups: Sequence[int | None], *, min_tokens: int = MIN_RUN_TOKENS
) -> PrefixTree | None:
    """Return the tree of a stream's sequences, or `None` where no two of a group begin alike.

    Args:
        sequences: int64 `[L]`, the token ids of each of the S sequences in the order of the stream.
        groups: for each of them, which ones it may share with: those of equal number, none where `None`.
        min_tokens: least tokens of a node of several sequences.

    Example:
        >>> tree = build_prefix_tree([np.array([5, 6, 7]), np.array([5, 6, 8])], [0, 0], min_tokens=2)
        >>> tree.computed.tolist(), tree.row_of_token.tolist(), [tuple(node) for node in tree.nodes]
        ([0, 1, 2, 5], [0, 1, 2, 0, 1, 3], [(0, 2, -1, 0), (2, 1, 0, 2), (3, 1, 0, 2)])
    """
    members: dict[int, list[int]] = {}
    alone = []
    for index, group in enumerate(groups):
        (alone if group is None else members.setdefault(group, [])).append(index)
    found = []
    for own in members.values():
        rows = [sequences[index] for index in own]
        if begin_alike(rows, min_tokens):
            found.append((own, sort_rows(rows)))
        else:
            alone += own
    # Two rows that begin alike share a run at least: that of all that have these first tokens.
    return _tree([len(row) for row in sequences], found, alone, min_tokens) if found else None


class _Branch(NamedTuple):
    """A run of tokens of some sequences of the stream; the fields that sort it come first."""

    sequence: int
    start: int
    end: int
    sequences: tuple[int, ...]
    parent: tuple[int, int] | None


def _tree(
    lengths: Sequence[int], groups: Sequence[tuple[list[int], SortedRows]], alone: Sequence[int], min_tokens: int
) -> PrefixTree:
    """Lay out the nodes of all groups, and those of the sequences that share nothing, in the order of the stream."""
    branches = [_Branch(index, 0, lengths[index], (index,), None) for index in alone if lengths[index]]
    for own, rows in groups:
        of_rows = [own[index] for index in rows.order]
        runs = shared_runs([lengths[index] for index in of_rows], rows.common, min_tokens)
        branches += _branches(runs, of_rows)
    # By the first sequence and then the place in it, which puts parents before children.
    branches.sort(key=lambda one: one[:2])
    first_tokens = np.cumsum([0, *lengths])
    numbers: dict[tuple[int, int], int] = {}
    nodes, computed = [], []
    row_of_token = np.empty(first_tokens[-1], dtype=np.int64)
    num_rows = 0
    for number, (sequence, start, end, sequences, parent) in enumerate(branches):
        numbers[sequence, start] = number
        nodes.append(Node(num_rows, end - start, -1 if parent is None else numbers[parent], start))
        computed.append(np.arange(start, end) + first_tokens[sequence])
        rows = np.arange(num_rows, num_rows + end - start)
        for index in sequences:
            row_of_token[first_tokens[index] + start : first_tokens[index] + end] = rows
        num_rows += end - start
    return PrefixTree(np.concatenate(computed), row_of_token, tuple(nodes))


def _branches(runs: Sequence[Run], sequences: Sequence[int]) -> list[_Branch]:
    """Return runs of sorted rows by the numbers that these sequences have in the stream."""
    keys: list[tuple[int, int]] = []
    found = []
    for first, last, start, end, parent in runs:
        own = tuple(sequences[first:last])
        keys.append((min(own), start))
        found.append(_Branch(*keys[-1], end, own, None if parent < 0 else keys[parent]))
    return found
