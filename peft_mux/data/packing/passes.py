"""Packing of rows into passes (M §3.5): which rows of which task share a pass, and in which order.

The rows of each task are packed, and the packs are put into passes by best fit, up to slightly more than an even share
of the tokens. If that does not give the intended number of passes, rows are assigned longest first, each to the pass
with the fewest tokens. Rows are not split, so a step has the intended number of passes only if there are enough rows,
and passes are not exactly equal. Rows that are longer than a pass are split into parts if allowed; the passes that hold
them form a *chain*. Rows with a shared prefix are packed together, as one item whose size is the number of tokens that
they compute (`prefixes`)::

    3 tasks with rows of 5 5 | 4 4 | 3 3 tokens, bound 16

    1 pass intended     5 4 3 | 5 4 3         24 tokens do not fit into one
    4 passes intended   5 | 5 | 4 3 | 4 3
    9 passes intended   5 | 5 | 4 | 4 | 3 | 3

A pack never crosses a global batch, so the rows that a task learns from in a step do not depend on packing. Best fit
decreasing of lengths 7 5 4 3 1 with capacity 8::

    pack 0 | 7 . . . . . . | 1 |
    pack 1 | 5 . . . . | 3 . . |
    pack 2 | 4 . . .           |

Chunks are equal pieces of packs, the unit in which tasks are aligned; a pack of 11 tokens in chunks of 4::

    | 0 1 2 3 | 4 5 6 7 | 8 9 10 . |          one token of padding, if chunks must be equal
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peft_mux.data.packing.prefixes import RowTrie
from peft_mux.errors import ConfigError

_SLACK = 1.05
"""Factor by which a pass may exceed an even share of the tokens, because whole rows do not fill passes evenly."""
_OTHER_STEP = 1.5
"""Factor by which the tokens of a step may differ from the plan before it is cut into another number of passes."""


def best_fit_decreasing(
    lengths: Sequence[int], capacity: int, *, rooms: Sequence[int] = (), in_order_of_placing: bool = False
) -> list[list[int]]:
    """Put items into packs by best fit decreasing (at most 11/9 of the optimal number of packs, plus 6/9).

    Items are placed longest first, each into the fullest pack that has room; ties go to the first such pack.
    Deterministic, O(n log n) except for the insertion into a sorted list.

    Args:
        lengths: number of tokens of each item, at least 1 and at most `capacity`.
        capacity: number of tokens that a pack holds.
        rooms: number of free tokens in each existing pack.
        in_order_of_placing: as in `trl.pack_dataset`, ties go to the pack that has had this room for longest, and items
            are returned in the order in which they were placed.

    Returns:
        Indices of the items of each pack, ascending within a pack; packs in the order in which they were opened.
        Packs that were opened before come first, with what was added to them, which may be nothing.
    """
    packs: list[list[int]] = [[] for _ in rooms]
    free: list[tuple[int, int, int]] = sorted((room, number, number) for number, room in enumerate(rooms))
    # Ties are broken by index, so that all processes get the same packs.
    for turn, index in enumerate(sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))):
        length = lengths[index]
        # The list is sorted by room, so the first pack that holds the item is the fullest; -1 sorts before any number.
        place = bisect_left(free, (length, -1, -1))
        if place == len(free):
            room, number = capacity, len(packs)
            packs.append([])
        else:
            room, _, number = free.pop(place)
        packs[number].append(index)
        insort(free, (room - length, turn if in_order_of_placing else number, number))
    return packs if in_order_of_placing else [sorted(pack) for pack in packs]


def round_up(tokens: int, size: int) -> int:
    """Return the smallest multiple of a size that holds `tokens`."""
    return -(-tokens // size) * size


@dataclass(frozen=True, slots=True)
class PassRules:
    """Settings of cutting rows into passes.

    Attributes:
        split_long_sequences: whether rows that are longer than a pass are split into parts; by default each of them
            gets its own pass.
        chunk_size: number of tokens per chunk; parts consist of whole chunks. `None` for the rule of M §3.5.
        min_chunk_size: minimum chunk size of that rule; smaller chunks give kernels too little work.

    Raises:
        ConfigError: if a size is not at least 1.
    """

    split_long_sequences: bool = False
    chunk_size: int | None = None
    min_chunk_size: int = 64

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name, value in (("chunk_size", self.chunk_size), ("min_chunk_size", self.min_chunk_size)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value}.")

    def size(self, lengths: Sequence[int]) -> int:
        """Return the chunk size: the greatest power of two that divides all lengths, or the minimum (M §3.5)."""
        if self.chunk_size is not None:
            return self.chunk_size
        # The lowest bit that is set in any length is the greatest power of two that divides all of them.
        bits = 0
        for length in lengths:
            bits |= int(length)
        return max(self.min_chunk_size, bits & -bits)


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The rows of one task's global batch.

    Attributes:
        lengths: tokens of each row.
        only: indices of the rows that are to be cut into passes; `None` for all.
        stay_whole: whether the rows must not be split, such as rows with a class.
        trie: shared prefixes of the rows; `None` if they share none.
    """

    lengths: Sequence[int]
    only: Sequence[int] | None = None
    stay_whole: bool = False
    trie: RowTrie | None = None


class Member(NamedTuple):
    """Tokens of a row that are in one pass.

    Attributes:
        task: index of the task.
        index: index of the row within the task's global batch.
        start: first token within the row.
        end: one past the last token.
        shared: number of these tokens that the pass computes for another row, or for another sequence of this row.
    """

    task: int
    index: int
    start: int
    end: int
    shared: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the pass."""
        return self.end - self.start

    @property
    def num_computed(self) -> int:
        """Number of tokens that the pass computes for this member."""
        return self.end - self.start - self.shared


class _Item(NamedTuple):
    """Rows that go into one pass together: one row, or several that share tokens.

    Attributes:
        members: the rows.
        num_tokens: number of tokens that a pass computes for them.
        longest: number of tokens that the longest of the rows computes by itself.
    """

    members: tuple[Member, ...]
    num_tokens: int
    longest: int


def _longest_first(item: _Item) -> tuple[int, Member]:
    # Ties are broken by task and row, because every process computes the order and must get the same one.
    return -item.num_tokens, item.members[0]


def _items(tasks: Sequence[TaskRows], capacity: int) -> list[_Item]:
    """Group the rows of all tasks: rows that share tokens form one item, up to `capacity` tokens."""
    items = []
    for task, of_task in enumerate(tasks):
        lengths, trie = of_task.lengths, of_task.trie
        rows = range(len(lengths)) if of_task.only is None else of_task.only
        if trie is None:
            items += [_Item((Member(task, row, 0, lengths[row]),), lengths[row], lengths[row]) for row in rows]
            continue
        for bundle in trie.items(rows, capacity):
            members = tuple(Member(task, row, 0, lengths[row]) for row in bundle)
            longest = max(trie.num_computed([row]) for row in bundle)
            items.append(_Item(members, trie.num_computed(bundle), longest))
    return items


def even_shares(
    lengths: Sequence[Sequence[int]],
    num_replicas: int,
    slowness: Sequence[float] | None = None,
    tries: Sequence[RowTrie | None] | None = None,
) -> list[list[list[int]]]:
    """Divide the rows of a step among replicas: longest first, each to the replica that would finish it first.

    All tasks of a step are divided together, independently of the plan, so that the load is balanced over the step and
    a new plan moves no rows.

    Args:
        lengths: for each task the tokens of each row of its global batch.
        num_replicas: number of replicas or processes.
        slowness: time per token of each of them, in any unit; by default equal.
        tries: for each task the shared prefixes of its rows. Rows with shared prefixes stay together, up to an even
            share, and count only the tokens that they compute. By default there are none.

    Returns:
        For each replica and each task, the indices of its rows, ascending.

    Example:
        >>> even_shares([[5, 3], [4]], 2)
        [[[0], []], [[1], [0]]]
    """
    tasks = [TaskRows(rows, trie=trie) for rows, trie in zip(lengths, tries or [None] * len(lengths), strict=True)]
    total = sum(
        sum(rows.lengths) if rows.trie is None else rows.trie.num_computed(range(len(rows.lengths))) for rows in tasks
    )
    items = sorted(_items(tasks, math.ceil(total / num_replicas)), key=_longest_first)
    num_tokens = [0] * num_replicas
    rates = [1.0] * num_replicas if slowness is None else slowness
    shares: list[list[list[int]]] = [[[] for _ in lengths] for _ in range(num_replicas)]
    for members, length, _ in items:
        done = [rate * (num + length) for rate, num in zip(rates, num_tokens, strict=True)]
        replica = done.index(min(done))
        num_tokens[replica] += length
        shares[replica][members[0].task] += [member.index for member in members]
    return [[sorted(rows) for rows in share] for share in shares]


def cut_into_passes(
    tasks: Sequence[TaskRows], rules: PassRules, *, bound: int, num_passes: int | None = None
) -> list[list[Member]]:
    """Distribute the rows of tasks that are trained together over passes.

    Args:
        tasks: the rows of each task.
        rules: whether and how long rows are split.
        bound: maximum number of tokens of a pass; exceeded only by a longer row that must not be split.
        num_passes: the intended number of passes, over which tokens are spread evenly. There are more if the bound
            requires it, and fewer if there are fewer rows. `None` for as few as packing finds.

    Returns:
        The members of each pass, sorted by task and row; no pass is empty. The parts of a row are in consecutive
        passes.

    Example:
        >>> cut = cut_into_passes([TaskRows([5, 4]), TaskRows([3])], PassRules(), bound=16, num_passes=2)
        >>> [[(member.task, member.index) for member in members] for members in cut]
        [[(0, 0)], [(0, 1), (1, 0)]]
    """
    items = _items(tasks, bound)
    if not items:
        return []
    if num_passes is None:
        return _with_shared(tasks, _filled(tasks, items, rules, bound))
    tokens, num_rows = sum(item.num_tokens for item in items), sum(len(item.members) for item in items)
    intended = min(num_rows, max(-(-tokens // bound), num_passes))
    capacity = min(bound, math.ceil(tokens / intended * _SLACK))
    if rules.split_long_sequences:  # do not split a row within the bound just to balance passes
        capacity = max(capacity, min(bound, max(item.longest for item in items)))
    if any(rows.trie is not None for rows in tasks):  # the groups of rows depend on the capacity
        items = _items(tasks, capacity)
    passes = _filled(tasks, items, rules, capacity)
    if len(passes) != intended and not any(_is_part(tasks, member) for members in passes for member in members):
        spread = _spread(items, bound, intended)
        if len(spread) == intended or len(spread) < len(passes):
            passes = spread
    return _with_shared(tasks, passes)


def passes_meant(num_tokens: int, planned_tokens: float, planned_passes: int, *, has_shared: bool = False) -> int:
    """Return the intended number of passes of a step whose rows differ from the planned ones.

    If the step has about the planned size, this is the planned number; otherwise passes keep their planned size. With
    shared prefixes, passes of larger steps grow up to their bound instead, because each additional pass would compute
    a prefix again.

    Args:
        num_tokens: number of tokens that the rows compute if they are all in one pass.
        planned_tokens: number of tokens in the plan, counted in the same way; 0 if unknown.
        planned_passes: number of passes in the plan.
        has_shared: whether rows share prefixes.
    """
    if not planned_tokens:
        return 1
    ratio = num_tokens / planned_tokens
    if ratio > 1 / _OTHER_STEP and (has_shared or ratio < _OTHER_STEP):
        return planned_passes
    return max(1, round(planned_passes * ratio))


def chains_of_passes(tasks: Sequence[TaskRows], passes: Sequence[Sequence[Member]]) -> list[list[int]]:
    """Return the chains: consecutive passes that hold parts of one row; a pass of whole rows is its own chain.

    Args:
        tasks: the rows of each task.
        passes: the members of each pass, as returned by `cut_into_passes`.
    """
    return chained(
        any(member.end < tasks[member.task].lengths[member.index] for member in members) for members in passes
    )


def chained(have_more: Iterable[bool]) -> list[list[int]]:
    """Return the numbers of the passes of each chain, given for each pass whether a row of it continues in the next."""
    chains: list[list[int]] = []
    continues = False
    for number, has_more in enumerate(have_more):
        if not continues:
            chains.append([])
        chains[-1].append(number)
        continues = has_more
    return chains


def slot_of(number: int, num_passes: int, num_slots: int) -> int:
    """Return the micro-batch of a bucket in which a pass of an hTask runs; passes are spread evenly and in order.

    Args:
        number: the pass, counted from 0.
        num_passes: passes of the hTask.
        num_slots: C, micro-batches of its bucket.
    """
    return number * num_slots // num_passes


def part_bounds(num_tokens: int, max_tokens: int, chunk_size: int) -> list[tuple[int, int]]:
    """Split a sequence into parts that fit into a pass, as even as whole chunks allow; the last one may be short.

    If chunks are large relative to a pass, there can be one part more than the minimum.

    Args:
        num_tokens: number of tokens of the sequence.
        max_tokens: maximum number of tokens of a part.
        chunk_size: parts consist of whole chunks of this size, except for the last part. Ignored if a chunk is longer
            than a pass.

    Returns:
        Start and end of each part.

    Example:
        >>> part_bounds(11, 5, 2)
        [(0, 4), (4, 8), (8, 11)]
    """
    # If a chunk does not fit into a pass, split at any token.
    step = chunk_size if chunk_size <= max_tokens else 1
    # Even parts rather than full ones and a short rest, because each pass has a fixed launch cost.
    num_parts = -(-num_tokens // max_tokens)
    tokens = min(round_up(-(-num_tokens // num_parts), step), max_tokens // step * step)
    return [(start, min(start + tokens, num_tokens)) for start in range(0, num_tokens, tokens)]


def _is_part(tasks: Sequence[TaskRows], member: Member) -> bool:
    return member.num_tokens < tasks[member.task].lengths[member.index]


def _with_shared(tasks: Sequence[TaskRows], passes: list[list[Member]]) -> list[list[Member]]:
    """Set `shared` of the members of each pass."""
    if all(rows.trie is None for rows in tasks):
        return passes
    changed = []
    for members in passes:
        computed: dict[tuple[int, int], int] = {}
        for task in {member.task for member in members}:
            if (trie := tasks[task].trie) is not None:
                whole = [part.index for part in members if part.task == task and not _is_part(tasks, part)]
                computed |= {(task, row): tokens for row, tokens in trie.computed(whole).items()}
        tokens = [computed.get((part.task, part.index), part.num_tokens) for part in members]
        pairs = zip(members, tokens, strict=True)
        changed.append([part._replace(shared=part.num_tokens - num) for part, num in pairs])
    return changed


def _spread(items: Sequence[_Item], bound: int, num_passes: int) -> list[list[Member]]:
    """Assign items longest first to the pass with the fewest tokens; open another pass if it has no room."""
    passes: list[list[Member]] = [[] for _ in range(num_passes)]
    num_tokens = [0] * num_passes
    for item in sorted(items, key=_longest_first):
        least = num_tokens.index(min(num_tokens))
        if passes[least] and num_tokens[least] + item.num_tokens > bound:
            least = len(passes)
            passes.append([])
            num_tokens.append(0)
        passes[least] += item.members
        num_tokens[least] += item.num_tokens
    return [sorted(members) for members in passes if members]


def _filled(tasks: Sequence[TaskRows], items: Sequence[_Item], rules: PassRules, capacity: int) -> list[list[Member]]:
    """Pack each task's rows (M §3.5, first step), then place the packs of all tasks.

    Parts of long rows are placed first, one in each pass; packs fill the remaining room.
    """
    # If everything fits into one pass, keep the order of rows.
    if sum(item.num_tokens for item in items) <= capacity:
        return [sorted(member for item in items for member in item.members)]
    # Computed from all rows even if only some are laid out, so that all processes use the same size.
    size = rules.size([length for rows in tasks for length in rows.lengths])
    packs: list[list[_Item]] = []
    parts: list[Member] = []
    too_long: list[list[Member]] = []
    fitting: list[list[_Item]] = [[] for _ in tasks]
    for item in items:
        member = item.members[0]
        if item.num_tokens <= capacity:
            fitting[member.task].append(item)
            continue
        assert len(item.members) == 1, "an item of several rows fits into a pass"
        if rules.split_long_sequences and not tasks[member.task].stay_whole:
            bounds = part_bounds(member.num_tokens, capacity, size)
            parts += [Member(member.task, member.index, start, end) for start, end in bounds]
        else:
            too_long.append([member])
    for items in fitting:
        # Packs of about a quarter of a pass combine well across tasks.
        longest = max((item.num_tokens for item in items), default=1)
        pack_capacity = min(capacity, max(longest, round_up(max(capacity // 4, 1), size)))
        packed = best_fit_decreasing([item.num_tokens for item in items], pack_capacity)
        packs += [[items[number] for number in pack] for pack in packed]
    pack_tokens = [sum(item.num_tokens for item in pack) for pack in packs]
    placed = best_fit_decreasing(pack_tokens, capacity, rooms=[capacity - part.num_tokens for part in parts])
    passes = [[member for pack in group for item in packs[pack] for member in item.members] for group in placed]
    for part, group in zip(parts, passes, strict=False):
        group.append(part)
    # Sorted by task and row, so that a task's rows are in data order in every pass.
    return [sorted(group) for group in passes] + too_long
