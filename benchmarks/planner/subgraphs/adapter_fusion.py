"""`fuse_adapters`: horizontal fusion of adapters within hTasks and across the hTasks of a bucket (M §3.4.3).

1. Tasks within one hTask: their adapters of one site become one operator.
2. HTasks within one bucket, if each holds a single task: their adapters of one site become one operator, which creates
   dependencies across their graphs. Add operators are compute operators and are never fused: that would make every
   hTask wait for the others right before the all-reduces.
3. Across buckets: never. Buckets run at different times.
"""

from __future__ import annotations

import graphlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.planner.subgraphs.graph import (
    Operator,
    OperatorGraph,
    Subgraph,
    by_key,
    segment,
    with_priorities,
)
from benchmarks.planner.subgraphs.schedule import schedule, simulate_streams

_TOLERANCE = 1e-12
"""Relative; sums of the same latencies in another order differ by less."""

Graphs = tuple[tuple[Subgraph, ...], ...]


@dataclass(frozen=True, slots=True)
class FusedBucket:
    """The subgraphs of one bucket after fusion, and what the fusion across hTasks did.

    Attributes:
        graphs: the subgraphs of each hTask; a fused adapter is in the graph of the first hTask that has it.
        launches: the order of Algorithm 1 over `graphs`.
        makespan_s: seconds that `launches` takes on two streams.
        unfused_makespan_s: seconds that it would take without fusion across hTasks.
        fused_sites: sites that were fused across hTasks, in the order in which they were tried; fusion of the
            others would have closed a cycle or made the makespan longer.
    """

    graphs: Graphs
    launches: list[str]
    makespan_s: float
    unfused_makespan_s: float
    fused_sites: tuple[str, ...]


def fused_latency_s(adapters: Sequence[Operator]) -> float:
    """Return the latency of adapters in one kernel: max(sum of u_a t_a, max of t_a), the second line of M Eq. 3.

    Of launches, if they are known, the kernel has those of one adapter.

    Args:
        adapters: the adapter operators that run as one kernel.
    """
    launch_s = max(adapter.launch_s for adapter in adapters)
    weighted_s = sum(adapter.utilization * (adapter.latency_s - adapter.launch_s) for adapter in adapters)
    return max([launch_s + weighted_s, *(adapter.latency_s for adapter in adapters)])


def fuse_within(graph: OperatorGraph) -> OperatorGraph:
    """Fuse the adapters of each site of one hTask into one operator (case 1).

    It takes the name of the site, the latency of Eq. 3, and the utilization that keeps u t the same. Adapters that
    depend on each other, directly or not, stay as they are.

    Args:
        graph: the operator graph of the hTask.
    """
    for site in _sites(graph.operators):
        members = [item for item in graph.operators if item.kind == "adapter" and item.site == site]
        if len(members) < 2:
            continue
        fused = _fused_operator(site, members)
        names = {item.name for item in members}
        renamed = [
            replace(item, depends_on=_renamed(item.depends_on, names, site))
            for item in graph.operators
            if item.name not in names
        ]
        # Where the first member stood, as ties in the topological order go by place.
        place = next(number for number, item in enumerate(graph.operators) if item.name in names)
        operators = (*renamed[:place], fused, *renamed[place:])
        if _is_acyclic({item.name: item.depends_on for item in operators}):
            graph = OperatorGraph(graph.htask, graph.tasks, operators)
    return graph


def fuse_adapters(htasks: Sequence[OperatorGraph]) -> FusedBucket:
    """Fuse adapters in a bucket by the first two cases of M §3.4.3.

    The paper asks that fusion across hTasks does not impede their overlap, and does not say how that is ensured. Here
    sites are tried one by one in the order of their depth, each on top of those accepted before; one is kept if the
    graphs stay free of cycles and the simulated makespan of Algorithm 1 on two streams does not grow. So the result is
    never slower than without this fusion. An adapter without a site is left alone.

    Args:
        htasks: the operator graphs of the hTasks; time grows with sites times operators.
    """
    bucket = [fuse_within(graph) for graph in htasks]
    graphs = with_priorities([segment(graph) for graph in bucket])
    launches = schedule(graphs)
    makespan_s = unfused_makespan_s = simulate_streams(launches, graphs).makespan_s
    fused_sites: list[str] = []
    # Case 2 holds only where every hTask of the bucket has a single task.
    if all(len(graph.tasks) == 1 for graph in bucket):
        # By depth: each fusion is judged on top of those that were kept before it.
        for site in _shared_sites(graphs):
            # M asks that fusion keeps the overlap and names no test: here the simulation decides, site by site.
            tried = fuse_site(graphs, site)
            if tried is not None:
                tried_launches = schedule(tried)
                tried_s = simulate_streams(tried_launches, tried).makespan_s
                if tried_s <= makespan_s * (1 + _TOLERANCE):
                    graphs, launches, makespan_s = tried, tried_launches, tried_s
                    fused_sites.append(site)
    return FusedBucket(graphs, launches, makespan_s, unfused_makespan_s, tuple(fused_sites))


def fuse_site(graphs: Sequence[Sequence[Subgraph]], site: str) -> Graphs | None:
    """Fuse the isolated adapters of one site across hTasks (case 2), without asking whether it pays.

    Args:
        graphs: the subgraphs of each hTask, with priorities.
        site: the place and adapter type whose adapters are fused.

    Returns:
        the new graphs with new priorities, or None where the fusion would close a cycle.
    """
    members = [item for graph in graphs for item in graph if _site(item) == site]
    if len(members) < 2:
        return tuple(tuple(graph) for graph in graphs)
    host, keys = members[0], {item.key for item in members}
    before = dict.fromkeys(key for item in members for key in item.depends_on)
    fused = replace(
        host,
        operators=(_fused_operator(site, [operator for item in members for operator in item.operators]),),
        depends_on=tuple(before),
        fused_with=tuple(item.key for item in members[1:]),
    )
    changed = [
        [
            fused if item.key == host.key else replace(item, depends_on=_renamed(item.depends_on, keys, host.key))
            for item in graph
            if item.key == host.key or item.key not in keys
        ]
        for graph in graphs
    ]
    if not _is_acyclic({key: item.depends_on for key, item in by_key(changed).items()}):
        return None
    return with_priorities(changed)


def _fused_operator(site: str, members: Sequence[Operator]) -> Operator:
    """Return the operator of adapters in one kernel; its dependencies are those of all."""
    latency_s = fused_latency_s(members)
    launch_s = max(item.launch_s for item in members)
    weighted_s = sum(item.utilization * (item.latency_s - item.launch_s) for item in members)
    busy_s = latency_s - launch_s
    return Operator(
        name=site,
        kind="adapter",
        latency_s=latency_s,
        depends_on=tuple(dict.fromkeys(name for item in members for name in item.depends_on)),
        # u t stays the sum of the members', so that a further fusion by Eq. 3 comes to the same.
        utilization=min(1.0, weighted_s / busy_s) if busy_s else 1.0,
        site=site,
        launch_s=launch_s,
    )


def _sites(operators: Sequence[Operator]) -> list[str]:
    return list(dict.fromkeys(item.site for item in operators if item.kind == "adapter" and item.site))


def _site(item: Subgraph) -> str:
    """Return the site of an isolated adapter, else an empty string."""
    return item.operators[0].site if item.is_adapter and len(item.operators) == 1 else ""


def _shared_sites(graphs: Sequence[Sequence[Subgraph]]) -> list[str]:
    """Return the sites that two or more hTasks have, by their smallest depth, then in the order of the graphs."""
    depth: dict[str, int] = {}
    num_graphs: dict[str, int] = {}
    for graph in graphs:
        for item in graph:
            if _site(item):
                depth[_site(item)] = min(item.priority, depth.get(_site(item), item.priority))
        for site in dict.fromkeys(_site(item) for item in graph if _site(item)):
            num_graphs[site] = num_graphs.get(site, 0) + 1
    return sorted((site for site in depth if num_graphs[site] > 1), key=depth.__getitem__)


def _renamed(names: tuple[str, ...], old: set[str], new: str) -> tuple[str, ...]:
    """Return the names with all old ones replaced by the new one, which stands once."""
    return tuple(dict.fromkeys(new if name in old else name for name in names))


def _is_acyclic(depends_on: dict[str, tuple[str, ...]]) -> bool:
    try:
        graphlib.TopologicalSorter(depends_on).prepare()
    except graphlib.CycleError:
        return False
    return True
