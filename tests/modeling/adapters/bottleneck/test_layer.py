"""A model of bottlenecks, and of LoRA beside them, through the kernels in Triton's interpreter and on slices.

The interpreter is chosen when Triton is first imported, so what needs it runs in a child process: this file as a
script. It prints JSON; the tests below read what they need of it.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from peft import LoraConfig
from peft_mux.kernels.bottleneck.group import BottleneckGroup
from torch import nn

from peft_mux import BottleneckConfig, MultiTaskPeftModel
from peft_mux.modeling.adapters.bottleneck import kind as bottleneck_layer
from tests.children import run_script
from tests.invariants.mux_lab import tiny_llama
from tests.kernels.interpreter import keep_patches
from tests.modeling.adapters.lora.test_lora_pass import batch, differing, one_pass, through_kernels, worst


def model(wide: int = 20) -> MultiTaskPeftModel:
    configs = {
        "a": BottleneckConfig(bottleneck_size=3, non_linearity="relu", init_weights=False),
        "b": LoraConfig(r=4, target_modules=["o_proj", "q_proj"], init_lora_weights=False),
        "c": BottleneckConfig(
            bottleneck_size=wide, adapter_dropout=0.3, up_bias=False, target_modules=["o_proj"], init_weights=False
        ),
    }
    return MultiTaskPeftModel(tiny_llama(), configs, verify=False).train()  # type: ignore[arg-type]


def main() -> None:
    keep_patches()
    made: list[Any] = []

    def making(*args: Any) -> BottleneckGroup:
        made.append(BottleneckGroup(*args))
        return made[-1]

    bottleneck_layer.BottleneckGroup = making  # type: ignore[misc]
    through_kernels(False)
    on_slices = one_pass(model(), batch())
    num_without = len(made)
    through_kernels()
    together = one_pass(model(), batch())
    num_tables = sum(not group.is_empty for group in made) - num_without
    alone = one_pass(model(), batch("a"))
    mine = together[0][:1], {key: value for key, value in together[1].items() if key.startswith("a/")}
    watched = model()
    seen: list[str] = []
    name, parameter = next(iter(watched.task_parameters("a").items()))
    assert isinstance(parameter, nn.Parameter)
    parameter.register_hook(lambda gradient: seen.append(name))
    hooked = one_pass(watched, batch())
    print(
        json.dumps(
            {
                "to slices": worst(together, on_slices),
                "tables": num_tables,
                "alone": differing(alone, mine),
                "hooks": len(seen),
                "with hooks": worst(hooked, on_slices),
            }
        )
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return json.loads(run_script(__file__, TRITON_INTERPRET="1"))


def test_losses_and_gradients_are_those_of_products_on_slices(report: dict[str, Any]) -> None:
    assert report["to slices"] < 1e-5
    assert report["tables"] == 4, "two layers of each of two blocks"


def test_a_task_has_the_same_bits_without_the_others(report: dict[str, Any]) -> None:
    assert report["alone"] == []


def test_a_hook_on_a_parameter_sees_its_gradient_as_the_layer_goes_by_slices_then(report: dict[str, Any]) -> None:
    assert report["hooks"] == 1
    assert report["with hooks"] < 1e-5


def test_a_bottleneck_that_is_too_wide_for_kernels_goes_by_slices_and_that_is_told() -> None:
    told = bottleneck_layer.say_once
    told.cache_clear()
    mux = model(wide=300)
    (forward, *_) = [
        module.__dict__["forward"]
        for module in mux.modules()
        if isinstance(module.__dict__.get("forward"), bottleneck_layer.MultiplexedBottleneck)
    ]
    adapters = tuple(forward.module.bottleneck_down)
    slabs = [mux.registry.slab_of(name) for name in ("a", "c")]
    dtype = next(mux.parameters()).dtype
    with pytest.warns(UserWarning, match="largest bottleneck has 300 features; allowed: 1 to 256"):
        assert forward._of_kernels.tables(adapters, slabs, dtype, frozenset()) is None


if __name__ == "__main__":
    main()
