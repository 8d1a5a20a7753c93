"""Frozen layers that run once for all tasks, and products of LoHa and LoKr that are computed from their factors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, PeftConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux import MultiTaskPeftModel
from peft_mux.modeling.adapters.catalogue import ENTRIES, entry_of
from peft_mux.modeling.adapters.special_kinds import FactoredProduct
from peft_mux.modeling.stream import Stream
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.cases import CASES_BY_NAME
from tests.modeling.adapters.lora.test_lora_pass import batch

SHARING = [name for name in CASES_BY_NAME if name in ENTRIES and ENTRIES[name].shares_base]
OTHERS = ("BOFT", "OFT", "HRA", "SHIRA")


def layers_of(config: PeftConfig) -> list[Any]:
    """Return the layers that plain PEFT makes; IA3's that scale inputs are passed over."""
    model = get_peft_model(tiny_llama(), config).train()
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return [layer for layer in layers if isinstance(layer.get_base_layer(), nn.Linear)]


def read_by_frozen(layer: Any, x: torch.Tensor) -> list[bool]:
    """Return of each call of the frozen layer whether it reads the very `x` that the layer is given."""
    frozen, seen = layer.get_base_layer(), []
    original = frozen.forward

    def forward(read: torch.Tensor) -> torch.Tensor:
        seen.append(read is x)
        return original(read)

    frozen.forward = forward
    layer(x)
    return seen


@pytest.mark.parametrize("name", [*SHARING, *OTHERS])
def test_the_frozen_layer_is_called_with_the_inputs_of_a_layer_where_the_entry_says_so(name: str) -> None:
    layers = layers_of(CASES_BY_NAME[name].make(0))
    assert layers
    for layer in layers:
        seen = read_by_frozen(layer, torch.randn(1, 3, layer.get_base_layer().in_features))
        assert (seen == [True]) == (name in SHARING and not getattr(layer, "is_feedforward", False))


def counted(model: MultiTaskPeftModel, names: str, layer_name: str) -> int:
    """Return how often a frozen layer is computed in a pass."""
    found: Any = model.backbone.get_submodule(layer_name)
    frozen = found.get_base_layer()
    counts: Counter[str] = Counter()
    original = frozen.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        return original(x)

    frozen.forward = forward
    model(batch(names)).losses.sum().backward()
    del frozen.forward
    return counts["calls"]


Q_PROJ = "model.layers.0.self_attn.q_proj"


def mixed(*names: str) -> MultiTaskPeftModel:
    configs = {
        key: CASES_BY_NAME[name].make(index % 2) for index, (key, name) in enumerate(zip("abc", names, strict=True))
    }
    return MultiTaskPeftModel(tiny_llama(), configs, verify=False).train()  # type: ignore[arg-type]


def test_a_frozen_layer_runs_once_for_tasks_of_several_types() -> None:
    assert counted(mixed("VERA", "LOHA", "MISS"), "abc", Q_PROJ) == 1


def test_a_frozen_layer_runs_once_more_for_each_task_that_rotates_its_inputs() -> None:
    assert counted(mixed("VERA", "OFT", "MISS"), "abc", Q_PROJ) == 2
    # Where such tasks have most of the rows, nothing is computed for them that they have no use for.
    assert counted(mixed("OFT", "OFT", "MISS"), "abc", Q_PROJ) == 3


@pytest.mark.parametrize(
    ("kind", "more"),
    [("LOHA", {}), ("LOKR", {}), ("LOKR", {"decompose_both": True}), ("LOKR", {"decompose_factor": 4})],
)
@pytest.mark.parametrize("in_features", [24, 40])
def test_products_of_factors_are_those_of_the_weight_and_so_are_their_gradients(
    kind: str, in_features: int, more: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(in_features, 32, dtype=torch.float64))
    make: Any = LoHaConfig if kind == "LOHA" else LoKrConfig
    model = get_peft_model(base, make(r=2, alpha=3, target_modules=["0"], init_weights=False, **more))  # type: ignore[arg-type]
    model = model.double()
    layer: Any = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
    x = torch.randn(5, in_features, dtype=torch.float64, requires_grad=True)
    results = []
    stream = Stream()
    for is_read in (False, True):
        stream.batch = object() if is_read else None  # type: ignore[assignment]
        added = FactoredProduct(layer, stream)("default", x)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        results.append([added, *torch.autograd.grad(added.square().sum(), [x, *weights])])
    assert len(results[0]) > 4
    assert results[1][0].grad_fn is not None
    for plain, ours in zip(*results, strict=True):
        assert torch.allclose(plain, ours, rtol=1e-10, atol=1e-12)


def test_a_rank_at_which_the_weight_is_less_work_goes_by_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = layers_of(LoHaConfig(r=8, target_modules=["q_proj"]))[0]
    stream = Stream()
    stream.batch = object()  # type: ignore[assignment]
    made = []
    original = layer.get_delta_weight
    monkeypatch.setattr(layer, "get_delta_weight", lambda *args, **kwargs: made.append(1) or original(*args, **kwargs))
    FactoredProduct(layer, stream)("default", torch.randn(2, layer.in_features))
    assert made == [1]


def test_entries_that_share_the_frozen_layer_are_those_of_types_that_run_by_layers() -> None:
    assert {"VERA", "IA3", "LOHA", "LOKR", "RANDLORA"} <= set(SHARING)
    assert not entry_of(CASES_BY_NAME["OFT"].make(0).peft_type).shares_base  # type: ignore[arg-type]
