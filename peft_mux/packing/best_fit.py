"""Packing: which sequences of a task's global batch lie together in one pack (M §3.5, first step).

    lengths  7 5 4 3 1      capacity 8

    best fit decreasing     pack 0 | 7 . . . . . . | 1 |
                            pack 1 | 5 . . . . | 3 . . |
                            pack 2 | 4 . . .           |

A pack never crosses a global batch, so what a task learns from in one step does not depend on packing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int, *, rooms: Sequence[int] = ()) -> list[list[int]]:
    """Put items into as few packs as the best-fit-decreasing rule finds (at most 11/9 of the fewest, plus 6/9).

    Longest first, each into the fullest pack that still has room; of equally full ones the first made. Deterministic,
    O(n log n) but for the insertion into a sorted list.

    Args:
        lengths: number of tokens of each item, at least 1 and at most `capacity`.
        capacity: number of tokens that a pack holds.
        rooms: number of tokens that are free in each pack that was opened before.

    Returns:
        Indices of the items of each pack, ascending within a pack; packs in the order in which they were opened.
        Those that were opened before come first, with what was added to them, which may be nothing.

    Raises:
        ValueError: if an item is longer than a pack, or shorter than 1.
    """
    if any(not 1 <= length <= capacity for length in lengths):
        raise ValueError(
            f"lengths: got {min(lengths)} to {max(lengths)}; allowed: 1 to {capacity}, the capacity of a pack."
        )
    packs: list[list[int]] = [[] for _ in rooms]
    free: list[tuple[int, int]] = sorted((room, number) for number, room in enumerate(rooms))
    # Ties are broken by position, so that every process packs alike.
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        length = lengths[index]
        # The list is sorted by room, so the first that holds the item is the fullest; -1 stands before every number.
        place = bisect_left(free, (length, -1))
        if place == len(free):
            room, number = capacity, len(packs)
            packs.append([])
        else:
            room, number = free.pop(place)
        packs[number].append(index)
        insort(free, (room - length, number))
    return [sorted(pack) for pack in packs]
