"""`PromptPass`: what learnt prompts bring into one pass, as the embeddings and attention read it.

Shape letters: T tokens of the stream, R rows of virtual tokens, D hidden features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peft_mux.modeling.attention.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class PromptPass:
    """The prompts of the tasks of one micro-batch; each was computed once, whatever the number of its sequences.

    Attributes:
        rows: int64 `[R]`, rows of the stream that are virtual tokens; `None` where there are none.
        embeddings: `[R, D]`, what stands in those rows in place of embeddings of words.
        prefixes: learnt keys and values in front of sequences; `None` where there are none.
        position_shift: int64 `[1, T]`, by how much prefixes move each token's position; `None` for not at all.
    """

    rows: torch.Tensor | None
    embeddings: torch.Tensor | None
    prefixes: Prefixes | None
    position_shift: torch.Tensor | None

    def embedded(self, words_1TD: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return embeddings of words with those of virtual tokens in their rows.

        Args:
            words_1TD: embeddings `[1, T, D]`, of placeholders in the rows of virtual tokens.
            rows: int64 `[R]`, the rows of virtual tokens among them.
        """
        assert self.embeddings is not None, "there are virtual tokens"
        # Copied, not masked: a task's NaN stays in its rows, and the backward takes each row's gradient as it is.
        return words_1TD[0].index_copy(0, rows, self.embeddings.to(words_1TD.dtype)).unsqueeze(0)
