"""`bias="all"` and `bias="lora_only"`: every task has its own biases, in place of the backbone's on its own rows.

PEFT trains the backbone's biases themselves, and so lets one adapter of a model have any. Here each module holds a
copy for each such task, and the difference is added to what it computes with its own.

Shape letters: N rows of one task, K output features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import Fault
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.backbone.modules import is_inside_wrapper

OWN = "own_bias"
"""Where a module keeps the biases of tasks, by the ids of their adapters."""


class MultiplexedBias(MultiplexedForward):
    """A module of the backbone whose bias some tasks train, each with its own.

    Attributes:
        selected: internal id of the adapter that plain forwards use; `None` while adapters are off.
    """

    selected: str | None = None

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the module's output; outside of a pass with the bias of the selected adapter."""
        y = super().__call__(x, *args, **kwargs)
        return own_bias_added(self.module, self.selected, y) if self.stream.is_idle else y

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]` of all tasks in stream order."""
        y = self.original(x)
        segments, own = self.stream.segments, own_biases(self.module)
        if not any(segment.adapter in own for segment in segments):
            return y
        y_TK = self.rows(y, y.shape[-1])
        # Joined from slices and not masked: 0 * NaN would carry one task's NaN to the others.
        found = zip(segments, self.by_segment(y_TK), strict=True)
        parts = [own_bias_added(self.module, segment.adapter, y_NK) for segment, y_NK in found]
        return torch.cat(parts).view_as(y)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this module can be captured: the numbers of rows differ from pass to pass."""
        return f"a task trains its own bias of {self.name}"


def own_biases(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the biases that tasks have of a module, by the ids of their adapters."""
    return module._modules.get(OWN, {})  # type: ignore[return-value]


def own_bias_added(module: Any, adapter: str | None, y_NK: torch.Tensor) -> torch.Tensor:
    """Return outputs that hold the module's bias with the one of an adapter instead; the same where it has none."""
    own = own_biases(module)
    return y_NK + (own[adapter] - module.bias).to(y_NK.dtype) if adapter is not None and adapter in own else y_NK


def config_says(config: Any) -> str:
    """Return which biases a configuration asks for; of a type without such a field none."""
    return getattr(config, "bias", "none")


def wanted_biases(config: Any, backbone: nn.Module, adapter: str | None = None) -> dict[str, Any]:
    """Return the modules whose biases a task trains, by their names in a model of its own.

    Args:
        config: the task's adapter configuration.
        backbone: the transformers model, adapters injected.
        adapter: internal id of its adapter; `None` before it is injected, when those of all layers are returned.
    """
    how = config_says(config)
    found = {}
    for name, module in backbone.named_modules() if how != "none" else ():
        around = backbone.get_submodule(name.removesuffix(".base_layer")) if name.endswith(".base_layer") else None
        plain = name.removesuffix(".base_layer")
        if module._parameters.get("bias") is None or is_inside_wrapper(plain):
            continue
        is_adapted = isinstance(around, BaseTunerLayer) and any(
            adapter in getattr(around, part) for part in around.adapter_layer_names
        )
        if how == "all" or is_adapted or adapter is None:
            found[f"{plain}.base_layer" if is_adapted else plain] = module
    return found


def bias_faults(config: Any, backbone: nn.Module, where: str) -> list[Fault]:
    """Return a fault for a bias that is not simply added to what its module computes.

    Args:
        config: the adapter configuration of one task.
        backbone: the transformers model that is to be adapted.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
    """
    allowed = "biases of linear layers and of LayerNorm, not quantised"
    wanted = wanted_biases(config, backbone)
    if config_says(config) != "all" and not isinstance(config.target_modules, str | None):
        wanted = {name: item for name, item in wanted.items() if check_target_module_exists(config, name)}
    if not wanted and config_says(config) != "none":
        return [Fault(f"{where}.bias", repr(config.bias), "'none', as no such module of the backbone has a bias")]
    for name, module in wanted.items():
        if type(module) not in (nn.Linear, Conv1D, nn.LayerNorm):
            got = f"{config.bias!r}, and {name} is a {type(module).__name__}"
            return [Fault(f"{where}.bias", got, allowed, "Leave the biases out.")]
    return []


def add_biases(config: Any, backbone: nn.Module, adapter: str) -> None:
    """Give a task its copies of the biases that it trains.

    Args:
        config: the task's adapter configuration.
        backbone: the transformers model, the task's adapter injected.
        adapter: internal id of the adapter.
    """
    for module in wanted_biases(config, backbone, adapter).values():
        if OWN not in module._modules:
            setattr(module, OWN, nn.ParameterDict())
        getattr(module, OWN)[adapter] = nn.Parameter(module.bias.detach().clone())


def names_alone(
    parameters: Mapping[str, nn.Parameter], config: Any, backbone: nn.Module, adapter: str
) -> dict[str, nn.Parameter]:
    """Return a task's parameters with its biases named as if no other task adapted their modules."""
    wanted = wanted_biases(config, backbone, adapter).items()
    alone = {id(getattr(module, OWN)[adapter]): f"base_model.model.{name}.{OWN}" for name, module in wanted}
    return {alone.get(id(parameter), name): parameter for name, parameter in parameters.items()}


def forget_biases(backbone: nn.Module, adapter: str | None = None) -> None:
    """Drop the biases of an adapter; those of all where it is `None`."""
    for module in backbone.modules():
        own: Any = module._modules.get(OWN)
        if own is not None and adapter is None:
            delattr(module, OWN)
        elif own is not None and adapter in own:
            del own[adapter]


def merge_biases(backbone: nn.Module, adapter: str) -> None:
    """Write the biases of an adapter into the backbone."""
    for module in list(backbone.modules()):
        own = own_biases(module)
        if adapter in own:
            module.bias.data = own[adapter].detach().clone()  # type: ignore[union-attr]
            vars(module).pop("forward", None)


def select_biases(backbone: nn.Module, adapter: str | None) -> None:
    """Let plain forwards use the biases of an adapter; the backbone's own where it is `None`."""
    for module in backbone.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, MultiplexedBias):
            forward.selected = adapter


@contextmanager
def biases_unsaid(configs: Iterable[Any]) -> Iterator[None]:
    """Let PEFT read of no biases, which it would train in the backbone itself, in the `with` block."""
    said = [(config, config.bias) for config in configs if config_says(config) != "none"]
    for config, _ in said:
        config.bias = "none"
    try:
        yield
    finally:
        for config, bias in said:
            config.bias = bias
