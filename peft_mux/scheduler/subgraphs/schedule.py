"""`schedule`: the order in which the subgraphs of all hTasks of a bucket are launched (M §3.4.2, Algorithm 1).

It gives an order, not times on a clock: the `t` of the listing adds whole latencies, communication included, as if
nothing overlapped. `peft_mux.scheduler.subgraphs.streams` tells when an order runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peft_mux.scheduler.subgraphs.launcher import LaunchQueue
from peft_mux.scheduler.subgraphs.segments import Subgraph, by_key, subgraph_key

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
