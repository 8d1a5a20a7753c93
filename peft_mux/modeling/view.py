"""`TaskView`: one task of a `MultiTaskPeftModel`, used like the PEFT model that it would be alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from peft_mux.errors import ConfigError

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
        """Run the transformers model's forward with this task's adapter.

        Where the model is cut into shards (tensor parallelism), all of them have to call this with the same arguments;
        likewise `generate`, with the same state of torch's random numbers if it samples.

        Raises:
            ConfigError: for one of several stages of a pipeline.
        """
        require_all_layers(self._model, f'task_view("{self._name}"), a forward pass')
        with self.selected() as model:
            return model.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with this task's adapter, as `PeftModel.generate` does.

        Raises:
            ConfigError: for one of several stages of a pipeline.
        """
        require_all_layers(self._model, f'task_view("{self._name}").generate')
        with self.selected() as model:
            return model.base_model.generate(*args, **kwargs)

    def merge_and_unload(self) -> Any:
        """Return the backbone with this task's adapter merged in; as in PEFT, the adapters are gone afterwards.

        Raises:
            ConfigError: where this process holds only a part of the model.
        """
        is_part = self._model.num_stages * self._model.num_shards > 1
        if is_part or isinstance(self._model.backbone.base_model, FSDPModule):
            raise ConfigError(
                "merge_and_unload: got a backbone that is divided among processes; allowed: a whole one. Load the saved"
                " adapter with PeftModel.from_pretrained in one process and merge it there."
            )
        with self.selected() as model:
            merged = model.base_model.merge_and_unload(adapter_names=[self._adapter])
        return merged

    @property
    def _name(self) -> str:
        return next(name for name in self._model.tasks if self._model.adapter_of(name) == self._adapter)


def require_all_layers(model: MultiTaskPeftModel, what: str) -> None:
    """Refuse what a stage of a pipeline cannot do alone.

    Args:
        model: of this process.
        what: was asked for.

    Raises:
        ConfigError: for one of several stages.
    """
    if model.num_stages > 1:
        raise ConfigError(
            f"{what}: got one of {model.num_stages} pipeline stages of the model, which has its own layers alone;"
            " allowed: a whole model, or shards of one (tensor_parallel_size). Load the saved adapter with"
            " PeftModel.from_pretrained in one process."
        )
