"""`SharedModel`: compares the model that all tasks share before and after a task's own code, and restores it.

It compares the modules, parameters, buffers and hooks of all modules; their modes and numbers (such as `p` of a
dropout); memory and `requires_grad` of all tensors; the version counters of frozen ones, which every write in place
increments; and the gradients of other tasks. Unless something
has changed, no tensor is read, so no device is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from peft_mux.errors import ProcessError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("torch", "transformers", "peft", "peft_mux", "accelerate")
"""They install hooks of their own when a model computes something for the first time."""
_IN_A_STEP = ("objective", "optimizer")
"""Code that runs while tasks hold gradients; when other code runs, all gradients are zero."""
_WORDS = ("requires_grad", "dtype", "device")
_FORM = attrgetter(*_WORDS)
_REQUIRES_GRAD, _VERSION, _GRAD = map(attrgetter, ("requires_grad", "_version", "grad"))


class SharedModel:
    """The model of all tasks, as the own code of each must leave it.

    Args:
        model: the multi-task model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._form: Any = None

    def watch(self, task: str, what: str) -> Callable[[], str]:
        """Look at the model before own code runs.

        Args:
            task: the task whose code it is; the values of its weights and its gradients may change.
            what: which of its code it is.

        Returns:
            A function to call after it. It restores the model and describes what was changed; "" if nothing was. It
            raises a `ProcessError` if a change cannot be undone.
        """
        # The package itself changes the model when tasks come and go.
        if self._form is None or self._form != self._read_form():
            self._record()
        others = [parameter for name, parameter in self._adapters if name != task]
        gradients = list(map(_GRAD, others))
        pages = [(name, page) for name, page in self._pages if name != task]
        before = self._read_state(gradients, pages)

        def put_back() -> str:
            now = self._read_state(list(map(_GRAD, others)), pages)
            if now == before and self._form == self._read_form():
                return ""
            return self._put_back(task, what, before, now, list(zip(others, gradients, strict=True)), pages)

        return put_back

    def _record(self) -> None:
        """Record what the model consists of, with references to all parts of it."""
        model, registry = self._model, self._model.registry
        modules = list(model.modules())
        # FSDP2 exchanges its parameters during passes.
        is_sharded = isinstance(model.backbone.base_model, FSDPModule)
        names = ("_modules", "_buffers", *_HOOKS, *(() if is_sharded else ("_parameters",)))
        tables = [(module, name, vars(module)[name]) for module in modules for name in names]
        self._tables = [(*table, dict(table[-1])) for table in tables]
        self._filled = [table for *_, table in tables if table]
        self._empty = [table for *_, table in tables if not table]
        self._fields: list[Any] = list(map(vars, modules))
        self._numbers = [
            (fields, key, value, module)
            for fields, module in zip(self._fields, modules, strict=True)
            for key, value in fields.items()
            if isinstance(value, float)
        ]
        tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        self._tensors = list(tensors.values())
        self._recorded = [(tensor.data, _FORM(tensor)) for tensor in self._tensors]
        self._adapters = [(name, tensor) for name in model.tasks for tensor in registry[name].parameters.values()]
        self._frozen = [tensors[key] for key in tensors.keys() - {id(tensor) for _, tensor in self._adapters}]
        self._pages = [(name, page) for name in model.tasks for page in registry.slab_of(name).pages]
        self._form = self._read_form()

    def _read_form(self) -> tuple[Any, ...]:
        """Return what stays the same from step to step."""
        return (
            list(map(id, chain.from_iterable(map(dict.values, self._filled)))),
            any(self._empty),
            [fields.get(key) for fields, key, *_ in self._numbers],
            list(map(_REQUIRES_GRAD, self._tensors)),
            list(map(torch.Tensor.data_ptr, self._tensors)),
        )

    def _read_state(self, gradients: list[Any], pages: list[Any]) -> tuple[list[Any], ...]:
        """Return what only own code must not change; gradients and pages are those of other tasks."""
        return (
            [fields.get("training") for fields in self._fields],
            list(map(_VERSION, self._frozen)),
            list(map(id, gradients)),
            [getattr(page.values.grad, "_version", None) for _, page in pages],
        )

    def _put_back(
        self,
        task: str,
        what: str,
        before: tuple[list[Any], ...],
        now: tuple[list[Any], ...],
        gradients: list[Any],
        pages: list[Any],
    ) -> str:
        """Restore the model and describe what was changed; arguments and errors are those of `watch`."""
        changed: list[tuple[Any, str]] = []
        is_lost = False
        # A callback that generates text may leave the model in evaluation; that needs no blame.
        for fields, mode in zip(self._fields, before[0], strict=True):
            fields["training"] = mode
        for fields, key, value, module in self._numbers:
            if fields.get(key) != value:
                changed.append((module, f".{key} {value}, got {fields.get(key)}"))
                fields[key] = value
        adapters = {id(tensor) for _, tensor in self._adapters}
        for tensor, (data, form) in zip(self._tensors, self._recorded, strict=True):
            form_now = _FORM(tensor)
            if form_now != form or tensor.data_ptr() != data.data_ptr():
                words = [
                    f"{word} {old}, got {new}"
                    for word, old, new in zip(_WORDS, form, form_now, strict=True)
                    if old != new
                ]
                changed.append((tensor, f" {words[0] if words else 'in other memory'}"))
                if tensor.data_ptr() != data.data_ptr() and id(tensor) in adapters:
                    is_lost |= what in _IN_A_STEP
                    tensor.grad = None  # it was moved or cast with it; the next pass makes a new one
                tensor.data = data
                tensor.requires_grad_(form[0])
        for module, name, table, content in self._tables:
            new = {key: item for key, item in table.items() if content.get(key, table) is not item}
            accepted = {key: item for key, item in new.items() if _is_accepted(name, item, content.get(key))}
            if len(accepted) < len(new) or content.keys() - table.keys():
                parts = ", ".join(map(str, (new.keys() - accepted.keys()) | (content.keys() - table.keys())))
                changed.append((module, f" {name} ({parts})"))
            table.clear()
            table.update({**content, **accepted})
        for (name, page), old, new in zip(pages, before[3], now[3], strict=True):
            if old != new:
                is_lost |= what in _IN_A_STEP
                page.values.grad.zero_()
                changed.append((page, f'gradients of task "{name}"'))
        for (tensor, gradient), old, new in zip(gradients, before[2], now[2], strict=True):
            if old != new:
                tensor.grad = gradient
                changed.append((tensor, " gradient"))
        written = [tensor for tensor, old, new in zip(self._frozen, before[1], now[1], strict=True) if old != new]
        changed += [(tensor, " written in place") for tensor in written]
        model = self._model
        named = chain(model.named_modules(), model.named_parameters(), model.named_buffers())
        names = {id(part): name for name, part in named}
        texts = list(dict.fromkeys(f"{names.get(id(part), '')}{text}" for part, text in changed))
        shown = f"{texts[0]} and {len(texts) - 1:,} more" if len(texts) > 1 else "".join(texts)
        if written or is_lost:
            raise ProcessError(
                f"tasks.{task}: its {what} has changed what all tasks share, which cannot be undone: {shown}. Take "
                "this out of its code, then resume from the last saved state with train(resume_from_checkpoint=True)."
            )
        if not changed:
            return ""
        return f"the model, which all tasks share, must stay as it is: {shown}. It was restored; change a copy."


def _is_accepted(table: str, new: Any, old: Any) -> bool:
    """Return whether a new entry of a module is what libraries put there as they compute."""
    if table in _HOOKS:
        return str(getattr(new, "__module__", "")).split(".")[0] in _LIBRARIES
    are_tensors = table == "_buffers" and isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)
    return are_tensors and _FORM(new) == _FORM(old) and torch.equal(new, old)
