"""Algorithm 1 of M (§3.4.2) and the two streams that its launches run on.

* `LaunchQueue` is lines 7 to 11 of the listing, one decision at a time. Plans drain it over whole passes; the engine
  (`peft_mux.engine.tensor.interleaving`) asks it for the next launch while passes run. So the same lines decide what is
  planned and what runs.
* `StreamTimeline` is a compute and a communication stream. Both are in-order queues, like CUDA streams: a subgraph's
  compute operators start when the compute stream has finished all earlier launches and everything that the subgraph
  depends on has ended, communication included. Its communication operators start when its compute operators have ended
  and the communication stream is free.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", str, int)


class LaunchQueue(Generic[Key]):
    """The subgraphs without pending dependencies, and which of them is launched next.

    Add each subgraph once, when the last of its dependencies has been launched.

    Example:
        >>> queue = LaunchQueue[str]()
        >>> queue.enqueue("short", depth=0, latency_s=1.0, owner=0)
        >>> queue.enqueue("long", depth=0, latency_s=2.0, owner=1)
        >>> queue.enqueue("deep", depth=1, latency_s=9.0, owner=2)
        >>> [queue.launch() for _ in range(len(queue))]
        ['long', 'short', 'deep']
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, str, Key]] = []

    def __len__(self) -> int:
        """Return how many subgraphs are ready."""
        return len(self._heap)

    def enqueue(self, key: Key, *, depth: int, latency_s: float, owner: int, name: str = "") -> None:
        """Add a subgraph that is ready.

        Args:
            key: what `launch` returns for it.
            depth: its topological depth; a smaller one has a higher priority.
            latency_s: predicted seconds of all its operators, or any unit that is the same for all.
            owner: number of its hTask or pass; the smallest wins a tie.
            name: name within its hTask; the first in sorted order wins a tie that is left.
        """
        heapq.heappush(self._heap, (depth, -latency_s, owner, name, key))

    def launch(self) -> Key:
        """Remove and return the subgraph to launch now: the smallest depth first, then the longest latency.

        Raises:
            IndexError: if none is ready.
        """
        return heapq.heappop(self._heap)[-1]


@dataclass(frozen=True, slots=True)
class SubgraphSpan:
    """When one subgraph ran, in seconds from the start.

    Attributes:
        htask: name of the hTask or pass that it belongs to.
        name: name of the subgraph within it.
        compute_start_s: start of its compute operators.
        compute_end_s: end of its compute operators.
        communication_start_s: start of its communication operators; `compute_end_s` if it has none.
        end_s: end of all its operators.
    """

    htask: str
    name: str
    compute_start_s: float
    compute_end_s: float
    communication_start_s: float
    end_s: float


class StreamTimeline:
    """A compute and a communication stream, and what was launched on them.

    Args:
        overlap: whether communication has a stream of its own. False blocks the compute stream by each communication:
            the baselines "sequential" and "interleaved, no overlap" of M Figure 18.
        compute_slowdown: share of its speed, 0 to below 1, that the compute stream loses while a communication
            operator runs, because that kernel's thread blocks occupy multiprocessors (M §3.4.3).

    Attributes:
        spans: when each subgraph ran, in launch order.
        communication_busy_s: seconds in which a communication operator ran.

    Raises:
        ValueError: for a slowdown out of range.
    """

    def __init__(self, *, overlap: bool = True, compute_slowdown: float = 0.0) -> None:
        if not 0 <= compute_slowdown < 1:
            raise ValueError(
                f"compute_slowdown is {compute_slowdown}; allowed: 0 to below 1. "
                "Divide the multiprocessors that communication holds by all."
            )
        self.spans: list[SubgraphSpan] = []
        self.communication_busy_s = 0.0
        self._overlap = overlap
        self._slowdown = compute_slowdown
        self._compute_free_s = self._communication_free_s = 0.0
        self._in_flight: deque[tuple[float, float]] = deque()

    @property
    def makespan_s(self) -> float:
        """Seconds from the start to the end of the last operator."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def compute_busy_s(self) -> float:
        """Seconds in which a compute operator ran."""
        return sum((span.compute_end_s - span.compute_start_s for span in self.spans), 0.0)

    def launch(self, htask: str, name: str, compute_s: float, communication_s: float, ready_s: float) -> float:
        """Run a subgraph after all earlier launches and return when it ends.

        Args:
            htask: name of the hTask or pass that it belongs to.
            name: name of the subgraph within it.
            compute_s: seconds of its compute operators.
            communication_s: seconds of its communication operators, which follow them.
            ready_s: when the last subgraph that it depends on ends.
        """
        start_s = max(ready_s, self._compute_free_s)
        computed_s = self._compute_end_s(start_s, compute_s)
        sent_s = max(computed_s, self._communication_free_s) if communication_s else computed_s
        end_s = sent_s + communication_s
        if communication_s:
            self._communication_free_s = end_s
            self._in_flight.append((sent_s, end_s))
            self.communication_busy_s += communication_s
        self._compute_free_s = computed_s if self._overlap else end_s
        self.spans.append(SubgraphSpan(htask, name, start_s, computed_s, sent_s, end_s))
        return end_s

    def _compute_end_s(self, start_s: float, work_s: float) -> float:
        """Return when computing ends that starts at `start_s` and slows down during communication."""
        # The spans in flight are disjoint and sorted, and no later launch starts earlier: drop what has ended.
        while self._in_flight and self._in_flight[0][1] <= start_s:
            self._in_flight.popleft()
        if not self._slowdown:
            return start_s + work_s
        now_s = start_s
        # After the last communication comes one that never begins: the rest runs at full speed.
        for begin_s, end_s in (*self._in_flight, (math.inf, math.inf)):
            alone_s = max(begin_s - now_s, 0.0)
            if work_s <= alone_s:
                break
            work_s -= alone_s
            now_s += alone_s
            if work_s <= (end_s - now_s) * (1 - self._slowdown):
                return now_s + work_s / (1 - self._slowdown)
            work_s -= (end_s - now_s) * (1 - self._slowdown)
            now_s = end_s
        return now_s + work_s
