"""`BottleneckConfig`: what an adapter of Adapter Tuning is like."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft import PeftConfig

from peft_mux.errors import Fault, raise_faults, shown
from peft_mux.peft_methods.field_checks import flag_faults, is_number, regex_clash_faults, whole_number_faults
from peft_mux.peft_methods.registration import own_peft_type

BOTTLENECK = own_peft_type("BOTTLENECK")

NON_LINEARITIES = ("relu", "gelu", "silu", "tanh")

DEFAULT_SIZE = 64
"""Features of a bottleneck where neither field says it: the middle one of the sizes that the paper tries for GLUE."""


@dataclass
class BottleneckConfig(PeftConfig):
    """Configuration of Adapter Tuning (Houlsby et al., 2019, "Parameter-Efficient Transfer Learning for NLP").

    A bottleneck stands behind the output `y` of each targeted linear layer: `y + up(f(down(y)))`. In the paper that is
    the projection behind the attention and that behind the feed-forward layer of every block, as in
    `target_modules=["o_proj", "down_proj"]`, which is also the default for known architectures.

    Args:
        bottleneck_size: features between `down` and `up`; 64 where `reduction_factor` does not say it either.
        reduction_factor: the layer's output features divided by those of the bottleneck, in place of a size.
        non_linearity: "relu", "gelu", "silu" or "tanh".
        adapter_dropout: probability of dropping an element of what `down` reads.
        down_bias: whether `down` has a bias.
        up_bias: whether `up` has a bias.
        init_weights: begin with `up` at zero, so that an untrained adapter changes nothing; `False` draws it.
        target_modules: names of linear layers, a regular expression over full names, or "all-linear".
        exclude_modules: names of layers, or a regular expression, that are left out.
        layers_to_transform: numbers of the blocks that are adapted; all by default.
        layers_pattern: name of the list of blocks, where it has an unusual one.
        modules_to_save: modules of which a trained copy is saved beside the adapter, such as a new head.

    Raises:
        ConfigError: naming each field with what it may hold.

    Example:
        >>> from peft_mux import BottleneckConfig
        >>> BottleneckConfig(bottleneck_size=32, target_modules=["o_proj", "down_proj"]).size_for(4096)
        32
    """

    bottleneck_size: int | None = None
    reduction_factor: float | None = None
    non_linearity: str = "gelu"
    adapter_dropout: float = 0.0
    down_bias: bool = True
    up_bias: bool = True
    init_weights: bool = True
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = field(default=None)

    def __post_init__(self) -> None:
        """Check the fields, and name the type."""
        super().__post_init__()
        self.peft_type = BOTTLENECK
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)
        raise_faults(bottleneck_faults(self, type(self).__name__))

    def size_for(self, out_features: int) -> int:
        """Return the features of the bottleneck behind a layer.

        Args:
            out_features: output features of the layer.
        """
        if self.reduction_factor is not None:
            return max(1, int(out_features / self.reduction_factor))
        return DEFAULT_SIZE if self.bottleneck_size is None else self.bottleneck_size


def bottleneck_faults(config: BottleneckConfig, where: str) -> list[Fault]:
    """Return what is wrong with the fields of a configuration, whatever the backbone.

    Args:
        config: an adapter configuration, whose fields may have been set to anything.
        where: prefix of the fields.
    """
    faults, size, factor = [], config.bottleneck_size, config.reduction_factor
    if size is not None:
        faults += whole_number_faults(size, f"{where}.bottleneck_size")
    if factor is not None and (not is_number(factor) or factor < 1):
        faults.append(Fault(f"{where}.reduction_factor", shown(factor), "a finite number of at least 1, or None"))
    if size is not None and factor is not None:
        faults.append(Fault(f"{where}.reduction_factor", shown(factor), "None where bottleneck_size is set"))
    if not isinstance(config.non_linearity, str) or config.non_linearity not in NON_LINEARITIES:
        names = ", ".join(map(repr, NON_LINEARITIES))
        faults.append(Fault(f"{where}.non_linearity", shown(config.non_linearity), names))
    if not is_number(config.adapter_dropout) or not 0 <= config.adapter_dropout < 1:
        faults.append(Fault(f"{where}.adapter_dropout", shown(config.adapter_dropout), "a number in [0, 1)"))
    flags = [(name, getattr(config, name)) for name in ("down_bias", "up_bias", "init_weights")]
    return [*faults, *flag_faults(flags, where), *regex_clash_faults(config, where)]
