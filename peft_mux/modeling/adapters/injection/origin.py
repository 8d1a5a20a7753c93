"""What a backbone was like before adapters came, and the way back to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from peft_mux.modeling.adapters.attach import detach


def train_only(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Let the given parameters of a model get gradients, and no others."""
    own = {id(parameter) for parameter in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in own)


class Origin:
    """What a backbone was like before adapters came.

    Args:
        backbone: the transformers model, as its owner gave it.
    """

    def __init__(self, backbone: Any) -> None:
        """Write down which parameters had gradients, and whether it trained."""
        self._flags = {name: parameter.requires_grad for name, parameter in backbone.named_parameters()}
        self._training = backbone.training

    def restore(self, backbone: Any) -> None:
        """Take the adapters out of the backbone, and let it be as it was."""
        detach(backbone)
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(self._flags.get(name, True))
        # Older releases of transformers have the second name alone, newer ones warn of it.
        old = None if hasattr(type(backbone), "is_activation_checkpointing") else "is_gradient_checkpointing"
        if getattr(backbone, old or "is_activation_checkpointing", False):
            disable = getattr(backbone, "activation_checkpointing_disable", None)
            (disable or backbone.gradient_checkpointing_disable)()
        backbone.train(self._training)


@contextmanager
def as_it_was(backbone: Any, origin: Origin) -> Iterator[None]:
    """Give the caller's backbone back without adapters where the construction around it fails."""
    try:
        yield
    except Exception:
        origin.restore(backbone)
        raise
