"""`LaunchQueue`: Algorithm 1 as its subgraphs become ready, one decision at a time (M §3.4.2, lines 7 to 11).

Plans drain it over whole graphs; `peft_mux.engine.tensor.interleaving` asks it whose turn is next while passes run.
So the same lines decide what is planned and what runs.
"""

# MERGED: `schedule`: the order in which the subgraphs of all hTasks of a bucket are launched (M §3.4.2, Algorithm 1).
# MERGED: It gives an order, not times on a clock: the `t` of the listing adds whole latencies, communication
# MERGED: included, as if
# MERGED: nothing overlapped. `peft_mux.scheduler.subgraphs.schedule` tells when an order runs.
# MERGED: `simulate_streams`: when the subgraphs of a launch schedule run on a compute and a communication stream.
# MERGED: Both streams are in-order queues, as CUDA streams are: a subgraph's compute operators start when the compute
# MERGED: stream has
# MERGED: finished all earlier launches and everything that the subgraph depends on has ended, communication included;
# MERGED: its
# MERGED: communication operators start when those compute operators have ended and the communication stream is free.

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from peft_mux.scheduler.subgraphs.segments import Subgraph, by_key, subgraph_key

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


FORMAT_VERSION = 1


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
        """Key of the subgraph."""
        return subgraph_key(self.htask, self.name)


@dataclass(frozen=True, slots=True)
class LaunchSchedule:
    """The launch order of all subgraphs of a bucket.

    Attributes:
        launches: the launches of all subgraphs, in order.
    """

    launches: tuple[Launch, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain values."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LaunchSchedule:
        """Return the schedule that `to_dict` wrote.

        Args:
            data: the plain values of a schedule in this format version.

        Raises:
            ValueError: for another format version.
        """
        version = data.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version is {version!r}; allowed: {FORMAT_VERSION}. Make the schedule again.")
        return cls(tuple(Launch(**launch) for launch in data["launches"]))

    def to_json(self) -> str:
        """Return the schedule as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> LaunchSchedule:
        """Return the schedule that `to_json` wrote.

        Args:
            text: the JSON of a schedule in this format version.

        Raises:
            ValueError: for another format version.
        """
        return cls.from_dict(json.loads(text))


def schedule(graphs: Sequence[Sequence[Subgraph]]) -> LaunchSchedule:
    """Order the subgraphs of a bucket by Algorithm 1 of M.

    Among the subgraphs without pending dependencies those of the highest priority (the smallest depth) are filtered,
    and the one with the longest cumulative latency of all its operators is launched. Ties go to the hTask given first,
    then to the name that sorts first.

    Line 11 of the listing enqueues all zero in-degree subgraphs of the DAG again after each removal, so one that
    waits in the queue would be enqueued, and launched, twice. Here a subgraph is enqueued once, when its last
    dependency is removed; that may be in another DAG where an adapter is fused across hTasks.

    On the two streams of `simulate_streams` the order takes at most twice as long as the best one: with any order one
    stream is always busy, so it takes no longer than all compute plus all communication, and none takes less than
    the larger of them. Two is approached where a launch that is all communication waits behind a longer one that is
    all compute. O(n log n) for n subgraphs.

    Args:
        graphs: the subgraphs of each hTask, with priorities.

    Raises:
        ValueError: for a doubled key, an unknown dependency or a cycle.
    """
    subgraphs = by_key(graphs)
    order = _launch_order(subgraphs, {item.key: number for number, graph in enumerate(graphs) for item in graph})
    launches: list[Launch] = []
    t_s = 0.0
    for key in order:
        launches.append(Launch(subgraphs[key].htask, subgraphs[key].name, t_s))
        t_s += subgraphs[key].latency_s
    return LaunchSchedule(tuple(launches))


def _launch_order(subgraphs: Mapping[str, Subgraph], rank: Mapping[str, int]) -> list[str]:
    """Return the keys of subgraphs in the order of Algorithm 1; `rank` is the number of each one's hTask."""
    followers, in_degree = _dependency_counts(subgraphs)
    queue: LaunchQueue[str] = LaunchQueue()

    def enqueue(key: str) -> None:
        item = subgraphs[key]
        queue.enqueue(key, depth=item.priority, latency_s=item.latency_s, owner=rank[key], name=item.name)

    for key, degree in in_degree.items():
        if degree == 0:
            enqueue(key)
    order: list[str] = []
    while queue:
        order.append(queue.launch())
        for follower in followers[order[-1]]:
            in_degree[follower] -= 1
            # Once, with its last dependency: line 11 of the listing would enqueue again what waits already.
            if in_degree[follower] == 0:
                enqueue(follower)
    if len(order) < len(subgraphs):
        stuck = [key for key, degree in in_degree.items() if degree > 0]
        raise ValueError(
            f"depends_on of the subgraphs has a cycle through some of {stuck[:8]}; allowed: no cycle. "
            "Undo the fusion that closed it."
        )
    return order


def sequential_schedule(graphs: Sequence[Sequence[Subgraph]]) -> LaunchSchedule:
    """Order the hTasks one after another, each by Algorithm 1 alone: what frameworks without multiplexing do.

    Args:
        graphs: the subgraphs of each hTask, with priorities.

    Raises:
        ValueError: for a doubled key, an unknown dependency or a cycle, and for adapters that are fused across hTasks,
            as those cannot run one by one.
    """
    launches: list[Launch] = []
    t_s = 0.0
    for graph in graphs:
        launches += [Launch(item.htask, item.name, t_s + item.t_s) for item in schedule([graph]).launches]
        t_s += sum(item.latency_s for item in graph)
    return LaunchSchedule(tuple(launches))


def _dependency_counts(subgraphs: Mapping[str, Subgraph]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return who waits for each subgraph, and for how many each waits."""
    followers: dict[str, list[str]] = {key: [] for key in subgraphs}
    in_degree = dict.fromkeys(subgraphs, 0)
    for key, item in subgraphs.items():
        for dependency in item.depends_on:
            if dependency not in followers:
                raise ValueError(
                    f"depends_on of {key!r} names {dependency!r}; allowed: keys of the given subgraphs. "
                    "Pass all graphs of the bucket."
                )
            followers[dependency].append(key)
            in_degree[key] += 1
    return followers, in_degree


@dataclass(frozen=True, slots=True)
class SubgraphSpan:
    """When one subgraph ran, in seconds from the start.

    Attributes:
        htask: name of the hTask whose subgraph it is.
        name: name of the subgraph within its hTask.
        compute_start_s: start of its compute operators.
        compute_end_s: end of its compute operators.
        communication_start_s: start of its communication operators; `compute_end_s` where it has none.
        end_s: end of all its operators.
    """

    htask: str
    name: str
    compute_start_s: float
    compute_end_s: float
    communication_start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StreamTimeline:
    """What the two streams did.

    Attributes:
        spans: the instants of all subgraphs, in launch order.
        makespan_s: seconds from the start to the end of the last operator.
        compute_busy_s: seconds in which a compute or adapter operator ran.
        communication_busy_s: seconds in which a communication operator ran.
    """

    spans: tuple[SubgraphSpan, ...]
    makespan_s: float
    compute_busy_s: float
    communication_busy_s: float

    @property
    def compute_stall_s(self) -> float:
        """Time in which the compute stream was idle, the wait for the last communication included."""
        return self.makespan_s - self.compute_busy_s

    @property
    def compute_utilization(self) -> float:
        """Share of the makespan in which the compute stream was busy (1 for an empty schedule)."""
        return self.compute_busy_s / self.makespan_s if self.makespan_s else 1.0


def simulate_streams(
    schedule: LaunchSchedule,
    graphs: Sequence[Sequence[Subgraph]],
    *,
    overlap: bool = True,
    compute_slowdown: float = 0.0,
) -> StreamTimeline:
    """Run a launch schedule on two streams.

    Args:
        schedule: the launch order of all subgraphs in `graphs`.
        graphs: the subgraphs of each hTask.
        overlap: whether communication has a stream of its own. False blocks the compute stream by each communication:
            the baselines "sequential" (with `sequential_schedule`) and "interleaved, no overlap" of M Figure 18.
        compute_slowdown: share of its speed, 0 to below 1, that the compute stream loses while a communication
            operator runs beside it, because the thread blocks of that kernel hold multiprocessors (M §3.4.3).

    Raises:
        ValueError: for a schedule that is not an order of just these subgraphs, or a slowdown out of range.
    """
    if not 0 <= compute_slowdown < 1:
        raise ValueError(
            f"compute_slowdown is {compute_slowdown}; allowed: 0 to below 1. "
            "Divide the multiprocessors that communication holds by all."
        )
    subgraphs = by_key(graphs)
    _check_order(schedule, subgraphs)
    spans = _run([subgraphs[launch.key] for launch in schedule.launches], overlap, compute_slowdown)
    return StreamTimeline(
        spans=tuple(spans),
        makespan_s=max((span.end_s for span in spans), default=0.0),
        compute_busy_s=sum((span.compute_end_s - span.compute_start_s for span in spans), 0.0),
        communication_busy_s=sum((subgraphs[launch.key].communication_s for launch in schedule.launches), 0.0),
    )


def _run(launched: Sequence[Subgraph], overlap: bool, compute_slowdown: float) -> list[SubgraphSpan]:
    """Return when each subgraph runs, in launch order."""
    end_s: dict[str, float] = {}
    spans: list[SubgraphSpan] = []
    in_flight: deque[tuple[float, float]] = deque()
    compute_free_s = communication_free_s = 0.0
    for item in launched:
        communication_s = item.communication_s
        start_s = max((end_s[dependency] for dependency in item.depends_on), default=0.0)
        start_s = max(start_s, compute_free_s)
        compute_end_s = _advance(start_s, item.compute_s, in_flight, compute_slowdown)
        # The communication stream is a queue, too: a collective waits for all that were launched before it.
        sent_s = max(compute_end_s, communication_free_s) if communication_s else compute_end_s
        end_s[item.key] = sent_s + communication_s
        if communication_s:
            communication_free_s = sent_s + communication_s
            in_flight.append((sent_s, communication_free_s))
        # Without overlap a collective holds the compute stream until it ends.
        compute_free_s = compute_end_s if overlap else end_s[item.key]
        spans.append(SubgraphSpan(item.htask, item.name, start_s, compute_end_s, sent_s, end_s[item.key]))
    return spans


def _advance(start_s: float, work_s: float, in_flight: deque[tuple[float, float]], slowdown: float) -> float:
    """Return when `work_s` of computing ends that starts at `start_s` and slows down under communication.

    The spans of communication are disjoint and sorted; those that ended before `start_s` are dropped, as computing
    never starts earlier again.
    """
    while in_flight and in_flight[0][1] <= start_s:
        in_flight.popleft()
    if not slowdown:
        return start_s + work_s
    now_s = start_s
    # After the last communication comes one that never begins: what is left runs at full speed.
    for begin_s, end_s in (*in_flight, (math.inf, math.inf)):
        alone_s = max(begin_s - now_s, 0.0)
        if work_s <= alone_s:
            break
        work_s -= alone_s
        now_s += alone_s
        if work_s <= (end_s - now_s) * (1 - slowdown):
            return now_s + work_s / (1 - slowdown)
        work_s -= (end_s - now_s) * (1 - slowdown)
        now_s = end_s
    return now_s + work_s


def _check_order(schedule: LaunchSchedule, subgraphs: dict[str, Subgraph]) -> None:
    """Refuse a schedule that leaves out, repeats or invents a subgraph, or launches one before its dependencies."""
    launched: set[str] = set()
    for launch in schedule.launches:
        if launch.key not in subgraphs or launch.key in launched:
            raise ValueError(
                f"schedule launches {launch.key!r} {'twice' if launch.key in launched else 'which is in no graph'}; "
                "allowed: each subgraph once. Schedule these graphs again."
            )
        early = [key for key in subgraphs[launch.key].depends_on if key not in launched]
        if early:
            raise ValueError(
                f"schedule launches {launch.key!r} before {early[0]!r}; allowed: after all that it depends on. "
                "Schedule these graphs again."
            )
        launched.add(launch.key)
    missing = [key for key in subgraphs if key not in launched]
    if missing:
        raise ValueError(
            f"schedule leaves out {missing[:8]}; allowed: each subgraph once. Schedule these graphs again."
        )
