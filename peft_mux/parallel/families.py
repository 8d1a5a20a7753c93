"""Which architectures pipelines and tensor parallelism divide, and where their parts are: `FAMILIES`, `family_of`.

Transformers' own plans say where: the configuration class of an architecture names the modules before the decoder
layers and behind them (`base_model_pp_plan`), and how layers are cut (`base_model_tp_plan`). `OWN_PLANS` has plans of
the same form for architectures without one. A plan is no proof: each model type of `FAMILIES` was compared with one
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peft_mux.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """How the architectures of one family are divided; names are those of modules within the base model.

    Attributes:
        layers: the list of decoder layers.
        embeddings: what is before the first decoder layer; it belongs to the first stage.
        after: what is behind the last decoder layer; it belongs to the last stage.
        tp_plan: how tensor parallelism cuts a decoder layer: transformers' word for it, by name within the layer.
        positions: which of `embeddings` are learned positions, looked up whatever hidden states come in; `None` if
            positions are rotary.
    """

    layers: str
    embeddings: tuple[str, ...]
    after: tuple[str, ...]
    tp_plan: Mapping[str, str]
    positions: str | None = None


FAMILIES = (
    *("apertus", "arcee", "axk1", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text"),
    *("glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox", "granite", "granite_swa", "helium", "hy_v3"),
    *("hyperclovax", "jais2", "kolibri1", "laguna", "llama", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2"),
    *("ministral", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu"),
)
"""Model types whose stages and shards were compared with one process (`tests/parallel/test_layouts.py`)."""

FAILING = {
    "aria_text": "the matrices of its experts are transposed",
    "gemma4_text": "its later layers read the token embeddings, which are in the first stage",
    "gemma4_unified_text": "its shards differ from one process by more than rounding",
    "hrm_text": "its layers are two lists, which run in turns",
}
"""Model types that have a plan and failed this comparison, with the reason."""

OWN_PLANS = {
    "gpt2": Family(
        layers="h",
        embeddings=("wte", "wpe", "drop"),
        positions="wpe",
        after=("ln_f",),
        tp_plan={
            "attn.c_attn": "colwise_gather_output",
            "attn.c_proj": "rowwise",
            "mlp.c_fc": "colwise",
            "mlp.c_proj": "rowwise",
        },
    ),
    "opt": Family(
        layers="decoder.layers",
        embeddings=("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
        positions="decoder.embed_positions",
        after=("decoder.final_layer_norm", "decoder.project_out"),
        tp_plan={
            "self_attn.q_proj": "colwise",
            "self_attn.k_proj": "colwise",
            "self_attn.v_proj": "colwise",
            "self_attn.out_proj": "rowwise",
            "fc1": "colwise",
            "fc2": "rowwise",
        },
    ),
}
"""Plans of the architectures for which transformers has none."""


def family_of(backbone: Any) -> Family:
    """Return how a backbone, possibly without weights, is divided.

    Raises:
        UnsupportedModelError: for a model type that was not compared with one process, or failed.
    """
    config = backbone.config
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        reason = f", as {FAILING[kind]}" if kind in FAILING else ""
        raise UnsupportedModelError(
            f"{type(backbone).__name__} (model type {kind!r}) cannot be cut into stages or shards{reason}; the model "
            f"types that can are {', '.join(FAMILIES)}. Train it in one process, with data parallelism, or with "
            "shard_backbone=True."
        )
    if kind in OWN_PLANS:
        return OWN_PLANS[kind]
    names = list(config.base_model_pp_plan)
    place = names.index("layers")
    tp_plan = {key.removeprefix("layers.*."): style for key, style in config.base_model_tp_plan.items()}
    return Family("layers", tuple(names[:place]), tuple(names[place + 1 :]), tp_plan)
