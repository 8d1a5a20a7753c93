"""Initialisations that move a part of the backbone's weight into the adapter, without changing the shared backbone.

PiSSA, OLoRA, CorDA and LoRA-GA begin with factors A0 and B0 and take `s B0 A0` out of the weight, so that the model
starts where it was. The weight belongs to all tasks; so it stays, and each layer keeps A0 and B0 beside the adapter.
What is trained is the pair A, B; what it adds to the backbone is `s (B A - B0 A0)`, a LoRA of twice the rank, and as
such it is saved, in the form into which PEFT converts (`path_initial_model_for_weight_conversion`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora import LoraLayer

_INITIALISERS = ("pissa_init", "olora_init", "corda_init", "lora_ga_init")
"""Methods of PEFT's layer that write into the frozen weight."""

_KEPT = ("lora_initial_A", "lora_initial_B")
"""Where a layer keeps A0 and B0 of each adapter."""


@contextmanager
def backbone_kept() -> Iterator[None]:
    """Let PEFT initialise adapters from the backbone's weights without changing these, in the `with` block."""
    # On the class, for the time of one injection: PEFT makes its layers and initialises them in one go, and draws
    # random numbers on the way, so that what a seed gives depends on every layer before.
    before: dict[str, Any] = {name: getattr(LoraLayer, name) for name in _INITIALISERS}
    for name, method in before.items():
        setattr(LoraLayer, name, _keeping(name, method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(LoraLayer, name, method)


def _keeping(name: str, method: Callable[..., None]) -> Callable[..., None]:
    def initialise(layer: Any, adapter: str, *args: Any) -> None:
        base = layer.get_base_layer()
        if name == "lora_ga_init" and not hasattr(base, "_peft_loraga_grad"):
            raise ValueError(
                "init_lora_weights='lora_ga' found no gradients on the backbone, without which PEFT draws at random; "
                "allowed: a backbone that peft.tuners.lora.loraga.preprocess_loraga has estimated them on."
            )
        frozen = base.weight.data
        whole = frozen.clone()  # PEFT writes into it, or puts another in its place
        try:
            method(layer, adapter, *args)
        finally:
            base.weight.data = frozen.copy_(whole)
        keep_factors(layer, adapter, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)

    return initialise


def keep_factors(layer: Any, adapter: str, a_RD: torch.Tensor, b_KR: torch.Tensor) -> None:
    """Keep copies of A0 and B0 beside an adapter; PEFT moves and deletes them with it."""
    for name, factor in zip(_KEPT, (a_RD, b_KR), strict=True):
        if not hasattr(layer, name):
            # Not persistent: the adapter's files have them in another form, see `saved_form.py`.
            setattr(layer, name, BufferDict({}, persistent=False))
            layer.other_param_names = (*layer.other_param_names, name)
        getattr(layer, name)[adapter] = factor.detach().clone()


def initial_factors(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A0 `[R, D]` and B0 `[K, R]` of an adapter; `None` where it began without taking from the weight."""
    kept = getattr(layer, _KEPT[0], None)
    if kept is None or adapter not in kept:
        return None
    return kept[adapter], getattr(layer, _KEPT[1])[adapter]
