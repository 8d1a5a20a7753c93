"""`bias="all"` and `bias="lora_only"`: every task has its own biases, in place of the backbone's on its own rows.

PEFT trains the backbone's biases themselves, and so lets one adapter of a model have any. Here each module holds a
copy for each such task, and the difference is added to what it computes with its own.

Shape letters: N rows of one task, K output features.
"""

# MERGED: Checks of what a task asks to train of the backbone itself, against the modules that the backbone has.
# MERGED: Which modules several tasks want in ways that cannot lie on top of one another: adapters, copies, rows,
# MERGED: biases.
# MERGED: `modules_to_save`: every task has its own copy of a module of the backbone, and runs it on its own rows.
# MERGED: `trainable_token_indices`: every task has its own rows of an embedding for some tokens, and of a head that
# MERGED: is tied.
# MERGED: PEFT writes a task's rows into a copy of the whole embedding in every pass. Here the embedding is read once
# MERGED: for all
# MERGED: tasks, and a task's own rows take the place of what it gave, at the task's places alone.
# MERGED: Shape letters: N rows of one task, D features, V words, I tokens whose rows are trained.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import Fault, closest, shown
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.backbone.modules import (
    HEAD_NAMES,
    head_kind_for,
    is_inside_wrapper,
    module_names,
    modules_around_adapters,
    put_module,
)

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


class MultiplexedCopies(MultiplexedForward):
    """PEFT's wrapper around a module and the tasks' copies of it; each row meets the copy of its own task."""

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]` of all tasks in stream order, for rows `[..., D]` or token ids `[1, T]`."""
        wrapper: Any = self.module
        segments = self.stream.segments
        is_ids = not x.is_floating_point()
        self.check_rows(x, 1 if is_ids else x.shape[-1])
        if wrapper.disable_adapters or not any(segment.adapter in wrapper.modules_to_save for segment in segments):
            return wrapper.original_module(x)
        rows, parts = x.reshape(-1) if is_ids else x.reshape(-1, x.shape[-1]), []
        for segment, part in zip(segments, self.by_segment(rows), strict=True):
            has_own = segment.adapter in wrapper.modules_to_save
            module = wrapper.modules_to_save[segment.adapter] if has_own else wrapper.original_module
            with self.stream.only(segment):
                parts.append(module(part))
        # Joined from slices and not masked: 0 * NaN would carry one task's NaN to the others.
        y = torch.cat(parts)
        return y.view(*x.shape, -1) if is_ids else y.view(*x.shape[:-1], -1)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this module can be captured: the numbers of rows differ from pass to pass."""
        return f"a task trains its own copy of {self.name}"


@contextmanager
def hidden_copies(backbone: nn.Module) -> Iterator[None]:
    """Show PEFT the backbone's own modules in place of the tasks' copies of them, for the time of an injection.

    PEFT would put adapters into the copies of other tasks, too. Classification heads stay, which every task copies.
    That no two tasks want a module in different ways was checked before (`peft_mux.modeling.adapters.own`).
    """
    wrappers: dict[str, Any] = {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, ModulesToSaveWrapper) and name not in HEAD_NAMES
    }
    for name, wrapper in wrappers.items():
        put_module(backbone, name, wrapper.original_module)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            now: Any = backbone.get_submodule(name)
            # A new task that has a copy, too, came with a wrapper of its own.
            if isinstance(now, ModulesToSaveWrapper):
                wrapper.modules_to_save.update(now.modules_to_save)
                wrapper._adapters |= now._adapters
            put_module(backbone, name, wrapper)


class MultiplexedTokenRows(MultiplexedForward):
    """PEFT's wrapper around an embedding, or around the head that is tied to one, with the rows of each task."""

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the module's output; outside of a pass PEFT's own, which fails for adapters without rows here."""
        tokens: Any = self.module.token_adapter
        if self.stream.is_idle and not all(adapter in tokens.token_indices for adapter in tokens.active_adapters):
            return tokens.base_layer(x, *args, **kwargs)
        return super().__call__(x, *args, **kwargs)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[1, T, D]` of token ids, or the logits `[..., V]` of hidden states."""
        wrapper: Any = self.module
        tokens = wrapper.token_adapter
        base, segments = tokens.base_layer, self.stream.segments
        is_ids = not x.is_floating_point()
        self.check_rows(x, 1 if is_ids else x.shape[-1])
        y = base(x)
        if wrapper.disable_adapters or not any(segment.adapter in tokens.token_indices for segment in segments):
            return y
        rows, outputs, parts = x.reshape(-1) if is_ids else x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), []
        for segment, read, part in zip(segments, self.by_segment(rows), self.by_segment(outputs), strict=True):
            if segment.adapter in tokens.token_indices:
                own = _own_embeddings if is_ids else _own_logits
                parts.append(own(tokens, segment.adapter, read, part))
            else:
                parts.append(part)
        # Joined from slices and not masked: 0 * NaN would carry one task's NaN to the others.
        return torch.cat(parts).view_as(y)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this module can be captured: the numbers of rows differ from pass to pass."""
        return f"a task trains its own rows of {self.name}"


def _own_embeddings(tokens: Any, adapter: str, ids_N: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
    indices_I, rows_ID = _indices(tokens, adapter, ids_N.device), tokens.trainable_tokens_delta[adapter]
    is_own_NI = ids_N[:, None] == indices_I[None, :]
    own_ND = rows_ID[is_own_NI.int().argmax(dim=1)].to(y_ND.dtype)
    scale = tokens._get_embed_scale()
    if scale is not None:
        own_ND = own_ND * scale.to(y_ND.dtype)
    base: nn.Embedding = tokens.base_layer
    if base.padding_idx is not None:  # which an embedding gives no gradient
        own_ND = torch.where((ids_N == base.padding_idx)[:, None], own_ND.detach(), own_ND)
    return torch.where(is_own_NI.any(dim=1)[:, None], own_ND, y_ND)


def _own_logits(tokens: Any, adapter: str, x_ND: torch.Tensor, y_NV: torch.Tensor) -> torch.Tensor:
    own_NI = F.linear(x_ND, tokens.trainable_tokens_delta[adapter].to(x_ND.dtype))
    return y_NV.index_copy(1, _indices(tokens, adapter, x_ND.device), own_NI.to(y_NV.dtype))


def _indices(tokens: Any, adapter: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(tokens.token_indices[adapter], device=device)


@contextmanager
def only_rows_of(backbone: nn.Module, adapter: str) -> Iterator[None]:
    """Show PEFT those embeddings alone as trained of which an adapter trains rows, in the `with` block.

    PEFT asks every wrapper for the rows of the adapter that it saves or loads, and fails where there are none.

    Args:
        backbone: the model, with the adapters of all tasks.
        adapter: internal id of the adapter.
    """
    others: dict[str, Any] = {
        name: module
        for name, module in modules_around_adapters(backbone)
        if isinstance(module, TrainableTokensWrapper) and adapter not in module._adapters
    }
    for name, wrapper in others.items():
        put_module(backbone, name, wrapper.original_module)
    try:
        yield
    finally:
        for name, wrapper in others.items():
            put_module(backbone, name, wrapper)
