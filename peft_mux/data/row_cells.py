"""`RowCells`: reads and checks the cells of a dataset's rows; errors name the row and the column."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from peft_mux.data.formats import TokenColumn
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.errors import DataError, Fault
from peft_mux.user_code import describe_error

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROUNDING = 0.01
"""Tolerance above 0 for log-probabilities, because other programs may have rounded them to half precision."""


class RowCells:
    """Reads single cells of one dataset's rows.

    Args:
        where: the dataset, for messages, such as `tasks.sql.train_dataset`.
        vocab_size: token ids must be below it; `None` for no check.
        tokenizer: a tokenizer of transformers; may be `None` for rows without messages.
        chat_template: Jinja template for messages; `None` for the tokenizer's own.
    """

    def __init__(
        self, where: str, vocab_size: int | None = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        self.where = where
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    def error(self, index: int, column: str, got: str, allowed: str, fix: str = "") -> DataError:
        """Return the error for one cell."""
        return DataError(str(Fault(f"{self.where} row {index} column {column}", got, allowed, fix)))

    # ------------------------------------------------------------------------------------------------ texts, numbers

    def text(self, row: Mapping[str, Any], column: str, index: int) -> str:
        """Return a cell that must be a string of valid Unicode without NUL.

        Raises:
            DataError: if it is anything else.
        """
        value = row[column]
        if not isinstance(value, str):
            # Numbers usually come from CSV files, which have no types.
            fix = f'For a CSV file: load_rows(...).cast_column("{column}", Value("string")).'
            fix = fix if isinstance(value, (int, float)) else _hint(row)
            raise self.error(index, column, f"{value!r:.60} ({type(value).__name__})", "a string", fix)
        try:
            # A tokenizer would also raise, but without naming the row.
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self.error(index, column, f"a lone surrogate at character {error.start}", "valid Unicode") from error
        if "\0" in value:
            raise self.error(index, column, f"a NUL character at {value.index(chr(0))}", "text without NUL")
        return value

    def integers(
        self,
        value: Any,
        index: int,
        column: str,
        length: int | None = None,
        items: str = "entries, one for each of input_ids",
    ) -> np.ndarray:
        """Return a cell that must be a flat list of integers as an int64 array.

        Args:
            value: the cell.
            index: index of the row, for errors.
            column: column of the cell, for errors.
            length: number of integers that it must have; `None` for any number.
            items: what the integers are, for errors.

        Raises:
            DataError: if it is anything else.
        """
        array = None
        if isinstance(value, (list, tuple, np.ndarray)) or hasattr(value, "__array__"):
            with suppress(ValueError):  # raised by numpy for lists of unequal lengths
                array = np.asarray(value)
        # Booleans are allowed for masks. The dtype of an empty list does not matter.
        if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
            raise self.error(index, column, f"{value!r:.60} ({type(value).__name__})", "a list of integers")
        # Larger numbers would wrap around in int64, for example to the ignored label.
        if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise self.error(index, column, str(array.max()), "64-bit integers")
        if length is not None and len(array) != length:
            raise self.error(index, column, str(len(array)), f"{length} {items}")
        return array.astype(np.int64)

    def checked_ids(self, ids: np.ndarray, index: int, column: str, *, empty_allowed: bool = False) -> np.ndarray:
        """Check token ids and return them.

        Raises:
            DataError: if there are none (unless `empty_allowed`), or if one is outside the vocabulary.
        """
        if len(ids) == 0:
            if empty_allowed:
                return ids
            raise self.error(index, column, "no tokens", "at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
            limit = "" if self.vocab_size is None else f" to {self.vocab_size - 1}, the backbone's vocabulary"
            raise self.error(index, column, f"token id {low if low < 0 else high}", f"ids from 0{limit}")
        return ids

    def attended_ids(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the `input_ids` of a tokenised row without padding, and a bool mask `[L]` of the ids that are kept.

        Padding is removed because it would shift the positions of tokens in a packed stream.

        Raises:
            DataError: if ids or `attention_mask` cannot be read, or if the mask has a gap in the middle.
        """
        ids = self.integers(row["input_ids"], index, "input_ids")
        if row.get("attention_mask") is None:
            return self.checked_ids(ids, index, "input_ids"), np.ones(len(ids), dtype=bool)
        mask = self.integers(row["attention_mask"], index, "attention_mask", len(ids)) != 0
        places = np.flatnonzero(mask)
        # Removing a gap would change the positions of the tokens after it.
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise self.error(index, "attention_mask", "zeros in the middle", "zeros at the ends only (padding)")
        return self.checked_ids(ids[mask], index, "input_ids"), mask

    def token_columns(
        self, columns: Mapping[str, TokenColumn], row: Mapping[str, Any], index: int, keep: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the token columns of a tokenised row, by name: float32 or int64, `[L]` or `[L, K]`.

        Args:
            columns: the columns that the loss reads.
            row: the row.
            index: index of the row.
            keep: bool, which of the row's `input_ids` are not padding; L of them.

        Raises:
            DataError: if a column cannot be read; the message names the row and the column.
        """
        read: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            if row.get(name) is None:
                if column.is_required or (column.requires and row.get(column.requires) is not None):
                    needed = "a number for each of input_ids"
                    needed += "" if column.is_required else f', because the row has "{column.requires}"'
                    raise self.error(index, name, "no such column, or None", needed)
                continue
            length, array = len(keep), None
            with suppress(ValueError, TypeError):  # raised by numpy for lists of unequal lengths and None
                array = np.asarray(row[name], dtype=np.float64)
            if array is not None and array.ndim == 0 and column.may_be_row:
                array = np.full(length, array)
            if array is None or array.ndim != 1 + column.is_wide or len(array) != length or array.size == 0:
                got = f"{row[name]!r:.60}" if array is None else f"shape {list(array.shape)}"
                allowed = f"{length} lists of K numbers" if column.is_wide else f"{length} numbers"
                allowed += ", one for each of input_ids" + (" (or one number for all)" if column.may_be_row else "")
                raise self.error(index, name, got, allowed)
            values = array[keep]
            if column.is_ids:
                if not np.array_equal(array, np.floor(array)):
                    raise self.error(index, name, "fractions or NaN", "token ids")
                read[name] = values.astype(np.int64)
                self.checked_ids(read[name].reshape(-1), index, name, empty_allowed=True)
                continue
            read[name] = values = values.astype(np.float32)
            if not np.isfinite(values).all():
                raise self.error(index, name, "a number that is not finite", "finite numbers")
            if column.is_non_negative and values.size and float(values.min()) < 0:
                raise self.error(index, name, str(values.min()), "numbers of at least 0")
            if column.is_logprob and values.size and float(values.max()) > _ROUNDING:
                allowed = "natural logarithms of probabilities, at most 0"
                raise self.error(index, name, str(values.max()), allowed)
        for name in read:
            if columns[name].excludes in read:
                got = f'a value together with "{columns[name].excludes}"'
                raise self.error(index, name, got, "left out in that case")
            other = columns[name].requires
            if other and read[other].shape != read[name].shape:
                got = f"shape {list(read[name].shape)}"
                raise self.error(index, name, got, f'of shape {list(read[other].shape)}, as "{other}"')
        return read

    # ------------------------------------------------------------------------------------------------------ messages

    def messages(self, row: Mapping[str, Any], column: str, index: int) -> list[dict[str, Any]]:
        """Return the messages of a cell.

        Raises:
            DataError: if it is not a list of messages, or if a message has no role or no content, or content such as
                `None` or 7, which a template would render as text.
        """
        value = row[column]
        allowed = 'a list of {"role": ..., "content": ...}'
        if not isinstance(value, list) or not value:
            raise self.error(index, column, f"{value!r:.60} ({type(value).__name__})", allowed)
        for message in value:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise self.error(index, column, f"{message!r:.60}", allowed, _hint(row))
            self.text(message, "role", index)
            content = message["content"]
            if isinstance(content, str):
                self.text(message, "content", index)
                continue
            # Messages with only tool calls have no text; templates expect None.
            only_calls = content is None and bool(message.get("tool_calls"))
            is_parts = isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content)
            if not only_calls and not is_parts:
                got = f"content {content!r:.60} ({type(content).__name__})"
                raise self.error(index, column, got, "text, a list of parts, or None together with tool_calls")
            for part in content or ():
                if part.get("type", "text") != "text":
                    wanted = 'parts of type "text", because only text is supported'
                    raise self.error(index, column, f"a part of type {part['type']!r:.60}", wanted)
                if "text" not in part:
                    raise self.error(index, column, f"the part {part!r:.60}", '{"type": "text", "text": ...}')
                self.text(part, "text", index)
        return [dict(message) for message in value]

    def apply_template(self, messages: list[dict[str, Any]], column: str, index: int, **options: Any) -> Any:
        """Apply the chat template to messages.

        Args:
            messages: the input of the template.
            column: column of the messages, for errors.
            index: index of the row, for errors.
            **options: further arguments of `apply_chat_template`.

        Raises:
            DataError: if there is no template, or if the template fails on these messages.
        """
        if self.chat_template is None and getattr(self.tokenizer, "chat_template", None) is None:
            raise DataError(
                f"{self.where} has messages, which need a tokenizer with a chat template or "
                f"tasks.{self.where.split('.')[1]}.chat_template. Use the tokenizer of an instruct model, or pass a "
                "Jinja template."
            )
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=self.chat_template, **options)
        except Exception as error:
            # A template is code and may raise any exception, for example for an unknown role.
            got = f"{describe_error(error)} from the chat template"
            raise self.error(index, column, got, "messages that the template accepts") from error

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        column: str,
        index: int,
        *,
        is_prompt: bool = False,
        wants_mask: bool = False,
        row: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], np.ndarray | None]:
        """Return the token ids of messages, and the mask of assistant tokens, or `None` without `wants_mask`.

        Args:
            messages: the input of the template.
            column: column of the messages, for errors.
            index: index of the row, for errors.
            is_prompt: whether to append the generation prompt.
            wants_mask: whether to return the mask.
            row: the row, whose columns `tools` and `chat_template_kwargs` are passed to the template, as in TRL.

        Raises:
            DataError: see `apply_template` and `_assistant_turns`; also if `tools` is not a list of functions, or its
                JSON.
        """
        options: dict[str, Any] = {}
        if row is not None:
            options = {**(row.get("chat_template_kwargs") or {})}
            tools = row.get("tools")
            if isinstance(tools, str) and tools:
                with suppress(ValueError):
                    tools = json.loads(tools)
            if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
                allowed = "a list of JSON schemas of functions, or its JSON text"
                raise self.error(index, "tools", f"{tools!r:.60}", allowed)
            if tools:
                options["tools"] = tools
        template = self.chat_template or getattr(self.tokenizer, "chat_template", None)
        if wants_mask and not _GENERATION_BLOCK.search(str(template)):
            text, turns = self._assistant_turns(messages, column, index, options)
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            starts, ends = np.asarray(encoded["offset_mapping"]).reshape(-1, 2).T
            of_turns = [(starts < end) & ((start <= starts) | (start < ends)) for start, end in turns]
            return encoded["input_ids"], np.any([np.zeros(len(starts), dtype=bool), *of_turns], axis=0)
        options |= {"return_dict": True, "tokenize": True, "return_assistant_tokens_mask": wants_mask}
        encoded = self.apply_template(messages, column, index, add_generation_prompt=is_prompt, **options)
        mask = np.asarray(encoded["assistant_masks"], dtype=bool) if wants_mask else None
        return encoded["input_ids"], mask

    def _assistant_turns(
        self, messages: list[dict[str, Any]], column: str, index: int, options: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages, and the characters in it that the assistant's turns begin and end at.

        For templates that do not mark them: a turn begins after the generation prompt of the messages before it, and
        ends where the text of the messages up to it ends. Both texts must be beginnings of the whole.

        Raises:
            DataError: if one of them is not.
        """
        options = {**options, "tokenize": False}
        text = self.apply_template(messages, column, index, **options)
        turns = []
        for number in [number for number, message in enumerate(messages) if message["role"] == "assistant"]:
            before = self.apply_template(messages[:number], column, index, add_generation_prompt=True, **options)
            until = self.apply_template(messages[: number + 1], column, index, **options)
            if not text.startswith(before) or not until.startswith(before) or not text.startswith(until):
                got = f"other text up to message {number} once all are rendered"
                allowed = (
                    "messages whose text later messages do not change: assistant_only_loss finds the assistant's turns "
                    "by it in a chat template without a {% generation %} block"
                )
                fix = "Pass a chat_template with the block; TRL's get_training_chat_template(tokenizer) returns one."
                raise self.error(index, column, got, allowed, fix)
            turns.append((len(before), len(until)))
        return text, turns


def _hint(row: Mapping[str, Any]) -> str:
    return 'These are sharegpt rows: set row_format="sharegpt" on the task.' if "conversations" in row else ""


def with_given_targets(labels: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the labels, ignoring tokens whose weights are all 0.

    If a token has several targets, its label is the first of them; a token that the row ignores stays ignored.

    Args:
        labels: `[L]`, the labels of the row.
        columns: token columns of the row; without `weights` or `target_ids` the labels are unchanged.
    """
    # Positions without a positive weight have no loss, so the output head skips them.
    if "weights" in columns:
        return np.where(columns["weights"] > 0, labels, IGNORE_INDEX)
    if "target_ids" not in columns:
        return labels
    is_target = (columns["target_weights"] > 0).any(axis=1)
    return np.where(is_target & (labels != IGNORE_INDEX), columns["target_ids"][:, 0], IGNORE_INDEX)
