"""`MultiTaskPeftModel`: a PEFT model that holds the adapters of many tasks and runs them all in one pass.

A pass of a packed batch has three parts: `prepare_pass` binds the gradients of its tasks, `multiplexing` lets the
attached layers and attention read the batch, and `hidden_states` runs the backbone. `forward` does all of them and
takes the losses; pipeline stages, captured passes and profiles use the parts.

`TaskView` is one task of such a model, used like the PEFT model that it would be alone.

Shape letters: T tokens, U tokens that are computed, N tasks, M targets, D hidden features, V vocabulary, L tokens of a
sequence, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer, set_adapter
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.modeling.adapters import files
from peft_mux.modeling.adapters.checks import check_configs
from peft_mux.modeling.adapters.copies import only_adapter
from peft_mux.modeling.adapters.injection import Origin, completed_copy, injecting
from peft_mux.modeling.adapters.kind import AdapterKind, kind_of
from peft_mux.modeling.adapters.trained_parts import only_rows_of, select_biases
from peft_mux.modeling.adapters.tuners import merge_and_unload
from peft_mux.modeling.attention.attention_stream import AttentionStream, Prefixes
from peft_mux.modeling.attention.packed import ATTENTION_NAME, register_attention
from peft_mux.modeling.backbone.liger import unfuse
from peft_mux.modeling.backbone.modules import is_meta, language_model, modules_below_adapters, without_head
from peft_mux.modeling.backbone.probe import ComputingPath, check_backbone, check_packing, path_of, position_offset
from peft_mux.modeling.backbone.quantized import prepare_quantized
from peft_mux.modeling.neftune import EmbeddingNoise
from peft_mux.modeling.objectives.objective import TokenOutputs
from peft_mux.modeling.objectives.task_objective import MuxOutput, TaskObjectives
from peft_mux.modeling.registry import TaskRegistry
from peft_mux.modeling.router_loss import STATISTIC, RoutedTokens, RouterLoss
from peft_mux.modeling.shared_model import SharedModel
from peft_mux.modeling.stream import Passes, Stream, temporary_attributes
from peft_mux.storage import write_checksums
from peft_mux.user_code import running_task


def reason_of_backbone(backbone: Any) -> str | None:
    """Return why no task on a backbone may share the tokens that its rows begin with, a clause; `None` where tasks may.

    The activations of a token depend on it and on the tokens before it, so rows with a common prefix share its
    activations (`docs/prefixes.md`). This needs a backbone that draws nothing for each row and whose tokens do not see
    later ones; it may have adapters, and may have no weights.
    """
    for name, module in modules_below_adapters(language_model(backbone)):
        if getattr(module, "is_causal", True) is False:
            return f"every token of {type(backbone).__name__} sees later ones"
        for key, value in vars(module).items():
            # Dropout modules, and attention modules that pass their dropout probability on.
            is_dropout = key == "p" and isinstance(module, nn.Dropout)
            if (is_dropout or "drop" in key) and isinstance(value, float) and value > 0.0:
                return f"the backbone's own dropout ({name}, {value:g}) is drawn for each row"
    return None


def reason_of_adapter(config: PeftConfig) -> str | None:
    """Return why a task with an adapter may not share tokens (see `reason_of_backbone`); `None` where it may."""
    if not kind_of(config).has_targets:
        return "its rows begin with a learnt prompt"
    if kind_of(config).entry.draws_noise:
        return "its adapter draws noise for each row"
    for name, value in vars(config).items():
        if "dropout" in name and isinstance(value, float) and value > 0.0:
            return f"its {name}={value:g} is drawn for each row"
    return None


def require_whole(model: MultiTaskPeftModel, what: str) -> None:
    """Raise a `ConfigError` if a model is one of several stages or shards; `what` was asked of it."""
    if model.num_stages * model.tp_size > 1 or isinstance(model.backbone.base_model, FSDPModule):
        raise ConfigError(
            f"{what} needs a whole backbone, got one that is divided among processes. Load the saved adapter with "
            "PeftModel.from_pretrained in one process."
        )


def require_all_layers(model: MultiTaskPeftModel, what: str) -> None:
    """Raise a `ConfigError` if a model is one of several pipeline stages; `what` was asked of it."""
    if model.num_stages > 1:
        raise ConfigError(
            f"{what} needs a whole model, or shards of one (tensor_parallel_size), got one of {model.num_stages} "
            "pipeline stages, which has its own layers only. Load the saved adapter with PeftModel.from_pretrained "
            "in one process."
        )


def require_words(model: MultiTaskPeftModel, name: str, what: str) -> None:
    """Raise a `ConfigError` if a task classifies; `what`, which generates text, was asked of it."""
    kind = model.objectives.of(name).head.kind
    if not kind.is_shared:
        raise ConfigError(
            f'{what} needs a task that makes words, got the {kind.name} task "{name}". For its classes, call '
            f'task_view("{name}").'
        )


class TaskView:
    """Backbone plus one adapter, with PEFT's own forward; nothing is copied.

    Args:
        model: the multi-task model that holds the task.
        name: name of the task.
    """

    def __init__(self, model: MultiTaskPeftModel, name: str) -> None:
        self._model, self._name, self._adapter = model, name, model.adapter_of(name)
        self._kind = model.registry[name].kind

    @contextmanager
    def selected(self) -> Iterator[MultiTaskPeftModel]:
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
            model.registry.mark_trainable()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the transformers model's forward with this task's adapter.

        If the model is cut into shards (tensor parallelism), all of them have to call this with the same arguments;
        likewise `generate`, with the same state of torch's random numbers if it samples.

        Raises:
            ConfigError: if the model is one of several stages of a pipeline.
        """
        require_all_layers(self._model, f'task_view("{self._name}"), a forward pass')
        with self.selected() as model:
            return self._kind.call(model, self._adapter, args, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with this task's adapter, as `PeftModel.generate` does.

        Raises:
            ConfigError: if the task classifies, or the model is one of several stages of a pipeline.
        """
        require_all_layers(self._model, f'task_view("{self._name}").generate')
        require_words(self._model, self._name, f'task_view("{self._name}").generate')
        with self.selected() as model:
            return self._kind.call(model, self._adapter, args, kwargs, generate=True)

    def merge_and_unload(self) -> Any:
        """Return the backbone with this task's adapter merged in; as in PEFT, the adapters are gone afterwards.

        Raises:
            ConfigError: if this process holds only a part of the model.
        """
        require_whole(self._model, "merge_and_unload")
        with self.selected() as model:
            return merge_and_unload(model, model.registry.tuners, self._adapter)


class MultiTaskPeftModel(PeftModel):
    """Any number of adapters on one frozen backbone, each computing on its own rows of a packed stream.

    It is a `PeftModel`: parameter names, saving and merging are PEFT's. Tasks are known to PEFT under internal ids,
    because an adapter that is named like a module (`mlp`) empties the checkpoints of its neighbours there.

    Args:
        model: a transformers causal language model, on which tasks may also classify sequences, or a classifier. Its
            modules are kept and its weights frozen.
        peft_configs: `PeftConfig` of each task by name; at least one.
        seeds: fixes the initial adapter weights of a task, as `torch.manual_seed` before `get_peft_model` would; 42
            where absent.
        num_labels: classes of a task's head, for sequence classification; the backbone's where absent.
        is_head_new: the backbone's classification head was not loaded but made at random; then each task's head is
            drawn from the task's seed instead of copied.
        verify: compare packed with separate results on the backbone before anything else (a few short sequences);
            `None` to leave that to `verify_once`, when the model is where it will train, `False` for never.

    Attributes:
        registry: the tasks that the model holds, their parameters, and where these are in memory.
        stream: what the attached layers read of the micro-batch in flight.
        has_prompts: whether passes include the learnt prompts of tasks; not while all adapters are switched off.
        shared: what the own code of a task must leave as it is.
        objectives: which loss each task is trained towards, and the head that it reads.
        noise: which tasks have noise on their embeddings in training.
        router_loss: which tasks add the balancing loss of routers to their own in training.
        module_names: name of each module within the backbone.
        num_stages: into which the backbone was cut; this model is one of them (`peft_mux.parallel.pipeline.stage`).
        tp_size: tensor parallel ranks among which each stage is cut; this model is the part of one of them.

    Raises:
        ConfigError: naming every task and field that cannot be trained.
        UnsupportedModelError: if packing would change the model's results.

    Example:
        >>> model = MultiTaskPeftModel(base, {"sst2": LoraConfig(r=8), "qa": LoraConfig(r=64)})  # doctest: +SKIP
        >>> model(mux_batch).losses.sum().backward()  # doctest: +SKIP
    """

    base_model: Any
    num_stages: int = 1
    tp_size: int = 1
    has_prompts: bool = True

    def __init__(
        self,
        model: Any,
        peft_configs: Mapping[str, PeftConfig],
        *,
        seeds: Mapping[str, int] | None = None,
        num_labels: Mapping[str, int] | None = None,
        is_head_new: bool = False,
        verify: bool | None = True,
    ) -> None:
        """Inject the adapters, attach the multiplexed layers, and probe the backbone."""
        check_backbone(model)
        prepare_quantized(model)
        if not peft_configs:
            raise ConfigError("peft_configs must have at least one task name with its PeftConfig, got none.")
        check_configs(peft_configs, model)
        register_attention()
        # Before PEFT's construction, so that `_apply` finds them whenever it is called.
        self.registry, self.stream = TaskRegistry(is_head_new=is_head_new), Stream()
        self.noise, self.router_loss = EmbeddingNoise(self.stream), RouterLoss(self.stream)
        self._unchanging: frozenset[str] = frozenset()
        self.module_names: dict[nn.Module, str] = {}
        self._origin = Origin(model)
        self.shared = SharedModel(self)
        # The devices and precisions in which packing was verified; `None` if that is never wanted.
        self._verified: set[ComputingPath] | None = None if verify is False else set()
        # PEFT makes its tuner with a first adapter; all further ones are added to it.
        first, *others = peft_configs
        seeds, num_labels = seeds or {}, num_labels or {}
        config, adapter = completed_copy(peft_configs[first], model), self.registry.next_adapter
        try:
            with injecting(first, config, seeds.get(first, 42)) as draws:
                kind_of(config).open(self, model, adapter, config)
            self.objectives = TaskObjectives(self.backbone)
            self.registry.take_in(self, first, peft_configs[first], num_labels.get(first), draws)
            trained = {id(parameter) for parameter in self.registry.parameters()}
            for parameter in self.parameters():
                parameter.requires_grad_(id(parameter) in trained)
            self.registry.register(self, {name: peft_configs[name] for name in others}, seeds, num_labels)
            if verify and not is_meta(model):
                self.verify()
        except Exception:
            # The caller gets the backbone back without adapters.
            self._origin.restore(model)
            raise

    # ------------------------------------------------------------------ tasks

    @property
    def backbone(self) -> Any:
        """The transformers model under the adapters."""
        # Seen as PEFT's model of prompts, the backbone stands by itself.
        return self.base_model if self._is_prompt_learning else self.base_model.model

    @property
    def device(self) -> torch.device:
        """Where the backbone's weights are."""
        return self.backbone.device

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order of their registration."""
        return tuple(self.registry.adapters)

    @property
    def adapters(self) -> dict[str, str]:
        """Internal id of each task's adapter, in the order of registration."""
        return self.registry.adapters

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
            seeds: fixes the initial adapter weights of a task; 42 where absent.
            num_labels: classes of a task's head, for sequence classification; the backbone's where absent.
            are_checked: the configurations were checked against the whole model, of which this is a part.

        Raises:
            ConfigError: naming every fault of every new task; then none is added.
        """
        if not are_checked:
            held = {name: self.peft_config[adapter] for name, adapter in self.adapters.items()}
            check_configs(peft_configs, self.backbone, held=held)
        self.registry.register(self, peft_configs, seeds or {}, num_labels or {})

    def remove_tasks(self, names: list[str] | tuple[str, ...]) -> None:
        """Drop tasks and free their adapters; the others stay as they are.

        Raises:
            ConfigError: if a task is not held; then none is dropped.
        """
        self.registry.remove(self, names)

    def adapter_of(self, name: str) -> str:
        """Return the internal adapter id under which PEFT knows a task; a `ConfigError` where none is held."""
        return self.registry[name].adapter

    def task_parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return a task's own parameters, by their PEFT names without the adapter id."""
        return self.registry[name].parameters

    def print_trainable_parameters(self) -> None:
        """Print PEFT's line for each task: its own parameters, those with the backbone, and their share."""
        counts = {
            name: sum(parameters.numel() for parameters in self.task_parameters(name).values()) for name in self.tasks
        }
        frozen = self.backbone.num_parameters() - sum(counts.values())
        for name, count in counts.items():
            total = max(frozen + count, 1)
            share = f"trainable%: {100 * count / total:.4f}"
            print(f"{name}: trainable params: {count:,d} || all params: {total:,d} || {share}")  # noqa: T201

    def name_modules(self) -> None:
        """Update `module_names` to the modules that the backbone has now."""
        self.module_names = {module: name for name, module in self.backbone.named_modules()}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast as any module does, and lay the adapters out again; never for the code of one task."""
        if (task := running_task()) is not None:
            raise ConfigError(
                f"tasks.{task}: the model must stay on its device and in its dtype, as all tasks share it, got a call "
                "that moves or casts it (to, half, cpu, ...). Change a copy of its tensors."
            )
        # `to` and `half` give every parameter memory of its own, so none is a view of its task's buffer any more.
        result = super()._apply(*args, **kwargs)
        self.registry.lay_out(self.device)
        self.stream.clear_tables()
        return result

    # ------------------------------------------------------------------ files

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """Write one sub-folder a task, each a plain PEFT adapter at its root with checksums next to its files.

        Args:
            save_directory: where the sub-folders go; made where absent.
            **kwargs: none is supported; PEFT's options are refused, not ignored.

        Raises:
            ConfigError: if options of PEFT are given.
        """
        if kwargs:
            raise ConfigError(f"save_pretrained takes the folder only, got {', '.join(kwargs)}.")
        for name in self.tasks:
            self.save_task(name, folder := Path(save_directory) / name)
            write_checksums(folder, files.adapter_names(folder))

    def save_task(self, name: str, folder: str | Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write one task's adapter as plain PEFT does; `PeftModel.from_pretrained(base, folder)` loads it.

        Args:
            name: the task's name in the run.
            folder: where the adapter's files go; made where absent.
            weights: the whole adapter's tensors by parameter name, where this model holds only a part of it.
        """
        files.save_adapter(self, self.adapter_of(name), Path(folder), weights)

    def saved_weights(self, name: str, folder: str | Path) -> dict[str, torch.Tensor]:
        """Return a task's weights from a PEFT adapter folder, by parameter name: those that this model has a part of.

        Raises:
            CheckpointError: if the folder holds none, or tensors that are not of this task.
        """
        return files.read_adapter(self, self.adapter_of(name), Path(folder), self.registry.pieces_of(name))

    def load_task(self, name: str, folder: str | Path) -> None:
        """Read one task's adapter weights from a PEFT adapter folder; a `CheckpointError` if its tensors differ."""
        files.load_adapter(self, self.adapter_of(name), Path(folder))

    def begin_from(self, name: str, folder: str | Path, *, keeps_reference: bool = False) -> None:
        """Give a task the weights of a saved adapter; a model without weights only compares the tensors.

        Args:
            name: the task's name in the run.
            folder: the adapter, as PEFT saves it, whole also for a part of the model.
            keeps_reference: whether these weights stay, frozen, as the reference of the task's loss.

        Raises:
            CheckpointError: if the folder holds none, or tensors that are not of this task.
        """
        if is_meta(self.backbone):
            files.matching_weights(self, self.adapter_of(name), Path(folder))
            return
        if self.num_stages * self.tp_size > 1:
            self.registry.place_whole(name, self.saved_weights(name, folder))
        else:
            self.load_task(name, folder)
        if keeps_reference:
            parameters = self.task_parameters(name)
            self.registry.references[name] = {key: item.detach().clone() for key, item in parameters.items()}

    @classmethod
    def from_pretrained(cls, model: Any, model_id: str | Path, **kwargs: Any) -> MultiTaskPeftModel:  # type: ignore[override]
        """Build a model with every adapter of a folder that `save_pretrained` (or a run) wrote.

        Args:
            model: the backbone, a transformers model.
            model_id: folder with one sub-folder a task; other contents are passed over.
            **kwargs: further arguments of `MultiTaskPeftModel`.

        Raises:
            CheckpointError: if there is no adapter, or naming the task and its file that is missing, torn or changed,
                does not fit, or holds numbers that are not finite.
        """
        configs, num_labels = files.saved_adapters(Path(model_id))
        mux_model = cls(model, configs, **{"num_labels": num_labels, **kwargs})
        for name in configs:
            try:
                mux_model.load_task(name, Path(model_id) / name)
            except CheckpointError as error:
                raise CheckpointError(f'task "{name}": {error}') from error
        return mux_model

    # ------------------------------------------------------------------ views

    def task_view(self, name: str) -> TaskView:
        """Return one task's model, for `generate` and plain forward passes."""
        return TaskView(self, name)

    def select_adapter(self, adapter: str) -> None:
        """Make the adapter of an internal id the one that plain forwards use, in the layers of every PEFT type."""
        set_adapter(self.backbone, adapter)
        select_biases(self.backbone, adapter)
        self.base_model.active_adapter = self.active_adapter = adapter

    @contextmanager
    def as_peft_model(self, adapter: str) -> Iterator[None]:
        """Let the model be what PEFT made of it for the PEFT type of an adapter (internal id), in the `with` block."""
        with (
            self.registry.tuners.as_peft_model(self, adapter, self.peft_config[adapter]),
            only_rows_of(self.backbone, adapter),
        ):
            yield

    def unload(self) -> Any:
        """Remove all tasks and return the original backbone for another model; this model is empty afterwards.

        Raises:
            ConfigError: if this model holds a part of the backbone only.
        """
        require_whole(self, "unload")
        self.remove_tasks(self.tasks)
        unfuse(self.backbone)
        self._origin.restore(self.backbone)
        return self.backbone

    def verify(self) -> None:
        """Compare packed with separate results on the backbone; see `peft_mux.modeling.backbone.probe`.

        Raises:
            UnsupportedModelError: if packed and separate results differ.
        """
        # The probe's rows belong to one task, and the modules of the others are many.
        with only_adapter(self.backbone, self.adapter_of(self.tasks[0])):
            check_packing(self)
        self.train(self.training)
        if self._verified is not None:
            self._verified.add(path_of(self))

    def verify_once(self) -> None:
        """Verify unless that was done on this device and in this precision, or the model was built with `verify=False`.

        Raises:
            UnsupportedModelError: if packed and separate results differ.
        """
        if self._verified is not None and path_of(self) not in self._verified:
            self.verify()

    # ---------------------------------------------------------------- passes

    def forward(self, mux_batch: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run a `MuxBatch` through the backbone and all of its tasks' adapters at once.

        Args:
            mux_batch: the packed stream, on the model's device; anything else goes to PEFT's own forward.
            *args: further arguments of PEFT's own forward.
            **kwargs: further named arguments of PEFT's own forward.

        Returns:
            `MuxOutput` with one loss a task.

        Raises:
            ConfigError: if this model is one of several stages of a pipeline.
        """
        require_all_layers(self, "a forward pass")
        if not isinstance(mux_batch, MuxBatch):
            args = args if mux_batch is None else (mux_batch, *args)
            if (kind := self._active_prompt_kind) is not None:
                return kind.call(self, self.active_adapter, args, kwargs)
            return super().forward(*args, **kwargs)
        self.prepare_pass(mux_batch.task_names)
        with self.multiplexing(mux_batch, routing=self.routed(mux_batch)):
            hidden_TD = self.hidden_states(mux_batch)
            return self.stream_losses(hidden_TD, mux_batch)

    def token_logprobs(self, mux_batch: MuxBatch) -> dict[str, TokenOutputs]:
        """Return the log-probability of every target of each task, with gradient, for your own losses.

        Of each task: `logprobs_M` and `nll_M` of its M targets (positions whose next token has a label), in the order
        of its rows in the batch, at the temperature of its loss; `by_sequence(...)` divides them among the sequences;
        `columns` holds what rows bring for each target (`weights`), and `word_logprobs_MK` those of several given
        `target_ids`.

        Args:
            mux_batch: the packed stream, on the model's device, as `ChunkPackingCollator` makes it.

        Raises:
            ConfigError: if the backbone is no language model, or this model is one of several stages of a pipeline.

        Example:
            >>> tokens = model.token_logprobs(collator(rows))["sql"]  # doctest: +SKIP
            >>> (tokens.nll_M * my_weights_M).sum().backward()  # doctest: +SKIP
        """
        require_all_layers(self, "log-probabilities of tokens")
        if not self.objectives.head.kind.is_shared:
            raise ConfigError("token_logprobs needs a causal language model, got a classifier.")
        self.prepare_pass(mux_batch.task_names)
        with self.multiplexing(mux_batch):
            hidden_TD = self.hidden_states(mux_batch)
            outputs_by_task = self.objectives.head.outputs(hidden_TD, mux_batch, self)
        return {outputs.task: outputs for outputs in outputs_by_task}

    def target_losses(
        self, batch: MuxBatch, passes: Passes | None = None, attention: AttentionStream | None = None
    ) -> torch.Tensor:
        """Return the negative log-likelihood `[M]` of each target.

        Nothing is bound or refreshed, and nothing that is made here needs to outlive the pass.

        Args:
            batch: the packed stream, on the model's device.
            passes: the batch's rows, bound to adapters, for each kind of adapters that is attached; made by default.
            attention: what attention reads of the same batch; made by default.
        """
        with self.multiplexing(batch, passes):
            return self.objectives.head.terms(self.hidden_states(batch, attention), batch, self)

    @torch.no_grad()
    def sequence_logits(self, batch: MuxBatch) -> list[torch.Tensor]:
        """Return the logits of every sequence: `[L, V]` for language models, `[C]` for classifiers.

        Args:
            batch: the packed stream, on the model's device.
        """
        self.prepare_pass(batch.task_names)
        with self.multiplexing(batch):
            return self.objectives.logits(self.hidden_states(batch), batch, self)

    def prepare_pass(self, tasks: Iterable[str]) -> None:
        """Bind the gradients of the tasks of a pass, and update the copies of weights that kernels read."""
        for name in tasks:
            slab = self.registry.slab_of(name)
            # Before the forward pass: tables of the kernels hold the addresses to which the backward pass will add.
            if torch.is_grad_enabled():
                slab.bind_gradients()
            if name not in self._unchanging:
                slab.refresh_copies()

    @contextmanager
    def unchanging_weights(self, tasks: Iterable[str]) -> Iterator[None]:
        """Prepare weights for the passes of a step: update the copies that kernels read once for all of them.

        Args:
            tasks: tasks of the step, whose weights nothing changes in the `with` block.
        """
        self._unchanging = frozenset(tasks)
        try:
            for name in self._unchanging:
                self.registry[name].kind.begin_step(self, self.adapter_of(name))
                self.registry.slab_of(name).refresh_copies()
            yield
        finally:
            self._unchanging = frozenset()

    @contextmanager
    def multiplexing(
        self,
        batch: MuxBatch,
        passes: Passes | None = None,
        not_reached: frozenset[str] = frozenset(),
        routing: RoutedTokens | None = None,
    ) -> Iterator[None]:
        """Let the attached layers and attention read a batch for the time of the `with` block.

        Args:
            batch: the micro-batch, its tensors on the model's device.
            passes: passes that were made of the same batch before; `None` to make them.
            not_reached: `Stream.adapters_not_reached` when what is recomputed now was first computed.
            routing: what routers write into for balancing losses, from `routed`; `None` for none.
        """
        backbone = self.backbone
        self.noise.watch(backbone)
        if self.router_loss.counted is not None:
            routing = self.router_loss.of_pass(batch, self.adapters)
        attention = backbone.config._attn_implementation
        # Only while a stream is read: `generate` and plain forwards keep the attention that the backbone came with.
        if attention != ATTENTION_NAME:
            backbone.config._attn_implementation = ATTENTION_NAME
        try:
            with self.stream.reading(batch, self.adapters, passes, not_reached, routing):
                yield
        finally:
            if attention != ATTENTION_NAME:
                backbone.config._attn_implementation = attention

    def hidden_states(
        self, batch: MuxBatch, attention: AttentionStream | None = None, *, rows: Any = None
    ) -> torch.Tensor:
        """Return the `[T, D]` last hidden states of a batch that is multiplexed, `[U, D]` where tokens are shared.

        Args:
            batch: the micro-batch, on the model's device.
            attention: the layouts of its sequences; made by default.
            rows: keys and values of rows that are being completed (`peft_mux.generation.key_value_rows.KeyValueRows`);
                the batch is their prompts or newest tokens.
        """
        backbone = self.backbone
        # Positions are given, as the model would count through the whole stream.
        position_ids = batch.computed(batch.position_ids) + position_offset(backbone)
        arguments: dict[str, Any] = {"input_ids": batch.computed(batch.input_ids), "position_ids": position_ids}
        # Prompts are computed once for the whole pass: where activations are recomputed, they read the same ones.
        prefixes = self._put_prompts(batch, arguments)
        assert prefixes is None or attention is None, "passes with prompts are not captured"
        if attention is None:
            attention = AttentionStream(self.stream, batch, self.module_names, prefixes, rows)
        arguments["mux_stream"] = attention
        if batch.token_type_ids is not None:
            arguments["token_type_ids"] = batch.computed(batch.token_type_ids)
        # A decoder would fill a cache of keys and values that nothing reads; encoders do not know the argument.
        if hasattr(backbone.config.get_text_config(), "use_cache"):
            arguments["use_cache"] = False
        self.stream.reset_adapter_tracking()
        base = without_head(backbone)
        # A stream has no padding. GPT-2 with a pad token would look for some, and wait for the device in every pass.
        base.warn_if_padding_and_no_attention_mask = lambda *_: None
        try:
            with self.objectives.head.bypassed(backbone):
                return base(**arguments).last_hidden_state.squeeze(0)
        finally:
            # Another pass that takes turns with this one may have removed it; it is read as a pass begins.
            vars(base).pop("warn_if_padding_and_no_attention_mask", None)

    def routed(self, batch: MuxBatch) -> RoutedTokens | None:
        """Return what the routers of a pass write into; `None` if none of its tasks adds a balancing loss now."""
        is_training = self.training and torch.is_grad_enabled()
        return self.router_loss.of_pass(batch, self.adapters) if is_training else None

    def statistic_names(self, task: str) -> tuple[str, ...]:
        """Return the names of the values that a pass returns in addition to the loss of a task."""
        has_more = self.training and torch.is_grad_enabled() and self.adapter_of(task) in self.router_loss.coefficients
        return (*self.objectives.statistic_names(task), *([STATISTIC] if has_more else []))

    def stream_losses(self, hidden_TD: torch.Tensor, batch: MuxBatch) -> MuxOutput:
        """Return the losses from the last hidden states of a batch that is multiplexed; in training with penalties.

        A penalty on the adapter itself belongs to the step and to no token. So the one pass that holds the first token
        of a task's global batch carries all of it, however many micro-batches and processes there are.
        """
        output = self.objectives.losses(hidden_TD, batch, self)
        output = self.router_loss.added_to(output, hidden_TD, batch, self.adapters)
        kinds = [self.registry[name].kind for name in batch.task_names]
        if not self.training or not any(kind.has_penalty for kind in kinds):
            return output
        losses = list(output.losses.unbind())
        for index, (name, kind) in enumerate(zip(batch.task_names, kinds, strict=True)):
            if not kind.has_penalty:
                continue
            places = batch.token_places[batch.task_offsets[index] : batch.task_offsets[index + 1]]
            has_first_token = (places == 0).sum()
            if has_first_token.is_cpu and not has_first_token:  # on other devices, asking would wait
                continue
            penalty = kind.penalty(self.peft_config[self.adapter_of(name)], self.task_parameters(name))
            losses[index] = losses[index] + penalty * has_first_token
        return replace(output, losses=torch.stack(losses))

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Recompute each layer's activations in the backward pass, reading the micro-batch they came from.

        Args:
            **kwargs: further arguments of `torch.utils.checkpoint.checkpoint`; `use_reentrant=True` is refused.

        Raises:
            ConfigError: if reentrant checkpointing is asked for.
        """
        if kwargs.pop("use_reentrant", False):
            raise ConfigError(
                "use_reentrant must be False, because adapters are inside the checkpointed layers, got True."
            )

        def contexts() -> tuple[Any, Any]:
            stream = self.stream
            if stream.batch is None:
                return nullcontext(), nullcontext()
            # The backward pass may run when the stream reads another batch, or none: it reads the batch, the passes,
            # the adapters not reached and the routing of the forward.
            again = self.multiplexing(stream.batch, stream.passes, stream.adapters_not_reached, stream.routing)
            return nullcontext(), again

        # Dropout draws depend on seed and place, so no generator state needs saving to repeat them.
        options = {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False, **kwargs}
        # Older releases of transformers have the second name alone.
        if hasattr(self.backbone, "activation_checkpointing_enable"):
            self.backbone.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    gradient_checkpointing_enable = activation_checkpointing_enable

    # --------------------------------------------------------------- prompts

    @property
    def _active_prompt_kind(self) -> AdapterKind | None:
        """The kind of the active adapter if it is a prompt, of which PEFT's own forward knows nothing."""
        kind = kind_of(self.peft_config[self.active_adapter])
        return kind if self.has_prompts and not kind.has_targets else None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the active adapter, as PEFT does."""
        if (kind := self._active_prompt_kind) is not None:
            return kind.call(self, self.active_adapter, args, kwargs, generate=True)
        return super().generate(*args, **kwargs)

    def _put_prompts(self, batch: MuxBatch, arguments: dict[str, Any]) -> Prefixes | None:
        """Put prompts before the rows of their tasks, in the arguments of the backbone; return keys and values.

        Raises:
            ConfigError: if rows do not begin with the virtual tokens that their task's prompt has.
        """
        kind = self.registry.prompt_kind if self.has_prompts else None
        if kind is None and not batch.virtual_tokens:
            return None
        labels = {} if kind is None else self.virtual_labels
        counts = batch.virtual_tokens or (0,) * len(batch.task_names)
        for name, got in zip(batch.task_names, counts, strict=True):
            if got != (wanted := len(labels.get(name, ()))):
                raise ConfigError(
                    f'task "{name}" must have rows with {wanted} virtual tokens, as many as its prompt has in this '
                    f"pass, got {got}. Collate with ChunkPackingCollator(virtual_labels=model.virtual_labels), or "
                    "without them where adapters are off."
                )
        return None if kind is None else kind.put_before_rows(self, batch, arguments)

    @property
    def virtual_labels(self) -> dict[str, tuple[int, ...]]:
        """Label of each virtual token that rows begin with, by name of the task; only of tasks with such a prompt.

        What `ChunkPackingCollator(virtual_labels=...)` lays rows out by.
        """
        configs = {name: self.peft_config[adapter] for name, adapter in self.adapters.items()}
        labels = {name: kind_of(config).virtual_labels(config) for name, config in configs.items()}
        return {name: of_task for name, of_task in labels.items() if of_task}

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Switch the adapters of all types off in the `with` block; afterwards those of all tasks are trained again."""
        layers: list[Any] = [
            module
            for module in self.backbone.modules()
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not module.disable_adapters
        ]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            select_biases(self.backbone, None)
            with temporary_attributes(self, has_prompts=False, _adapters_disabled=True):
                yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)
            select_biases(self.backbone, self.active_adapter or None)
            # PEFT turns gradients back on for the active adapter only.
            self.registry.mark_trainable()
