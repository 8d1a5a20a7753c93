"""Mixed batches against plain PEFT: `PeftModel.from_pretrained(base, folder).generate`, one prompt at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftType
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from peft_mux import Completion, DataError, GenerationRequest, MultiTaskPeftModel, SamplingOptions, generate
from tests.adapters.prompts.prompt_cases import PROMPTS, config_of, task_ids
from tests.generation.judge import Judge, held, prompts
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import VOCABULARY, tiny_llama
from tests.modeling.adapters.cases import CASES, each_type
from tests.modeling.adapters.test_kinds import LAYERED
from tests.modeling.backbones import LANGUAGE_MODELS, VISION_LANGUAGE_MODELS, filled
from tests.modeling.backbones import VOCABULARY as SMALL_VOCABULARY

LENGTHS = {"a": (1, 9, 14), "b": (12, 3)}
TOKENS = 12


def by_task(found: list[Completion]) -> dict[str, list[tuple[int, ...]]]:
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for one in found:
        tokens.setdefault(one.task, []).append(one.token_ids)
    return tokens


def check_as_alone(
    found: list[Completion], rows: dict[str, list[list[int]]], judge: Judge, max_new_tokens: int = TOKENS
) -> None:
    """Compare greedy completions of all tasks with those of plain PEFT."""
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens}
    assert by_task(found) == {name: judge.completions(name, own, **settings) for name, own in rows.items()}


def loras(*names: str) -> dict[str, LoraConfig]:
    return {name: LoraConfig(r=2 + 2 * number, target_modules="all-linear") for number, name in enumerate(names)}


def given(seed: int = 0) -> dict[str, list[list[int]]]:
    return {name: prompts(seed + ord(name), lengths, VOCABULARY) for name, lengths in LENGTHS.items()}


@pytest.fixture(scope="module")
def model() -> MultiTaskPeftModel:
    return held(tiny_llama(), loras("a", "b"))


OF_IMAGES_AND_TEXT = {name: (make, ["q_proj"]) for name, make in VISION_LANGUAGE_MODELS.items()}
GENERATING = {**LANGUAGE_MODELS, **OF_IMAGES_AND_TEXT}


FAST = ("Llama", "Gemma3", "DeepseekV3", "Llava")


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in GENERATING]
)
def test_greedy_completions_of_a_mixed_batch_are_those_of_each_adapter_alone(architecture: str, tmp_path: Path) -> None:
    make, targets = GENERATING[architecture]
    backbone = filled(make).eval()
    model = held(backbone, {name: LoraConfig(r=2 + rank, target_modules=targets) for rank, name in enumerate(LENGTHS)})
    rows = {name: prompts(ord(name), lengths, SMALL_VOCABULARY) for name, lengths in LENGTHS.items()}
    found = generate(model, rows, max_new_tokens=TOKENS)
    judge = Judge(backbone, model, tmp_path)
    assert by_task(generate(model, {"b": rows["a"]}, max_new_tokens=TOKENS))["b"] != by_task(found)["a"]
    check_as_alone(found, rows, judge)
    for one in found:
        np.testing.assert_allclose(one.logprobs, judge.logprobs(one), atol=1e-4)


def test_adapters_on_embeddings_and_the_head_generate_side_by_side(tmp_path: Path) -> None:
    configs = {
        "lora": LoraConfig(r=4, target_modules="all-linear"),
        "head": LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
        "words": LoraConfig(r=4, target_modules=["embed_tokens", "v_proj"]),
    }
    model = held(tiny_llama(), configs)
    rows = {name: prompts(len(name), (5, 8), VOCABULARY) for name in configs}
    check_as_alone(generate(model, rows, max_new_tokens=TOKENS), rows, Judge(tiny_llama(), model, tmp_path))


# Greedy rows with and without a penalty: rows of equal settings are drawn together, others must not be.
SAMPLED: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_k": 7},
    {"do_sample": True, "temperature": 1.5, "top_p": 0.8},
    {"do_sample": True, "min_p": 0.2, "repetition_penalty": 1.4},
    {"repetition_penalty": 1.7},
    {"do_sample": True, "eos_token_id": list(range(3, 40))},
]


def test_rows_with_options_and_seeds_of_their_own_draw_what_plain_peft_draws(
    model: MultiTaskPeftModel, tmp_path: Path
) -> None:
    judge, requests, wanted = Judge(tiny_llama(), model, tmp_path), [], []
    for number, settings in enumerate(SAMPLED):
        for task, rows in given(number).items():
            requests += [
                GenerationRequest(
                    task=task, prompt=row, options=SamplingOptions(max_new_tokens=TOKENS, **settings), seed=7 + number
                )
                for row in rows
            ]
            plain = {"do_sample": False, "top_k": 0, **settings}
            seeds = [7 + number] * len(rows)
            wanted += judge.completions(task, rows, seeds=seeds, max_new_tokens=TOKENS, **plain)
    found = generate(model, requests)
    assert [one.token_ids for one in found] == wanted
    assert len(set(wanted)) > len(wanted) // 2
    assert {one.finish_reason for one in found} == {"stop", "length"}
    for one in found:
        np.testing.assert_allclose(one.logprobs, judge.logprobs(one), atol=1e-4)


def test_a_row_is_the_same_alone_in_any_order_and_however_batches_are_cut(model: MultiTaskPeftModel) -> None:
    settings: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "max_new_tokens": TOKENS}
    requests = [
        GenerationRequest(task=task, prompt=row, seed=5 + number)
        for task, rows in given().items()
        for number, row in enumerate(rows)
    ]
    together = generate(model, requests, **settings)
    alone = [one for request in requests for one in generate(model, [request], **settings)]
    backwards = generate(model, requests[::-1], **settings)[::-1]
    small = generate(model, requests, max_batch_tokens=30, **settings)
    for other in (alone, backwards, small):
        assert [one.token_ids for one in other] == [one.token_ids for one in together]
    assert [one.seed for one in together] == [5, 6, 7, 5, 6]


def test_nan_of_one_adapter_ends_its_own_rows_alone() -> None:
    healthy, sick = (held(tiny_llama(), loras("a", "b", "c")) for _ in range(2))
    with torch.no_grad():
        next(iter(sick.task_parameters("b").values())).fill_(float("nan"))
    rows = {**given(), "c": given(9)["a"]}
    settings: dict[str, Any] = {"do_sample": True, "max_new_tokens": TOKENS}
    well, found = (generate(one, rows, **settings) for one in (healthy, sick))
    for one, other in zip(well, found, strict=True):
        if one.task == "b":
            assert (other.finish_reason, other.token_ids, other.logprobs) == ("non_finite", (), ())
        else:
            assert other.token_ids == one.token_ids
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-4)


@pytest.mark.slow
def test_a_model_in_the_middle_of_training_generates_and_trains_on_as_if_it_had_not(tmp_path: Path) -> None:
    tasks = [lab.small_task(name, data_seed=ord(name), lora_dropout=0.2, max_steps=6) for name in "ab"]
    seen: list[tuple[list[Completion], bool]] = []
    rows = given()

    def complete(trainer: Any) -> None:
        trainer.save_model(str(tmp_path / "then"))
        found = generate(trainer.model, rows, max_new_tokens=TOKENS, do_sample=True)
        seen.append((found, trainer.model.training))

    losses = []
    for name, actions in (("plain", {}), ("generating", {3: complete})):
        recorder = lab.Recorder(at_end=actions)
        trainer = lab.make_trainer(tasks, tmp_path / name, recorder=recorder)
        trainer.train()
        losses.append((recorder.losses, recorder.digests))
    assert losses[0] == losses[1]
    ((found, is_training),) = seen
    assert is_training
    saved = MultiTaskPeftModel.from_pretrained(tiny_llama(), tmp_path / "then")
    judge = Judge(tiny_llama(), saved, tmp_path / "judge")
    for name, tokens in by_task(found).items():
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS}
        seeds = [42 + number for number in range(len(rows[name]))]
        assert tokens == judge.completions(name, rows[name], seeds=seeds, **settings)


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> tuple[Any, Any]:
    folder = shared_data / "stories260K"
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


STORIES = {"tim": ["Once upon a time", "Lily"], "tom": ["The big red dog was", "One day, a boy named Tom went to the"]}


@pytest.mark.slow
def test_real_text_is_that_of_each_adapter_alone_and_ends_at_stop_strings(
    stories: tuple[Any, Any], tmp_path: Path
) -> None:
    backbone, tokenizer = stories
    model = held(backbone, loras(*STORIES), scale=0.02)
    judge = Judge(backbone, model, tmp_path)
    found = generate(model, STORIES, processing_class=tokenizer, max_new_tokens=60)
    for one, prompt in zip(found, [row for rows in STORIES.values() for row in rows], strict=True):
        assert list(one.prompt_token_ids) == tokenizer(prompt)["input_ids"]
        assert [one.token_ids] == judge.completions(
            one.task, [one.prompt_token_ids], do_sample=False, max_new_tokens=60
        )
        assert one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert len({one.text for one in found}) == len(found)
    cut = generate(model, STORIES, processing_class=tokenizer, max_new_tokens=60, stop_strings=[".", "never there"])
    for one, whole in zip(cut, found, strict=True):
        assert whole.text is not None
        assert "." in whole.text
        assert one.text == whole.text.partition(".")[0]
        assert one.finish_reason == "stop"
        assert one.token_ids == whole.token_ids[: len(one.token_ids)]
        assert "." in tokenizer.decode(one.token_ids)
        assert "." not in tokenizer.decode(one.token_ids[:-1])


def test_messages_go_through_the_chat_template(stories: tuple[Any, Any]) -> None:
    backbone, tokenizer = stories
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = {"a": [[{"role": "user", "content": "Hi"}]]}
    (found,) = generate(held(backbone, loras("a")), chat, processing_class=tokenizer, max_new_tokens=3)
    assert list(found.prompt_token_ids) == tokenizer("<user> Hi <assistant>", add_special_tokens=False)["input_ids"]


def test_a_configuration_of_transformers_says_the_same_as_its_fields(model: MultiTaskPeftModel) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, max_new_tokens=9, bos_token_id=1)
    found = generate(model, given(), generation_config=config, seed=8)
    assert found == generate(model, given(), do_sample=True, temperature=0.7, top_k=5, max_new_tokens=9, seed=8)
    assert [one.seed for one in found] == [8, 9, 10, 8, 9], "seeds count on within their task"


def test_no_prompts_give_no_completions(model: MultiTaskPeftModel) -> None:
    assert generate(model, {}) == []
    assert generate(model, {"a": []}) == []


@each_type((kind.peft_type for kind in LAYERED), ("LORA", "BOTTLENECK", "IA3", "OFT"))
def test_a_task_of_any_kind_next_to_lora_completes_as_plain_peft_alone(peft_type: PeftType, tmp_path: Path) -> None:
    configs = {"own": CASES[peft_type].make(0), "lora": LoraConfig(r=4, target_modules="all-linear")}
    rows = {name: prompts(len(name), (7, 1, 12), VOCABULARY) for name in configs}
    model = held(tiny_llama(), configs, scale=0.2)
    found = generate(model, rows, max_new_tokens=8)
    check_as_alone(found, rows, Judge(tiny_llama(), model, tmp_path), max_new_tokens=8)


def test_learnt_prompts_of_all_forms_complete_in_one_batch_as_plain_peft_alone(tmp_path: Path) -> None:
    names = [*PROMPTS, "lora"]
    model = held(tiny_llama(), {name: config_of(name) for name in names}, scale=0.1)
    rows = {name: prompts(len(name), (7, 1, 12), VOCABULARY) for name in names}
    found = generate(model, rows, max_new_tokens=6, eos_token_id=96)
    judge = Judge(tiny_llama(), model, tmp_path)
    for name in names:
        plain = judge.plain(name)
        for row, one in zip(rows[name], [one for one in found if one.task == name], strict=True):
            tokens = list(row)
            for token, logprob in zip(one.token_ids, one.logprobs, strict=True):
                with torch.no_grad():
                    logits = plain(input_ids=torch.tensor([tokens]), **task_ids(plain)).logits[0, -1]
                assert int(logits.argmax()) == token, name
                assert float(logits.log_softmax(-1)[token]) == pytest.approx(logprob, abs=1e-4)
                tokens.append(token)


def test_positions_of_a_learnt_prompt_count(tmp_path: Path) -> None:
    model = held(tiny_llama(), {"prefix": config_of("prefix")})
    generate(model, {"prefix": [[3] * 50]}, max_new_tokens=9, eos_token_id=96)
    with pytest.raises(
        DataError,
        match=r"prompts\.prefix row 0 must have at most 59 tokens with its completion.*got 51",
    ):
        generate(model, {"prefix": [[3] * 51]}, max_new_tokens=9)
