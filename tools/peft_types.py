"""The page `docs/peft_types.md`: `python -m tools.peft_types docs/peft_types.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from peft_mux.modeling.adapters.catalogue import ENTRIES, WEIGHTS_ARE_READ, Category, TypeEntry
from peft_mux.modeling.adapters.fields import BOOKKEEPING_FIELDS
from peft_mux.modeling.adapters.kind import entry_of

COMMAND = "python -m tools.peft_types"

MEANINGS = {
    Category.FUSED: "The frozen layer runs once over the whole stream, and one function adds what the adapters of all "
    "tasks give, each on its own rows; on a GPU the products of LoRA and of Adapter Tuning are a few launches for all "
    "tasks.",
    Category.SLICED: "PEFT's own layer runs on the rows of each task; it adds to what the frozen one gives.",
    Category.WEIGHT_SPACE: "PEFT's own layer runs on the rows of each task, with a weight, or a rotation of the frozen "
    "one's inputs, that it makes anew in each pass: its cost grows with the layer's size as well as with the rows.",
    Category.PROMPT: "Virtual tokens, or keys and values before the first token, of each sequence in the stream.",
    Category.REFUSED: "A task of this type is refused before anything runs, with the reason and the nearest type.",
}

TRAINS = {
    "LORA": "low-rank factors",
    "BOTTLENECK": "small networks behind layers (Adapter Tuning); registered by peft_mux",
    "DIFF_PRUNING": "sparse differences of weights; registered by peft_mux",
    "IA3": "one factor for each output of a layer (for each input of `feedforward_modules`, where the layer runs by "
    "task)",
    "BEFT": "a bias for each adapted layer",
    "ROAD": "rotations of pairs of output features",
    "MISS": "a matrix shared by shards of the inputs",
    "GRALORA": "low-rank factors for each block of a weight",
    "DELORA": "low-rank factors of bounded norm, and the bound",
    "DEFT": "a projection that takes a subspace out of the outputs, and what comes in its place",
    "OSF": "the small singular values and vectors of a weight, away from the large ones",
    "PSOFT": "a rotation within the principal subspace of a weight",
    "ADAMSS": "low-rank factors in clusters of a weight's principal subspace",
    "LN_TUNING": "a copy of the norms",
    "TRAINABLE_TOKENS": "the embeddings of some tokens",
    "VERA": "two vectors a layer around frozen random projections",
    "PVERA": "as VeRA, of a random variable of which mean and variance are learned",
    "RANDLORA": "factors of many frozen random products",
    "VBLORA": "a bank of vectors, of which all layers choose their low-rank factors",
    "UNILORA": "one vector that the low-rank factors of all layers are read from",
    "TINYLORA": "a few numbers a group of layers, projected onto the singular vectors of their weights",
    "FROD": "singular values, and a sparse matrix, on a basis that all layers share",
    "LOHA": "an elementwise product of two low-rank matrices",
    "LOKR": "a Kronecker product, one of its factors perhaps of low rank",
    "HIRA": "a low-rank matrix that multiplies the frozen weight elementwise",
    "BOFT": "butterflies of orthogonal blocks that rotate a weight",
    "OFT": "orthogonal blocks that rotate the inputs",
    "HRA": "a chain of reflections of the inputs",
    "SHIRA": "some elements of a weight",
    "SUPERTUNING": "the greatest elements of a weight, perhaps with low-rank factors",
    "C3A": "circular convolutions of blocks",
    "FOURIERFT": "some Fourier coefficients of a change of the weight",
    "WAVEFT": "some wavelet coefficients of a change of the weight",
    "GLORA": "factors, sums and biases on weight and bias",
    "PEANUT": "a small network that makes a change of the weight of the weight",
    "PROMPT_TUNING": "virtual tokens before each sequence",
    "MULTITASK_PROMPT_TUNING": "virtual tokens, scaled by a low-rank matrix for each task",
    "P_TUNING": "virtual tokens, made by a small network",
    "PREFIX_TUNING": "keys and values before each sequence",
    "CPT": "virtual tokens that begin as those of an example, with a loss of its own",
    "CARTRIDGE": "keys and values that stand for a long text",
    "ADAPTION_PROMPT": "keys and values that a gate lets into the attention of the upper layers",
    "ADALORA": "low-rank factors whose ranks are given to the layers that need them most",
    "XLORA": "a classifier that mixes LoRA adapters that were trained before",
    "POLY": "a bank of low-rank factors, and a router that chooses among them by task",
    "LILY": "low-rank factors that layers share, and a router over them",
    "SHADOW": "a small network of layers beside the backbone",
}
"""What each type trains, in a phrase."""

CLASSIFYING_PROMPTS = """\
## Prompts that classify

A prompt with `task_type="SEQ_CLS"` or `"TOKEN_CLS"` trains a copy of the classification head as well, as in PEFT. Where
PEFT itself fails, or its results depend on padding, the task is refused with the reason:

| type | `SEQ_CLS`, first token pooled (BERT, RoBERTa, ELECTRA) | \
`SEQ_CLS`, last token pooled (Llama, Qwen, GPT-2) | `TOKEN_CLS` |
|---|---|---|---|
| `PREFIX_TUNING`, `CARTRIDGE` | yes | yes | yes |
| `PROMPT_TUNING`, `P_TUNING`, `MULTITASK_PROMPT_TUNING` | yes | \
no: PEFT passes embeddings, in which the model cannot see padding, so it pools the last position of the batch | \
no: PEFT's loss fails on the virtual tokens, which have no labels |
| `CPT` | no: PEFT refuses it | no: PEFT refuses it | no: PEFT refuses it |

The first token of a sequence with virtual tokens is a virtual one; PEFT pools it, and so does peft_mux. A prefix needs
a backbone that takes `past_key_values`, which DistilBERT, ALBERT and ModernBERT do not. Virtual tokens need embeddings
as wide as the layers (not those of `electra-small`).
"""

_TARGET_FIELDS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"}
_OF_BACKBONE = {"bias", "modules_to_save"}


def page() -> str:
    """Return the page, in Markdown, for the types of the installed PEFT."""
    entries = [_listed(peft_type) for peft_type in PeftType]
    parts = [*_head(entries), *_table(entries), "", *_refusals(entries), CLASSIFYING_PROMPTS, *_fields(entries)]
    return "\n".join(parts).rstrip() + "\n"


def _listed(peft_type: PeftType) -> TypeEntry:
    """Return the entry of a type; one that only lacks a package here is listed as if the package were installed."""
    entry = ENTRIES.get(peft_type.name)
    return entry if entry is not None and entry.needs else entry_of(peft_type)


def _head(entries: list[TypeEntry]) -> Iterator[str]:
    trained = sum(entry.category is not Category.REFUSED for entry in entries)
    yield "# PEFT types"
    yield ""
    yield f"<!-- Written by `{COMMAND}`; a test holds this page to it. -->"
    yield ""
    yield f"Of the {len(entries)} members of `PeftType`, {trained} are trained, in one pass with tasks of any other."
    yield "Each task has the initial weights, losses, gradients and files that plain PEFT gives it alone; what layers"
    yield "of an adapter share is shared within one task only."
    yield ""
    for category in Category:
        yield f"* **{category.value}**: {MEANINGS[category]}"
    yield ""
    yield "Where the frozen layer runs once, it does so over the rows of all tasks; beside tasks of types that want it"
    yield "by task, as long as these have at most half of the rows. LoHa and LoKr compute with their factors, where"
    yield "that is less work than the change of the weight that they stand for."
    yield ""


def _table(entries: list[TypeEntry]) -> Iterator[str]:
    yield "| type | how | frozen layer runs | what it trains | stages of a pipeline | sharded backbone |"
    yield "|---|---|---|---|---|---|"
    for entry in sorted(entries, key=lambda entry: (list(Category).index(entry.category), entry.name)):
        base = ""
        if entry.category is not Category.REFUSED:
            is_once = entry.shares_base or entry.category in (Category.FUSED, Category.PROMPT)
            base = "once" if is_once else "by task"
        needs = f" (needs `{entry.needs}`)" if entry.needs else ""
        how = f"{entry.category.value} | {base}"
        yield f"| `{entry.name}` | {how} | {TRAINS[entry.name]}{needs} | {_stages(entry)} |"


def _stages(entry: TypeEntry) -> str:
    if entry.category not in (Category.SLICED, Category.WEIGHT_SPACE, Category.FUSED):
        return "no | no"
    shards = "from the beginning of a run" if entry.reads_weights else "yes"
    reason = entry.spans_layers or (WEIGHTS_ARE_READ if entry.reads_weights else "")
    return f"no: {reason} | {shards}" if reason else f"yes | {shards}"


def _refusals(entries: list[TypeEntry]) -> Iterator[str]:
    yield "Tensor parallelism cuts the adapters of LoRA alone; tasks of all other types are refused there by name."
    yield ""
    yield "## Refused, and why"
    yield ""
    yield "| type | why | nearest that works |"
    yield "|---|---|---|"
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.category is Category.REFUSED:
            yield f"| `{entry.name}` | {entry.refusal} | {', '.join(f'`{name}`' for name in entry.nearest)} |"
    yield ""


def _fields(entries: list[TypeEntry]) -> Iterator[str]:
    yield "## What may be set"
    yield ""
    yield "Any field that PEFT's configuration of a type has, but for the reasons below, and but for `bias` and"
    yield "`modules_to_save`, which train parts of the backbone and are LoRA's alone ([its fields](lora_fields.md))."
    yield "Beside `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern`, `fan_in_fan_out` and"
    yield "`task_type`, where the type has them, these are:"
    yield ""
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.category in (Category.REFUSED, Category.FUSED):
            continue
        hidden = {*_TARGET_FIELDS, *_OF_BACKBONE, *BOOKKEEPING_FIELDS, *entry.reasons}
        names = [one.name for one in fields(PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[entry.name]])]
        listed = ", ".join(f"`{name}`" for name in names if name not in hidden) or "nothing"
        reasons = {name: reason for name, reason in entry.reasons.items() if name not in _OF_BACKBONE}
        yield f"* `{entry.name}`: {listed}." + "".join(f" Not `{name}`: {reasons[name]}." for name in reasons)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
