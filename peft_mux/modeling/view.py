"""`TaskView`: one task of a `MultiTaskPeftModel`, used like the PEFT model that it would be alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft_mux.modeling.model import MultiTaskPeftModel


class TaskView:
    """Backbone plus one adapter, with PEFT's own forward; nothing is copied.

    Args:
        model: that holds the task.
        adapter: internal id of the task.
    """

    def __init__(self, model: MultiTaskPeftModel, adapter: str) -> None:
        """Remember which adapter to select."""
        self._model = model
        self._adapter = adapter

    @contextmanager
    def selected(self) -> Iterator[MultiTaskPeftModel]:
        """Make this task the active adapter of the PEFT model for the time of the `with` block."""
        model = self._model
        before = model.active_adapter
        model.base_model.set_adapter(self._adapter)
        model.active_adapter = self._adapter
        try:
            yield model
        finally:
            if before in model.peft_config:
                model.base_model.set_adapter(before)
                model.active_adapter = before
            model._mark_trainable()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the transformers model's forward with this task's adapter."""
        with self.selected() as model:
            return model.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with this task's adapter, as `PeftModel.generate` does."""
        with self.selected() as model:
            return model.base_model.generate(*args, **kwargs)

    def merge_and_unload(self) -> Any:
        """Return the backbone with this task's adapter merged in; as in PEFT, the adapters are gone afterwards."""
        with self.selected() as model:
            merged = model.base_model.merge_and_unload(adapter_names=[self._adapter])
        return merged
