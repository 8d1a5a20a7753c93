"""`TaskRegistry`: the tasks of a model, how they are added and removed, and their parameters (M §3.2).

Tasks come to a model and leave it while its backbone and all other tasks stay as they are.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft import PeftConfig
from torch import nn

from peft_mux.errors import CheckpointError, ConfigError, closest
from peft_mux.modeling.adapters.copies import Draws, HiddenAdapters
from peft_mux.modeling.adapters.injection import attach, completed_copy, injecting
from peft_mux.modeling.adapters.kind import PREFIX, AdapterKind, kind_of
from peft_mux.modeling.adapters.lora.config import can_be_copied, equal_but_for_alpha
from peft_mux.modeling.adapters.lora.lora_kind import set_alpha
from peft_mux.modeling.adapters.lora.parameters import drop_unused_wrappers
from peft_mux.modeling.adapters.trained_parts import add_biases, forget_biases, hidden_copies
from peft_mux.modeling.adapters.tuners import Tuners
from peft_mux.modeling.backbone.modules import head_kind_for, is_meta, modules_outside_text
from peft_mux.modeling.pieces import Piece
from peft_mux.modeling.slabs import PageKind, TaskSlab, plain_kind


@dataclass
class RegisteredTask:
    """One task of a model.

    Attributes:
        adapter: internal id under which PEFT knows its adapter.
        kind: the kind of the adapter.
        given: fields of the configuration as given; PEFT completes its own copy.
        parameters: the task's own, by their PEFT names without the adapter id.
        slab: the flat buffers that these are views of; `None` while they have no values.
        page_kind: says which parameters share a learning rate and a weight decay.
        layer_norms: names of the parameters that are part of an `nn.LayerNorm`.
    """

    adapter: str
    kind: AdapterKind
    given: dict[str, Any]
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    slab: TaskSlab | None = None
    page_kind: PageKind = plain_kind
    layer_norms: Collection[str] = ()


class TaskRegistry:
    """The tasks of one model, and the part of them that this process holds.

    PEFT knows tasks under internal ids (`t000001`), which are never given twice.

    Args:
        is_head_new: whether the backbone's classification head was made at random, not loaded; then each task's head is
            drawn from the task's seed instead of copied.

    Attributes:
        adapters: internal id of each task's adapter, in the order in which the tasks came.
        pieces: the part of a parameter that this process holds, by task and parameter; only if it is not all of it, or
            if the gradients of processes do not add.
        tuners: PEFT's tuners of the model.
        references: frozen weights that the loss of a task compares with in place of the backbone, by task and
            parameter: those of the adapter that it began from.
    """

    def __init__(self, *, is_head_new: bool = False) -> None:
        self.adapters: dict[str, str] = {}
        self.pieces: dict[tuple[str, str], Piece] = {}
        self.tuners = Tuners()
        self.references: dict[str, dict[str, torch.Tensor]] = {}
        self._tasks: dict[str, RegisteredTask] = {}
        self._by_adapter: dict[str, RegisteredTask] = {}
        self._num_added = 0
        self._is_head_new = is_head_new
        self._fresh: dict[str, Draws] = {}  # of tasks whose weights are as drawn, of which others may be copies

    @property
    def next_adapter(self) -> str:
        """Internal id of the adapter of the task that comes next."""
        return f"t{self._num_added + 1:06d}"

    # ------------------------------------------------------------- one task

    def __getitem__(self, name: str) -> RegisteredTask:
        """Return a task by its name; a `ConfigError` if there is none."""
        if name not in self._tasks:
            names = tuple(self._tasks)
            allowed = f"one of {', '.join(names)}" if names else "none, because the model holds no tasks"
            raise ConfigError(f'the task must be {allowed}, got "{name}". {closest(name, names)}'.rstrip())
        return self._tasks[name]

    def was_given(self, model: Any, name: str, config: PeftConfig) -> bool:
        """Return whether a task was added with a configuration, or has it now (PEFT completes what it is given)."""
        task = self[name]
        return config.to_dict() in (task.given, model.peft_config[task.adapter].to_dict())

    @property
    def prompt_kind(self) -> AdapterKind | None:
        """A kind of prompts that some task has; `None` if there is none."""
        return next((task.kind for task in self._tasks.values() if not task.kind.has_targets), None)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all tasks."""
        for task in self._tasks.values():
            yield from task.parameters.values()

    def mark_trainable(self) -> None:
        """Let every task train: PEFT keeps gradients for the active adapter only."""
        for parameter in self.parameters():
            parameter.requires_grad_(True)

    def slab_of(self, name: str) -> TaskSlab:
        """Return the flat buffers that a task's parameters are views of."""
        slab = self[name].slab
        assert slab is not None, "parameters without values are not laid out"
        return slab

    def slab_of_adapter(self, adapter: str) -> TaskSlab | None:
        """Return the flat buffers of an adapter, by its internal id; `None` if it has none."""
        task = self._by_adapter.get(adapter)
        return None if task is None else task.slab

    def add(self, name: str, config: PeftConfig) -> str:
        """Add a task with the configuration as given, without parameters yet; return its adapter's id."""
        task = RegisteredTask(self.next_adapter, kind_of(config), config.to_dict())
        self.adapters[name] = task.adapter
        self._tasks[name] = self._by_adapter[task.adapter] = task
        # Never counted down: an id is not given twice.
        self._num_added += 1
        return task.adapter

    def adopt(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device | None = None,
        *,
        are_described: bool = False,
    ) -> None:
        """Make parameters those of a task, and lay them out in flat buffers of their own.

        Args:
            name: the task's name in the run.
            parameters: the parameters, by their PEFT names without the adapter id.
            device: the device of the buffers if there are no parameters.
            are_described: whether they have shapes but no values; then they are not laid out.
        """
        task = self[name]
        task.parameters = dict(parameters)
        if not are_described:
            # The kind says how its kernels want to read them (`AdapterKind.slot`).
            task.slab = TaskSlab(
                task.parameters, device, layout=task.kind.slot, kind_of=task.page_kind, layer_norms=task.layer_norms
            )

    def lay_out(self, device: torch.device) -> None:
        """Lay out again the parameters that were moved or cast; those of other tasks stay where they are."""
        for name, task in self._tasks.items():
            if task.slab is not None and not task.slab.is_in_place(device):
                self.adopt(name, task.parameters, device)

    def divide_pages(self, model: Any, name: str, kind_of: PageKind) -> None:
        """Lay out a task again if its parameters are in pages of other kinds: tensors with one learning rate each."""
        task = self[name]
        if task.page_kind is not kind_of:
            task.page_kind = kind_of
            if task.slab is not None:
                self.adopt(name, task.parameters, task.slab.pages[0].values.device)
                model.stream.clear_tables()

    # --------------------------------------------------------------- pieces

    def pieces_of(self, name: str) -> dict[str, Piece]:
        """Return the part of each of a task's parameters that this process holds."""
        return {
            key: self.pieces.get((name, key)) or Piece.whole(parameter.shape)
            for key, parameter in self[name].parameters.items()
        }

    def forget_pieces(self, name: str) -> None:
        """Let all that a process holds of a task count as whole again."""
        self.pieces = {key: piece for key, piece in self.pieces.items() if key[0] != name}

    @torch.no_grad()
    def place_whole(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write this process's part of whole tensors into a task's parameters.

        Args:
            name: the task's name in the run.
            tensors: tensors of whole shapes by parameter name; those of parameters that are not here are skipped.

        Raises:
            CheckpointError: if one is missing, or of another shape; then nothing is written.
        """
        pieces = self.pieces_of(name)
        # All shapes are checked before the first weight is written.
        for key, piece in pieces.items():
            got = tuple(tensors[key].shape) if key in tensors else None
            if got != piece.shape:
                raise CheckpointError(
                    f'task "{name}": {key} must be the whole tensor of the registered adapter, {list(piece.shape)}, '
                    f"got {'nothing' if got is None else f'shape {list(got)}'}."
                )
        for key, parameter in self[name].parameters.items():
            parameter.copy_(pieces[key].take(tensors[key]))

    @contextmanager
    def reference_weights(self, names: Collection[str]) -> Iterator[None]:
        """Give tasks the weights of their `references` in the `with` block, in place; restore their own afterwards."""
        held = [(item, self.references[name][key]) for name in names for key, item in self[name].parameters.items()]
        trained = [item.detach().clone() for item, _ in held]
        try:
            with torch.no_grad():
                for item, reference in held:
                    item.copy_(reference)
            yield
        finally:
            with torch.no_grad():
                for (item, _), value in zip(held, trained, strict=True):
                    item.copy_(value)

    # ------------------------------------------------------ coming and going

    def register(
        self,
        model: Any,
        peft_configs: Mapping[str, PeftConfig],
        seeds: Mapping[str, int],
        num_labels: Mapping[str, int],
    ) -> None:
        """Add tasks to a model whose configurations were checked.

        Args:
            model: the `MultiTaskPeftModel` that the registry belongs to.
            peft_configs: `PeftConfig` of each new task, by name.
            seeds: fixes the initial adapter weights of a task; 42 by default.
            num_labels: classes of a task's head, for sequence classification; the backbone's by default.

        Raises:
            ConfigError: if PEFT refuses an adapter, or a head cannot have so many classes; then no task is added.
        """
        before, backbone = set(self.adapters), model.backbone
        # The garbage collector would look at all modules again and again, none of which is garbage.
        collects = gc.isenabled()
        gc.disable()
        try:
            # PEFT goes through all modules for each adapter: with those of others in sight, time by their square.
            with HiddenAdapters(backbone) as hidden:
                for name, config in peft_configs.items():
                    seed = seeds.get(name, 42)
                    if (alike := self._alike(model, config, seed)) is not None:
                        self._copy(model, hidden, name, config, alike, seed)
                        continue
                    copied, adapter = completed_copy(config, backbone), self.next_adapter
                    with injecting(name, copied, seed, model.peft_config) as draws, hidden_copies(backbone):
                        self.tuners.inject(model, adapter, copied)
                    hidden.show_new()
                    if kind_of(copied).has_targets:
                        # To fp32 on a backbone in half precision, as PEFT does with adapters that it sees.
                        tuner = self.tuners.of(model, adapter, copied)
                        tuner._cast_adapter_dtype(adapter_name=adapter, autocast_adapter_dtype=True)
                    self.take_in(model, name, config, num_labels.get(name), draws)
                    hidden.hide()
        except Exception:
            # All or none: those that came in before the fault leave again.
            drop_unused_wrappers(backbone)
            self.remove(model, [name for name in self.adapters if name not in before])
            raise
        finally:
            if collects:
                gc.enable()
            self._fresh.clear()
            attach(backbone, model.stream)
            model.name_modules()
            model.stream.clear_tables()
            self.mark_trainable()

    def _alike(self, model: Any, config: PeftConfig, seed: int) -> str | None:
        """Return a task that was just added and is equal for PEFT, apart from its seed."""
        fields = config.to_dict()
        names = [name for name in self._fresh if equal_but_for_alpha(self._tasks[name].given, fields)]
        same = [name for name in names if is_meta(model.backbone) or self._fresh[name].seed == seed]
        for name in [] if same else names:
            if self._fresh[name].make([*self[name].parameters.values()], model.backbone.dtype):
                return name
        return next(iter(same), None)

    def _copy(self, model: Any, hidden: HiddenAdapters, name: str, config: PeftConfig, alike: str, seed: int) -> None:
        """Add a task whose adapter equals another one except for its id, its seed and its scaling."""
        draws, is_described = self._fresh[alike], is_meta(model.backbone)
        adapter, other = self.add(name, config), self[alike].adapter
        completed = model.peft_config[adapter] = copy.deepcopy(model.peft_config[other])
        new, alpha = hidden.copy(other, adapter), cast(Any, config).lora_alpha
        if completed.lora_alpha != alpha:
            set_alpha(hidden.layers, adapter, completed, alpha)
        parameters = {key: new[id(parameter)] for key, parameter in self[alike].parameters.items()}
        self.adopt(name, parameters, are_described=is_described)
        if seed != draws.seed and not is_described:
            draws.repeat(seed, new)

    def take_in(self, model: Any, name: str, config: PeftConfig, num_labels: int | None, draws: Draws) -> None:
        """Add a task whose adapter was injected under the next id: its head and its parameters.

        Args:
            model: the `MultiTaskPeftModel` that the registry belongs to.
            name: the task's name.
            config: the configuration as given for the task.
            num_labels: classes of the task's head; `None` for the backbone's.
            draws: what was drawn for the adapter; its seed fixes the initial weights of a head that is drawn, too.
        """
        adapter, kind, backbone = self.add(name, config), kind_of(config), model.backbone
        completed: Any = model.peft_config[adapter]
        # Before layers are attached, as they enroll with the maker of their kind.
        if kind.name not in model.stream.makers:
            model.stream.makers |= {} if kind.pass_maker is None else {kind.name: kind.pass_maker(self.slab_of_adapter)}
        if not model.active_adapter:
            model.select_adapter(adapter)
        # Other tasks' heads, which "all-linear" also finds, are kept out of what is saved as this task's targets.
        targets = getattr(completed, "target_modules", None)
        if isinstance(targets, set):
            parts = (".modules_to_save.", ".original_module", ".token_adapter")
            # If PEFT resolves "all-linear" by the ends of names, it finds frozen layers within those of other tasks.
            targets = {target for target in targets if not any(part in target for part in parts)}
            completed.target_modules = targets - {"base_layer"}
        model.objectives.add(name, head_kind_for(completed.task_type))
        model.objectives.of(name).head.prepare(backbone, adapter, num_labels, draws.seed, is_new=self._is_head_new)
        self.tuners.note(model, adapter, completed)
        # Names are those of a model of one PEFT type, with which files are written.
        with self.tuners.as_peft_model(model, adapter, completed):
            biases = add_biases(completed, backbone, adapter)
            marker = f".{adapter}"
            parameters = {
                biases.get(parameter) or key.replace(marker, "", 1): parameter
                for key, parameter in model.named_parameters()
                if f"{marker}." in key or key.endswith(marker)
            }
        norms = {
            id(item) for module in model.modules() if isinstance(module, nn.LayerNorm) for item in module.parameters()
        }
        self[name].layer_norms = {key for key, parameter in parameters.items() if id(parameter) in norms}
        # Those that rows of text do not reach stay as drawn, as alone, where they get no gradient.
        outside = modules_outside_text(backbone)
        prefixes, injected = tuple(f"base_model.model.{module}." for module in outside), parameters
        parameters = {key: parameter for key, parameter in parameters.items() if not key.startswith(prefixes)}
        if injected and not parameters:
            raise ConfigError(
                f"tasks.{name}.peft_config.target_modules must include modules of the language model, because only "
                f"rows of text are trained on, got only modules outside it ({', '.join(outside)})."
            )
        # What PEFT freezes of a prompt is not trained: CPT's words, the sink of a cartridge. All others are
        # trained even if they have no gradients yet, as those of adapters that are not active.
        parameters = {key: item for key, item in parameters.items() if item.requires_grad or not key.startswith(PREFIX)}
        if not any(parameter.numel() for parameter in parameters.values()):
            raise ConfigError(
                f"tasks.{name}.peft_config must have target modules that its type can adapt, with ranks below their "
                "widths, and at least one part that is trained; with this configuration PEFT trains nothing."
            )
        self.adopt(name, parameters, are_described=is_meta(backbone))
        if can_be_copied(completed):
            self._fresh[name] = draws

    def remove(self, model: Any, names: Sequence[str]) -> None:
        """Drop tasks from a model and free their adapters.

        Raises:
            ConfigError: if a task is not held; then none is dropped.
        """
        # All are looked up before the first leaves, so that an unknown name changes nothing.
        adapters = {name: self[name].adapter for name in names}
        for name, adapter in adapters.items():
            del self.adapters[name], self._tasks[name], self._by_adapter[adapter]
            self.references.pop(name, None)
            self.forget_pieces(name)
            model.objectives.forget(name)
            model.noise.assign(adapter, 0.0)
            model.router_loss.assign(adapter, 0.0)
            model.stream.clear_tables()
            forget_biases(model.backbone, adapter)
            self.tuners.delete(model, adapter)
            drop_unused_wrappers(model.backbone)
        model.name_modules()
        model.active_adapter = next(iter(self.adapters.values()), [])
        if self.tuners.is_mixed and model.active_adapter:
            model.select_adapter(model.active_adapter)
        # Selecting an adapter has left gradients on for that one alone.
        self.mark_trainable()
