"""Passes as chains of subgraphs, which of them take turns (M §3.4.2), and how long that takes.

The planner simulates these chains; the engine (`peft_mux.parallel.tensor.interleaving`) runs passes by the same rules.

A pass is one chain: a subgraph ends at a sum over the devices of its stage (tensor parallelism), and the next one waits
for it. Adapters are part of the operator next to which they run. For a layer::

    forward     | norm, q/k/v, attention, output |- sum -| norm, gate/up, down |- sum -|
    backward    | down, gate/up |- sum -| output, attention, q/k/v |- sum -|

The embedding comes before the first layer. The head comes after the last one: a sum for each block of the loss, and in
the backward one of its gradient. If activations are recomputed, the attention's sum is made again before the backward
of a layer; the MLP's is not, as nothing needs it there.

Algorithm 1 of M and the two streams that its launches run on:

* `LaunchQueue` is lines 7 to 11 of the listing, one decision at a time. Plans drain it over whole passes; the engine
  (`parallel.tensor.interleaving`) asks it for the next launch while passes run. So the same lines decide what is
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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from peft_mux.scheduler.costs.hardware import Overlap
from peft_mux.scheduler.plan import PassParts

Key = TypeVar("Key", str, int)


class LaunchQueue(Generic[Key]):
    """The subgraphs without pending dependencies, and which of them is launched next.

    Add each subgraph once, when the last of its dependencies has been launched.

    Example:
        >>> queue = LaunchQueue[str]()
        >>> queue.enqueue("short", depth=0, latency_s=1.0, group=0)
        >>> queue.enqueue("long", depth=0, latency_s=2.0, group=1)
        >>> queue.enqueue("deep", depth=1, latency_s=9.0, group=2)
        >>> [queue.launch() for _ in range(len(queue))]
        ['long', 'short', 'deep']
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, str, Key]] = []

    def __len__(self) -> int:
        """Return how many subgraphs are ready."""
        return len(self._heap)

    def enqueue(self, key: Key, *, depth: int, latency_s: float, group: int, name: str = "") -> None:
        """Add a subgraph that is ready.

        Args:
            key: what `launch` returns for it.
            depth: its topological depth; a smaller one has a higher priority.
            latency_s: predicted seconds of all its operators, or any unit that is the same for all.
            group: number of its hTask or pass; the smallest wins a tie.
            name: name within its hTask; the first in sorted order wins a tie that is left.
        """
        heapq.heappush(self._heap, (depth, -latency_s, group, name, key))

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
    """

    def __init__(self, *, overlap: bool = True, compute_slowdown: float = 0.0) -> None:
        self.spans: list[SubgraphSpan] = []
        self._overlap = overlap
        self._slowdown = compute_slowdown
        self._compute_free_s = self._communication_free_s = 0.0
        self._in_flight: deque[tuple[float, float]] = deque()

    @property
    def makespan_s(self) -> float:
        """Seconds from the start to the end of the last operator."""
        return max((span.end_s for span in self.spans), default=0.0)

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


def turn_groups(
    tasks: Sequence[Collection[str]], buckets: Sequence[int], width: int, *, may_repeat: bool = True
) -> list[tuple[int, ...]]:
    """Divide the passes of a step into groups that take turns, never across buckets (M §3.4.3, case 3).

    Buckets follow each other in the order of their first passes. A group first takes passes of different tasks, so that
    the gradients of each task still add up in the order of the work. Then it takes more passes of the same tasks, if it
    may.

    Args:
        tasks: names of the tasks of each pass of a step, in the order of the work.
        buckets: for each of these passes the number of the bucket that its hTask is in.
        width: largest number of passes in a group.
        may_repeat: whether two passes of a group may be of one task.

    Returns:
        For each group the indices of its passes; each exactly once, and those of a task in the order of the work.
    """
    groups: list[tuple[int, ...]] = []
    for bucket in dict.fromkeys(buckets):
        left = [index for index, bucket_of_pass in enumerate(buckets) if bucket_of_pass == bucket]
        while left:
            group: list[int] = []
            seen: set[str] = set()
            for index in left:
                if len(group) < width and seen.isdisjoint(tasks[index]):
                    group.append(index)
                # The tasks of a skipped pass count too, or a later pass of theirs would overtake it.
                seen.update(tasks[index])
            left = [index for index in left if index not in group]
            if may_repeat:
                group, left = group + left[: width - len(group)], left[width - len(group) :]
            groups.append(tuple(group))
    return groups


def neighbour_groups(tasks: Sequence[Collection[str]], width: int, *, may_repeat: bool = True) -> list[tuple[int, ...]]:
    """Divide the passes of one action of a pipeline into groups that take turns, without changing their order.

    The stages before and after wait for messages in that order.

    Args:
        tasks: names of the tasks of each pass of an action, in the order in which they run; all are of one bucket.
        width: largest number of passes in a group.
        may_repeat: whether two passes of a group may be of one task.
    """
    groups: list[list[int]] = []
    seen: set[str] = set()
    for index, names in enumerate(tasks):
        if not groups or len(groups[-1]) == width or not (may_repeat or seen.isdisjoint(names)):
            groups.append([])
            seen = set()
        groups[-1].append(index)
        seen.update(names)
    return [tuple(group) for group in groups]


Direction = Literal["both", "forward", "backward"]
Latency = Callable[[int], float]
"""Predicted latency of a pass's subgraph, by its depth from 0; in any unit, the same for all passes and processes."""


class TimedSubgraph(NamedTuple):
    """One subgraph of a pass.

    Attributes:
        compute_s: seconds of computing.
        sum_s: seconds of the sum at its end, which the next subgraph waits for; 0 at the end of the pass.
    """

    compute_s: float
    sum_s: float


PassTimes = tuple[TimedSubgraph, ...]
"""The subgraphs of one pass, in order; each waits for the one before."""


class Stretch(NamedTuple):
    """Which part of the model a pass goes through, and how.

    Attributes:
        num_layers: layers of the stage.
        is_first: whether the embedding comes before them.
        is_last: whether the head comes after them.
        recomputes: whether activations are recomputed in the backward.
        direction: forward, backward, or both.
    """

    num_layers: int
    is_first: bool = True
    is_last: bool = True
    recomputes: bool = False
    direction: Direction = "both"


def pass_times(parts: PassParts, stretch: Stretch) -> PassTimes:
    """Return the subgraphs of one pass, in order.

    Args:
        parts: what the pass computes between its sums.
        stretch: the part of the model that it goes through.
    """
    chain: list[TimedSubgraph] = []
    outside_s = parts.overhead_s + (parts.first_s if stretch.is_first else 0.0)
    forward, backward = parts.forward_fraction, 1 - parts.forward_fraction

    if stretch.direction != "backward":
        attention, mlp = (TimedSubgraph(forward * seconds, parts.sum_s) for seconds in (parts.attention_s, parts.mlp_s))
        chain = [attention, mlp] * stretch.num_layers
        # The fixed time of a pass is the host's time to launch it, which comes first.
        chain[0] = TimedSubgraph(forward * outside_s + chain[0].compute_s, chain[0].sum_s)
        if stretch.is_last:
            # The head's gradient is computed together with its losses, block by block.
            block_s = parts.head_s / parts.num_head_blocks
            chain += [TimedSubgraph(block_s, parts.head_sum_s)] * parts.num_head_blocks

    if stretch.direction != "forward":
        if stretch.is_last:
            chain.append(TimedSubgraph(0.0, parts.head_gradient_sum_s))
        mlp_s, attention_s = backward * parts.mlp_s, backward * parts.attention_s
        layer = [TimedSubgraph(mlp_s, parts.sum_s), TimedSubgraph(attention_s, parts.sum_s)]
        if stretch.recomputes:
            layer[:1] = [
                TimedSubgraph(forward * parts.attention_s, parts.sum_s),
                TimedSubgraph(forward * parts.mlp_s + mlp_s, parts.sum_s),
            ]
        chain += layer * stretch.num_layers
        if stretch.is_first:
            # Embeddings are frozen, so the gradient of their output is not summed.
            chain[-1] = TimedSubgraph(chain[-1].compute_s + backward * outside_s, 0.0)
        else:
            chain.append(TimedSubgraph(backward * outside_s, 0.0))
    else:
        # A forward by itself waits for its last sum.
        chain.append(TimedSubgraph(0.0, 0.0))
    return tuple(chain)


def latency_of(times: PassTimes) -> Latency:
    """Return the latency of each subgraph by its depth, which `LaunchQueue` compares; 0 after the last one."""
    return lambda depth: times[depth].compute_s + times[depth].sum_s if depth < len(times) else 0.0


def turn_order(passes: Sequence[PassTimes]) -> list[tuple[int, int]]:
    """Return the order in which Algorithm 1 launches the subgraphs of a group: index of the pass, and depth.

    Args:
        passes: the subgraphs of each pass of a group.
    """
    queue: LaunchQueue[int] = LaunchQueue()
    launched = [0] * len(passes)
    order: list[tuple[int, int]] = []

    def enqueue(index: int) -> None:
        depth = launched[index]
        if depth < len(passes[index]):
            compute_s, sum_s = passes[index][depth]
            queue.enqueue(index, depth=depth, latency_s=compute_s + sum_s, group=index)

    for index in range(len(passes)):
        enqueue(index)
    while queue:
        index = queue.launch()
        order.append((index, launched[index]))
        launched[index] += 1
        enqueue(index)
    return order


def turns_timeline(
    passes: Sequence[PassTimes], overlap: Overlap | None = None, *, in_turns: bool = True
) -> StreamTimeline:
    """Return when the subgraphs of a group run on a compute and a communication stream.

    Args:
        passes: the subgraphs of each pass of a group.
        overlap: what turns cost and hide; `None` if sums are hidden whole and turns cost nothing.
        in_turns: whether passes take turns; otherwise they run one after another, and wait for each sum at once.
    """
    known = overlap or Overlap()
    in_turns = in_turns and len(passes) > 1
    turn_s = known.turn_s if in_turns else 0.0
    # A sum also waits for the slowest rank.
    charged = [
        tuple(
            TimedSubgraph(compute_s + turn_s, sum_s + (known.skew * compute_s if sum_s else 0.0))
            for compute_s, sum_s in times
        )
        for times in passes
    ]
    if in_turns:
        timeline = StreamTimeline(compute_slowdown=known.slowdown)
        order = turn_order(charged)
    else:
        timeline = StreamTimeline(overlap=False)
        order = [(index, depth) for index, times in enumerate(charged) for depth in range(len(times))]
    end_s = [0.0] * len(charged)
    for index, depth in order:
        end_s[index] = timeline.launch(f"{index}", f"{depth}", *charged[index][depth], ready_s=end_s[index])
    return timeline
