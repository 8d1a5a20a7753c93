"""Even shares: how equal replicas divide the rows of a step, evenly by tokens or by time, each row whole."""

from __future__ import annotations

from collections.abc import Sequence


def even_shares(
    lengths: Sequence[Sequence[int]], num_replicas: int, slowness: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Divide the rows of a step: longest first, each to whoever is done with it first.

    All tasks of a step are divided at once, whatever the plan puts together, so that replicas come out even over the
    step and a new plan moves no row.

    Args:
        lengths: for each task the tokens of each row of its global batch.
        num_replicas: number of replicas, or of processes, that share the rows.
        slowness: what each of them takes for a token, in any unit; by default all take the same.

    Returns:
        For each replica and each task, the indices of its rows, ascending.

    Example:
        >>> even_shares([[5, 3], [4]], 2)
        [[[0], []], [[1], [0]]]
    """
    # Ties by task and index, as every process divides by itself and has to find the same shares.
    rows = sorted((-length, task, index) for task, own in enumerate(lengths) for index, length in enumerate(own))
    num_tokens = [0] * num_replicas
    rates = [1.0] * num_replicas if slowness is None else slowness
    shares: list[list[list[int]]] = [[[] for _ in lengths] for _ in range(num_replicas)]
    for length, task, index in rows:
        done = [rate * (own - length) for rate, own in zip(rates, num_tokens, strict=True)]
        replica = done.index(min(done))
        num_tokens[replica] -= length
        shares[replica][task].append(index)
    return [[sorted(own) for own in share] for share in shares]
