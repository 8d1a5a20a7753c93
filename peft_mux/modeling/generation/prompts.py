"""The prompts of held-out rows, and what each row asks for: what an evaluation completes, and is held against.

A prompt ends where the loss on the completion begins, as in training (`RowTokenizer`), so that a model is asked to go
on from just the tokens after which it has learnt to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_mux.data.formats import DataFormat, detect_format
from peft_mux.data.rows import RowCells
from peft_mux.data.tokenize import TokenizeOptions, common_prefix
from peft_mux.errors import DataError

_SPLIT = "eval_dataset"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt and what its row asks for.

    Attributes:
        ids: the tokens of the prompt.
        prompt: the prompt as text; of messages as the chat template writes them.
        reference: the text that the row has as its completion.
    """

    ids: tuple[int, ...]
    prompt: str
    reference: str


class PromptReader:
    """Reads prompts off the held-out rows of a task.

    Args:
        options: how the rows of the task become tokens.
        tokenizer: a tokenizer of transformers.

    Attributes:
        num_too_long: prompts that were left out because no completion fits behind them.

    Raises:
        DataError: if there is no tokenizer.
    """

    def __init__(self, options: TokenizeOptions, tokenizer: Any) -> None:
        """Read nothing yet."""
        self._where = f"tasks.{options.task}.{_SPLIT}"
        if tokenizer is None:
            raise DataError(
                f"tasks.{options.task}.eval_generate: got no tokenizer; allowed: a processing_class, which reads "
                "completions as text. Pass processing_class=AutoTokenizer.from_pretrained(...)."
            )
        self._options, self._tokenizer = options, tokenizer
        self._cells = RowCells(self._where, options.vocab_size, tokenizer, options.chat_template)
        self.num_too_long = 0

    def read(self, rows: Iterable[Any], *, limit: int | None, max_tokens: int | None) -> tuple[PromptRow, ...]:
        """Return the prompts of rows, in their order.

        Args:
            rows: dicts of columns that were tokenised before without a fault.
            limit: how many rows are read, from the first one on; `None` for all.
            max_tokens: longer prompts are left out and counted; `None` for no limit.

        Raises:
            DataError: if rows have no prompts, or naming the row and column whose prompt cannot be read; or if all
                prompts are too long.
        """
        found: list[PromptRow] = []
        data_format: DataFormat | None = None
        for index, row in enumerate(rows):
            if index == limit:
                break
            data_format = data_format or self._format(row)
            prompt = self._from_messages(row, index) if data_format is DataFormat.MESSAGES else self._pair(row, index)
            if max_tokens is not None and len(prompt.ids) > max_tokens:
                self.num_too_long += 1
            else:
                found.append(prompt)
        if not found:
            raise DataError(
                f"tasks.{self._options.task}.eval_generate: got held-out prompts of which the shortest has more than "
                f"{max_tokens} tokens; allowed: prompts behind which the completion fits. Lower max_new_tokens."
            )
        return tuple(found)

    def _format(self, row: Mapping[str, Any]) -> DataFormat:
        """Return which of the two forms with prompts the rows have."""
        found = detect_format(list(row), where=self._where, row_form=self._options.row_form)
        if found not in (DataFormat.MESSAGES, DataFormat.PROMPT_COMPLETION):
            raise DataError(
                f"tasks.{self._options.task}.eval_generate: got held-out rows of {found}, which have no prompts; "
                'allowed: rows with "prompt" and "completion", or "messages". Set eval_generate=None.'
            )
        return found

    def _pair(self, row: Mapping[str, Any], index: int) -> PromptRow:
        if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
            prompt, completion = (self._cells.messages(row, column, index) for column in ("prompt", "completion"))
            return self._chat_prompt(prompt, completion, "completion", index)
        prompt, completion = (self._cells.text(row, column, index) for column in ("prompt", "completion"))
        ids, whole = (self._tokenizer(text)["input_ids"] for text in (prompt, prompt + completion))
        return PromptRow(self._checked(ids, whole, "prompt", index), prompt, completion)

    def _from_messages(self, row: Mapping[str, Any], index: int) -> PromptRow:
        messages = self._cells.messages(row, "messages", index)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            got = f"{len(messages)} messages, the last of them of {messages[-1]['role']!r:.60}"
            raise self._cells.error(index, "messages", got, "an answer of the assistant at the end, to be generated")
        return self._chat_prompt(messages[:-1], messages[-1:], "messages", index)

    def _chat_prompt(
        self, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], column: str, index: int
    ) -> PromptRow:
        ids, _ = self._cells.encode_chat(prompt, column, index, is_prompt=True)
        whole, _ = self._cells.encode_chat(prompt + answer, column, index)
        kept = self._checked(ids, whole, column, index)
        return PromptRow(kept, self._tokenizer.decode(kept), "\n".join(_text(message) for message in answer))

    def _checked(self, ids: list[int], whole: list[int], column: str, index: int) -> tuple[int, ...]:
        """Return the tokens of a prompt that do not merge with those of the completion."""
        kept = np.asarray(ids[: common_prefix(ids, whole)], dtype=np.int64)
        return tuple(self._cells.checked_ids(kept, index, column).tolist())


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    # One that only calls tools has none.
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())
