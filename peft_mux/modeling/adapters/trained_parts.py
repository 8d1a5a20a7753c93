"""Parts of the backbone of which each task trains its own copy: biases, modules, and rows of embeddings.

* `bias="all"` and `bias="lora_only"`: PEFT trains the backbone's biases themselves, and so lets one adapter of a model
  have any. Here each module holds a copy for each such task, and the difference is added to the module's output.
* `modules_to_save`: each task runs its own copy of a module on its own rows.
* `trainable_token_indices`: PEFT writes a task's rows into a copy of the whole embedding in every pass. Here the
  embedding is read once for all tasks, and a task's own rows replace what it gave at the task's places.

Shape letters: N rows of one task, D features, K output features, V words, I tokens whose rows are trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from torch.nn import functional as F

from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.backbone.modules import (
    HEAD_NAMES,
    is_inside_wrapper,
    modules_around_adapters,
    put_module,
)
from peft_mux.modeling.stream import RowSegment

# ----------------------------------------------------------------------- biases

TASK_BIASES = "own_bias"
"""The attribute in which a module keeps the biases of tasks, by the ids of their adapters."""


class MultiplexedBias(MultiplexedForward):
    """A module of the backbone whose bias some tasks train, each with its own.

    Attributes:
        selected: internal id of the adapter that plain forwards use; `None` while adapters are off.
    """

    against_graphs = "a task trains its own bias of {name}"

    selected: str | None = None

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the module's output; outside of a pass with the bias of the selected adapter."""
        y = super().__call__(x, *args, **kwargs)
        return own_bias_added(self.module, self.selected, y) if self.stream.is_idle else y

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]` of all tasks in stream order."""

        def added(segment: RowSegment, y_NK: torch.Tensor) -> torch.Tensor:
            return own_bias_added(self.module, segment.adapter, y_NK)

        return self.by_task(own_biases(self.module), self.original(x), added)


def own_biases(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the biases that tasks have of a module, by the ids of their adapters."""
    return module._modules.get(TASK_BIASES, {})  # type: ignore[return-value]


def own_bias_added(module: Any, adapter: str | None, y_NK: torch.Tensor) -> torch.Tensor:
    """Return outputs that hold the module's bias with that of an adapter instead, if the adapter has one."""
    biases = own_biases(module)
    return y_NK + (biases[adapter] - module.bias).to(y_NK.dtype) if adapter is not None and adapter in biases else y_NK


def wanted_biases(config: Any, backbone: nn.Module, adapter: str | None = None) -> dict[str, Any]:
    """Return the modules whose biases a task trains, by their names in a model of its own.

    Args:
        config: the task's adapter configuration.
        backbone: the transformers model, adapters injected.
        adapter: internal id of its adapter; `None` before it is injected, when those of all layers are returned.
    """
    how = getattr(config, "bias", "none")
    modules = {}
    for name, module in backbone.named_modules() if how != "none" else ():
        around = backbone.get_submodule(name.removesuffix(".base_layer")) if name.endswith(".base_layer") else None
        plain = re.sub(r"(\.base_layer)+$", "", name)  # layers of several types may lie around one module
        if module._parameters.get("bias") is None or is_inside_wrapper(plain):
            continue
        is_adapted = isinstance(around, BaseTunerLayer) and any(
            adapter in getattr(around, part) for part in around.adapter_layer_names
        )
        if how == "all" or is_adapted or adapter is None:
            modules[f"{plain}.base_layer" if is_adapted else plain] = module
    return modules


def add_biases(config: Any, backbone: nn.Module, adapter: str) -> dict[nn.Parameter, str]:
    """Give a task, whose adapter (internal id) was injected, copies of the biases that it trains.

    Returns:
        the names of the copies, as if no other task adapted their modules.
    """
    names = {}
    for name, module in wanted_biases(config, backbone, adapter).items():
        if TASK_BIASES not in module._modules:
            setattr(module, TASK_BIASES, nn.ParameterDict())
        copy = getattr(module, TASK_BIASES)[adapter] = nn.Parameter(module.bias.detach().clone())
        names[copy] = f"base_model.model.{name}.{TASK_BIASES}"
    return names


def forget_biases(backbone: nn.Module, adapter: str | None = None) -> None:
    """Drop the biases of an adapter; those of all if it is `None`."""
    for module in backbone.modules():
        biases: Any = module._modules.get(TASK_BIASES)
        if biases is not None and adapter is None:
            delattr(module, TASK_BIASES)
        elif biases is not None and adapter in biases:
            del biases[adapter]


def merge_biases(backbone: nn.Module, adapter: str) -> None:
    """Write the biases of an adapter into the backbone."""
    for module in list(backbone.modules()):
        biases = own_biases(module)
        if adapter in biases:
            module.bias.data = biases[adapter].detach().clone()  # type: ignore[union-attr]
            vars(module).pop("forward", None)


def select_biases(backbone: nn.Module, adapter: str | None) -> None:
    """Let plain forwards use the biases of an adapter; the backbone's own if it is `None`."""
    for module in backbone.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, MultiplexedBias):
            forward.selected = adapter


@contextmanager
def biases_unsaid(configs: Iterable[Any]) -> Iterator[None]:
    """Hide the `bias` of configurations from PEFT, which would train the backbone's own, in the `with` block."""
    said = [(config, config.bias) for config in configs if getattr(config, "bias", "none") != "none"]
    for config, _ in said:
        config.bias = "none"
    try:
        yield
    finally:
        for config, bias in said:
            config.bias = bias


# ----------------------------------------------------------------------- copies


class MultiplexedCopies(MultiplexedForward):
    """PEFT's wrapper around a module and the tasks' copies of it; each row uses the copy of its task."""

    against_graphs = "a task trains its own copy of {name}"

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]` of all tasks in stream order, for rows `[..., D]` or token ids `[1, T]`."""
        wrapper: Any = self.module
        is_ids = not x.is_floating_point()
        self.check_rows(x, 1 if is_ids else x.shape[-1])
        copies = {} if wrapper.disable_adapters else wrapper.modules_to_save
        if not any(segment.adapter in copies for segment in self.stream.segments):
            return wrapper.original_module(x)
        parts = []
        for segment, part in self.each_task(x.reshape(-1) if is_ids else x.reshape(-1, x.shape[-1])):
            # Of a `ModuleDict`, which has no `get`.
            module = copies[segment.adapter] if segment.adapter in copies else wrapper.original_module  # noqa: SIM401
            with self.stream.only(segment):
                parts.append(module(part))
        y = torch.cat(parts)
        return y.view(*x.shape, -1) if is_ids else y.view(*x.shape[:-1], -1)


@contextmanager
def hidden_copies(backbone: nn.Module) -> Iterator[None]:
    """Show PEFT the backbone's own modules, without the tasks' copies and biases, for the time of an injection.

    PEFT would put adapters into the copies of other tasks, too, and LN tuning copies a norm with all that it holds.
    Heads of a classifier stay, which every task copies.
    `claim_faults` has made sure that no two tasks want a module in different ways.
    """
    wrappers: dict[str, Any] = {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
        and (name not in HEAD_NAMES or isinstance(module.original_module, nn.Identity))
    }
    for name, wrapper in wrappers.items():
        put_module(backbone, name, wrapper.original_module)
    biased = [module for module in backbone.modules() if TASK_BIASES in module._modules]
    hidden = [(module, module._modules.pop(TASK_BIASES), vars(module).pop("forward", None)) for module in biased]
    try:
        yield
    finally:
        for module, biases, forward in hidden:
            module._modules[TASK_BIASES] = biases
            vars(module).update({} if forward is None else {"forward": forward})
        for name, wrapper in wrappers.items():
            now: Any = backbone.get_submodule(name)
            # A new task that has a copy, too, came with a wrapper of its own.
            if isinstance(now, ModulesToSaveWrapper):
                wrapper.modules_to_save.update(now.modules_to_save)
                wrapper._adapters |= now._adapters
            put_module(backbone, name, wrapper)


# ------------------------------------------------------------ rows of embeddings


class MultiplexedTokenRows(MultiplexedForward):
    """PEFT's wrapper around an embedding, or around the head that is tied to one, with the rows of each task."""

    against_graphs = "a task trains its own rows of {name}"

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the module's output; outside of a pass PEFT's own, which fails for adapters without rows here."""
        tokens: Any = self.module.token_adapter
        if self.stream.is_idle and not all(adapter in tokens.token_indices for adapter in tokens.active_adapters):
            return tokens.base_layer(x, *args, **kwargs)
        return super().__call__(x, *args, **kwargs)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[1, T, D]` of token ids, or the logits `[..., V]` of hidden states."""
        tokens: Any = self.module.token_adapter
        is_ids = not x.is_floating_point()
        self.check_rows(x, 1 if is_ids else x.shape[-1])
        indices_by_adapter = {} if self.module.disable_adapters else tokens.token_indices

        def changed(segment: RowSegment, part: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
            rows_ID = tokens.trainable_tokens_delta[segment.adapter]
            indices_I = torch.tensor(indices_by_adapter[segment.adapter], device=read.device)
            if not is_ids:
                logits_NI = F.linear(read, rows_ID.to(read.dtype))
                return part.index_copy(1, indices_I, logits_NI.to(part.dtype))
            is_trained_NI = read[:, None] == indices_I[None, :]
            trained_ND = rows_ID[is_trained_NI.int().argmax(dim=1)].to(part.dtype)
            if (scale := tokens._get_embed_scale()) is not None:
                trained_ND = trained_ND * scale.to(part.dtype)
            if (padding := tokens.base_layer.padding_idx) is not None:  # which an embedding gives no gradient
                trained_ND = torch.where((read == padding)[:, None], trained_ND.detach(), trained_ND)
            return torch.where(is_trained_NI.any(dim=1)[:, None], trained_ND, part)

        return self.by_task(
            indices_by_adapter, tokens.base_layer(x), changed, x.reshape(-1) if is_ids else x.reshape(-1, x.shape[-1])
        )


@contextmanager
def only_rows_of(backbone: nn.Module, adapter: str) -> Iterator[None]:
    """Hide from PEFT the wrappers of embeddings of which an adapter (internal id) trains no rows, in the `with` block.

    PEFT asks every wrapper for the rows of the adapter that it saves or loads, and fails if there are none.
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
