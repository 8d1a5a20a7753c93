"""Log-probabilities of the targets of a stream under the output head, for all tasks at once.

Shape letters: T tokens, M rows that have a target, D hidden features.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.cross_entropy.linear import Head, block_rows, linear_cross_entropy
from peft_mux.kernels.cross_entropy.vocab_parallel import VocabParallelCrossEntropy, vocab_parallel_linear_cross_entropy
from peft_mux.modeling.attention.shared_rows import states_of
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.sharding.gathering import free_after_backward, gather_before_backward, gathered
from peft_mux.modeling.sharding.sums import copy_to_tp_region
from peft_mux.modeling.sharding.vocabulary import vocab_parallel_head
from peft_mux.modeling.stream import Stream


def output_head(backbone: Any) -> tuple[Any, float, float | None]:
    """Return the output module of a causal language model, and the scale and soft-cap of its logits.

    Raises:
        UnsupportedModelError: if the model has no output head.
    """
    module = backbone.get_output_embeddings()
    if module is None:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} has no output embeddings; allowed: language models (AutoModelForCausalLM) "
            "and classifiers (AutoModelForSequenceClassification)."
        )
    config = backbone.config
    # Cohere multiplies its logits, Granite divides them, and Gemma 2 caps them, all outside the output module.
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return module, scale, getattr(config, "final_logit_softcapping", None)


def token_losses(
    hidden_TD: torch.Tensor, backbone: Any, batch: MuxBatch, stream: Stream, adapters: Mapping[str, str]
) -> torch.Tensor:
    """Return the negative log-likelihood of every target of a micro-batch, sorted by task.

    Args:
        hidden_TD: the last hidden states `[T, D]`, or `[U, D]` of computed rows where tokens are shared.
        backbone: the causal language model.
        batch: micro-batch that the hidden states are of.
        stream: the stream of the adapted layers, which holds `batch` as the micro-batch in flight.
        adapters: internal adapter id of each task name.

    Returns:
        Negative log-likelihoods `[M]` of the M targets, in nats.
    """
    # Rows without a target, such as those of a prompt, never meet the output head: its logits are the widest tensor.
    hidden_MD = states_of(hidden_TD, batch, batch.target_rows)
    targets_M = batch.labels[0].index_select(0, batch.target_rows)
    module, scale, softcap = output_head(backbone)
    # The backward pass makes these logits again, so it needs the head's weights once more.
    if _is_adapted(module):
        hidden_MD = free_after_backward(hidden_MD, module)
        with gathered(module):
            losses_M = _adapted_losses(hidden_MD, targets_M, module, batch, stream, adapters, (scale, softcap))
        return gather_before_backward(losses_M, module)
    with gathered(module):
        weight, bias = frozen_weight(module)
        if weight is not None:
            head, words = Head(weight, bias, scale, softcap), vocab_parallel_head(module)
            if words is None:
                return linear_cross_entropy(hidden_MD, head, targets_M)
            return vocab_parallel_linear_cross_entropy(
                hidden_MD, head, targets_M, first=words.first, vocab_size=words.vocab_size, links=words.links
            )
    raise UnsupportedModelError(
        f"the output head of {type(backbone).__name__} is a {type(module).__name__}; allowed: a linear layer."
    )


def _is_adapted(module: Any) -> bool:
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _adapted_losses(
    hidden_MD: torch.Tensor,
    targets_M: torch.Tensor,
    module: Any,
    batch: MuxBatch,
    stream: Stream,
    adapters: Mapping[str, str],
    transform: tuple[float, float | None],
) -> torch.Tensor:
    """Return the losses `[M]` where some task adapts the head: logits are made in blocks, and again in the backward."""
    scale, softcap = transform
    places_M = batch.token_places.index_select(0, batch.target_rows)
    words = vocab_parallel_head(module)
    # Rounded up, as parts may differ by a word and all shards must cut the same blocks.
    frozen = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else module.base_layer
    num_words = frozen.weight.shape[0] if words is None else -(-words.vocab_size // words.links.size)
    size = block_rows(num_words, hidden_MD.device.type)
    hidden_MD = hidden_MD if words is None else copy_to_tp_region(hidden_MD, words.links)

    def block(hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        offsets = tuple(min(max(offset - start, 0), end - start) for offset in batch.target_offsets)
        alone = nullcontext() if words is None else words.local()
        # Read anew: where a block is computed again, in the backward pass, the stream is idle or reads another batch.
        with stream.reading(batch, adapters), stream.selected_rows(offsets, places_M[start:end], adapters), alone:
            logits = module(hidden).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if words is not None:
            return VocabParallelCrossEntropy.apply(logits, targets_M[start:end], words.first, words.links)
        return F.cross_entropy(logits, targets_M[start:end], reduction="none")

    parts = []
    for start in range(0, len(hidden_MD), size):
        end = min(start + size, len(hidden_MD))
        # Recomputed block by block, so that the logits of one block alone are ever held; draws need no state.
        parts.append(checkpoint(block, hidden_MD[start:end], start, end, use_reentrant=False, preserve_rng_state=False))
    # An empty sum keeps the graph where no row has a target.
    return torch.cat(parts) if parts else hidden_MD.sum(dim=1)
