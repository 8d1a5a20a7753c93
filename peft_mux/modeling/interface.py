"""NEFTune: noise on the embeddings of a task's tokens in training (Jain et al., 2023), as Trainer adds it.

A token of a row of L tokens gets `alpha / sqrt(L * D)` times draws that are uniform in (-1, 1). L is the row's own
length, as in the paper; transformers takes that of the padded batch, which depends on the rows beside it. A draw
follows from the task's seed and step, the token's place in its global batch and the column (`peft_mux.kernels.philox`),
so that neither neighbours nor micro-batches nor the number of processes change it.

Shape letters: T tokens, U computed rows, D hidden features.
"""

# MERGED: `MultiplexedModel`: what the parts of a multi-task model, and those who probe, view, save and run it, read
# MERGED: of it.
# MERGED: Activations that are recomputed in the backward pass, from the micro-batch that they came from.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import ConfigError
from peft_mux.kernels import philox
from peft_mux.modeling.attention.attention_stream import AttentionStream, PromptPass
from peft_mux.modeling.attention.rows import ReadRows
from peft_mux.modeling.stream import Passes, Stream

DRAWS = "neftune"
"""Name that these draws have beside those of modules."""


class EmbeddingNoise:
    """The noise of all tasks of a model.

    Args:
        stream: what tells whose rows a pass reads.
    """

    def __init__(self, stream: Stream) -> None:
        """Add none yet."""
        self._stream = stream
        self._alphas: dict[str, float] = {}
        self._hook: tuple[nn.Module, Any] | None = None

    @property
    def is_on(self) -> bool:
        """Whether any task has noise."""
        return bool(self._alphas)

    def assign(self, adapter: str, alpha: float) -> None:
        """Give a task noise of a strength, none where it is 0; tasks are told apart by their internal adapter ids."""
        self.forget(adapter)
        if alpha:
            self._alphas[adapter] = alpha

    def forget(self, adapter: str) -> None:
        """Take a task's noise away."""
        self._alphas.pop(adapter, None)

    def watch(self, backbone: Any) -> None:
        """Hook onto the embedding of a backbone, adapters included, where some task has noise."""
        if not self.is_on:
            return
        embedding = backbone.get_input_embeddings()
        # Looked up at every pass: an adapter of another task may have been put around it since. The hook stays, as
        # passes that take turns go through it in each other's midst.
        if self._hook is None or self._hook[0] is not embedding:
            if self._hook is not None:
                self._hook[1].remove()
            self._hook = embedding, embedding.register_forward_hook(self._add)

    def _add(self, embedding: nn.Module, inputs: Any, output_1UD: torch.Tensor) -> torch.Tensor:
        """Add the noise of each task that has some to its own rows."""
        stream, batch = self._stream, self._stream.batch
        wanted = {segment.adapter for segment in stream.segments} & self._alphas.keys()
        if batch is None or not embedding.training or not wanted:
            return output_1UD
        lengths = batch.computed(row_lengths(batch).to(output_1UD.device))
        segments, width = stream.segments, output_1UD.shape[-1]
        parts = list(output_1UD.split([segment.end - segment.start for segment in segments], dim=-2))
        # By slices: neither draws nor a NaN of one task reach another.
        for index, own in enumerate(segments):
            if own.adapter in wanted:
                rows = slice(own.start, own.end)
                scales = self._alphas[own.adapter] / torch.sqrt(lengths[rows].float() * width)
                draws = philox.uniform_rows(own.draw_seed(DRAWS), stream.places[rows], width)
                noise = (2.0 * draws - 1.0) * scales[:, None]
                parts[index] = parts[index] + noise.to(output_1UD.dtype)
        return torch.cat(parts, dim=-2)


def row_lengths(batch: MuxBatch) -> torch.Tensor:
    """Return for each token of a stream the number of tokens of its sequence, virtual ones aside, int64 `[T]`."""
    lengths = [part.num_tokens for part in batch.parts] if batch.parts else list(batch.sequence_lengths)
    for (start, end), virtual in zip(pairwise(batch.sequence_offsets), batch.virtual_tokens, strict=False):
        lengths[start:end] = [length - virtual for length in lengths[start:end]]
    return torch.tensor(lengths).repeat_interleave(torch.tensor(batch.sequence_lengths))


class PackedPasses(Protocol):
    """Passes of packed batches, as `peft_mux.modeling.packed_forward.PackedForward` makes them."""

    def prepare(self, tasks: Iterable[str]) -> None:
        """Bind the gradients of a pass, and let kernels in another dtype see the weights as they are now."""
        ...

    def multiplexing(
        self, batch: MuxBatch, passes: Passes | None = None, unmet: frozenset[str] = frozenset()
    ) -> AbstractContextManager[None]:
        """Let the attached layers and attention read `batch` for the time of the `with` block."""
        ...

    def hidden_states(
        self, batch: MuxBatch, attention: AttentionStream | None = None, *, read: ReadRows | None = None
    ) -> torch.Tensor:
        """Return the `[T, D]` last hidden states of a batch that is multiplexed."""
        ...

    def sequence_logits(self, batch: MuxBatch) -> list[torch.Tensor]:
        """Return the logits of every sequence: `[L, V]` for language models, `[C]` for classifiers."""
        ...


class MultiplexedModel(Protocol):
    """A backbone with the adapters of many tasks, as `peft_mux.modeling.model.MultiTaskPeftModel` is one.

    Attributes:
        base_model: PEFT's tuner, whose `model` is the backbone.
        active_adapter: internal id of the adapter that plain forwards use.
        peft_config: completed configuration of each adapter, by its internal id.
        stream: what the attached layers read of the micro-batch in flight.
        noise: which tasks have noise on their embeddings in training.
        objectives: which loss each task is trained towards, and the head that they all read.
        module_names: name of each module within the backbone.
        num_stages: into which the backbone was cut; this model is one of them.
        tp_size: tensor parallel ranks among which each stage is cut; this model is what one of them holds.
        training: whether dropout is on.
    """

    base_model: Any
    active_adapter: Any
    peft_config: Any
    stream: Stream
    noise: EmbeddingNoise
    objectives: Any
    module_names: dict[nn.Module, str]
    num_stages: int
    tp_size: int
    training: bool

    @property
    def backbone(self) -> Any:
        """The transformers model under the adapters."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    # ------------------------------------------------------------------ tasks

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order in which they came."""
        ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Internal adapter id of each task."""
        ...

    def adapter_of(self, name: str) -> str:
        """Return the internal adapter id under which PEFT knows a task."""
        ...

    def task_parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return a task's own parameters, by their PEFT names without the adapter id."""
        ...

    def adopt_parameters(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let parameters be those of a task, and lay them out in flat buffers of their own."""
        ...

    def mark_trainable(self) -> None:
        """Let every task train: PEFT keeps gradients for the active adapter only."""
        ...

    def select_adapter(self, adapter: str) -> None:
        """Make an adapter the one that plain forwards use."""
        ...

    def alone(self, adapter: str) -> AbstractContextManager[None]:
        """Let the model be what PEFT made of it for the adapter's PEFT type, for the time of the `with` block."""
        ...

    def merge_and_unload_adapter(self, adapter: str) -> Any:
        """Return the backbone with one adapter merged in; all adapters are gone afterwards."""
        ...

    def without_prompts(self) -> AbstractContextManager[None]:
        """Leave learnt prompts out of the passes in the `with` block."""
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Switch all adapters off for the time of the `with` block."""
        ...

    # ------------------------------------------------------------------ passes

    @property
    def packed(self) -> PackedPasses:
        """Passes of packed batches, and the parts of which these are made."""
        ...

    def prompt_pass(self, batch: MuxBatch) -> PromptPass | None:
        """Return what learnt prompts bring into a pass; `None` where no task of it has one."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Switch dropout on or off."""
        ...

    def eval(self) -> Any:
        """Switch dropout off."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters with their names."""
        ...


def enable_checkpointing(model: MultiplexedModel, arguments: Mapping[str, Any]) -> None:
    """Let each layer of a model's backbone recompute its activations in the backward pass.

    Args:
        model: the model, adapters injected.
        arguments: further arguments of `torch.utils.checkpoint.checkpoint`.

    Raises:
        ConfigError: if reentrant checkpointing is asked for.
    """
    wanted = dict(arguments)
    if wanted.pop("use_reentrant", False):
        raise ConfigError("use_reentrant: got True; allowed: False, as adapters sit inside the checkpointed layers.")
    contexts, backbone = partial(_contexts, model), model.backbone
    # Dropout draws from seed and place, so no state of a generator has to be kept to draw the same again.
    wanted = {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False, **wanted}
    # Older releases of transformers have the second name alone.
    enable = getattr(backbone, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=wanted)
    else:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=wanted)


def _contexts(model: MultiplexedModel) -> tuple[Any, Any]:
    """Return the contexts of a checkpointed layer: none in its forward, the same batch again where it is recomputed."""
    batch = model.stream.batch
    if batch is None:
        return nullcontext(), nullcontext()
    # The backward pass may run when the stream reads another batch, or none; the passes are those of the forward, and
    # so is how deep the gradients of each task's rows go.
    return nullcontext(), model.packed.multiplexing(batch, model.stream.passes, model.stream.unmet)
