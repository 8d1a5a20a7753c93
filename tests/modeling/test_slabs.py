"""Flat buffers under PEFT's parameters, and layers that read the same activations computed together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig

from peft_mux import MultiTaskPeftModel
from peft_mux.modeling.adapters.lora import layer as layers
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.passes import gradients_of, moved, packed

# ------------------------------------------------------------- in a model


def two_tasks(**second: Any) -> MultiTaskPeftModel:
    configs = {
        "a": LoraConfig(r=3, target_modules="all-linear"),
        "b": LoraConfig(**{"r": 5, "target_modules": ["q_proj", "v_proj", "up_proj"], **second}),
    }
    return moved(MultiTaskPeftModel(tiny_llama(), configs, verify=False)).train()


def gradients(model: MultiTaskPeftModel) -> Mapping[str, torch.Tensor]:
    model(packed("a", "b")[0]).losses.sum().backward()
    return gradients_of(model)


def apart(model: MultiTaskPeftModel) -> MultiTaskPeftModel:
    """Let every layer be computed by itself."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, layers.MultiplexedLinear):
            forward.group = layers.LinearGroup([forward], forward.stream)
    return model


@pytest.mark.parametrize("second", [{}, {"lora_dropout": 0.3}, {"target_modules": ["k_proj"]}])
def test_layers_computed_together_give_the_gradients_of_layers_computed_apart(second: dict[str, Any]) -> None:
    together, separate = gradients(two_tasks(**second)), gradients(apart(two_tasks(**second)))
    assert together.keys() == separate.keys()
    for name, gradient in together.items():
        assert (gradient - separate[name]).norm() <= 1e-5 * separate[name].norm(), name


def test_q_k_and_v_are_one_call_and_gate_and_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = layers.grouped_lora_slices

    def count(x: torch.Tensor, slices: Any, *others: Any) -> Any:
        calls.append(len(slices))
        return original(x, slices, *others)

    monkeypatch.setattr(layers, "grouped_lora_slices", count)
    two_tasks()(packed("a", "b")[0])
    assert calls == [3, 1, 2, 1] * 2, "q+k+v, o, gate+up, down in each of two layers"


def test_a_model_that_gives_siblings_different_activations_gets_them_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = two_tasks()
    attention = model.backbone.model.layers[0].self_attn
    query, key = attention.q_proj.forward, attention.k_proj.forward
    shared = query.group
    monkeypatch.setattr(attention.k_proj, "forward", lambda x: key(x.clone()))
    found = model(packed("a", "b")[0]).losses
    assert len(shared.members) == 3
    assert shared.are_apart
    assert key.group.members == [key]
    assert torch.allclose(found, apart(two_tasks())(packed("a", "b")[0]).losses, rtol=1e-6)


def test_a_cast_model_has_its_adapters_in_slabs_again() -> None:
    model = two_tasks().to(torch.float64)
    for name in "ab":
        (page,) = model.registry.slab_of(name).pages
        assert page.values.dtype == torch.float64
        start, end = page.values.data_ptr(), page.values.data_ptr() + page.values.numel() * 8
        assert all(start <= p.data_ptr() < end for p in model.task_parameters(name).values())
    assert model(packed("a", "b")[0]).losses.isfinite().all()
