"""Passes of prompts of every form together with LoRA: each gets what plain PEFT alone gives it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch, chains_of
from peft_mux.engine.executor import Executor
from peft_mux.errors import ConfigError, UnsupportedModelError
from tests.adapters.prompts import prompt_cases as prompts
from tests.invariants.mux_lab import relative, tiny_llama
from tests.modeling.adapters.passes import Judges, assert_as_plain, assert_nan_stays, gradients_of, judges_of, moved
from tests.modeling.attention.kernel_cases import one_call

ALL = prompts.LANGUAGE.forms
# Positions, windows, soft-caps and scaled embeddings are the backbone's own.
SPEAKING = {name: prompts.speaking(name) for name in ("Qwen3", "Mistral", "Gemma2", "GPT2", "OPT")}


def judges_for(model: MultiTaskPeftModel, case: prompts.Case) -> Judges:
    """Return plain PEFT's models of all forms of a case; the weights of both sides are moved by the same amounts."""
    configs = {form: prompts.config_of(form, case.task_type) for form in case.forms}
    return judges_of(model, configs, {form: len(form) for form in configs}, case.make)


@pytest.mark.parametrize("case", [*prompts.CASES.values(), *SPEAKING.values()], ids=[*prompts.CASES, *SPEAKING])
def test_a_pass_gives_each_prompt_what_plain_peft_alone_gives(case: prompts.Case) -> None:
    rows = {form: prompts.rows_of(form, case.task_type) for form in case.forms}
    model = prompts.mux(*rows, case=case, verify=True)
    judges = judges_for(model, case)
    for judge, _ in judges.values():
        judge.train()
    assert_as_plain(model, prompts.packed(model, rows), judges, rows, loss_of=prompts.prompt_loss)


@pytest.mark.parametrize("case", prompts.CLASSIFYING.values(), ids=prompts.CLASSIFYING)
def test_logits_of_a_stream_and_of_a_view_are_plain_pefts_in_a_padded_batch(case: prompts.Case) -> None:
    model = prompts.mux(*case.forms, case=case).eval()
    for form, (judge, _) in judges_for(model, case).items():
        judge.eval()
        rows = prompts.rows_of(form, case.task_type)
        given = prompts.padded(rows, model.backbone.config.pad_token_id)
        with torch.no_grad():
            wanted = judge(**given, **prompts.task_ids(judge)).logits
            viewed = model.task_view(form)(**given).logits
            streamed = model.sequence_logits(prompts.packed(model, {form: rows}))
        assert torch.equal(viewed, wanted), form
        for row, found, theirs in zip(rows, streamed, wanted, strict=True):
            theirs = theirs[: len(row.ids)] if case.task_type == prompts.TOKEN else theirs
            torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", prompts.PROMPTS)
def test_a_prompt_may_be_the_only_task_and_come_before_or_after_lora(form: str) -> None:
    rows = {name: prompts.rows_of(name) for name in (form, "lora")}
    alone, first, last = prompts.mux(form), prompts.mux(form, "lora"), prompts.mux("lora", form)
    wanted = alone(prompts.packed(alone, {form: rows[form]})).losses[0].item()
    for model in (first, last):
        assert math.isclose(model(prompts.packed(model, rows)).losses[0].item(), wanted, rel_tol=1e-6)
    last.remove_tasks(["lora"])
    assert math.isclose(last(prompts.packed(last, {form: rows[form]})).losses[0].item(), wanted, rel_tol=1e-6)
    first.remove_tasks([form])
    assert not [name for name, _ in first.named_parameters() if "prompt_encoder" in name], "nothing of it is left"
    assert first(prompts.packed(first, {"lora": rows["lora"]})).losses.isfinite().all()


@pytest.mark.parametrize("broken", ["prompt", "mlp", "cpt", "prefix"])
def test_a_prompt_that_is_nan_reaches_no_other_task(broken: str) -> None:
    model = prompts.mux(*ALL)
    assert_nan_stays(model, prompts.packed(model, {form: prompts.rows_of(form) for form in ALL}), broken)


# ------------------------------------------------------------- how rows are laid out


def run_step(model: MultiTaskPeftModel, micro_batches: list[MuxBatch]) -> dict[str, float]:
    losses: dict[str, float] = {}
    for chain in chains_of(micro_batches):
        for micro_batch, found in zip(chain, Executor(model).run_chain(chain), strict=True):
            for name, loss in zip(micro_batch.task_names, found.losses.tolist(), strict=True):
                losses[name] = losses.get(name, 0.0) + loss
    return losses


def whole_step(
    rows: dict[str, list[prompts.Row]], case: prompts.Case = prompts.LANGUAGE
) -> tuple[dict[str, float], MultiTaskPeftModel]:
    model = prompts.mux(*rows, case=case)
    losses = model(prompts.packed(model, rows)).losses
    losses.sum().backward()
    return dict(zip(rows, losses.tolist(), strict=True)), model


def assert_same_step(first: MultiTaskPeftModel, second: MultiTaskPeftModel, tolerance: float) -> None:
    theirs = gradients_of(second)
    for key, gradient in gradients_of(first).items():
        assert relative(gradient, theirs[key]) <= tolerance, key


LONG = {"count": 2, "low": 18, "high": 45}
KINDS_OF_ROWS = ("prompt", "mlp", "cpt", "prefix", "projected", "lora")


@pytest.mark.parametrize(
    ("forms", "case", "lengths", "options"),
    [
        (KINDS_OF_ROWS, prompts.LANGUAGE, LONG, {"split_long_sequences": True}),
        (KINDS_OF_ROWS, SPEAKING["Mistral"], LONG, {"split_long_sequences": True}),
        # A row is cut amid its virtual tokens.
        (
            ("cpt",),
            prompts.LANGUAGE,
            {"count": 2, "low": 9, "high": 10},
            {"split_long_sequences": True, "chunk_size": 4, "max_tokens": 4},
        ),
        (ALL, prompts.LANGUAGE, {}, {"pad_to_chunks": True, "max_tokens": 48}),
    ],
    ids=["long rows in parts", "in parts with a window", "virtual tokens in parts", "padded micro-batches"],
)
def test_how_rows_are_laid_out_changes_nothing(
    forms: tuple[str, ...], case: prompts.Case, lengths: dict[str, int], options: dict[str, Any]
) -> None:
    rows = {form: prompts.rows_of(form, **lengths) for form in forms}
    wanted, whole = whole_step(rows, case)
    model = prompts.mux(*forms, case=case)
    micro_batches = prompts.streams(model, rows, **options)
    assert any(batch.has_more for batch in micro_batches) == ("split_long_sequences" in options)
    assert len(micro_batches) > 2
    assert run_step(model, micro_batches) == pytest.approx(wanted, rel=1e-5)
    assert_same_step(model, whole, 1e-4)


def test_recomputed_activations_read_the_prompts_of_their_pass() -> None:
    rows = {form: prompts.rows_of(form) for form in KINDS_OF_ROWS}
    wanted, whole = whole_step(rows)
    model = prompts.mux(*rows)
    model.gradient_checkpointing_enable()
    # PEFT alone refuses prefixes with checkpointing, whose cache would be written twice.
    model.register_tasks({"late": prompts.config_of("prefix")})
    assert run_step(model.train(), [prompts.packed(model, rows)]) == pytest.approx(wanted, rel=1e-6)
    assert_same_step(whole, model, 1e-6)


def test_attention_dropout_of_a_prefix_draws_by_place_and_key_alone_together_and_in_parts() -> None:
    def model_of(*forms: str) -> MultiTaskPeftModel:
        backbone = tiny_llama()
        modules: list[Any] = list(backbone.modules())
        for module in modules:
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        return prompts.mux(*forms, case=prompts.Case(lambda: backbone)).train()

    rows = {form: prompts.rows_of(form, count=2, low=18, high=45) for form in ("lora", "prefix")}
    alone, both = model_of("prefix"), model_of("lora", "prefix")
    by_itself = alone(prompts.packed(alone, {"prefix": rows["prefix"]})).losses[0].item()
    assert math.isclose(both(prompts.packed(both, rows)).losses[1].item(), by_itself, rel_tol=1e-6)
    in_parts = run_step(both, prompts.streams(both, rows, split_long_sequences=True))
    assert math.isclose(in_parts["prefix"], by_itself, rel_tol=1e-5)
    assert abs(alone.eval()(prompts.packed(alone, {"prefix": rows["prefix"]})).losses[0].item() - by_itself) > 1e-4


@pytest.mark.parametrize("case", [prompts.LANGUAGE, SPEAKING["Mistral"]], ids=["no window", "window"])
def test_a_kernel_for_varying_lengths_gets_the_keys_of_prefixes(
    case: prompts.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {form: prompts.rows_of(form, **LONG) for form in ("prefix", "lora", "projected")}
    wanted, whole = whole_step(rows, case)
    calls = one_call(monkeypatch)
    found, model = whole_step(rows, case)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert_same_step(model, whole, 1e-4)
    lengths = [len(row.ids) for own in rows.values() for row in own]
    keys = [length + extra for length, extra in zip(lengths, (5, 5, 0, 0, 2, 2), strict=True)]
    assert calls[0][:2] == (lengths, keys)


def test_a_kernel_for_varying_lengths_gets_the_keys_of_an_encoders_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {form: prompts.rows_of(form, prompts.SEQ) for form in ("prefix", "lora", "mlp")}
    model = prompts.mux(*rows, case=prompts.CASES["Bert"])
    wanted = model(prompts.packed(model, rows)).losses
    calls = one_call(monkeypatch)
    torch.testing.assert_close(model(prompts.packed(model, rows)).losses, wanted, rtol=1e-5, atol=1e-6)
    lengths = [len(row.ids) + (4 if form == "mlp" else 0) for form, own in rows.items() for row in own]
    keys = [length + (5 if number < 4 else 0) for number, length in enumerate(lengths)]
    assert (*calls[0][:2], calls[0][-1]) == (lengths, keys, (-1, -1)), "every token sees all keys"


def test_in_half_precision_and_under_autocast_a_prompt_stays_near_float32() -> None:
    rows = {form: prompts.rows_of(form) for form in ("prompt", "mlp", "prefix")}
    exact, _ = whole_step(rows)
    halved, _ = whole_step(rows, prompts.Case(lambda: tiny_llama().bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = whole_step(rows)
    assert halved == pytest.approx(exact, rel=2e-2)
    assert rounded == pytest.approx(exact, rel=2e-2)


# ------------------------------------------------------------------- what is refused


def collated(rows: dict[str, list[prompts.Row]], **options: Any) -> MuxBatch:
    given = [{"task": task, "input_ids": row.ids} for task, own in rows.items() for row in own]
    return ChunkPackingCollator(**options)(given)


def test_rows_without_the_virtual_tokens_of_their_task_are_refused_by_name() -> None:
    model = prompts.mux("prompt", "lora")
    rows = {form: prompts.rows_of(form) for form in ("prompt", "lora")}
    full = replace(prompts.packed(model, rows), virtual_tokens=(3, 3))
    for batch, said in (
        (collated(rows), 'prompt" must have rows with 3 virtual tokens, as many as its prompt has in this pass, got 0'),
        (full, 'lora" must have rows with 0 virtual tokens, as many as its prompt has in this pass, got 3'),
    ):
        with pytest.raises(ConfigError, match=said):
            model(batch)


def test_switched_off_prompts_leave_the_backbone_alone() -> None:
    model = moved(prompts.mux("prompt", "lora", "prefix")).eval()
    rows = {form: prompts.rows_of(form) for form in model.tasks}
    with model.disable_adapter(), torch.no_grad():
        found = model.sequence_logits(collated(rows))
        with pytest.raises(ConfigError, match='task "prompt" must have rows with 0 virtual tokens'):
            model(prompts.packed(model, rows))
    backbone = tiny_llama().eval()
    for logits, row in zip(found, [row for own in rows.values() for row in own], strict=True):
        with torch.no_grad():
            wanted = backbone(input_ids=torch.tensor([row.ids])).logits[0]
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    assert all(item.requires_grad for form in model.tasks for item in model.task_parameters(form).values())


def test_layers_with_other_heads_than_a_prefix_are_refused_by_name() -> None:
    model = prompts.mux("prefix")
    attention: Any = model.backbone.model.layers[1].self_attn
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(32, 8))
    said = r"LlamaAttention \(layer 1\) must have the heads of the configuration, 2 of 8 channels, got 1 of 8"
    with pytest.raises(UnsupportedModelError, match=said):
        model(prompts.packed(model, {"prefix": prompts.rows_of("prefix")}))


def test_removed_and_switched_off_prompts_leave_the_heads_of_others_alone() -> None:
    model = prompts.mux("lora", "prompt", "prefix", case=prompts.CASES["Bert"]).eval()
    rows = prompts.rows_of("lora", prompts.SEQ)
    given = prompts.padded(rows, 0)
    moved(model)
    wanted = model.task_view("lora")(**given).logits
    with model.disable_adapter():
        assert torch.equal(model(**given).logits, prompts.CASES["Bert"].make().eval()(**given).logits)
    model.select_adapter(model.adapter_of("lora"))
    model.remove_tasks(["prompt"])
    assert torch.equal(model(**given).logits, wanted), "the head of the active adapter"
    model.remove_tasks(["prefix"])
    assert torch.equal(model.task_view("lora")(**given).logits, wanted)
    assert [key for key, _ in model.named_parameters() if "modules_to_save" in key and "t000001" not in key] == []
    (logits,) = model.sequence_logits(prompts.packed(model, {"lora": rows[:1]}))
    torch.testing.assert_close(logits, wanted[0], rtol=1e-4, atol=1e-5)
