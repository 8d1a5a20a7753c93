"""The page `docs/peft_types.md`, written from the registry: `python -m tools.peft_types`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from peft import PeftType

from peft_mux.modeling.adapters.catalogue import ENTRIES, WEIGHTS_ARE_READ, Category, TypeEntry, entry_of

COMMAND = "python -m tools.peft_types"


def page() -> str:
    """Return the page, in Markdown, for the types of the installed PEFT."""
    entries = [_listed(peft_type) for peft_type in PeftType]
    return "\n".join([*_head(entries), *_table(entries), "", *_refusals(entries), *_fields(entries)]).rstrip() + "\n"


def _listed(peft_type: PeftType) -> TypeEntry:
    """Return the entry of a type; one that only lacks a package here is listed as where the package is."""
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
        yield f"* **{category.value}**: {category.meaning}"
    yield ""
    yield "Where the frozen layer runs once, it does so over the rows of all tasks; beside tasks of types that want it"
    yield "by task, as long as these have at most half of the rows. LoHa and LoKr compute with their factors, where"
    yield "that is less work than the change of the weight that they stand for."
    yield ""


def _table(entries: list[TypeEntry]) -> Iterator[str]:
    yield "| type | how | frozen layer runs | what it trains | stages of a pipeline | sharded backbone |"
    yield "|---|---|---|---|---|---|"
    for entry in sorted(entries, key=lambda entry: (list(Category).index(entry.category), entry.name)):
        how = f"{entry.category.value} | {_base(entry)}"
        yield f"| `{entry.name}` | {how} | {entry.trains}{_needs(entry)} | {_stages(entry)} |"


def _base(entry: TypeEntry) -> str:
    """Return how often the frozen layer of an adapted one runs in a pass of several tasks."""
    if entry.category is Category.REFUSED:
        return ""
    is_once = entry.shares_base or entry.category in (Category.FUSED, Category.PROMPT)
    return "once" if is_once else "by task"


def _needs(entry: TypeEntry) -> str:
    return f" (needs `{entry.needs}`)" if entry.needs else ""


def _stages(entry: TypeEntry) -> str:
    if entry.category not in (Category.SLICED, Category.WEIGHT_SPACE, Category.FUSED):
        return "no | no"
    shards = "from the beginning of a run" if entry.reads_weights else "yes"
    if entry.spans_layers:
        return f"no: {entry.spans_layers} | {shards}"
    return f"no: {WEIGHTS_ARE_READ} | {shards}" if entry.reads_weights else f"yes | {shards}"


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
    yield "Beside `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern`, `fan_in_fan_out` and"
    yield "`task_type`, where the type has them. Any other field that is not at its default is refused by name."
    yield "LoRA's are told in `peft_mux/modeling/adapters/lora/config.py`."
    yield ""
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.fields or entry.reasons:
            fields = ", ".join(f"`{field}`" for field in entry.fields) or "nothing"
            reasons = "".join(f" Not `{field}`: {reason}." for field, reason in entry.reasons.items())
            yield f"* `{entry.name}`: {fields}.{reasons}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
