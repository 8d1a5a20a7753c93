"""NEFTune: noise on the embeddings of a task's tokens in training (Jain et al., 2023), as Trainer adds it.

A token of a row of L tokens gets `alpha / sqrt(L * D)` times draws that are uniform in (-1, 1). L is the row's own
length, as in the paper; transformers takes that of the padded batch, which depends on the rows beside it. A draw
follows from the task's seed and step, the token's place in its global batch and the column (`peft_mux.kernels.philox`),
so that neither neighbours nor micro-batches nor the number of processes change it.

Shape letters: T tokens, U computed rows, D hidden features.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.kernels import philox
from peft_mux.modeling.stream import Stream

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
