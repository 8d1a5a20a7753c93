"""Penalties on the adapters themselves: added to a task's loss once a step, however its global batch was split.

A penalty belongs to the step and to no token. So the pass that holds the first token of a task's global batch carries
all of it: there is exactly one such pass over all micro-batches and all processes, and what it adds does not depend on
how many there are (promise 1 of the design).

Shape letters: N tasks.
"""

# MERGED: `PackedForward`: packed batches through a model and the adapters of all its tasks, up to losses or logits.
# MERGED: A pass binds the gradients of its tasks (`prepare`), lets the attached layers and attention read its batch
# MERGED: (`multiplexing`), and goes through the backbone (`hidden_states`); what the head makes of that follows.
# MERGED: Shape letters: T tokens, U tokens that are computed, N tasks, M targets, D hidden features, V vocabulary, L
# MERGED: tokens of a
# MERGED: sequence, C classes.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.packed import ATTENTION_NAME
from peft_mux.modeling.attention.rows import KeyValueRows, ReadRows
from peft_mux.modeling.backbone.modules import without_head
from peft_mux.modeling.backbone.probe import position_offset
from peft_mux.modeling.interface import MultiplexedModel
from peft_mux.modeling.last_layer import LastLayer
from peft_mux.modeling.objectives.objective import HeadPass, Statistics, TokenOutputs
from peft_mux.modeling.objectives.task_objective import StreamLosses, TaskObjectives
from peft_mux.modeling.registry import TaskRegistry
from peft_mux.modeling.stream import Passes


def with_penalties(
    losses_N: torch.Tensor, batch: MuxBatch, registry: TaskRegistry, configs: Mapping[str, Any]
) -> torch.Tensor:
    """Return the losses `[N]` of a micro-batch with the penalties of its tasks' adapters.

    Args:
        losses_N: each task's part of its mean loss.
        batch: the micro-batch, its tensors on the device of the losses.
        registry: the tasks of the model.
        configs: adapter configurations by internal id.
    """
    if not registry.penalised:
        return losses_N
    losses = None
    for index, name in enumerate(batch.task_names):
        if (kind := registry.penalised.get(name)) is None:
            continue
        share = _share_of_step(batch, index)
        if share.is_cpu and not share:  # on other devices asking would be waiting
            continue
        losses = losses or list(losses_N.unbind())
        penalty = kind.penalty(configs[registry.adapter_of(name)], registry.parameters_of(name))
        losses[index] = losses[index] + penalty * share
    return losses_N if losses is None else torch.stack(losses)


def _share_of_step(batch: MuxBatch, index: int) -> torch.Tensor:
    """Return 1 in the pass that holds the first token of a task's global batch, 0 in all others."""
    places = batch.token_places[batch.task_offsets[index] : batch.task_offsets[index + 1]]
    return (places == 0).sum()


@dataclass(frozen=True, slots=True)
class MuxOutput:
    """What a multiplexed forward pass returns.

    Attributes:
        losses: `[N]`, each task's part of its mean loss; their sum may be differentiated.
        task_names: the N tasks, in the order of `losses`.
        statistics: for each of them what is logged beside its loss, `[K]` without gradient; `None` where nothing is.
    """

    losses: torch.Tensor
    task_names: tuple[str, ...]
    statistics: Statistics = ()

    def detached(self) -> MuxOutput:
        """Return it without the graph, which callers must not keep beyond the backward."""
        return replace(self, losses=self.losses.detach())


class PackedModel(MultiplexedModel, Protocol):
    """A model with what it takes to make losses of a packed batch.

    Attributes:
        registry: the tasks that the model holds, and their parameters.
        last_layer: whether the last layer computes the rows alone whose outputs are read.
        objectives: which loss each task is trained towards, and the head that they all read.
    """

    registry: TaskRegistry
    last_layer: LastLayer
    objectives: TaskObjectives


class PackedForward:
    """Runs packed batches through a model and the adapters of all of its tasks.

    Args:
        model: the model, on its device.
    """

    def __init__(self, model: PackedModel) -> None:
        """Run nothing yet."""
        self._model = model

    # ------------------------------------------------------------ whole passes

    def losses(self, batch: MuxBatch) -> MuxOutput:
        """Return the losses of a batch, which may be differentiated.

        Args:
            batch: the packed stream, on the model's device.
        """
        self.prepare(batch.task_names)
        with self.multiplexing(batch):
            found = self.losses_of(self._states_that_are_read(batch), batch)
        return MuxOutput(found.losses_N, batch.task_names, found.statistics)

    def token_outputs(self, batch: MuxBatch) -> list[TokenOutputs]:
        """Return what the head makes of every target of each task, which may be differentiated.

        Args:
            batch: the packed stream, on the model's device.
        """
        self.prepare(batch.task_names)
        with self.multiplexing(batch):
            hidden_TD = self._states_that_are_read(batch)
            found = self._model.objectives.head.outputs(hidden_TD, batch, self._head_pass())
        return [outputs for outputs in found if isinstance(outputs, TokenOutputs)]

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
            if attention is not None:
                return self.terms_of(self.hidden_states(batch, attention), batch)
            return self.terms_of(self._states_that_are_read(batch), batch)

    @torch.no_grad()
    def sequence_logits(self, batch: MuxBatch) -> list[torch.Tensor]:
        """Return the logits of every sequence: `[L, V]` for language models, `[C]` for classifiers.

        Args:
            batch: the packed stream, on the model's device.
        """
        self.prepare(batch.task_names)
        with self.multiplexing(batch):
            return self.logits_of(self.hidden_states(batch), batch)

    # --------------------------------------------------------- parts of a pass

    @torch.compiler.disable()
    def prepare(self, tasks: Iterable[str]) -> None:
        """Bind the gradients of a pass, and let kernels in another dtype see the weights as they are now.

        Args:
            tasks: names of the tasks that take part in the pass.
        """
        for name in tasks:
            slab = self._model.registry.slab_of(name)
            # Before the forward pass: tables of the kernels hold the addresses to which the backward pass will add.
            if torch.is_grad_enabled():
                slab.bind_gradients()
            slab.refresh_copies()

    @contextmanager
    def multiplexing(
        self, batch: MuxBatch, passes: Passes | None = None, unmet: frozenset[str] = frozenset()
    ) -> Iterator[None]:
        """Let the attached layers and attention read a batch for the time of the `with` block.

        Args:
            batch: the micro-batch, its tensors on the model's device.
            passes: passes that were made of the same batch before; `None` to make them.
            unmet: adapters that the pass had not come to when what is recomputed now was first computed.
        """
        model = self._model
        model.noise.watch(model.backbone)
        config = model.backbone.config
        attention = config._attn_implementation
        # Only while a stream is read: `generate` and plain forwards keep the attention that the backbone came with.
        if attention != ATTENTION_NAME:
            config._attn_implementation = ATTENTION_NAME
        try:
            with model.stream.reading(batch, model.adapters, passes, unmet):
                yield
        finally:
            if attention != ATTENTION_NAME:
                config._attn_implementation = attention

    def hidden_states(
        self,
        batch: MuxBatch,
        attention: AttentionStream | None = None,
        *,
        rows: KeyValueRows | None = None,
        read: ReadRows | None = None,
    ) -> torch.Tensor:
        """Return the `[T, D]` last hidden states of a batch that is multiplexed, `[U, D]` where tokens are shared.

        Args:
            batch: the micro-batch, on the model's device.
            attention: the layouts of its sequences; made by default.
            rows: keys and values of rows that are being completed, of which the batch is prompts or newest tokens.
            read: the rows that will be read (`last_layer`), where the last layer need compute no others; what others
                hold has no meaning then. `None` for all. Nothing is read where `attention` is given.
        """
        model = self._model
        # Given and not left to the model, which would count on through the whole stream.
        position_ids = batch.computed(batch.position_ids) + position_offset(model.backbone)
        arguments: dict[str, Any] = {"input_ids": batch.computed(batch.input_ids), "position_ids": position_ids}
        prefixes = None
        # Once for the whole pass: where activations are recomputed, they read the same prompts.
        if (prompts := model.prompt_pass(batch)) is not None:
            assert attention is None, "passes with prompts are not captured"
            prefixes = prompts.prefixes
            if prompts.position_shift is not None:
                arguments["position_ids"] = position_ids + batch.computed(prompts.position_shift)
            if prompts.rows is not None:
                words_1TD = model.backbone.get_input_embeddings()(arguments.pop("input_ids"))
                # Tasks with virtual tokens share none, so each of them has a row of its own.
                arguments["inputs_embeds"] = prompts.embedded(words_1TD, batch.rows_of(prompts.rows))
        attention = attention or AttentionStream(model.stream, batch, model.module_names, prefixes, rows, read)
        arguments["mux_stream"] = attention
        if batch.token_type_ids is not None:
            arguments["token_type_ids"] = batch.computed(batch.token_type_ids)
        # A decoder would fill a cache of keys and values that nothing reads; encoders do not know the argument.
        if hasattr(model.backbone.config.get_text_config(), "use_cache"):
            arguments["use_cache"] = False
        model.stream.begin_at_the_bottom()
        with model.objectives.head.bypassed(model.backbone):
            return without_head(model.backbone)(**arguments).last_hidden_state[0]

    def losses_of(self, hidden_TD: torch.Tensor, batch: MuxBatch) -> StreamLosses:
        """Return the losses from the `[T, D]` last hidden states, while the stream is read.

        In training, penalties of adapters are in them (`peft_mux.modeling.packed_forward`).
        """
        model = self._model
        found = model.objectives.losses(hidden_TD, batch, self._head_pass())
        if not model.training:
            return found
        return found._replace(losses_N=with_penalties(found.losses_N, batch, model.registry, model.peft_config))

    def terms_of(self, hidden_TD: torch.Tensor, batch: MuxBatch) -> torch.Tensor:
        """Return the negative log-likelihoods `[M]` from the last hidden states, while the stream is read."""
        return self._model.objectives.head.terms(hidden_TD, batch, self._head_pass())

    def logits_of(self, hidden_TD: torch.Tensor, batch: MuxBatch) -> list[torch.Tensor]:
        """Return the logits of every sequence from the `[T, D]` last hidden states, while the stream is read."""
        return self._model.objectives.head.logits(hidden_TD, batch, self._head_pass())

    def _states_that_are_read(self, batch: MuxBatch) -> torch.Tensor:
        return self.hidden_states(batch, read=self._model.last_layer.rows(self._model, batch))

    def _head_pass(self) -> HeadPass:
        return HeadPass(self._model.backbone, self._model.stream, self._model.adapters)
