"""Small backbones of every architecture, of two layers and with weights large enough that every layer matters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as tf
from peft import LoraConfig

from peft_mux.modeling.model import MultiTaskPeftModel
from tests.engine.lab import VOCABULARY, config_of
from tests.invariants.mux_lab import fill
from tests.modeling.adapters.passes import moved

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
MODERN = {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def backbone_of(kind: str, auto: Any = tf.AutoModelForCausalLM, **changed: Any) -> Callable[[], Any]:
    """Return a function that makes a model of a model type."""
    return lambda: auto.from_config(config_of(kind, **{"num_hidden_layers": 2, **changed}), dtype=torch.float32)


def classifier_of(kind: str, **changed: Any) -> Callable[[], Any]:
    """Return a function that makes a classifier of sequences into three classes."""
    return backbone_of(kind, tf.AutoModelForSequenceClassification, **{"num_labels": 3, **changed})


def tagger_of(kind: str, **changed: Any) -> Callable[[], Any]:
    """Return a function that makes a classifier of tokens into three classes."""
    options = {"num_labels": 3, "classifier_dropout": 0.0, **changed}
    return backbone_of(kind, tf.AutoModelForTokenClassification, **options)


LANGUAGE_MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "Llama": (backbone_of("llama"), ["q_proj", "down_proj"]),
    "Qwen2": (backbone_of("qwen2"), ["k_proj", "up_proj"]),
    "Qwen3": (backbone_of("qwen3", head_dim=16), ["v_proj", "o_proj"]),
    "Mistral": (backbone_of("mistral"), ["q_proj", "v_proj"]),
    "Gemma2": (backbone_of("gemma2"), ["q_proj", "gate_proj"]),
    "Gemma3": (backbone_of("gemma3_text"), ["k_proj", "o_proj"]),
    "GPT2": (backbone_of("gpt2"), ["c_attn"]),
    "Phi": (backbone_of("phi", num_key_value_heads=4), ["q_proj", "dense"]),
    "OPT": (backbone_of("opt", word_embed_proj_dim=32), ["q_proj", "fc1"]),
    # On the mixtures "all-linear" adapts experts and routers as well, as PEFT does (except gpt-oss).
    "Qwen3MoE": (backbone_of("qwen3_moe"), ["q_proj", "v_proj"]),
    "Mixtral": (backbone_of("mixtral", sliding_window=None), ["k_proj", "o_proj"]),
    "OLMoE": (backbone_of("olmoe"), ["q_proj"]),
    "DeepseekV3": (backbone_of("deepseek_v3", num_key_value_heads=4), ["q_b_proj", "kv_b_proj"]),
    "GptOss": (backbone_of("gpt_oss"), ["v_proj", "o_proj"]),
}
MIXTURES = ("Qwen3MoE", "Mixtral", "OLMoE", "DeepseekV3", "GptOss")
"""Their products of experts know no float64."""
CLASSIFIERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "Bert": (classifier_of("bert", **NO_BERT_DROPOUT), ["query", "dense"]),
    "Roberta": (classifier_of("roberta", **NO_BERT_DROPOUT, pad_token_id=1), ["query", "value"]),
    "Llama": (classifier_of("llama"), ["q_proj", "up_proj"]),
    # Windows of 9 tokens in its first layer.
    "ModernBert": (classifier_of("modernbert", **MODERN), ["Wqkv", "Wi", "dense"]),
    "ModernBert, mean": (classifier_of("modernbert", **MODERN, classifier_pooling="mean"), ["Wqkv", "Wo"]),
}


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
    config = tf.LlavaConfig(text_config=config_of("llama", num_hidden_layers=2), vision_config=vision, image_token_id=1)
    return tf.LlavaForConditionalGeneration(config)


def gemma3_with_images() -> Any:
    text = config_of("gemma3_text", num_hidden_layers=2)
    vision = tf.SiglipVisionConfig(**TOWER, **PIXELS)
    config = tf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=1)
    return tf.Gemma3ForConditionalGeneration(config)


VISION_LANGUAGE_MODELS = {"Qwen2.5-VL": qwen25_vl, "Qwen3-VL": qwen3_vl, "Llava": llava, "Gemma3": gemma3_with_images}


def filled(make: Callable[[], Any]) -> Any:
    """Return a backbone with weights large enough that every layer matters."""
    model = make()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            draws = torch.from_numpy(rng.normal(0.0, 0.15, tuple(weight.shape)).astype(np.float32))
            weight.copy_(1.0 + draws if weight.ndim == 1 and name.endswith("weight") else draws)
    return model.train()


def drawn(make: Callable[[], Any]) -> Any:
    """Return a backbone whose weights are drawn as those of `tiny_llama`."""
    model = make()
    fill(model, 0)
    return model


def configs_of(backbone: Any, targets: list[str]) -> dict[str, LoraConfig]:
    """Return two adapters of unequal rank, scale and targets."""
    options = {
        "task_type": "SEQ_CLS" if "SequenceClassification" in type(backbone).__name__ else "CAUSAL_LM",
        "fan_in_fan_out": isinstance(backbone, tf.GPT2LMHeadModel),
    }
    return {
        "a": LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", **options),
        "b": LoraConfig(r=8, lora_alpha=4, use_rslora=True, target_modules=targets, **options),
    }


def multiplexed(backbone: Any, targets: list[str]) -> MultiTaskPeftModel:
    """Return a model of both tasks, with adapters that already do something."""
    return moved(MultiTaskPeftModel(copy.deepcopy(backbone), configs_of(backbone, targets))).train()
