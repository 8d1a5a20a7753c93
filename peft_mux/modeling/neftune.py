"""NEFTune: noise on the embeddings of a task's tokens in training (Jain et al., 2023), as Trainer adds it.

A token of a row of L tokens gets `alpha / sqrt(L * D)` times draws that are uniform in (-1, 1). L is the row's own
length, as in the paper; transformers uses the length of the padded batch, which depends on the other rows. A draw
depends on the task's seed and step, the token's place in its global batch and the column (`peft_mux.kernels.philox`),
so that neither neighbours nor micro-batches nor the number of processes change it.

Shape letters: T tokens, U computed rows, D hidden features.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from peft_mux.kernels import philox
from peft_mux.modeling.stream import Stream

DRAWS = "neftune"
"""Name of these draws, in the place of a module's name."""


class EmbeddingNoise:
    """The noise of all tasks of a model.

    Args:
        stream: says which rows of a pass belong to which task.

    Attributes:
        alphas: strength of the noise of each task that has some, by internal adapter id.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.alphas: dict[str, float] = {}
        self._hook: tuple[nn.Module, Any] | None = None

    def assign(self, adapter: str, alpha: float) -> None:
        """Give a task noise of a strength; none where it is 0."""
        self.alphas.pop(adapter, None)
        if alpha:
            self.alphas[adapter] = alpha

    def watch(self, backbone: Any) -> None:
        """Hook onto the embedding of a backbone, adapters included, if any task has noise."""
        if not self.alphas:
            return
        embedding = backbone.get_input_embeddings()
        # Looked up at every pass, as an adapter of another task may have been put around it since. The hook stays, as
        # several passes that take turns run through it at once.
        if self._hook is None or self._hook[0] is not embedding:
            if self._hook is not None:
                self._hook[1].remove()
            self._hook = embedding, embedding.register_forward_hook(self._add)

    def _add(self, embedding: nn.Module, inputs: Any, output_1UD: torch.Tensor) -> torch.Tensor:
        """Add the noise of each task that has some to its own rows."""
        stream, batch, segments = self._stream, self._stream.batch, self._stream.segments
        if batch is None or not embedding.training or not any(segment.adapter in self.alphas for segment in segments):
            return output_1UD
        # The number of tokens of each row, virtual ones aside; for a part of a long sequence that of the whole one.
        row_lengths = [part.num_tokens for part in batch.parts] if batch.parts else list(batch.sequence_lengths)
        for (start, end), virtual in zip(pairwise(batch.sequence_offsets), batch.virtual_tokens, strict=False):
            row_lengths[start:end] = [length - virtual for length in row_lengths[start:end]]
        lengths_T = torch.tensor(row_lengths).repeat_interleave(torch.tensor(batch.sequence_lengths))
        lengths_U = batch.computed(lengths_T.to(output_1UD.device))
        width = output_1UD.shape[-1]
        parts = list(output_1UD.split([segment.end - segment.start for segment in segments], dim=-2))
        # By slices: neither draws nor a NaN of one task reach another.
        for index, segment in enumerate(segments):
            if segment.adapter in self.alphas:
                rows = slice(segment.start, segment.end)
                scales = self.alphas[segment.adapter] / torch.sqrt(lengths_U[rows].float() * width)
                draws = philox.uniform_rows(segment.draw_seed(DRAWS), stream.places[rows], width)
                noise = (2.0 * draws - 1.0) * scales[:, None]
                parts[index] = parts[index] + noise.to(output_1UD.dtype)
        return torch.cat(parts, dim=-2)
