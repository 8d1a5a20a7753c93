"""`LaunchQueue`: Algorithm 1 as its subgraphs become ready, one decision at a time (M §3.4.2, lines 7 to 11).

`peft_mux.scheduler.subgraphs.schedule` drains it over whole graphs, for plans; `peft_mux.engine.tensor.turns` asks it
whose turn is next while passes run. So what is planned and what runs are decided by the same lines.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Key = TypeVar("Key", str, int)


class LaunchQueue(Generic[Key]):
    """The subgraphs without pending dependencies, and which of them is launched next.

    Whoever holds it tells it of every subgraph once, when the last of those that it depends on has been launched.

    Example:
        >>> queue = LaunchQueue[str]()
        >>> queue.enqueue("short", depth=0, latency_s=1.0, owner=0)
        >>> queue.enqueue("long", depth=0, latency_s=2.0, owner=1)
        >>> queue.enqueue("deep", depth=1, latency_s=9.0, owner=2)
        >>> [queue.launch() for _ in range(len(queue))]
        ['long', 'short', 'deep']
    """

    def __init__(self) -> None:
        """Begin with nothing that is ready."""
        self._heap: list[tuple[int, float, int, str, Key]] = []

    def __len__(self) -> int:
        """Return how many subgraphs are ready."""
        return len(self._heap)

    def enqueue(self, key: Key, *, depth: int, latency_s: float, owner: int, name: str = "") -> None:
        """Take in a subgraph that is ready.

        Args:
            key: what `launch` returns for it.
            depth: its topological depth; smaller ones have the higher priority.
            latency_s: predicted seconds of all its operators, or any unit that is the same for all.
            owner: number of its hTask or pass; of ties the least goes first.
            name: name within its hTask; of ties that are left the one that sorts first.
        """
        heapq.heappush(self._heap, (depth, -latency_s, owner, name, key))

    def launch(self) -> Key:
        """Return the subgraph that is launched now, which is not ready any more: of least depth, then the longest.

        Raises:
            IndexError: if none is ready.
        """
        return heapq.heappop(self._heap)[-1]
