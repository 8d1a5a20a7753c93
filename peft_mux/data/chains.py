"""Chains: consecutive micro-batches that share long sequences; forwards in order, backwards in reverse.

micro-batch        0        1        2        3
holds              a1 x     a2 y     b1       b2 z
chains           (a1 x,     a2 y)   (b1,      b2 z)
"""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.data.batch import MuxBatch


def chains_of(micro_batches: Sequence[MuxBatch]) -> list[tuple[MuxBatch, ...]]:
    """Return the chains; a micro-batch of whole sequences is one by itself.

    Args:
        micro_batches: the micro-batches of a step, in the order in which they were laid out.
    """
    chains: list[list[MuxBatch]] = []
    has_more = False
    for micro_batch in micro_batches:
        # A sequence goes on in the very next micro-batch, so chains are runs of the list.
        if has_more:
            chains[-1].append(micro_batch)
        else:
            chains.append([micro_batch])
        has_more = micro_batch.has_more
    for chain in chains:
        _check(chain)
    return [tuple(chain) for chain in chains]


def _check(chain: Sequence[MuxBatch]) -> None:
    """Assert that every later part follows the one before it."""
    ends: dict[tuple[str, int], int] = {}
    for micro_batch in chain:
        for part in micro_batch.parts:
            assert part.is_whole or ends.get(part.sequence, 0) == part.start, f"{part} does not follow the part before"
        assert ends.keys() <= {part.sequence for part in micro_batch.parts}, "a part is missing"
        ends = {part.sequence: part.end for part in micro_batch.parts if part.has_more}
    assert not ends, f"the last parts of {sorted(ends)} are missing"


def is_chained(micro_batches: Sequence[MuxBatch]) -> bool:
    """Whether micro-batches share sequences, so that backwards have to run in reverse."""
    return any(micro_batch.parts for micro_batch in micro_batches)
