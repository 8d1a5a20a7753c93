"""`StageModel`: one stage of a multi-task model, run by the model code of transformers.

`StageLayout` assigns decoder layers to processes. Virtual stages are numbered in the order in which a micro-batch
passes through them, `chunk * S + stage`, as in `peft_mux.scheduler.pipeline.list_scheduler`. For 7 layers, S = 2 and
2 chunks per process, with 4 and 3 layers::

    virtual stage   0        1        2        3
    stage           0        1        0        1
    layers          0 1      2 3      4 5      6
    and             embedding                  final norm, head

No decoder forward is reimplemented. The base model keeps its class, rotary embeddings, masks and layer numbers, so
names, dropout masks and attention types are unchanged. Modules of other processes are replaced by ones that return
their input, and hidden states enter and leave between layers::

    virtual stage 0     embed  layer layer  exit  pass   pass
    virtual stage 1     pass   enter pass   layer layer  norm  -> head, losses

If one process has several virtual stages, the modules of the others are replaced during a pass.

`load_stage` reads only the weights of one stage from a folder of safetensors. The backbone is built without weights;
parameters of this process are filled from the files, and parameters of other processes have a shape but no memory (one
expanded element). So PEFT injects adapters into an apparently whole model and draws the same weights as in a single
process; finally, everything that belongs to other stages is removed.

Shape letters: T tokens of a micro-batch, D hidden features, N tasks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from peft import PeftConfig
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import CheckpointError, UnsupportedModelError
from peft_mux.kernels.lora.reference import Rows
from peft_mux.modeling.adapters.lora.layer import lowest_layer, rows_needed
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.backbone.modules import HEAD_NAMES, frozen_parameters, put_module
from peft_mux.modeling.backbone.quantized import quantization_method
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import Statistics
from peft_mux.modeling.pieces import PassThrough
from peft_mux.modeling.stream import Passes, temporary_attributes
from peft_mux.parallel.families import family_of
from peft_mux.scheduler.costs.memory import split_layers


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Layers of every virtual stage of a pipeline.

    Attributes:
        num_stages: S, number of processes of the pipeline.
        num_chunks: number of virtual stages of each process.
        layer_counts: number of decoder layers of each virtual stage.
    """

    num_stages: int
    num_chunks: int
    layer_counts: tuple[int, ...]

    @classmethod
    def of(
        cls, num_layers: int, num_stages: int, *, num_chunks: int = 1, layers_per_stage: Sequence[int] | None = None
    ) -> StageLayout:
        """Return the layout of a plan; the layers of a process are divided among its chunks as evenly as possible.

        Args:
            num_layers: number of decoder layers of the backbone.
            num_stages: S, number of processes of the pipeline.
            num_chunks: number of virtual stages of each process.
            layers_per_stage: number of decoder layers of each of the S processes; by default as even as possible.

        Raises:
            ValueError: if there are not S numbers with the right sum, or if a process has fewer layers than chunks.
        """
        given = None if layers_per_stage is None else tuple(layers_per_stage)
        counts = split_layers(num_layers, num_stages, given)
        if min(counts) < num_chunks:
            raise ValueError(
                f"layers_per_stage must be at least {num_chunks} in each stage, one layer for each of its chunks, "
                f"got {counts}. Take fewer stages or chunks for a backbone of {num_layers} layers."
            )
        shares = [
            # Earlier chunks take the remainder, so that the virtual stages of a process differ by at most one layer.
            counts[stage] // num_chunks + (chunk < counts[stage] % num_chunks)
            for chunk in range(num_chunks)
            for stage in range(num_stages)
        ]
        return cls(num_stages, num_chunks, tuple(shares))

    @property
    def last_virtual_stage(self) -> int:
        """The virtual stage that has the final norm and the head."""
        return len(self.layer_counts) - 1

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the number of the virtual stage of one chunk of a process."""
        return chunk * self.num_stages + stage

    def virtual_stages_of(self, stage: int) -> tuple[int, ...]:
        """Return the virtual stages of a process, in order."""
        return tuple(self.virtual_stage(stage, chunk) for chunk in range(self.num_chunks))

    def layers_of(self, virtual_stage: int) -> range:
        """Return the indices of the decoder layers of a virtual stage."""
        start = sum(self.layer_counts[:virtual_stage])
        return range(start, start + self.layer_counts[virtual_stage])


class StagePass(NamedTuple):
    """The result of one forward of a micro-batch through a virtual stage.

    Attributes:
        output: `[T, D]` hidden states, or the `[N]` losses for the last virtual stage.
        passes: rows bound to adapters, by type of adapter; kept until the backward, because compiled layers look them
            up.
        statistics: for the last virtual stage, the statistics that are logged with each loss.
    """

    output: torch.Tensor
    passes: Passes
    statistics: Statistics = ()


class Handover(threading.local):
    """The hidden states that come into a pass through a stage, and those that go out.

    Each thread has its own, as passes that run in turns are in threads of their own.

    Attributes:
        received: `[1, T, D]` output of the layers before; `None` if there are none.
        given: `[1, T, D]` output of the stage's last layer; `None` if the model's own output counts.
    """

    received: torch.Tensor | None = None
    given: torch.Tensor | None = None


class Entrance(PassThrough):
    """Replaces the first layer of a later stage: returns the hidden states of the previous stage.

    Hidden states do not come in as embeddings, nor go out as the model's output, because model code may do more with
    embeddings than look them up, and more with the last layer's output than normalise it (Granite scales both).
    """

    def __init__(self, like: nn.Module, handover: Handover) -> None:
        super().__init__(like)
        self._handover = handover

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states of the stage before."""
        assert self._handover.received is not None, "a later stage receives its input"
        return self._handover.received


class Exit(PassThrough):
    """Follows the last layer of a stage that is not the last one: keeps its input."""

    def __init__(self, like: nn.Module, handover: Handover) -> None:
        super().__init__(like)
        self._handover = handover

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep the hidden states, and return them."""
        self._handover.given = hidden_states
        return hidden_states


class NoPositions(nn.Module):
    """Takes the place of learned positions behind the first stage, where hidden states include them already.

    Args:
        dtype: dtype of the hidden states, so that adding zero promotes nothing.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a scalar zero."""
        # A scalar: it is added to hidden states of any shape.
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
        return torch.zeros((), dtype=self.dtype, device=given[0].device)


class StageModel:
    """The layers and adapters of one stage, cut out of a whole model, which is modified.

    A task without adapters on these layers keeps its name here, but has no parameters.

    Args:
        model: the whole model; everything that belongs to other stages is removed from it.
        layout: which decoder layers are in which stage.
        stage: number of the stage that this process holds.

    Attributes:
        model: the model with the layers of this stage only.
        layout: which decoder layers are in which stage.
        stage: number of the stage that this process holds.
        virtual_stages: numbers of the virtual stages of this process, in order.
        has_head: whether this process computes the losses.
        hidden_size: D, width of the hidden states.
        dtype: dtype of the hidden states between virtual stages, the same as that of the residual stream.

    Raises:
        UnsupportedModelError: if the architecture cannot be partitioned.
        ValueError: if the layout has another number of layers, or fewer stages.

    Example:
        >>> stage = StageModel(model, StageLayout.of(8, 2), stage=0)  # doctest: +SKIP
        >>> stage.forward(0, mux_batch, None).output.shape  # doctest: +SKIP
    """

    def __init__(self, model: MultiTaskPeftModel, layout: StageLayout, stage: int) -> None:
        """Remove everything that belongs to other stages, and move the adapters to buffers for these layers only."""
        self.model, self.layout, self.stage = model, layout, stage
        backbone = model.backbone
        self._base, self._family, self._handover = backbone.base_model, family_of(backbone), Handover()
        self.dtype, self.hidden_size = backbone.dtype, int(backbone.config.get_text_config().hidden_size)
        self.virtual_stages = layout.virtual_stages_of(stage)
        self.has_head = layout.last_virtual_stage in self.virtual_stages
        layers = self._base.get_submodule(self._family.layers)
        if len(layers) != sum(layout.layer_counts) or not 0 <= stage < layout.num_stages:
            raise ValueError(
                f"stage {stage} of {layout.num_stages} must be of a layout with {len(layers)} layers, as "
                f"{type(backbone).__name__} has, got {sum(layout.layer_counts)}. Make it with StageLayout.of."
            )
        # Done while the model is still whole.
        for name in model.tasks:
            model.stream.lowest_layers[model.adapter_of(name)] = lowest_layer(model.task_parameters(name))
        layers_here = {index for virtual_stage in self.virtual_stages for index in layout.layers_of(virtual_stage)}
        for index, layer in enumerate(layers):
            if index not in layers_here:
                # Replaced, not removed, so that layers keep their numbers, on which names and dropout masks depend.
                layers[index] = PassThrough(layer)
        dropped = [] if 0 in self.virtual_stages else self._present(self._family.embeddings)
        if not self.has_head:
            dropped += self._present(self._family.after)
            head = backbone.get_output_embeddings()
            for name, module in list(backbone.named_children()):
                if name in HEAD_NAMES or module is head:
                    setattr(backbone, name, PassThrough())
        for name in dropped:
            put_module(self._base, name, PassThrough())
        held = {id(parameter) for parameter in model.parameters()}
        for name in model.tasks:
            kept = {key: item for key, item in model.task_parameters(name).items() if id(item) in held}
            # Into new buffers: a view of the whole task's page would keep all of it in memory.
            model.registry.adopt(name, kept, model.device)
        model.name_modules()
        model.stream.clear_tables()
        model.num_stages = layout.num_stages
        self._modules_at = {virtual_stage: self._modules_of(virtual_stage) for virtual_stage in self.virtual_stages}

    def gradient_rows(self, virtual_stage: int, batch: MuxBatch) -> tuple[Rows, ...] | None:
        """Return the rows of a virtual stage's input whose gradients earlier stages need; `None` for all.

        These are the rows of tasks that have adapters in earlier stages. Every process returns the same rows.

        Args:
            virtual_stage: number of a virtual stage after the first, of this process or of another one.
            batch: the micro-batch.
        """
        stream = self.model.stream
        segments = stream.segments_of(batch, batch.computed_offsets, self.model.adapters)
        return rows_needed(segments, stream.adapters_above(self.layout.layers_of(virtual_stage).start, segments))

    def forward(self, virtual_stage: int, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> StagePass:
        """Run a micro-batch through one virtual stage.

        Args:
            virtual_stage: number of one of this process's virtual stages.
            batch: the micro-batch, its tensors on the device.
            hidden_TD: `[T, D]` output of the previous virtual stage; `None` at virtual stage 0.
        """
        model = self.model
        with model.multiplexing(batch, routing=model.routed(batch)), self.only(virtual_stage):
            is_last = virtual_stage == self.layout.last_virtual_stage
            model.stream.reset_adapter_tracking(self.layout.layers_of(virtual_stage).start)
            output = self._hidden_states(batch, hidden_TD)
            if not is_last:
                return StagePass(output, model.stream.passes)
            losses = model.stream_losses(output, batch)
            return StagePass(losses.losses, model.stream.passes, losses.statistics)

    @torch.no_grad()
    def target_losses(self, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Run a micro-batch through the last virtual stage; see `MultiTaskPeftModel.target_losses`."""
        model = self.model
        with model.multiplexing(batch), self.only(self.layout.last_virtual_stage):
            output_TD = self._hidden_states(batch, hidden_TD)
            return model.objectives.head.terms(output_TD, batch, model)

    @torch.no_grad()
    def sequence_logits(self, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> list[torch.Tensor]:
        """Run a micro-batch through the last virtual stage; see `MultiTaskPeftModel.sequence_logits`."""
        model = self.model
        with model.multiplexing(batch), self.only(self.layout.last_virtual_stage):
            return model.objectives.logits(self._hidden_states(batch, hidden_TD), batch, model)

    def _hidden_states(self, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Run a micro-batch through the modules currently in place; return the `[T, D]` hidden states."""
        attention = AttentionStream(self.model.stream, batch, self.model.module_names)
        position_ids = batch.computed(batch.position_ids)
        arguments: dict[str, Any] = {"position_ids": position_ids, "mux_stream": attention, "use_cache": False}
        if hidden_TD is None:
            arguments["input_ids"] = batch.computed(batch.input_ids)
            if batch.token_type_ids is not None:
                arguments["token_type_ids"] = batch.computed(batch.token_type_ids)
        else:
            # Only its shape and dtype matter, because the entrance replaces it with the hidden states.
            arguments["inputs_embeds"] = hidden_TD.detach().unsqueeze(0)
        received = None if hidden_TD is None else hidden_TD.unsqueeze(0)
        with temporary_attributes(self._handover, received=received, given=None):
            output = self._base(**arguments).last_hidden_state
            given = self._handover.given
            return (output if given is None else given)[0]

    def _present(self, names: Sequence[str]) -> list[str]:
        """Return the names of modules that the base model has; some models lack some of them."""
        present = {name for name, _ in self._base.named_modules()}
        return [name for name in names if name in present]

    def _modules_of(self, virtual_stage: int) -> dict[str, nn.Module]:
        """Return the modules of the base model during a pass through a virtual stage, by name.

        The list of layers keeps its length, because model code looks up attention types by layer position.
        """
        family, layers = self._family, self._base.get_submodule(self._family.layers)
        layers_here = self.layout.layers_of(virtual_stage)
        chosen = [layer if index in layers_here else PassThrough(layer) for index, layer in enumerate(layers)]
        modules: dict[str, nn.Module] = {}
        if virtual_stage > 0:
            chosen[0] = Entrance(layers[0], self._handover)
            modules |= {name: PassThrough() for name in self._present(family.embeddings)}
            # Learned positions are added in virtual stage 0; other stages do not have their embedding.
            if family.positions is not None:
                modules[family.positions] = NoPositions(self.dtype)
        if virtual_stage < self.layout.last_virtual_stage:
            chosen[layers_here.stop] = Exit(layers[layers_here.stop], self._handover)
            modules |= {name: PassThrough() for name in self._present(family.after)}
        return {family.layers: nn.ModuleList(chosen), **modules}

    @contextmanager
    def only(self, virtual_stage: int) -> Iterator[None]:
        """Reduce the base model to one virtual stage of this process during the `with` block."""
        places: list[tuple[dict[str, Any], str, Any]] = []
        # Bypasses `setattr`, which would register and check each module again in every pass.
        for name, module in self._modules_at[virtual_stage].items():
            parent, _, leaf = name.rpartition(".")
            modules = self._base.get_submodule(parent)._modules
            places.append((modules, leaf, modules[leaf]))
            modules[leaf] = module
        try:
            yield
        finally:
            for modules, leaf, before in places:
                modules[leaf] = before


# ------------------------------------------------------------------ loading

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


def load_stage(
    folder: str | Path,
    peft_configs: Mapping[str, PeftConfig],
    layout: StageLayout,
    stage: int,
    *,
    seeds: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = None,
) -> StageModel:
    """Return one stage of a causal language model with the adapters of all tasks.

    The packing probe (`peft_mux.modeling.backbone.probe`) needs a whole model and does not run; the few architectures
    that can be partitioned are known to pass it.

    Args:
        folder: folder of the backbone, as written by `save_pretrained`.
        peft_configs: `PeftConfig` of each task, by task name.
        layout: which decoder layers are in which stage.
        stage: number of the stage that this process holds.
        seeds: seed of the initial adapter weights of each task, by task name.
        dtype: dtype of the backbone; by default that of its configuration.

    Raises:
        CheckpointError: if the folder has no safetensors, or if a weight of this stage is missing.
        UnsupportedModelError: if the architecture cannot be partitioned, or the weights are quantised.
    """
    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if quantization_method(config) is not None:
        raise UnsupportedModelError(
            f"{folder} must have floating point weights, because each stage reads only its own, got quantised ones. "
            "Load the model with from_pretrained and cut it with StageModel."
        )
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    with init_empty_weights(include_buffers=False):  # rotary frequencies are computed, and in no file
        backbone = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    backbone.tie_weights()  # the weights of tied modules were taken away one by one
    family, prefix, files = family_of(backbone), backbone.base_model_prefix, _files(folder)
    virtual_stages, all_names = layout.virtual_stages_of(stage), list(backbone.named_parameters(remove_duplicate=False))
    prefixes = [f"{prefix}.{family.layers}.{index}." for number in virtual_stages for index in layout.layers_of(number)]
    if 0 in virtual_stages:
        prefixes += [f"{prefix}.{name}." for name in family.embeddings]
    if layout.last_virtual_stage in virtual_stages:
        prefixes += [f"{prefix}.{name}." for name in family.after]
        head = backbone.get_output_embeddings()
        # A head that is tied to the embedding is one parameter with two names; files may use either.
        prefixes += [f"{name.rpartition('.')[0]}." for name, item in all_names if item is head.weight]
    wanted: dict[Path, list[tuple[str, str]]] = {}
    for name, parameter in list(backbone.named_parameters()):
        if not name.startswith(tuple(prefixes)):
            # Not on the meta device, because PEFT puts adapters on the device of the layer, where they need memory.
            _put(backbone, name, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
            continue
        # Saved under one of its names, or under its name within the base model (as for GPT-2).
        same = [other for other, item in all_names if item is parameter]
        candidates = [key for other in same for key in (other, other.removeprefix(f"{prefix}."))]
        key = next((key for key in candidates if key in files), None)
        if key is None:
            raise CheckpointError(
                f"{folder} must have the weights of a {type(backbone).__name__} under their own names, got no tensor "
                f"{name}. Load the model with from_pretrained and cut it with StageModel."
            )
        wanted.setdefault(files[key], []).append((name, key))
    # File by file, because opening a shard costs more than reading one of its tensors.
    for path, pairs in wanted.items():
        with safe_open(path, framework="pt") as file:
            for name, key in pairs:
                _put(backbone, name, file.get_tensor(key).to(backbone.get_parameter(name).dtype))
    # Buffers that are saved with the weights, such as those for load balancing of experts.
    saved = backbone.state_dict()
    for name, buffer in backbone.named_buffers():
        if name in saved and name in files:
            with safe_open(files[name], framework="pt") as file:
                buffer.copy_(file.get_tensor(name))
    # Tie again, because each parameter was replaced separately, including those with two names.
    backbone.tie_weights()
    model = MultiTaskPeftModel(backbone, peft_configs, seeds=seeds, verify=False)
    return StageModel(model, layout, stage)


def is_converted(folder: str | Path, backbone: Any) -> bool:
    """Return whether transformers renames or merges tensors of a folder when it reads them.

    This is the case for mixtures of experts, whose experts are saved one by one, and for GPT-NeoX's head.

    Args:
        folder: folder of the backbone, as written by `save_pretrained`.
        backbone: the model, possibly without weights, possibly with adapters.
    """
    if not get_model_conversion_mapping(backbone, add_legacy=False):
        return False
    return not {name for name, _ in frozen_parameters(backbone)} <= set(_files(Path(folder)))


def blank_model(
    like: Any, peft_configs: Mapping[str, PeftConfig], seeds: Mapping[str, int] | None = None
) -> MultiTaskPeftModel:
    """Return a whole model whose backbone takes no memory, with the same adapters as in a single process.

    Args:
        like: a backbone of the same class and configuration, possibly a part of one.
        peft_configs: `PeftConfig` of each task, by task name.
        seeds: seed of the initial adapter weights of each task, by task name.
    """
    with init_empty_weights(include_buffers=False):
        backbone = type(like)(like.config)
    for name, parameter in list(backbone.named_parameters()):
        _put(backbone, name, torch.zeros((), dtype=like.dtype).expand(parameter.shape))
    backbone.tie_weights()
    return MultiTaskPeftModel(backbone, peft_configs, seeds=seeds, verify=False)


def _put(backbone: Any, name: str, tensor: torch.Tensor) -> None:
    expected = backbone.get_parameter(name).shape
    if tensor.shape != expected:
        raise CheckpointError(
            f"{name} must have shape {list(expected)}, as in config.json, got {list(tensor.shape)}. Restore the folder."
        )
    home, _, leaf = name.rpartition(".")
    setattr(backbone.get_submodule(home), leaf, nn.Parameter(tensor, requires_grad=False))


def _files(folder: Path) -> dict[str, Path]:
    """Return the file that holds each tensor of a checkpoint, by the tensor's key."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        # Only the file name, so that an index cannot refer to files outside the folder.
        return {key: folder / Path(file).name for key, file in index.items()}
    if not (folder / _WHOLE).is_file():
        raise CheckpointError(
            f"{folder} must be a folder that save_pretrained wrote, got one with neither {_INDEX} nor {_WHOLE}. Load "
            "a model of another format with from_pretrained and cut it with StageModel."
        )
    with safe_open(folder / _WHOLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _WHOLE)
