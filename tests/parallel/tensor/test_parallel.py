"""Tensor parallelism in one process: what shards hold, send and refuse.

Shards in real processes are in `tests/parallel/test_layouts.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

from peft_mux.errors import CheckpointError, UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.tensor import parallel
from peft_mux.parallel.tensor.parallel import TensorParallelModel
from tests.engine import lab
from tests.engine.lab import Case
from tests.parallel.pipeline.test_depth import NUM_LAYERS, batch_of, whole_model
from tests.parallel.test_layouts import BIASED

Gradients = dict[tuple[str, str], torch.Tensor]


class Mute:
    """Links of a shard that sends nothing."""

    def __init__(self, index: int = 0, size: int = 2) -> None:
        self.index, self.size = index, size

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        raise AssertionError("nothing is to be sent")


class Doubling:
    """Links of a rank whose only peer computes what it does; heights and bytes of all that is summed are noted."""

    index, size = 0, 2

    def __init__(self) -> None:
        self.heights: list[int] = []
        self.num_bytes = 0

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.heights.append(len(tensor.reshape(-1, tensor.shape[-1])))
        self.num_bytes += tensor.nbytes
        tensor.mul_(2)
        return self

    def wait(self) -> None:
        """Do nothing: it is there."""


def shard(index: int, case: Case = lab.PLAIN) -> MultiTaskPeftModel:
    """Return one of two shards."""
    model = lab.mux_model(case)
    TensorParallelModel(model, Mute(index))
    return model


def small(backbone: Any, targets: Any = ("q_proj",)) -> MultiTaskPeftModel:
    return MultiTaskPeftModel(backbone, {"one": LoraConfig(r=2, target_modules=list(targets))}, verify=False)


def digest(model: MultiTaskPeftModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(item.shape) for name, item in model.named_parameters()}


# ----------------------------------------------------------------------- sums


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_a_pass_sends_what_the_closed_form_says(recomputes: bool) -> None:
    model, links, batch = lab.mux_model(), Doubling(), lab.step_work(tasks=("a", "b")).micro_batches[0]
    if recomputes:
        model.activation_checkpointing_enable()
    TensorParallelModel(model, links)  # type: ignore[arg-type]
    assert links.num_bytes == 0, "cutting sends nothing"
    model(batch).losses.sum().backward()
    # Each layer sums [T, D] twice in the forward pass and twice in the backward pass, except the gradient of the first
    # layer's input. Where activations are recomputed, the sum of attention's output is made again. The head sums three
    # numbers a rank for each target, in fp32, and the gradient of the [M, D] hidden states of the targets.
    num_sums = lab.NUM_LAYERS * (5 if recomputes else 4) - 1
    head_bytes = len(batch.target_rows) * (3 * 2 * 4 + lab.HIDDEN_SIZE * 4)
    assert links.num_bytes == num_sums * batch.num_tokens * lab.HIDDEN_SIZE * 4 + head_bytes


def pass_of(names: tuple[str, ...], *, recomputes: bool = False) -> tuple[list[int], Gradients]:
    """Return the heights of the sums of a backward pass from the last layer's output, and the gradients."""
    model, links = whole_model(), Doubling()
    if recomputes:
        model.activation_checkpointing_enable()
    TensorParallelModel(model, links)  # type: ignore[arg-type]
    model.prepare_pass(names)
    batch = batch_of(names)
    with model.multiplexing(batch):
        output_TD = model.hidden_states(batch)
    links.heights.clear()
    output_TD.backward(torch.ones_like(output_TD))
    weights = {(name, key): weight for name in names for key, weight in model.task_parameters(name).items()}
    return links.heights, {key: weight.grad for key, weight in weights.items() if weight.grad is not None}


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_sums_are_made_for_the_rows_of_tasks_that_have_adapters_further_down(
    recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("upper", "second", "last")
    heights, found = pass_of(names, recomputes=recomputes)
    monkeypatch.setattr(parallel, "rows_needed_now", lambda stream, num_rows: None)
    plain_heights, wanted = pass_of(names, recomputes=recomputes)
    assert set(plain_heights) == {24 * len(names)}
    assert sum(heights) < sum(plain_heights)
    assert found.keys() == wanted.keys()
    # Products of fewer rows may add in another order.
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-5, atol=1e-7)


def test_a_layer_sums_once_for_each_task_at_each_block_above_its_lowest_adapter() -> None:
    heights, _ = pass_of(("whole", "upper"))
    # Two blocks a layer, from the top: of both tasks down to the MLP of layer 2, of one down to the MLP of layer 0.
    assert heights == [48, 48, 48, *[24] * 4]
    assert len(heights) == 2 * NUM_LAYERS - 1, "nothing wants the gradient of what flows into the first layer"


# --------------------------------------------------------------------- shards


def test_a_tied_head_is_a_view_of_the_embedding_and_an_untied_one_is_not() -> None:
    for is_tied in (True, False):
        model: Any = shard(0, Case("qwen3", fields=(("tie_word_embeddings", is_tied),))).backbone
        weights = model.get_input_embeddings().weight, model.lm_head.weight
        assert (weights[0].untyped_storage().data_ptr() == weights[1].untyped_storage().data_ptr()) is is_tied


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_key_value_heads": 1}, r"tensor_parallel_size must divide .*one of 1, got .*num_key_value_heads=1"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}, r"num_attention_heads=2"),
        ({"intermediate_size": 50}, r"tensor_parallel_size must divide .*one of 1, 2, got .*intermediate_size=50"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused_with_those_that_can(changed: dict[str, int], message: str) -> None:
    tp_size = 2 if "num_key_value_heads" in changed and len(changed) == 1 else 4
    model = small(lab.backbone("llama", **{**dict(BIASED), **changed}))
    before = digest(model)
    with pytest.raises(UnsupportedModelError, match=message):
        TensorParallelModel(model, Mute(size=tp_size))
    assert digest(model) == before


def test_a_plan_of_transformers_that_says_something_else_is_refused() -> None:
    model = small(lab.backbone("llama", **dict(BIASED)))
    plan = {**model.backbone.config.base_model_tp_plan, "layers.*.mlp.up_proj": "rowwise"}
    model.backbone.config.base_model_tp_plan = plan
    with pytest.raises(UnsupportedModelError, match=r"\['gate_proj'\] and \['up_proj', 'down_proj'\] at 'mlp'"):
        TensorParallelModel(model, Mute())


def test_a_model_is_cut_once() -> None:
    model = small(lab.backbone("llama", **dict(BIASED)))
    TensorParallelModel(model, Mute())
    with pytest.raises(
        UnsupportedModelError,
        match=r"model\.layers\.0\.self_attn\.o_proj is already cut\. Load the model again",
    ):
        TensorParallelModel(model, Mute())


def test_pieces_of_all_shards_make_up_every_parameter_once() -> None:
    case = Case("gpt2", adapts_ends=True)
    whole, shards = lab.mux_model(case), [shard(index, case) for index in range(2)]
    for name in whole.tasks:
        for key, parameter in whole.task_parameters(name).items():
            covered = torch.zeros(parameter.shape)
            for model in shards:
                piece, part = model.registry.pieces_of(name)[key], model.task_parameters(name)[key]
                assert torch.equal(piece.take(parameter), part), (name, key)
                if not piece.is_whole:
                    mine = torch.zeros(parameter.shape)
                    piece.put(mine, torch.ones(part.shape))
                    covered += mine
            is_cut = not shards[0].registry.pieces_of(name)[key].is_whole
            assert (covered == is_cut).all(), (name, key)


def test_whole_weights_of_another_shape_are_refused_and_change_nothing() -> None:
    model = shard(0)
    before = {key: parameter.detach().clone() for key, parameter in model.task_parameters("b").items()}
    with pytest.raises(CheckpointError, match=r'task "b": .*q_proj\.lora_B\.weight must .*\[32.*, got shape \[16, 3\]'):
        model.registry.place_whole("b", model.task_parameters("b"))
    assert all(torch.equal(before[key], parameter) for key, parameter in model.task_parameters("b").items())
