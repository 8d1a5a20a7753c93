"""`TaskRegistry`: which tasks a model holds, their parameters, and where these lie. It knows no model."""

# MERGED: Tasks come to a model and leave it, while its backbone and all other tasks stay as they are (M §3.2).

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft import PeftConfig
from torch import nn

from peft_mux.errors import CheckpointError, ConfigError, closest
from peft_mux.modeling.adapters.injection import (
    Draws,
    HiddenAdapters,
    are_drawn_alike,
    attach,
    can_be_copied,
    hidden_adapters,
    injecting,
    own_copy,
    rescale,
)
from peft_mux.modeling.adapters.kind import AdapterKind, PenalisedKind, kind_of
from peft_mux.modeling.adapters.lora.parameters import drop_unused_wrappers
from peft_mux.modeling.adapters.own import add_biases, forget_biases, hidden_copies, names_alone
from peft_mux.modeling.adapters.prompts.kinds import encoders_of
from peft_mux.modeling.adapters.prompts.prompts import adopt_encoder
from peft_mux.modeling.adapters.tuners import Tuners
from peft_mux.modeling.backbone.modules import is_meta, modules_beside_text
from peft_mux.modeling.sharding import Piece
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


class Arrivals:
    """Injects the adapters of new tasks into a PEFT model, and takes those of old ones out.

    Args:
        registry: the model's tasks; kept up to date.
        is_head_new: whether the backbone's classification head was made at random, not loaded; then each task's head is
            drawn from the task's seed instead of copied.

    Attributes:
        tuners: PEFT's tuners of the model.
    """

    def __init__(self, registry: TaskRegistry, *, is_head_new: bool) -> None:
        """Start with no task."""
        self.tuners = Tuners()
        self._registry, self._is_head_new = registry, is_head_new
        self._fresh: dict[str, Draws] = {}  # of tasks whose weights are as drawn, of which others may be copies

    def register(
        self,
        model: Any,
        peft_configs: Mapping[str, PeftConfig],
        seeds: Mapping[str, int],
        num_labels: Mapping[str, int],
    ) -> None:
        """Add tasks whose configurations were checked.

        Args:
            model: the `MultiTaskPeftModel` that the registry belongs to.
            peft_configs: `PeftConfig` of each new task, by name.
            seeds: fixes the initial adapter weights of a task; 42 where absent.
            num_labels: classes of a task's head, for sequence classification; the backbone's where absent.

        Raises:
            ConfigError: if PEFT refuses an adapter, or a head cannot have so many classes; then no task is added.
        """
        before = self._registry.tasks
        try:
            # PEFT goes through all modules for each adapter: with those of others in sight, time by their square.
            with _without_collections(), hidden_adapters(model.backbone) as hidden:
                for name, config in peft_configs.items():
                    seed = seeds.get(name, 42)
                    if (alike := self._alike(model, config, seed)) is not None:
                        self._copy(model, hidden, name, config, alike, seed)
                        continue
                    own, kind, adapter = own_copy(config, model.backbone), kind_of(config), self._registry.next_adapter
                    with (
                        injecting(name, own, seed, model.peft_config) as draws,
                        hidden_copies(model.backbone),
                        self._forgetting(model, adapter, own),
                    ):
                        self.tuners.inject(model, kind, adapter, own)
                    hidden.show_new()
                    self.tuners.cast(model, kind, adapter)
                    self.adopt(model, name, config, num_labels.get(name), draws)
                    hidden.hide()
        except Exception:
            # All or none: those that came in before the fault leave again.
            self.remove(model, [name for name in self._registry.tasks if name not in before])
            raise
        finally:
            self._fresh.clear()
            self._attach(model)

    def _alike(self, model: Any, config: PeftConfig, seed: int) -> str | None:
        """Return a task that came just now, where a copy of it is what PEFT makes, be it drawn from another seed."""
        registry = self._registry
        names = [name for name in self._fresh if are_drawn_alike(registry.given(name), config.to_dict())]
        same = [name for name in names if is_meta(model.backbone) or self._fresh[name].seed == seed]
        for name in [] if same else names:
            if self._fresh[name].make([*registry.parameters_of(name).values()], model.backbone.dtype):
                return name
        return next(iter(same), None)

    def _copy(self, model: Any, hidden: HiddenAdapters, name: str, config: PeftConfig, alike: str, seed: int) -> None:
        """Add a task whose adapter is that of another one, but for its id, its seed and its scaling."""
        registry, draws = self._registry, self._fresh[alike]
        adapter, other = registry.add(name, config, kind_of(config)), registry.adapter_of(alike)
        model.peft_config[adapter] = copy.deepcopy(model.peft_config[other])
        new = hidden.copy(other, adapter)
        rescale(hidden.layers, adapter, model.peft_config[adapter], config)
        own = {key: new[id(parameter)] for key, parameter in registry.parameters_of(alike).items()}
        registry.adopt(name, own, are_described=is_meta(model.backbone))
        if seed != draws.seed and not is_meta(model.backbone):
            draws.repeat(seed, new)

    def adopt(self, model: Any, name: str, config: PeftConfig, num_labels: int | None, draws: Draws) -> None:
        """Take an injected adapter in: its head and its parameters.

        Args:
            model: the `MultiTaskPeftModel` that the registry belongs to.
            name: the task's name; its adapter has the registry's next id.
            config: the configuration as it was given for the task.
            num_labels: classes of the task's head; `None` for the backbone's.
            draws: what was drawn for the adapter; its seed fixes the initial weights of a head that is drawn, too.
        """
        kind = kind_of(config)
        adapter = self._registry.add(name, config, kind)
        # Before layers are attached, as they enroll with the maker of their kind.
        if len(self._registry.tasks) == 1 and not self.tuners.has_begun:
            self.tuners.begin(model, kind, adapter)
        if kind.name not in model.stream.makers:
            maker = kind.pass_maker(self._registry.slab_of_adapter)
            model.stream.makers |= {} if maker is None else {kind.name: maker}
        if not model.active_adapter:
            model.select_adapter(adapter)
        # Before the configuration is saved anywhere: other tasks' heads are linear layers too.
        _drop_heads_from_targets(model.peft_config[adapter])
        model.objectives.head.prepare(model.backbone, adapter, num_labels, draws.seed, is_new=self._is_head_new)
        add_biases(model.peft_config[adapter], model.backbone, adapter)
        # So that names are those of a model of one PEFT type, which files are written with.
        self.tuners.note(model, model.peft_config[adapter])
        with self.tuners.alone(model, adapter, model.peft_config[adapter]):
            own = _parameters_of(model, adapter)
            own = names_alone(own, model.peft_config[adapter], model.backbone, adapter)
        own = _reached(own, model.backbone, name)
        if adapter in (encoders := encoders_of(model)):
            # What PEFT freezes of a prompt is no part of what is trained: CPT's words, the sink of a cartridge.
            own = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
            adopt_encoder(encoders[adapter], model.peft_config[adapter])
        if not any(parameter.numel() for parameter in own.values()):
            raise ConfigError(
                f"tasks.{name}.peft_config: got a configuration with which PEFT trains nothing; allowed: target modules"
                " that its type can adapt, with ranks below their widths, and at least one part of it that is trained."
            )
        self._registry.adopt(name, own, are_described=is_meta(model.backbone))
        if can_be_copied(model.peft_config[adapter]):
            self._fresh[name] = draws

    def register_absent(self, model: Any, name: str, config: PeftConfig) -> None:
        """Add a task that has no adapter in this model, which is a part of one.

        Args:
            model: the `MultiTaskPeftModel` that the registry belongs to.
            name: the task's name in the run.
            config: its adapter's configuration, as PEFT completed it.
        """
        adapter = self._registry.add(name, config, kind_of(config))
        model.peft_config[adapter] = config
        self._registry.adopt(name, {}, model.device)
        model.stream.clear_tables()

    def remove(self, model: Any, names: Sequence[str]) -> None:
        """Drop tasks and free their adapters.

        Args:
            model: the `MultiTaskPeftModel` that the registry belongs to.
            names: names of the tasks that leave.

        Raises:
            ConfigError: if a task is not held; then none is dropped.
        """
        registry = self._registry
        # All are looked up before the first leaves, so that an unknown name changes nothing.
        for name in names:
            registry.adapter_of(name)
        for name in dict.fromkeys(names):
            adapter = registry.remove(name)
            model.objectives.forget(name)
            model.noise.forget(adapter)
            model.stream.clear_tables()
            forget_biases(model.backbone, adapter)
            others = list(registry.adapters.values())
            self.tuners.delete(model, adapter, others)
            drop_unused_wrappers(model.backbone)
        model.active_adapter = next(iter(registry.adapters.values()), [])
        if self.tuners.is_mixed and model.active_adapter:
            model.select_adapter(model.active_adapter)
        # Selecting an adapter has left gradients on for that one alone.
        model.mark_trainable()

    @contextmanager
    def _forgetting(self, model: Any, adapter: str, config: PeftConfig) -> Iterator[None]:
        """Leave nothing of an adapter whose injection fails."""
        try:
            yield
        except Exception:
            self.tuners.undo(model, adapter, config, list(self._registry.adapters.values()))
            drop_unused_wrappers(model.backbone)
            model.mark_trainable()
            raise

    def _attach(self, model: Any) -> None:
        """Multiplex layers that are newly adapted, and let all tasks train."""
        attach(model.backbone, model.stream)
        model.name_modules()
        model.stream.clear_tables()
        model.mark_trainable()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Put Python's garbage collection off: it would look at all modules again and again, none of which is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _parameters_of(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    marker = f".{adapter}"
    return {
        key.replace(marker, "", 1): parameter
        for key, parameter in model.named_parameters()
        if f"{marker}." in key or key.endswith(marker)
    }


def _reached(own: dict[str, nn.Parameter], backbone: Any, task: str) -> dict[str, nn.Parameter]:
    """Return the parameters that rows of text reach; others stay as drawn, as alone, where they get no gradient.

    Raises:
        ConfigError: if there is none.
    """
    beside = tuple(f"base_model.model.{name}." for name in modules_beside_text(backbone))
    reached = {key: parameter for key, parameter in own.items() if not key.startswith(beside)}
    if own and not reached:
        raise ConfigError(
            f"tasks.{task}.peft_config.target_modules: got modules beside the language model alone "
            f"({', '.join(modules_beside_text(backbone))}); allowed: some of the language model, as only rows of text "
            "are trained on, which never reach the others."
        )
    return reached


def _drop_heads_from_targets(config: Any) -> None:
    """Keep other tasks' heads, which "all-linear" also finds, out of what is saved as this task's targets."""
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, set):
        parts = (".modules_to_save.", ".original_module", ".token_adapter")
        own = {name for name in targets if not any(part in name for part in parts)}
        # Where PEFT resolves "all-linear" by the ends of names it finds frozen layers within those of other tasks.
        config.target_modules = own - {"base_layer"}
