"""`best_schedule`: the launch order with the shortest makespan, found by trying all; the judge of Algorithm 1.

For small buckets: the number of orders grows as fast as factorials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.planner.subgraphs.graph import Subgraph, by_key, with_priorities
from benchmarks.planner.subgraphs.schedule import LaunchSchedule, launches_of

MAX_SUBGRAPHS = 12


def best_schedule(graphs: Sequence[Sequence[Subgraph]]) -> tuple[LaunchSchedule, float]:
    """Return the best launch order of a small bucket and its makespan in seconds, on the streams of `simulate_streams`.

    Branch and bound over all orders that keep the dependencies. An order is cut off once the work that remains on
    either stream cannot end before the best order found so far.

    Args:
        graphs: the subgraphs of each hTask, 12 or fewer in all.

    Raises:
        ValueError: for more than 12 subgraphs, a doubled key, an unknown dependency or a cycle.
    """
    subgraphs = by_key(graphs)
    if len(subgraphs) > MAX_SUBGRAPHS:
        raise ValueError(
            f"graphs must have at most {MAX_SUBGRAPHS} subgraphs, got {len(subgraphs)}. Use schedule() for more."
        )
    with_priorities(graphs)  # refuses cycles and unknown dependencies
    search = _Search(list(subgraphs.values()))
    search.extend([], 0.0, 0.0, {})
    return launches_of([subgraphs[key] for key in search.best_order]), search.best_s


@dataclass(slots=True)
class _Search:
    """The depth-first search; `best_*` is what it has found so far."""

    subgraphs: list[Subgraph]
    best_s: float = float("inf")
    best_order: list[str] = field(default_factory=list)

    def extend(self, order: list[str], compute_free_s: float, sent_s: float, end_s: dict[str, float]) -> None:
        """Try every subgraph that is ready after an order.

        Args:
            order: keys of the subgraphs that are launched already.
            compute_free_s: when the compute stream has finished them, in seconds from the start.
            sent_s: when the communication stream has finished them.
            end_s: when each of them ended, by key.
        """
        left = [item for item in self.subgraphs if item.key not in end_s]
        if not left:
            makespan_s = max(end_s.values(), default=0.0)
            if makespan_s < self.best_s:
                self.best_s, self.best_order = makespan_s, order
            return
        # What is left has still to pass each stream, one item after another, after what the stream has done.
        compute_bound_s = compute_free_s + sum(item.compute_s for item in left)
        sent_bound_s = sent_s + sum(item.communication_s for item in left)
        if max(compute_bound_s, sent_bound_s, *end_s.values(), 0.0) >= self.best_s:
            return
        for item in left:
            if any(key not in end_s for key in item.depends_on):
                continue
            start_s = max([compute_free_s, *(end_s[key] for key in item.depends_on)])
            computed_s = start_s + item.compute_s
            done_s, free_s = computed_s, sent_s
            if item.communication_s:
                done_s = free_s = max(computed_s, sent_s) + item.communication_s
            # Copies need no undoing, and cost little for so few subgraphs.
            self.extend([*order, item.key], computed_s, free_s, {**end_s, item.key: done_s})
