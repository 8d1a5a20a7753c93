"""`TaskRegistry`: which tasks a model holds, their parameters, and where these lie. It knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from peft import PeftConfig
from torch import nn

from peft_mux.errors import CheckpointError, ConfigError, closest
from peft_mux.modeling.adapters.kind import AdapterKind, PenalisedKind
from peft_mux.modeling.sharding.pieces import Piece
from peft_mux.modeling.slabs import TaskSlab


class _Entry(NamedTuple):
    """One task: how PEFT knows it, what was asked for, and what its parameters need."""

    adapter: str
    kind: AdapterKind
    given: dict[str, Any]


class TaskRegistry:
    """The tasks of one model, the flat buffers that their parameters lie in, and what of them lies in this process.

    PEFT knows tasks under internal ids (`t000001`), which are never given twice.

    Attributes:
        adapters: internal id of each task's adapter, in the order in which the tasks came.
        pieces: what lies in this process of a parameter, by task and parameter; only where that is less than all of it,
            or the gradients of processes do not add.
        penalised: kinds of the tasks whose adapters are trained towards more than their losses, by name of the task.

    Example:
        >>> registry = TaskRegistry()  # doctest: +SKIP
        >>> registry.add("sst2", config, kind_of(config))  # doctest: +SKIP
        >>> registry.adopt("sst2", parameters)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        """Start without tasks."""
        self.adapters: dict[str, str] = {}
        self.pieces: dict[tuple[str, str], Piece] = {}
        self.penalised: dict[str, PenalisedKind] = {}
        self._entries: dict[str, _Entry] = {}
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        self._slabs: dict[str, TaskSlab] = {}
        self._num_added = 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order in which they came."""
        return tuple(self.adapters)

    @property
    def next_adapter(self) -> str:
        """Internal id of the adapter of the task that comes next."""
        return f"t{self._num_added + 1:06d}"

    # ------------------------------------------------------- coming and going

    def add(self, name: str, config: PeftConfig, kind: AdapterKind) -> str:
        """Take a task in, without parameters yet.

        Args:
            name: the task's name in the run.
            config: the configuration as it was given for the task.
            kind: the kind of the task's adapter.

        Returns:
            the internal id of its adapter.
        """
        adapter = self.next_adapter
        self.adapters[name] = adapter
        self._entries[name] = _Entry(adapter, kind, config.to_dict())
        self._parameters[name] = {}
        if isinstance(kind, PenalisedKind):  # asked here and not in every pass, as it takes its time
            self.penalised[name] = kind
        # Never counted down: an id is not given twice.
        self._num_added += 1
        return adapter

    def adopt(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device | None = None,
        *,
        are_described: bool = False,
    ) -> None:
        """Let parameters be those of a task, and lay them out in flat buffers of their own.

        Args:
            name: the task's name in the run.
            parameters: the parameters, by their PEFT names without the adapter id.
            device: the device of the buffers if there are no parameters.
            are_described: whether they have shapes but no values; then they are not laid out.
        """
        self._parameters[name] = dict(parameters)
        if not are_described:
            # The kind says how its kernels want to read them (`AdapterKind.slot`).
            self._slabs[name] = TaskSlab(self._parameters[name], device, layout=self.kind_of(name).slot)

    def remove(self, name: str) -> str:
        """Forget a task.

        Returns:
            the internal id of its adapter.

        Raises:
            ConfigError: if there is no such task.
        """
        adapter = self.adapter_of(name)
        del self.adapters[name], self._entries[name], self._parameters[name]
        self._slabs.pop(name, None)
        self.penalised.pop(name, None)
        self.forget_pieces(name)
        return adapter

    def lay_out(self, device: torch.device) -> None:
        """Lay parameters out anew that were moved or cast; those of other tasks stay where they are.

        Args:
            device: the device on which they are now.
        """
        for name, slab in list(self._slabs.items()):
            if not slab.is_in_place(device):
                self.adopt(name, self._parameters[name], device)

    # -------------------------------------------------------------- questions

    def adapter_of(self, name: str) -> str:
        """Return the internal adapter id under which PEFT knows a task.

        Raises:
            ConfigError: if there is no such task.
        """
        if name not in self.adapters:
            allowed = ", ".join(self.tasks) or "none, as the model holds no task (any more)"
            raise ConfigError(f'got task "{name}"; allowed: {allowed}. {closest(name, self.tasks)}'.rstrip())
        return self.adapters[name]

    def kind_of(self, name: str) -> AdapterKind:
        """Return the kind of a task's adapter."""
        self.adapter_of(name)
        return self._entries[name].kind

    def given(self, name: str) -> dict[str, Any]:
        """Return the fields of the configuration that a task was added with."""
        self.adapter_of(name)
        return self._entries[name].given

    def was_given(self, name: str, config: PeftConfig) -> bool:
        """Return whether a task was added with this configuration."""
        return config.to_dict() == self.given(name)

    def parameters_of(self, name: str) -> dict[str, nn.Parameter]:
        """Return a task's own parameters, by their PEFT names without the adapter id."""
        self.adapter_of(name)
        return self._parameters[name]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all tasks."""
        for group in self._parameters.values():
            yield from group.values()

    def slab_of(self, name: str) -> TaskSlab:
        """Return the flat buffers that a task's parameters are views of."""
        self.adapter_of(name)
        return self._slabs[name]

    def slab_of_adapter(self, adapter: str) -> TaskSlab | None:
        """Return the flat buffers of an adapter, by its internal id; `None` where it has none."""
        name = next((name for name, known in self.adapters.items() if known == adapter), None)
        return None if name is None else self._slabs.get(name)

    # ----------------------------------------------------------------- pieces

    def pieces_of(self, name: str) -> dict[str, Piece]:
        """Return what of each of a task's parameters lies in this process."""
        return {
            key: self.pieces.get((name, key)) or Piece.whole(parameter.shape)
            for key, parameter in self.parameters_of(name).items()
        }

    def forget_pieces(self, name: str) -> None:
        """Let all that a process holds of a task count as whole again."""
        self.pieces = {key: piece for key, piece in self.pieces.items() if key[0] != name}

    @torch.no_grad()
    def place_whole(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write what lies in this process of whole tensors into a task's parameters.

        Args:
            name: the task's name in the run.
            tensors: tensors of whole shapes by parameter name; those of parameters that are not here are passed over.

        Raises:
            CheckpointError: if one is missing, or of another shape; then nothing is written.
        """
        pieces = self.pieces_of(name)
        # All shapes are checked before the first weight is written.
        for key, piece in pieces.items():
            got = tuple(tensors[key].shape) if key in tensors else None
            if got != piece.shape:
                raise CheckpointError(
                    f'task "{name}": got {"nothing" if got is None else f"shape {list(got)}"} for {key}; allowed: '
                    f"{list(piece.shape)}, the whole tensor of the adapter that is registered."
                )
        for key, parameter in self.parameters_of(name).items():
            parameter.copy_(pieces[key].take(tensors[key]))
