"""The kinds of output head that a backbone may end in, as far as class names and PEFT's task types tell them.

What each computes on a packed stream is in `peft_mux.modeling.objectives`; adapters only need what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft_mux.modeling.backbone.modules import HEAD_NAMES


@dataclass(frozen=True, slots=True)
class HeadKind:
    """One kind of output head.

    Attributes:
        name: says in messages which tasks it serves, as in "classification tasks".
        task_types: the `task_type`s of PEFT that ask for it; `None` where a configuration may leave it open.
        auto_class: name of the class of transformers that loads backbones with this head.
        trained_modules: names of the modules that PEFT trains a copy of for each task; none where the head is frozen.
        advice: tells the owner of another backbone how to get this head.
    """

    name: str
    task_types: tuple[str | None, ...]
    auto_class: str
    trained_modules: tuple[str, ...] = ()
    advice: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether all tasks share one frozen head, rather than train a small one each."""
        return not self.trained_modules

    @property
    def class_suffix(self) -> str:
        """What the class names of backbones with this head contain, such as `ForCausalLM`."""
        return self.auto_class.removeprefix("AutoModel")


CLASSIFICATION = HeadKind(
    "classification",
    ("SEQ_CLS",),
    "AutoModelForSequenceClassification",
    HEAD_NAMES,
    "Load it with AutoModelForSequenceClassification to train classifiers.",
)
TOKEN_CLASSIFICATION = HeadKind(
    "token-classification",
    ("TOKEN_CLS",),
    "AutoModelForTokenClassification",
    HEAD_NAMES,
    "Load it with AutoModelForTokenClassification to train classifiers of tokens.",
)
LANGUAGE_MODEL = HeadKind("language-model", ("CAUSAL_LM", None), "AutoModelForCausalLM")
HEAD_KINDS = (CLASSIFICATION, TOKEN_CLASSIFICATION, LANGUAGE_MODEL)
"""All kinds; the last is taken for backbones that name none of the others, such as `GPT2LMHeadModel`."""

SUPPORTED_TASK_TYPES = tuple(task_type for kind in HEAD_KINDS for task_type in kind.task_types)


def head_kind_of(backbone: Any) -> HeadKind:
    """Return the kind of head that a backbone's class name tells."""
    name = type(backbone).__name__
    return next((kind for kind in HEAD_KINDS if kind.class_suffix in name), HEAD_KINDS[-1])


def head_kind_for(task_type: str | None) -> HeadKind:
    """Return the kind of head that a PEFT task type asks for; the last kind for types that none serves."""
    if not isinstance(task_type, (str, type(None))):  # what a configuration holds is checked later
        return HEAD_KINDS[-1]
    return next((kind for kind in HEAD_KINDS if task_type in kind.task_types), HEAD_KINDS[-1])
