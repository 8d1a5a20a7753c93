"""The last layer at the rows that are read: the losses and gradients of all rows, and where it is not done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftType
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.modeling.backbone.modules import find_layers
from peft_mux.modeling.last_layer import LastLayerForward
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.sharding import norm_over_all_ranks
from tests.engine.lab import last_layer_of
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.cases import CASES as ADAPTER_CASES
from tests.modeling.adapters.cases import FAST, each_type
from tests.modeling.adapters.passes import assert_nan_stays, moved
from tests.modeling.backbones import LANGUAGE_MODELS, VOCABULARY, filled, multiplexed
from tests.modeling.objectives.cases import CASES as LOSS_CASES
from tests.modeling.objectives.cases import LossCase
from tests.modeling.objectives.preference.cases import READING_CASES
from tests.modeling.objectives.test_objectives import model_for
from tests.modeling.test_shared_prefixes import BACKBONES, assert_near, losses_and_gradients, model_of

Masks = list[list[bool]]
"""For each row which of its tokens are targets."""


def stream_of(*tasks: Masks, classes: bool = False, seed: int = 3) -> MuxBatch:
    """Return the tasks `a`, `b` and so on with random tokens as one micro-batch, targets where the masks say."""
    rng, batches = np.random.default_rng(seed), []
    for name, masks in zip("abc", tasks, strict=False):
        rows = []
        for number, mask in enumerate(masks):
            ids = rng.integers(2, VOCABULARY, len(mask))
            labels = np.where(mask, ids, IGNORE_INDEX)
            rows.append(TokenSequence(ids, labels, number, class_label=number % 3 if classes else None))
        batches.append(TaskBatch(name, 0, 7, tuple(rows)))
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=100_000)
    return batch


def completions(*shapes: tuple[int, int]) -> Masks:
    """Return the masks of rows of so many tokens, the last few of which are targets."""
    return [[False] * (length - targets) + [True] * targets for length, targets in shapes]


def some_rows() -> MuxBatch:
    """Return rows: some have no target, one has one, and one has only targets."""
    return stream_of(completions((9, 3), (5, 0), (20, 1), (3, 3)), completions((17, 4), (1, 0), (12, 0)))


@contextmanager
def computing_all_rows(model: MultiTaskPeftModel) -> Iterator[None]:
    model.last_layer.is_wanted = False
    try:
        yield
    finally:
        model.last_layer.is_wanted = True


def assert_as_all_rows(model: MultiTaskPeftModel, batch: MuxBatch, *, narrows: bool = True) -> None:
    """Assert that a pass gives what it gives where the last layer computes all rows."""
    with computing_all_rows(model):
        wanted = losses_and_gradients(model, batch)
    last_layer_of(model).was_narrowed = False
    found = losses_and_gradients(model, batch)
    assert last_layer_of(model).was_narrowed == narrows
    for mine, theirs in zip(found, wanted, strict=True):
        assert_near(mine, theirs)


# ------------------------------------------------------------- architectures


@pytest.mark.parametrize("name", BACKBONES)
def test_every_architecture_gives_the_losses_and_gradients_of_all_rows(name: str) -> None:
    model = model_of(name)
    assert model.last_layer.reason is None
    batch = some_rows()
    if "classifier" in name:
        batch = stream_of(completions((9, 0), (5, 0), (20, 0)), completions((17, 0), (12, 0)), classes=True)
    assert_as_all_rows(model, batch)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT2", "DeepseekV3"])
def test_where_rows_share_a_prefix_the_rows_that_are_read_are_among_the_computed(name: str) -> None:
    masks = completions((9, 3), (5, 0), (20, 1), (20, 2), (9, 3))
    batch = stream_of(masks, masks[::-1])
    ids = batch.input_ids.clone()
    bounds = batch.cu_seqlens.tolist()
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        ids[0, start : min(start + 4, end)] = torch.arange(5, 9)[: end - start]
    batch.input_ids.copy_(ids)
    shared = batch.sharing([True, True], 2)
    assert shared.num_computed < batch.num_tokens
    assert_as_all_rows(model_of(name), shared)


def masks_of_rows() -> st.SearchStrategy[Masks]:
    return st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=4)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mistral"])
def test_any_choice_of_targets_gives_the_losses_and_gradients_of_all_rows(name: str) -> None:
    model = model_of(name)

    @settings(deadline=None, max_examples=12)
    @given(masks_of_rows(), masks_of_rows())
    def check(a: Masks, b: Masks) -> None:
        batch = stream_of(a, b)
        num_read = len(batch.target_rows)
        if num_read:
            assert_as_all_rows(model, batch, narrows=num_read <= 0.75 * batch.num_tokens)

    check()


def test_the_last_layer_computes_keys_of_all_rows_and_everything_else_of_those_that_are_read() -> None:
    model, batch = multiplexed(filled(LANGUAGE_MODELS["Llama"][0]), ["q_proj"]), some_rows()
    heights: dict[str, list[int]] = {}
    layers = find_layers(model.backbone)
    assert layers is not None
    for name, module in layers.layers[-1].named_modules():
        if isinstance(module, nn.Linear) and name.endswith("base_layer"):
            continue
        if name.endswith(("_proj", "layernorm")):
            module.register_forward_hook(
                lambda _, given, out, name=name: heights.setdefault(name, []).append(out.shape[1] * bool(out.any()))
            )
    model(batch)
    num_tokens, num_read = batch.num_tokens, len(batch.target_rows)
    assert num_read < num_tokens / 4
    for name, found in heights.items():
        if name.endswith(("k_proj", "v_proj")):
            assert found == [num_tokens, 0], name
        elif name.endswith("q_proj"):
            assert found == [0, num_read], name
        else:
            assert found == [*([num_tokens] if name == "input_layernorm" else []), num_read], name


def test_siblings_that_are_computed_together_stay_so_where_all_rows_are_read() -> None:
    model, batch = multiplexed(filled(LANGUAGE_MODELS["Llama"][0]), ["q_proj"]), some_rows()
    attention = last_layer_of(model).module.self_attn
    model(batch)
    group = attention.q_proj.forward.group
    assert [member.module for member in group.members] == [attention.q_proj, attention.k_proj, attention.v_proj]
    assert not group.are_apart


# ------------------------------------------------------- adapters and losses


# AdaMSS needs a package that may be absent (`catalogue/test_adamss.py`).
@each_type((one for one in ADAPTER_CASES if one.name != "ADAMSS"), FAST)
def test_every_type_of_adapters_gives_the_losses_and_gradients_of_all_rows(peft_type: PeftType) -> None:
    case = ADAPTER_CASES[peft_type]
    configs = {"a": case.make(0), "b": case.dropped() if case.dropped else case.make(1)}
    assert_as_all_rows(moved(MultiTaskPeftModel(tiny_llama(), configs)).train(), some_rows())


@pytest.mark.parametrize("target", ["q_proj", "v_proj", "o_proj", "down_proj"])
def test_a_task_whose_lowest_adapter_is_in_the_last_layer_stops_there(target: str) -> None:
    upper = LoraConfig(r=3, target_modules=[target], layers_to_transform=[1])
    configs = {"a": upper, "b": LoraConfig(r=2, target_modules=["v_proj", "up_proj"])}
    assert_as_all_rows(moved(MultiTaskPeftModel(tiny_llama(), configs)).train(), some_rows())


def test_dropout_is_drawn_for_the_tokens_that_are_left_as_for_all() -> None:
    backbone = filled(LANGUAGE_MODELS["GPT2"][0])
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    model = multiplexed(backbone, ["c_attn"]).double()
    drawn = losses_and_gradients(model, some_rows())[0]
    assert_as_all_rows(model, some_rows())
    model.eval()
    assert (losses_and_gradients(model, some_rows())[0] - drawn).abs().min() > 1e-3


@pytest.mark.parametrize("case", [*LOSS_CASES, *READING_CASES], ids=str)
def test_every_loss_reads_what_it_reads_of_all_rows(case: LossCase) -> None:
    model = model_for(case, "a", "b", is_verified=True)
    batches = [case.batch("a", 1), case.batch("b", 2)]
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=100_000)
    (ready,) = Executor(model).with_reference_values([batch], ["a", "b"])
    read = model.objectives.head.read_rows(ready, model.backbone)
    assert read is not None
    assert_as_all_rows(model, ready, narrows=0 < read.offsets[-1] <= 0.75 * ready.num_tokens)


def test_log_probabilities_of_targets_are_those_of_all_rows() -> None:
    model, batch = model_of("Llama"), some_rows()
    found = model.token_logprobs(batch)
    with computing_all_rows(model):
        wanted = model.token_logprobs(batch)
    for name in "ab":
        assert torch.allclose(found[name].nll_M, wanted[name].nll_M, rtol=1e-6)


# --------------------------------------------------------------------- passes


def test_recomputed_activations_are_those_of_the_same_rows() -> None:
    model = multiplexed(filled(LANGUAGE_MODELS["Llama"][0]), ["q_proj", "down_proj"]).double()
    kept = losses_and_gradients(model, some_rows())
    model.activation_checkpointing_enable()
    assert_as_all_rows(model, some_rows())
    for mine, theirs in zip(losses_and_gradients(model, some_rows()), kept, strict=True):
        assert torch.equal(mine, theirs)


def test_a_recomputed_last_layer_keeps_its_inputs_alone() -> None:
    model, sizes = multiplexed(filled(LANGUAGE_MODELS["Llama"][0]), ["q_proj"]), []
    for _ in range(2):
        count: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, count=count: count.append(x.numel()) or x, lambda x: x):
            model(some_rows())
        sizes.append(sum(count))
        model.activation_checkpointing_enable()
    assert sizes[1] < 0.5 * sizes[0]


def test_nan_of_one_task_reaches_no_other() -> None:
    model = multiplexed(filled(LANGUAGE_MODELS["Llama"][0]), ["q_proj", "down_proj"])
    assert_nan_stays(model, some_rows(), "a")


def test_a_task_alone_has_what_it_has_next_to_another() -> None:
    model, batch = model_of("Llama"), some_rows()
    together, apart = losses_and_gradients(model, batch), losses_and_gradients(model, batch.of_tasks([0]))
    assert torch.allclose(together[0][:1], apart[0], rtol=1e-6)
    for mine, theirs in zip(together[1:], apart[1:], strict=False):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-10)


def test_logits_of_all_tokens_are_computed_where_they_are_asked_for() -> None:
    model, batch = model_of("Llama").eval(), some_rows()
    found = model.sequence_logits(batch)
    with computing_all_rows(model):
        wanted = model.sequence_logits(batch)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)
    model.train()


# ------------------------------------------------------ where it is not done


class LooksAround(LlamaDecoderLayer):
    """A layer whose outputs depend on those of other rows behind attention."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return out + out.mean(dim=1, keepdim=True)


class KeepsItsHeight(LlamaDecoderLayer):
    """A layer that wants as many rows as it had before."""

    height = 0

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] < self.height:
            raise ValueError("rows are missing")
        self.height = hidden_states.shape[1]
        return super().forward(hidden_states, *args, **kwargs)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(LooksAround, "differs by .* of its size"), (KeepsItsHeight, "does not run .*ValueError: rows are missing")],
)
def test_an_architecture_that_is_not_proven_computes_all_rows_and_says_why(layer: type[nn.Module], reason: str) -> None:
    backbone = tiny_llama()
    backbone.model.layers[-1].__class__ = layer
    model = MultiTaskPeftModel(backbone, {"a": ADAPTER_CASES[PeftType.LORA].make(0)}, verify=False)
    model.last_layer.prove(model)
    assert model.last_layer.reason is not None
    assert re.search(reason, model.last_layer.reason)
    assert model.last_layer.rows(model, stream_of(completions((9, 1)))) is None


def test_a_model_that_was_never_verified_computes_all_rows() -> None:
    case = ADAPTER_CASES[PeftType.LORA]
    model = MultiTaskPeftModel(tiny_llama(), {"a": case.make(0)}, verify=False)
    assert model.last_layer.rows(model, stream_of(completions((9, 1)))) is None
    model.verify()
    assert model.last_layer.rows(model, stream_of(completions((9, 1)))) is not None


def test_a_layer_that_sums_over_tensor_parallel_ranks_before_attention_computes_all_rows() -> None:
    model = MultiTaskPeftModel(BACKBONES["Qwen3"][0](), {"a": ADAPTER_CASES[PeftType.LORA].make(0)})
    model.last_layer.check_cut(model)
    assert model.last_layer.reason is None
    first, last = model.backbone.model.layers[0], model.backbone.model.layers[-1]
    norm_over_all_ranks(first.self_attn.q_norm, Waiting())
    model.last_layer.check_cut(model)
    assert model.last_layer.reason is None, "it lies in another layer"
    norm_over_all_ranks(last.self_attn.q_norm, Waiting())
    model.last_layer.check_cut(model)
    assert model.last_layer.reason == "a norm before attention is a sum over tensor parallel ranks"


class Waiting:
    """Stands for the links of a tensor parallel rank; nothing is sent."""

    index, size = 0, 2

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        raise AssertionError("nothing is summed")


def test_removing_all_tasks_restores_the_last_layer() -> None:
    backbone = tiny_llama()
    case = ADAPTER_CASES[PeftType.LORA]
    model = MultiTaskPeftModel(backbone, {"a": case.make(0)})
    assert isinstance(backbone.model.layers[-1].forward, LastLayerForward)
    unloaded = model.unload()
    assert not any("forward" in vars(module) for module in unloaded.modules())
