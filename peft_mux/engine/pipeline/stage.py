"""`StageModel`: one stage of a multi-task model, run by the model code that transformers wrote.

Nothing of a decoder's forward is written anew. The base model keeps its class, its rotary embeddings, its masks and
the numbers of its layers (so names, dropout draws and kinds of attention stay); what belongs to another process is
replaced by modules that hand their input on, and hidden states come in and go out between layers::

    virtual stage 0     embed  layer layer  exit  pass   pass
    virtual stage 1     pass   enter pass   layer layer  norm  -> head, losses

Where one process has several virtual stages, the modules of the others are replaced for the time of a pass.

Shape letters: T tokens of a micro-batch, D hidden features, N tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.pipeline.stage_layout import StageLayout
from peft_mux.kernels.lora.slices import Rows
from peft_mux.modeling.adapters.lora.depth import lowest_layer, rows_needed
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.read_rows import ReadRows
from peft_mux.modeling.backbone.families import family_of
from peft_mux.modeling.backbone.modules import HEAD_NAMES, put_module
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import Statistics
from peft_mux.modeling.sharding.pass_through import Entrance, Exit, Handover, NoPositions, PassThrough
from peft_mux.modeling.stream import Passes


class StagePass(NamedTuple):
    """What one forward of a micro-batch through a virtual stage gave.

    Attributes:
        output: `[T, D]` hidden states; of the last virtual stage the `[N]` losses.
        passes: rows bound to adapters, by kind of adapters; kept until the backward, as compiled ones look them up.
        statistics: of the last virtual stage, what is logged beside each loss.
    """

    output: torch.Tensor
    passes: Passes
    statistics: Statistics = ()


class StageModel:
    """The layers and adapters of one stage, cut out of a whole model, which is used up.

    A task without adapters on these layers keeps its name here, and no parameters.

    Args:
        model: the whole model; what belongs to other stages is dropped from it.
        layout: which decoder layers lie in which stage.
        stage: number of the stage that this process holds.

    Attributes:
        model: the model with the layers of this stage alone.
        layout: which decoder layers lie in which stage.
        stage: number of the stage that this process holds.
        virtual_stages: numbers of the virtual stages of this process, in order.

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
        self._family = family_of(model.backbone)
        self._dtype = model.backbone.dtype
        self._handover = Handover()
        self.virtual_stages = layout.virtual_stages_of(stage)
        layers = self._base.get_submodule(self._family.layers)
        if len(layers) != layout.num_layers or not 0 <= stage < layout.num_stages:
            raise ValueError(
                f"stage {stage} of {layout.num_stages} with {layout.num_layers} layers; allowed: a stage of a layout of"
                f" {len(layers)} layers, as {type(model.backbone).__name__} has. Make it with StageLayout.of."
            )
        # Of the whole model, while there is one.
        for name in model.tasks:
            model.stream.lowest_layers[model.adapter_of(name)] = lowest_layer(model.task_parameters(name))
        self._drop_others()
        model.num_stages = layout.num_stages
        self._modules_at = {virtual_stage: self._modules_of(virtual_stage) for virtual_stage in self.virtual_stages}

    @property
    def has_head(self) -> bool:
        """Whether this process computes the losses."""
        return self.layout.last_virtual_stage in self.virtual_stages

    @property
    def hidden_size(self) -> int:
        """D, width of the hidden states."""
        return int(self.model.backbone.config.get_text_config().hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states between virtual stages: that of the residual stream."""
        return self._dtype

    def gradient_rows(self, virtual_stage: int, batch: MuxBatch) -> tuple[Rows, ...] | None:
        """Return the rows of a virtual stage's input whose gradients the stages before it need; `None` for all.

        They are those of tasks that have adapters further down. Every process says the same of a micro-batch.

        Args:
            virtual_stage: number of a virtual stage behind the first, of this process or of another one.
            batch: the micro-batch.
        """
        stream = self.model.stream
        segments = stream.segments_of(batch, batch.computed_offsets, self.model.adapters)
        return rows_needed(segments, stream.adapters_above(self.layout.layers_of(virtual_stage).start, segments))

    def prepare(self, tasks: Sequence[str]) -> None:
        """Bind gradients, and let kernels in another dtype see the weights as they are now; once before a step.

        Args:
            tasks: names of the tasks that take part in the step.
        """
        self.model.packed.prepare(tasks)

    def forward(self, virtual_stage: int, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> StagePass:
        """Run a micro-batch through one virtual stage.

        Args:
            virtual_stage: number of one of this process's virtual stages.
            batch: the micro-batch, its tensors on the device.
            hidden_TD: `[T, D]` output of the virtual stage before; `None` at virtual stage 0.

        Raises:
            ValueError: if hidden states are missing behind the first virtual stage.
        """
        if (hidden_TD is None) != (virtual_stage == 0):
            got = None if hidden_TD is None else list(hidden_TD.shape)
            raise ValueError(
                f"hidden_TD is {got} at place {virtual_stage}; allowed: None at place 0, [T, D] at all others."
            )
        model = self.model
        with model.packed.multiplexing(batch), self.only(virtual_stage):
            is_last = virtual_stage == self.layout.last_virtual_stage
            model.stream.begin_above(self.layout.layers_of(virtual_stage).start)
            output = self._hidden_states(batch, hidden_TD, model.last_layer.rows(model, batch) if is_last else None)
            if not is_last:
                return StagePass(output, model.stream.passes)
            losses = self.model.packed.losses_of(output, batch)
            return StagePass(losses.losses_N, model.stream.passes, losses.statistics)

    @torch.no_grad()
    def target_losses(self, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Run a micro-batch through the last virtual stage; return as `PackedForward.target_losses` does.

        Args:
            batch: the micro-batch, its tensors on the device.
            hidden_TD: `[T, D]` output of the virtual stage before; `None` where there is none.
        """
        with self.model.packed.multiplexing(batch), self.only(self.layout.last_virtual_stage):
            read = self.model.last_layer.rows(self.model, batch)
            return self.model.packed.terms_of(self._hidden_states(batch, hidden_TD, read), batch)

    @torch.no_grad()
    def sequence_logits(self, batch: MuxBatch, hidden_TD: torch.Tensor | None) -> list[torch.Tensor]:
        """Run a micro-batch through the last virtual stage; return as `PackedForward.sequence_logits` does.

        Args:
            batch: the micro-batch, its tensors on the device.
            hidden_TD: `[T, D]` output of the virtual stage before; `None` where there is none.
        """
        model, virtual_stage = self.model, self.layout.last_virtual_stage
        with model.packed.multiplexing(batch), self.only(virtual_stage):
            output_TD = self._hidden_states(batch, hidden_TD)
            return model.packed.logits_of(output_TD, batch)

    def prove_last_layer(self) -> None:
        """Hold the last layer, where it lies here, against itself on some of its rows (`LastLayer`)."""
        if self.has_head:
            self.model.last_layer.prove(self.model, self._states_of_probe)

    def _states_of_probe(self, batch: MuxBatch, read: ReadRows | None) -> torch.Tensor:
        virtual_stage = self.layout.last_virtual_stage
        given = torch.randn(batch.num_tokens, self.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden_TD = given.to(self.model.device, self.dtype) if virtual_stage > 0 else None
        with self.model.packed.multiplexing(batch), self.only(virtual_stage):
            return self._hidden_states(batch, hidden_TD, read)

    def _hidden_states(
        self, batch: MuxBatch, hidden_TD: torch.Tensor | None, read: ReadRows | None = None
    ) -> torch.Tensor:
        """Return the `[T, D]` hidden states that the modules in place now make of a micro-batch."""
        attention = AttentionStream(self.model.stream, batch, self.model.module_names, read=read)
        position_ids = batch.computed(batch.position_ids)
        arguments: dict[str, Any] = {"position_ids": position_ids, "mux_stream": attention, "use_cache": False}
        if hidden_TD is None:
            arguments["input_ids"] = batch.computed(batch.input_ids)
            if batch.token_type_ids is not None:
                arguments["token_type_ids"] = batch.computed(batch.token_type_ids)
        else:
            # For its shape and dtype alone: what the model makes of it ends where the entrance stands.
            arguments["inputs_embeds"] = hidden_TD.detach().unsqueeze(0)
        with self._handover.of_pass(None if hidden_TD is None else hidden_TD.unsqueeze(0)):
            output = self._base(**arguments).last_hidden_state
            given = self._handover.given
            return (output if given is None else given)[0]

    # --------------------------------------------------------------- cutting

    @property
    def _base(self) -> Any:
        return self.model.backbone.base_model

    def _drop_others(self) -> None:
        """Replace the modules of other stages, and drop the adapters on them."""
        base, backbone, family = self._base, self.model.backbone, self._family
        own = {index for virtual_stage in self.virtual_stages for index in self.layout.layers_of(virtual_stage)}
        layers = base.get_submodule(family.layers)
        for index, layer in enumerate(layers):
            if index not in own:
                # In place of dropping it: the others keep their numbers, on which names and dropout draws depend.
                layers[index] = PassThrough(layer)
        dropped = [] if 0 in self.virtual_stages else self._held(family.embeddings)
        for name in dropped if self.has_head else [*dropped, *self._held(family.after)]:
            put_module(base, name, PassThrough())
        if not self.has_head:
            head = backbone.get_output_embeddings()
            for name, module in list(backbone.named_children()):
                if name in HEAD_NAMES or module is head:
                    setattr(backbone, name, PassThrough())
        self._keep_own_parameters()

    def _held(self, names: Sequence[str]) -> list[str]:
        """Return those of the names of modules that the base model has: some have none of a kind."""
        found = {name for name, _ in self._base.named_modules()}
        return [name for name in names if name in found]

    def _keep_own_parameters(self) -> None:
        """Keep of every task the parameters of this stage, in buffers that hold no more than these."""
        model = self.model
        held = {id(parameter) for parameter in model.parameters()}
        for name in model.tasks:
            own = {key: item for key, item in model.task_parameters(name).items() if id(item) in held}
            # Into new buffers: a view of the whole task's page would keep all of it in memory.
            model.adopt_parameters(name, own)
        model.name_modules()
        model.stream.clear_tables()

    def _modules_of(self, virtual_stage: int) -> dict[str, nn.Module]:
        """Return the modules of the base model during a pass through a virtual stage, by name.

        The list of layers keeps its length, as model code reads kinds of attention off a layer's position.
        """
        base, family, last = self._base, self._family, self.layout.last_virtual_stage
        own, layers = self.layout.layers_of(virtual_stage), base.get_submodule(family.layers)
        chosen = [layer if index in own else PassThrough(layer) for index, layer in enumerate(layers)]
        modules: dict[str, nn.Module] = {}
        if virtual_stage > 0:
            chosen[0] = Entrance(self._handover, layers[0])
            modules |= {name: PassThrough() for name in self._held(family.embeddings)}
            # Learned positions are added in virtual stage 0; here the model code would look up some that it lacks.
            if family.positions is not None:
                modules[family.positions] = NoPositions(self._dtype)
        if virtual_stage < last:
            chosen[own.stop] = Exit(self._handover, layers[own.stop])
            modules |= {name: PassThrough() for name in self._held(family.after)}
        return {family.layers: nn.ModuleList(chosen), **modules}

    @contextmanager
    def only(self, virtual_stage: int) -> Iterator[None]:
        """Let the base model consist of one virtual stage for the time of the `with` block.

        Args:
            virtual_stage: number of one of this process's virtual stages.
        """
        places = [self._place(name) for name in self._modules_at[virtual_stage]]
        before = [modules[name] for modules, name in places]
        # Past `setattr`, which would register and check each module anew in every pass.
        for (modules, name), module in zip(places, self._modules_at[virtual_stage].values(), strict=True):
            modules[name] = module
        try:
            yield
        finally:
            for (modules, name), module in zip(places, before, strict=True):
                modules[name] = module

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        """Return where a module of the base model is registered, and under which name."""
        parent, _, leaf = name.rpartition(".")
        return self._base.get_submodule(parent)._modules, leaf
