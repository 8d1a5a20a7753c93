"""The families of decoders that can be cut into pipeline stages and for tensor parallelism: one table, `FAMILIES`.

`peft_mux.engine.pipeline` reads where layers, embeddings and the last norm lie, `peft_mux.engine.tensor` how the linear
layers of a decoder layer are cut. An entry has the shape of transformers' own plans, so that it can be read off them
once these say all of it: `tp_plan` is `base_model_tp_plan`, and the names of the modules are the keys of
`base_model_pp_plan`. What transformers' plans do not tell stands beside them: learned positions, and layers in which
several matrices are fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.modules import HEAD_NAMES

Style = Literal["colwise", "rowwise"]
"""How tensor parallelism cuts a linear layer, in transformers' words: by its outputs, or by its inputs."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a decoder layer that tensor parallelism cuts: attention or the MLP.

    Its column-parallel layers read the residual stream, and its row-parallel layer writes into it. So the block needs
    one sum of its output over the tensor parallel group in the forward pass, and one of its input's gradient in the
    backward pass (Megatron-LM).

    Attributes:
        module: name of the block within the decoder layer.
        columns: column-parallel layers by name within the block, each with the number of equal matrices that its
            output consists of (GPT-2 keeps q, k and v in one layer).
        row: name of the row-parallel layer within the block.
        is_attention: whether the block is cut by heads.
    """

    module: str
    columns: Mapping[str, int]
    row: str
    is_attention: bool


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of the architectures of one family.

    Attributes:
        layers: name of the list of decoder layers within the base model.
        embeddings: modules before the first decoder layer that are looked up by token or position, or applied to the
            result; they belong to the first stage.
        norm: name of the norm after the last decoder layer; it belongs to the last stage.
        attention: name of the attention block within a decoder layer.
        tp_plan: how tensor parallelism cuts the linear layers, as `base_model_tp_plan` has it.
        positions: which of `embeddings` are learned positions that the model adds to the hidden states that come in as
            well; `None` where positions are rotary.
        fused: number of equal matrices in the output of a layer, by the layer's key in `tp_plan`; one where none is
            named.
        head_counts: attributes of the attention module that count its heads or their channels, and so have to be
            divided; none where model code reads them off the activations.
        heads: attributes of the whole model that may hold an output head; they belong to the last stage.
    """

    layers: str
    embeddings: tuple[str, ...]
    norm: str
    attention: str
    tp_plan: Mapping[str, Style]
    positions: str | None = None
    fused: Mapping[str, int] = field(default_factory=dict)
    head_counts: tuple[str, ...] = ()
    # One backbone has one of them; which, its class tells.
    heads: tuple[str, ...] = ("lm_head", *HEAD_NAMES)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of a decoder layer, in the order in which `tp_plan` first names them."""
        columns: dict[str, dict[str, int]] = {}
        rows: dict[str, str] = {}
        for key, style in self.tp_plan.items():
            module, _, leaf = key.removeprefix(f"{self.layers}.*.").rpartition(".")
            own = columns.setdefault(module, {})
            if style == "colwise":
                own[leaf] = self.fused.get(key, 1)
            else:
                rows[module] = leaf
        return tuple(Block(module, own, rows[module], module == self.attention) for module, own in columns.items())


_LLAMA = Family(
    layers="layers",
    embeddings=("embed_tokens",),
    norm="norm",
    attention="self_attn",
    tp_plan={
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
)

_GPT2 = Family(
    layers="h",
    embeddings=("wte", "wpe", "drop"),
    norm="ln_f",
    attention="attn",
    tp_plan={
        "h.*.attn.c_attn": "colwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    positions="wpe",
    # A plain cut would give one shard all of q: each of the three matrices is cut by itself.
    fused={"h.*.attn.c_attn": 3},
    # GPT-2 splits its fused output by a number that it keeps, not by the width that it sees.
    head_counts=("num_heads", "split_size"),
)

FAMILIES = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}
"""By model type. Others are refused: each has to be compared with a run in one process before it is entered here."""


def family_of(backbone: Any) -> Family:
    """Return what is known of a backbone's family, for pipeline stages and whatever else cuts it.

    Args:
        backbone: the transformers model, possibly without weights.

    Raises:
        UnsupportedModelError: for a model type that is not in the table.
    """
    kind = getattr(backbone.config, "model_type", None)
    if kind not in FAMILIES:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} (model type {kind!r}) cannot be cut into pipeline stages; allowed:"
            f" {', '.join(sorted(FAMILIES))}. Train it in one process, or with data parallelism."
        )
    return FAMILIES[kind]
