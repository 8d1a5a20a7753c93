"""A batch of rows of any tasks, token by token: prompts in one packed pass, then one token of every row a pass.

All passes are those that train, `[1, T]` with rows sorted by task, so that every layer sees what it sees in training
and adapters of any kind run as they do there. Attention alone is told more: where the keys and values of the tokens
before lie (`peft_mux.modeling.attention.rows`). The last token of a prompt goes with the first step, so that only steps
compute logits.

Shape letters: B rows, T tokens of a pass, D hidden features, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import torch

from peft_mux.data.batch import IGNORE_INDEX, MuxBatch
from peft_mux.generation.draws import Draws
from peft_mux.generation.rows import Row, StopTexts
from peft_mux.modeling.attention.packed import AttentionStream
from peft_mux.modeling.attention.rows import KeyValueRows
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.language_head import output_head


class Decoding:
    """Completes a batch of rows.

    Args:
        model: the multi-task model, in evaluation mode.
        rows: rows sorted by task; their tokens are appended to them.
        stops: reads tokens as text where rows have stop strings; `None` without a tokenizer.
    """

    def __init__(self, model: MultiTaskPeftModel, rows: Sequence[Row], stops: StopTexts | None) -> None:
        """Compute nothing yet."""
        self._model, self._stops = model, stops
        self._rows = list(rows)
        self._kept = KeyValueRows([len(row.prompt) - 1 for row in rows], model.device)

    def run(self) -> None:
        """Append tokens to the rows until every one of them has ended."""
        self._model.prepare({row.task: None for row in self._rows})
        self._read_prompts()
        while self._rows:
            self._step_until_one_ends()
            self._drop_ended()

    def _read_prompts(self) -> None:
        """Keep the keys and values of all prompts but their last tokens."""
        read = [row for row in self._rows if len(row.prompt) > 1]
        if not read:
            return
        batch = _stream([row.task for row in read], [row.prompt[:-1] for row in read], [0] * len(read))
        batch = batch.to(self._model.device)
        with self._model.multiplexing(batch):
            self._hidden_states(batch)

    def _step_until_one_ends(self) -> None:
        """Take steps of the same rows until at least one of them has ended."""
        model, rows = self._model, self._rows
        draws, passes = Draws(rows, model.device), None
        batch = _newest(rows).to(model.device)
        while not any(row.finish_reason for row in rows):
            self._kept.next_column()
            with model.multiplexing(batch, passes):
                # Kept, as the rows stay the same: what kernels need to know of them is gathered once.
                passes = model.stream.passes
                logits_BV = self._logits(self._hidden_states(batch))
            drawn = draws.next_tokens(logits_BV)
            for row, token, logprob, is_finite in zip(rows, *drawn, strict=True):
                if is_finite:
                    row.take(token, logprob, self._stops)
                else:
                    row.finish_reason = "non_finite"
            ids = torch.tensor([drawn.tokens], device=model.device)
            batch = replace(batch, input_ids=ids, position_ids=batch.position_ids + 1)

    def _hidden_states(self, batch: MuxBatch) -> torch.Tensor:
        """Return the `[T, D]` last hidden states of a batch that is multiplexed; its keys and values are kept."""
        attention = AttentionStream(self._model.stream, batch, self._model.module_names, self._kept)
        return self._model.hidden_states(batch, attention)

    def _logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits of what follows each row's newest token."""
        module, scale, softcap = output_head(self._model.backbone)
        logits_BV = module(hidden_BD).float() * scale
        return logits_BV if softcap is None else softcap * torch.tanh(logits_BV / softcap)

    def _drop_ended(self) -> None:
        """Take rows that have ended out of the batch."""
        kept = [number for number, row in enumerate(self._rows) if not row.finish_reason]
        self._rows = [self._rows[number] for number in kept]
        if kept:
            self._kept.select(kept)


def _newest(rows: Sequence[Row]) -> MuxBatch:
    """Return a stream of the newest token of each row."""
    newest = [[(row.tokens or row.prompt)[-1]] for row in rows]
    return _stream([row.task for row in rows], newest, [len(row.prompt) + len(row.tokens) - 1 for row in rows])


def _stream(tasks: Sequence[str], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> MuxBatch:
    """Return sequences of tokens as a stream without targets.

    Args:
        tasks: task of each sequence; those of a task lie together.
        tokens: tokens of each sequence.
        starts: position of the first token of each.
    """
    counts = {name: len(list(own)) for name, own in groupby(tasks)}
    names, sequence_offsets = tuple(counts), (0, *accumulate(counts.values()))
    lengths = torch.tensor([0, *map(len, tokens)], dtype=torch.int32)
    bounds = lengths.cumsum(0, dtype=torch.int32)
    num_tokens = int(bounds[-1])
    positions = [start + place for start, own in zip(starts, tokens, strict=True) for place in range(len(own))]
    return MuxBatch(
        input_ids=torch.tensor([[token for own in tokens for token in own]]),
        position_ids=torch.tensor([positions]),
        labels=torch.full((1, num_tokens), IGNORE_INDEX),
        target_rows=torch.empty(0, dtype=torch.int64),
        target_offsets=(0,) * (len(names) + 1),
        token_places=torch.arange(num_tokens),
        cu_seqlens=bounds,
        task_offsets=tuple(int(bounds[offset]) for offset in sequence_offsets),
        sequence_offsets=sequence_offsets,
        sequence_lengths=tuple(map(len, tokens)),
        task_names=names,
        task_seeds=(0,) * len(names),
        task_steps=(0,) * len(names),
        loss_weights=(0.0,) * len(names),
    )
