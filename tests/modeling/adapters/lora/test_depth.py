"""Gradients go down as far as a task's lowest adapter, and what a task trains to does not change by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig

from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stream import Stream
from tests.invariants.mux_lab import tiny_llama
from tests.kernels.lora.watching import rows_left_out
from tests.modeling.adapters.passes import gradients_of, moved, packed

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, Any] = {
    "whole": LoraConfig(r=2, target_modules=LINEAR),
    "top": LoraConfig(r=3, target_modules=LINEAR, layers_to_transform=[1]),
    "low": LoraConfig(r=2, target_modules=["v_proj"], layers_to_transform=[0]),
    "last": LoraConfig(r=2, target_modules=["down_proj"], layers_to_transform=[1]),
}


def model_of(*names: str, **others: Any) -> MultiTaskPeftModel:
    """Return a model of some tasks, whose factors B are not zero."""
    configs = {name: CONFIGS[name] for name in names} | others
    return moved(MultiTaskPeftModel(tiny_llama(), configs, verify=False)).train()


def gradients(model: MultiTaskPeftModel) -> dict[str, torch.Tensor]:
    """Return the gradients of all tasks after one pass."""
    model(packed(*model.tasks)[0]).losses.sum().backward()
    return gradients_of(model)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("names", [("whole", "top", "low", "last"), ("last", "whole", "top"), ("top", "last")])
def test_tasks_of_different_depth_have_the_gradients_of_a_full_backward(
    names: tuple[str, ...], checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = rows_left_out(monkeypatch)
    models = [model_of(*names), model_of(*names)]
    if checkpointing:
        for model in models:
            model.gradient_checkpointing_enable()
    found = gradients(models[0])
    assert any(left_out), "some product was made for some rows alone"
    monkeypatch.setattr(Stream, "reset_adapter_tracking", lambda stream: None)
    left_out.clear()
    wanted = gradients(models[1])
    assert not any(left_out)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)


def test_a_task_whose_adapter_lies_elsewhere_too_goes_all_the_way_down(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    words = LoraConfig(r=2, target_modules=["embed_tokens", "down_proj"])
    model = model_of("top", scales=scales, words=words)
    seen: list[frozenset[str]] = []
    begin = Stream.reset_adapter_tracking

    def noted(stream: Stream) -> None:
        begin(stream)
        seen.append(stream.adapters_not_reached)

    monkeypatch.setattr(Stream, "reset_adapter_tracking", noted)
    model(packed("top", "scales", "words")[0])
    assert seen == [frozenset({model.adapter_of("top")})]
    assert model.stream.adapters_not_reached == frozenset(), "the stream is idle"


def test_a_pass_without_adapters_keeps_the_gradients_of_its_input() -> None:
    model = model_of("top", "last")
    kept: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    handle = model.backbone.get_input_embeddings().register_forward_hook(keep)
    with model.without_adapters():
        model(packed("top", "last")[0]).losses.sum().backward()
    handle.remove()
    assert kept[0].grad is not None
    assert (kept[0].grad[0].abs().sum(dim=1) > 0).sum() >= len(kept[0][0]) - 6, "all rows but last tokens"
