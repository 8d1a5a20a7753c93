"""`OperatorGraph`: the operators of one hTask in one pass through a pipeline stage, as a directed acyclic graph.

The graph of M §3.4.2 ("Dependency-Aware Graph Construction"): what `peft_mux.scheduler.subgraphs.segments` cuts into
subgraphs. `peft_mux.scheduler.subgraphs.layers` builds it for decoder layers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OPERATOR_KINDS = ("compute", "communication", "adapter")


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of one hTask.

    Attributes:
        name: a name that is unique within its graph.
        kind: "compute" (base operator or Add), "communication" (collective) or "adapter" (small and fusible).
        latency_s: seconds that it takes when it runs alone.
        depends_on: names of the operators whose results it reads.
        utilization: share of the device that it fills, 0 to 1: u_a of M Eq. 3. Read of adapters only.
        site: place and adapter type, such as "layer0.qkv.lora". Adapters of one site can be fused into one kernel;
            an empty site is never fused. Read of adapters only.

    Raises:
        ValueError: for an unknown kind, a latency or utilization out of range, or a doubled dependency.
    """

    name: str
    kind: str
    latency_s: float
    depends_on: tuple[str, ...] = ()
    utilization: float = 1.0
    site: str = ""

    def __post_init__(self) -> None:
        if self.kind not in OPERATOR_KINDS:
            raise ValueError(
                f"kind of operator {self.name!r} is {self.kind!r}; allowed: {', '.join(OPERATOR_KINDS)}. "
                "Name one of them."
            )
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(
                f"latency_s of operator {self.name!r} is {self.latency_s}; allowed: finite seconds, 0 or more. "
                "Profile the operator again."
            )
        if not 0 <= self.utilization <= 1:
            raise ValueError(
                f"utilization of operator {self.name!r} is {self.utilization}; allowed: 0 to 1. Divide percents by 100."
            )
        if len(set(self.depends_on)) != len(self.depends_on):
            raise ValueError(
                f"depends_on of operator {self.name!r} is {self.depends_on}; allowed: each name once. Drop the repeats."
            )


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Operators of one hTask; a DAG.

    Attributes:
        htask: name of the hTask, unique within a bucket.
        tasks: names of the tasks that the hTask fuses spatially.
        operators: the operators of the hTask, in any order.

    Raises:
        ValueError: for no task, a doubled or unknown operator name, or a cycle.
    """

    htask: str
    tasks: tuple[str, ...]
    operators: tuple[Operator, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(
                f"tasks of hTask {self.htask!r} is (); allowed: one name or more. Name the tasks it holds."
            )
        names = [operator.name for operator in self.operators]
        doubled = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if doubled:
            raise ValueError(
                f"operators of hTask {self.htask!r} repeat the names {doubled}; allowed: each name once. Rename them."
            )
        # Refuses unknown names and cycles.
        self.topological_order()

    def topological_order(self) -> tuple[str, ...]:
        """Return the operator names, each after what it depends on; ties go to the one given first."""
        return topological_order(
            {operator.name: operator.depends_on for operator in self.operators}, f"hTask {self.htask!r}"
        )


def topological_order(depends_on: Mapping[str, Sequence[str]], owner: str) -> tuple[str, ...]:
    """Sort nodes so that each follows what it depends on (Kahn's algorithm); ties go to the node given first.

    Args:
        depends_on: for each node the nodes before it.
        owner: the phrase that names the graph in a message of an error.

    Raises:
        ValueError: for a dependency that is no node, or a cycle.
    """
    names = list(depends_on)
    index = {name: number for number, name in enumerate(names)}
    followers: list[list[int]] = [[] for _ in names]
    in_degree = [0] * len(names)
    for name, dependencies in depends_on.items():
        for dependency in dependencies:
            if dependency not in index:
                raise ValueError(
                    f"depends_on of {name!r} in {owner} names {dependency!r}; allowed: names of the same graphs. "
                    "Add that one or drop the dependency."
                )
            followers[index[dependency]].append(index[name])
            in_degree[index[name]] += 1
    # Positions come in ascending order, which is a heap already.
    ready = [number for number, degree in enumerate(in_degree) if degree == 0]
    order: list[str] = []
    while ready:
        number = heapq.heappop(ready)
        order.append(names[number])
        for follower in followers[number]:
            in_degree[follower] -= 1
            if in_degree[follower] == 0:
                heapq.heappush(ready, follower)
    if len(order) < len(names):
        stuck = sorted(set(names) - set(order), key=index.__getitem__)
        raise ValueError(
            f"depends_on of {owner} has a cycle through some of {stuck[:8]}; allowed: no cycle. "
            "Drop one dependency of it."
        )
    return tuple(order)
