"""Tasks without rows in a pass, which are included in it as empty segments.

With rows of unequal length, almost every pass holds another set of tasks. Tables of kernels and CUDA graphs are made
for a set of tasks, so they are made again and again, unless absent tasks are empty segments of every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_TASKS = 64
"""Absent tasks are left out beyond this number: each is one more program in a kernel's reductions."""


class StreamOrder:
    """The tasks that have had rows so far.

    Args:
        number_of: returns a task's place among all tasks; streams are sorted by it as a rule.
        may_be_absent: whether a task without rows may be named.
    """

    def __init__(self, number_of: Callable[[str], int], may_be_absent: Callable[[str], bool]) -> None:
        """Know no task yet."""
        self._number_of, self._may_be_absent = number_of, may_be_absent
        self._known: set[str] = set()

    def joined(self, present: Sequence[str]) -> tuple[str, ...]:
        """Return the tasks of a pass and the tasks that had rows before, in their order.

        Args:
            present: the tasks of the pass, in stream order, each once.

        Returns:
            `present` alone if it is not sorted, or if there are too many tasks.
        """
        known = {name for name in self._known if name in present or self._may_be_absent(name)} | set(present)
        ordered = sorted(known, key=self._number_of)
        if len(known) > MAX_TASKS or [name for name in ordered if name in present] != list(present):
            return tuple(present)
        self._known = known
        return tuple(ordered)
