"""Adapters of two PEFT types on the same layers: each is what it would be in a model of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig

from peft_mux import MultiTaskPeftModel
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.kind import kind_of
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters import passes

ORDERS = (("lora", "ia3", "lora2"), ("ia3", "lora", "lora2"), ("lora", "lora2", "ia3"))
CONFIGS: dict[str, PeftConfig] = {
    "lora": LoraConfig(r=3, target_modules="all-linear"),
    "lora2": LoraConfig(r=5, target_modules=["v_proj", "down_proj"]),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}
SEEDS = {"lora": 3, "lora2": 4, "ia3": 5}


def mixed(order: tuple[str, ...], *, at_once: bool = True) -> MultiTaskPeftModel:
    configs = {name: copy.deepcopy(CONFIGS[name]) for name in order}
    calls = [configs] if at_once else [{name: config} for name, config in configs.items()]
    model = MultiTaskPeftModel(tiny_llama(), calls[0], seeds=SEEDS, verify=False)
    for later in calls[1:]:
        model.register_tasks(later, seeds=SEEDS)
    return model


@pytest.mark.parametrize(("order", "at_once"), [(ORDERS[0], True), (ORDERS[1], False), (ORDERS[2], False)])
def test_each_task_has_the_parameters_losses_and_gradients_of_plain_peft_alone(
    order: tuple[str, ...], at_once: bool
) -> None:
    model = mixed(order, at_once=at_once)
    batch, rows = passes.packed(*order)
    judges = passes.judges_of(model, {name: CONFIGS[name] for name in order}, SEEDS)
    passes.assert_as_plain(model, batch, judges, rows)


@pytest.mark.parametrize(("order", "gone"), [(ORDERS[0], "ia3"), (ORDERS[1], "lora"), (ORDERS[2], "lora")])
def test_a_type_leaves_and_comes_back_without_effect_on_the_other(order: tuple[str, ...], gone: str) -> None:
    model = mixed(order)
    names = [name for name in order if name.startswith(gone)]
    model.remove_tasks(names)
    assert not any(f"{gone}_" in name for name, _ in model.named_parameters())
    model.register_tasks({name: copy.deepcopy(CONFIGS[name]) for name in names}, seeds=SEEDS)
    judges = passes.judges_of(model, {name: CONFIGS[name] for name in model.tasks}, SEEDS)
    batch, rows = passes.packed(*model.tasks)
    passes.assert_as_plain(model, batch, judges, rows)


@pytest.mark.parametrize(("held", "failing"), [("lora", "lora2"), ("lora", "ia3"), ("ia3", "lora"), ("ia3", "ia3")])
def test_an_injection_that_fails_half_way_leaves_nothing_in_the_task_that_comes_next(
    held: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MultiTaskPeftModel(tiny_llama(), {"held": copy.deepcopy(CONFIGS[held])}, seeds={"held": 3})
    before = {name.replace(".base_layer", "") for name, _ in model.named_parameters()}
    layer_type = kind_of(CONFIGS[failing]).layer_type
    original, calls = layer_type.update_layer, iter(range(100))

    def failing_at_the_third(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise ValueError("a layer that does not fit")
        return original(layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(layer_type, "update_layer", failing_at_the_third)
        with pytest.raises(ConfigError, match="a layer that does not fit"):
            model.register_tasks({"next": copy.deepcopy(CONFIGS[failing])})
    assert {name.replace(".base_layer", "") for name, _ in model.named_parameters()} == before
    # Of the same type, on fewer layers: those that had been adapted before the fault are no part of it.
    config: Any = copy.deepcopy(CONFIGS[failing])
    config.target_modules = ["o_proj"]
    if failing == "ia3":
        config.feedforward_modules = []
    model.register_tasks({"next": config}, seeds={"next": 5})
    batch, rows = passes.packed("held", "next")
    judges = passes.judges_of(model, {"held": CONFIGS[held], "next": config}, {"held": 3, "next": 5})
    passes.assert_as_plain(model, batch, judges, rows)


def test_a_model_of_two_types_is_cast_whole() -> None:
    model = passes.moved(mixed(ORDERS[0]))
    batch, _ = passes.packed(*model.tasks)
    with torch.no_grad():
        before, after = model(batch).losses, model.double()(batch).losses
    assert torch.allclose(before.double(), after.double(), rtol=1e-4)
