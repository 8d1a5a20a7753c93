"""Even shares: how equal replicas divide the rows of a step, evenly by tokens or by time, each row whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from peft_mux.packing.row_trie import RowTrie


def even_shares(
    lengths: Sequence[Sequence[int]],
    num_replicas: int,
    slowness: Sequence[float] | None = None,
    tries: Sequence[RowTrie | None] | None = None,
) -> list[list[list[int]]]:
    """Divide the rows of a step: longest first, each to whoever is done with it first.

    All tasks of a step are divided at once, whatever the plan puts together, so that replicas come out even over the
    step and a new plan moves no row.

    Args:
        lengths: for each task the tokens of each row of its global batch.
        num_replicas: number of replicas, or of processes, that share the rows.
        slowness: what each of them takes for a token, in any unit; by default all take the same.
        tries: for each task what its rows begin with alike; such rows stay together, up to an even share, and count
            the tokens that they compute. By default none do.

    Returns:
        For each replica and each task, the indices of its rows, ascending.

    Example:
        >>> even_shares([[5, 3], [4]], 2)
        [[[0], []], [[1], [0]]]
    """
    # Ties by task and index, as every process divides by itself and has to find the same shares.
    rows = sorted(_items(lengths, tries or [None] * len(lengths), num_replicas))
    num_tokens = [0] * num_replicas
    rates = [1.0] * num_replicas if slowness is None else slowness
    shares: list[list[list[int]]] = [[[] for _ in lengths] for _ in range(num_replicas)]
    for length, task, indices in rows:
        done = [rate * (own - length) for rate, own in zip(rates, num_tokens, strict=True)]
        replica = done.index(min(done))
        num_tokens[replica] -= length
        shares[replica][task] += indices
    return [[sorted(own) for own in share] for share in shares]


def _items(
    lengths: Sequence[Sequence[int]], tries: Sequence[RowTrie | None], num_replicas: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return what stays together: minus its tokens, its task and its rows."""
    if all(trie is None for trie in tries):
        return [(-length, task, (index,)) for task, own in enumerate(lengths) for index, length in enumerate(own)]
    pairs = list(zip(lengths, tries, strict=True))
    total = sum(sum(own) if trie is None else trie.num_computed(range(len(own))) for own, trie in pairs)
    items = []
    for task, (own, trie) in enumerate(pairs):
        if trie is None:
            items += [(-length, task, (index,)) for index, length in enumerate(own)]
            continue
        for item in trie.items(range(len(own)), math.ceil(total / num_replicas)):
            items.append((-trie.num_computed(item), task, tuple(item)))
    return items
