"""Differences of many tasks on one layer: gradients against autograd, draws of a step, and the penalty of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft_mux.modeling.adapters.diff_pruning.kind import DiffSegment, grouped_deltas

from peft_mux import ChunkPackingCollator, DiffPruningConfig, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.kernels import philox
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.test_kinds import packed, perturbed


def test_gradients_are_those_of_autograd_and_nan_stays_home() -> None:
    def run(poison: bool, is_grouped: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(9, 4), (9, 3), (4, 3), (4, 3), (4, 3)]
        y, x, a, b, c = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
        if poison:
            with torch.no_grad():
                c[0, 0] = float("nan")
        bounds = [(0, 3, lambda w, z: w * z.sigmoid(), (a, b)), (5, 9, torch.sin, (c,))]
        if is_grouped:
            out = grouped_deltas(y, x, [DiffSegment(*bound) for bound in bounds])
        else:
            parts = [y[0:3] + x[0:3] @ (a * b.sigmoid()).t(), y[3:5], y[5:9] + x[5:9] @ c.sin().t()]
            out = torch.cat(parts)
        out.square().sum().backward()
        return [out.detach(), *(item.grad for item in (y, x, a, b, c))]  # type: ignore[misc]

    wanted = run(False, False)
    for mine, theirs in zip(run(False, True), wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12)
    out, _, x_grad, a_grad, b_grad, _ = run(True, True)
    healthy = run(False, True)
    assert bool(out[5:].isnan().any())
    assert torch.equal(out[:5], healthy[0][:5])
    assert torch.equal(x_grad[:5], healthy[2][:5])
    assert torch.equal(a_grad, healthy[3])
    assert torch.equal(b_grad, healthy[4])


def model_of(**fields: Any) -> MultiTaskPeftModel:
    config = DiffPruningConfig(target_modules=["q_proj"], alpha_init=0.0, structured=True, **fields)
    other = LoraConfig(r=2, target_modules=["q_proj"])
    model = MultiTaskPeftModel(tiny_llama(), {"a": config, "b": other}, verify=False).train()
    perturbed(model.task_parameters("a"), 0)
    return model


def noise_of(model: MultiTaskPeftModel, batch: MuxBatch) -> list[torch.Tensor]:
    """Return what the gates of task "a" are drawn with, in each layer."""
    found = []
    with model.packed.multiplexing(batch, None):
        rows = model.stream.segments[0]
        for number in (0, 1):
            layer: Any = model.backbone.get_submodule(f"model.layers.{number}.self_attn.q_proj")
            while "diff_pruning_delta" not in dict(layer.named_children()):
                layer = layer.base_layer
            found += list(layer.__dict__["forward"].noise(rows))
    return found


def test_gates_are_drawn_anew_for_every_step_layer_and_seed_and_for_nothing_else() -> None:
    model = model_of()
    batch, _ = packed("a", "b")
    first = noise_of(model, batch)
    assert not torch.equal(first[0], first[2]), "layers differ"
    assert not torch.equal(first[1], first[0][0]), "rows have draws of their own"
    later = noise_of(model, replace(batch, task_steps=(1, 0)))
    other = noise_of(model, replace(batch, task_seeds=(9, 1)))
    assert not any(torch.equal(a, b) for a, b in zip(first, later, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    neighbour = replace(batch.of_tasks([0]), token_places=batch.of_tasks([0]).token_places + 50)
    assert all(torch.equal(a, b) for a, b in zip(first, noise_of(model, neighbour), strict=True))


def test_uniform_numbers_are_uniform_between_0_and_1() -> None:
    uniform = philox.uniform(7, 300, 333, torch.device("cpu"))
    assert 0 < uniform.min() < 1e-4
    assert 1 - 1e-4 < uniform.max() < 1
    counts = torch.histc(uniform, bins=10, min=0, max=1)
    assert bool(((counts - 9990).abs() < 5 * 100).all()), "each tenth holds a tenth of them"
    assert len(uniform.unique()) > 50_000
    assert philox.uniform(7, 2, 3, torch.device("meta")).shape == (2, 3)


def step_of(lengths: list[int], capacity: int) -> list[MuxBatch]:
    """Return the micro-batches of one global batch of task "a" and one of "b"."""
    ids = torch.arange(1, 200).numpy()
    sequences = tuple(TokenSequence(ids[row : row + n], ids[row : row + n], row) for row, n in enumerate(lengths))
    batches = [TaskBatch(name, 3, 5, sequences) for name in "ab"]
    return ChunkPackingCollator().micro_batches(batches, max_tokens=capacity)


@pytest.mark.parametrize("capacity", [1000, 24, 12])
def test_the_penalty_is_added_once_a_step_however_many_passes_there_are(capacity: int) -> None:
    lengths, losses, gradients = [5, 9, 3, 11, 4], {}, {}
    for weight in (0.0, 1e-3):
        model = model_of(l0_weight=weight)
        passes = step_of(lengths, capacity)
        assert (len(passes) == 1) == (capacity == 1000)
        total = torch.zeros(2)
        for batch in passes:
            output = model(batch)
            output.losses.sum().backward()
            for name, loss in zip(output.task_names, output.losses.detach().unbind(), strict=True):
                total["ab".index(name)] += loss
        losses[weight] = total
        gradients[weight] = {name: item.grad.clone() for name, item in model.task_parameters("a").items()}
    wanted, expected = torch.zeros(()), model_of(l0_weight=1e-3).task_parameters("a")
    alphas = {name.partition(".diff_pruning_")[0]: item for name, item in expected.items() if name.endswith("g_alpha")}
    for site, alpha in alphas.items():
        row = expected[f"{site}.diff_pruning_row_alpha"]
        wanted = wanted + 1e-3 * (alpha.sigmoid() * row.sigmoid()[:, None]).sum()
    wanted.backward()
    assert torch.allclose(losses[1e-3][0] - losses[0.0][0], wanted.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(losses[1e-3][1], losses[0.0][1]), "the neighbour has none"
    for name, item in expected.items():
        own = torch.zeros_like(item) if item.grad is None else item.grad
        assert torch.allclose(gradients[1e-3][name] - gradients[0.0][name], own, atol=1e-6), name


def test_evaluation_has_no_penalty_and_no_noise() -> None:
    model = model_of(l0_weight=1.0)
    batch, _ = packed("a", "b")
    with torch.no_grad():
        trained = model(batch).losses[0]
        first = model.eval()(batch).losses[0]
        again = model(replace(batch, task_steps=(5, 0))).losses[0]
    assert trained > 100, "the penalty counts"
    assert torch.equal(first, again)
    assert first < 20
