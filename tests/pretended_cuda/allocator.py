"""How much memory torch's caching allocator reserves for a history of allocations, fragmentation included.

The rules are those of `CUDACachingAllocator.cpp` with its default settings, for one stream:

* Sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from segments of 2 MiB; larger ones from segments of
  20 MiB, and those of 10 MiB and more from segments of their own size, rounded up to 2 MiB.
* A request takes the smallest free block of its pool that is large enough, and the one with the lowest address if
  several have that size; the rest stays free if it has at least 512 bytes (small) or more than 1 MiB (large).
  Neighbours that are free merge.
* If the card has no room for a new segment, segments without any block in use are returned first.
"""

from __future__ import annotations

from collections.abc import Iterable

_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _ROUND = 2**20, 2 * 2**20, 20 * 2**20, 10 * 2**20, 2 * 2**20


class OutOfMemory(Exception):
    """The card has no room for a new segment."""


History = Iterable[tuple[int, int]]
"""A number and its bytes for each allocation, and that number and 0 where it is freed."""


def allocated_bytes(history: History) -> int:
    """Return the most bytes that are in use at a time."""
    used: dict[int, int] = {}
    now = most = 0
    for number, num_bytes in history:
        now += num_bytes or -used.pop(number, 0)
        if num_bytes:
            used[number] = num_bytes
        most = max(most, now)
    return most


def reserved_bytes(history: History, card_bytes: int) -> int:
    """Return the most bytes that the allocator holds of a card.

    Args:
        history: allocations and frees, in order.
        card_bytes: memory of the card.

    Raises:
        OutOfMemory: if an allocation does not fit.
    """
    holes: dict[bool, dict[int, int]] = {True: {}, False: {}}  # bytes by address, of the small and of the large pool
    used: dict[int, tuple[int, int, bool]] = {}
    segments: dict[int, int] = {}  # bytes by address
    held = most = next_address = 0
    for number, num_bytes in history:
        if num_bytes == 0:
            if number in used:  # a tensor without bytes is not
                address, size, is_small = used.pop(number)
                pool = holes[is_small]
                size += pool.pop(address + size, 0)
                for before in [start for start in pool if start + pool[start] == address]:
                    address, size = before, size + pool.pop(before)
                pool[address] = size
            continue
        size = -(-num_bytes // 512) * 512
        is_small = size <= _SMALL
        pool = holes[is_small]
        if fits := [(room, address) for address, room in pool.items() if room >= size]:
            room, address = min(fits)
            del pool[address]
        else:
            own = -(-size // _ROUND) * _ROUND if size >= _OWN_SEGMENT else _LARGE_SEGMENT
            room, address = _SMALL_SEGMENT if is_small else own, next_address
            if held + room > card_bytes:
                for free in holes.values():
                    for unused in [start for start in free if free[start] == segments.get(start)]:
                        held -= segments.pop(unused)
                        del free[unused]
            if held + room > card_bytes:
                raise OutOfMemory(f"{size:,} bytes do not fit beside {held:,} of {card_bytes:,}")
            held += room
            most = max(most, held)
            segments[address] = room
            next_address += room + 512  # blocks of two segments are never neighbours
        if room - size >= 512 if is_small else room - size > _SMALL:
            pool[address + size] = room - size
            room = size
        used[number] = address, room, is_small
    return most
