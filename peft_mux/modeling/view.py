"""`TaskView`: one task of a `MultiTaskPeftModel`, used like the PEFT model that it would be alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule

from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.prompts.plain import plain_forward, plain_generate
from peft_mux.modeling.interface import MultiplexedModel


class TaskView:
    """Backbone plus one adapter, with PEFT's own forward; nothing is copied.

    Args:
        model: the multi-task model that holds the task.
        adapter: internal id of the task.
    """

    def __init__(self, model: MultiplexedModel, adapter: str) -> None:
        """Remember which adapter to select."""
        self._model = model
        self._adapter = adapter

    @contextmanager
    def selected(self) -> Iterator[MultiplexedModel]:
        """Make this task the active adapter of the PEFT model for the time of the `with` block."""
        model = self._model
        before = model.active_adapter
        model.select_adapter(self._adapter)
        try:
            yield model
        finally:
            # The adapter of before may have gone meanwhile, as by merging.
            if before in model.peft_config:
                model.select_adapter(before)
            # PEFT keeps gradients for the selected adapter only.
            model.mark_trainable()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the transformers model's forward with this task's adapter.

        Where the model is cut into shards (tensor parallelism), all of them have to call this with the same arguments;
        likewise `generate`, with the same state of torch's random numbers if it samples.

        Raises:
            ConfigError: if the model is one of several stages of a pipeline.
        """
        require_all_layers(self._model, f'task_view("{self._name}"), a forward pass')
        with self.selected() as model:
            return plain_forward(model, self._adapter, args, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with this task's adapter, as `PeftModel.generate` does.

        Raises:
            ConfigError: if the model is one of several stages of a pipeline.
        """
        require_all_layers(self._model, f'task_view("{self._name}").generate')
        with self.selected() as model:
            return plain_generate(model, self._adapter, args, kwargs)

    def merge_and_unload(self) -> Any:
        """Return the backbone with this task's adapter merged in; as in PEFT, the adapters are gone afterwards.

        Raises:
            ConfigError: if this process holds only a part of the model.
        """
        require_whole(self._model, "merge_and_unload")
        with self.selected() as model:
            merged = model.merge_and_unload_adapter(self._adapter)
        return merged

    @property
    def _name(self) -> str:
        return next(name for name in self._model.tasks if self._model.adapter_of(name) == self._adapter)


def require_whole(model: MultiplexedModel, what: str) -> None:
    """Refuse what only a process can do that holds the whole model.

    Args:
        model: what this process holds.
        what: was asked for, for the message.

    Raises:
        ConfigError: if the model is one of several stages or shards.
    """
    if model.num_stages * model.tp_size > 1 or isinstance(model.backbone.base_model, FSDPModule):
        raise ConfigError(
            f"{what}: got a backbone that is divided among processes; allowed: a whole one. Load the saved adapter"
            " with PeftModel.from_pretrained in one process."
        )


def require_all_layers(model: MultiplexedModel, what: str) -> None:
    """Refuse what a stage of a pipeline cannot do alone.

    Args:
        model: what this process holds.
        what: was asked for, for the message.

    Raises:
        ConfigError: if the model is one of several stages.
    """
    if model.num_stages > 1:
        raise ConfigError(
            f"{what}: got one of {model.num_stages} pipeline stages of the model, which has its own layers alone;"
            " allowed: a whole model, or shards of one (tensor_parallel_size). Load the saved adapter with"
            " PeftModel.from_pretrained in one process."
        )
