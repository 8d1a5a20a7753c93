"""What prompts are not trained with is refused by name before anything is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from peft import PeftConfig, TaskType
from peft.utils.constants import TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.adapters.prompt_kind import PromptKind
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.kind import kind_of, kind_of_parameter
from peft_mux.parallel.cuda_graphs import reason_against
from peft_mux.parallel.layout import divided_kind_faults
from peft_mux.planning.task_loads import adapter_loads
from peft_mux.scheduler.parallel_layout import ParallelLayout
from tests.adapters.prompts import prompt_cases as prompts
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.passes import plain
from tests.modeling.backbones import NO_BERT_DROPOUT, classifier_of


def refusal(config: PeftConfig, backbone: Any = None) -> str:
    backbone = backbone or lab.tiny_llama()
    before = [name for name, _ in backbone.named_modules()]
    with pytest.raises(ConfigError) as caught:
        MultiTaskPeftModel(backbone, {"a": config}, verify=False)
    assert [name for name, _ in backbone.named_modules()] == before, "the backbone was touched"
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ("prompt", {"num_virtual_tokens": 0}, r"num_virtual_tokens must be an integer of at least 1.*got 0"),
        ("prompt", {"token_dim": 48}, r"token_dim must be 32 or None, because the backbone is a.*got 48"),
        ("prefix", {"token_dim": 32}, r"token_dim must be 16 or None.*got 32"),
        ("cartridge", {"num_attention_heads": 4}, r"num_attention_heads must be 2 or None.*got 4"),
        ("prefix", {"num_layers": 1}, r"num_layers must be 2 or None.*got 1"),
        ("prompt", {"num_transformer_submodules": 2}, r"num_transformer_submodules must be 1 or.*got 2"),
        ("prompt", {"modules_to_save": ["lm_head"]}, r"modules_to_save must be its default.*got \['lm_head'\]"),
        ("mlp", {"task_type": None}, r"task_type must be CAUSAL_LM or SEQ_CLS for P_TUNING.*got None"),
        ("prefix", {"task_type": prompts.SEQ}, r"task_type must be CAUSAL_LM or None, because the backbone is a"),
        ("cpt", {"task_type": prompts.SEQ}, r"task_type must be CAUSAL_LM for.*got SEQ_CLS"),
        ("lstm", {"encoder_dropout": 0.1}, r"encoder_dropout must be 0.0.*got 0.1.*.*that all tasks share"),
        ("mlp", {"encoder_dropout": 0.1}, r"encoder_dropout .*got 0.1.*PEFT ignores it"),
        ("mlp", {"encoder_num_layers": 3}, r"encoder_num_layers must be 2.*got 3 with an MLP"),
        ("mlp", {"encoder_reparameterization_type": "GRU"}, r"encoder_reparameterization_type must be MLP or LSTM"),
        ("multitask", {"num_tasks": 3}, r"num_tasks must be 1.*got 3.*Rows have no task_ids"),
        ("cartridge", {"num_frozen_tokens": 4}, r"num_frozen_tokens must be less than num_virtual.*got 4"),
        ("prefix", {"init_weights": "ones"}, r"init_weights must be 'zero' or None.*got 'ones'"),
        ("cpt", {"opt_weighted_loss_type": "decay", "opt_loss_decay_factor": 0.9}, r"opt_weighted_loss_type .*'decay'"),
        ("cpt", {"opt_projection_epsilon": -0.1}, r"opt_projection_epsilon must be a finite number of at least 0"),
        ("cpt", {"cpt_tokens_type_mask": [1] * 8}, r"cpt_tokens_type_mask .*got 1 as the highest type"),
        ("cpt", {"cpt_token_ids": [99] * 8}, r"cpt_token_ids must be ids below 97.*got 99"),
        ("cpt", {"cpt_mask": [1]}, r"cpt_mask must be 8 entries, one for each of num_virtual_tokens, got 1"),
    ],
)
def test_a_field_that_cannot_be_trained_is_refused_by_name(form: str, settings: dict[str, Any], message: str) -> None:
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


def test_backbones_with_uneven_heads_or_keys_that_peft_lays_out_again_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = "used with backbones whose layers all have the same heads, got PREFIX_TUNING on a LlamaForCausalLM with "
    uneven = lab.tiny_llama()
    uneven.config.num_kv_shared_layers = 1
    assert f"{wanted}num_kv_shared_layers" in refusal(prompts.config_of("prefix"), uneven)
    monkeypatch.setitem(TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING, "llama", lambda keys: keys)
    assert f"{wanted}its own layout of keys" in refusal(prompts.config_of("prefix"))


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
    loads = adapter_loads(kind, shapes, {})
    assert sum(load.rank * load.width for load in loads) == sum(item.numel() for item in own.values())
    assert divided_kind_faults(kind, ParallelLayout.of(2), "tasks.a") == []
    for layout in (ParallelLayout.of(2, tp=2), ParallelLayout.of(2, pp=2)):
        (fault,) = divided_kind_faults(kind, layout, "tasks.a")
        assert fault.where == "tasks.a.peft_config"
        assert kind.title in fault.got


def test_sharded_weights_are_refused_at_construction_and_graphs_say_why_not(tmp_path: Path) -> None:
    said = r"tasks\.prompt\.peft_config must be a PEFT type that adapts layers, got PROMPT_TUNING with"
    with pytest.raises(ConfigError, match=said):
        lab.make_trainer([prompts.task_of("prompt"), prompts.task_of("lora")], tmp_path, shard_backbone=True)
    for form in ("prompt", "prefix"):
        assert reason_against(prompts.mux("lora", form)) == "a task's prompt stands before each of its sequences"


def test_a_loss_that_compares_with_the_backbone_wants_rows_that_bring_the_reference() -> None:
    config, rows = prompts.config_of("prompt"), [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    said = r"tasks\.a\.objective must be a loss without a reference with.*got dpo.*ref_chosen_logps"
    with pytest.raises(ConfigError, match=said):
        Task(name="a", peft_config=config, train_dataset=rows)
    brought = [{**row, "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0} for row in rows]
    assert Task(name="a", peft_config=config, train_dataset=brought).train_dataset is brought
    assert Task(name="a", peft_config=config, train_dataset=rows, objective="orpo").objective == "orpo"


# Classifiers that plain PEFT cannot train: it classifies by padding, or fails.
@pytest.mark.parametrize(
    ("make", "forms", "task_type", "said"),
    [
        (prompts.CASES["Llama"].make, prompts.TOKENS, prompts.SEQ, "it would classify by padding"),
        (prompts.CASES["GPT2"].make, ("prompt",), prompts.SEQ, "it would classify by padding"),
        (prompts.CASES["Bert, tokens"].make, prompts.TOKENS, prompts.TOKEN, "fails on the logits of virtual tokens"),
        (prompts.CASES["Llama, tokens"].make, ("mlp",), prompts.TOKEN, "fails on the logits of virtual tokens"),
        (
            classifier_of("distilbert", hidden_dim=48),
            ("prompt",),
            prompts.SEQ,
            "backbones whose configuration PEFT can read",
        ),
        (
            classifier_of("modernbert", cls_token_id=1, sep_token_id=2),
            ("prefix",),
            prompts.SEQ,
            "backbones that take past_key_values",
        ),
        (
            classifier_of("electra", **NO_BERT_DROPOUT, embedding_size=16),
            ("mlp",),
            prompts.SEQ,
            "backbones whose embeddings are as wide as their layers",
        ),
    ],
)
def test_backbones_on_which_plain_peft_fails_are_refused_by_name(
    make: Callable[[], Any], forms: tuple[str, ...], task_type: TaskType, said: str
) -> None:
    for form in forms:
        message = refusal(prompts.config_of(form, task_type), make())
        assert message.startswith("tasks.a.peft_config")
        assert said in message
