"""`TypeEntry`: all that the product says of one PEFT type: how it runs, what of it may be set, why it is refused.

Entries know types by name, as releases of PEFT have more types or fewer; those that the installed one lacks are passed
over. The kind that an entry stands for is made of it in `peft_mux.modeling.adapters.catalogue.kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec

from peft import PeftType


class Category(Enum):
    """How a PEFT type runs when tasks of it share a pass."""

    FUSED = "fused"
    SLICED = "sliced"
    WEIGHT_SPACE = "weight-space"
    PROMPT = "prompt/KV"
    REFUSED = "refused"

    @property
    def meaning(self) -> str:
        """What it means, in a sentence."""
        return _MEANINGS[self]


_MEANINGS = {
    Category.FUSED: "The frozen layer runs once over the whole stream, and one function adds what the adapters of all "
    "tasks give, each on its own rows; on a GPU those of LoRA and of Adapter Tuning are a few launches for all tasks.",
    Category.SLICED: "PEFT's own layer runs on the rows of each task; it adds to what the frozen one gives.",
    Category.WEIGHT_SPACE: "PEFT's own layer runs on the rows of each task, with a weight, or a rotation of the frozen "
    "one's inputs, that it makes anew in each pass: its cost grows with the layer's size as well as with the rows.",
    Category.PROMPT: "Virtual tokens, or keys and values before the first token, of each sequence in the stream.",
    Category.REFUSED: "A task of this type is refused before anything runs, with the reason and the nearest type.",
}


WEIGHTS_ARE_READ = "what it begins with is computed from frozen weights"
"""Why a type that reads weights cannot be held by a part of a model."""


@dataclass(frozen=True)
class TypeEntry:
    """What is known of one PEFT type.

    Attributes:
        name: name of the member of `PeftType`.
        category: how it runs; refused where it does not.
        trains: what it trains, in a phrase.
        fields: fields of its configuration that may be set, beside those that name target modules.
        reasons: why other fields may not be set, by name.
        spans_layers: why a process that holds some of the layers cannot hold it, such as what layers of a task share;
            empty where each layer is by itself.
        needs_weights: it cannot even be described before frozen weights are loaded.
        reads_weights: its initial state is computed from frozen weights, which a part of a model does not have all of.
        draws: it draws random numbers for whole weights in training, which are made to belong to the task's step.
        shares_base: its layers call the frozen ones with the inputs that they get themselves, which then run once for
            all tasks.
        needs: a package that PEFT imports for it.
        refusal: why tasks of this type are refused.
        nearest: names of types that work and come nearest to a refused one; the nearest first.
    """

    name: str
    category: Category
    trains: str
    fields: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    spans_layers: str = ""
    reads_weights: bool = False
    needs_weights: bool = False
    draws: bool = False
    shares_base: bool = False
    needs: str = ""
    refusal: str = ""
    nearest: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that refusals are whole."""
        if bool(self.refusal) != (self.category is Category.REFUSED) or bool(self.refusal) != bool(self.nearest):
            raise ValueError(f"{self.name}: a refused type has a reason and a nearest type, and no other type has one.")

    @property
    def peft_type(self) -> PeftType | None:
        """The member of PEFT's enumeration; `None` where the installed PEFT has no such type."""
        return PeftType.__members__.get(self.name)

    @property
    def is_importable(self) -> bool:
        """Whether the package that PEFT needs for it is installed."""
        return not self.needs or find_spec(self.needs) is not None
