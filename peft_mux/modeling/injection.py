"""What surrounds PEFT's injection of an adapter: checks before it, its randomness, its refusals, and the way back."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, TaskType
from peft.tuners.lora import LoraLayer
from torch import nn

from peft_mux.errors import ConfigError, Fault, raise_faults
from peft_mux.modeling.layers import detach
from peft_mux.modeling.support import HEAD_NAMES, peft_config_faults, target_faults
from peft_mux.task import check_task_names, name_fault

_ENTRIES = ("_modules", "_parameters", "_keys")
"""Where torch's dictionaries of modules and parameters hold what is in them."""


def check_configs(peft_configs: Mapping[str, PeftConfig], backbone: Any, taken: tuple[str, ...]) -> None:
    """Check the adapters of new tasks: names, fields, and targets against the backbone.

    Args:
        peft_configs: of each new task, by name.
        backbone: that they shall adapt.
        taken: names of the tasks that are there already.

    Raises:
        ConfigError: naming every fault of every task.
    """
    faults: list[Fault] = []
    for name, config in peft_configs.items():
        fault = name_fault(name, f"tasks.{name}.name")
        faults += [fault] if fault else []
        own = peft_config_faults(config, f"tasks.{name}")
        faults += own or target_faults(config, backbone, f"tasks.{name}") + _task_type_faults(config, backbone, name)
    raise_faults(faults)
    check_task_names(peft_configs, taken)


def _task_type_faults(config: PeftConfig, backbone: Any, name: str) -> list[Fault]:
    is_classifier = "ForSequenceClassification" in type(backbone).__name__
    wants_classifier = config.task_type == TaskType.SEQ_CLS
    if is_classifier == wants_classifier:
        return []
    where, got = f"tasks.{name}.peft_config.task_type", str(getattr(config.task_type, "value", config.task_type))
    if is_classifier:
        return [Fault(where, got, f"SEQ_CLS, as the backbone is a {type(backbone).__name__}")]
    return [
        Fault(
            where,
            got,
            f"CAUSAL_LM or None, as the backbone is a {type(backbone).__name__}",
            "Load it with AutoModelForSequenceClassification to train classifiers.",
        )
    ]


def own_copy(config: PeftConfig, backbone: Any) -> PeftConfig:
    """Return a copy that PEFT may write into, completed as `get_peft_model` completes it."""
    own = copy.deepcopy(config)
    own.base_model_name_or_path = getattr(backbone, "name_or_path", None)
    own.inference_mode = False
    if isinstance(own, LoraConfig) and own.task_type == TaskType.SEQ_CLS:
        own.modules_to_save = list(HEAD_NAMES)
    return own


def is_meta(model: nn.Module) -> bool:
    """Whether a model is a description without weights."""
    return next(model.parameters()).is_meta


@contextmanager
def as_it_was(backbone: Any) -> Iterator[None]:
    """Give the caller's backbone back without adapters where the construction around it fails."""
    flags = {name: parameter.requires_grad for name, parameter in backbone.named_parameters()}
    try:
        yield
    except Exception:
        detach(backbone)
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(flags.get(name, True))
        raise


@contextmanager
def hidden_adapters(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Take the adapters out of all tuned layers for the time of the block, and put them back in their order.

    PEFT goes through all modules several times for each adapter that it adds, those of other adapters included, so that
    many tasks would take time by the square of their number; and it has nothing to do with those. Heads of tasks stay.

    Yields:
        A function that hides what has been added since, too.
    """
    taken: dict[nn.Module, dict[str, dict[str, Any]]] = {}

    def hide() -> None:
        for layer in [module for module in model.modules() if isinstance(module, LoraLayer)]:
            for child in layer.children():
                if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                    own = taken.setdefault(child, {field: {} for field in _ENTRIES if field in child.__dict__})
                    for field, entries in own.items():
                        entries.update(child.__dict__[field])
                        child.__dict__[field].clear()

    hide()
    try:
        yield hide
    finally:
        for child, own in taken.items():
            for field, entries in own.items():
                entries.update(child.__dict__[field])
                child.__dict__[field].update(entries)
                # Entries of before come first, whatever was added meanwhile.
                for key in entries:
                    child.__dict__[field][key] = child.__dict__[field].pop(key)


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
def peft_refusals(name: str) -> Iterator[None]:
    """Turn what PEFT itself refuses into an error that names the task."""
    try:
        yield
    except (TypeError, ValueError, re.error) as error:
        raise ConfigError(f"tasks.{name}.peft_config: PEFT refuses it: {error}") from error
