"""Prompts as files: plain PEFT loads what is written here, and what it writes itself where that can be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    PromptTuningConfig,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peft_mux import MultiTaskPeftModel
from peft_mux.errors import CheckpointError, ConfigError
from tests.adapters.prompts import prompt_cases as prompts
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.passes import assert_same_tensors, moved, perturbed, plain

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def test_views_of_prompts_leave_the_model_as_it_was() -> None:
    model = moved(prompts.mux("prompt", "prefix", "lora")).eval()
    batch = prompts.packed(model, {form: [prompts.Row(IDS[0].tolist())] for form in ("prefix", "lora")})
    before = model(batch).losses
    names = [name for name, _ in model.named_parameters()]
    for form in ("prompt", "lora", "prefix"):
        model.task_view(form)(input_ids=IDS)
        model.task_view(form).generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
    assert [name for name, _ in model.named_parameters()] == names
    wanted = model.task_view("prefix")(input_ids=IDS).logits
    model.select_adapter(model.adapter_of("prefix"))
    assert torch.equal(model(input_ids=IDS).logits, wanted), "a plain forward is that of the active adapter"
    with model.disable_adapter():
        model.select_adapter(model.adapter_of("lora"))
        with model.disable_adapter():
            pass
        assert torch.equal(model(input_ids=IDS).logits, tiny_llama().eval()(input_ids=IDS).logits)
    model.registry.mark_trainable()
    with pytest.raises(ConfigError, match="merge needs an adapter that changes weights, got PROMPT_TUNING, which"):
        model.task_view("prompt").merge_and_unload()
    assert torch.equal(model(batch).losses, before)


def test_the_frozen_keys_of_a_cartridge_come_from_its_file(tmp_path: Path) -> None:
    model = prompts.mux("cartridge")
    encoder: Any = model.prompt_encoder[model.adapter_of("cartridge")]
    perturbed({"frozen": encoder.frozen_embedding}, 0)
    model.save_pretrained(tmp_path)
    again = MultiTaskPeftModel.from_pretrained(tiny_llama(), tmp_path, verify=False)
    found: Any = again.prompt_encoder[again.adapter_of("cartridge")]
    assert torch.equal(found.frozen_embedding, encoder.frozen_embedding)
    assert not found.frozen_embedding.requires_grad


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *((prompts.LANGUAGE, form) for form in prompts.PROMPTS),
        *((prompts.CASES["Bert"], form) for form in ("prompt", "mlp", "cartridge")),
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
