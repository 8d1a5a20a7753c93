"""What real processes do in the tests of sums over layouts: each holds a part of a plain model, cut by hand."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import nn

from peft_mux.checkpoint.task_state import TaskState, gather_task, join_state, split_state, take_part
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.optimizer import TaskOptimizer
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.sharding import Piece
from tests.engine.pipeline import stage_cases
from tests.engine.processes.cases import connected
from tests.invariants import mux_lab as lab

NUM_LAYERS = 2
TASKS = ("all", "some", "last")
"""One with adapters everywhere, one with few, one with none on the first stage."""
POISONED = "some"
_ROW_PARALLEL = ("o_proj", "down_proj")


def configs() -> dict[str, LoraConfig]:
    """Return the adapters: unequal ranks and targets."""
    return {
        "all": LoraConfig(r=8, target_modules="all-linear"),
        "some": LoraConfig(r=3, target_modules=["q_proj", "o_proj"]),
        "last": LoraConfig(r=2, target_modules=["v_proj", "down_proj"], layers_to_transform=[1]),
    }


def whole_model() -> MultiTaskPeftModel:
    """Return the whole model; B is not zero."""
    model = MultiTaskPeftModel(lab.tiny_llama(), configs(), verify=False)
    for task in model.tasks:
        for key, parameter in model.task_parameters(task).items():
            parameter.data.copy_(numbers(task, key, parameter.shape, salt=1000))
    return model


def numbers(task: str, key: str, shape: Any, salt: int) -> torch.Tensor:
    """Return the same random numbers in every process."""
    rng = np.random.default_rng([salt, *f"{task}/{key}".encode()])
    return torch.from_numpy(rng.normal(size=tuple(shape)).astype(np.float32))


def part_of(layout: ParallelLayout, rank: int) -> MultiTaskPeftModel:
    """Return what a process holds."""
    place, model = layout.place(rank), whole_model()
    config = layout.replicas[place.replica]
    if config.pp > 1:
        model = StageModel(model, StageLayout.of(NUM_LAYERS, config.pp), place.stage).model
    if config.tp > 1:
        for task in model.tasks:
            _shard(model, task, config.tp, place.tp_rank)
    return model


def _shard(model: MultiTaskPeftModel, task: str, tp: int, shard: int) -> None:
    own = {}
    for key, parameter in model.task_parameters(task).items():
        piece = _piece(key, tuple(parameter.shape), tp, shard)
        if piece is not None:
            model.registry.pieces[task, key] = piece
            parameter = nn.Parameter(piece.take(parameter.detach()).clone())
        own[key] = nn.Parameter(parameter.detach().clone())
    model.registry.adopt(task, own, model.device)


def _piece(key: str, shape: tuple[int, ...], tp: int, shard: int) -> Piece | None:
    """Return a shard's piece of A or B, `None` where it has the whole and adds."""
    is_row = any(name in key for name in _ROW_PARALLEL)
    if ("lora_A" in key) != is_row:
        return None
    dim = 1 if is_row else 0
    size = shape[dim] // tp
    return Piece(shape, dim, ((shard * size, (shard + 1) * size),))


def whole_gradient(task: str, key: str, shape: Any, num_replicas: int, step: int) -> torch.Tensor:
    """Return the sum over all replicas."""
    return torch.stack([numbers(task, key, shape, 10 * step + replica) for replica in range(num_replicas)]).sum(0)


def fill_gradients(model: MultiTaskPeftModel, layout: ParallelLayout, rank: int, step: int) -> None:
    """Give a process the gradients of a backward pass over its replica's rows; shards with the whole parameter get a
    summand."""
    place = layout.place(rank)
    tp = layout.replicas[place.replica].tp
    for task in model.tasks:
        pieces = model.registry.pieces_of(task)
        for key, parameter in model.task_parameters(task).items():
            gradient = pieces[key].take(numbers(task, key, pieces[key].shape, 10 * step + place.replica))
            if tp > 1 and pieces[key].is_whole:
                others = sum(
                    (numbers(task, key, gradient.shape, 77 + shard) for shard in range(1, tp)), torch.zeros(())
                )
                gradient = (
                    gradient - others if place.tp_rank == 0 else numbers(task, key, gradient.shape, 77 + place.tp_rank)
                )
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)


@contextmanager
def meeting(timeout_s: float = 30.0) -> Iterator[Processes]:
    """Connect to the other processes."""
    processes = connected(timeout_s)
    with processes.together():
        yield processes


def work_of_a_step() -> tuple[StepWork, list[Any]]:
    """Return three tasks in two micro-batches."""
    passes = [SimpleNamespace(task_names=names, num_tokens=5) for names in (("all", "some"), ("some", "last"))]
    return StepWork(TASKS, tuple(passes), dict.fromkeys(TASKS, 10), sync_order=TASKS), passes


def replica_loss(replica: int, task: str) -> float:
    """Return what a replica computes as its part of a task's loss."""
    return 0.1 * (replica + 1) + len(task)


def one_step(sync: GradientSync, layout: ParallelLayout, rank: int, step: int, poison: bool = False) -> StepResult:
    """Sum what all have."""
    work, passes = work_of_a_step()
    place = layout.place(rank)
    sync.begin(work)
    fill_gradients(sync.model, layout, rank, step)
    if poison and rank == layout.world_size - 1:
        next(iter(sync.model.task_parameters(POISONED).values())).grad.fill_(float("nan"))
    for one in passes:
        sync.after_backward(one)
    is_leader = rank in layout.leaders
    losses = {task: replica_loss(place.replica, task) if is_leader else 1e6 for task in TASKS}
    return sync.finish(StepResult({task: torch.tensor(loss) for task, loss in losses.items()}, {}, 10))


def seen(sync: GradientSync, result: StepResult) -> dict[str, Any]:
    """Return what a step has shown to a process."""
    norms = result.norms or sync.gradient_norms(TASKS)
    model = sync.model
    return {
        "losses": {task: loss.item() for task, loss in result.losses.items()},
        "norms": {task: norm.item() for task, norm in norms.items()},
        "gradients": {
            task: {key: parameter.grad.numpy().copy() for key, parameter in model.task_parameters(task).items()}
            for task in TASKS
        },
        "num_bytes": sync.num_bytes,
    }


def optimizer_of(
    model: MultiTaskPeftModel, task: str, folder: Path, optim: str = "adamw_torch"
) -> TaskOptimizer | None:
    """Return a task's optimizer; none in a process where it has no weights. It warms up, clips, and decays."""
    return stage_cases.optimizer_of(model, task, folder, optim=optim, warmup_steps=4, max_grad_norm=0.5)


def state_of(model: MultiTaskPeftModel, task: str, optimizer: TaskOptimizer | None) -> TaskState:
    """Return what a process has of a task, with a copy of its weights."""
    state = split_state(model.task_parameters(task), optimizer)
    state.copies["last_good"] = {key: 2 * weight for key, weight in state.weights.items()}
    return state


def bytes_per_step(sync: GradientSync) -> int:
    """Return the bytes that a step sums here: gradients that others hold too, losses, and norms of parts."""
    if not sync.holds_parts:
        pages = [page for task in TASKS for page in sync.model.registry.slab_of(task).pages]
        return sum(page.values.nbytes for page in pages) + 4 * len(TASKS)
    return sum(bundle.num_bytes for task in TASKS for bundle in sync.cells_of(task).bundles) + 12 * len(TASKS)


# ---------------------------------------------------------------- what is run


def train_over(rank: int, text: str, folder: Path) -> bytes:
    """Take a step, gather all tasks, continue from them in other objects, and take a poisoned step at the end.

    Returns:
        What was seen, pickled: tensors would be handed on in memory that ends with this process.
    """
    layout = ParallelLayout.parse(text)
    with meeting() as processes:
        model = part_of(layout, rank)
        sync = GradientSync(model, processes, layout)
        result = one_step(sync, layout, rank, step=1)
        shown: dict[str, Any] = {"healthy": seen(sync, result)}
        shown["closed_form"] = bytes_per_step(sync)
        shown["pieces"] = {task: model.registry.pieces_of(task) for task in TASKS}
        optimizers = {task: optimizer_of(model, task, folder) for task in TASKS}
        shown["states"] = _step_and_gather(processes, layout, model, optimizers, shown["healthy"]["norms"])
        shown["resumed"] = _resumed(processes, layout, shown["states"], folder)
        sync = GradientSync(model, processes, layout)
        shown["poisoned"] = seen(sync, one_step(sync, layout, rank, step=1, poison=True))
        processes.wait_for_all()
    return pickle.dumps(shown)


def _step_and_gather(
    processes: Processes,
    layout: ParallelLayout,
    model: MultiTaskPeftModel,
    optimizers: dict[str, TaskOptimizer | None],
    norms: dict[str, float],
) -> dict[str, TaskState] | None:
    states = {}
    for task, optimizer in optimizers.items():
        if optimizer is not None:
            optimizer.step(torch.tensor(norms[task]))
        own = state_of(model, task, optimizer)
        states[task] = gather_task(processes, layout, model.registry.pieces_of(task), own)
    assert all((state is not None) == processes.is_main for state in states.values())
    return {task: state for task, state in states.items() if state is not None} or None


def _resumed(
    processes: Processes, layout: ParallelLayout, states: dict[str, TaskState] | None, folder: Path
) -> dict[str, TaskState] | None:
    """Return the states gathered again after all processes have taken their parts of them."""
    whole = processes.gather(states)[0]
    model = part_of(layout, processes.rank)
    again = {}
    for task in TASKS:
        optimizer, pieces = optimizer_of(model, task, folder), model.registry.pieces_of(task)
        part = take_part(whole[task], pieces)
        join_state(part, model.task_parameters(task), optimizer)
        own = split_state(model.task_parameters(task), optimizer)
        own.copies["last_good"] = {key: tensor.contiguous() for key, tensor in part.copies["last_good"].items()}
        again[task] = gather_task(processes, layout, pieces, own)
    return {task: state for task, state in again.items() if state is not None} or None


def falls_over(rank: int, text: str, how: str, timeout_s: float) -> str:
    """Take a step, and another one in which the last process dies or hangs before its sums; return the error."""
    layout = ParallelLayout.parse(text)
    with meeting(timeout_s) as processes:
        sync = GradientSync(part_of(layout, rank), processes, layout)
        one_step(sync, layout, rank, step=1)
        if rank == layout.world_size - 1:
            if how == "dies":
                os._exit(7)
            time.sleep(4 * timeout_s)
        one_step(sync, layout, rank, step=2)
    return "no error"


def unequal(rank: int) -> str:
    """Register a task in one replica with another rank than in the other."""
    layout = ParallelLayout.parse("<1,2>")
    with meeting() as processes:
        model = MultiTaskPeftModel(lab.tiny_llama(), {"a": LoraConfig(r=4, target_modules="all-linear")}, verify=False)
        if rank == 1:  # a parameter is cut, and no process has the rest of it
            key = next(iter(model.task_parameters("a")))
            whole = model.task_parameters("a")[key]
            model.registry.pieces["a", key] = Piece((len(whole) + 2, whole.shape[1]), 0, ((0, len(whole)),))
        sync = GradientSync(model, processes, layout)
        sync.exchange_holdings(["a"])
    return "no error"
