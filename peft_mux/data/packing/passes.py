"""Packing: which sequences of a task's global batch lie together in one pack (M §3.5, first step).

    lengths  7 5 4 3 1      capacity 8

    best fit decreasing     pack 0 | 7 . . . . . . | 1 |
                            pack 1 | 5 . . . . | 3 . . |
                            pack 2 | 4 . . .           |

A pack never crosses a global batch, so what a task learns from in one step does not depend on packing.
"""

# MERGED: Chunks: equal-sized pieces of packs, the unit in which tasks are aligned (M §3.5, second step).
# MERGED: pack of 11 tokens, chunks of 4     | 0 1 2 3 | 4 5 6 7 | 8 9 10 . |
# MERGED: chunk 0   chunk 1   chunk 2 (one token of padding where chunks must be equal)
# MERGED: Even shares: how equal replicas divide the rows of a step, evenly by tokens or by time, each row whole.
# MERGED: Passes: which rows of which task share a pass, in which order (M §3.5).
# MERGED: Rows are whole, so that a step has as many passes as are meant only where there are enough rows, and no pass
# MERGED: is exactly
# MERGED: as large as another. Rows are packed task by task, and the packs put into passes by best fit, up to a little
# MERGED: more than
# MERGED: an even share of the tokens. Where that does not come out at the number that is meant, the longest row goes
# MERGED: first, each
# MERGED: into the pass of fewest tokens. Rows that are longer than a pass are cut into parts, if they may be: a
# MERGED: *chain*.
# MERGED: Rows that begin alike are put into passes together, as one item of the tokens that they compute (`row_trie`).
# MERGED:     3 tasks with rows of 5 5 | 4 4 | 3 3 tokens, bound 16
# MERGED:     1 pass meant     5 4 3 | 5 4 3         24 tokens do not fit into one
# MERGED:     4 passes meant   5 | 5 | 4 3 | 4 3
# MERGED:     9 passes meant   5 | 5 | 4 | 4 | 3 | 3

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peft_mux.data.packing.prefixes import RowTrie
from peft_mux.errors import ConfigError


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


def chunk_size(lengths: Iterable[int], *, minimum: int = 64, override: int | None = None) -> int:
    """Return the chunk size: the greatest power of two that divides all lengths, but no less than `minimum` (M §3.5).

    Args:
        lengths: number of tokens of each sequence.
        minimum: the least chunk size; smaller ones leave kernels too little to do.
        override: the chunk size to take instead; `None` for the rule.

    Raises:
        ConfigError: if `override` or `minimum` is not at least 1.
    """
    for name, value in (("chunk_size", override), ("min_chunk_size", minimum)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: got {value}; allowed: an integer of at least 1.")
    if override is not None:
        return override
    # The lowest bit that is set in any length is the greatest power of two that divides all of them.
    bits = 0
    for length in lengths:
        bits |= int(length)
    return max(minimum, bits & -bits)


def round_up(tokens: int, size: int) -> int:
    """Return the least multiple of the chunk size that holds `tokens`."""
    return -(-tokens // size) * size


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


_SLACK = 1.05
"""By how much a pass may exceed an even share of the tokens: whole rows do not fill passes evenly."""
_OTHER_STEP = 1.5
"""By how much a step may have more or fewer tokens than planned, and still be cut into as many passes."""


class Member(NamedTuple):
    """Tokens of a row that lie in one pass.

    Attributes:
        task: index of the task among those that are cut together.
        index: index of the row within the task's global batch.
        start: first token within the row.
        end: one past the last token.
        shared: how many of them the pass computes for another row, or for another sequence of this one.
    """

    task: int
    index: int
    start: int
    end: int
    shared: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that lie in the pass."""
        return self.end - self.start

    @property
    def num_computed(self) -> int:
        """Number of tokens that the pass computes for it."""
        return self.end - self.start - self.shared


@dataclass(frozen=True, slots=True)
class PassRules:
    """What cutting depends on besides rows and bounds.

    Attributes:
        split_long_sequences: whether rows that are longer than a pass are cut into parts; by default each of them gets
            a pass of its own.
        chunk_size: tokens of a chunk, of which parts are whole numbers; `None` for the rule of M §3.5.
        min_chunk_size: least chunk size of that rule.
    """

    split_long_sequences: bool = False
    chunk_size: int | None = None
    min_chunk_size: int = 64

    def size(self, lengths: Sequence[int]) -> int:
        """Return the chunk size for rows of these lengths.

        Args:
            lengths: tokens of each row.
        """
        return chunk_size(lengths, minimum=self.min_chunk_size, override=self.chunk_size)


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The rows of one task's global batch.

    Attributes:
        lengths: tokens of each row.
        only: indices of the rows that are to be cut into passes; `None` for all.
        stay_whole: whether each row is never cut, as those with a class are not; a single answer stands for all.
        trie: what rows begin with alike; `None` where they share nothing.
    """

    lengths: Sequence[int]
    only: Sequence[int] | None = None
    stay_whole: Sequence[bool] | bool = False
    trie: RowTrie | None = None

    @property
    def chosen(self) -> Sequence[int]:
        """Indices of the rows that are to be cut into passes."""
        return range(len(self.lengths)) if self.only is None else self.only

    def stays_whole(self, index: int) -> bool:
        """Return whether a row is never cut.

        Args:
            index: index of the row.
        """
        return self.stay_whole if isinstance(self.stay_whole, bool) else self.stay_whole[index]


def cut_into_passes(
    tasks: Sequence[TaskRows], rules: PassRules, *, bound: int, num_passes: int | None = None
) -> list[list[Member]]:
    """Cut rows of tasks that share their passes into passes.

    Args:
        tasks: the rows of each task.
        rules: whether and how long rows are cut.
        bound: the most tokens of a pass; only a row that is longer and stays whole makes a longer one.
        num_passes: the number of passes that is meant, over which tokens are spread evenly; there are more where the
            bound asks for more, and fewer where there are fewer rows. `None` for as few as packing finds.

    Returns:
        The members of each pass, by task and row; none is empty. The parts of a row lie in consecutive passes.

    Example:
        >>> cut = cut_into_passes([TaskRows([5, 4]), TaskRows([3])], PassRules(), bound=16, num_passes=2)
        >>> [[(member.task, member.index) for member in members] for members in cut]
        [[(0, 0)], [(0, 1), (1, 0)]]
    """
    items = _items_passes(tasks, bound)
    if not items:
        return []
    tokens, num_rows = sum(item.num_tokens for item in items), sum(len(item.members) for item in items)
    if num_passes is None:
        return _with_shared(tasks, _filled(tasks, items, rules, bound))
    meant = min(num_rows, max(-(-tokens // bound), num_passes))
    capacity = min(bound, math.ceil(tokens / meant * _SLACK))
    if rules.split_long_sequences:  # evenness is no reason to cut what a pass may hold
        capacity = max(capacity, min(bound, max(item.longest for item in items)))
    if any(own.trie is not None for own in tasks):  # which rows go together depends on what a pass holds
        items = _items_passes(tasks, capacity)
    filled = _filled(tasks, items, rules, capacity)
    if len(filled) == meant or any(_is_part(tasks, member) for cut in filled for member in cut):
        return _with_shared(tasks, filled)
    spread = _spread(items, bound, meant)
    return _with_shared(tasks, spread if len(spread) == meant or len(spread) < len(filled) else filled)


def passes_meant(num_tokens: int, planned_tokens: float, planned_passes: int, *, has_shared: bool = False) -> int:
    """Return into how many passes a step is to be cut that has other rows than the one that was planned.

    As many as planned, so long as the step is of about the planned size; otherwise passes keep their size. Where rows
    begin alike they grow with the step, up to their bound, as each further pass would compute some beginning anew.

    Args:
        num_tokens: tokens that the rows at hand compute where they are all in one pass.
        planned_tokens: tokens that the plan counted with, in the same way; 0 where it knew none.
        planned_passes: passes that it has cut them into.
        has_shared: whether rows begin alike.
    """
    if not planned_tokens:
        return 1
    ratio = num_tokens / planned_tokens
    if ratio > 1 / _OTHER_STEP and (has_shared or ratio < _OTHER_STEP):
        return planned_passes
    return max(1, round(planned_passes * ratio))


def chains_of_passes(tasks: Sequence[TaskRows], passes: Sequence[Sequence[Member]]) -> list[list[int]]:
    """Return the chains: consecutive passes that hold parts of one row; a pass of whole rows is one by itself.

    Args:
        tasks: the rows of each task.
        passes: the members of each pass, as `cut_into_passes` returns them.
    """
    chains: list[list[int]] = []
    has_more = False
    for number, members in enumerate(passes):
        if has_more:
            chains[-1].append(number)
        else:
            chains.append([number])
        has_more = any(member.end < tasks[member.task].lengths[member.index] for member in members)
    return chains


def slot_of(number: int, num_passes: int, num_slots: int) -> int:
    """Return the micro-batch of a bucket that a pass of an hTask runs in: passes are spread in order and evenly.

    Args:
        number: the pass, counted from 0.
        num_passes: passes of the hTask.
        num_slots: C, micro-batches of its bucket.
    """
    return number * num_slots // num_passes


def part_bounds(num_tokens: int, max_tokens: int, chunk_size: int) -> list[tuple[int, int]]:
    """Cut a sequence into parts that a pass holds, as even as whole chunks are; the last one may be short.

    Where chunks are long against a pass, that can be one part more than the fewest possible.

    Args:
        num_tokens: number of tokens of the sequence.
        max_tokens: largest number of tokens of a part.
        chunk_size: parts are whole chunks of this many tokens, but for the last one, and for chunks that are longer
            than a pass.

    Returns:
        Start and end of each part.

    Example:
        >>> part_bounds(11, 5, 2)
        [(0, 4), (4, 8), (8, 11)]
    """
    # A chunk that no pass holds cannot be a unit; then parts are cut at any token.
    step = chunk_size if chunk_size <= max_tokens else 1
    # Even parts rather than full ones and a short rest: a pass costs its launches however few tokens it has.
    num_parts = -(-num_tokens // max_tokens)
    tokens = min(round_up(-(-num_tokens // num_parts), step), max_tokens // step * step)
    return [(start, min(start + tokens, num_tokens)) for start in range(0, num_tokens, tokens)]


def _is_part(tasks: Sequence[TaskRows], member: Member) -> bool:
    return member.num_tokens < tasks[member.task].lengths[member.index]


class _Item(NamedTuple):
    """Rows that go into one pass together: a row by itself, or some that share tokens.

    Attributes:
        members: the rows.
        num_tokens: tokens that a pass computes for them.
        longest: those of the one that computes most where each is by itself.
    """

    members: tuple[Member, ...]
    num_tokens: int
    longest: int


def _items_passes(tasks: Sequence[TaskRows], capacity: int) -> list[_Item]:
    """Return the rows of all tasks, those that share tokens together, as far as `capacity` holds them."""
    items = []
    for task, own in enumerate(tasks):
        rows, trie = own.chosen, own.trie
        if trie is None:
            items += [_Item((Member(task, row, 0, own.lengths[row]),), *[own.lengths[row]] * 2) for row in rows]
            continue
        alone = {row: trie.num_computed([row]) for row in rows}
        for bundle in trie.items(rows, capacity):
            members = tuple(Member(task, row, 0, own.lengths[row]) for row in bundle)
            items.append(_Item(members, trie.num_computed(bundle), max(alone[row] for row in bundle)))
    return items


def _with_shared(tasks: Sequence[TaskRows], passes: list[list[Member]]) -> list[list[Member]]:
    """Return passes whose members say how many of their tokens another one computes."""
    if all(own.trie is None for own in tasks):
        return passes
    found = []
    for members in passes:
        computed: dict[tuple[int, int], int] = {}
        for task in {member.task for member in members}:
            if (trie := tasks[task].trie) is not None:
                whole = [one.index for one in members if one.task == task and not _is_part(tasks, one)]
                computed |= {(task, row): tokens for row, tokens in trie.computed(whole).items()}
        keys = [(one.task, one.index) for one in members]
        pairs = zip(members, keys, strict=True)
        found.append([one._replace(shared=one.num_tokens - computed.get(key, one.num_tokens)) for one, key in pairs])
    return found


def _spread(items: Sequence[_Item], bound: int, num_passes: int) -> list[list[Member]]:
    """Put the longest item first, each into the pass of fewest tokens; one that fits into none opens another."""
    passes: list[list[Member]] = [[] for _ in range(num_passes)]
    num_tokens = [0] * num_passes
    # Ties by task and row, so that every process finds the same passes.
    for item in sorted(items, key=lambda one: (-one.num_tokens, one.members)):
        least = num_tokens.index(min(num_tokens))
        if passes[least] and num_tokens[least] + item.num_tokens > bound:
            least = len(passes)
            passes.append([])
            num_tokens.append(0)
        passes[least] += item.members
        num_tokens[least] += item.num_tokens
    return [sorted(own) for own in passes if own]


def _filled(tasks: Sequence[TaskRows], items: Sequence[_Item], rules: PassRules, capacity: int) -> list[list[Member]]:
    """Pack each task's rows, then place the packs of all tasks.

    Parts of long rows come first, one in each pass, and packs take the room that they leave.
    """
    # What fits into one pass keeps the order of its rows; packing is for the rest.
    if sum(item.num_tokens for item in items) <= capacity:
        return [sorted(member for item in items for member in item.members)]
    # Over the whole step even where only some are laid out, so that all processes take one size.
    size = rules.size([length for own in tasks for length in own.lengths])
    packs: list[list[_Item]] = []
    parts: list[Member] = []
    alone: list[list[Member]] = []
    items_of: list[list[_Item]] = [[] for _ in tasks]
    for item in items:
        items_of[item.members[0].task].append(item)
    for task, (own, found) in enumerate(zip(tasks, items_of, strict=True)):
        for item in found:
            if item.num_tokens <= capacity:
                continue
            # What exceeds a pass is a row by itself.
            (member,) = item.members
            if rules.split_long_sequences and not own.stays_whole(member.index):
                bounds = part_bounds(member.num_tokens, capacity, size)
                parts += [Member(task, member.index, start, end) for start, end in bounds]
            else:
                alone.append([member])
        packs += _packs([item for item in found if item.num_tokens <= capacity], capacity, size)
    pack_tokens = [sum(item.num_tokens for item in pack) for pack in packs]
    placed = best_fit_decreasing(pack_tokens, capacity, rooms=[capacity - part.num_tokens for part in parts])
    passes = [[member for pack in group for item in packs[pack] for member in item.members] for group in placed]
    for part, group in zip(parts, passes, strict=False):
        group.append(part)
    # By task and row, so that a task's rows lie in data order in every pass.
    return [sorted(group) for group in passes] + alone


def _packs(items: Sequence[_Item], capacity: int, size: int) -> list[list[_Item]]:
    """Pack the rows of one task that fit into a pass (M §3.5, first step)."""
    longest = max((item.num_tokens for item in items), default=1)
    # Packs of about a quarter of a pass let the packs of all tasks fill passes well.
    pack_capacity = min(capacity, max(longest, round_up(max(capacity // 4, 1), size)))
    packed = best_fit_decreasing([item.num_tokens for item in items], pack_capacity)
    return [[items[number] for number in pack] for pack in packed]
