"""A type of adapters from one new file: PEFT's IA3, which scales what a layer gives, through its own layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftType
from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING

from peft_mux.modeling.adapters.kind import AdapterKind, CutLayers, Shapes, register_kind, unregister_kind
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
    """Let tasks of further types be trained for the time of the `with` block."""
    made: list[AdapterKind] = [register_kind(kind) for kind in kinds]
    try:
        yield
    finally:
        for kind in made:
            unregister_kind(kind.peft_type)
