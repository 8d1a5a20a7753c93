"""A type of adapters from one new file: PEFT's IA3, which scales the outputs of a layer, through its own layers.

It takes the place of the kind that the catalogue has for the type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft_mux.adapters.sliced import SlicedKind
from peft_mux.modeling.adapters.kind import KINDS, TypeEntry, register_kind


class ToyKind(SlicedKind):
    """IA3: one number for each feature of a layer."""

    def __init__(self) -> None:
        super().__init__(TypeEntry("IA3"))


@contextmanager
def registered(*kinds: Any) -> Iterator[None]:
    """Let tasks of a type be trained by another kind, for the time of the `with` block."""
    before = [KINDS[kind.peft_type] for kind in kinds]
    for kind in kinds:
        register_kind(kind)
    try:
        yield
    finally:
        for kind in before:
            register_kind(kind)
