"""Shared prefixes of rows, as a trie that is built from the sorted rows.

    rows, sorted       a b c        in common with the row before   0
                       a b d e                                      2
                       a b d f                                      3
                       x                                            0

    runs of at least 1       [a b] --- [c]            of at least 2       [a b] --- [c]
                                   --- [d] --- [e]                              --- [d e]
                                           --- [f]                              --- [d f]
                             [x]                                          [x]

If a run is shorter than the minimum, each row that shares it computes its own copy. A trie depends only on the lengths
of rows and of their common prefixes, so a plan can count computed tokens exactly without the tokens themselves.

`RowTrie` describes which rows of a task's global batch share tokens, for code that packs rows into passes. Rows that
share a run of tokens form a *bundle*: one pass computes the run once, two passes compute it twice. A bundle that does
not fit into a pass is split, in the sorted order of its rows, and each piece computes the prefix again::

    bundle of 5 rows, 40 tokens in common and 10 more in each        90 tokens computed, of 250
    bound of 75                                                      [40 10 10 10] [40 10 10]

`PrefixTree` describes which tokens of a stream are computed. The stream itself is unchanged; only its *computed rows*
go through the layers. A node is a run of tokens that several sequences share, or that only one sequence has; its tokens
are those of the first of these sequences::

    stream            a b c | a b d | a b d e | x y          tokens 0 .. 11
    computed rows     0 1 2       5         9   10 11
    row of a token    0 1 2 | 0 1 3 | 0 1 3 4 | 5 6
    nodes   number   rows   parent   depth        (minimum 1)
            0        0 1    -1       0            a b
            1        2       0       2            c
            2        3       0       2            d
            3        4       2       3            e
            4        5 6    -1       0            x y

A query of a node attends to all keys of its ancestors, and causally to those of its own node. The rows of an ancestor
need not directly precede those of a node: rows of other sequences may be between them.

Shape letters: T tokens of the stream, U computed rows, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MIN_RUN_TOKENS = 6
"""Minimum number of tokens of a shared run; rows that share fewer tokens compute them separately.

Of 4, 6, 8, 12 and 16 on one CPU thread with hidden sizes 128 and 384, 4 and 6 are fastest. With 1 or 2, rows that share
only their first word are grouped, and their tree costs more than it saves. GPUs are assumed to behave the same.
"""


class SortedRows(NamedTuple):
    """Rows in the order of their tokens, in which rows with a shared prefix are neighbours.

    Attributes:
        order: indices of the rows.
        common: for each of them, in that order, the length of its common prefix with the previous one; 0 for the first.
    """

    order: tuple[int, ...]
    common: tuple[int, ...]

    def of(self, chosen: Iterable[int]) -> SortedRows:
        """Return some of the rows, by index, in the same order."""
        kept = set(chosen)
        order: list[int] = []
        common: list[int] = []
        # The common prefix of two rows is the shortest one between neighbours on the way from one to the other.
        since: list[int] = []
        for index, shared in zip(self.order, self.common, strict=True):
            since.append(shared)
            if index in kept:
                common.append(min(since) if order else 0)
                order.append(index)
                since = []
        return SortedRows(tuple(order), tuple(common))


class Run(NamedTuple):
    """Consecutive tokens that several rows share, or that only one row has.

    Attributes:
        first: number of its first row, in sorted order.
        last: one past the number of its last row.
        start: place of its first token within each of the rows.
        end: one past the place of its last token.
        parent: number of the preceding run; -1 if the run starts at the first token of its rows.
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
    # Big-endian, so that bytes compare like the numbers. Ties are broken by index, so that all processes agree.
    keys = [np.asarray(row).astype(">u8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda index: (keys[index], index))
    common = []
    for place, index in enumerate(order):
        before = rows[order[place - 1]] if place else rows[index][:0]
        length = min(len(before), len(rows[index]))
        differ = np.flatnonzero(before[:length] != rows[index][:length])
        common.append(int(differ[0]) if len(differ) else length)
    return SortedRows(tuple(order), tuple(common))


def any_share_prefix(rows: Iterable[np.ndarray], min_tokens: int = MIN_RUN_TOKENS) -> bool:
    """Return whether any two rows start with the same `min_tokens` tokens: a fast check before sorting.

    Args:
        rows: int64 `[L]`, the token ids of each row.
        min_tokens: number of tokens to compare.
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
    """Return the runs of sorted rows, parents first; each token of each row belongs to exactly one run.

    Args:
        lengths: number of tokens of each row.
        common: length of the common prefix of each row and the previous one.
        min_tokens: minimum number of tokens of a run that several rows share.
    """
    runs: list[Run] = []
    # A stack instead of recursion: if each row is a prefix of the next (as in dialogues), depth equals the row count.
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
        todo += [(cut, after, start, parent) for cut, after in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return runs


@dataclass(frozen=True, slots=True)
class RowTrie:
    """The trie of the sequences of some rows.

    Attributes:
        sequences: the sequences of all rows, sorted by their tokens.
        rows: the row that each sequence belongs to.
        lengths: number of tokens of each sequence.
        min_tokens: minimum number of tokens of a shared run.
    """

    sequences: SortedRows
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    min_tokens: int = MIN_RUN_TOKENS

    def computed(self, chosen: Sequence[int]) -> dict[int, int]:
        """Return the number of tokens that each chosen row computes if all are in one pass.

        Shared tokens are counted for the first of the rows that share them.
        """
        saved = dict.fromkeys(chosen, 0)
        order, runs = self._runs(chosen)
        for run in runs:
            saved[min(order[run.first : run.last])] += run.end - run.start
        return saved

    def num_computed(self, chosen: Sequence[int]) -> int:
        """Return the number of tokens that the chosen rows compute if all are in one pass."""
        return sum(run.end - run.start for run in self._runs(chosen)[1])

    def bundles(self, chosen: Sequence[int]) -> list[list[int]]:
        """Group the chosen rows into bundles, each sorted by tokens; a row that shares nothing is its own bundle."""
        order, runs = self._runs(chosen)
        bundle_of = {row: [row] for row in dict.fromkeys(order)}
        for run in runs:
            if run.parent >= 0:
                continue
            # A row of several sequences joins the bundles of these sequences.
            joined: list[int] = []
            for bundle in {id(bundle_of[row]): bundle_of[row] for row in order[run.first : run.last]}.values():
                joined += bundle
            bundle_of |= dict.fromkeys(joined, joined)
        return list({id(bundle): bundle for bundle in bundle_of.values()}.values())

    def items(self, chosen: Sequence[int], capacity: int) -> list[list[int]]:
        """Group the chosen rows into items for one pass or replica: bundles, or pieces of bundles that fit.

        Args:
            chosen: indices of rows.
            capacity: maximum number of tokens that an item computes; a row that computes more is its own item.

        Returns:
            The rows of each item, ascending; items by their first rows.
        """
        # A row above the capacity shares nothing, because it gets its own pass or is split.
        is_long = {row: self.num_computed([row]) > capacity for row in chosen}
        items = [[row] for row in chosen if is_long[row]]
        for bundle in self.bundles([row for row in chosen if not is_long[row]]):
            start = 0
            while start < len(bundle):
                # Bisect for the maximum number of rows that fit; adding rows never reduces the tokens.
                fits, fails = start + 1, len(bundle) + 1
                while fails - fits > 1:
                    middle = (fits + fails) // 2
                    if self.num_computed(bundle[start:middle]) <= capacity:
                        fits = middle
                    else:
                        fails = middle
                items.append(bundle[start:fits])
                start = fits
        return sorted(map(sorted, items))

    def of_rows(self, chosen: Sequence[int]) -> RowTrie:
        """Return the trie of the chosen rows, renumbered in the given order."""
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
        """Return, for the sorted sequences of the chosen rows, the row of each sequence, and the runs."""
        wanted = set(chosen)
        picked = self.sequences
        if len(wanted) < len(set(self.rows)):
            picked = picked.of(index for index, row in enumerate(self.rows) if row in wanted)
        lengths = [self.lengths[index] for index in picked.order]
        return [self.rows[index] for index in picked.order], shared_runs(lengths, picked.common, self.min_tokens)


def row_trie(rows: Sequence[Sequence[np.ndarray]], *, min_tokens: int = MIN_RUN_TOKENS) -> RowTrie | None:
    """Return the trie of the rows of a global batch; `None` if no two of their sequences share a prefix.

    Args:
        rows: int64 `[L]`, the token ids of each sequence of each row.
        min_tokens: minimum number of tokens of a shared run.

    Example:
        >>> trie = row_trie([[np.arange(20)], [np.arange(30)], [np.arange(5)]])
        >>> trie.computed([0, 1, 2]), trie.bundles([0, 1, 2])
        ({0: 20, 1: 10, 2: 5}, [[2], [0, 1]])
    """
    sequences = [sequence for row in rows for sequence in row]
    if not any_share_prefix(sequences, min_tokens):
        return None
    row_of_sequence = tuple(index for index, row in enumerate(rows) for _ in row)
    return RowTrie(sort_rows(sequences), row_of_sequence, tuple(map(len, sequences)), min_tokens)


class Node(NamedTuple):
    """Consecutive computed rows that belong to the same sequences.

    Attributes:
        start: number of its first computed row.
        length: number of its rows, at least 1.
        parent: number of the preceding node; -1 if the node starts at the first token of its sequences.
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
        computed: int64 `[U]`, index in the stream of each computed token; ascending, so tasks stay contiguous.
        row_of_token: int64 `[T]`, the computed row of each token of the stream.
        nodes: the nodes in the order of their computed rows; parents before children.
    """

    computed: np.ndarray
    row_of_token: np.ndarray
    nodes: tuple[Node, ...]

    @property
    def num_rows(self) -> int:
        """Number U of computed rows."""
        return len(self.computed)

    def path(self, number: int) -> tuple[int, ...]:
        """Return the numbers of the nodes from the root to a node, inclusive."""
        path = [number]
        while (parent := self.nodes[path[-1]].parent) >= 0:
            path.append(parent)
        return tuple(reversed(path))

    def row_offsets(self, token_offsets: Sequence[int]) -> tuple[int, ...]:
        """Convert offsets of tasks or sequences among the T tokens into offsets among the computed rows."""
        return tuple(np.searchsorted(self.computed, np.asarray(token_offsets, dtype=np.int64)).tolist())


def build_prefix_tree(
    sequences: Sequence[np.ndarray], groups: Sequence[int | None], *, min_tokens: int = MIN_RUN_TOKENS
) -> PrefixTree | None:
    """Return the tree of a stream's sequences, or `None` if no two sequences of a group share a prefix.

    Args:
        sequences: int64 `[L]`, the token ids of each of the S sequences in stream order.
        groups: group number of each sequence; only sequences of the same group share tokens, and none with `None`.
        min_tokens: minimum number of tokens of a node that several sequences share.

    Example:
        >>> tree = build_prefix_tree([np.array([5, 6, 7]), np.array([5, 6, 8])], [0, 0], min_tokens=2)
        >>> tree.computed.tolist(), tree.row_of_token.tolist(), [tuple(node) for node in tree.nodes]
        ([0, 1, 2, 5], [0, 1, 2, 0, 1, 3], [(0, 2, -1, 0), (2, 1, 0, 2), (3, 1, 0, 2)])
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(index)
    shared = [rows for rows in members.values() if any_share_prefix([sequences[index] for index in rows], min_tokens)]
    if not shared:
        return None
    # Each branch: its first sequence, start and end within it, all its sequences, and the key (first sequence, start)
    # of its parent. Sorting by key puts parents before children.
    branches: list[tuple[int, int, int, tuple[int, ...], tuple[int, int] | None]] = []
    for rows in shared:
        sorted_rows = sort_rows([sequences[index] for index in rows])
        order = [rows[index] for index in sorted_rows.order]
        keys: list[tuple[int, int]] = []
        for run in shared_runs([len(sequences[index]) for index in order], sorted_rows.common, min_tokens):
            of_run = tuple(order[run.first : run.last])
            keys.append((min(of_run), run.start))
            branches.append((*keys[-1], run.end, of_run, None if run.parent < 0 else keys[run.parent]))
    shares = {index for rows in shared for index in rows}
    for index, sequence in enumerate(sequences):
        if index not in shares and len(sequence):
            branches.append((index, 0, len(sequence), (index,), None))
    branches.sort(key=lambda branch: branch[:2])
    first_tokens = np.cumsum([0, *map(len, sequences)])
    numbers: dict[tuple[int, int], int] = {}
    nodes, computed = [], []
    row_of_token = np.empty(first_tokens[-1], dtype=np.int64)
    num_rows = 0
    for number, (first, start, end, of_branch, parent) in enumerate(branches):
        numbers[first, start] = number
        nodes.append(Node(num_rows, end - start, -1 if parent is None else numbers[parent], start))
        computed.append(np.arange(start, end) + first_tokens[first])
        rows = np.arange(num_rows, num_rows + end - start)
        for index in of_branch:
            row_of_token[first_tokens[index] + start : first_tokens[index] + end] = rows
        num_rows += end - start
    return PrefixTree(np.concatenate(computed), row_of_token, tuple(nodes))
