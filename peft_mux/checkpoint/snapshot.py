"""All tensors of a task that a checkpoint holds, by the names of its parameters: out of a run, and back into one.

Nothing in a `TaskState` depends on how the task lies in memory: pages, stages, shards. So what one layout of processes
has written, any other goes on from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from peft_mux.checkpoint.full_state import take_part
from peft_mux.checkpoint.task_state import TaskState, join_state, split_state
from peft_mux.tasks.task_run import TaskRun

LAST_GOOD = "last_good"
"""Copy of the weights when loss and gradients were last seen to be finite."""
BEST = "best"
"""Copy of the weights of the best evaluation; empty without one."""


def take_snapshot(run: TaskRun, model: Any) -> TaskState:
    """Return what this process has of a task, copied.

    Args:
        run: the task that is copied.
        model: the model with the adapter of the task, or a part of it.
    """
    parameters = model.task_parameters(run.name)
    state = split_state(parameters, run.optimizer)
    if run.last_good is None:
        return state
    last_good = {
        name: part.detach().clone().contiguous()
        for page, copy in zip(model.registry.slab_of(run.name).pages, run.last_good.state().values(), strict=True)
        for name, parameter in parameters.items()
        if (part := page.part(parameter, copy)) is not None
    }
    return replace(state, copies={LAST_GOOD: last_good, BEST: dict(run.best_weights)})


@torch.no_grad()
def put_snapshot(run: TaskRun, model: Any, state: TaskState, *, from_step: int | None = None) -> None:
    """Put a task back to a state of all of it; this process takes what lies here.

    Args:
        run: the task, with its optimizer built, or ended.
        model: the model with the adapter of the task, or a part of it.
        state: the state of the whole task.
        from_step: step from which on the present settings of the optimizer and the schedule hold, not those of the
            state; `None` where they are the same.

    Raises:
        CheckpointError: if it is not of this task's parameters.
    """
    parameters = model.task_parameters(run.name)
    # By this process's own pieces, so the layout that wrote the state does not matter.
    own = take_part(state, model.registry.pieces_of(run.name))
    join_state(own, parameters, run.optimizer, from_step)
    if run.last_good is None:
        return
    # An ended task has none but the weights that it ended with.
    last_good = own.copies.get(LAST_GOOD) or own.weights
    for page, copy in zip(model.registry.slab_of(run.name).pages, run.last_good.state().values(), strict=True):
        for name, parameter in parameters.items():
            part = page.part(parameter, copy)
            if part is not None and name in last_good:
                # Into the present copy, which the optimizer's joint update refers to by address.
                part.copy_(last_good[name])
    run.best_weights = {name: tensor.contiguous() for name, tensor in own.copies.get(BEST, {}).items()}
