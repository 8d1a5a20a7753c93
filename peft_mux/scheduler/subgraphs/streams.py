"""`simulate_streams`: when the subgraphs of a launch schedule run on a compute and a communication stream.

Both streams are in-order queues, as CUDA streams are: a subgraph's compute operators start when the compute stream has
finished all earlier launches and everything that the subgraph depends on has ended, communication included; its
communication operators start when those compute operators have ended and the communication stream is free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.subgraphs.schedule import LaunchSchedule
from peft_mux.scheduler.subgraphs.segments import Subgraph, by_key


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
