"""Which modules several tasks want in ways that cannot lie on top of one another: adapters, copies, rows, biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists

from peft_mux.errors import Fault
from peft_mux.modeling.backbone.head_kinds import head_kind_for
from peft_mux.modeling.backbone.modules import module_names

_WAYS = {"copy": "modules_to_save", "rows": "trainable_token_indices", "adapters": "target_modules", "biases": "bias"}
"""The field that asks for each way."""


def claim_faults(new: Mapping[str, PeftConfig], held: Mapping[str, PeftConfig], backbone: Any) -> list[Fault]:
    """Return a fault for each new task that wants a module in another way than some other task does.

    Args:
        new: configuration of each new task, by its name.
        held: the same of the tasks that are there already.
        backbone: the transformers model that they adapt.
    """
    configs = {**held, **new}
    names = module_names(backbone)
    shared = {module for config in configs.values() for module, _ in _kept(config, names, backbone)}
    owners: dict[str, tuple[str, str]] = {}
    faults = []
    # Most runs have none of these, and then no module is looked at.
    for task, config in configs.items() if shared else ():
        for module, way in _claims(config, names, backbone, shared):
            first, other = owners.setdefault(module, (way, task))
            if first != way:
                faults.append(
                    Fault(
                        f"tasks.{task}.peft_config.{_WAYS[way]}",
                        module,
                        f'modules that task "{other}" does not name in {_WAYS[first]}',
                        "Name it in the same field for both, or train the two tasks in two runs.",
                    )
                )
    return faults


def _claims(config: Any, names: list[str], backbone: Any, shared: set[str]) -> Iterator[tuple[str, str]]:
    own = dict(_kept(config, names, backbone))
    yield from own.items()
    if getattr(config, "bias", "none") == "all":
        for name in shared - own.keys():
            if getattr(backbone.get_submodule(name), "bias", None) is not None:
                yield name, "biases"
    targets = getattr(config, "target_modules", None)
    # Which leaves the output head out, and embeddings are not linear.
    if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    for name in shared - own.keys():
        if check_target_module_exists(config, name):
            yield name, "adapters"


def _kept(config: Any, names: list[str], backbone: Any) -> Iterator[tuple[str, str]]:
    """Yield each module that a task trains whole or in rows, and which of the two."""
    heads = head_kind_for(config.task_type).trained_modules
    copies = [wanted for wanted in getattr(config, "modules_to_save", None) or () if wanted not in heads]
    tokens: Any = getattr(config, "trainable_token_indices", None)
    if tokens is not None and not isinstance(tokens, dict):
        embedding = backbone.get_input_embeddings()
        tokens = [name for name, module in backbone.named_modules() if module is embedding][:1]
    for way, wanted in (("copy", copies), ("rows", list(tokens or ()))):
        for name in names if wanted else ():
            # PEFT, too, looks at how names end.
            if any(name.endswith(end) for end in wanted):
                yield name, way
