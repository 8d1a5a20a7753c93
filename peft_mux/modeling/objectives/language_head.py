"""The output head of a causal language model: a frozen layer over the words, shared by all tasks.

Shape letters: T tokens, L tokens of a sequence, V words, D hidden features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from peft_mux.data.batch import MuxBatch, TaskBatch
from peft_mux.data.rows.virtual_tokens import virtual_tokens_of_sequences
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.head_kinds import LANGUAGE_MODEL
from peft_mux.modeling.objectives.head import HeadPass, register_head
from peft_mux.modeling.sharding.gathering import gathered


class LanguageHead:
    """One layer from hidden states to logits of words, perhaps with adapters on it."""

    kind = LANGUAGE_MODEL
    example_label = None

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Do nothing: the head is the backbone's own, and frozen."""

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Do nothing: base models end before the head."""
        return nullcontext()

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
        """Return the logits `[L, V]` of every sequence."""
        return stream_logits(hidden_TD, batch, head)

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels `[L]` of every sequence, not shifted, as Trainer gives them to `compute_metrics`."""
        by_place, place = {}, 0
        for sequence in batch.sequences:
            by_place[place] = sequence.labels[sequence.num_virtual_tokens :]
            place += len(sequence)
        # Packing reorders sequences; the place of the first token within the batch tells which one it is.
        for start in micro_batch.cu_seqlens[:-1].tolist():
            yield by_place[int(micro_batch.token_places[start])]


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


def stream_logits(hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
    """Return the `[L, V]` logits of every sequence but its virtual tokens, computed one sequence at a time.

    Args:
        hidden_TD: the last hidden states `[T, D]`.
        batch: the micro-batch that the stream reads.
        head: what the output head is computed with.
    """
    module, scale, softcap = output_head(head.backbone)
    logits, start = [], 0
    with gathered(module):
        # One by one, as logits of the whole stream would be the largest tensor of the pass.
        for length, num_virtual in zip(batch.sequence_lengths, virtual_tokens_of_sequences(batch), strict=True):
            end, start = start + length, start + num_virtual
            offsets = tuple(min(max(offset - start, 0), end - start) for offset in batch.task_offsets)
            with head.stream.selected_rows(offsets, batch.token_places[start:end], head.adapters):
                rows = module(hidden_TD[start:end]).float() * scale
            logits.append(rows if softcap is None else softcap * torch.tanh(rows / softcap))
            start = end
    return logits


LANGUAGE_HEAD = LanguageHead()
register_head(LANGUAGE_HEAD)
