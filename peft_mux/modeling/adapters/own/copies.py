"""`modules_to_save`: every task has its own copy of a module of the backbone, and runs it on its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn

from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.backbone.modules import HEAD_NAMES, put_module


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
    That no two tasks want a module in different ways was checked before (`peft_mux.modeling.adapters.own.claims`).
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
