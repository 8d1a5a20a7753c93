"""What of a `LoraConfig` can be trained: fields, numbers, ranks."""

from __future__ import annotations

from collections.abc import Mapping

from peft import LoraConfig
from torch import nn

from peft_mux.errors import Fault

FIELDS = frozenset(
    "r target_modules exclude_modules lora_alpha lora_dropout use_rslora init_lora_weights layers_to_transform "
    "layers_pattern rank_pattern alpha_pattern fan_in_fan_out".split()
)
"""That may be set; any other field that is not at its default is refused by name."""


REASONS = {
    "bias": "it trains biases of the shared backbone",
    "modules_to_save": "it trains a copy of a backbone module; classification heads are added without it",
    "trainable_token_indices": "it trains rows of the shared embedding",
    "use_dora": "DoRA has no multiplexed layer yet",
    "lora_bias": "a bias on lora_B has no multiplexed layer yet",
    "target_parameters": "adapters on bare parameters (experts) have no multiplexed layer yet",
    "layer_replication": "it changes the shared backbone",
}
"""Why some fields may not be set."""


INITIALISERS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the backbone's weights alone."""


def initialiser_faults(config: LoraConfig, where: str) -> list[Fault]:
    """Return a fault for an initialisation that cannot be trained with."""
    if config.init_lora_weights in INITIALISERS:
        return []
    return [
        Fault(
            f"{where}.init_lora_weights",
            repr(config.init_lora_weights),
            ", ".join(map(repr, INITIALISERS)),
            "Initialisations that change the backbone's weights would change every other task.",
        )
    ]


def number_faults(config: LoraConfig, where: str) -> list[Fault]:
    """Return what is wrong with ranks, alphas and dropout."""
    faults = []
    ranks = {"r": config.r, **{f"rank_pattern[{key!r}]": rank for key, rank in (config.rank_pattern or {}).items()}}
    for name, rank in ranks.items():
        # `True` is an int to Python.
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            faults.append(Fault(f"{where}.{name}", repr(rank), "an integer of at least 1"))
    alphas = {"lora_alpha": config.lora_alpha}
    alphas.update({f"alpha_pattern[{key!r}]": alpha for key, alpha in (config.alpha_pattern or {}).items()})
    for name, alpha in alphas.items():
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
            faults.append(Fault(f"{where}.{name}", repr(alpha), "a finite number above 0"))
    dropout = config.lora_dropout
    if not isinstance(dropout, (int, float)) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        faults.append(Fault(f"{where}.lora_dropout", repr(dropout), "a number in [0, 1)"))
    return faults


def rank_faults(config: LoraConfig, matched: Mapping[str, nn.Module], where: str) -> list[Fault]:
    """Return what is wrong with the rank, given the modules that are adapted."""
    widest = max((max(_shape(module)) for module in matched.values()), default=None)
    if widest is None or config.r <= widest:
        return []
    return [Fault(f"{where}.r", repr(config.r), f"at most {widest}, the width of the widest target")]


def _shape(module: nn.Module) -> tuple[int, ...]:
    return tuple(getattr(module, "weight").shape)  # noqa: B009 - every adaptable module has one
