"""Every kind of backbone: packed losses and gradients against plain PEFT on one row at a time, and refusals by name.

The judge is `get_peft_model` on a copy of the backbone with the transformers model's own forward: no packing, no
padding, and the architecture's own attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.invariants.mux_lab import relative
from tests.modeling.adapters.passes import Judges, assert_as_plain, plain

VOCABULARY = 61
LENGTHS = {"a": (5, 19, 9, 2), "b": (33, 3, 17)}
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**SIZE, "num_key_value_heads": 2}
NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED))


def qwen2() -> Any:
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED))


def qwen3() -> Any:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=16))


def mistral() -> Any:
    return tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=6))


def gemma2() -> Any:
    config = tf.Gemma2Config(
        **GROUPED,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=5,
    )
    # Only the eager path of transformers honours the soft-cap of the scores.
    config._attn_implementation = "eager"
    return tf.Gemma2ForCausalLM(config)


def gemma3() -> Any:
    config = tf.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    )
    return tf.Gemma3ForCausalLM(config)


def gpt2() -> Any:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    return tf.GPT2LMHeadModel(config)


def phi() -> Any:
    return tf.PhiForCausalLM(tf.PhiConfig(**SIZE))


def opt(**settings: Any) -> Any:
    config = tf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        pad_token_id=0,
        **{"dropout": 0.0, **settings},
    )
    return tf.OPTForCausalLM(config)


def qwen3_moe() -> Any:
    return tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**GROUPED, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    )


def mixtral() -> Any:
    return tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2))


def olmoe() -> Any:
    config = tf.OlmoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2, eos_token_id=None)
    return tf.OlmoeForCausalLM(config)


def deepseek_v3() -> Any:
    config = tf.DeepseekV3Config(
        **SIZE,
        num_key_value_heads=4,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    return tf.DeepseekV3ForCausalLM(config)


def gpt_oss() -> Any:
    config = tf.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
    return tf.GptOssForCausalLM(config)


# ------------------------------------------------------- vision and language


TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXELS = {"image_size": 8, "patch_size": 4}
MEDIA_TOKENS = {"image_token_id": 1, "video_token_id": 1, "vision_start_token_id": 1, "vision_end_token_id": 1}


def qwen_vl(config: Any, **vision: Any) -> Any:
    """Return the configuration of a Qwen-VL: positions of three dimensions, which are equal for text."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, **vision}
    return config(text_config={**GROUPED, "head_dim": 8, "rope_parameters": rope}, vision_config=tower, **MEDIA_TOKENS)


def qwen25_vl() -> Any:
    return tf.Qwen2_5_VLForConditionalGeneration(qwen_vl(tf.Qwen2_5_VLConfig, fullatt_block_indexes=[0]))


def qwen3_vl() -> Any:
    vision = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return tf.Qwen3VLForConditionalGeneration(qwen_vl(tf.Qwen3VLConfig, **vision))


def llava() -> Any:
    vision = tf.CLIPVisionConfig(**TOWER, **PIXELS)
    config = tf.LlavaConfig(text_config=tf.LlamaConfig(**GROUPED), vision_config=vision, image_token_id=1)
    return tf.LlavaForConditionalGeneration(config)


def gemma3_with_images() -> Any:
    text = tf.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    )
    vision = tf.SiglipVisionConfig(**TOWER, **PIXELS)
    config = tf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=1)
    return tf.Gemma3ForConditionalGeneration(config)


def bert_classifier() -> Any:
    return tf.BertForSequenceClassification(tf.BertConfig(**SIZE, **NO_BERT_DROPOUT, num_labels=3))


def roberta_classifier() -> Any:
    config = tf.RobertaConfig(**{**SIZE, "pad_token_id": 1}, **NO_BERT_DROPOUT, num_labels=3)
    return tf.RobertaForSequenceClassification(config)


def llama_classifier() -> Any:
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**GROUPED, num_labels=3))


LANGUAGE_MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "Llama": (llama, ["q_proj", "down_proj"]),
    "Qwen2": (qwen2, ["k_proj", "up_proj"]),
    "Qwen3": (qwen3, ["v_proj", "o_proj"]),
    "Mistral": (mistral, ["q_proj", "v_proj"]),
    "Gemma2": (gemma2, ["q_proj", "gate_proj"]),
    "Gemma3": (gemma3, ["k_proj", "o_proj"]),
    "GPT2": (gpt2, ["c_attn"]),
    "Phi": (phi, ["q_proj", "dense"]),
    "OPT": (opt, ["q_proj", "fc1"]),
    # On the mixtures "all-linear" adapts experts and routers as well, as PEFT does (except gpt-oss).
    "Qwen3MoE": (qwen3_moe, ["q_proj", "v_proj"]),
    "Mixtral": (mixtral, ["k_proj", "o_proj"]),
    "OLMoE": (olmoe, ["q_proj"]),
    "DeepseekV3": (deepseek_v3, ["q_b_proj", "kv_b_proj"]),
    "GptOss": (gpt_oss, ["v_proj", "o_proj"]),
}
VISION_LANGUAGE_MODELS = {"Qwen2.5-VL": qwen25_vl, "Qwen3-VL": qwen3_vl, "Llava": llava, "Gemma3": gemma3_with_images}
CLASSIFIERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "Bert": (bert_classifier, ["query", "dense"]),
    "Roberta": (roberta_classifier, ["query", "value"]),
    "Llama": (llama_classifier, ["q_proj", "up_proj"]),
}


def filled(make: Callable[[], Any]) -> Any:
    """Return a backbone with weights large enough that every layer matters."""
    model = make()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            draws = torch.from_numpy(rng.normal(0.0, 0.15, tuple(weight.shape)).astype(np.float32))
            weight.copy_(1.0 + draws if weight.ndim == 1 and name.endswith("weight") else draws)
    return model.train()


def configs(backbone: Any, targets: list[str]) -> dict[str, LoraConfig]:
    """Return two adapters of unequal rank, scale and targets."""
    options = {
        "task_type": "SEQ_CLS" if "SequenceClassification" in type(backbone).__name__ else "CAUSAL_LM",
        "fan_in_fan_out": isinstance(backbone, tf.GPT2LMHeadModel),
    }
    return {
        "a": LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", **options),
        "b": LoraConfig(r=8, lora_alpha=4, use_rslora=True, target_modules=targets, **options),
    }


def rows(*, classes: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return rows of unequal lengths for both tasks; some of the labels carry no loss."""
    rng = np.random.default_rng(3)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, lengths in LENGTHS.items():
        found[name] = []
        for length in lengths:
            ids = rng.integers(2, VOCABULARY, length)
            labels = np.where(rng.random(length) < 0.3, IGNORE_INDEX, ids)
            row: dict[str, Any] = {"input_ids": ids, "labels": labels}
            if classes is not None:
                row = {"input_ids": ids, "label": int(rng.integers(classes))}
            found[name].append(row)
    return found


def packed(task_rows: dict[str, list[dict[str, Any]]]) -> MuxBatch:
    """Return all rows as one micro-batch."""
    return ChunkPackingCollator()([{"task": name, **row} for name, part in task_rows.items() for row in part])


def multiplexed(backbone: Any, targets: list[str]) -> MultiTaskPeftModel:
    """Return a model of both tasks, with adapters that already do something."""
    model = MultiTaskPeftModel(copy.deepcopy(backbone), configs(backbone, targets))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in model.tasks:
            for parameter in model.task_parameters(name).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.train()


def judged(backbone: Any, targets: list[str], model: MultiTaskPeftModel) -> Judges:
    """Return plain PEFT's models of both tasks with the weights of a model."""
    judges: Judges = {}
    for name, config in configs(backbone, targets).items():
        judge, own = plain(config, 0, lambda: copy.deepcopy(backbone))
        with torch.no_grad():
            for key, value in model.task_parameters(name).items():
                own[key].copy_(value)
        judges[name] = judge.train(), own
    return judges


def language_loss(model: Any, part: list[dict[str, Any]]) -> torch.Tensor:
    """Return the mean loss over the targets of all rows, one row at a time."""
    total = sum(int((row["labels"][1:] != IGNORE_INDEX).sum()) for row in part)
    terms = []
    for row in part:
        logits = model(input_ids=torch.from_numpy(row["input_ids"])[None]).logits[0]
        labels = torch.from_numpy(row["labels"])[1:]
        terms.append(F.cross_entropy(logits[:-1], labels, ignore_index=IGNORE_INDEX, reduction="sum"))
    return torch.stack(terms).sum() / total


def class_loss(model: Any, part: list[dict[str, Any]]) -> torch.Tensor:
    """Return the mean loss of all rows, one row at a time."""
    terms = []
    for row in part:
        logits = model(input_ids=torch.from_numpy(row["input_ids"])[None]).logits
        terms.append(F.cross_entropy(logits, torch.tensor([row["label"]])))
    return torch.stack(terms).mean()


def assert_as_alone(
    backbone: Any,
    targets: list[str],
    task_rows: dict[str, list[dict[str, Any]]],
    loss_of: Callable[[Any, list[dict[str, Any]]], torch.Tensor],
) -> None:
    """Assert that losses and all gradients of one packed pass are those of each task alone."""
    model = multiplexed(backbone, targets)
    judges = judged(backbone, targets, model)
    assert all(own.keys() == model.task_parameters(name).keys() for name, (_, own) in judges.items())
    assert_as_plain(model, packed(task_rows), judges, task_rows, loss_of=loss_of, tolerance=1e-5)


@pytest.mark.parametrize("architecture", LANGUAGE_MODELS)
def test_a_packed_language_model_gives_every_task_the_loss_and_gradients_that_it_has_alone(architecture: str) -> None:
    make, targets = LANGUAGE_MODELS[architecture]
    assert_as_alone(filled(make), targets, rows(), language_loss)


@pytest.mark.parametrize("architecture", VISION_LANGUAGE_MODELS)
def test_a_model_of_images_and_text_trains_on_text_as_plain_peft_trains_it(architecture: str) -> None:
    backbone, task_rows, targets = filled(VISION_LANGUAGE_MODELS[architecture]), rows(), ["q_proj", "o_proj"]
    model = multiplexed(backbone, targets)
    judges = judged(backbone, targets, model)
    reached = {
        name: (judge, {key: value for key, value in own.items() if key in model.task_parameters(name)})
        for name, (judge, own) in judges.items()
    }
    assert_as_plain(model, packed(task_rows), reached, task_rows, loss_of=language_loss, tolerance=1e-5)
    for name, (_, own) in judges.items():
        # What images would pass through gets no gradient alone, so no optimizer touches it, nor its decay here.
        mine = model.task_parameters(name)
        assert mine.keys() == {key for key, value in own.items() if value.grad is not None}
        assert name == "b" or len(mine) < len(own), "all-linear adapts the tower of images too"


def test_adapters_that_no_row_reaches_are_saved_as_they_were_drawn(tmp_path: Path) -> None:
    backbone = filled(llava)
    MultiTaskPeftModel(copy.deepcopy(backbone), configs(backbone, ["q_proj"]), seeds={"a": 3}).save_pretrained(tmp_path)
    judge, _ = plain(configs(backbone, ["q_proj"])["a"], 3, lambda: copy.deepcopy(backbone))
    saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
    drawn = get_peft_model_state_dict(judge)
    assert saved.keys() == drawn.keys()
    assert any("vision_tower" in key for key in saved)
    assert all(torch.equal(value, drawn[key]) for key, value in saved.items())


def test_a_task_that_adapts_nothing_that_text_reaches_is_refused_by_name() -> None:
    config = LoraConfig(target_modules=r".*vision_tower.*(k|v)_proj", task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match=r"tasks\.a\.peft_config\.target_modules must "):
        MultiTaskPeftModel(filled(llava), {"a": config})


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_packed_classifier_gives_every_task_the_loss_and_gradients_that_it_has_alone(architecture: str) -> None:
    make, targets = CLASSIFIERS[architecture]
    assert_as_alone(filled(make), targets, rows(classes=3), class_loss)


@pytest.mark.parametrize("architecture", LANGUAGE_MODELS)
def test_the_logits_of_every_sequence_are_those_of_the_model_alone(architecture: str) -> None:
    make, targets = LANGUAGE_MODELS[architecture]
    backbone, task_rows = filled(make), rows()
    model = multiplexed(backbone, targets)
    found = iter(model.sequence_logits(packed(task_rows)))
    for name, (judge, _) in judged(backbone, targets, model).items():
        for row in task_rows[name]:
            with torch.no_grad():
                wanted = judge(input_ids=torch.from_numpy(row["input_ids"])[None]).logits[0]
            assert relative(next(found), wanted) <= 1e-5, f"{name}, a row of {len(row['input_ids'])} tokens"
    assert next(found, None) is None


@pytest.mark.parametrize("architecture", ["Mistral", "Gemma2", "Gemma3"])
def test_the_sliding_window_matters_in_these_tests(architecture: str) -> None:
    make, targets = LANGUAGE_MODELS[architecture]
    model = multiplexed(filled(make), targets)
    batch = packed(rows())
    with torch.no_grad():
        before = model(batch).losses
        model.backbone.config.sliding_window = 64  # Mistral reads its configuration, the others their layers
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = 64
        after = model(batch).losses
    assert ((after - before).abs() > 1e-4 * before).all()


def test_adapters_on_the_embedding_and_the_output_head_have_the_gradients_that_they_have_alone() -> None:
    assert_as_alone(filled(llama), ["embed_tokens", "lm_head"], rows(), language_loss)


def test_each_task_has_a_head_of_its_own_size() -> None:
    backbone = filled(bert_classifier)
    model = MultiTaskPeftModel(backbone, configs(backbone, ["query"]), num_labels={"a": 5, "b": 3})
    shapes = {
        name: [
            len(value)
            for key, value in model.task_parameters(name).items()
            if key.endswith("classifier.modules_to_save.weight")
        ]
        for name in model.tasks
    }
    assert shapes == {"a": [5], "b": [3]}
    logits = model.sequence_logits(packed(rows(classes=3)))
    assert [len(row) for row in logits] == [5, 5, 5, 5, 3, 3, 3]


def test_a_decoder_classifies_by_its_last_token_that_is_no_padding() -> None:
    backbone, task_rows = filled(llama_classifier), rows(classes=3)
    for part in task_rows.values():
        part[0]["input_ids"][-1] = backbone.config.pad_token_id
    assert_as_alone(backbone, ["q_proj"], task_rows, class_loss)


# ------------------------------------------------------------------ refusals


def bloom() -> Any:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4))


def mamba() -> Any:
    config = tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)
    return tf.MambaForCausalLM(config)


def t5() -> Any:
    config = tf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    return tf.T5ForConditionalGeneration(config)


def with_functional_dropout() -> Any:
    return opt(dropout=0.1)


def with_layer_drop() -> Any:
    return opt(layerdrop=0.5)


@pytest.mark.parametrize(
    ("make", "target", "name", "reason"),
    [
        (bloom, "query_key_value", "BloomForCausalLM", "attention on a path of its own"),
        (mamba, "in_proj", "MambaForCausalLM", "carry state from one sequence into the next"),
        (t5, "q", "T5ForConditionalGeneration", "encoder-decoder models have two streams"),
        (with_functional_dropout, "q_proj", "OPTForCausalLM", "global random generator"),
        (with_layer_drop, "q_proj", "OPTForCausalLM", "global random generator"),
    ],
)
def test_a_model_that_packing_would_change_is_refused_by_name_with_the_reason(
    make: Callable[[], Any], target: str, name: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^{name} cannot be packed: .*{reason}.*must "):
        MultiTaskPeftModel(make(), {"a": LoraConfig(r=2, target_modules=[target])})


def test_a_base_model_without_an_output_head_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^LlamaModel has no output embeddings"):
        MultiTaskPeftModel(tf.LlamaModel(tf.LlamaConfig(**GROUPED)), {"a": LoraConfig(target_modules=["q_proj"])})


def test_a_module_that_is_no_transformers_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="the backbone must be a transformers PreTrainedModel, got Linear"):
        MultiTaskPeftModel(torch.nn.Linear(2, 2), {"a": LoraConfig(target_modules=["q_proj"])})


def test_a_model_that_holds_adapters_already_is_refused() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        UnsupportedModelError,
        match=r"PeftModel already holds adapters, and must be a plain transformers model.*model.unload",
    ):
        MultiTaskPeftModel(model, {"a": LoraConfig(target_modules=["q_proj"])})
