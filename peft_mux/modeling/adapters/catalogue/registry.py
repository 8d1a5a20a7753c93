"""Which entry a PEFT type has: all that checks, documents and tests know of types is read off here."""

from __future__ import annotations

from peft import PeftType

from peft_mux.modeling.adapters.catalogue.adding import ADDING, SHARING
from peft_mux.modeling.adapters.catalogue.entry import Category, TypeEntry
from peft_mux.modeling.adapters.catalogue.others import FUSED, PROMPTS, REFUSED
from peft_mux.modeling.adapters.catalogue.weights import WEIGHT_SPACE
from peft_mux.modeling.adapters.kind import KINDS
from peft_mux.modeling.adapters.sliced import SlicedKind

ENTRIES: dict[str, TypeEntry] = {
    entry.name: entry for entry in (*FUSED, *ADDING, *SHARING, *WEIGHT_SPACE, *PROMPTS, *REFUSED)
}
"""What is known of PEFT's types, by name; also of types that the installed PEFT lacks."""

_ALWAYS = ("LORA",)


def register_entry(entry: TypeEntry) -> TypeEntry:
    """Say what is to be known of a type, in place of what was known of it before; returns the entry."""
    ENTRIES[entry.name] = entry
    return entry


def entry_of(peft_type: PeftType) -> TypeEntry:
    """Return what is known of a PEFT type; a type that no entry tells of has one made from its kind, or is refused."""
    entry, kind = ENTRIES.get(peft_type.name), KINDS.get(peft_type)
    if kind is not None:
        if entry is not None and entry.category is not Category.REFUSED:
            return entry
        category = Category.SLICED if isinstance(kind, SlicedKind) else Category.FUSED
        return TypeEntry(peft_type.name, category, entry.trains if entry else "what its own documents say")
    if entry is not None and entry.category is Category.REFUSED:
        return entry
    return _refused(peft_type.name, entry)


def category_of(peft_type: PeftType) -> Category:
    """Return how a PEFT type runs here."""
    return entry_of(peft_type).category


def _refused(name: str, entry: TypeEntry | None) -> TypeEntry:
    if entry is None:
        trains, refusal = "unknown here", "this release of peft_mux does not know it"
    elif not entry.is_importable:
        trains, refusal = entry.trains, f"PEFT needs the package {entry.needs} for it, which is not installed"
    else:
        trains, refusal = entry.trains, "it has no kind of its own here"
    return TypeEntry(name, Category.REFUSED, trains, refusal=refusal, nearest=_ALWAYS)
