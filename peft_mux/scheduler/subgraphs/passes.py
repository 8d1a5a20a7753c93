"""`turn_groups`: which passes go through a stage in turns (M §3.4.2), never those of two buckets (M §3.4.3, case 3)."""

# MERGED: Whole passes as rows of subgraphs, and when they run in turns: what the planner simulates and the engine
# MERGED: follows.
# MERGED: A pass is one chain: its subgraphs end at the sums that it waits for, and adapters are part of the operator
# MERGED: beside which
# MERGED: they run. For a layer under tensor parallelism, as `layers.layer_graph` and `segments.segment` cut it too::
# MERGED:     forward     | norm, q/k/v, attention, output |- sum -| norm, gate/up, down |- sum -|
# MERGED:     backward    | down, gate/up |- sum -| output, attention, q/k/v |- sum -|
# MERGED: Before the first layer lies the embedding, behind the last one the head: a sum for each block of the loss,
# MERGED: and in the
# MERGED: backward one of its gradient. Where activations are recomputed, the attention's sum is made again before the
# MERGED: backward of
# MERGED: a layer; the MLP's is not, as nothing needs it there.

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

from peft_mux.scheduler.costs.hardware import Overlap
from peft_mux.scheduler.costs.latency import PassParts
from peft_mux.scheduler.subgraphs.schedule import StreamTimeline, schedule, sequential_schedule, simulate_streams
from peft_mux.scheduler.subgraphs.segments import Operator, Subgraph, subgraph_key


class GroupedPass(NamedTuple):
    """A pass as far as grouping looks at it.

    Attributes:
        bucket: number of the bucket that its hTask is in.
        tasks: names of its tasks.
    """

    bucket: int
    tasks: Collection[str]


def turn_groups(passes: Sequence[GroupedPass], width: int, *, may_repeat: bool = True) -> list[tuple[int, ...]]:
    """Divide the passes of a step into groups that go through the model in turns; the planner's and the engine's rule.

    Buckets come one after another, in the order in which their first passes stand. Within one, a group takes passes of
    tasks that differ, as long as there are any, so that the order in which the gradients of a task add up stays that of
    the work. Then it takes those of the same tasks, if it may.

    Args:
        passes: the passes of a step, in the order of the work.
        width: largest number of passes in a group.
        may_repeat: whether two passes of a group may be of one task.

    Returns:
        For each group the indices of its passes; every one once, and those of a task in the order of the work.

    Raises:
        ValueError: for a width below one.
    """
    if width < 1:
        raise ValueError(f"width is {width}; allowed: 1 or more passes in turns, 1 for one after another.")
    groups: list[tuple[int, ...]] = []
    for bucket in dict.fromkeys(one.bucket for one in passes):
        members = [index for index, one in enumerate(passes) if one.bucket == bucket]
        groups += _groups_of_bucket(passes, members, width, may_repeat)
    return groups


def _groups_of_bucket(
    passes: Sequence[GroupedPass], left: list[int], width: int, may_repeat: bool
) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []
    while left:
        group: list[int] = []
        seen: set[str] = set()
        for index in left:
            if len(group) < width and seen.isdisjoint(passes[index].tasks):
                group.append(index)
            # Also the names of a pass that was passed over, lest a later pass of its task overtake it.
            seen.update(passes[index].tasks)
        left = [index for index in left if index not in group]
        if may_repeat:
            group, left = group + left[: width - len(group)], left[width - len(group) :]
        groups.append(tuple(group))
    return groups


def neighbour_groups(passes: Sequence[GroupedPass], width: int, *, may_repeat: bool = True) -> list[tuple[int, ...]]:
    """Divide the passes of one action of a pipeline into groups that take turns, in the order of the action.

    Their order is not changed, as the stages before and behind wait for messages in it.

    Args:
        passes: the passes of an action, which are of one bucket, in the order in which they run.
        width: largest number of passes in a group.
        may_repeat: whether two passes of a group may be of one task.
    """
    groups: list[list[int]] = []
    seen: set[str] = set()
    for index, one in enumerate(passes):
        if not groups or len(groups[-1]) == width or not (may_repeat or seen.isdisjoint(one.tasks)):
            groups.append([])
            seen = set()
        groups[-1].append(index)
        seen.update(one.tasks)
    return [tuple(group) for group in groups]


Direction = Literal["both", "forward", "backward"]
Latency = Callable[[int], float]
"""Predicted latency of a pass's subgraph, by its depth from 0; in any unit, the same for all passes and processes."""


class TimedSubgraph(NamedTuple):
    """One subgraph of a pass.

    Attributes:
        compute_s: seconds of computing.
        sum_s: seconds of the sum behind it, which the next subgraph waits for; 0 where the pass ends.
    """

    compute_s: float
    sum_s: float


PassTimes = tuple[TimedSubgraph, ...]
"""The subgraphs of one pass, in order; each waits for the one before."""


class Stretch(NamedTuple):
    """Which part of the model a pass goes through, and how.

    Attributes:
        num_layers: layers of the stage.
        is_first: whether the embedding lies before them.
        is_last: whether the head lies behind them.
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
    if stretch.direction != "backward":
        chain += _forward(parts, stretch)
    if stretch.direction != "forward":
        chain += _backward(parts, stretch)
    # A forward by itself waits for its last sum, and is over then.
    return (*chain, TimedSubgraph(0.0, 0.0)) if stretch.direction == "forward" else tuple(chain)


def _forward(parts: PassParts, stretch: Stretch) -> list[TimedSubgraph]:
    share = parts.forward_fraction
    attention, mlp = (TimedSubgraph(share * seconds, parts.sum_s) for seconds in (parts.attention_s, parts.mlp_s))
    chain = [attention, mlp] * stretch.num_layers
    # What every pass takes is the host's time for launching it, which lies before all else.
    before_s = share * (parts.overhead_s + (parts.first_s if stretch.is_first else 0.0))
    chain[0] = TimedSubgraph(before_s + chain[0].compute_s, chain[0].sum_s)
    if stretch.is_last:
        # Also the head's gradient is computed with its losses, block by block.
        block_s = parts.head_s / parts.num_head_blocks
        chain += [TimedSubgraph(block_s, parts.head_sum_s)] * parts.num_head_blocks
    return chain


def _backward(parts: PassParts, stretch: Stretch) -> list[TimedSubgraph]:
    share = 1 - parts.forward_fraction
    attention_s, mlp_s = share * parts.attention_s, share * parts.mlp_s
    layer = [TimedSubgraph(mlp_s, parts.sum_s), TimedSubgraph(attention_s, parts.sum_s)]
    if stretch.recomputes:
        again_s = parts.forward_fraction * parts.attention_s
        layer[:1] = [
            TimedSubgraph(again_s, parts.sum_s),
            TimedSubgraph(parts.forward_fraction * parts.mlp_s + mlp_s, parts.sum_s),
        ]
    chain = layer * stretch.num_layers
    if stretch.is_last:
        chain.insert(0, TimedSubgraph(0.0, parts.head_gradient_sum_s))
    after_s = share * (parts.overhead_s + (parts.first_s if stretch.is_first else 0.0))
    # Embeddings are frozen, so that no sum is made of the gradient of what comes out of them.
    if not stretch.is_first:
        return [*chain, TimedSubgraph(after_s, 0.0)]
    return [*chain[:-1], TimedSubgraph(chain[-1].compute_s + after_s, 0.0)]


def latency_of(times: PassTimes) -> Latency:
    """Return the latency of each subgraph by its depth, which `LaunchQueue` compares; 0 behind the last one.

    Args:
        times: the subgraphs of a pass.
    """
    return lambda depth: times[depth].compute_s + times[depth].sum_s if depth < len(times) else 0.0


def turn_order(passes: Sequence[PassTimes]) -> list[tuple[int, int]]:
    """Return whose turn it is, from the first to the last: index of the pass, and depth of its subgraph.

    Args:
        passes: the subgraphs of each pass of a group.
    """
    graphs = [subgraphs_of(f"{index}", times) for index, times in enumerate(passes)]
    return [(int(launch.htask), int(launch.name)) for launch in schedule(graphs).launches]


def subgraphs_of(name: str, times: PassTimes) -> tuple[Subgraph, ...]:
    """Return a pass as `schedule` and `simulate_streams` take it.

    Args:
        name: name of the pass, unique within its group.
        times: the subgraphs of the pass.
    """
    found: list[Subgraph] = []
    for depth, (compute_s, sum_s) in enumerate(times):
        operators = [Operator(f"{depth}", "compute", compute_s)]
        if sum_s:
            operators.append(Operator(f"{depth}.sum", "communication", sum_s, (f"{depth}",)))
        before = (subgraph_key(name, f"{depth - 1}"),) if depth else ()
        found.append(Subgraph(f"{depth}", name, tuple(operators), before, depth))
    return tuple(found)


def turns_timeline(
    passes: Sequence[PassTimes], overlap: Overlap | None = None, *, in_turns: bool = True
) -> StreamTimeline:
    """Return when everything runs on one compute and one communication stream.

    Args:
        passes: the subgraphs of each pass of a group.
        overlap: what turns cost and hide; `None` where sums are hidden whole, and turns cost nothing.
        in_turns: whether passes take turns; otherwise one runs after another, and waits for each sum at once.
    """
    known = overlap or Overlap()
    takes_turns = in_turns and len(passes) > 1
    graphs = [
        subgraphs_of(f"{index}", tuple(_charged(one, known, takes_turns) for one in times))
        for index, times in enumerate(passes)
    ]
    if takes_turns:
        return simulate_streams(schedule(graphs), graphs, compute_slowdown=known.slowdown)
    return simulate_streams(sequential_schedule(graphs), graphs, overlap=False)


def _charged(one: TimedSubgraph, overlap: Overlap, takes_turns: bool) -> TimedSubgraph:
    """Return a subgraph with what it takes beside its own computing: the turn, and waiting for the slowest rank."""
    waits_s = overlap.skew * one.compute_s if one.sum_s else 0.0
    return TimedSubgraph(one.compute_s + (overlap.turn_s if takes_turns else 0.0), one.sum_s + waits_s)
