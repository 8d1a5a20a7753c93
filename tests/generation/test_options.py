"""What may be asked for, and every refusal by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GenerationConfig, LlamaForCausalLM

from peft_mux import (
    ConfigError,
    DataError,
    GenerateOptions,
    GenerationRequest,
    MultiTaskPeftModel,
    SamplingOptions,
    UnsupportedModelError,
    generate,
)
from peft_mux.modeling.generation.options import sampling_options
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.test_architectures import CLASSIFIERS, LANGUAGE_MODELS, filled


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: got 0; allowed: an integer from 1"),
        ({"temperature": 0.0, "do_sample": True}, "temperature: got 0.0; allowed: a finite number above 0"),
        ({"temperature": 10**400, "do_sample": True}, "allowed: a finite number above 0"),
        ({"top_k": -1}, "top_k: got -1"),
        ({"top_p": 1.5}, "top_p: got 1.5; allowed: a number above 0, at most 1"),
        ({"min_p": "x"}, "min_p: got 'x'"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: got nan"),
        ({"stop_strings": [""]}, "stop_strings: got "),
        ({"stop_strings": 3}, "stop_strings: got 3"),
        ({"eos_token_id": []}, "eos_token_id: got "),
        ({"eos_token_id": True}, "eos_token_id: got True"),
        ({"seed": -1}, "seed: got -1"),
        ({"do_sample": 1}, "do_sample: got 1"),
        ({"temperature": 0.5, "top_k": 3}, "do_sample: got False beside temperature=0.5, top_k=3; allowed: True"),
    ],
)
def test_options_that_cannot_be_used_or_would_be_ignored_are_refused_by_name(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingOptions(**settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metrics": ["exact_matc"]}, 'Did you mean "exact_match"?'),
        ({"metrics": [3]}, "metrics: got 3; allowed: exact_match, contains, f1, or functions"),
        ({"metrics": {"f1": 1}}, "metrics: got {'f1': 1}"),
        ({"num_rows": 0}, "num_rows: got 0"),
        ({"num_logged": -1}, "num_logged: got -1"),
        ({"top_p": 0}, "top_p: got 0"),
    ],
)
def test_options_of_evaluations_are_refused_by_name(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateOptions(**settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (SamplingOptions, {"temprature": 0.5}, "temprature: got 0.5; allowed: settings of max_new_tokens, "),
        (SamplingOptions, {"temprature": 0.5}, 'Did you mean "temperature"?'),
        (SamplingOptions, {"max_length": 9}, "max_length: got 9;"),
        (SamplingOptions, {"max_tokens": 9}, "Set max_new_tokens."),
        (GenerateOptions, {"metric": "f1"}, "metric: got 'f1'; allowed: settings of max_new_tokens, "),
        (GenerateOptions, {"metric": "f1"}, 'Did you mean "metrics"?'),
        (GenerationRequest, {"sed": 3}, "sed: got 3; allowed: settings of task, prompt"),
        (GenerationRequest, {"top_k": 3}, "Write options=SamplingOptions(top_k=...)."),
    ],
)
def test_settings_that_there_are_not_are_refused_with_what_was_meant(kind: Any, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    assert said in str(caught.value)


def test_options_travel_and_are_replaced_as_they_are() -> None:
    options = GenerateOptions(max_new_tokens=3, metrics="f1")
    assert pickle.loads(pickle.dumps(options)) == copy.copy(options) == options
    assert replace(options, num_rows=2).num_rows == 2


def test_single_values_stand_for_lists_of_them() -> None:
    assert SamplingOptions(stop_strings="x").stop_strings == ("x",)
    assert SamplingOptions(eos_token_id=3).eos_token_ids == (3,)
    assert GenerateOptions(metrics="f1").metric_names == ("eval_f1",)
    assert GenerateOptions(metrics=["f1", lambda *texts: {"own": 1.0}]).metric_names is None


def test_every_setting_of_transformers_that_means_nothing_here_is_refused() -> None:
    config = GenerationConfig(num_beams=4, no_repeat_ngram_size=2, pad_token_id=0, max_length=9)
    with pytest.raises(ConfigError) as caught:
        sampling_options(config, {"max_new_token": 3})
    said = str(caught.value)
    for part in ("num_beams: got 4", "no_repeat_ngram_size: got 2", "max_length: got 9", "Set max_new_tokens"):
        assert part in said
    assert 'Did you mean "max_new_tokens"?' in said
    assert "pad_token_id" not in said
    with pytest.raises(ConfigError, match="generation_config: got 3; allowed: a SamplingOptions"):
        sampling_options(3, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'top_kk: got 3.*Did you mean "top_k"'):
        sampling_options(SamplingOptions(), {"top_kk": 3})


@pytest.fixture(scope="module")
def model() -> MultiTaskPeftModel:
    return MultiTaskPeftModel(tiny_llama(), {"sql": LoraConfig(r=2)}, verify=False)


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ({"sq": [[3]]}, {}, "got task 'sq'; allowed: sql. Did you mean \"sql\"?"),
        ({"sql": "text"}, {}, "prompts.sql: got 'text'; allowed: a list of prompts. Put it into a list."),
        ("text", {}, "prompts: got 'text'; allowed: a dict of prompts by task name"),
        ([[3]], {}, "prompts: got [3] in the list; allowed: a dict"),
        ({"sql": [[3], "text"]}, {"max_new_tokens": 3}, "prompts.sql row 1 column prompt: got text without"),
        ({"sql": [[3, 97]]}, {}, "prompts.sql row 0 column prompt: got token id 97; allowed: ids from 0 to 96"),
        ({"sql": [[]]}, {}, "prompts.sql row 0 column prompt: got no tokens"),
        ({"sql": [[3] * 60]}, {"max_new_tokens": 5}, "got 60 tokens with max_new_tokens=5; allowed: 64 together"),
        ({"sql": [[3]]}, {"stop_strings": ["."]}, "prompts.sql: got stop_strings without a tokenizer"),
        ({"sql": [[3]]}, {"max_batch_tokens": 0}, "max_batch_tokens: got 0"),
        ({"sql": [[3]]}, {"num_beams": 2}, "num_beams: got 2"),
    ],
)
def test_prompts_that_cannot_be_completed_are_refused(
    model: MultiTaskPeftModel, prompts: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        generate(model, prompts, **settings)
    assert said in str(caught.value)


def test_a_row_at_the_limit_of_positions_is_completed(model: MultiTaskPeftModel) -> None:
    (found,) = generate(model, {"sql": [[3] * 60]}, max_new_tokens=4, eos_token_id=96)
    assert len(found.token_ids) == 4


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_models_that_do_not_generate_are_refused(architecture: str) -> None:
    make, targets = CLASSIFIERS[architecture]
    config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=targets)
    model = MultiTaskPeftModel(filled(make), {"a": config}, verify=False)
    with pytest.raises(UnsupportedModelError, match="allowed: decoder-only language models"):
        generate(model, {"a": [[3]]})


def test_anything_but_a_whole_model_with_weights_is_refused(model: MultiTaskPeftModel) -> None:
    with pytest.raises(ConfigError, match="model: got LlamaForCausalLM; allowed: a MultiTaskPeftModel"):
        generate(tiny_llama(), {"a": [[3]]})  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = LlamaForCausalLM(tiny_llama().config)
    with pytest.raises(ConfigError, match="got a model without weights"):
        generate(MultiTaskPeftModel(empty, {"a": LoraConfig(r=2)}, verify=False), {"a": [[3]]})
    model.num_stages = 2
    try:
        with pytest.raises(ConfigError, match="generate: got a backbone that is divided among processes"):
            generate(model, {"sql": [[3]]})
    finally:
        model.num_stages = 1


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Gemma2"])
def test_what_the_makers_of_a_backbone_recommend_is_taken(architecture: str) -> None:
    make, targets = LANGUAGE_MODELS[architecture]
    model = MultiTaskPeftModel(filled(make), {"sql": LoraConfig(r=2, target_modules=targets)}, verify=False)
    model.backbone.generation_config.update(do_sample=True, top_k=3)
    found = generate(model, {"sql": [[3]]}, generation_config=model.backbone.generation_config, max_new_tokens=9)
    assert found == generate(model, {"sql": [[3]]}, do_sample=True, top_k=3, max_new_tokens=9)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": ["sql"]}, "task: got ['sql']; allowed: the name of a task"),
        ({"options": {"top_k": 3}}, "options: got {'top_k': 3}; allowed: SamplingOptions(...), or None"),
        ({"seed": -1}, "seed: got -1; allowed: an integer in [0, 2**63), or None"),
        ({"seed": True}, "seed: got True"),
    ],
)
def test_fields_of_a_request_are_refused_by_name(fields: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerationRequest(**{"task": "sql", "prompt": [3], **fields})
    assert said in str(caught.value)


def test_a_request_says_what_is_wrong_with_it(model: MultiTaskPeftModel) -> None:
    with pytest.raises(ConfigError, match="prompts: got 3 in the list"):
        generate(model, [GenerationRequest(task="sql", prompt=[3]), 3])  # type: ignore[list-item]
