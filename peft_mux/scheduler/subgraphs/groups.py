"""`turn_groups`: which passes go through a stage in turns (M §3.4.2), never those of two buckets (M §3.4.3, case 3)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class GroupedPass(NamedTuple):
    """A pass as far as grouping looks at it.

    Attributes:
        bucket: number of the bucket that its hTask is in.
        tasks: names of its tasks.
    """

    bucket: int
    tasks: Collection[str]


def turn_groups(passes: Sequence[GroupedPass], width: int, *, may_repeat: bool = True) -> list[tuple[int, ...]]:
    """Divide the passes of a step into groups that go through the model in turns; the planner's and the engine's rule.

    Buckets come one after another, in the order in which their first passes stand. Within one, a group takes passes of
    tasks that differ, as long as there are any, so that the order in which the gradients of a task add up stays that of
    the work. Then it takes those of the same tasks, if it may.

    Args:
        passes: the passes of a step, in the order of the work.
        width: largest number of passes in a group.
        may_repeat: whether two passes of a group may be of one task.

    Returns:
        For each group the indices of its passes; every one once, and those of a task in the order of the work.

    Raises:
        ValueError: for a width below one.
    """
    if width < 1:
        raise ValueError(f"width is {width}; allowed: 1 or more passes in turns, 1 for one after another.")
    groups: list[tuple[int, ...]] = []
    for bucket in dict.fromkeys(one.bucket for one in passes):
        members = [index for index, one in enumerate(passes) if one.bucket == bucket]
        groups += _groups_of_bucket(passes, members, width, may_repeat)
    return groups


def _groups_of_bucket(
    passes: Sequence[GroupedPass], left: list[int], width: int, may_repeat: bool
) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []
    while left:
        group: list[int] = []
        seen: set[str] = set()
        for index in left:
            if len(group) < width and seen.isdisjoint(passes[index].tasks):
                group.append(index)
            # Also the names of a pass that was passed over, lest a later pass of its task overtake it.
            seen.update(passes[index].tasks)
        left = [index for index in left if index not in group]
        if may_repeat:
            group, left = group + left[: width - len(group)], left[width - len(group) :]
        groups.append(tuple(group))
    return groups


def neighbour_groups(passes: Sequence[GroupedPass], width: int, *, may_repeat: bool = True) -> list[tuple[int, ...]]:
    """Divide the passes of one action of a pipeline into groups that take turns, in the order of the action.

    Their order is not changed, as the stages before and behind wait for messages in it.

    Args:
        passes: the passes of an action, which are of one bucket, in the order in which they run.
        width: largest number of passes in a group.
        may_repeat: whether two passes of a group may be of one task.
    """
    groups: list[list[int]] = []
    seen: set[str] = set()
    for index, one in enumerate(passes):
        if not groups or len(groups[-1]) == width or not (may_repeat or seen.isdisjoint(one.tasks)):
            groups.append([])
            seen = set()
        groups[-1].append(index)
        seen.update(one.tasks)
    return [tuple(group) for group in groups]
