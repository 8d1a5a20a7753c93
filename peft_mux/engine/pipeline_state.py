"""Whole adapters out of stages: what checkpoints hold, gathered by parameter name at the first stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from peft_mux.engine.pipeline_links import PipelineLinks
from peft_mux.engine.task_state import TaskState, merge_states
from peft_mux.storage import pack_state, unpack_state

_Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


def gather_task(links: PipelineLinks, own: TaskState) -> TaskState | None:
    """Return a task's state over all stages, at stage 0; `None` elsewhere. Every stage calls this.

    Args:
        links: of the pipeline.
        own: what this stage has, from `split_state`.

    Raises:
        ProcessError: if another stage fails, dies, or does not answer within the time limit.
    """
    tensors, tree = pack_state(
        {"weights": own.weights, "moments": own.moments, "settings": own.settings, "schedule": own.schedule}
    )
    described: _Described = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    everywhere = links.gather((tree, described))
    if links.stage > 0:
        for buffer in _flat(tensors, links.device).values():
            links.send(buffer, 0)
        return None
    parts = [own]
    for stage, (other_tree, other) in enumerate(everywhere[1:], start=1):
        parts.append(TaskState(**unpack_state(_received(links, other, stage), other_tree)))
    return merge_states(parts)


def _flat(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[torch.dtype, torch.Tensor]:
    """Return one buffer for each dtype, so that a stage sends few messages."""
    members: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors.values():
        members[tensor.dtype].append(tensor.detach().reshape(-1).to(device))
    return {dtype: torch.cat(parts) for dtype, parts in members.items()}


def _received(links: PipelineLinks, described: _Described, stage: int) -> dict[str, torch.Tensor]:
    """Return the tensors that a stage sends, on the CPU."""
    counts: dict[torch.dtype, int] = defaultdict(int)
    for shape, dtype in described.values():
        counts[dtype] += torch.Size(shape).numel()
    buffers: dict[torch.dtype, Any] = {}
    for dtype, count in counts.items():
        buffer = torch.empty(count, dtype=dtype, device=links.device)
        if count:
            links.receive(buffer, stage)
        buffers[dtype] = buffer.cpu()
    tensors, taken = {}, defaultdict(int)
    for name, (shape, dtype) in described.items():
        size = torch.Size(shape).numel()
        tensors[name] = buffers[dtype][taken[dtype] : taken[dtype] + size].view(shape).clone()
        taken[dtype] += size
    return tensors
