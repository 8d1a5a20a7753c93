"""`MultiplexedModel`: what the parts of a multi-task model, and those who probe, view, save and run it, read of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.prompt_pass import PromptPass
from peft_mux.modeling.attention.read_rows import ReadRows
from peft_mux.modeling.neftune import EmbeddingNoise
from peft_mux.modeling.stream import Passes, Stream


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
