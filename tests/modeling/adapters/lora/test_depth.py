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
    "scales": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "words": LoraConfig(r=2, target_modules=["embed_tokens", "down_proj"]),
}


@pytest.mark.parametrize(
    ("names", "checkpointing"),
    [
        (("whole", "top", "low", "last"), True),
        (("last", "whole", "top"), False),
        (("top", "last"), False),
        # Tasks with adapters of another type or in the embedding, too, go all the way down.
        (("top", "scales", "words"), True),
    ],
)
def test_tasks_of_different_depth_have_the_gradients_of_a_full_backward(
    names: tuple[str, ...], checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out, found = rows_left_out(monkeypatch), []
    for stops in (True, False):
        model = moved(MultiTaskPeftModel(tiny_llama(), {name: CONFIGS[name] for name in names}, verify=False)).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        if not stops:
            monkeypatch.setattr(Stream, "reset_adapter_tracking", lambda stream: None)
        model(packed(*names)[0]).losses.sum().backward()
        found.append(gradients_of(model))
        assert any(left_out) is stops, "some product is made for some rows alone where gradients stop"
        left_out.clear()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)
