"""Diff Pruning: PEFT's layer against the formulas of the paper, and many tasks in one pass: draws and penalties."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from peft_mux import ChunkPackingCollator, ConfigError, DiffPruningConfig, MultiTaskPeftModel
from peft_mux.adapters.diff_pruning import DiffPruningLinear, Relaxed, Stretch, expected_l0, gates, greatest
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.kernels import philox
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.passes import gradients_of, packed, perturbed
from tests.peft_methods.test_methods import logits, perturb

# ------------------------------------------------------------- PEFT's own layer


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


@pytest.mark.parametrize(
    ("stretch", "alpha"), [(Stretch(-1.5, 1.5), -2.0), (Stretch(-0.1, 1.1), 0.0), (Stretch(-2.0, 1.5), 1.0)]
)
def test_the_penalty_counts_the_gates_that_are_open_in_expectation(stretch: Stretch, alpha: float) -> None:
    num = 200_000
    noise = torch.logit(torch.rand(num, generator=torch.Generator().manual_seed(0)), eps=1e-7)
    share = float((gates(torch.full((num,), alpha), stretch, noise) > 0).float().mean())
    one = torch.full((1, 1), alpha)
    expected = float(expected_l0(Relaxed(one, one), stretch))
    assert math.isclose(expected, share, abs_tol=4 * 0.5 / math.sqrt(num))
    rows = float(expected_l0(Relaxed(one, one, torch.full((1,), 0.3)), stretch))
    assert math.isclose(rows, expected / (1 + math.exp(-0.3 + math.log(-stretch.lower / stretch.upper))), rel_tol=1e-5)


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


ELEMENTS = 2 * (32 * 32 + 32 * 64)


def moved_model(**fields: Any) -> Any:
    model = get_peft_model(tiny_llama(), DiffPruningConfig(target_modules=["q_proj", "down_proj"], **fields))
    perturb(model)
    return model


def deltas_of(model: Any) -> list[torch.Tensor]:
    return [layer.delta("default").detach() for _, layer in model.base_model._layers("default")]


def test_a_pruned_adapter_is_small_exact_in_files_and_may_be_merged_and_taken_out(tmp_path: Path) -> None:
    model = moved_model(structured=True)
    before = deltas_of(model)
    assert model.base_model.prune(target_sparsity=0.02) == round(0.02 * ELEMENTS)
    for kept, whole in zip(deltas_of(model), before, strict=True):
        assert torch.equal(kept[kept != 0], whole[kept != 0]), "kept weights are unchanged"
    own = logits(model)
    model.save_pretrained(str(tmp_path))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(item.numel() for item in saved.values()) == 2 * round(0.02 * ELEMENTS)
    again = PeftModel.from_pretrained(tiny_llama(), str(tmp_path))
    assert torch.equal(logits(again), own)
    weight = tiny_llama().model.layers[0].self_attn.q_proj.weight
    again.merge_adapter()
    assert torch.allclose(logits(again), own, atol=1e-5)
    again.unmerge_adapter()
    assert torch.allclose(again.base_model.model.model.layers[0].self_attn.q_proj.weight, weight, atol=1e-6)


def test_a_pruned_adapter_trains_on_with_its_places_fixed() -> None:
    model = moved_model()
    model.base_model.prune(target_sparsity=0.02)
    trained = [item for item in model.parameters() if item.requires_grad]
    assert sum(item.numel() for item in trained) == round(0.02 * ELEMENTS)
    before = [delta != 0 for delta in deltas_of(model)]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    model.train()(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
    assert any(bool(item.grad.any()) for item in trained)
    optimizer.step()
    assert all(torch.equal(after != 0, places) for after, places in zip(deltas_of(model), before, strict=True))


def test_pruning_and_merging_refuse_what_cannot_be() -> None:
    model = moved_model()
    for arguments, said in (
        ({"target_sparsity": 2}, r"target_sparsity must be a share above 0, at most 0\.5, got 2"),
        ({"adapter_name": "x"}, "prune: the adapter must be default, not merged, got 'x'"),
    ):
        with pytest.raises(ConfigError, match=said):
            model.base_model.prune(**arguments)
    model.base_model.prune()
    with pytest.raises(ConfigError, match="one that was not pruned, not merged, got 'default'"):
        model.base_model.prune()
    layer = layer_of()
    with torch.no_grad():
        layer.diff_pruning_delta["default"][0, 0] = float("nan")
    weight = layer.base_layer.weight.clone()
    with pytest.raises(ConfigError, match="not finite; nothing is merged"):
        layer.merge(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, weight)


# --------------------------------------------------------- many tasks in one pass


def test_nothing_as_large_as_a_weight_is_held_for_the_backward_pass() -> None:
    model = model_of().eval()  # without the penalty, which is of all elements
    batch, _ = packed("a", "b")
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda item: held.append(item) or item, lambda item: item):
        model(batch).losses.sum().backward()
    weights = {item.data_ptr() for item in model.parameters()}
    assert len(held) > 10
    assert not [item for item in held if item.shape == (32, 32) and item.data_ptr() not in weights]


def model_of(**fields: Any) -> MultiTaskPeftModel:
    config = DiffPruningConfig(target_modules=["q_proj"], alpha_init=0.0, structured=True, **fields)
    other = LoraConfig(r=2, target_modules=["q_proj"])
    model = MultiTaskPeftModel(tiny_llama(), {"a": config, "b": other}, verify=False).train()
    perturbed(model.task_parameters("a"), 0)
    return model


def test_uniform_numbers_are_uniform_between_0_and_1() -> None:
    uniform = philox.uniform(7, 300, 333, torch.device("cpu"))
    assert 0 < uniform.min() < 1e-4
    assert 1 - 1e-4 < uniform.max() < 1
    counts = torch.histc(uniform, bins=10, min=0, max=1)
    assert bool(((counts - 9990).abs() < 5 * 100).all()), "each tenth holds a tenth of them"
    assert len(uniform.unique()) > 50_000


@pytest.mark.parametrize("capacity", [1000, 12])
def test_the_penalty_is_added_once_a_step_however_many_passes_there_are(capacity: int) -> None:
    ids = torch.arange(1, 200).numpy()
    sequences = tuple(TokenSequence(ids[row : row + n], ids[row : row + n], row) for row, n in enumerate((5, 9, 3, 11)))
    losses, gradients = {}, {}
    for weight in (0.0, 1e-3):
        model = model_of(l0_weight=weight)
        batches = [TaskBatch(name, 3, 5, sequences) for name in "ab"]
        passes = ChunkPackingCollator().micro_batches(batches, max_tokens=capacity)
        assert (len(passes) == 1) == (capacity == 1000)
        losses[weight] = torch.zeros(2)
        for batch in passes:
            output = model(batch)
            output.losses.sum().backward()
            for name, loss in zip(output.task_names, output.losses.detach().unbind(), strict=True):
                losses[weight]["ab".index(name)] += loss
        gradients[weight] = gradients_of(model)
    wanted, own = torch.zeros(()), model_of(l0_weight=1e-3).task_parameters("a")
    for name, alpha in own.items():
        if name.endswith(".diff_pruning_alpha"):
            row = own[name.replace("_alpha", "_row_alpha")]
            wanted = wanted + 1e-3 * (alpha.sigmoid() * row.sigmoid()[:, None]).sum()
    wanted.backward()
    assert torch.allclose(losses[1e-3][0] - losses[0.0][0], wanted.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(losses[1e-3][1], losses[0.0][1]), "the neighbour has none"
    for name, item in own.items():
        added = gradients[1e-3][f"a {name}"] - gradients[0.0][f"a {name}"]
        assert torch.allclose(added, torch.zeros_like(item) if item.grad is None else item.grad, atol=1e-6), name
