"""What a multiplexed pass through a model is made of: its gradients bound, its batch read, its activations recomputed.

Shape letters: T tokens, N tasks, D hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import ConfigError
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.packed import ATTENTION_NAME
from peft_mux.modeling.attention.read_rows import ReadRows
from peft_mux.modeling.attention.rows import KeyValueRows
from peft_mux.modeling.backbone.checks import position_offset
from peft_mux.modeling.backbone.modules import without_head
from peft_mux.modeling.interface import MultiplexedModel
from peft_mux.modeling.objectives.head import OutputHead
from peft_mux.modeling.objectives.objective import Statistics
from peft_mux.modeling.stream import Passes


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


def bind(model: MultiplexedModel, tasks: Iterable[str]) -> None:
    """Bind the gradients of a pass, and let kernels in another dtype see the weights as they are now.

    Args:
        model: the model that holds the tasks.
        tasks: names of the tasks that take part in the pass.
    """
    for name in tasks:
        slab = model.task_slab(name)
        # Before the forward pass: tables of the kernels hold the addresses to which the backward pass will add.
        if torch.is_grad_enabled():
            slab.bind_gradients()
        slab.refresh_copies()


@contextmanager
def multiplexing(
    model: MultiplexedModel, batch: MuxBatch, passes: Passes | None, unmet: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Let the attached layers and attention of a model read `batch` for the time of the `with` block.

    Args:
        model: the model whose stream is set.
        batch: the micro-batch, its tensors on the model's device.
        passes: passes that were made of the same batch before; `None` to make them.
        unmet: adapters that the pass had not come to when what is recomputed now was first computed.
    """
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
    model: MultiplexedModel,
    head: OutputHead,
    batch: MuxBatch,
    attention: AttentionStream | None,
    rows: KeyValueRows | None = None,
    read: ReadRows | None = None,
) -> torch.Tensor:
    """Return the `[T, D]` last hidden states of a batch that is multiplexed, `[U, D]` where tokens are shared.

    Args:
        model: the model whose stream reads the batch.
        head: what the backbone ends in; no part of it is computed.
        batch: the micro-batch, on the model's device.
        attention: the layouts of its sequences; made where `None`.
        rows: keys and values of rows that are being completed, of which the batch is prompts or newest tokens.
        read: the rows that will be read, where the last layer need compute no others; `None` for all. Nothing is read
            where `attention` is given.
    """
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
    with head.bypassed(model.backbone):
        return without_head(model.backbone)(**arguments).last_hidden_state[0]


def enable_checkpointing(backbone: Any, contexts: Callable[[], tuple[Any, Any]], arguments: Mapping[str, Any]) -> None:
    """Let each layer of a backbone recompute its activations in the backward pass.

    Args:
        backbone: the transformers model, adapters injected.
        contexts: returns the contexts of a layer's forward and of its recomputation.
        arguments: further arguments of `torch.utils.checkpoint.checkpoint`.

    Raises:
        ConfigError: if reentrant checkpointing is asked for.
    """
    wanted = dict(arguments)
    if wanted.pop("use_reentrant", False):
        raise ConfigError("use_reentrant: got True; allowed: False, as adapters sit inside the checkpointed layers.")
    # Dropout draws from seed and place, so no state of a generator has to be kept to draw the same again.
    wanted = {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False, **wanted}
    # Older releases of transformers have the second name alone.
    enable = getattr(backbone, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=wanted)
    else:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=wanted)


def checkpoint_contexts(model: MultiplexedModel) -> tuple[Any, Any]:
    """Return the contexts of a checkpointed layer: none in its forward, the same batch again where it is recomputed."""
    batch = model.stream.batch
    if batch is None:
        return nullcontext(), nullcontext()
    # The backward pass may run when the stream reads another batch, or none; the passes are those of the forward, and
    # so is how deep the gradients of each task's rows go.
    return nullcontext(), multiplexing(model, batch, model.stream.passes, model.stream.unmet)
