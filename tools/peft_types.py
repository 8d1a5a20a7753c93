"""The page `docs/peft_types.md`: `python -m tools.peft_types docs/peft_types.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from peft import PeftType

from peft_mux.modeling.adapters.kind import ENTRIES, WEIGHTS_ARE_READ, Category, TypeEntry, entry_of

COMMAND = "python -m tools.peft_types"

MEANINGS = {
    Category.FUSED: "One function adds the outputs of the adapters of all tasks. On a GPU, the products of LoRA and "
    "Adapter Tuning are a few launches.",
    Category.SLICED: "PEFT's own layer runs on the rows of each task, and adds to the frozen output.",
    Category.WEIGHT_SPACE: "PEFT's own layer runs on the rows of each task, and computes a weight (or a rotation of "
    "the inputs) in each pass. The cost also grows with the size of the layer.",
    Category.PROMPT: "Virtual tokens, or keys and values before the first token, for each sequence.",
}

TRAINS = {
    "LORA": "low-rank factors",
    "BOTTLENECK": "small networks behind layers (Adapter Tuning); registered by peft_mux",
    "DIFF_PRUNING": "sparse differences of weights; registered by peft_mux",
    "IA3": "one factor per output of a layer (per input in `feedforward_modules`, for which the layer runs per task)",
    "BEFT": "a bias per adapted layer",
    "ROAD": "rotations of pairs of output features",
    "MISS": "a matrix shared by shards of the inputs",
    "GRALORA": "low-rank factors per block of a weight",
    "DELORA": "low-rank factors of bounded norm, and the bound",
    "DEFT": "a projection that removes a subspace from the outputs, and its replacement",
    "OSF": "the small singular values and vectors of a weight, orthogonal to the large ones",
    "PSOFT": "a rotation within the principal subspace of a weight",
    "ADAMSS": "low-rank factors in clusters of a weight's principal subspace",
    "LN_TUNING": "a copy of the norms",
    "TRAINABLE_TOKENS": "the embeddings of some tokens",
    "VERA": "two vectors per layer around frozen random projections",
    "PVERA": "as VeRA, with a random variable whose mean and variance are learned",
    "RANDLORA": "factors of many frozen random products",
    "VBLORA": "a bank of vectors from which all layers choose their low-rank factors",
    "UNILORA": "one vector from which the low-rank factors of all layers are read",
    "TINYLORA": "a few numbers per group of layers, projected onto the singular vectors of their weights",
    "FROD": "singular values, and a sparse matrix, on a basis that all layers share",
    "LOHA": "an elementwise product of two low-rank matrices",
    "LOKR": "a Kronecker product, optionally with a low-rank factor",
    "HIRA": "a low-rank matrix that multiplies the frozen weight elementwise",
    "BOFT": "butterflies of orthogonal blocks that rotate a weight",
    "OFT": "orthogonal blocks that rotate the inputs",
    "HRA": "a chain of reflections of the inputs",
    "SHIRA": "some elements of a weight",
    "SUPERTUNING": "the largest elements of a weight, optionally with low-rank factors",
    "C3A": "circular convolutions of blocks",
    "FOURIERFT": "some Fourier coefficients of a weight update",
    "WAVEFT": "some wavelet coefficients of a weight update",
    "GLORA": "factors, sums and biases on weight and bias",
    "PEANUT": "a small network that computes a weight update from the weight",
    "PROMPT_TUNING": "virtual tokens before each sequence",
    "MULTITASK_PROMPT_TUNING": "virtual tokens, scaled by a low-rank matrix per task",
    "P_TUNING": "virtual tokens, computed by a small network",
    "PREFIX_TUNING": "keys and values before each sequence",
    "CPT": "virtual tokens initialised from an example, with a loss of its own",
    "CARTRIDGE": "keys and values that represent a long text",
}
"""What each supported type trains, in a phrase."""

CLASSIFYING_PROMPTS = """\
## Prompts that classify

A prompt with `task_type="SEQ_CLS"` or `"TOKEN_CLS"` also trains a copy of the classification head. Where PEFT itself
fails, or its results depend on padding, the task is refused:

| type | `SEQ_CLS`, first token pooled (BERT, RoBERTa, ELECTRA) | \
`SEQ_CLS`, last token pooled (Llama, Qwen, GPT-2) | `TOKEN_CLS` |
|---|---|---|---|
| `PREFIX_TUNING`, `CARTRIDGE` | yes | yes | yes |
| `PROMPT_TUNING`, `P_TUNING`, `MULTITASK_PROMPT_TUNING` | yes | \
no: PEFT's model cannot see padding in embeddings, and pools the last position of the batch | \
no: PEFT's loss fails on the virtual tokens, which have no labels |
| `CPT` | no | no | no: PEFT refuses it |

The first token may be a virtual one; PEFT pools it, and so does peft_mux. A prefix needs
a backbone that takes `past_key_values`, which DistilBERT, ALBERT and ModernBERT do not. Virtual tokens need embeddings
as wide as the layers (not those of `electra-small`).
"""

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
    yield f"<!-- Written by `{COMMAND}`; a test compares this page with it. -->"
    yield ""
    yield f"{trained} of the {len(entries)} members of `PeftType` can be trained, mixed freely in one pass. Each task"
    yield "has the initial weights, losses, gradients and files of plain PEFT. If layers of an adapter share weights,"
    yield "they do so within one task only."
    yield ""
    for category, meaning in MEANINGS.items():
        yield f"* **{category.value}**: {meaning}"
    yield ""
    yield "The frozen layer runs once over the rows of all tasks, unless types that need it **per task** have more than"
    yield "half of the rows. LoHa and LoKr compute with their factors if that is less work."
    yield ""


def _table(entries: list[TypeEntry]) -> Iterator[str]:
    letters: dict[str, str] = {}
    yield "| type | how | trains | stages |"
    yield "|---|---|---|---|"
    for entry in sorted(entries, key=lambda entry: (list(Category).index(entry.category), entry.name)):
        if entry.category is Category.REFUSED:
            continue
        is_once = entry.shares_base or entry.category in (Category.FUSED, Category.PROMPT)
        needs = f" (needs `{entry.needs}`)" if entry.needs else ""
        stages = "yes"
        if entry.category is Category.PROMPT:
            stages = "no"
        elif reason := entry.spans_layers or (WEIGHTS_ARE_READ if entry.reads_weights else ""):
            stages = f"no ({letters.setdefault(reason, 'abcdefghijklmnop'[len(letters)])})"
        how = f"{entry.category.value}{'' if is_once else ', per task'}"
        marked = f"{stages} \\*" if entry.reads_weights else stages
        yield f"| `{entry.name}` | {how} | {TRAINS[entry.name]}{needs} | {marked} |"
    yield ""
    yield "`shard_backbone=True` supports all types except prompt/KV; tasks of types with \\* must exist when the run"
    yield "starts. Tensor parallelism supports LoRA only. Why types cannot be divided into pipeline stages:"
    yield ""
    for reason, letter in letters.items():
        yield f"* ({letter}) {reason}"


def _refusals(entries: list[TypeEntry]) -> Iterator[str]:
    yield "## Refused types"
    yield ""
    yield "| type | reason | nearest type |"
    yield "|---|---|---|"
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.category is Category.REFUSED:
            nearest = ", ".join(f"`{name}`" for name in entry.nearest)
            yield f"| `{entry.name}` | {entry.refusal} | {nearest} |"
    yield ""


def _fields(entries: list[TypeEntry]) -> Iterator[str]:
    yield "## Fields"
    yield ""
    yield "All fields of PEFT's configuration of a type are supported, except these. `bias` and `modules_to_save` train"
    yield "parts of the backbone, and are for LoRA only ([its fields](lora_fields.md))."
    yield ""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.category in (Category.REFUSED, Category.FUSED):
            continue
        for name, reason in entry.reasons.items():
            if name not in _OF_BACKBONE:
                by_reason.setdefault(reason, {}).setdefault(f"`{name}`", []).append(f"`{entry.name}`")
    for reason, fields in by_reason.items():
        types = sorted({kind for kinds in fields.values() for kind in kinds})
        yield f"* {', '.join(types)}: not {', '.join(fields)}: {reason}."


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
