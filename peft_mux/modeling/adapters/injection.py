"""What surrounds PEFT's injection of an adapter: checks before it, its randomness, its refusals, and the way back."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.errors import ConfigError, Fault, raise_faults
from peft_mux.modeling.adapters.attach import detach
from peft_mux.modeling.adapters.checks import peft_config_faults, target_faults
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.own.biases import biases_unsaid
from peft_mux.modeling.adapters.own.claims import claim_faults
from peft_mux.modeling.backbone.head_kinds import head_kind_for, head_kind_of
from peft_mux.modeling.backbone.modules import modules_around_adapters
from peft_mux.task_names import check_task_names, name_fault

_REFUSALS = (
    *(TypeError, ValueError, AttributeError, LookupError, ImportError, re.error),
    *(RuntimeError, ArithmeticError, AssertionError),
)
"""Errors that PEFT, and torch below it, raise for values that they cannot use."""

_ENTRIES = ("_modules", "_parameters", "_keys")
"""Where torch's dictionaries of modules and parameters hold what is in them."""


def check_configs(
    peft_configs: Mapping[str, PeftConfig], backbone: Any, held: Mapping[str, PeftConfig] | None = None
) -> None:
    """Check the adapters of new tasks: names, fields, and targets against the backbone.

    Args:
        peft_configs: the `PeftConfig` of each new task, by the task's name.
        backbone: the transformers model that they shall adapt.
        held: configurations of the tasks that are there already, by name; none by default.

    Raises:
        ConfigError: naming every fault of every task.
    """
    faults: list[Fault] = []
    sound: list[Any] = []  # what has fitted the backbone is not held against it again, as that goes through all modules
    for name, config in peft_configs.items():
        fault = name_fault(name, f"tasks.{name}.name")
        faults += [fault] if fault else []
        own = peft_config_faults(config, f"tasks.{name}")
        if not own and (fields := (type(config), vars(config))) not in sound:
            own = target_faults(config, backbone, f"tasks.{name}") + _task_type_faults(config, backbone, name)
            sound += [] if own else [fields]
        faults += own
    held = held or {}
    raise_faults(faults or claim_faults(peft_configs, held, backbone))
    check_task_names(peft_configs, tuple(held))


def _task_type_faults(config: PeftConfig, backbone: Any, name: str) -> list[Fault]:
    kind, wanted = head_kind_of(backbone), head_kind_for(config.task_type)
    if kind == wanted:
        return []
    where, got = f"tasks.{name}.peft_config.task_type", str(getattr(config.task_type, "value", config.task_type))
    allowed = " or ".join(str(task_type) for task_type in kind.task_types)
    return [Fault(where, got, f"{allowed}, as the backbone is a {type(backbone).__name__}", wanted.advice)]


def own_copy(config: PeftConfig, backbone: Any) -> PeftConfig:
    """Return a copy that PEFT may write into, completed as `get_peft_model` completes it."""
    # PEFT writes into what it is given, and one configuration may serve several tasks.
    own = copy.deepcopy(config)
    own.base_model_name_or_path = getattr(backbone, "name_or_path", None)
    own.inference_mode = False
    kind_of(own).complete(own, backbone)
    return own


@contextmanager
def without_renaming_warnings() -> Iterator[None]:
    """Let PEFT read an older name of transformers without a word: no user of either can do anything about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


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


class HiddenAdapters:
    """Takes the adapters out of all tuned layers of a model, and puts them back in their order.

    PEFT goes through all modules many times for each adapter that it adds, those of other adapters included, so that
    many tasks would take time by the square of their number; and it has nothing to do with those. What a layer keeps
    adapters in stays its attribute, empty, but no walk over modules meets it. Heads of tasks stay.

    Args:
        model: the model, adapters injected.
    """

    def __init__(self, model: nn.Module) -> None:
        """Hide nothing yet."""
        self._model = model
        self._entries: dict[nn.Module, dict[str, dict[str, Any]]] = {}
        self._order: dict[nn.Module, list[str]] = {}

    def hide(self) -> None:
        """Hide all adapters, those that have come since too."""
        for layer in [one for _, one in modules_around_adapters(self._model) if isinstance(one, BaseTunerLayer)]:
            self._order[layer] = list(layer._modules)
            for name, child in list(layer._modules.items()):
                if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                    self._take_entries(child)
                    # An attribute as any other: PEFT's layers find it as before.
                    vars(layer)[name] = layer._modules.pop(name)

    def _take_entries(self, child: nn.Module) -> None:
        own = self._entries.setdefault(child, {field: {} for field in _ENTRIES if field in child.__dict__})
        for field, entries in own.items():
            entries.update(child.__dict__[field])
            # A `ParameterDict` keeps its keys beside its parameters, so both are emptied.
            child.__dict__[field].clear()

    def copy(self, adapter: str, new: str) -> dict[int, nn.Parameter]:
        """Enter an adapter into all layers that hold another one, alike to it, and hidden as it is.

        Args:
            adapter: internal id of an adapter that is hidden.
            new: that of the new one.

        Returns:
            its parameters, by `id` of those that they are alike to; they share memory until they are laid out.
        """
        parameters: dict[int, nn.Parameter] = {}
        for own in self._entries.values():
            for entries in own.values():
                if adapter in entries:
                    entries[new] = _copied(entries[adapter], parameters)
        for layer in self._order:
            for value in vars(layer).values():
                if type(value) is dict and adapter in value:  # ranks, scalings and the like, by adapter
                    value[new] = _copied(value[adapter], parameters)
        return parameters

    def show_new(self) -> None:
        """Let walks over modules meet the adapters that have come since they were hidden, and no others."""
        for layer, order in self._order.items():
            now = dict(layer._modules)
            now |= {name: layer.__dict__.pop(name) for name in order if name in layer.__dict__}
            layer._modules.clear()
            layer._modules.update({name: now.pop(name) for name in order if name in now} | now)
        self._order.clear()

    def show_all(self) -> None:
        """Put everything back."""
        self.show_new()
        for child, own in self._entries.items():
            for field, entries in own.items():
                entries.update(child.__dict__[field])
                child.__dict__[field].update(entries)
                # Entries of before come first, whatever was added meanwhile.
                for key in entries:
                    child.__dict__[field][key] = child.__dict__[field].pop(key)
        self._entries.clear()


def _copied(entry: Any, parameters: dict[int, nn.Parameter]) -> Any:
    """Return what a layer shall hold of a new adapter: alike, of parameters that lie where those of the other lie."""
    if isinstance(entry, nn.Parameter):
        if id(entry) not in parameters:
            values = torch.empty_like(entry) if entry.is_meta else entry.detach()
            parameters[id(entry)] = nn.Parameter(values, requires_grad=entry.requires_grad)
        return parameters[id(entry)]
    if not isinstance(entry, nn.Module):
        return copy.copy(entry)
    new = object.__new__(type(entry))
    # Hooks and buffers lie in dictionaries of the module's own; `copy.copy` of ordered ones takes many times as long.
    new.__dict__.update({key: value.copy() if isinstance(value, dict) else value for key, value in vars(entry).items()})
    for entries in (new._parameters, new._modules):
        entries.update({key: _copied(value, parameters) for key, value in entries.items()})
    return new


@contextmanager
def hidden_adapters(model: nn.Module) -> Iterator[HiddenAdapters]:
    """Hide the adapters of all tuned layers of a model for the time of the block.

    Args:
        model: the model, adapters injected.

    Yields:
        what hides those that have come since, too, or shows them alone.
    """
    hidden = HiddenAdapters(model)
    hidden.hide()
    try:
        yield hidden
    finally:
        hidden.show_all()


@contextmanager
def only_adapter(model: nn.Module, adapter: str) -> Iterator[None]:
    """Take the adapters of all others out of all tuned layers for the time of the block, in which none is added.

    As `hidden_adapters`, and for its reason.

    Args:
        model: a model with adapters.
        adapter: internal id of the task whose adapter stays.
    """
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for layer in [one for _, one in modules_around_adapters(model) if isinstance(one, BaseTunerLayer)]:
        for child in layer.children():
            if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                for entries in [child.__dict__[field] for field in _ENTRIES if field in child.__dict__]:
                    taken.append((entries, dict(entries)))
                    for key in taken[-1][1].keys() - {adapter}:
                        del entries[key]
    try:
        yield
    finally:
        # The last first, as tied layers share what they keep, which was taken twice then.
        for entries, before in reversed(taken):
            entries.clear()  # so that all are in their order again
            entries.update(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, as an owner who trains alone would, and put it back afterwards."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def injecting(name: str, config: PeftConfig, seed: int, held: Mapping[str, PeftConfig] | None = None) -> Iterator[None]:
    """Surround PEFT's injection of a task's adapter: its seed, its kind's own needs, and errors that name the task.

    Args:
        name: the task's name.
        config: the copy of its configuration that PEFT is given.
        seed: fixes the initial weights of the adapter.
        held: configurations of the adapters that are there already.
    """
    unsaid = biases_unsaid([config, *(held or {}).values()])
    with seeded(seed), peft_refusals(name), kind_of(config).injecting(), unsaid:
        yield


@contextmanager
def peft_refusals(name: str) -> Iterator[None]:
    """Turn what PEFT itself refuses into an error that names the task."""
    try:
        yield
    except torch.OutOfMemoryError:  # a `RuntimeError` that no configuration is to blame for
        raise
    # What a configuration of another type than it checks leads to, or a pattern that it makes of several fields.
    except _REFUSALS as error:
        raise ConfigError(f"tasks.{name}.peft_config: PEFT refuses it: {error}") from error
