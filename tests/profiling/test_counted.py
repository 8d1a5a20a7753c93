"""What a description was counted to keep stands for all models like it, and for no other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from peft_mux.modeling.backbone.liger import has_liger
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.planning.profiling import activation_bytes
from peft_mux.planning.profiling.activation_bytes import count_activation_bytes_per_token
from peft_mux.scheduler.costs.loads import ModelShape
from peft_mux.scheduler.costs.memory import MemoryModel
from tests.invariants.mux_lab import tiny_llama

LENGTHS = (9, 5)


def lora(**changed: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **changed})


def a_model(backbone: LlamaForCausalLM | None = None, **changed: LoraConfig) -> MultiTaskPeftModel:
    return MultiTaskPeftModel(backbone or tiny_llama(), {"a": lora(), "b": lora(r=2), **changed}, verify=False)


def of_other_width() -> LlamaForCausalLM:
    config = copy.deepcopy(tiny_llama().config)
    config.intermediate_size = 128
    return LlamaForCausalLM(config)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return a list that grows by one with each count, none of which is known before or after."""
    made: list[Any] = []
    count = activation_bytes._kept_per_token
    monkeypatch.setattr(activation_bytes, "_kept_per_token", lambda *given: made.append(given) or count(*given))
    activation_bytes._COUNTED.clear()
    yield made
    activation_bytes._COUNTED.clear()


OTHERS: dict[str, Callable[[], tuple[MultiTaskPeftModel, dict[str, Any]]]] = {
    "rank": lambda: (a_model(b=lora(r=16)), {}),
    "target modules": lambda: (a_model(b=lora(r=2, target_modules=["q_proj", "down_proj"])), {}),
    "dropout": lambda: (a_model(b=lora(r=2, lora_dropout=0.5)), {}),
    "one task more": lambda: (a_model(c=lora()), {}),
    "width of the backbone": lambda: (a_model(of_other_width()), {}),
    "lengths": lambda: (a_model(), {"lengths": (9, 6)}),
    "dtype": lambda: (a_model(), {"dtype": torch.bfloat16}),
    "autocast": lambda: (a_model(), {"autocast": torch.bfloat16}),
    "recomputed inputs": lambda: (a_model(), {"selective": True}),
    "device": lambda: (a_model(), {"autocast": torch.bfloat16, "device_type": "cuda"}),
}
if has_liger():
    OTHERS["Liger"] = lambda: (a_model(), {"autocast": torch.bfloat16, "device_type": "cuda", "liger": {}})


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_equal_models_are_counted_once_and_another_model_or_pass_again(other: str, counts: list[Any]) -> None:
    first, second = (count_activation_bytes_per_token(a_model(), LENGTHS) for _ in range(2))
    assert (first, len(counts)) == (second, 1)
    model, how = OTHERS[other]()
    how = {"lengths": LENGTHS, **how}
    found = count_activation_bytes_per_token(model, **how)
    assert len(counts) == 2
    activation_bytes._COUNTED.clear()
    assert found == count_activation_bytes_per_token(model, **how)


def test_a_model_whose_configuration_cannot_be_compared_is_counted_each_time(counts: list[Any]) -> None:
    model = a_model()
    model.backbone.config.something_of_the_owners = object()
    assert activation_bytes.description_of(model) is None
    first, second = (count_activation_bytes_per_token(model, LENGTHS) for _ in range(2))
    assert first == second
    assert len(counts) == 2


@pytest.mark.skipif(not has_liger(), reason="needs Liger")
def test_passes_of_an_8b_llama_are_a_third_larger_with_ligers_kernels() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        backbone = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, vocab_size=512, **sizes)).bfloat16()
    model = MultiTaskPeftModel(backbone, {"a": lora(r=16, target_modules="all-linear")}, verify=False)

    def layer_bytes(liger: dict[str, bool] | None, *, selective: bool = False) -> float:
        how = {"autocast": torch.bfloat16, "device_type": "cuda", "liger": liger, "selective": selective}
        return count_activation_bytes_per_token(model, [46] * 16, **how) / 32

    plain, fused = layer_bytes(None), layer_bytes({})
    assert (plain, fused) == (pytest.approx(185e3, rel=0.01), pytest.approx(140e3, rel=0.01))
    recomputed = layer_bytes({}, selective=True)
    # Two normed states and the product of the MLP, except what the first norm reads, which is kept in their place.
    assert fused - recomputed == pytest.approx(2 * (2 * 4096 + 14336) - 2 * 4096 / 32)
    # Inputs of both norms, queries, keys and values, output of attention, gate and up, and little else.
    assert recomputed == pytest.approx(2 * (3 * 4096 + 4096 + 2 * 1024 + 2 * 14336), rel=0.01)
    assert layer_bytes({"rms_norm": False, "swiglu": False, "rope": False}) == plain == layer_bytes(None)
    shape = ModelShape(32, 4096, 14336, 4096, 1024, 128256, 16_060_522_240, 2)
    limit_bytes = int(0.95 * 85e9)
    fitting = [
        MemoryModel(shape, activation_bytes_per_token=32 * each).max_tokens((), limit_bytes)
        for each in (plain, fused, recomputed)
    ]
    assert fitting == [pytest.approx(tokens, rel=0.05) for tokens in (10_200, 13_400, 19_500)]
