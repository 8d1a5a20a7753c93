"""One pass of several tasks compared with plain PEFT: `get_peft_model` on a copy of the backbone, one task alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from peft import PeftConfig, get_peft_model
from torch.nn import functional as F

from peft_mux import ChunkPackingCollator, ConfigError, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch
from tests.invariants import mux_lab as lab

Weights = dict[str, torch.nn.Parameter]
Judges = dict[str, tuple[Any, Weights]]
"""Plain PEFT's model of each task, and its parameters without the adapter's id."""
IDS = torch.tensor([lab.rows(5, 1, 9, 9)[0]["input_ids"]])


def plain(config: PeftConfig, seed: int, base: Callable[[], Any] | None = None) -> tuple[Any, Weights]:
    """Return plain PEFT's model of one task, and its trained parameters without the adapter's id."""
    backbone = (base or lab.tiny_llama)()
    torch.manual_seed(seed)
    model = get_peft_model(backbone, copy.deepcopy(config))
    return model, {name.replace(".default", ""): item for name, item in model.named_parameters() if item.requires_grad}


def perturbed(parameters: Mapping[str, torch.Tensor], seed: int) -> None:
    """Give weights other values, the same for the same names, so that no factor is zero."""
    with torch.no_grad():
        for name in sorted(parameters):
            generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, name)))
            parameters[name].add_(0.2 * torch.randn(parameters[name].shape, generator=generator))


def moved(model: MultiTaskPeftModel) -> MultiTaskPeftModel:
    """Give the adapters of all tasks other weights, as training would; those of a task depend on its name alone."""
    for name in model.tasks:
        perturbed(model.task_parameters(name), sum(name.encode()))
    return model


def gradients_of(model: MultiTaskPeftModel) -> dict[str, torch.Tensor]:
    """Return a copy of the gradients that tasks have, by task and parameter."""
    named = {f"{name} {key}": item for name in model.tasks for key, item in model.task_parameters(name).items()}
    return {key: item.grad.clone() for key, item in named.items() if item.grad is not None}


def snapshot(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors by name."""
    return {name: item.detach().clone() for name, item in tensors.items()}


def assert_same_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], what: str = "") -> None:
    """Assert that the names and the bits of tensors are the same."""
    assert found.keys() == wanted.keys(), what
    for key, item in wanted.items():
        assert torch.equal(found[key], item), f"{what} {key}"


def assert_refused(configs: Mapping[str, Any], said: str, backbone: Any = None, **options: Any) -> None:
    """Assert that a model of tasks is refused with a sentence, by default on the tiny Llama."""
    with pytest.raises(ConfigError, match=said):
        MultiTaskPeftModel(backbone or lab.tiny_llama(), configs, verify=False, **options)


def packed(*tasks: str, seed: int = 0, task_seed: int = 1) -> tuple[MuxBatch, dict[str, list[list[int]]]]:
    """Return three rows of each task, as one micro-batch and by task."""
    rows = {task: [row["input_ids"] for row in lab.rows(seed + ord(task[0]), 3, 4, 11)] for task in tasks}
    given = [{"task": task, "input_ids": ids, "seed": task_seed} for task in tasks for ids in rows[task]]
    return ChunkPackingCollator()(given), rows


def plain_loss(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the mean loss over the targets of all rows, one row at a time."""
    losses = []
    for ids in rows:
        row = torch.tensor([list(ids)])
        losses.append(F.cross_entropy(model(input_ids=row).logits[0, :-1], row[0, 1:], reduction="sum"))
    return torch.stack(losses).sum() / sum(len(ids) - 1 for ids in rows)


def judges_of(
    model: MultiTaskPeftModel,
    configs: Mapping[str, PeftConfig],
    seeds: Mapping[str, int],
    base: Callable[[], Any] | None = None,
) -> Judges:
    """Return plain PEFT's models of all tasks; their initial weights are the same, and are perturbed on both sides."""
    judges = {name: plain(config, seeds[name], base) for name, config in configs.items()}
    for number, (name, (_, own)) in enumerate(judges.items()):
        ours = model.task_parameters(name)
        assert_same_tensors(ours, own, f"{name}: initial weights")
        perturbed(own, number)
        perturbed(ours, number)
    return judges


def judges_like(model: MultiTaskPeftModel, configs: Mapping[str, PeftConfig], base: Callable[[], Any]) -> Judges:
    """Return plain PEFT's models of all tasks, in training mode, with the weights that tasks have in a model."""
    judges = {name: plain(config, 0, base) for name, config in configs.items()}
    for name, (judge, own) in judges.items():
        judge.train()
        with torch.no_grad():
            for key, value in model.task_parameters(name).items():
                own[key].copy_(value)
    return judges


def assert_as_plain(
    model: MultiTaskPeftModel,
    batch: MuxBatch,
    judges: Judges,
    rows: Mapping[str, Sequence[Any]],
    *,
    loss_of: Callable[[Any, Sequence[Any]], torch.Tensor] = plain_loss,
    tolerance: float = 1e-4,
    may_be_zero: bool = False,
) -> None:
    """Assert that losses and all gradients of one pass are those of plain PEFT's model of each judged task alone."""
    output = model(batch)
    output.losses.sum().backward()
    for name, (judge, own) in judges.items():
        loss = output.losses[output.task_names.index(name)]
        wanted = loss_of(judge, rows[name])
        wanted.backward()
        assert math.isclose(loss.item(), wanted.item(), rel_tol=1e-5), name
        for key, item in own.items():
            assert item.grad is not None
            assert may_be_zero or item.grad.norm() > 0, f"{name} {key}: the comparison would be empty"
            found: Any = model.task_parameters(name)[key].grad
            assert lab.relative(found, item.grad) <= tolerance, f"{name} {key}"


def assert_nan_stays(model: MultiTaskPeftModel, batch: MuxBatch, spoilt: str, part: str = "") -> None:
    """Assert that NaN in parameters of one task leaves the bits of losses and gradients of all others.

    Args:
        model: holds the tasks; it is given back as it was.
        batch: rows of all tasks.
        spoilt: the task.
        part: what the names of the parameters have in common that are NaN.
    """

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for name in model.tasks:
            for item in model.task_parameters(name).values():
                item.grad = None
        losses = model(batch).losses
        losses.sum().backward()
        return losses.detach(), gradients_of(model)

    healthy, own = run(), model.task_parameters(spoilt)
    kept = snapshot(own)
    with torch.no_grad():
        for key, item in own.items():
            if part in key:
                item.fill_(math.nan)
    ill = run()
    with torch.no_grad():
        for key, item in own.items():
            item.copy_(kept[key])
    for number, name in enumerate(batch.task_names):
        assert ill[0][number].isnan() if name == spoilt else torch.equal(ill[0][number], healthy[0][number]), name
    others = [key for key in healthy[1] if not key.startswith(f"{spoilt} ")]
    assert others
    assert all(torch.equal(healthy[1][key], ill[1][key]) for key in others)
