"""The next token of every row: the likeliest one, or a draw from the row's own random numbers.

Scores pass through the processors of transformers, in the order in which its `generate` has them. Rows with equal
options pass together; each draw is made for its row alone, so that nothing of it depends on the other rows.

Shape letters: B rows, n rows with equal options, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from peft_mux.generation.options import SamplingOptions
from peft_mux.generation.rows import Row


class Drawn(NamedTuple):
    """What came of one step of all rows.

    Attributes:
        tokens: the next token of each row; means nothing where `are_finite` is false.
        logprobs: its log-probability under the model, before any processing.
        are_finite: whether a row's logits were numbers.
    """

    tokens: list[int]
    logprobs: list[float]
    are_finite: list[bool]


class Draws:
    """Draws the next tokens of a set of rows, which stays the same from step to step.

    Args:
        rows: the rows, in the order of the batch.
        device: where the logits are.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        """Sort the rows by what their scores pass through."""
        self._rows = rows
        self._device = device
        groups: dict[tuple[bool, tuple[float, ...]], list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault((row.options.do_sample, row.options.filters), []).append(number)
            if row.options.do_sample and row.generator is None:
                row.generator = torch.Generator(device).manual_seed(row.seed)
        self._groups = [(numbers, _processors(rows[numbers[0]].options)) for numbers in groups.values()]

    def next_tokens(self, logits_BV: torch.Tensor) -> Drawn:
        """Return the next token of each row.

        Args:
            logits_BV: fp32, the logits of each row's next token.
        """
        # NaN or an infinite logit makes it so; words that a model rules out (-inf) do not.
        norms_B = torch.logsumexp(logits_BV, dim=-1)
        are_finite = norms_B.isfinite().tolist()
        tokens_B = logits_BV.argmax(dim=-1)
        for numbers, processors in self._groups:
            live = [number for number in numbers if are_finite[number]]
            if live and (processors or self._rows[live[0]].options.do_sample):
                tokens_B[live] = self._processed(live, processors, logits_BV[live])
        logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - norms_B
        return Drawn(tokens_B.tolist(), logprobs_B.tolist(), are_finite)

    def _processed(self, numbers: list[int], processors: LogitsProcessorList, scores_nV: torch.Tensor) -> torch.Tensor:
        """Return the next tokens `[n]` of rows whose scores pass through the same processors."""
        rows = [self._rows[number] for number in numbers]
        if processors:
            ids: Any = _tokens_so_far(rows, self._device)
            scores_nV = processors(ids, scores_nV)
        if not rows[0].options.do_sample:
            return scores_nV.argmax(dim=-1)
        probabilities_nV = torch.softmax(scores_nV, dim=-1)
        # Row by row, as `PeftModel.generate` would for each alone: one generator for all would mix their draws.
        draws = [
            torch.multinomial(probabilities_nV[place], 1, generator=row.generator) for place, row in enumerate(rows)
        ]
        return torch.cat(draws)


def _processors(options: SamplingOptions) -> LogitsProcessorList:
    """Return what the scores of a row pass through; transformers leaves out what would change nothing, as here."""
    found: list[Any] = []
    if options.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(penalty=float(options.repetition_penalty)))
    if options.do_sample:
        if options.temperature != 1.0:
            found.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k:
            found.append(TopKLogitsWarper(top_k=options.top_k))
        if options.top_p < 1.0:
            found.append(TopPLogitsWarper(top_p=float(options.top_p)))
        if options.min_p > 0.0:
            found.append(MinPLogitsWarper(min_p=float(options.min_p)))
    return LogitsProcessorList(found)


def _tokens_so_far(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    """Return `[n, L]`, prompts and completions; shorter rows repeat their first token, which no processor counts."""
    tokens = [row.prompt + row.tokens for row in rows]
    length = max(map(len, tokens))
    return torch.tensor([[own[0]] * (length - len(own)) + own for own in tokens], device=device)
