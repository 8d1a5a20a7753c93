"""All members of a group issue the same collectives in the same order: on GPUs, another order hangs or mixes values."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.processes.cases import comings_and_goings, five_tasks, launch, run, values
from tests.invariants import mux_lab as lab

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]
WORLD_SIZE = 8
COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor all_gather_object broadcast broadcast_object_list reduce "
    "reduce_scatter reduce_scatter_tensor scatter gather all_to_all all_to_all_single barrier"
).split()
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "stages and shards": {"replicas": "<2,2>x2"},
    "unlike replicas": {"replicas": "<2,2>, <2,1>, <1,1>x2"},
    "a sharded backbone": {"shard_backbone": True},
}
Issued = dict[tuple[str, tuple[int, ...]], list[str]]


def record(folder: Path, arguments: dict[str, Any]) -> Issued:
    """Train tasks that come and go; return what this process issued in each group, by its name and members."""
    issued: Issued = defaultdict(list)

    def noted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)
            group = group or dist.group.WORLD
            members = group.group_name, tuple(dist.get_process_group_ranks(group))
            # Objects are sent as tensors of lengths that differ, and by collectives that are noted as well.
            shapes = [f"{arg.dtype}{list(arg.shape)}" for arg in args if isinstance(arg, torch.Tensor)]
            issued[members].append(" ".join([name, *([] if "uint8" in str(shapes) else shapes)]))
            return plain(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noted(name, getattr(dist, name)))
        run(folder, five_tasks(), recorder=lab.Recorder(at_end=comings_and_goings()), **arguments)
    return dict(issued)


def part(rank: int, folder: Path, arguments: dict[str, Any]) -> Issued:
    return record(folder, arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_member_of_a_group_issues_the_same_collectives_in_the_same_order(layout: str, tmp_path: Path) -> None:
    found = values(launch(WORLD_SIZE, part, tmp_path, LAYOUTS[layout], limit_s=500))
    groups = {group for issued in found for group in issued}
    assert max(len(own) for own in found[0].values()) > 10
    for group in groups:
        _, members = group
        first, *others = (found[rank].get(group, []) for rank in members)
        for rank, own in zip(members[1:], others, strict=True):
            assert own == first, f"rank {rank} of {members} issues other collectives than rank {members[0]}"
