"""Penalties on the adapters themselves: added to a task's loss once a step, however its global batch was split.

A penalty belongs to the step and to no token. So the pass that holds the first token of a task's global batch carries
all of it: there is exactly one such pass over all micro-batches and all processes, and what it adds does not depend on
how many there are (promise 1 of the design).

Shape letters: N tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.registry import TaskRegistry


def with_penalties(
    losses_N: torch.Tensor, batch: MuxBatch, registry: TaskRegistry, configs: Mapping[str, Any]
) -> torch.Tensor:
    """Return the losses `[N]` of a micro-batch with the penalties of its tasks' adapters.

    Args:
        losses_N: each task's part of its mean loss.
        batch: the micro-batch, its tensors on the device of the losses.
        registry: the tasks of the model.
        configs: adapter configurations by internal id.
    """
    if not registry.penalised:
        return losses_N
    losses = None
    for index, name in enumerate(batch.task_names):
        if (kind := registry.penalised.get(name)) is None:
            continue
        share = _share_of_step(batch, index)
        if share.is_cpu and not share:  # on other devices asking would be waiting
            continue
        losses = losses or list(losses_N.unbind())
        penalty = kind.penalty(configs[registry.adapter_of(name)], registry.parameters_of(name))
        losses[index] = losses[index] + penalty * share
    return losses_N if losses is None else torch.stack(losses)


def _share_of_step(batch: MuxBatch, index: int) -> torch.Tensor:
    """Return 1 in the pass that holds the first token of a task's global batch, 0 in all others."""
    places = batch.token_places[batch.task_offsets[index] : batch.task_offsets[index + 1]]
    return (places == 0).sum()
