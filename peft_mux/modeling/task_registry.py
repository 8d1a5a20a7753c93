"""The part of `MultiTaskPeftModel` that knows its tasks: they come and go while the backbone stays (M §3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import nn

from peft_mux.errors import CheckpointError, ConfigError, closest
from peft_mux.modeling import adapters as adapter_io
from peft_mux.modeling.injection import check_configs, hidden_adapters, is_meta, own_copy, peft_refusals, seeded
from peft_mux.modeling.layers import attach
from peft_mux.modeling.lora_pass import LoraGroups
from peft_mux.modeling.pieces import Piece
from peft_mux.modeling.slabs import TaskSlab
from peft_mux.modeling.stream import Stream


class TaskRegistry(PeftModel):
    """Which tasks a model holds, their parameters, and the flat buffers that these lie in.

    Args:
        model: the backbone.
        config: of the first adapter, which PEFT injects while it is made.
        adapter: internal id of it.
        is_head_new: as for `MultiTaskPeftModel`.
        **kwargs: for `PeftModel`.
    """

    base_model: Any
    pieces: dict[tuple[str, str], Piece]
    """By task and parameter, where a process holds less than all of it, or its gradient does not add."""
    num_stages: int = 1
    """Into which the backbone was cut; this model is one of them (`peft_mux.modeling.stages`)."""
    num_shards: int = 1
    """Likewise, of a stage (`peft_mux.modeling.tensor_parallel`)."""

    def __init__(
        self, model: Any, config: PeftConfig, adapter: str, *, is_head_new: bool = False, **kwargs: Any
    ) -> None:
        """Inject the first adapter; nothing is registered yet."""
        super().__init__(model, config, adapter, **kwargs)
        self._groups = LoraGroups(self._slab_of_adapter)
        self.stream = Stream(self._groups)
        self._adapters: dict[str, str] = {}
        self._num_registered = 0
        self._is_head_new = is_head_new
        self._given_configs: dict[str, dict[str, Any]] = {}
        self._module_names: dict[nn.Module, str] = {}
        self._task_parameters: dict[str, dict[str, nn.Parameter]] = {}
        self._slabs: dict[str, TaskSlab] = {}
        self.pieces = {}

    @property
    def backbone(self) -> Any:
        """The transformers model under the adapters."""
        return self.base_model.model

    @property
    def is_classifier(self) -> bool:
        """Whether the backbone is a sequence classifier."""
        return "ForSequenceClassification" in type(self.backbone).__name__

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order in which they came."""
        return tuple(self._adapters)

    def register_tasks(
        self,
        peft_configs: Mapping[str, PeftConfig],
        *,
        seeds: Mapping[str, int] | None = None,
        num_labels: Mapping[str, int] | None = None,
        are_checked: bool = False,
    ) -> None:
        """Add tasks between two steps; neither the backbone nor any other task is touched (M §3.2).

        Args:
            peft_configs: `PeftConfig` of each new task by name.
            seeds: as for `MultiTaskPeftModel`.
            num_labels: as for `MultiTaskPeftModel`.
            are_checked: the configurations were held against the whole model, of which this is a part.

        Raises:
            ConfigError: naming every fault of every new task; then none is added.
        """
        if not are_checked:
            check_configs(peft_configs, self.backbone, taken=self.tasks)
        self._register(peft_configs, seeds or {}, num_labels or {})

    def register_absent(self, name: str, config: PeftConfig) -> None:
        """Add a task that has no adapter in this model, which is a part of one.

        Args:
            name: of the task.
            config: of its adapter, as PEFT completed it.
        """
        self.peft_config[self._next_adapter] = config
        self._given_configs[name] = config.to_dict()
        self._adapters[name] = self._next_adapter
        self._num_registered += 1
        self._task_parameters[name] = {}
        self._slabs[name] = TaskSlab({}, self.device)
        self._groups.clear()

    def remove_tasks(self, names: list[str] | tuple[str, ...]) -> None:
        """Drop tasks and free their adapters; the others stay as they are.

        Raises:
            ConfigError: for a name that is not held.
        """
        for name in names:
            self.adapter_of(name)
        for name in dict.fromkeys(names):
            adapter = self._adapters.pop(name)
            del self._task_parameters[name], self._given_configs[name]
            self._slabs.pop(name, None)
            self.pieces = {key: piece for key, piece in self.pieces.items() if key[0] != name}
            self._groups.clear()
            others = list(self._adapters.values())
            if adapter in self.active_adapters and others:
                self.base_model.set_adapter(others[0])
            self.delete_adapter(adapter)
        self.active_adapter = next(iter(self._adapters.values()), [])
        self._mark_trainable()

    def adapter_of(self, name: str) -> str:
        """Return the internal adapter id under which PEFT knows a task.

        Raises:
            ConfigError: if the model does not hold the task.
        """
        if name not in self._adapters:
            raise ConfigError(
                f'got task "{name}"; allowed: {", ".join(self.tasks)}. {closest(name, self.tasks)}'.rstrip()
            )
        return self._adapters[name]

    def task_parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return a task's own parameters, by their PEFT names without the adapter id."""
        self.adapter_of(name)
        return self._task_parameters[name]

    def task_slab(self, name: str) -> TaskSlab:
        """Return the flat buffers that a task's parameters are views of."""
        self.adapter_of(name)
        return self._slabs[name]

    def task_pieces(self, name: str) -> dict[str, Piece]:
        """Return what of each of `task_parameters` lies in this process."""
        return {
            key: self.pieces.get((name, key)) or Piece.whole(parameter.shape)
            for key, parameter in self.task_parameters(name).items()
        }

    @torch.no_grad()
    def place_whole(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write what lies in this process of whole tensors into a task's parameters.

        Args:
            name: of the task.
            tensors: by parameter name, of whole shapes; those of parameters that are not here are passed over.

        Raises:
            CheckpointError: if one is missing, or of another shape; then nothing is written.
        """
        pieces = self.task_pieces(name)
        for key, piece in pieces.items():
            got = tuple(tensors[key].shape) if key in tensors else None
            if got != piece.shape:
                raise CheckpointError(
                    f'task "{name}": got {"nothing" if got is None else f"shape {list(got)}"} for {key}; allowed: '
                    f"{list(piece.shape)}, the whole tensor of the adapter that is registered."
                )
        for key, parameter in self.task_parameters(name).items():
            parameter.copy_(pieces[key].take(tensors[key]))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast as any module does, and lay the adapters out anew."""
        result = super()._apply(*args, **kwargs)
        for name in getattr(self, "_slabs", {}):
            self._slabs[name] = TaskSlab(self._task_parameters[name], self.device)
        if hasattr(self, "_groups"):
            self._groups.clear()
        return result

    def _slab_of_adapter(self, adapter: str) -> TaskSlab | None:
        name = next((name for name, known in self._adapters.items() if known == adapter), None)
        return None if name is None else self._slabs.get(name)

    def was_given(self, name: str, config: PeftConfig) -> bool:
        """Whether a task was registered with this configuration, or holds it now (PEFT completes what it is given)."""
        return config.to_dict() in (self._given_configs[name], self.peft_config[self.adapter_of(name)].to_dict())

    # --------------------------------------------------------------- internal

    @property
    def _next_adapter(self) -> str:
        return f"t{self._num_registered + 1:06d}"

    def _register(
        self, peft_configs: Mapping[str, PeftConfig], seeds: Mapping[str, int], num_labels: Mapping[str, int]
    ) -> None:
        before = self.tasks
        try:
            with hidden_adapters(self.backbone) as hide:
                for name, config in peft_configs.items():
                    adapter = self._next_adapter
                    own = own_copy(config, self.backbone)
                    with seeded(seeds.get(name, 42)), peft_refusals(name), self._forgetting(adapter):
                        self.add_adapter(adapter, own, low_cpu_mem_usage=is_meta(self.backbone))
                    self._given_configs[name] = config.to_dict()
                    self._adopt(name, adapter, num_labels.get(name), seeds.get(name, 42))
                    hide()
        except ConfigError:
            self.remove_tasks([name for name in self.tasks if name not in before])
            raise
        finally:
            self._take_stock()

    @contextmanager
    def _forgetting(self, adapter: str) -> Iterator[None]:
        """Leave nothing of an adapter whose injection fails."""
        try:
            yield
        except Exception:
            self.peft_config.pop(adapter, None)
            self._mark_trainable()
            raise

    def _adopt(self, name: str, adapter: str, num_labels: int | None, seed: int) -> None:
        """Take an injected adapter in: its head and its parameters."""
        self._adapters[name] = adapter
        self._num_registered += 1
        if not self.active_adapter:
            self.base_model.set_adapter(adapter)
            self.active_adapter = adapter
        self._drop_heads_from_targets(adapter)
        if self.is_classifier:
            adapter_io.prepare_head(self.backbone, adapter, num_labels, seed, is_new=self._is_head_new)
        marker = f".{adapter}"
        self._task_parameters[name] = {
            key.replace(marker, "", 1): parameter
            for key, parameter in self.named_parameters()
            if f"{marker}." in key or key.endswith(marker)
        }
        if not is_meta(self.backbone):
            self._slabs[name] = TaskSlab(self._task_parameters[name])

    def _take_stock(self) -> None:
        """Multiplex layers that are newly adapted, and let all tasks train."""
        attach(self.backbone, self.stream)
        self._module_names = {module: name for name, module in self.backbone.named_modules()}
        self._groups.clear()
        self._mark_trainable()

    def _drop_heads_from_targets(self, adapter: str) -> None:
        """Keep other tasks' heads, which "all-linear" also finds, out of what is saved as this task's targets."""
        config = self.peft_config[adapter]
        targets = getattr(config, "target_modules", None)
        if isinstance(targets, set):
            parts = (".modules_to_save.", ".original_module")
            config.target_modules = {name for name in targets if not any(part in name for part in parts)}

    def _freeze_backbone(self) -> None:
        own = {id(parameter) for group in self._task_parameters.values() for parameter in group.values()}
        for parameter in self.parameters():
            parameter.requires_grad_(id(parameter) in own)

    def _mark_trainable(self) -> None:
        """Let every task train: PEFT keeps gradients for the active adapter only."""
        for group in self._task_parameters.values():
            for parameter in group.values():
                parameter.requires_grad_(True)
