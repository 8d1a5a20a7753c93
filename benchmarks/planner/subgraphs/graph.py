"""Operators of one hTask, and `segment`, which cuts them into subgraphs: the smallest units of a launch (M §3.4.2).

An `OperatorGraph` is a directed acyclic graph ("Dependency-Aware Graph Construction"); `layers` builds those of decoder
layers. Example, one decoder layer forward under tensor parallelism with an adapter at every linear layer; the number is
the priority (topological depth), `*` marks an adapter::

    0 qkv    1 qkv.add, attention    3 output, output.add, all_reduce    4 gate_up    5 gate_up.add    7 down, ...
        0 qkv*                  2 output*                                    4 gate_up*            6 down*

`schedule` orders subgraphs and says when they run.
"""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of one hTask.

    Attributes:
        name: a name that is unique within its graph.
        kind: "compute" (base operator or Add), "communication" (collective) or "adapter".
        latency_s: seconds that it takes when it runs alone.
        depends_on: names of the operators whose results it reads.
    """

    name: str
    kind: str
    latency_s: float
    depends_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Operators of one hTask; a DAG.

    Attributes:
        htask: name of the hTask, unique within a bucket.
        operators: the operators of the hTask, in any order.
    """

    htask: str
    operators: tuple[Operator, ...]


def topological_order(depends_on: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Sort nodes so that each follows what it depends on (Kahn's algorithm); ties go to the node given first.

    Args:
        depends_on: for each node the nodes before it.

    Raises:
        graphlib.CycleError: for a cycle.
    """
    index = {name: number for number, name in enumerate(depends_on)}
    sorter = graphlib.TopologicalSorter(depends_on)
    sorter.prepare()
    ready: list[tuple[int, str]] = []
    order: list[str] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (index[name], name))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Operators that are launched together.

    The compute (or adapter) operators come first and run on the compute stream in this order; the communication
    operators at the end run on the communication stream.

    Attributes:
        name: the name of its first operator, unique within the hTask.
        htask: name of the hTask whose graph it belongs to.
        operators: its operators in launch order.
        depends_on: keys of the subgraphs before it, which may be in other graphs.
        priority: its topological depth; smaller is launched earlier.
    """

    name: str
    htask: str
    operators: tuple[Operator, ...]
    depends_on: tuple[str, ...] = ()
    priority: int = 0

    @property
    def key(self) -> str:
        """Name that is unique among all graphs of a bucket."""
        return f"{self.htask}/{self.name}"

    @property
    def compute_s(self) -> float:
        """Seconds on the compute stream."""
        return sum(operator.latency_s for operator in self.operators if operator.kind != "communication")

    @property
    def communication_s(self) -> float:
        """Seconds on the communication stream."""
        return sum(operator.latency_s for operator in self.operators if operator.kind == "communication")

    @property
    def latency_s(self) -> float:
        """Cumulative latency of all its operators, in seconds: what Algorithm 1 compares."""
        return self.compute_s + self.communication_s


def segment(graph: OperatorGraph) -> tuple[Subgraph, ...]:
    """Cut the graph of one hTask into subgraphs (M §3.4.2, "Dependency-Aware Graph Construction").

    Consecutive compute operators are clustered, each communication operator is appended to the subgraph of the
    operator that it depends on, adapters are isolated, and the priority is the topological depth.

    The paper leaves open on which side of an adapter the base operator next to it goes. Two decisions, both for the
    sake of "a longer sequence of computation operators benefits fully overlapping communication":

    * A base operator joins what follows it, up to the communication that ends the subgraph (output, Add, all-reduce):
      the all-reduce of one hTask then runs under the output projection of the next one, not under its tiny Add.
    * A base operator that waits directly for a communication (or starts the graph) does not join the Add that waits
      for its adapter: base operator and adapter stay at one depth, where the longest goes first and hides the
      communication that the others still wait for. Clustered with the Add, it would be launched after the adapters
      of all hTasks, and so after the all-reduces of all.

    Besides, two operators are clustered only where both wait for the same communications, so that none waits for one
    that it does not need, and where the first of them feeds no communication, which its successor would delay.
    Clusters are on levels counted from the end of the graph; every dependency between two of them climbs, so the
    result has no cycle.

    Args:
        graph: the operator graph of the hTask in one direction.

    Returns:
        subgraphs in topological order, of which each operator is in exactly one.
    """
    operators = {operator.name: operator for operator in graph.operators}
    order = topological_order({name: operator.depends_on for name, operator in operators.items()})
    joined = _joinable_edges(order, operators)
    level = _levels_from_the_end(order, operators, joined)
    owner = _cluster(order, operators, joined, level)
    _append_communication(order, operators, owner, level)
    members: dict[str, list[Operator]] = {}
    for name in order:
        members.setdefault(owner[name], []).append(operators[name])
    subgraphs = [_subgraph(graph.htask, cluster, owner) for cluster in members.values()]
    return with_priorities([subgraphs])[0]


def with_priorities(graphs: Sequence[Sequence[Subgraph]]) -> tuple[tuple[Subgraph, ...], ...]:
    """Set the priority of every subgraph to its depth in all graphs taken together, and sort each graph by it.

    The depth counts the subgraphs on the longest path from a subgraph without dependencies.

    Args:
        graphs: the subgraphs of each hTask, whatever their priorities are.

    Raises:
        graphlib.CycleError: for a cycle.
    """
    subgraphs = by_key(graphs)
    order = topological_order({key: item.depends_on for key, item in subgraphs.items()})
    depth: dict[str, int] = {}
    for key in order:
        depth[key] = max((depth[dependency] + 1 for dependency in subgraphs[key].depends_on), default=0)
    return tuple(
        tuple(sorted((replace(item, priority=depth[item.key]) for item in graph), key=lambda item: item.priority))
        for graph in graphs
    )


def by_key(graphs: Iterable[Iterable[Subgraph]]) -> dict[str, Subgraph]:
    """Return all subgraphs by key, graph by graph."""
    return {item.key: item for graph in graphs for item in graph}


def _joinable_edges(order: Sequence[str], operators: Mapping[str, Operator]) -> set[tuple[str, str]]:
    """Return the dependencies (before, after) between two compute operators that may share a subgraph."""
    # Bit sets of the communications before each operator: equal sets mean that two operators wait for the same ones.
    waits: dict[str, int] = {}
    feeds_communication: set[str] = set()
    num_communications = 0
    for name in order:
        bits = 0
        for dependency in operators[name].depends_on:
            bits |= waits[dependency]
        if operators[name].kind == "communication":
            feeds_communication.update(operators[name].depends_on)
            bits |= 1 << num_communications
            num_communications += 1
        waits[name] = bits
    return {
        (before, after)
        for after in order
        for before in operators[after].depends_on
        if operators[before].kind == operators[after].kind == "compute"
        and waits[before] == waits[after]
        # A communication waits for all compute of its subgraph: nothing else may follow its operator there.
        and before not in feeds_communication
        # Base operator and adapter stay at one depth: the second decision of `segment`.
        and not (_starts_after_communication(before, operators) and _has_adapter(after, operators))
    }


def _starts_after_communication(name: str, operators: Mapping[str, Operator]) -> bool:
    """Tell whether an operator waits directly for a communication; the input of the graph comes from one, too."""
    before = operators[name].depends_on
    return not before or any(operators[dependency].kind == "communication" for dependency in before)


def _has_adapter(name: str, operators: Mapping[str, Operator]) -> bool:
    return any(operators[dependency].kind == "adapter" for dependency in operators[name].depends_on)


def _levels_from_the_end(
    order: Sequence[str], operators: Mapping[str, Operator], joined: set[tuple[str, str]]
) -> dict[str, int]:
    """Return the latest level of each operator: 0 at the end, one less before each edge that separates subgraphs."""
    # From the end, so that an operator joins what follows it: the first decision of `segment`.
    level = dict.fromkeys(order, 0)
    for name in reversed(order):
        for before in operators[name].depends_on:
            level[before] = min(level[before], level[name] - ((before, name) not in joined))
    return level


def _cluster(
    order: Sequence[str],
    operators: Mapping[str, Operator],
    joined: set[tuple[str, str]],
    level: Mapping[str, int],
) -> dict[str, str]:
    """Map each operator to the first of its cluster: those of one level that joinable edges connect."""
    position = {name: number for number, name in enumerate(order)}
    owner = {name: name for name in order}

    # Union-find with path halving; the first operator in topological order stands for its cluster.
    def find(name: str) -> str:
        while owner[name] != name:
            owner[name] = owner[owner[name]]
            name = owner[name]
        return name

    for name in order:
        for before in operators[name].depends_on:
            if (before, name) in joined and level[before] == level[name]:
                first, second = sorted((find(before), find(name)), key=position.__getitem__)
                owner[second] = first
    return {name: find(name) for name in order}


def _append_communication(
    order: Sequence[str], operators: Mapping[str, Operator], owner: dict[str, str], level: dict[str, int]
) -> None:
    """Move each communication operator into the subgraph of the operator that it depends on, in place.

    Of several it is the one on the last level. Where another one is on that level too, in a subgraph of its own, the
    communication stays alone: appended to either, it could close a cycle.
    """
    position = {name: number for number, name in enumerate(order)}
    for name in order:
        before = operators[name].depends_on
        if operators[name].kind != "communication" or not before:
            continue
        host = max(before, key=lambda item: (level[item], position[item]))
        if all(level[item] < level[host] or owner[item] == owner[host] for item in before):
            owner[name], level[name] = owner[host], level[host]


def _subgraph(htask: str, cluster: Sequence[Operator], owner: Mapping[str, str]) -> Subgraph:
    """Return the subgraph of a cluster that is in topological order; communication goes to the end."""
    # A stable sort: compute operators stay in topological order.
    ordered = sorted(cluster, key=lambda operator: operator.kind == "communication")
    subgraph = owner[ordered[0].name]
    before = (owner[name] for operator in ordered for name in operator.depends_on if owner[name] != subgraph)
    return Subgraph(
        name=ordered[0].name,
        htask=htask,
        operators=tuple(ordered),
        depends_on=tuple(f"{htask}/{name}" for name in dict.fromkeys(before)),
    )
