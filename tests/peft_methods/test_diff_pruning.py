"""Diff Pruning held against the formulas of the paper, written out: gates, penalty, pruning, merging."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from peft_mux import ConfigError, DiffPruningConfig
from peft_mux.modeling.adapters.diff_pruning.peft_tuner import (
    DiffPruningLinear,
    Relaxed,
    Stretch,
    expected_l0,
    gates,
    greatest,
)
from tests.invariants.mux_lab import tiny_llama
from tests.peft_methods.test_methods import logits, perturb

STRETCH = Stretch(-1.5, 1.5)


def layer_of(**fields: Any) -> Any:
    torch.manual_seed(0)
    layer = DiffPruningLinear(nn.Linear(5, 7), "default", DiffPruningConfig(**fields), (7, 5))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "diff_pruning" in name:
                parameter.copy_(torch.randn(parameter.shape))
    return layer


@pytest.mark.parametrize("is_structured", [False, True])
def test_a_layer_adds_the_gated_difference_in_training_and_in_evaluation(is_structured: bool) -> None:
    layer = layer_of(structured=is_structured, concrete_lower=-0.5, concrete_upper=1.25)
    w, alpha = layer.diff_pruning_delta["default"], layer.diff_pruning_alpha["default"]
    x = torch.randn(4, 5)
    for is_training in (True, False):
        torch.manual_seed(3)
        got = layer.train(is_training)(x)
        torch.manual_seed(3)
        u, v = torch.rand(7, 5), torch.rand(7)
        moved = alpha + (torch.log(u) - torch.log(1 - u) if is_training else 0)
        z = (torch.sigmoid(moved) * 1.75 - 0.5).clamp(0, 1)
        if is_structured:
            row = layer.diff_pruning_row_alpha["default"]
            row = row + (torch.log(v) - torch.log(1 - v) if is_training else 0)
            z = z * (torch.sigmoid(row) * 1.75 - 0.5).clamp(0, 1)[:, None]
        assert 0 < (z == 0).sum() < z.numel()
        base = layer.base_layer
        assert torch.allclose(got, F.linear(x, base.weight + z * w, base.bias), atol=1e-6)


@pytest.mark.parametrize("stretch", [STRETCH, Stretch(-0.1, 1.1), Stretch(-2.0, 1.5)])
@pytest.mark.parametrize("alpha", [-2.0, 0.0, 1.0])
def test_the_penalty_counts_the_gates_that_are_open_in_expectation(stretch: Stretch, alpha: float) -> None:
    num = 200_000
    noise = torch.logit(torch.rand(num, generator=torch.Generator().manual_seed(0)), eps=1e-7)
    share = float((gates(torch.full((num,), alpha), stretch, noise) > 0).float().mean())
    one = torch.full((1, 1), alpha)
    expected = float(expected_l0(Relaxed(one, one), stretch))
    assert math.isclose(expected, share, abs_tol=4 * 0.5 / math.sqrt(num))
    rows = float(expected_l0(Relaxed(one, one, torch.full((1,), 0.3)), stretch))
    assert math.isclose(rows, expected / (1 + math.exp(-0.3 + math.log(-stretch.lower / stretch.upper))), rel_tol=1e-5)


def test_the_penalty_of_a_model_is_that_of_all_its_targets() -> None:
    model = get_peft_model(tiny_llama(), DiffPruningConfig(target_modules=["q_proj", "v_proj"], l0_weight=1e-3))
    elements = 2 * (32 * 32 + 16 * 32)
    wanted = 1e-3 * elements / (1 + math.exp(-5))
    assert math.isclose(model.base_model.l0_penalty().item(), wanted, rel_tol=1e-5)
    with pytest.raises(ConfigError, match=r"l0_penalty: got adapter 'other'; allowed: default"):
        model.base_model.l0_penalty("other")


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_pruning_keeps_the_greatest_of_all_targets(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 10), "b": (3, 4), "c": (20, 11), "d": (1, 2)}
    deltas = {name: torch.randn(shape, generator=generator) * (1 + ord(name) % 3) for name, shape in shapes.items()}
    count = max(1, round(share * sum(delta.numel() for delta in deltas.values())))
    limit = torch.cat([delta.flatten() for delta in deltas.values()]).abs().sort(descending=True).values[count - 1]
    places = greatest(deltas, share)
    assert sum(map(len, places.values())) == count
    for name, delta in deltas.items():
        assert torch.equal(places[name].long(), (delta.flatten().abs() >= limit).nonzero()[:, 0]), name


def pruned_model(**fields: Any) -> Any:
    model = get_peft_model(tiny_llama(), DiffPruningConfig(target_modules=["q_proj", "down_proj"], **fields))
    perturb(model)
    return model


def test_a_pruned_adapter_is_small_exact_in_files_and_may_be_merged_and_taken_out(tmp_path: Path) -> None:
    model = pruned_model(structured=True)
    elements = 2 * (32 * 32 + 32 * 64)
    before = {name: layer.delta("default").detach() for name, layer in model.base_model._layers("default")}
    assert model.base_model.prune(target_sparsity=0.02) == round(0.02 * elements)
    for name, layer in model.base_model._layers("default"):
        delta = layer.delta("default").detach()
        kept = delta != 0
        assert torch.equal(delta[kept], before[name][kept]), "what is kept stays as it was"
    own = logits(model)
    model.save_pretrained(str(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(item.numel() for item in saved.values()) == 2 * round(0.02 * elements)
    again = PeftModel.from_pretrained(tiny_llama(), str(tmp_path))
    assert torch.equal(logits(again), own)
    weight = tiny_llama().model.layers[0].self_attn.q_proj.weight
    again.merge_adapter()
    assert torch.allclose(logits(again), own, atol=1e-5)
    again.unmerge_adapter()
    assert torch.allclose(again.base_model.model.model.layers[0].self_attn.q_proj.weight, weight, atol=1e-6)
    assert torch.allclose(logits(again.merge_and_unload()), own, atol=1e-5)


def test_a_pruned_adapter_trains_on_with_its_places_fixed() -> None:
    model = pruned_model()
    model.base_model.prune(target_sparsity=0.02)
    trained = [item for item in model.parameters() if item.requires_grad]
    assert sum(item.numel() for item in trained) == round(0.02 * 2 * (32 * 32 + 32 * 64))
    before = [layer.delta("default").detach() != 0 for _, layer in model.base_model._layers("default")]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    model.train()(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
    assert any(bool(item.grad.any()) for item in trained)
    optimizer.step()
    after = [layer.delta("default").detach() != 0 for _, layer in model.base_model._layers("default")]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_pruning_and_merging_refuse_what_cannot_be() -> None:
    model = pruned_model()
    with pytest.raises(ConfigError, match=r"DiffPruningConfig\.target_sparsity: got 2"):
        model.base_model.prune(target_sparsity=2)
    with pytest.raises(ConfigError, match=r"prune: got adapter 'x'; allowed: default"):
        model.base_model.prune("x")
    model.base_model.prune()
    with pytest.raises(ConfigError, match="prune: got adapter 'default'; allowed: one that was not pruned"):
        model.base_model.prune()
    layer = layer_of()
    with torch.no_grad():
        layer.diff_pruning_delta["default"][0, 0] = float("nan")
    weight = layer.base_layer.weight.clone()
    with pytest.raises(ConfigError, match="not finite; nothing merged"):
        layer.merge(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, weight)
    layer.base_layer.weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match="whose weight is quantised; allowed: weights in full precision"):
        layer.merge()
