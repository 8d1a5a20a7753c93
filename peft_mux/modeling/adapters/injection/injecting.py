"""PEFT's injection of an adapter: checks before it, its randomness, and its refusals."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftConfig

from peft_mux.errors import ConfigError, Fault, raise_faults
from peft_mux.modeling.adapters.checks import peft_config_faults, target_faults
from peft_mux.modeling.adapters.injection.copies import can_be_copied
from peft_mux.modeling.adapters.injection.draws import Draws, seeded
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.own.biases import biases_unsaid
from peft_mux.modeling.adapters.own.claims import claim_faults
from peft_mux.modeling.backbone.head_kinds import head_kind_for, head_kind_of
from peft_mux.task_names import check_task_names, name_fault

_REFUSALS = (
    *(TypeError, ValueError, AttributeError, LookupError, ImportError, re.error),
    *(RuntimeError, ArithmeticError, AssertionError),
)
"""Errors that PEFT, and torch below it, raise for values that they cannot use."""


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


@contextmanager
def injecting(
    name: str, config: PeftConfig, seed: int, held: Mapping[str, PeftConfig] | None = None
) -> Iterator[Draws]:
    """Surround PEFT's injection of a task's adapter: its seed, its kind's own needs, and errors that name the task.

    Args:
        name: the task's name.
        config: the copy of its configuration that PEFT is given.
        seed: fixes the initial weights of the adapter.
        held: configurations of the adapters that are there already.

    Yields:
        what is drawn, where other adapters may be copies of this one.
    """
    unsaid = biases_unsaid([config, *(held or {}).values()])
    draws = Draws(seed)
    recorded = draws.recorded() if can_be_copied(config) else nullcontext()
    with seeded(seed), peft_refusals(name), kind_of(config).injecting(), unsaid, recorded:
        yield draws


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
