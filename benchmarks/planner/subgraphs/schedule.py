"""Algorithm 1 over whole graphs of subgraphs, and when its launches run (M §3.4.2).

The order comes from the `LaunchQueue` that plans and the engine use, the instants from their `StreamTimeline`. Here the
graphs are of operators, with adapters as subgraphs of their own; plans know passes as chains, which is all that runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.planner.subgraphs.graph import Subgraph, by_key
from peft_mux.scheduler.subgraphs import LaunchQueue, StreamTimeline


def schedule(graphs: Sequence[Sequence[Subgraph]]) -> list[str]:
    """Return the keys of the subgraphs of a bucket in the order of Algorithm 1 of M.

    Among the subgraphs without pending dependencies those of the highest priority (the smallest depth) are filtered,
    and the one with the longest cumulative latency of all its operators is launched. Ties go to the hTask given first,
    then to the name that sorts first.

    Line 11 of the listing enqueues all zero in-degree subgraphs of the DAG again after each removal, so one that
    waits in the queue would be enqueued, and launched, twice. Here a subgraph is enqueued once, when its last
    dependency is removed.

    On the two streams of `simulate_streams` the order takes at most twice as long as the best one: with any order one
    stream is always busy, so it takes no longer than all compute plus all communication, and none takes less than
    the larger of them. Two is approached if a launch that is all communication waits behind a longer one that is
    all compute. O(n log n) for n subgraphs.
    """
    subgraphs = by_key(graphs)
    group = {item.key: number for number, graph in enumerate(graphs) for item in graph}
    followers: dict[str, list[str]] = {key: [] for key in subgraphs}
    for key, item in subgraphs.items():
        for dependency in item.depends_on:
            followers[dependency].append(key)
    pending = {key: len(item.depends_on) for key, item in subgraphs.items()}
    queue: LaunchQueue[str] = LaunchQueue()
    order: list[str] = []
    ready = [key for key, count in pending.items() if count == 0]
    while ready or queue:
        for key in ready:
            item = subgraphs[key]
            queue.enqueue(key, depth=item.priority, latency_s=item.latency_s, group=group[key], name=item.name)
        order.append(queue.launch())
        for key in followers[order[-1]]:
            pending[key] -= 1
        ready = [key for key in followers[order[-1]] if pending[key] == 0]
    assert len(order) == len(subgraphs), "there is no cycle"
    return order


def sequential_schedule(graphs: Sequence[Sequence[Subgraph]]) -> list[str]:
    """Order the hTasks one after another, each by Algorithm 1 alone: what frameworks without multiplexing do."""
    return [key for graph in graphs for key in schedule([graph])]


def simulate_streams(
    order: Sequence[str],
    graphs: Sequence[Sequence[Subgraph]],
    *,
    overlap: bool = True,
    compute_slowdown: float = 0.0,
) -> StreamTimeline:
    """Run a launch schedule on a compute and a communication stream.

    Args:
        order: keys of all subgraphs in `graphs`, in an order that keeps their dependencies.
        graphs: the subgraphs of each hTask.
        overlap: whether communication has a stream of its own.
        compute_slowdown: share of its speed that the compute stream loses during communication.
    """
    subgraphs = by_key(graphs)
    timeline = StreamTimeline(overlap=overlap, compute_slowdown=compute_slowdown)
    end_s: dict[str, float] = {}
    for key in order:
        item = subgraphs[key]
        ready_s = max((end_s[other] for other in item.depends_on), default=0.0)
        end_s[key] = timeline.launch(item.htask, item.name, item.compute_s, item.communication_s, ready_s)
    return timeline


def compute_busy_s(timeline: StreamTimeline) -> float:
    """Return the seconds in which a compute operator ran."""
    return sum((span.compute_end_s - span.compute_start_s for span in timeline.spans), 0.0)
