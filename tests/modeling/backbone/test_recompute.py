"""Inputs of linear layers that are recomputed: fewer bytes are kept, and no bit of a gradient changes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux.modeling.backbone.recompute import recomputing
from tests.invariants.mux_lab import make_trainer, small_task, tiny_llama
from tests.modeling import backbones
from tests.modeling.test_architectures import LENGTHS, packed, rows


def gradients_and_bytes(model: Any, *, bf16: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of both tasks after one pass, and the bytes that it has kept for its backward."""
    kept: dict[int, torch.UntypedStorage] = {}
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(packed(rows())).losses.sum()
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    kept.clear()
    loss.backward()
    found = {
        f"{name} {key}": parameter.grad.clone()
        for name in model.tasks
        for key, parameter in model.task_parameters(name).items()
    }
    model.zero_grad()
    return found, num_bytes


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Gemma2", "GPT2", "DeepseekV3"])
def test_recomputed_inputs_change_no_gradient_and_are_not_kept(architecture: str, bf16: bool) -> None:
    make, _ = backbones.LANGUAGE_MODELS[architecture]
    model = backbones.multiplexed(backbones.filled(make), "all-linear")
    expected, most_bytes = gradients_and_bytes(model, bf16=bf16)
    with recomputing(model.backbone, wanted=True):
        found, num_bytes = gradients_and_bytes(model, bf16=bf16)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert num_bytes < most_bytes
    if (architecture, bf16) == ("Llama", False):
        config, num_tokens = model.backbone.config, sum(map(sum, LENGTHS.values()))
        # Two normed states and the product of each layer; what the first norm reads is kept by nothing else.
        width = 2 * (2 * config.hidden_size + config.intermediate_size) - config.hidden_size
        assert most_bytes - num_bytes == 4 * num_tokens * width


def test_runs_on_one_backbone_recompute_inputs_only_if_they_are_asked_to_and_have_the_same_bits(tmp_path: Path) -> None:
    backbones_of_runs = [tiny_llama()]

    def trained(name: str, **arguments: bool) -> dict[str, torch.Tensor]:
        tasks = [small_task("a", data_seed=1, max_steps=2, target_modules="all-linear")]
        trainer = make_trainer(tasks, tmp_path / name, model=backbones_of_runs[-1], **arguments)
        trainer.train()
        changed = [part for part in trainer.model.backbone.modules() if isinstance(vars(part).get("forward"), partial)]
        assert bool(changed) is bool(arguments)
        weights = {key: weight.detach().clone() for key, weight in trainer.model.task_parameters("a").items()}
        backbones_of_runs.append(trainer.model.unload())
        return weights

    kept, recomputed, kept_again = trained("a"), trained("b", selective_recompute=True), trained("c")
    assert all(map(torch.equal, kept.values(), recomputed.values()))
    assert all(map(torch.equal, kept.values(), kept_again.values()))
