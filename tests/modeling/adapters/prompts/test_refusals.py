"""What prompts are not trained with is refused by name before anything is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import CPTConfig, PeftConfig, PeftType, TaskType
from peft.utils.constants import TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.engine.cuda_graphs import reason_against
from peft_mux.engine.layout import ParallelLayout
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.kind import KINDS, kind_of, kind_of_parameter
from peft_mux.modeling.adapters.prompts.kinds import PromptKind
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.passes import perturbed, plain
from tests.modeling.adapters.prompts import prompt_cases as prompts
from tests.modeling.backbones import NO_BERT_DROPOUT, classifier_of, filled


def refusal(config: PeftConfig, backbone: Any = None) -> str:
    backbone = backbone or lab.tiny_llama()
    before = [name for name, _ in backbone.named_modules()]
    with pytest.raises(ConfigError) as caught:
        MultiTaskPeftModel(backbone, {"a": config}, verify=False)
    assert [name for name, _ in backbone.named_modules()] == before, "the backbone was touched"
    return str(caught.value)


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no tokens": ("prompt", {"num_virtual_tokens": 0}, r"num_virtual_tokens must be an integer of at least 1.*got 0"),
    "no number": ("prefix", {"num_virtual_tokens": None}, r"num_virtual_tokens must be an integer of.*got None"),
    "another width": ("prompt", {"token_dim": 48}, r"token_dim must be 32 or None, because the backbone is a.*got 48"),
    "another width of keys": ("prefix", {"token_dim": 32}, r"token_dim must be 16 or None.*got 32"),
    "other heads": ("cartridge", {"num_attention_heads": 4}, r"num_attention_heads must be 2 or None.*got 4"),
    "other layers": ("prefix", {"num_layers": 1}, r"num_layers must be 2 or None.*got 1"),
    "two submodules": ("prompt", {"num_transformer_submodules": 2}, r"num_transformer_submodules must be 1 or.*got 2"),
    "copies": ("prompt", {"modules_to_save": ["lm_head"]}, r"modules_to_save must be its default.*got \['lm_head'\]"),
    "no task type": ("mlp", {"task_type": None}, r"task_type must be CAUSAL_LM or SEQ_CLS for P_TUNING.*got None"),
    "a classifier of words": (
        "prefix",
        {"task_type": TaskType.SEQ_CLS},
        r"task_type must be CAUSAL_LM or None, because the backbone is a LlamaForCausalLM.*got SEQ_CLS",
    ),
    "a classifier by examples": (
        "cpt",
        {"task_type": TaskType.SEQ_CLS},
        r"task_type must be CAUSAL_LM for.*got SEQ_CLS",
    ),
    "a tagger": (
        "prompt",
        {"task_type": TaskType.TOKEN_CLS},
        r"task_type .*got TOKEN_CLS.*PEFT fails on the logits of virtual tokens",
    ),
    "dropout": ("lstm", {"encoder_dropout": 0.1}, r"encoder_dropout must be 0.0.*got 0.1.*.*that all tasks share"),
    "ignored dropout": ("mlp", {"encoder_dropout": 0.1}, r"encoder_dropout .*got 0.1.*PEFT ignores it"),
    "ignored layers": ("mlp", {"encoder_num_layers": 3}, r"encoder_num_layers must be 2.*got 3 with an MLP"),
    "another network": (
        "mlp",
        {"encoder_reparameterization_type": "GRU"},
        r"encoder_reparameterization_type must be MLP or LSTM.*got 'GRU'",
    ),
    "several tasks": ("multitask", {"num_tasks": 3}, r"num_tasks must be 1.*got 3.*Rows have no task_ids"),
    "frozen": ("cartridge", {"num_frozen_tokens": 4}, r"num_frozen_tokens must be less than num_virtual.*got 4"),
    "zeros": ("prefix", {"init_weights": "ones"}, r"init_weights must be 'zero' or None.*got 'ones'"),
    "weights of tokens": (
        "cpt",
        {"opt_weighted_loss_type": "decay", "opt_loss_decay_factor": 0.9},
        r"opt_weighted_loss_type .*got 'decay' by 0.9.*tokens of a row have no weights",
    ),
    "negative noise": (
        "cpt",
        {"opt_projection_epsilon": -0.1},
        r"opt_projection_epsilon must be a finite number of at least 0.*got -0.1",
    ),
    "masked rows": ("cpt", {"cpt_tokens_type_mask": [1] * 8}, r"cpt_tokens_type_mask .*got 1 as the highest type"),
    "beyond the vocabulary": ("cpt", {"cpt_token_ids": [99] * 8}, r"cpt_token_ids must be ids below 97.*got 99"),
    "uneven": ("cpt", {"cpt_mask": [1]}, r"cpt_mask must be 8 entries, one for each of num_virtual_tokens, got 1"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_field_that_cannot_be_trained_is_refused_by_name(case: str) -> None:
    form, settings, message = FAULTS[case]
    config = prompts.config_of(form)
    for name, value in settings.items():
        setattr(config, name, value)
    said = refusal(config)
    assert re.search(rf"tasks\.a\.peft_config\.{message}", said), said


@pytest.mark.parametrize("form", ["mlp", "lstm", "multitask", "cpt", "projected", "cartridge"])
def test_any_value_in_any_field_is_trained_with_or_refused_by_name(form: str) -> None:
    base = lab.tiny_llama()
    for field in fields(prompts.config_of(form)):  # type: ignore[arg-type]
        for value in (object(), "x", -1, 2.5, [], {"a": 1}, True, float("nan")):
            config = prompts.config_of(form)
            setattr(config, field.name, value)
            said = ""
            try:
                MultiTaskPeftModel(base, {"a": config}, verify=False).unload()
            except ConfigError as error:
                said = str(error)
            assert not said or "tasks.a.peft_config" in said, f"{field.name}={value!r}: {said}"


def test_a_context_of_odd_types_is_weighed_as_peft_does() -> None:
    config = CPTConfig(
        task_type=prompts.LM, cpt_token_ids=[5, 6, 7], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[0, 4, 8]
    )
    kind = kind_of(config)
    assert isinstance(kind, PromptKind)
    assert kind.virtual_labels(config) == (-100, 6, 7)


def test_backbones_whose_keys_peft_lays_out_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING, "llama", lambda keys: keys)
    assert (
        "tasks.a.peft_config must be used with backbones whose layers all have the same heads, got PREFIX_TUNING on a "
        "LlamaForCausalLM with its own layout of keys"
    ) in refusal(prompts.config_of("prefix"))


def test_backbones_with_uneven_heads_are_refused() -> None:
    uneven = lab.tiny_llama()
    uneven.config.num_kv_shared_layers = 1
    said = refusal(prompts.config_of("prefix"), uneven)
    assert (
        "tasks.a.peft_config must be used with backbones whose layers all have the same heads, got PREFIX_TUNING on a "
        "LlamaForCausalLM with num_kv_shared_layers"
    ) in said


@pytest.mark.parametrize("form", prompts.PROMPTS)
def test_every_prompt_owns_its_parameters_and_refuses_layouts_that_cut_the_model(form: str) -> None:
    config = prompts.config_of(form)
    kind = kind_of(config)
    judge, own = plain(config, 0)
    frozen = [name for name, item in judge.named_parameters() if not item.requires_grad]
    assert all(kind.owns(name) for name in own)
    assert not [name for name in frozen if kind.owns(name) and "prompt_encoder.default" not in name]
    assert all(isinstance(kind_of_parameter(name), PromptKind) for name in own)
    shapes = {name: tuple(item.shape) for name, item in own.items()}
    loads = kind.loads(shapes, {})
    assert sum(load.rank * load.width for load in loads) == sum(item.numel() for item in own.values())
    assert kind.refusals(ParallelLayout.of(2), "tasks.a") == []
    for layout in (ParallelLayout.of(2, tp=2), ParallelLayout.of(2, pp=2)):
        (fault,) = kind.refusals(layout, "tasks.a")
        assert fault.where == "tasks.a.peft_config"
        assert kind.title in fault.got


def test_all_types_of_prompts_are_kinds() -> None:
    wanted = {"PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "PREFIX_TUNING", "CARTRIDGE"}
    assert {kind.peft_type for kind in KINDS.values() if isinstance(kind, PromptKind)} == set(map(PeftType, wanted))


def test_sharded_weights_are_refused_at_construction_and_graphs_say_why_not(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"tasks\.prompt\.peft_config must be a PEFT type that adapts layers, got PROMPT_TUNING with",
    ):
        lab.make_trainer([prompts.task_of("prompt"), prompts.task_of("lora")], tmp_path, shard_backbone=True)
    for form in ("prompt", "prefix"):
        model = MultiTaskPeftModel(
            lab.tiny_llama(), {"lora": prompts.config_of("lora"), "a": prompts.config_of(form)}, verify=False
        )
        assert reason_against(model) == "a task's prompt stands before each of its sequences"


def test_a_loss_that_compares_with_the_backbone_wants_rows_that_bring_the_reference() -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(
        ConfigError,
        match=r"tasks\.a\.objective must be a loss without a reference with.*got dpo.*ref_chosen_logps",
    ):
        Task(name="a", peft_config=prompts.config_of("prompt"), train_dataset=rows)
    brought = [{**row, "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0} for row in rows]
    assert Task(name="a", peft_config=prompts.config_of("prompt"), train_dataset=brought).train_dataset is brought
    assert (
        Task(name="a", peft_config=prompts.config_of("prompt"), train_dataset=rows, objective="orpo").objective
        == "orpo"
    )


# ------------------------------------------------- classifiers that PEFT cannot train


@pytest.mark.parametrize("form", prompts.TOKENS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_virtual_tokens_before_a_decoder_are_refused_as_plain_peft_classifies_by_padding(name: str, form: str) -> None:
    make = prompts.CASES[name].make
    said = refusal(prompts.config_of(form, prompts.SEQ), make())
    assert said.startswith("tasks.a.peft_config must be ")
    assert f", got {prompts.config_of(form, prompts.SEQ).peft_type.value} on a {name}ForSequenceClassif" in said
    assert "it would classify by padding" in said
    peft_model, own = plain(prompts.config_of(form, prompts.SEQ), 0, make)
    peft_model.eval()
    perturbed(own, 0)
    rows = [prompts.Row([5, 6, 7, 8, 9, 10], 0), prompts.Row([11, 12], 1)]
    with torch.no_grad():
        alone = peft_model(input_ids=torch.tensor([rows[1].ids]), **prompts.task_ids(peft_model)).logits[0]
        for side in ("right", "left"):
            together = peft_model(**prompts.padded(rows, 0, side), **prompts.task_ids(peft_model)).logits[1]
            assert lab.relative(together, alone) > 1e-3, f"{side}: PEFT can train it"


@pytest.mark.parametrize("form", prompts.TOKENS)
@pytest.mark.parametrize("name", ["Llama, tokens", "GPT2, tokens", "Bert, tokens"])
def test_virtual_tokens_before_a_tagger_are_refused_as_plain_peft_fails(name: str, form: str) -> None:
    make = prompts.CASES[name].make
    assert "PEFT fails on the logits of virtual tokens" in refusal(prompts.config_of(form, prompts.TOKEN), make())
    peft_model, _ = plain(prompts.config_of(form, prompts.TOKEN), 0, make)
    with pytest.raises(ValueError, match="batch_size"):
        prompts.prompt_loss(peft_model, prompts.rows_of(form, prompts.TOKEN, 1))


def test_cpt_is_refused_as_plain_peft_refuses_it() -> None:
    with pytest.raises(ValueError, match="only supports task_type"):
        CPTConfig(task_type=prompts.SEQ, cpt_token_ids=[1], cpt_mask=[1], cpt_tokens_type_mask=[1])
    assert "task_type must be CAUSAL_LM for CPT, got SEQ_CLS" in refusal(
        prompts.config_of("cpt", prompts.SEQ), prompts.CASES["Bert"].make()
    )


@pytest.mark.parametrize(
    ("make", "form", "said", "theirs"),
    [
        (
            classifier_of("distilbert", hidden_dim=48),
            "prompt",
            "backbones whose configuration PEFT can read",
            "specify `token_dim`",
        ),
        (
            classifier_of("modernbert", cls_token_id=1, sep_token_id=2),
            "prefix",
            "backbones that take past_key_values",
            "does not support past key values",
        ),
        (
            classifier_of("electra", **NO_BERT_DROPOUT, embedding_size=16),
            "mlp",
            "backbones whose embeddings are as wide as their layers",
            "Sizes of tensors must match",
        ),
    ],
)
def test_backbones_on_which_plain_peft_fails_are_refused_by_name(
    make: Callable[[], Any], form: str, said: str, theirs: str
) -> None:
    assert said in refusal(prompts.config_of(form, prompts.SEQ), filled(make))
    with pytest.raises((ValueError, RuntimeError), match=theirs):
        prompts.prompt_loss(
            plain(prompts.config_of(form, prompts.SEQ), 0, lambda: filled(make))[0],
            prompts.rows_of(form, prompts.SEQ, 1),
        )
