"""`Row`: a prompt on its way to a completion; made of requests after every check that needs no pass of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from peft_mux.data.cells import RowCells
from peft_mux.data.rows.chat_rows import ChatRows
from peft_mux.errors import ConfigError, DataError, closest, shown
from peft_mux.generation.completion import Completion, GenerationRequest, Prompt
from peft_mux.generation.options import SamplingOptions


@dataclass(slots=True, eq=False)
class Row:
    """A prompt on its way to a completion.

    Attributes:
        task: name of the task.
        prompt: the tokens of the prompt, at least one.
        options: how its tokens are drawn.
        seed: what its draws are made from.
        eos: tokens that end it.
        tokens: the tokens of the completion so far.
        logprobs: log-probability of each of them.
        finish_reason: why it has ended; empty while it goes on.
        generator: the row's own random numbers, where it is drawn.
    """

    task: str
    prompt: list[int]
    options: SamplingOptions
    seed: int
    eos: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Any = ""
    generator: torch.Generator | None = None

    @property
    def max_length(self) -> int:
        """Most tokens that prompt and completion may have."""
        return len(self.prompt) + self.options.max_new_tokens

    def take(self, token: int, logprob: float, stops: StopTexts | None) -> None:
        """Append a token, and end the row where that calls for it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.eos or (stops is not None and stops.has_stopped(self)):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.options.max_new_tokens:
            self.finish_reason = "length"

    def completion(self, stops: StopTexts | None) -> Completion:
        """Return what the row came to."""
        return Completion(
            task=self.task,
            prompt_token_ids=tuple(self.prompt),
            token_ids=tuple(self.tokens),
            text=None if stops is None else stops.text(self),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            seed=self.seed,
        )


class StopTexts:
    """Reads the tokens of rows as text, and finds stop strings in it.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer."""
        self._tokenizer = tokenizer

    def has_stopped(self, row: Row) -> bool:
        """Return whether a stop string ends in the last tokens of a row."""
        if not row.options.stop_strings:
            return False
        # A character takes up to four tokens, of bytes; a few more, as decoders trim what they begin with.
        window = 4 * max(map(len, row.options.stop_strings)) + 8
        tail = self._decoded(row.tokens[-window:])
        return any(stop in tail for stop in row.options.stop_strings)

    def text(self, row: Row) -> str:
        """Return a row's completion as text, up to the first of its stop strings."""
        text = self._decoded(row.tokens)
        found = [place for stop in row.options.stop_strings if (place := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


Requests = Mapping[str, Sequence[Prompt]] | Sequence[GenerationRequest]


def as_requests(prompts: Requests) -> list[GenerationRequest]:
    """Return prompts in either form as a list of requests.

    Raises:
        ConfigError: if they are of neither form.
    """
    allowed = "a dict of prompts by task name, or a list of GenerationRequest"
    if isinstance(prompts, Mapping):
        for name, rows in prompts.items():
            if isinstance(rows, (str, bytes, Mapping)) or not hasattr(rows, "__iter__"):
                raise ConfigError(f"prompts.{name}: got {shown(rows)}; allowed: a list of prompts. Put it into a list.")
        return [GenerationRequest(task=name, prompt=prompt) for name, rows in prompts.items() for prompt in rows]
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        raise ConfigError(f"prompts: got {shown(prompts)}; allowed: {allowed}.")
    requests = list(prompts)
    wrong = next((item for item in requests if not isinstance(item, GenerationRequest)), None)
    if wrong is not None:
        raise ConfigError(f"prompts: got {shown(wrong)} in the list; allowed: {allowed}.")
    return requests


@dataclass(frozen=True, slots=True)
class RowMaker:
    """Makes rows of requests.

    Attributes:
        tasks: names of the tasks that the model holds.
        tokenizer: a tokenizer of transformers; `None` where prompts are token ids.
        options: of requests that have none.
        eos: tokens that end a completion by default.
        vocab_size: token ids must be below it.
        max_positions: most tokens that prompt and completion may have, by task; `None` for no limit.
    """

    tasks: tuple[str, ...]
    tokenizer: Any
    options: SamplingOptions
    eos: tuple[int, ...]
    vocab_size: int
    max_positions: Mapping[str, int] | None

    def rows(self, requests: Sequence[GenerationRequest]) -> list[Row]:
        """Return a row for each request, in the same order.

        Raises:
            ConfigError: for tasks that the model does not hold, and options that cannot be used.
            DataError: naming the task and the number of a prompt that cannot be completed.
        """
        places: Counter[str] = Counter()
        rows = []
        for request in requests:
            rows.append(self._row(request, places[request.task]))
            places[request.task] += 1
        return rows

    def _row(self, request: GenerationRequest, place: int) -> Row:
        if request.task not in self.tasks:
            hint = closest(request.task, self.tasks)
            raise ConfigError(
                f"prompts: got task {shown(request.task)}; allowed: {', '.join(self.tasks)}. {hint}".rstrip()
            )
        options = request.options or self.options
        if self.tokenizer is None and options.stop_strings:
            raise ConfigError(
                f"prompts.{request.task}: got stop_strings without a tokenizer; allowed: a processing_class, which "
                "reads tokens as text. Give it, or eos_token_id in their place."
            )
        seed = options.seed + place if request.seed is None else request.seed
        eos = options.eos_token_ids
        row = Row(request.task, self._ids(request, place), options, seed, frozenset(self.eos if eos is None else eos))
        limit = None if self.max_positions is None else self.max_positions[row.task]
        if limit is not None and row.max_length > limit:
            raise DataError(
                f"prompts.{row.task} row {place}: got {len(row.prompt)} tokens with max_new_tokens="
                f"{options.max_new_tokens}; allowed: {limit} together, the backbone's positions. Shorten "
                "the prompt, or lower max_new_tokens."
            )
        return row

    def _ids(self, request: GenerationRequest, place: int) -> list[int]:
        cells, prompt = RowCells(f"prompts.{request.task}", self.vocab_size), request.prompt
        is_chat, has_tokenizer = _are_messages(prompt), self.tokenizer is not None
        if not has_tokenizer and (is_chat or isinstance(prompt, str)):
            raise cells.error(place, "prompt", "text without a tokenizer", "token ids, or a processing_class")
        if isinstance(prompt, str):
            ids = self.tokenizer(cells.text({"prompt": prompt}, "prompt", place))["input_ids"]
        elif is_chat:
            chat = ChatRows(cells, self.tokenizer, task=request.task, chat_template=None, assistant_only_loss=False)
            ids = chat.encode_prompt(chat.messages({"prompt": prompt}, "prompt", place), "prompt", place)
        else:
            ids = cells.integers(prompt, place, "prompt")
        return cells.checked_ids(np.asarray(ids, dtype=np.int64), place, "prompt").tolist()


def _are_messages(prompt: object) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)
