"""`StageModel`: one process's part of a multi-task model, run by the model code that transformers wrote.

Nothing of a decoder's forward is written anew. The base model keeps its class, its rotary embeddings, its masks and
the numbers of its layers (so names, dropout draws and kinds of attention stay); what belongs to another process is
replaced by modules that hand their input on, and hidden states come in as `inputs_embeds`::

    place 0     embed  layer layer  pass  pass   pass
    place 1     pass   pass  pass   layer layer  norm  -> head, losses

Where one process has several places, the modules that are not of the place at hand step aside for the pass.

Shape letters: T tokens of a micro-batch, D hidden features, N tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.attention import AttentionStream
from peft_mux.modeling.lora_pass import LoraPass
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.slabs import TaskSlab
from peft_mux.modeling.stage_layout import StageLayout
from peft_mux.modeling.support import HEAD_NAMES


class DecoderParts(NamedTuple):
    """Names of the parts of a decoder that stages have to know.

    Attributes:
        layers: list of decoder layers.
        embeddings: looked up by token or position, or applied to the result; first place only.
        positions: learned positions among them, which the model adds to hidden states too; or `None`.
        norm: after the last layer.
    """

    layers: str
    embeddings: tuple[str, ...]
    positions: str | None
    norm: str


_LLAMA = DecoderParts("layers", ("embed_tokens",), None, "norm")
_GPT2 = DecoderParts("h", ("wte", "wpe", "drop"), "wpe", "ln_f")
PARTS = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}
"""By model type; others are refused until somebody has held them against one process."""

_HEADS = ("lm_head", *HEAD_NAMES)


def decoder_parts(backbone: Any) -> DecoderParts:
    """Return how a backbone is cut.

    Raises:
        UnsupportedModelError: for a model type that is not known to survive it.
    """
    kind = getattr(backbone.config, "model_type", None)
    if kind not in PARTS:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} (model type {kind!r}) cannot be cut into pipeline stages; allowed:"
            f" {', '.join(sorted(PARTS))}. Train it in one process, or with data parallelism."
        )
    return PARTS[kind]


class PassThrough(nn.Module):
    """Stands where a module of another process was: returns what it is given first."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `hidden_states`."""
        return hidden_states


class NoPositions(nn.Module):
    """Stands for learned positions behind the first place, where hidden states hold them already."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Remember the dtype, so that no sum is promoted."""
        super().__init__()
        self.dtype = dtype

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return a scalar zero."""
        return torch.zeros((), dtype=self.dtype, device=position_ids.device)


class StagePass(NamedTuple):
    """What one forward of a micro-batch through a place gave.

    Attributes:
        output: `[T, D]` hidden states; at the last place the `[N]` losses.
        lora_pass: rows bound to adapters, which compiled backwards look up; to be kept until then.
    """

    output: torch.Tensor
    lora_pass: LoraPass | None


class StageModel:
    """The layers and adapters of one process, cut out of a whole model, which is used up.

    A task without adapters on these layers keeps its name here, and no parameters.

    Args:
        model: whole; what belongs to other processes is dropped from it.
        layout: of the pipeline.
        stage: of this process.

    Attributes:
        model: with this process's layers alone.
        layout: of the pipeline.
        stage: of this process.

    Raises:
        UnsupportedModelError: for an architecture that cannot be cut.
        ValueError: if the layout speaks of another number of layers, or of fewer stages.

    Example:
        >>> stage = StageModel(model, StageLayout.of(8, 2), stage=0)  # doctest: +SKIP
        >>> stage.forward(0, mux_batch, None).output.shape  # doctest: +SKIP
    """

    def __init__(self, model: MultiTaskPeftModel, layout: StageLayout, stage: int) -> None:
        """Drop what belongs elsewhere, and lay the adapters out anew."""
        self.model, self.layout, self.stage = model, layout, stage
        self._parts = decoder_parts(model.backbone)
        self._dtype = model.backbone.dtype
        self.places = layout.places_of(stage)
        layers = self._base.get_submodule(self._parts.layers)
        if len(layers) != layout.num_layers or not 0 <= stage < layout.num_stages:
            raise ValueError(
                f"stage {stage} of {layout.num_stages} with {layout.num_layers} layers; allowed: a stage of a layout of"
                f" {len(layers)} layers, as {type(model.backbone).__name__} has. Make it with StageLayout.of."
            )
        self._drop_others()
        model.num_stages = layout.num_stages
        self._modules_at = {place: self._modules_of(place) for place in self.places}

    @property
    def has_head(self) -> bool:
        """Whether this process computes the losses."""
        return self.layout.last_place in self.places

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.model.backbone.config.get_text_config().hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states between places: that of the residual stream."""
        return self._dtype

    def prepare(self, tasks: Sequence[str]) -> None:
        """Bind gradients, and let kernels in another dtype see the weights as they are now; once before a step.

        Args:
            tasks: that take part in the step.
        """
        self.model.prepare(tasks)

    def forward(self, place: int, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> StagePass:
        """Run a micro-batch through one place.

        Args:
            place: one of this process's.
            batch: on the device.
            hidden_TD: `[T, D]` from the place before; `None` at place 0.

        Raises:
            ValueError: if hidden states are missing behind the first place.
        """
        if (hidden_TD is None) != (place == 0):
            got = None if hidden_TD is None else list(hidden_TD.shape)
            raise ValueError(f"hidden_TD is {got} at place {place}; allowed: None at place 0, [T, D] at all others.")
        model = self.model
        with model.multiplexing(batch), self._at(place):
            output = self._hidden_states(batch, hidden_TD)
            if place == self.layout.last_place:
                output = self.model.losses_of(output, batch)
            return StagePass(output, model.stream.lora_pass)

    @torch.no_grad()
    def sequence_logits(self, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> list[torch.Tensor]:
        """Run a micro-batch through the last place; return as `MultiTaskPeftModel.sequence_logits` does.

        Args:
            batch: on the device.
            hidden_TD: as for `forward`.
        """
        model, place = self.model, self.layout.last_place
        with model.multiplexing(batch), self._at(place):
            output_TD = self._hidden_states(batch, hidden_TD)
            return model.logits_of(output_TD, batch)

    def _hidden_states(self, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Return `[T, D]`."""
        attention = AttentionStream(self.model.stream, batch, self._module_names)
        arguments: dict[str, Any] = {"position_ids": batch.position_ids, "mux_stream": attention, "use_cache": False}
        if hidden_TD is None:
            arguments["input_ids"] = batch.input_ids
            if batch.token_type_ids is not None:
                arguments["token_type_ids"] = batch.token_type_ids
        else:
            arguments["inputs_embeds"] = hidden_TD.unsqueeze(0)
        return self._base(**arguments).last_hidden_state[0]

    # --------------------------------------------------------------- cutting

    @property
    def _base(self) -> Any:
        return self.model.backbone.base_model

    def _drop_others(self) -> None:
        """Replace what belongs to other processes, and forget their adapters."""
        base, backbone, parts = self._base, self.model.backbone, self._parts
        own = {index for place in self.places for index in self.layout.layers_of(place)}
        layers = base.get_submodule(parts.layers)
        for index in range(len(layers)):
            if index not in own:
                layers[index] = PassThrough()
        if 0 not in self.places:
            for name in parts.embeddings:
                setattr(base, name, PassThrough())
        if not self.has_head:
            setattr(base, parts.norm, PassThrough())
            for name in _HEADS:
                if isinstance(getattr(backbone, name, None), nn.Module):
                    setattr(backbone, name, PassThrough())
        self._module_names = {module: name for name, module in backbone.named_modules()}
        self._forget_parameters()

    def _forget_parameters(self) -> None:
        """Keep of every task what lies here, in buffers that hold no more than that."""
        model = self.model
        held = {id(parameter) for parameter in model.parameters()}
        for name in model.tasks:
            own = {key: item for key, item in model.task_parameters(name).items() if id(item) in held}
            model._task_parameters[name] = own
            model._slabs[name] = TaskSlab(own, model.device)
        model._module_names = self._module_names
        model.stream.groups.clear()

    def _modules_of(self, place: int) -> dict[str, nn.Module]:
        """Return what the base model shall consist of during a pass through a place."""
        base, parts = self._base, self._parts
        own, layers = self.layout.layers_of(place), base.get_submodule(parts.layers)
        modules: dict[str, nn.Module] = {
            parts.layers: nn.ModuleList(
                [layer if index in own else PassThrough() for index, layer in enumerate(layers)]
            )
        }
        if place > 0:
            modules |= {name: PassThrough() for name in parts.embeddings}
            if parts.positions is not None:
                modules[parts.positions] = NoPositions(self._dtype)
        if place < self.layout.last_place:
            modules[parts.norm] = PassThrough()
        return modules

    @contextmanager
    def _at(self, place: int) -> Iterator[None]:
        """Let the base model consist of one place for the time of the `with` block."""
        base = self._base
        before = {name: base._modules[name] for name in self._modules_at[place]}
        base._modules.update(self._modules_at[place])
        try:
            yield
        finally:
            base._modules.update(before)
