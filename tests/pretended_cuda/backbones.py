"""Small backbones of ten architectures, and the adapters that are trained on them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from peft import LoraConfig

from peft_mux import BottleneckConfig

VOCABULARY = 512
NUM_LABELS = 3
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}
_OPT = {"ffn_dim": 256, "word_embed_proj_dim": 128, "dropout": 0.0}
_BERT = {"num_labels": NUM_LABELS, "attention_probs_dropout_prob": 0.0}
_ENCODER = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}
_OPT_COMMON = {key: value for key, value in _ENCODER.items() if key != "intermediate_size"}

ARCHITECTURES: dict[str, tuple[type, Any]] = {
    "llama": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**_COMMON)),
    "qwen2": (hf.Qwen2ForCausalLM, lambda: hf.Qwen2Config(**_COMMON)),
    "qwen3": (hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**_COMMON, head_dim=32)),
    "mistral": (hf.MistralForCausalLM, lambda: hf.MistralConfig(**_COMMON, sliding_window=16)),
    "phi3": (hf.Phi3ForCausalLM, lambda: hf.Phi3Config(**_COMMON)),
    "gemma2": (hf.Gemma2ForCausalLM, lambda: hf.Gemma2Config(**_COMMON, head_dim=32, sliding_window=16)),
    "gemma3": (hf.Gemma3ForCausalLM, lambda: hf.Gemma3TextConfig(**_COMMON, head_dim=256, sliding_window=16)),
    "gpt2": (hf.GPT2LMHeadModel, lambda: hf.GPT2Config(**_GPT2, attn_pdrop=0.0)),
    "opt": (hf.OPTForCausalLM, lambda: hf.OPTConfig(**_OPT_COMMON, **_OPT)),
    "bert": (hf.BertForSequenceClassification, lambda: hf.BertConfig(**_ENCODER, **_BERT)),
}
"""Class and configuration, by name."""

_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_QWEN2_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
_GEMMA2_9B = {
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
}
_GPT2_MEDIUM = {**_GPT2, "vocab_size": 50257, "n_embd": 1024, "n_head": 16, "n_positions": 1024} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
REAL_WIDTHS: dict[str, tuple[type, Any]] = {
    "llama 8B": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**_COMMON | _LLAMA_8B)),
    "qwen2 7B": (hf.Qwen2ForCausalLM, lambda: hf.Qwen2Config(**_COMMON | _QWEN2_7B)),
    "gemma2 9B": (hf.Gemma2ForCausalLM, lambda: hf.Gemma2Config(**_COMMON | _GEMMA2_9B)),
    "gpt2 medium": (hf.GPT2LMHeadModel, lambda: hf.GPT2Config(**_GPT2_MEDIUM)),
}
"""The same for two layers of the widths of models that people train: nothing fake takes memory."""

_TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "bert": ["query", "key", "value", "dense"]}
_FEW_TARGETS = {**_TARGETS, "phi3": ["qkv_proj"]}


def make(architecture: str, dtype: torch.dtype, device: str = "cuda", **changed: Any) -> Any:
    """Return a backbone in training mode, its weights frozen; some fields of its configuration may be changed."""
    model_class, make_config = (ARCHITECTURES | REAL_WIDTHS)[architecture]
    config, before = make_config(), torch.get_default_dtype()
    config.update(changed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            backbone = model_class(config)
    finally:
        torch.set_default_dtype(before)
    return backbone.requires_grad_(False).train()


_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapters(
    architecture: str, *, adapts_head: bool = False, has_bottlenecks: bool = False, has_upper: bool = False
) -> dict[str, LoraConfig | BottleneckConfig]:
    """Return adapters of narrow and wide ranks, with and without dropout, on all linear layers and on some."""
    all_linear = _TARGETS.get(architecture, "all-linear")
    some = _FEW_TARGETS.get(architecture, ["q_proj", "v_proj"])
    rows = {"a": (3, 0.0, all_linear), "b": (8, 0.1, all_linear), "c": (64, 0.0, all_linear), "d": (24, 0.05, some)}
    if adapts_head:
        rows["head"] = (8, 0.0, ["q_proj", "lm_head"])
    upper = {"top": LoraConfig(r=8, target_modules=list(_LINEAR), layers_to_transform=[1])} if has_upper else {}
    task_type = "SEQ_CLS" if architecture == "bert" else None
    bottlenecks: dict[str, LoraConfig | BottleneckConfig] = {
        "narrow": BottleneckConfig(bottleneck_size=8, non_linearity="relu", up_bias=False, target_modules=["o_proj"]),
        "wide": BottleneckConfig(bottleneck_size=64, target_modules=["o_proj", "down_proj"]),
        "drops": BottleneckConfig(bottleneck_size=24, adapter_dropout=0.1, non_linearity="tanh"),
    }
    return (
        (bottlenecks if has_bottlenecks else {})
        | upper
        | {
            name: LoraConfig(r=rank, lora_dropout=dropout, target_modules=targets, task_type=task_type)
            for name, (rank, dropout, targets) in rows.items()
        }
    )
