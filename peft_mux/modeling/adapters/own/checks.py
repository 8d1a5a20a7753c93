"""Checks of what a task asks to train of the backbone itself, against the modules that the backbone has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from peft_mux.errors import Fault, closest, shown
from peft_mux.modeling.backbone.head_kinds import head_kind_for
from peft_mux.modeling.backbone.modules import is_inside_wrapper


def own_copy_faults(config: Any, backbone: Any, where: str) -> list[Fault]:
    """Return what is wrong with `modules_to_save` and `trainable_token_indices`, given the backbone.

    Args:
        config: the adapter configuration of one task.
        backbone: the transformers model that is to be adapted; adapters of other tasks may be in it.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
    """
    modules = {name: module for name, module in backbone.named_modules() if name and not is_inside_wrapper(name)}
    head = backbone.get_output_embeddings()
    heads = head_kind_for(config.task_type).trained_modules
    wanted = [name for name in getattr(config, "modules_to_save", None) or () if name not in heads]
    faults = [fault for name in wanted for fault in _copy_faults(name, modules, head, f"{where}.modules_to_save")]
    return faults + _token_faults(config, modules, backbone, f"{where}.trainable_token_indices")


def _copy_faults(wanted: str, modules: Mapping[str, nn.Module], head: Any, where: str) -> list[Fault]:
    # PEFT, too, looks at how names end.
    found = {name: module for name, module in modules.items() if name.endswith(wanted)}
    allowed = "embeddings, norms and the output head, by the ends of their names"
    if not found:
        leaves = sorted({name.rsplit(".", 1)[-1] for name in modules})
        return [Fault(where, repr(wanted), allowed, closest(wanted, leaves))]
    faults = []
    for name, module in found.items():
        if isinstance(module, AuxiliaryTrainingWrapper | BaseTunerLayer):
            continue  # other tasks train it, too, which `claims` looks at
        if any(True for _ in module.children()):
            fix = f"{name} has modules of its own, which other tasks adapt; name those that shall be trained whole."
        elif isinstance(module, nn.Linear) and module is not head:
            fix = f"{name} is a linear layer, which other tasks adapt; adapt it with a high rank."
        else:
            continue
        faults.append(Fault(where, f"{wanted!r} ({type(module).__name__})", allowed, fix))
    return faults[:1]


def _token_faults(config: Any, modules: Mapping[str, nn.Module], backbone: Any, where: str) -> list[Fault]:
    given = getattr(config, "trainable_token_indices", None)
    if given is None:
        return []
    embedding = backbone.get_input_embeddings()
    by_layer = given if isinstance(given, dict) else {next(n for n, m in modules.items() if m is embedding): given}
    faults = []
    for wanted, indices in by_layer.items():
        place = where if by_layer is not given else f"{where}[{wanted!r}]"
        faults += _one_layer_faults(wanted, indices, modules, place)
    names = set(getattr(config, "modules_to_save", None) or ())
    for wanted in by_layer:
        if any(wanted.endswith(name) for name in names):
            allowed = "modules that are not in modules_to_save"
            faults.append(Fault(where, repr(wanted), allowed, "Leave one of them out."))
    return faults


def _one_layer_faults(wanted: str, indices: list[int], modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
    found = [module for name, module in modules.items() if name.endswith(wanted)]
    allowed = "the input embedding, or the output head, by the end of its name"
    is_layer: Callable[[Any], bool] = lambda module: isinstance(module, nn.Embedding | nn.Linear)  # noqa: E731
    plain: list[Any] = [getattr(module, "original_module", getattr(module, "base_layer", module)) for module in found]
    if not found or not all(is_layer(module) for module in plain):
        return [Fault(where, repr(wanted), allowed, closest(wanted, sorted(modules)))]
    if any(isinstance(module, nn.Linear) and module.bias is not None for module in plain):
        fix = "PEFT leaves the bias out; train the layer in modules_to_save."
        return [Fault(where, repr(wanted), "layers without a bias", fix)]
    num_words = min(module.weight.shape[0] for module in plain)
    if any(index >= num_words for index in indices):
        return [Fault(where, shown(indices), f"numbers of tokens below {num_words}", "Resize the embedding first.")]
    return []
