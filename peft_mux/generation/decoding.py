"""A batch of rows of any tasks, token by token: prompts in one packed pass, then one token of every row a pass.

All passes are those that train, `[1, T]` with rows sorted by task, so that every layer sees what it sees in training
and adapters of any kind run as they do there. Attention alone is told more: where the keys and values of the tokens
before lie (`peft_mux.modeling.attention.rows`).

Shape letters: B rows, T tokens of a pass, D hidden features, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.rows.virtual_tokens import PLACEHOLDER_ID
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.generation.draws import Drawn, Draws
from peft_mux.generation.rows import Row, StopTexts
from peft_mux.modeling.adapters.prompts.encoders import prompt_kind_of
from peft_mux.modeling.attention.rows import KeyValueRows
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.language_head import output_head
from peft_mux.modeling.stream import Passes


class Decoding:
    """Completes a batch of rows.

    Args:
        model: the multi-task model, in evaluation mode.
        rows: rows sorted by task; their tokens are appended to them.
        stops: reads tokens as text where rows have stop strings; `None` without a tokenizer.
    """

    def __init__(self, model: MultiTaskPeftModel, rows: Sequence[Row], stops: StopTexts | None) -> None:
        """Compute nothing yet."""
        self._model, self._stops, self._device = model, stops, model.device
        self._learnt = {row.task: learnt_prompt(model, row.task) for row in rows}
        self._kept = KeyValueRows(
            [self._learnt[row.task].num_positions + len(row.prompt) for row in rows], self._device
        )
        self._use(rows)

    def _use(self, rows: Sequence[Row]) -> None:
        self._rows, self._draws = list(rows), Draws(rows, self._device)
        # What kernels need to know of these rows, gathered in their first step.
        self._passes: Passes | None = None

    def run(self) -> None:
        """Append tokens to the rows until every one of them has ended."""
        self._model.packed.prepare({row.task: None for row in self._rows})
        logits_BV = self._read_prompts()
        while self._take(self._draws.next_tokens(logits_BV)):
            logits_BV = self._step()

    def _read_prompts(self) -> torch.Tensor:
        """Keep the keys and values of all prompts, and return the logits of what follows them."""
        model, rows = self._model, self._rows
        virtual = {name: learnt.num_tokens for name, learnt in self._learnt.items()}
        tokens = [[PLACEHOLDER_ID] * virtual[row.task] + row.prompt for row in rows]
        batch = _stream([row.task for row in rows], tokens, [0] * len(rows)).to(self._device)
        if any(virtual.values()):
            batch = replace(batch, virtual_tokens=tuple(virtual[name] for name in batch.task_names))
        last = batch.cu_seqlens[1:].long() - 1
        with model.packed.multiplexing(batch):
            hidden_TD = self._hidden_states(batch)
            # The head sees the last token of each prompt alone: logits of all of them would be the largest tensor.
            with model.stream.selected_rows(batch.sequence_offsets, batch.token_places[last], model.adapters):
                return self._logits(hidden_TD[last])

    def _step(self) -> torch.Tensor:
        """Return the logits of what follows the newest token of each row."""
        self._kept.next_column()
        batch = self._newest().to(self._device)
        # Learnt prompts are in what is kept: no row begins in this pass.
        with self._model.packed.multiplexing(batch, self._passes), self._model.without_prompts():
            self._passes = self._model.stream.passes
            return self._logits(self._hidden_states(batch))

    def _take(self, drawn: Drawn) -> bool:
        """Append a token to each row, take those that have ended out of the batch, and return whether any is left."""
        for row, token, logprob, is_finite in zip(self._rows, *drawn, strict=True):
            if is_finite:
                row.take(token, logprob, self._stops)
            else:
                row.finish_reason = "non_finite"
        kept = [number for number, row in enumerate(self._rows) if not row.finish_reason]
        if kept and len(kept) < len(self._rows):
            self._kept.select(kept)
            self._use([self._rows[number] for number in kept])
        return bool(kept)

    def _hidden_states(self, batch: MuxBatch) -> torch.Tensor:
        """Return the `[T, D]` last hidden states of a batch that is multiplexed; its keys and values are kept."""
        return self._model.packed.hidden_states(batch, rows=self._kept)

    def _newest(self) -> MuxBatch:
        """Return a stream of the newest token of each row."""
        rows = self._rows
        starts = [self._learnt[row.task].num_positions + len(row.prompt) + len(row.tokens) - 1 for row in rows]
        return _stream([row.task for row in rows], [row.tokens[-1:] for row in rows], starts)

    def _logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits of what follows each row's newest token."""
        module, scale, softcap = output_head(self._model.backbone)
        logits_BV = module(hidden_BD).float() * scale
        return logits_BV if softcap is None else softcap * torch.tanh(logits_BV / softcap)


class LearntPrompt(NamedTuple):
    """What a task puts before each of its sequences; zeros for adapters on layers.

    Attributes:
        num_tokens: rows of virtual tokens.
        num_positions: by how much the tokens of a row are moved, by virtual tokens or by keys of a prefix.
    """

    num_tokens: int
    num_positions: int


def learnt_prompt(model: MultiTaskPeftModel, task: str) -> LearntPrompt:
    """Return what a task of a model puts before each of its sequences."""
    config = model.peft_config[model.adapter_of(task)]
    kind = prompt_kind_of(config)
    if kind is None:
        return LearntPrompt(0, 0)
    return LearntPrompt(len(kind.virtual_labels(config)), kind.num_positions(config))


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
