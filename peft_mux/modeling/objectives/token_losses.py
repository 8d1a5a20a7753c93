"""Log-probabilities of the targets of a stream under the output head, for all tasks at once.

Shape letters: T tokens, M rows that have a target, D hidden features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels.cross_entropy.linear import Head, block_rows, linear_cross_entropy
from peft_mux.kernels.cross_entropy.spreads import linear_spreads, spreads_of_logits
from peft_mux.kernels.cross_entropy.vocab_parallel import (
    Targets,
    VocabParallelCrossEntropy,
    vocab_parallel_linear_cross_entropy,
)
from peft_mux.modeling.attention.shared_rows import states_of
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.sharding.gathering import free_after_backward, gather_before_backward, gathered
from peft_mux.modeling.sharding.sums import copy_to_tp_region, reduce_from_tp_region
from peft_mux.modeling.sharding.vocabulary import VocabParallelHead, vocab_parallel_head
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


class TargetLosses(NamedTuple):
    """What the output head gives for the targets of a micro-batch, sorted by task.

    Attributes:
        nll_M: negative log-likelihoods `[M]` of the M targets, in nats.
        spread_M: their spreads `[M]` (`peft_mux.kernels.cross_entropy.spreads`); 0 for tasks that do not smooth their
            labels, and `None` where no task does.
    """

    nll_M: torch.Tensor
    spread_M: torch.Tensor | None = None


def target_losses(
    hidden_TD: torch.Tensor,
    backbone: Any,
    batch: MuxBatch,
    stream: Stream,
    adapters: Mapping[str, str],
    smoothed: Collection[str] = (),
) -> TargetLosses:
    """Return the negative log-likelihood of every target of a micro-batch, and the spreads of some tasks.

    Args:
        hidden_TD: the last hidden states `[T, D]`, or `[U, D]` of computed rows where tokens are shared.
        backbone: the causal language model.
        batch: micro-batch that the hidden states are of.
        stream: the stream of the adapted layers, which holds `batch` as the micro-batch in flight.
        adapters: internal adapter id of each task name.
        smoothed: tasks that smooth their labels.
    """
    # Rows without a target, such as those of a prompt, never meet the output head: its logits are the widest tensor.
    hidden_MD = states_of(hidden_TD, batch, batch.target_rows)
    targets_M = batch.labels[0].index_select(0, batch.target_rows)
    module, scale, softcap = output_head(backbone)
    wanted = [index for index, name in enumerate(batch.task_names) if name in smoothed]
    # The backward pass makes these logits again, so it needs the head's weights once more.
    if _is_adapted(module):
        hidden_MD = free_after_backward(hidden_MD, module)
        with gathered(module):
            reads = (batch, stream, adapters)
            losses = _adapted_losses(hidden_MD, targets_M, module, reads, (scale, softcap), has_spreads=bool(wanted))
        # One column where spreads are not wanted: a single gathering serves both.
        nll_M, *spread_M = gather_before_backward(losses, module).unbind()
        return TargetLosses(nll_M, *spread_M)
    with gathered(module):
        weight, bias = frozen_weight(module)
        if weight is not None:
            head, words = Head(weight, bias, scale, softcap), vocab_parallel_head(module)
            if words is None:
                nll_M = linear_cross_entropy(hidden_MD, head, targets_M)
            else:
                nll_M = vocab_parallel_linear_cross_entropy(
                    hidden_MD, head, targets_M, first=words.first, vocab_size=words.vocab_size, links=words.links
                )
            if not wanted:
                return TargetLosses(nll_M)
            return TargetLosses(nll_M, _task_spreads(hidden_MD, targets_M, batch.target_offsets, wanted, head, words))
    raise UnsupportedModelError(
        f"the output head of {type(backbone).__name__} is a {type(module).__name__}; allowed: a linear layer."
    )


def _task_spreads(
    hidden_MD: torch.Tensor,
    targets_M: torch.Tensor,
    offsets: Sequence[int],
    wanted: Collection[int],
    head: Head,
    words: VocabParallelHead | None,
) -> torch.Tensor:
    """Return the spreads `[M]` of the targets of the tasks of some numbers, and 0 for those of the others."""
    exact = torch.promote_types(hidden_MD.dtype, torch.float32)
    parts = []
    # By slices, so that the rows of other tasks take no part: 0 * NaN would be NaN.
    for index, (start, end) in enumerate(pairwise(offsets)):
        own_MD, own_M = hidden_MD[start:end], targets_M[start:end]
        if index not in wanted:
            parts.append(hidden_MD.new_zeros(end - start, dtype=exact))
        elif words is None:
            parts.append(linear_spreads(own_MD, head, own_M))
        else:
            copied_MD = copy_to_tp_region(own_MD, words.links)
            spreads_M = linear_spreads(copied_MD, head, own_M, first=words.first, vocab_size=words.vocab_size)
            parts.append(reduce_from_tp_region(spreads_M, words.links))
    return torch.cat(parts)


def _is_adapted(module: Any) -> bool:
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _adapted_losses(
    hidden_MD: torch.Tensor,
    targets_M: torch.Tensor,
    module: Any,
    reads: tuple[MuxBatch, Stream, Mapping[str, str]],
    transform: tuple[float, float | None],
    *,
    has_spreads: bool,
) -> torch.Tensor:
    """Return the losses `[1, M]`, or losses and spreads `[2, M]`, where some task adapts the head.

    Logits are made in blocks, and again in the backward pass.
    """
    batch, stream, adapters = reads
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
        targets, found = targets_M[start:end], []
        if words is not None:
            found.append(VocabParallelCrossEntropy.apply(logits, targets, words.first, words.links))
        else:
            found.append(F.cross_entropy(logits, targets, reduction="none"))
        if has_spreads:
            found.append(_spreads_of_logits(logits, targets, words))
        return torch.stack(found)

    parts = []
    for start in range(0, len(hidden_MD), size):
        end = min(start + size, len(hidden_MD))
        # Recomputed block by block, so that the logits of one block alone are ever held; draws need no state.
        parts.append(checkpoint(block, hidden_MD[start:end], start, end, use_reentrant=False, preserve_rng_state=False))
    # An empty sum keeps the graph where no row has a target.
    empty = hidden_MD.sum(dim=1)[None]
    return torch.cat(parts, dim=1) if parts else empty.expand(1 + has_spreads, -1)


def _spreads_of_logits(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, words: VocabParallelHead | None
) -> torch.Tensor:
    """Return the spreads `[M]` of targets under an adapted head."""
    if words is None:
        num_words = logits_MV.shape[1]
        return spreads_of_logits(logits_MV, Targets.of(targets_M, 0, num_words), num_words)
    own = Targets.of(targets_M, words.first, logits_MV.shape[1])
    return reduce_from_tp_region(spreads_of_logits(logits_MV, own, words.vocab_size), words.links)
