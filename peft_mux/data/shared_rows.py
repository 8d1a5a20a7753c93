"""`SharedRows`: the prefix tree of a micro-batch, as its passes read it.

The micro-batch goes on describing the whole stream; activations have a row for each of the tokens that are computed.

Shape letters: T tokens of the stream, U computed rows, M targets, P different pairs of a computed row and a label, N
tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from peft_mux.packing.prefix_tree import PrefixTree, build_prefix_tree
from peft_mux.packing.shared_runs import MIN_RUN_TOKENS


class TargetPairs(NamedTuple):
    """The targets of a stream, each pair of a computed row and a label once.

    Attributes:
        first: int64 `[P]`, for each pair the number of its first target among the M; sorted by task.
        of_target: int64 `[M]`, the pair that each target is.
        offsets: where each task's pairs begin, `N + 1` numbers.
    """

    first: torch.Tensor
    of_target: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Which tokens of a micro-batch are computed.

    Attributes:
        tree: the tree, on the host.
        computed: int64 `[U]`, the token of the stream that each computed row is.
        row_of_token: int64 `[T]`, the computed row that stands for each token of the stream.
        task_offsets: where each task's computed rows begin, `N + 1` numbers.
        may_share: for each of the N tasks whether its sequences may share tokens.
        min_tokens: least tokens that are shared.
        target_rows: int64, the computed rows that predict something, ascending.
        target_offsets: where each task's begin among those, `N + 1` numbers.
        pairs: the targets, each pair of a computed row and a label once; `None` where no two are the same, or where
            some of the targets were left out.
    """

    tree: PrefixTree
    computed: torch.Tensor
    row_of_token: torch.Tensor
    task_offsets: tuple[int, ...]
    may_share: tuple[bool, ...]
    min_tokens: int
    target_rows: torch.Tensor
    target_offsets: tuple[int, ...]
    pairs: TargetPairs | None = None

    @property
    def num_rows(self) -> int:
        """Number U of computed rows."""
        return self.tree.num_rows

    def without_pairs(self) -> SharedRows:
        """Return the same tree for a micro-batch some of whose targets were left out."""
        return replace(self, pairs=None)

    def to(self, move: Callable[[torch.Tensor], torch.Tensor]) -> SharedRows:
        """Return it with its tensors moved; `move` moves one."""
        pairs = self.pairs and TargetPairs(move(self.pairs.first), move(self.pairs.of_target), self.pairs.offsets)
        moved = {name: move(getattr(self, name)) for name in ("computed", "row_of_token", "target_rows")}
        return replace(self, **moved, pairs=pairs)


class StreamTokens(NamedTuple):
    """What a tree is made of: tokens of a stream and its bounds, on the host.

    Attributes:
        input_ids: int64 `[T]`.
        lengths: tokens of each sequence.
        sequence_offsets: where each task's sequences begin, `N + 1` numbers.
        task_offsets: where each task's tokens begin, `N + 1` numbers.
        labels: int64 `[T]`, already shifted.
        target_rows: int64 `[M]`, the tokens that predict something.
        target_offsets: where each task's targets begin, `N + 1` numbers.
    """

    input_ids: np.ndarray
    lengths: Sequence[int]
    sequence_offsets: Sequence[int]
    task_offsets: Sequence[int]
    labels: np.ndarray
    target_rows: np.ndarray
    target_offsets: Sequence[int]


def shared_rows(
    tokens: StreamTokens,
    may_share: Sequence[bool],
    *,
    whole: Sequence[bool] | None = None,
    min_tokens: int = MIN_RUN_TOKENS,
) -> SharedRows | None:
    """Return which tokens of a stream are computed; `None` where all are.

    Args:
        tokens: the stream.
        may_share: for each of the N tasks whether its sequences may share tokens.
        whole: whether each sequence is a whole one, no part of a longer one and no padding; by default all are. Others
            share nothing.
        min_tokens: least tokens that are shared.
    """
    if not any(may_share):
        return None
    bounds = np.cumsum([0, *tokens.lengths])
    sequences = [tokens.input_ids[start:end] for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    groups: list[int | None] = []
    for task, (first, last) in enumerate(zip(tokens.sequence_offsets[:-1], tokens.sequence_offsets[1:], strict=True)):
        groups += [task if may_share[task] and (whole is None or whole[one]) else None for one in range(first, last)]
    tree = build_prefix_tree(sequences, groups, min_tokens=min_tokens)
    if tree is None:
        return None
    task_offsets, target_rows = tree.row_offsets(tokens.task_offsets), np.unique(tree.row_of_token[tokens.target_rows])
    return SharedRows(
        tree=tree,
        computed=torch.from_numpy(tree.computed),
        row_of_token=torch.from_numpy(tree.row_of_token),
        task_offsets=task_offsets,
        target_rows=torch.from_numpy(target_rows),
        target_offsets=tuple(np.searchsorted(target_rows, task_offsets).tolist()),
        may_share=tuple(may_share),
        min_tokens=min_tokens,
        pairs=_pairs(tokens, tree),
    )


def _pairs(tokens: StreamTokens, tree: PrefixTree) -> TargetPairs | None:
    """Return the targets, each pair of a computed row and a label once; `None` where no two are the same."""
    if not len(tokens.target_rows):
        return None
    rows, labels = tree.row_of_token[tokens.target_rows], tokens.labels[tokens.target_rows]
    # Ordered by row and so by task; labels are token ids, or classes of tokens.
    keys = rows * (int(labels.max()) + 1) + labels
    found, first, of_target = np.unique(keys, return_index=True, return_inverse=True)
    if len(found) == len(keys):
        return None
    offsets = np.searchsorted(rows[first], tree.row_offsets(tokens.task_offsets))
    return TargetPairs(torch.from_numpy(first), torch.from_numpy(of_target), tuple(offsets.tolist()))
