"""All members of a group issue the same collectives in the same order: on GPUs, another order hangs or mixes values.

The first message of a group waits here until all its processes have begun it, as NCCL connects them then, and receives
are posted as on a GPU. No group may be connected in a step: NCCL would allocate while receives wait on the device.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from peft_mux.engine.processes import Processes
from peft_mux.parallel import fsdp
from peft_mux.parallel.pipeline.links import Channel, PipelineLinks
from tests.engine.processes.cases import launch, values
from tests.parallel.replicas import layout_cases

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
COLLECTIVES = (
    "all_reduce all_gather all_gather_into_tensor all_gather_object broadcast broadcast_object_list reduce "
    "reduce_scatter reduce_scatter_tensor scatter gather all_to_all all_to_all_single barrier"
).split()
LAYOUTS = [
    pytest.param(5, {"replicas": "<2,2>, <1,1>"}, id="unlike replicas", marks=pytest.mark.slow),
    pytest.param(7, {"replicas": "<2,2>, <2,1>, <1,1>"}, id="more unlike replicas", marks=pytest.mark.nightly),
    pytest.param(4, {"pipeline_parallel_size": 2, "shard_backbone": True}, id="sharded stages", marks=pytest.mark.slow),
]
Issued = dict[tuple[str, tuple[int, ...]], list[str]]


def record(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> Issued:
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

    connected: set[tuple[str, bool]] = set()
    making: list[str] = []

    def connecting(plain: Callable[..., Any]) -> Callable[..., Any]:
        """Make the first message of a group wait for all its processes, as over NCCL; sends have connections apart."""

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            key = "" if group is None else group.group_name, plain.__name__ in ("isend", "irecv")
            if group is not None and key not in connected:
                connected.add(key)
                assert making, f"{plain.__name__} connects {dist.get_process_group_ranks(group)} in a step"
                store = dist.distributed_c10d._get_default_store()
                store.set(f"connects {key} {rank}", "")
                others = [f"connects {key} {peer}" for peer in dist.get_process_group_ranks(group)]
                store.wait(others, timedelta(seconds=60))
            return plain(*args, **kwargs)

        return call

    def beforehand(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            making.append(plain.__name__)
            try:
                return plain(*args, **kwargs)
            finally:
                making.pop()

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Processes, "connect"), (Processes, "_new_group"), (PipelineLinks, "_connect")):
            patch.setattr(owner, name, beforehand(getattr(owner, name)))
        patch.setattr(Channel, "_post_ahead", lambda channel: None)
        for name in ("isend", "irecv", "all_reduce", "broadcast", "reduce", "all_gather_object"):
            patch.setattr(dist, name, connecting(getattr(dist, name)))
        patch.setattr(fsdp, "_all_gather", connecting(fsdp._all_gather))
        for name in COLLECTIVES:
            patch.setattr(dist, name, noted(name, getattr(dist, name)))
        layout_cases.train_with_comings_and_goings(rank, folder, model, arguments)
    return dict(issued)


@pytest.mark.parametrize(("world_size", "arguments"), LAYOUTS)
def test_every_member_of_a_group_issues_the_same_collectives_in_the_same_order(
    world_size: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = layout_cases.saved_backbone("llama", tmp_path / "backbone")
    found = values(launch(world_size, record, tmp_path / "run", model, arguments, limit_s=500))
    groups = {group for issued in found for group in issued}
    assert max(len(own) for own in found[0].values()) > 10
    for group in groups:
        _, members = group
        first, *others = (found[rank].get(group, []) for rank in members)
        for rank, own in zip(members[1:], others, strict=True):
            assert own == first, f"rank {rank} of {members} issues other collectives than rank {members[0]}"
