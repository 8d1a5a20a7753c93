"""Algorithm 1 over whole graphs of subgraphs, and when its launches run (M §3.4.2).

The order comes from the `LaunchQueue` that plans and the engine use, the instants from their `StreamTimeline`. Here the
graphs are of operators, with adapters as subgraphs of their own; plans know passes as chains, which is all that runs.

The `t` of the listing adds whole latencies, communication included, as if nothing overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planner.subgraphs.graph import Subgraph, by_key, subgraph_key
from peft_mux.scheduler.subgraphs import LaunchQueue, StreamTimeline


@dataclass(frozen=True, slots=True)
class Launch:
    """One entry of the launch schedule.

    Attributes:
        htask: name of the hTask whose subgraph it is.
        name: name of the subgraph within its hTask.
        t_s: the `t` of Algorithm 1: sum of the latencies of all subgraphs launched before, in seconds.
    """

    htask: str
    name: str
    t_s: float

    @property
    def key(self) -> str:
        return subgraph_key(self.htask, self.name)


LaunchSchedule = tuple[Launch, ...]
"""The launches of all subgraphs of a bucket, in order."""


def launches_of(order: Sequence[Subgraph], t_s: float = 0.0) -> LaunchSchedule:
    """Return the launches of subgraphs in an order, the first one at `t_s`."""
    launches: list[Launch] = []
    for item in order:
        launches.append(Launch(item.htask, item.name, t_s))
        t_s += item.latency_s
    return tuple(launches)


def schedule(graphs: Sequence[Sequence[Subgraph]]) -> LaunchSchedule:
    """Order the subgraphs of a bucket by Algorithm 1 of M.

    Among the subgraphs without pending dependencies those of the highest priority (the smallest depth) are filtered,
    and the one with the longest cumulative latency of all its operators is launched. Ties go to the hTask given first,
    then to the name that sorts first.

    Line 11 of the listing enqueues all zero in-degree subgraphs of the DAG again after each removal, so one that
    waits in the queue would be enqueued, and launched, twice. Here a subgraph is enqueued once, when its last
    dependency is removed; that may be in another DAG if an adapter is fused across hTasks.

    On the two streams of `simulate_streams` the order takes at most twice as long as the best one: with any order one
    stream is always busy, so it takes no longer than all compute plus all communication, and none takes less than
    the larger of them. Two is approached if a launch that is all communication waits behind a longer one that is
    all compute. O(n log n) for n subgraphs.

    Raises:
        ValueError: for a doubled key, an unknown dependency or a cycle.
    """
    subgraphs = by_key(graphs)
    owner = {item.key: number for number, graph in enumerate(graphs) for item in graph}
    followers: dict[str, list[str]] = {key: [] for key in subgraphs}
    for key, item in subgraphs.items():
        for dependency in item.depends_on:
            if dependency not in followers:
                raise ValueError(
                    f"depends_on of {key!r} must have keys of the given subgraphs, got {dependency!r}. Pass all "
                    "graphs of the bucket."
                )
            followers[dependency].append(key)
    pending = {key: len(item.depends_on) for key, item in subgraphs.items()}
    queue: LaunchQueue[str] = LaunchQueue()
    order: list[Subgraph] = []
    ready = [key for key, count in pending.items() if count == 0]
    while ready or queue:
        for key in ready:
            item = subgraphs[key]
            queue.enqueue(key, depth=item.priority, latency_s=item.latency_s, group=owner[key], name=item.name)
        order.append(subgraphs[queue.launch()])
        for key in followers[order[-1].key]:
            pending[key] -= 1
        ready = [key for key in followers[order[-1].key] if pending[key] == 0]
    if len(order) < len(subgraphs):
        stuck = [key for key, count in pending.items() if count > 0]
        raise ValueError(
            f"depends_on of the subgraphs has a cycle through some of {stuck[:8]}. Undo the fusion that closed it."
        )
    return launches_of(order)


def sequential_schedule(graphs: Sequence[Sequence[Subgraph]]) -> LaunchSchedule:
    """Order the hTasks one after another, each by Algorithm 1 alone: what frameworks without multiplexing do.

    Raises:
        ValueError: as `schedule`, and for adapters that are fused across hTasks, as those cannot run one by one.
    """
    subgraphs = by_key(graphs)
    return launches_of([subgraphs[launch.key] for graph in graphs for launch in schedule([graph])])


def simulate_streams(
    launches: LaunchSchedule,
    graphs: Sequence[Sequence[Subgraph]],
    *,
    overlap: bool = True,
    compute_slowdown: float = 0.0,
) -> StreamTimeline:
    """Run a launch schedule on a compute and a communication stream.

    Args:
        launches: the launch order of all subgraphs in `graphs`.
        graphs: the subgraphs of each hTask.
        overlap: whether communication has a stream of its own.
        compute_slowdown: share of its speed that the compute stream loses during communication.

    Raises:
        ValueError: for a schedule that is not an order of exactly these subgraphs, or a slowdown out of range.
    """
    subgraphs = by_key(graphs)
    timeline = StreamTimeline(overlap=overlap, compute_slowdown=compute_slowdown)
    end_s: dict[str, float] = {}
    for launch in launches:
        if launch.key not in subgraphs or launch.key in end_s:
            raise ValueError(
                f"schedule must have each subgraph once, got {launch.key!r} "
                f"{'twice' if launch.key in end_s else 'which is in no graph'}. Schedule these graphs again."
            )
        item = subgraphs[launch.key]
        early = [key for key in item.depends_on if key not in end_s]
        if early:
            raise ValueError(
                f"schedule launches {launch.key!r} before {early[0]!r}, on which it depends. Schedule these graphs "
                "again."
            )
        ready_s = max((end_s[key] for key in item.depends_on), default=0.0)
        end_s[item.key] = timeline.launch(item.htask, item.name, item.compute_s, item.communication_s, ready_s)
    missing = [key for key in subgraphs if key not in end_s]
    if missing:
        raise ValueError(
            f"schedule must have each subgraph once, but leaves out {missing[:8]}. Schedule these graphs again."
        )
    return timeline


def compute_stall_s(timeline: StreamTimeline) -> float:
    """Return the time in which the compute stream is idle, the wait for the last communication included."""
    return timeline.makespan_s - compute_busy_s(timeline)


def compute_busy_s(timeline: StreamTimeline) -> float:
    """Return the seconds in which a compute operator ran."""
    return sum((span.compute_end_s - span.compute_start_s for span in timeline.spans), 0.0)


def communication_busy_s(timeline: StreamTimeline) -> float:
    """Return the seconds in which a communication operator ran."""
    return sum((span.end_s - span.communication_start_s for span in timeline.spans), 0.0)
