"""What peft_mux can train on: checks of a backbone before anything is injected, and what its positions allow."""

from __future__ import annotations

from typing import Any

from peft_mux.errors import UnsupportedModelError


def check_backbone(backbone: Any) -> None:
    """Refuse by name a model that packing would change, as far as its class and configuration tell.

    What they do not tell, `peft_mux.modeling.backbone.probe` measures.

    Raises:
        UnsupportedModelError: naming the architecture, the reason, and what is allowed.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

    name = type(backbone).__name__
    if isinstance(backbone, PeftModel):
        raise UnsupportedModelError(
            f"{name} already holds adapters; allowed: a plain transformers model. Pass "
            "`model.unload()` and load the adapters with `MultiTaskPeftModel.from_pretrained`."
        )
    if any(isinstance(module, BaseTunerLayer) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} still holds the adapters of another trainer or PEFT model, which new ones would be trained on top "
            "of; allowed: a plain transformers model. Give `trainer.model.unload()`, which takes them out, or load the "
            "model again; `MultiTaskTrainer(model=trainer.model, ...)` goes on with them."
        )
    if not isinstance(backbone, PreTrainedModel):
        raise UnsupportedModelError(f"got {name}; allowed: a transformers PreTrainedModel.")
    reason = _unsupported_reason(backbone)
    if reason is not None:
        raise UnsupportedModelError(
            f"{name} cannot be packed: {reason}; allowed: decoder-only causal language models and encoders or "
            "decoders with a sequence-classification head, whose attention goes through transformers' attention "
            "interface (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, OPT, BERT, ...)."
        )


def _unsupported_reason(backbone: Any) -> str | None:
    config = backbone.config
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models have two streams"
    if getattr(backbone, "_is_stateful", False):
        return "its recurrent layers carry state from one sequence into the next"
    if odd := _odd_layer_kinds(config):
        return f"its layers of kind {', '.join(odd)} do not look at one packed sequence alone"
    # transformers sets this where attention goes through its interface, with all arguments of the call.
    if not getattr(backbone, "_supports_attention_backend", False):
        return "it computes attention on a path of its own"
    if getattr(config, "output_router_logits", False):
        return "its router loss (output_router_logits) mixes the tokens of all tasks; set it to False"
    return None


def _odd_layer_kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return sorted(set(kinds) - {"attention", "full_attention", "sliding_attention"})


def rope_limit(config: Any) -> int | None:
    """Return the length up to which rotary scaling is independent of the longest sequence in the batch.

    `dynamic` and `longrope` scaling look at the longest position of the whole batch, so that one long sequence would
    change its neighbours; below this length they do not. `None` for every other kind.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have parameters for each kind (Gemma 3).
    variants = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    for variant in variants:
        if variant.get("rope_type") in ("dynamic", "longrope"):
            return variant.get("original_max_position_embeddings") or config.max_position_embeddings
    return None


_OFFSET_POSITION_TYPES = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer")


def position_offset(backbone: Any) -> int:
    """Return the position id of a sequence's first token: RoBERTa and its kin start after the padding id."""
    config = backbone.config
    return config.pad_token_id + 1 if config.model_type in _OFFSET_POSITION_TYPES else 0


def max_positions(config: Any) -> int | None:
    """Return the longest sequence that a backbone can tell the positions of, or `None` where it has no limit."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    known = [limit for limit in limits if isinstance(limit, int)]
    limit = min(known) if known else None
    if limit is not None and config.model_type in _OFFSET_POSITION_TYPES:
        # Their tables of positions begin with rows that no token of a sequence uses.
        limit -= config.pad_token_id + 1
    rope = rope_limit(text)
    return limit if rope is None else min(rope, limit or rope)
