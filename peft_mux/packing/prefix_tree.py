"""`PrefixTree`: which tokens of a stream are computed, where rows of a task begin with the same tokens.

The stream stays as it is; only its *computed rows* go through the layers. A node is a run of tokens that some sequences
have in common, or that one has for itself; its tokens are those of the first of these sequences::

    stream            a b c | a b d | a b d e | x y          tokens 0 .. 11
    computed rows     0 1 2       5         9   10 11
    row of a token    0 1 2 | 0 1 3 | 0 1 3 4 | 5 6

    nodes   number   rows   parent   depth        (minimum 1)
            0        0 1    -1       0            a b
            1        2       0       2            c
            2        3       0       2            d
            3        4       2       3            e
            4        5 6    -1       0            x y

A query of a node attends to the keys of its ancestors, from the root on, and causally to those of its own node. Rows of
an ancestor need not lie right before those of a node: another sequence's may lie between them.

Shape letters: T tokens of the stream, U computed rows, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from peft_mux.packing.shared_runs import MIN_RUN_TOKENS, Run, SortedRows, begin_alike, shared_runs, sort_rows


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
