"""Passes of prompts of every form together with LoRA: each gets what plain PEFT alone gives it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftConfig
from torch import nn

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch, chains_of
from peft_mux.data.task_batch import TaskBatch, TokenSequence, with_virtual_tokens
from peft_mux.engine.executor import Executor
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.attention import packed as attention
from peft_mux.modeling.attention.varlen import as_kernel, varlen_attention
from tests.invariants.mux_lab import relative, tiny_llama
from tests.modeling.adapters.prompts.prompt_cases import PROMPTS, config_of, packed, plain, plain_loss, rows_of
from tests.modeling.test_architectures import LANGUAGE_MODELS, filled, mistral
from tests.modeling.test_key_values import flash_attention

ALL = (*PROMPTS, "lora")


def mux(*forms: str, backbone: Any = None, verify: bool = False) -> MultiTaskPeftModel:
    """Return a model of tasks of some forms, the weights of each drawn from a seed of its own."""
    configs = {form: config_of(form) for form in forms}
    seeds = {form: ALL.index(form) for form in forms}
    return MultiTaskPeftModel(backbone or tiny_llama(), configs, seeds=seeds, verify=verify)


def gradients(model: MultiTaskPeftModel, form: str) -> dict[str, torch.Tensor]:
    found = {key: item.grad for key, item in model.task_parameters(form).items()}
    return {key: grad.detach().clone() for key, grad in found.items() if grad is not None}


def assert_as_alone(model: MultiTaskPeftModel, backbone: Any, rows: dict[str, list[list[int]]]) -> None:
    """Assert that losses and gradients of one pass are plain PEFT's of each task alone, from the same seeds."""
    losses = model(packed(model, rows)).losses
    losses.sum().backward()
    for loss, form in zip(losses, rows, strict=True):
        judge, own = plain(config_of(form), ALL.index(form), backbone())
        ours = model.task_parameters(form)
        assert ours.keys() == own.keys(), "names are plain PEFT's"
        assert all(torch.equal(ours[key], item) for key, item in own.items()), "initial weights"
        wanted = plain_loss(judge, rows[form])
        wanted.backward()
        assert math.isclose(loss.item(), wanted.item(), rel_tol=1e-5), form
        for key, item in own.items():
            assert item.grad is not None
            assert item.grad.norm() > 0 or key.endswith("lora_A.weight"), f"{form} {key}: nothing would be compared"
            found: Any = ours[key].grad
            assert relative(found, item.grad) <= 1e-4, f"{form} {key}"


def test_a_pass_of_all_forms_gives_each_what_plain_peft_alone_gives() -> None:
    assert_as_alone(mux(*ALL, verify=True), tiny_llama, {form: rows_of(form) for form in ALL})


@pytest.mark.parametrize("architecture", ["Qwen3", "Mistral", "Gemma2", "GPT2", "OPT"])
def test_positions_windows_soft_caps_and_scaled_embeddings_are_the_backbones_own(architecture: str) -> None:
    backbone = filled(LANGUAGE_MODELS[architecture][0])
    rows = {form: [[token % 50 + 2 for token in ids] for ids in rows_of(form)] for form in ("prompt", "prefix")}

    def fresh() -> Any:
        return copy.deepcopy(backbone)

    assert_as_alone(mux("prompt", "prefix", backbone=fresh()), fresh, rows)


@pytest.mark.parametrize("form", PROMPTS)
def test_a_prompt_may_be_the_only_task_and_come_before_or_after_lora(form: str) -> None:
    rows = {name: rows_of(name) for name in (form, "lora")}
    first, last = mux(form, "lora"), mux("lora", form)
    alone = mux(form)
    wanted = alone(packed(alone, {form: rows[form]})).losses[0].item()
    for model in (first, last):
        losses = model(packed(model, rows)).losses
        assert math.isclose(losses[0].item(), wanted, rel_tol=1e-6)
    last.remove_tasks(["lora"])
    assert math.isclose(last(packed(last, {form: rows[form]})).losses[0].item(), wanted, rel_tol=1e-6)
    first.remove_tasks([form])
    assert form not in first.tasks
    assert not [name for name, _ in first.named_parameters() if "prompt_encoder" in name], "nothing of it is left"
    assert first(packed(first, {"lora": rows["lora"]})).losses.isfinite().all()


@pytest.mark.parametrize("broken", ["prompt", "mlp", "cpt", "prefix"])
def test_a_prompt_that_is_nan_reaches_no_other_task(broken: str) -> None:
    rows = {form: rows_of(form) for form in ALL}
    healthy, ill = mux(*ALL), mux(*ALL)
    with torch.no_grad():
        next(iter(ill.task_parameters(broken).values())).fill_(math.nan)
    found = [model(packed(model, rows)).losses for model in (healthy, ill)]
    for losses in found:
        losses.sum().backward()
    for index, form in enumerate(ALL):
        if form == broken:
            assert found[1][index].isnan()
            continue
        assert torch.equal(found[0][index], found[1][index]), form
        theirs = gradients(ill, form)
        assert all(torch.equal(grad, theirs[key]) for key, grad in gradients(healthy, form).items()), form


# ------------------------------------------------------------- how rows are laid out


def streams(model: MultiTaskPeftModel, rows: dict[str, list[list[int]]], **options: Any) -> list[MuxBatch]:
    """Return the micro-batches of a step of all tasks."""
    labels, max_tokens = model.virtual_labels, options.pop("max_tokens", 16)
    collator = ChunkPackingCollator(**{"chunk_size": 8, **options})
    batches = [
        TaskBatch(
            form,
            0,
            1,
            tuple(
                with_virtual_tokens(TokenSequence(np.array(ids), np.array(ids), row), labels.get(form, ()))
                for row, ids in enumerate(own)
            ),
        )
        for form, own in rows.items()
    ]
    return collator.micro_batches(batches, max_tokens=max_tokens)


def run_step(model: MultiTaskPeftModel, micro_batches: list[MuxBatch]) -> dict[str, float]:
    losses: dict[str, float] = {}
    for chain in chains_of(micro_batches):
        for micro_batch, found in zip(chain, Executor(model).run_chain(chain), strict=True):
            for name, loss in zip(micro_batch.task_names, found.losses.tolist(), strict=True):
                losses[name] = losses.get(name, 0.0) + loss
    return losses


def whole_step(rows: dict[str, list[list[int]]], **options: Any) -> tuple[dict[str, float], MultiTaskPeftModel]:
    model = mux(*rows, **options)
    losses = model(packed(model, rows)).losses
    losses.sum().backward()
    return dict(zip(rows, losses.tolist(), strict=True)), model


def assert_same_step(first: MultiTaskPeftModel, second: MultiTaskPeftModel, tolerance: float) -> None:
    for form in first.tasks:
        theirs = gradients(second, form)
        for key, grad in gradients(first, form).items():
            assert relative(grad, theirs[key]) <= tolerance, f"{form} {key}"


@pytest.mark.parametrize("window", [None, 6])
def test_long_rows_in_parts_give_what_whole_ones_give(window: int | None) -> None:
    forms = ("prompt", "mlp", "cpt", "prefix", "projected", "lora")
    rows = {form: [[token % 50 + 2 for token in ids] for ids in rows_of(form, 2, 18, 44)] for form in forms}
    make = tiny_llama if window is None else lambda: filled(mistral)
    wanted, whole = whole_step(rows, backbone=make())
    model = mux(*forms, backbone=make())
    micro_batches = streams(model, rows, split_long_sequences=True)
    assert any(batch.has_more for batch in micro_batches)
    assert run_step(model, micro_batches) == pytest.approx(wanted, rel=1e-5)
    assert_same_step(model, whole, 1e-4)


def test_a_row_that_is_cut_amid_its_virtual_tokens_gives_what_a_whole_one_gives() -> None:
    rows = {"cpt": rows_of("cpt", 2, 9, 9)}
    wanted, whole = whole_step(rows)
    model = mux("cpt")
    micro_batches = streams(model, rows, split_long_sequences=True, chunk_size=4, max_tokens=4)
    assert len(micro_batches[0].labels[0]) == 4 < model.peft_config[model.adapter_of("cpt")].num_virtual_tokens
    assert run_step(model, micro_batches) == pytest.approx(wanted, rel=1e-5)
    assert_same_step(model, whole, 1e-4)


def test_padding_to_chunks_and_micro_batches_change_nothing() -> None:
    rows = {form: rows_of(form) for form in ALL}
    wanted, whole = whole_step(rows)
    model = mux(*ALL)
    micro_batches = streams(model, rows, pad_to_chunks=True, max_tokens=48)
    assert len(micro_batches) > 2
    assert run_step(model, micro_batches) == pytest.approx(wanted, rel=1e-5)
    assert_same_step(model, whole, 1e-4)


def test_a_stream_of_some_tasks_keeps_their_virtual_tokens() -> None:
    model = mux("prompt", "lora", "mlp")
    batch = packed(model, {form: rows_of(form) for form in ("prompt", "lora", "mlp")})
    assert batch.virtual_tokens == (3, 0, 4)
    assert batch.of_tasks([1, 2]).virtual_tokens == (0, 4)
    assert math.isclose(model(batch).losses[2].item(), model(batch.of_tasks([2])).losses[0].item(), rel_tol=1e-6)


def test_recomputed_activations_read_the_prompts_of_their_pass() -> None:
    forms = ("prompt", "mlp", "cpt", "prefix", "projected", "lora")
    rows = {form: rows_of(form) for form in forms}
    wanted, whole = whole_step(rows)
    model = mux(*forms)
    model.gradient_checkpointing_enable()
    # PEFT alone refuses prefixes with checkpointing, whose cache would be written twice.
    model.register_tasks({"late": config_of("prefix")})
    losses = model.train()(packed(model, rows)).losses
    losses.sum().backward()
    assert dict(zip(rows, losses.tolist(), strict=True)) == pytest.approx(wanted, rel=1e-6)
    for form in forms:
        theirs = gradients(whole, form)
        assert all(relative(grad, theirs[key]) <= 1e-6 for key, grad in gradients(model, form).items()), form


def test_attention_dropout_of_a_prefix_draws_by_place_and_key_alone_together_and_in_parts() -> None:
    def model_of(*forms: str) -> MultiTaskPeftModel:
        backbone = tiny_llama()
        modules: list[Any] = list(backbone.modules())
        for module in modules:
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        return mux(*forms, backbone=backbone).train()

    rows = {form: rows_of(form, 2, 18, 44) for form in ("lora", "prefix")}
    alone, both = model_of("prefix"), model_of("lora", "prefix")
    by_itself = alone(packed(alone, {"prefix": rows["prefix"]})).losses[0].item()
    assert math.isclose(both(packed(both, rows)).losses[1].item(), by_itself, rel_tol=1e-6)
    in_parts = run_step(both, streams(both, rows, split_long_sequences=True))
    assert math.isclose(in_parts["prefix"], by_itself, rel_tol=1e-5)
    assert abs(alone.eval()(packed(alone, {"prefix": rows["prefix"]})).losses[0].item() - by_itself) > 1e-4


@pytest.mark.parametrize("window", [None, 6])
def test_a_kernel_for_varying_lengths_gets_the_keys_of_prefixes(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = ("prefix", "lora", "projected")
    rows = {form: [[token % 50 + 2 for token in ids] for ids in rows_of(form, 2, 18, 44)] for form in forms}
    make = tiny_llama if window is None else lambda: filled(mistral)
    wanted, whole = whole_step(rows, backbone=make())
    told: list[tuple[list[int], list[int]]] = []

    def kernel(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale=1.0, window_size=(-1, -1), enable_gqa=False):
        told.append((bounds_q.diff().tolist(), bounds_k.diff().tolist()))
        options = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}
        return flash_attention(q, k, v, bounds_q, bounds_k, max_q, max_k, **options)

    monkeypatch.setattr(attention, "varlen_support", lambda *args, **kwargs: None)
    monkeypatch.setattr(attention, "varlen_attention", partial(varlen_attention, kernel=as_kernel("torch", kernel)))
    found, model = whole_step(rows, backbone=make())
    assert found == pytest.approx(wanted, rel=1e-5)
    assert_same_step(model, whole, 1e-4)
    lengths = [len(ids) for own in rows.values() for ids in own]
    assert told[0] == (lengths, [length + extra for length, extra in zip(lengths, (5, 5, 0, 0, 2, 2), strict=True)])
    in_parts = mux(*forms, backbone=make())
    assert run_step(in_parts, streams(in_parts, rows, split_long_sequences=True)) == pytest.approx(wanted, rel=1e-5)
    assert_same_step(in_parts, whole, 1e-4)


def test_in_half_precision_a_prompt_is_as_near_to_float32_as_plain_peft_is() -> None:
    for form in ("prompt", "mlp", "prefix"):
        rows = {form: rows_of(form)}
        exact, _ = whole_step(rows)
        ours, _ = whole_step(rows, backbone=tiny_llama().bfloat16())
        judge, _ = plain(config_of(form), ALL.index(form), tiny_llama().bfloat16())
        theirs = plain_loss(judge, rows[form]).item()
        assert abs(ours[form] - exact[form]) <= 2 * abs(theirs - exact[form]) + 1e-2 * exact[form]
        with torch.autocast("cpu", torch.bfloat16):
            model = mux(form)
            loss = model(packed(model, rows)).losses
            loss.sum().backward()
        assert loss.item() == pytest.approx(exact[form], rel=1e-2)


# ------------------------------------------------------------------- what is refused


def test_rows_without_the_virtual_tokens_of_their_task_are_refused_by_name() -> None:
    model = mux("prompt", "lora")
    rows = {"prompt": rows_of("prompt"), "lora": rows_of("lora")}
    bare = ChunkPackingCollator()([{"task": task, "input_ids": ids} for task, own in rows.items() for ids in own])
    with pytest.raises(
        ConfigError, match='prompt" must have rows with 3 virtual tokens, as many as its prompt has in this pass, got 0'
    ):
        model(bare)
    full = packed(model, rows)
    with pytest.raises(
        ConfigError, match='lora" must have rows with 0 virtual tokens, as many as its prompt has in this pass, got 3'
    ):
        model(replace(full, virtual_tokens=(3, 3)))


def test_switched_off_prompts_leave_the_backbone_alone() -> None:
    model = mux("prompt", "lora", "prefix").eval()
    with torch.no_grad():
        for form in model.tasks:
            for item in model.task_parameters(form).values():
                item.add_(1.0)
    rows = {form: rows_of(form) for form in model.tasks}
    bare = ChunkPackingCollator()([{"task": task, "input_ids": ids} for task, own in rows.items() for ids in own])
    with model.without_adapters(), torch.no_grad():
        found = model.sequence_logits(bare)
        with pytest.raises(
            ConfigError,
            match='task "prompt" must have rows with 0 virtual tokens, as many as its prompt has in this pass, got 3',
        ):
            model(packed(model, rows))
    backbone = tiny_llama().eval()
    for logits, ids in zip(found, [ids for own in rows.values() for ids in own], strict=True):
        with torch.no_grad():
            torch.testing.assert_close(logits, backbone(input_ids=torch.tensor([ids])).logits[0], rtol=1e-4, atol=1e-5)
    assert all(item.requires_grad for form in model.tasks for item in model.task_parameters(form).values())
    assert model(packed(model, rows)).losses.isfinite().all()


def test_layers_with_other_heads_than_a_prefix_are_refused_by_name() -> None:
    model = mux("prefix")
    attention: Any = model.backbone.model.layers[1].self_attn
    attention.layer_idx = None
    with pytest.raises(UnsupportedModelError, match=r"layer number None, for which a prefix has no keys"):
        model(packed(model, {"prefix": rows_of("prefix")}))
    attention.layer_idx = 1
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(32, 8))
    with pytest.raises(
        UnsupportedModelError,
        match=r"LlamaAttention \(layer 1\) must have the heads of the configuration, 2 of 8 channels, got 1 of 8",
    ):
        model(packed(model, {"prefix": rows_of("prefix")}))


def test_configurations_are_not_written_into() -> None:
    given: dict[str, PeftConfig] = {form: config_of(form) for form in PROMPTS}
    MultiTaskPeftModel(tiny_llama(), given, verify=False)
    assert all(config.to_dict() == config_of(form).to_dict() for form, config in given.items())
