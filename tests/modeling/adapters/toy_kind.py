"""A type of adapters from one new file: PEFT's IA3, which scales what a layer gives, through its own layers.

It takes the place of the kind that the catalogue has for the type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftType
from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING

from peft_mux.modeling.adapters.kind import KINDS, CutLayers, Shapes, register_kind, unregister_kind
from peft_mux.modeling.adapters.sliced import SlicedKind
from peft_mux.scheduler.costs.loads import AdapterLoad


class ToyKind(SlicedKind):
    """IA3: one number for each feature of a layer."""

    def __init__(self) -> None:
        super().__init__(
            PeftType.IA3,
            fields=("feedforward_modules", "fan_in_fan_out", "init_ia3_weights"),
            reasons={"modules_to_save": "it trains a copy of a backbone module"},
            default_targets=TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
        )

    def loads(self, shapes: Shapes, cut: CutLayers) -> list[AdapterLoad]:
        """Return one load a layer, of rank 1 and as wide as the vector is long."""
        return [AdapterLoad(1, max(shape)) for name, shape in shapes.items() if self.owns(name)]


@contextmanager
def registered(*kinds: Any) -> Iterator[None]:
    """Let tasks of other types be trained, or of a type by another kind, for the time of the `with` block."""
    before = {kind.peft_type: KINDS.get(kind.peft_type) for kind in kinds}
    for kind in kinds:
        register_kind(kind)
    try:
        yield
    finally:
        for peft_type, kind in before.items():
            if kind is None:
                unregister_kind(peft_type)
            else:
                register_kind(kind)
