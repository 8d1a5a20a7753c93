"""The part of `MultiTaskPeftModel` that writes and reads adapters, in PEFT's own format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig

from peft_mux.errors import ConfigError
from peft_mux.modeling import adapters as adapter_io

if TYPE_CHECKING:
    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.modeling.pieces import Piece


class AdapterFiles:
    """Adapters as folders, one a task."""

    tasks: tuple[str, ...]
    adapter_of: Callable[[str], str]
    task_pieces: Callable[[str], dict[str, Piece]]

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """Write one sub-folder a task, each a plain PEFT adapter at its root.

        Args:
            save_directory: made where absent.
            **kwargs: none is supported; PEFT's options are refused, not ignored.

        Raises:
            ConfigError: for options.
        """
        if kwargs:
            raise ConfigError(f"save_pretrained: got {', '.join(kwargs)}; allowed: the folder alone.")
        for name in self.tasks:
            self.save_task(name, Path(save_directory) / name)

    def save_task(self, name: str, folder: str | Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write one task's adapter as plain PEFT does; `PeftModel.from_pretrained(base, folder)` loads it.

        Args:
            name: of the task.
            folder: made where absent.
            weights: of the whole adapter by parameter name, where this model holds only a part of it.
        """
        adapter_io.save_adapter(self, self.adapter_of(name), Path(folder), weights)

    def saved_weights(self, name: str, folder: str | Path) -> dict[str, torch.Tensor]:
        """Return a task's weights from a PEFT adapter folder, by parameter name: those that this model has a part of.

        Raises:
            CheckpointError: if the folder holds none, or tensors that are not of this task.
        """
        return adapter_io.read_adapter(Path(folder), self.task_pieces(name))

    def load_task(self, name: str, folder: str | Path) -> None:
        """Read one task's adapter weights from a PEFT adapter folder.

        Raises:
            CheckpointError: if the tensors are not exactly this task's.
        """
        adapter_io.load_adapter(self, self.adapter_of(name), Path(folder))

    @classmethod
    def from_pretrained(cls, model: Any, model_id: str | Path, **kwargs: Any) -> MultiTaskPeftModel:  # type: ignore[override]
        """Build a model with every adapter of a folder that `save_pretrained` (or a run) wrote.

        Args:
            model: the backbone.
            model_id: folder with one sub-folder a task; other contents are passed over.
            **kwargs: for the class.

        Raises:
            CheckpointError: if there is no adapter, or one does not fit.
        """
        folders = adapter_io.adapter_folders(Path(model_id))
        configs = {name: PeftConfig.from_pretrained(str(folder)) for name, folder in folders.items()}
        labels = {name: adapter_io.num_labels(folder) for name, folder in folders.items()}
        for config in configs.values():
            config.inference_mode = False
        kwargs.setdefault("num_labels", {name: count for name, count in labels.items() if count is not None})
        mux_model: Any = cls(model, configs, **kwargs)  # type: ignore[call-arg]
        for name, folder in folders.items():
            mux_model.load_task(name, folder)
        return mux_model
