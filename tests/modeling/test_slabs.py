"""Flat buffers under PEFT's parameters, and layers that read the same activations computed together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.adapters.lora import layer as layers
from peft_mux.modeling.adapters.lora.kind import lora_slot
from peft_mux.modeling.slabs import TaskSlab
from tests.invariants.mux_lab import rows, tiny_llama

Q, K, V = (f"self_attn.{letter}_proj" for letter in "qkv")


def factors(seed: int = 0) -> dict[str, nn.Parameter]:
    """Return adapters of q, k and v under PEFT's names, in PEFT's order, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {}
    for layer, width in ((Q, 6), (K, 4), (V, 4)):
        sizes[f"{layer}.lora_A.weight"] = (3, 8)
        sizes[f"{layer}.lora_B.weight"] = (width, 3)
    sizes["score.bias"] = (5,)
    return {name: nn.Parameter(torch.randn(size, generator=generator)) for name, size in sizes.items()}


def test_parameters_keep_their_values_and_become_views() -> None:
    before = {name: parameter.detach().clone() for name, parameter in factors().items()}
    parameters = factors()
    slab = TaskSlab(parameters, layout=lora_slot)
    storages = {page.values.untyped_storage().data_ptr() for page in slab.pages}
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])
        assert parameter.untyped_storage().data_ptr() in storages, name
    with torch.no_grad():  # none overlaps another, and what is left over is zero
        for parameter in parameters.values():
            parameter.fill_(1.0)
    values = torch.cat([page.values for page in slab.pages])
    assert values.sum() == sum(parameter.numel() for parameter in parameters.values())
    assert ((values == 0) | (values == 1)).all()


def test_a_of_layers_with_one_input_lie_side_by_side_in_groups_of_eight_rows_and_b_lies_transposed() -> None:
    parameters = factors()
    TaskSlab(parameters, layout=lora_slot)
    a = [parameters[f"{layer}.lora_A.weight"] for layer in (Q, K, V)]
    assert [part.data_ptr() for part in a[1:]] == [part.data_ptr() + 8 * part.shape[1] * 4 for part in a[:-1]]
    assert all(parameters[f"{layer}.lora_B.weight"].t().is_contiguous() for layer in (Q, K, V))


def test_what_weight_decay_leaves_alone_has_a_page_of_its_own() -> None:
    slab = TaskSlab(factors(), layout=lora_slot)
    assert {page.kind: page.values.numel() for page in slab.pages} == {"decays": 3 * 64 + 24 + 16 + 16, "stays": 8}


def test_parameters_of_two_dtypes_get_two_pages() -> None:
    parameters = factors()
    parameters["score.weight"] = nn.Parameter(torch.randn(5, 8, dtype=torch.bfloat16))
    slab = TaskSlab(parameters, layout=lora_slot)
    assert sorted(str(page.values.dtype) for page in slab.pages) == ["torch.bfloat16", "torch.float32", "torch.float32"]


def test_a_step_on_the_pages_is_a_step_on_the_parameters() -> None:
    parameters, alone = factors(), factors()
    slab = TaskSlab(parameters, layout=lora_slot)
    slab.bind_gradients()
    ours = torch.optim.AdamW([page.values for page in slab.pages], lr=0.1, weight_decay=0.3)
    theirs = torch.optim.AdamW(alone.values(), lr=0.1, weight_decay=0.3)
    for step in range(4):
        for number, name in enumerate(parameters):
            gradient = torch.randn(alone[name].shape, generator=torch.Generator().manual_seed(10 * step + number))
            parameters[name].grad.copy_(gradient)  # type: ignore[union-attr]
            alone[name].grad = gradient
        ours.step()
        theirs.step()
    for name, parameter in parameters.items():
        assert torch.allclose(parameter, alone[name], rtol=1e-6, atol=1e-7), name


def test_gradients_are_bound_once_and_keep_what_was_added() -> None:
    parameters = factors()
    slab = TaskSlab(parameters, layout=lora_slot)
    slab.bind_gradients()
    parameters["score.bias"].grad.fill_(2.0)  # type: ignore[union-attr]
    slab.bind_gradients()
    assert torch.equal(next(page for page in slab.pages if page.kind == "stays").values.grad[:5], torch.full((5,), 2.0))


def test_a_gradient_that_was_set_to_none_comes_back_as_zero_and_as_a_view() -> None:
    parameters = factors()
    slab = TaskSlab(parameters, layout=lora_slot)
    slab.bind_gradients()
    for parameter in parameters.values():
        parameter.grad.fill_(7.0)  # type: ignore[union-attr]
    parameters["score.bias"].grad = None
    slab.bind_gradients()
    assert torch.equal(parameters["score.bias"].grad, torch.zeros(5))
    assert (parameters[f"{Q}.lora_A.weight"].grad == 7.0).all(), "only what was dropped begins anew"
    slab.drop_gradients()
    assert all(parameter.grad is None for parameter in parameters.values())


# ------------------------------------------------------------- in a model


def two_tasks(**second: Any) -> MultiTaskPeftModel:
    configs = {
        "a": LoraConfig(r=3, target_modules="all-linear"),
        "b": LoraConfig(**{"r": 5, "target_modules": ["q_proj", "v_proj", "up_proj"], **second}),
    }
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False).train()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name in "ab":
            for parameter in model.task_parameters(name).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch() -> MuxBatch:
    features = [{"task": name, **row} for name, seed in (("a", 1), ("b", 2)) for row in rows(seed, 3, 5, 9)]
    return ChunkPackingCollator()(features)


def gradients(model: MultiTaskPeftModel) -> Mapping[str, torch.Tensor]:
    model(batch()).losses.sum().backward()
    return {
        f"{task}/{name}": parameter.grad.clone()
        for task in "ab"
        for name, parameter in model.task_parameters(task).items()
        if parameter.grad is not None
    }


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
    two_tasks()(batch())
    assert calls == [3, 1, 2, 1] * 2, "q+k+v, o, gate+up, down in each of two layers"


def test_a_model_that_gives_siblings_different_activations_gets_them_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = two_tasks()
    attention = model.backbone.model.layers[0].self_attn
    query, key = attention.q_proj.forward, attention.k_proj.forward
    shared = query.group
    monkeypatch.setattr(attention.k_proj, "forward", lambda x: key(x.clone()))
    found = model(batch()).losses
    assert len(shared.members) == 3
    assert shared.are_apart
    assert key.group.members == [key]
    assert torch.allclose(found, apart(two_tasks())(batch()).losses, rtol=1e-6)


def test_gradients_of_two_passes_add_up_and_those_of_a_missing_task_stay_away() -> None:
    model = two_tasks()
    once = gradients(model)
    twice = gradients(model)
    for name, gradient in once.items():
        assert torch.allclose(twice[name], 2 * gradient, rtol=1e-5, atol=1e-7), name
    fresh = two_tasks()
    features = [{"task": "a", **row} for row in rows(1, 2, 5, 9)]
    fresh(ChunkPackingCollator()(features)).losses.sum().backward()
    assert all(parameter.grad is None for parameter in fresh.task_parameters("b").values())


def test_a_pass_without_gradients_makes_none() -> None:
    model = two_tasks()
    with torch.no_grad():
        model(batch())
    assert all(parameter.grad is None for name in "ab" for parameter in model.task_parameters(name).values())


def test_a_cast_model_has_its_adapters_in_slabs_again() -> None:
    model = two_tasks().to(torch.float64)
    for name in "ab":
        (page,) = model.registry.slab_of(name).pages
        assert page.values.dtype == torch.float64
        start, end = page.values.data_ptr(), page.values.data_ptr() + page.values.numel() * 8
        assert all(start <= p.data_ptr() < end for p in model.task_parameters(name).values())
    assert model(batch()).losses.isfinite().all()
