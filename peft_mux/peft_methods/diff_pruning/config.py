"""`DiffPruningConfig`: what an adapter of Diff Pruning is like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig

from peft_mux.errors import Fault, raise_faults, shown
from peft_mux.peft_methods.field_checks import flag_faults, is_number, regex_clash_faults
from peft_mux.peft_methods.registration import own_peft_type

DIFF_PRUNING = own_peft_type("DIFF_PRUNING")

MOST_KEPT = 0.5
"""Share of kept elements up to which values with their places are less than a dense difference."""


@dataclass
class DiffPruningConfig(PeftConfig):
    """Configuration of Diff Pruning (Guo et al., 2021, "Parameter-Efficient Transfer Learning with Diff Pruning").

    A targeted weight `W` becomes `W + z * w`. The gates `z` in [0, 1] are drawn from a hard-concrete distribution,
    whose location `alpha` is learned beside `w`; the number of open gates that is to be expected, times
    `l0_weight`, is added to the task's loss. In evaluation the gates are those of no noise. `DiffPruningModel.prune`
    keeps the elements of greatest magnitude over all targets (the L0-ball projection of the paper), for serving.

    While it trains, an adapter holds two numbers for each element of its targets, as the paper's does; once pruned,
    two for each element that was kept.

    Args:
        target_sparsity: share of the targets' elements that pruning keeps, as the paper calls it: 0.005 is 0.5 %.
        l0_weight: weight of the penalty, for each gate that is open in expectation.
        structured: gate each output feature as a whole beside its elements ("structured" there, with rows for groups).
        alpha_init: the locations at the beginning; 5 leaves nearly all gates open.
        concrete_lower: where the stretched distribution begins, below 0.
        concrete_upper: where it ends, above 1.
        target_modules: names of linear layers, a regular expression over full names, or "all-linear".
        exclude_modules: names of layers, or a regular expression, that are left out.
        layers_to_transform: numbers of the blocks that are adapted; all by default.
        layers_pattern: name of the list of blocks, where it has an unusual one.
        modules_to_save: modules of which a trained copy is saved beside the adapter, such as a new head.
        kept: elements that were kept of each target, by its name; written by `prune`, and `None` before it.

    Raises:
        ConfigError: naming each field with what it may hold.

    Example:
        >>> from peft_mux import DiffPruningConfig
        >>> DiffPruningConfig(target_modules=["q_proj", "v_proj"]).target_sparsity
        0.005
    """

    target_sparsity: float = 0.005
    l0_weight: float = 1.25e-7
    structured: bool = False
    alpha_init: float = 5.0
    concrete_lower: float = -1.5
    concrete_upper: float = 1.5
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = field(default=None)
    kept: dict[str, int] | None = field(default=None)

    def __post_init__(self) -> None:
        """Check the fields, and name the type."""
        super().__post_init__()
        self.peft_type = DIFF_PRUNING
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)
        raise_faults(diff_pruning_faults(self, type(self).__name__))


def diff_pruning_faults(config: DiffPruningConfig, where: str) -> list[Fault]:
    """Return what is wrong with the fields of a configuration, whatever the backbone.

    Args:
        config: an adapter configuration, whose fields may have been set to anything.
        where: prefix of the fields.
    """
    ranges: list[tuple[str, Any, str]] = [
        ("target_sparsity", lambda value: 0 < value <= MOST_KEPT, f"a share above 0, at most {MOST_KEPT}"),
        ("l0_weight", lambda value: value >= 0, "a finite number of at least 0"),
        ("alpha_init", lambda value: abs(value) <= 50, "a number from -50 to 50"),
        ("concrete_lower", lambda value: -100 <= value < 0, "a number from -100 to 0, without 0"),
        ("concrete_upper", lambda value: 1 < value <= 100, "a number above 1, at most 100"),
    ]
    faults = []
    for name, is_allowed, allowed in ranges:
        value = getattr(config, name)
        if not is_number(value) or not is_allowed(value):
            faults.append(Fault(f"{where}.{name}", shown(value), allowed))
    if config.kept is not None and not _are_counts(config.kept):
        faults.append(Fault(f"{where}.kept", shown(config.kept), "None, or what `prune` has written"))
    return [*faults, *flag_faults([("structured", config.structured)], where), *regex_clash_faults(config, where)]


def _are_counts(kept: object) -> bool:
    return isinstance(kept, dict) and all(
        isinstance(name, str) and isinstance(count, int) and count >= 0 for name, count in kept.items()
    )
