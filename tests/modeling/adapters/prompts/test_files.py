"""Prompts as files: plain PEFT loads what is written here, and what it writes itself where that can be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import (
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    PeftModel,
    PromptTuningConfig,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peft_mux import MultiTaskPeftModel
from peft_mux.errors import CheckpointError, ConfigError
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.passes import assert_same_tensors, moved, perturbed, plain
from tests.modeling.adapters.prompts import prompt_cases as prompts

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[MultiTaskPeftModel, Path]:
    """Return a model of all forms, and the folder that it was saved in."""
    folder = tmp_path_factory.mktemp("prompts")
    model = moved(prompts.mux(*prompts.LANGUAGE.forms))
    encoder: Any = model.prompt_encoder[model.adapter_of("cartridge")]
    perturbed({"frozen": encoder.frozen_embedding}, 0)
    model.eval().save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("form", prompts.PROMPTS)
def test_plain_peft_loads_a_saved_prompt_and_answers_as_its_view_does(
    form: str, saved: tuple[MultiTaskPeftModel, Path]
) -> None:
    model, folder = saved
    judge: Any = PeftModel.from_pretrained(tiny_llama(), str(folder / form)).eval()
    ids = prompts.task_ids(judge)
    with torch.no_grad():
        wanted = judge(input_ids=IDS, **ids).logits
        assert torch.equal(model.task_view(form)(input_ids=IDS).logits, wanted)
        (logits,) = model.sequence_logits(prompts.packed(model, {form: [prompts.Row(IDS[0].tolist())]}))
    # Of virtual tokens there are no logits.
    assert logits.shape == (5, 97)
    torch.testing.assert_close(logits, wanted[0, -5:], rtol=1e-4, atol=1e-5)
    settings: Any = {"max_new_tokens": 5, "do_sample": False}
    written = judge.generate(input_ids=IDS, **settings, **ids)
    assert torch.equal(model.task_view(form).generate(input_ids=IDS, **settings), written)
    assert torch.equal(model.task_view(form).generate(IDS, **settings), written)


def test_views_of_prompts_leave_the_model_as_it_was(saved: tuple[MultiTaskPeftModel, Path]) -> None:
    model, _ = saved
    batch = prompts.packed(model, {form: [prompts.Row(IDS[0].tolist())] for form in ("prefix", "lora")})
    before = model(batch).losses
    names = [name for name, _ in model.named_parameters()]
    for form in ("prompt", "lora", "prefix"):
        model.task_view(form)(input_ids=IDS)
        model.task_view(form).generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
    assert torch.equal(model(batch).losses, before)
    assert [name for name, _ in model.named_parameters()] == names
    assert not [name for name in model.state_dict() if not name.startswith(("base_model.", "prompt_encoder."))]
    wanted = model.task_view("prefix")(input_ids=IDS).logits
    model.select_adapter(model.adapter_of("prefix"))
    assert torch.equal(model(input_ids=IDS).logits, wanted), "a plain forward is that of the active adapter"
    written = model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(written, model.task_view("prefix").generate(IDS, max_new_tokens=3, do_sample=False))
    with model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, tiny_llama().eval()(input_ids=IDS).logits)
    model.mark_trainable()
    with pytest.raises(
        ConfigError, match="merge needs an adapter that changes weights, got PROMPT_TUNING, which changes none"
    ):
        model.task_view("prompt").merge_and_unload()
    assert torch.equal(model(batch).losses, before)


@pytest.mark.parametrize("form", prompts.PROMPTS)
def test_a_file_holds_plain_pefts_tensors_and_the_one_next_to_it_what_is_needed_to_train_on(
    form: str, saved: tuple[MultiTaskPeftModel, Path]
) -> None:
    model, folder = saved
    judge, own = plain(prompts.config_of(form), 42)
    judge.prompt_encoder["default"].load_state_dict(model.prompt_encoder[model.adapter_of(form)].state_dict())
    wanted = get_peft_model_state_dict(judge)
    found = load_file(folder / form / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    beside = folder / form / "prompt_encoder.safetensors"
    assert beside.exists() == (form in prompts.ENCODED)
    assert form not in prompts.ENCODED or load_file(beside).keys() == own.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)


def test_a_model_comes_back_with_all_that_is_trained(saved: tuple[MultiTaskPeftModel, Path]) -> None:
    model, folder = saved
    again = MultiTaskPeftModel.from_pretrained(tiny_llama(), folder, verify=False)
    for form in model.tasks:
        assert_same_tensors(again.task_parameters(form), model.task_parameters(form), form)
    sink = "frozen_embedding"
    ours, other = (each.prompt_encoder[each.adapter_of("cartridge")] for each in (model, again))
    assert torch.equal(getattr(ours, sink), getattr(other, sink)), "the frozen keys of a cartridge come from its file"
    assert not getattr(other, sink).requires_grad


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *((prompts.LANGUAGE, form) for form in prompts.PROMPTS),
        *((prompts.CASES["Bert"], form) for form in prompts.TOKENS + prompts.KEYS),
    ],
)
def test_a_prompt_of_plain_peft_is_trained_on_where_its_file_holds_it(
    case: prompts.Case, form: str, tmp_path: Path
) -> None:
    judge, own = plain(prompts.config_of(form, case.task_type), 5, case.make)
    perturbed(own, 0)
    judge.save_pretrained(tmp_path / form)
    if form in prompts.ENCODED:
        with pytest.raises(
            CheckpointError,
            match=r'task "\w+": .*, got only its output \(prompt_embeddings\), which is all that PEFT saves',
        ):
            MultiTaskPeftModel.from_pretrained(case.make(), tmp_path, verify=False)
        return
    model = MultiTaskPeftModel.from_pretrained(case.make(), tmp_path, verify=False)
    assert_same_tensors(model.task_parameters(form), own)


def test_words_of_a_text_are_where_a_prompt_begins(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(20)}
    plain_tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=plain_tokenizer).save_pretrained(tmp_path)
    config = PromptTuningConfig(
        task_type=prompts.LM,
        num_virtual_tokens=5,
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text="w7 w3",
        tokenizer_name_or_path=str(tmp_path),
    )
    backbone = tiny_llama()
    model = MultiTaskPeftModel(backbone, {"a": config}, verify=False)
    (weight,) = model.task_parameters("a").values()
    assert torch.equal(weight, backbone.get_input_embeddings()(torch.tensor([7, 3, 7, 3, 7])))
    _, own = plain(config, 42)
    assert torch.equal(weight, next(iter(own.values())))


@pytest.mark.parametrize("case", prompts.CLASSIFYING.values(), ids=prompts.CLASSIFYING)
def test_plain_peft_loads_a_saved_classifier_and_holds_the_same_keys(case: prompts.Case, tmp_path: Path) -> None:
    base, forms = tmp_path / "base", case.forms
    case.make().save_pretrained(base)
    auto, auto_peft = {
        prompts.SEQ: (tf.AutoModelForSequenceClassification, AutoPeftModelForSequenceClassification),
        prompts.TOKEN: (tf.AutoModelForTokenClassification, AutoPeftModelForTokenClassification),
    }[case.task_type]
    configs = {form: prompts.config_of(form, case.task_type) for form in forms}
    model = moved(MultiTaskPeftModel(auto.from_pretrained(base), configs, verify=False)).eval()
    model.save_pretrained(tmp_path / "saved")
    for form in forms:
        folder = tmp_path / "saved" / form
        peft_model, _ = plain(prompts.config_of(form, case.task_type), 42, case.make)
        assert load_file(folder / "adapter_model.safetensors").keys() == get_peft_model_state_dict(peft_model).keys()
        assert (folder / "prompt_encoder.safetensors").exists() == (form in prompts.ENCODED)
        given = prompts.padded(prompts.rows_of(form, case.task_type), model.backbone.config.pad_token_id)
        viewed = model.task_view(form)(**given).logits
        loaded: Any
        for loaded in (PeftModel.from_pretrained(case.make(), str(folder)), auto_peft.from_pretrained(str(folder))):
            # What PEFT saves of an encoder was computed from one row, that of the view from several; LoRA's B lies
            # transposed here, which may round a last bit.
            tolerance = 1e-4 if form in prompts.ENCODED else 1e-6 if form == "lora" else 0.0
            wanted = loaded.eval()(**given, **prompts.task_ids(loaded)).logits
            torch.testing.assert_close(viewed, wanted, rtol=tolerance, atol=tolerance)
    again = MultiTaskPeftModel.from_pretrained(auto.from_pretrained(base), tmp_path / "saved", verify=False)
    for form in forms:
        assert_same_tensors(again.task_parameters(form), model.task_parameters(form), form)
