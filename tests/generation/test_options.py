"""What may be asked for, and every refusal by name."""

from __future__ import annotations

import copy
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
from peft_mux.generation.held_out_completions import mean_metric
from peft_mux.generation.requests_and_completions import sampling_options
from peft_mux.modeling.sampling import ANSWER_METRICS
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.backbones import CLASSIFIERS

REFUSED: dict[Any, list[tuple[dict[str, Any], str]]] = {
    SamplingOptions: [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer from 1 to 1000000, got 0"),
        ({"temperature": 0.0, "do_sample": True}, "temperature must be a finite number above 0, got 0.0"),
        ({"top_k": -1}, "top_k must be an integer of at least 0, got -1"),
        ({"top_p": 1.5}, "top_p must be a number above 0, at most 1, got 1.5"),
        ({"min_p": "x"}, "min_p must be a number from 0 to 1, got 'x'"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be a finite number above 0, got nan"),
        ({"stop_strings": [""]}, "stop_strings must be texts of at least one character, got ['']"),
        ({"eos_token_id": True}, "eos_token_id must be a token id, a list of them, or None, got True"),
        ({"seed": -1}, "seed must be an integer in [0, 2**63), got -1"),
        ({"do_sample": 1}, "do_sample must be True or False, got 1"),
        ({"temperature": 0.5, "top_k": 3}, "do_sample must be True with settings of sampling, got False with"),
        ({"temprature": 0.5}, 'Did you mean "temperature"?'),
        ({"max_tokens": 9}, "Set max_new_tokens."),
        ({"stop_token_ids": [5, 6]}, "stop_token_ids must be lists of at least one token id, got [5, 6]"),
    ],
    GenerateOptions: [
        ({"metrics": ["exact_matc"]}, 'Did you mean "exact_match"?'),
        ({"metrics": {"f1": 1}}, "metrics must be a list of exact_match, contains, f1, or functions of (prompts,"),
        ({"num_rows": 0}, "num_rows must be an integer of at least 1, or None for all rows, got 0"),
        ({"top_p": 0}, "top_p must be a number above 0, at most 1, got 0"),
        ({"metric": "f1"}, 'Did you mean "metrics"?'),
    ],
    GenerationRequest: [
        ({"task": ["sql"]}, "task must be the name of a task, got ['sql']"),
        ({"options": {"top_k": 3}}, "options must be SamplingOptions(...), or None, got {'top_k': 3}"),
        ({"seed": -1}, "seed must be an integer in [0, 2**63), or None, got -1"),
        ({"sed": 3}, "sed must be one of task, prompt, options, seed, top_logprobs, prompt_logprobs, got 3"),
        ({"top_logprobs": -1}, "top_logprobs must be an integer of at least 0, got -1"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be an integer of at least 0, or None, got True"),
        ({"top_k": 3}, "Write options=SamplingOptions(top_k=...)."),
    ],
}


@pytest.mark.parametrize(
    ("kind", "settings", "said"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_settings_are_refused_by_name_with_what_is_allowed_or_was_meant(
    kind: Any, settings: dict[str, Any], said: str
) -> None:
    needed = {"task": "sql", "prompt": [3]} if kind is GenerationRequest else {}
    with pytest.raises(ConfigError) as caught:
        kind(**{**needed, **settings})
    assert said in str(caught.value)


def test_every_setting_of_transformers_that_means_nothing_here_is_refused() -> None:
    config = GenerationConfig(num_beams=4, no_repeat_ngram_size=2, pad_token_id=0, max_length=9)
    with pytest.raises(ConfigError) as caught:
        sampling_options(config, {"max_new_token": 3})
    said = str(caught.value)
    for part in (
        "num_beams must be one of",
        "no_repeat_ngram_size must be one of",
        "max_length must be one of",
        "got 9",
    ):
        assert part in said
    assert 'Did you mean "max_new_tokens"?' in said
    assert "pad_token_id" not in said
    with pytest.raises(ConfigError, match=r"generation_config must be a SamplingOptions.*got 3"):
        sampling_options(3, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'top_kk .*got 3.*Did you mean "top_k"'):
        sampling_options(SamplingOptions(), {"top_kk": 3})


def test_single_values_stand_for_lists_of_them_and_what_a_backbone_recommends_may_be_passed_on(
    model: MultiTaskPeftModel,
) -> None:
    assert SamplingOptions(stop_strings="x").stop_strings == ("x",)
    assert SamplingOptions(eos_token_id=3).eos_token_ids == (3,)
    assert GenerateOptions(metrics="f1").metric_names == ("eval_f1",)
    assert GenerateOptions(metrics=["f1", lambda *texts: {"own": 1.0}]).metric_names is None
    config = copy.deepcopy(model.backbone.generation_config)
    config.update(do_sample=True, top_k=3)
    found = generate(model, {"sql": [[3]]}, generation_config=config, max_new_tokens=9)
    assert found == generate(model, {"sql": [[3]]}, do_sample=True, top_k=3, max_new_tokens=9)


@pytest.fixture(scope="module")
def model() -> MultiTaskPeftModel:
    return MultiTaskPeftModel(tiny_llama(), {"sql": LoraConfig(r=2)}, verify=False)


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ({"sq": [[3]]}, {}, "prompts must name tasks of sql, got 'sq'"),
        ({"sql": "text"}, {}, "prompts.sql must be a list of prompts, got 'text'"),
        ("text", {}, "prompts must be a dict of prompts by task name, or a list of GenerationRequest, got 'text'"),
        ([[3]], {}, "prompts must be a dict of prompts by task name, or a list of GenerationRequest, got [3] in the"),
        ({"sql": [[3], "text"]}, {"max_new_tokens": 3}, "prompts.sql row 1 column prompt must be token ids, or a"),
        ({"sql": [[3, 97]]}, {}, "prompts.sql row 0 column prompt must be ids from 0 to 96, the backbone's"),
        ({"sql": [[]]}, {}, "prompts.sql row 0 column prompt must be at least one token, got no tokens"),
        ({"sql": [[3] * 60]}, {"max_new_tokens": 5}, "prompts.sql row 0 must have at most 64 tokens with its"),
        ({"sql": [[3]]}, {"stop_strings": ["."]}, "prompts.sql: stop_strings need a tokenizer"),
        ({"sql": [[3]]}, {"max_batch_tokens": 0}, "max_batch_tokens must be an integer of at least 1, got 0"),
    ],
)
def test_prompts_that_cannot_be_completed_are_refused(
    model: MultiTaskPeftModel, prompts: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        generate(model, prompts, **settings)
    assert said in str(caught.value)


def test_models_that_do_not_generate_are_refused() -> None:
    config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["q_proj"])
    model = MultiTaskPeftModel(CLASSIFIERS["Llama"][0](), {"a": config}, verify=False)
    with pytest.raises(UnsupportedModelError, match="generate needs a decoder-only language model"):
        generate(model, {"a": [[3]]})


def test_anything_but_a_whole_model_with_weights_is_refused(model: MultiTaskPeftModel) -> None:
    with pytest.raises(ConfigError, match="model must be a MultiTaskPeftModel, got LlamaForCausalLM"):
        generate(tiny_llama(), {"a": [[3]]})  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = LlamaForCausalLM(tiny_llama().config)
    with pytest.raises(ConfigError, match="generate needs a loaded model, got one without weights"):
        generate(MultiTaskPeftModel(empty, {"a": LoraConfig(r=2)}, verify=False), {"a": [[3]]})
    model.num_stages = 2
    try:
        with pytest.raises(ConfigError, match=r"generate needs a whole backbone"):
            generate(model, {"sql": [[3]]})
    finally:
        model.num_stages = 1


@pytest.mark.parametrize(
    ("completion", "reference", "exact", "inside", "overlap"),
    [
        (" Yes.\n", "yes", 1, 1, 1),
        ("it is  Yes", "yes", 0, 1, 0.5),
        ("-5", "5", 0, 1, 0),
        ("The", "A", 0, 0, 0),
        ("", "", 1, 1, 1),
        ("", "no", 0, 0, 0),
        ("a b b c", "b b d", 0, 0, 4 / 7),
        ("STRASSE", "straße", 1, 1, 1),
    ],
)
def test_answers_are_judged_without_case_space_and_a_full_stop(
    completion: str, reference: str, exact: float, inside: float, overlap: float
) -> None:
    found = [mean_metric(name, [completion], [reference]) for name in ANSWER_METRICS]
    assert found == pytest.approx([exact, inside, overlap])
    assert mean_metric("f1", [completion, "x"], [reference, "y"]) == pytest.approx(overlap / 2)
