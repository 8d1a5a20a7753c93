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

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _ROUND = 2**20, 2 * 2**20, 20 * 2**20, 10 * 2**20, 2 * 2**20


class OutOfMemory(Exception):
    """The card has no room for a new segment."""


@dataclass(eq=False)
class _Block:
    """A part of a segment, between its neighbours in the same segment."""

    address: int
    num_bytes: int
    is_small: bool
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


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
    free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
    used: dict[int, _Block] = {}
    held = most = next_address = 0

    def put(block: _Block) -> None:
        block.is_free = True
        insort(free[block.is_small], (block.num_bytes, block.address, block))

    def take(block: _Block) -> None:
        block.is_free = False
        blocks = free[block.is_small]
        del blocks[bisect_left(blocks, (block.num_bytes, block.address))]

    for number, num_bytes in history:
        if num_bytes == 0:
            if (block := used.pop(number, None)) is None:  # has no bytes
                continue
            for other in (block.before, block.after):
                if other is None or not other.is_free:
                    continue
                take(other)
                block.num_bytes += other.num_bytes
                if other is block.before:
                    block.address = other.address
                    block.before = other.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after is not None:
                        block.after.before = block
            put(block)
            continue
        size = -(-num_bytes // 512) * 512
        is_small = size <= _SMALL
        blocks = free[is_small]
        index = bisect_left(blocks, (size, 0))
        if index < len(blocks):
            block = blocks[index][-1]
            take(block)
        else:
            segment = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
            if size >= _OWN_SEGMENT:
                segment = -(-size // _ROUND) * _ROUND
            if held + segment > card_bytes:
                for pool in free.values():
                    for unused in [block for *_, block in pool if block.before is None and block.after is None]:
                        take(unused)
                        held -= unused.num_bytes
            if held + segment > card_bytes:
                raise OutOfMemory(f"{size:,} bytes do not fit beside {held:,} of {card_bytes:,}")
            held += segment
            most = max(most, held)
            block = _Block(next_address, segment, is_small)
            next_address += segment
        rest = block.num_bytes - size
        if rest >= 512 if is_small else rest > _SMALL:
            block.num_bytes = size
            behind = _Block(block.address + size, rest, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = behind
            block.after = behind
            put(behind)
        used[number] = block
    return most
