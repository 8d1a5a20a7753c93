"""Chat messages to tokens: checks on each message, the chat template, and the mask of what the assistant says."""

# MERGED: What becomes of rows longer than a task's limit: cut, left out or refused; and the counts of what became of
# MERGED: rows.
# MERGED: Rows of sequence classification and regression to sequences: text, pairs of texts or token ids, and a label.
# MERGED: `RowReader`: how rows of a form of their own become sequences, and what such a reader is made with.
# MERGED: A loss whose rows are neither text nor text with a label names a maker of readers in its `RowForm`.
# MERGED: Rows of token classification: token ids with a class for each, or words with a class for each.
# MERGED: Columns of tokenised rows with a number for each token: weights, advantages, log-probabilities of a teacher.

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from peft_mux.data.formats import LABEL_COLUMNS, DataFormat, RowCells, RowForm, TokenColumn
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence
from peft_mux.errors import DataError
from peft_mux.user_code import describe_error


class ChatRows:
    """Reads the messages of rows and passes them through a chat template.

    Args:
        cells: reads the cells of the rows and names the dataset.
        tokenizer: a tokenizer of transformers.
        task: name of the task, for messages.
        chat_template: Jinja template in place of the tokenizer's own; `None` for that of the tokenizer.
        assistant_only_loss: whether only what the assistant says carries loss.
    """

    def __init__(
        self, cells: RowCells, tokenizer: Any, *, task: str, chat_template: str | None, assistant_only_loss: bool
    ) -> None:
        """Keep what the template needs."""
        self.task = task
        self.chat_template = chat_template
        self.assistant_only_loss = assistant_only_loss
        self._cells = cells
        self._tokenizer = tokenizer

    def messages(self, row: Mapping[str, Any], column: str, index: int) -> list[dict[str, Any]]:
        """Return the messages of a cell.

        Raises:
            DataError: if it is no list of messages, or if a message has no role or no content.
        """
        value = row[column]
        allowed = 'a list of {"role": ..., "content": ...}'
        if not isinstance(value, list) or not value:
            raise self._cells.error(index, column, f"{value!r:.60} ({type(value).__name__})", allowed)
        for message in value:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise self._cells.error(index, column, f"{message!r:.60}", allowed)
            self._cells.text(message, "role", index)
            self._check_content(message, index, column)
        return [dict(message) for message in value]

    def _check_content(self, message: Mapping[str, Any], index: int, column: str) -> None:
        """Refuse a content that a template would turn into text of its own, such as `None` or 7."""
        content = message["content"]
        if isinstance(content, str):
            self._cells.text(message, "content", index)
            return
        # A message that only calls tools has no text, and templates expect None there.
        only_calls = content is None and bool(message.get("tool_calls"))
        is_parts = isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content)
        if not only_calls and not is_parts:
            got = f"content {content!r:.60} ({type(content).__name__})"
            raise self._cells.error(index, column, got, "text, a list of parts, or None beside tool_calls")
        for part in content or ():
            if part.get("type", "text") != "text":
                got, allowed = (
                    f"a part of type {part['type']!r:.60}",
                    'parts of type "text", as only text is trained on',
                )
                raise self._cells.error(index, column, got, allowed)
            if "text" not in part:
                raise self._cells.error(index, column, f"the part {part!r:.60}", '{"type": "text", "text": ...}')
            self._cells.text(part, "text", index)

    def encode(self, messages: list[dict[str, Any]], column: str, index: int) -> tuple[list[int], np.ndarray | None]:
        """Return the token ids of messages, and which of them the assistant says where only those carry loss.

        Args:
            messages: what the template is given.
            column: the column that they stand in, for messages.
            index: the row that they stand in, for messages.

        Raises:
            DataError: if there is no template, if it does not mark what the assistant says though that is asked for,
                or if it fails on these messages.
        """
        return self._apply_template(messages, column, index, wants_mask=self.assistant_only_loss)

    def encode_prompt(self, messages: list[dict[str, Any]], column: str, index: int) -> list[int]:
        """Return the token ids of messages up to where the assistant's answer begins.

        Args:
            messages: what the template is given.
            column: the column that they stand in, for messages.
            index: the row that they stand in, for messages.

        Raises:
            DataError: if there is no template, or if it fails on these messages.
        """
        return self._apply_template(messages, column, index, wants_mask=False, add_generation_prompt=True)[0]

    def render(self, messages: list[dict[str, Any]], column: str, index: int, *, is_prompt: bool = False) -> str:
        """Return the text that the template makes of messages.

        Args:
            messages: what the template is given.
            column: the column that they stand in, for messages.
            index: the row that they stand in, for messages.
            is_prompt: whether the assistant goes on from here: with an answer to the user or to a tool, or, where the
                last message is its own, with that message.

        Raises:
            DataError: if there is no template, if it fails on these messages, or if a prompt ends in another role.
        """
        self._template()
        last = messages[-1]["role"]
        if is_prompt and last not in ("user", "tool", "assistant"):
            raise self._cells.error(index, column, f"a last message of {last!r}", "user, tool or assistant as its role")
        options = {"add_generation_prompt": last != "assistant", "continue_final_message": last == "assistant"}
        return self._rendered(messages, column, index, tokenize=False, **(options if is_prompt else {}))

    def _rendered(self, messages: list[dict[str, Any]], column: str, index: int, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, chat_template=self.chat_template, **options)
        except Exception as error:
            # A template is code: it may refuse a role, lack a name, or make text that is none.
            got = f"{describe_error(error)} from the chat template"
            raise self._cells.error(index, column, got, "messages that the template takes") from error

    def _template(self) -> Any:
        template = self.chat_template or getattr(self._tokenizer, "chat_template", None)
        if template is None:
            raise DataError(
                f"{self._cells.where}: got messages, but the tokenizer has no chat template; allowed: one with it, or "
                f"tasks.{self.task}.chat_template. Take an instruct model's tokenizer, or a Jinja template."
            )
        return template

    def _apply_template(
        self,
        messages: list[dict[str, Any]],
        column: str,
        index: int,
        *,
        wants_mask: bool,
        add_generation_prompt: bool = False,
    ) -> tuple[list[int], np.ndarray | None]:
        template = self._template()
        # transformers only warns of this, and returns a mask in which no token carries loss.
        if wants_mask and "generation" not in str(template):
            raise DataError(
                f"tasks.{self.task}.assistant_only_loss: got True, but the chat template has no "
                "{% generation %} block; allowed: a template that marks what the assistant says. Set "
                "assistant_only_loss=False, or give chat_template."
            )
        encoded = self._rendered(
            messages,
            column,
            index,
            add_generation_prompt=add_generation_prompt,
            return_dict=True,
            tokenize=True,
            return_assistant_tokens_mask=wants_mask,
        )
        if not wants_mask:
            return encoded["input_ids"], None
        return encoded["input_ids"], np.asarray(encoded["assistant_masks"], dtype=bool)


@dataclass(slots=True)
class RowCounts:
    """What became of the rows so far.

    Attributes:
        num_truncated: rows that were cut to the limit.
        num_dropped_long: rows that were left out because they are longer than the limit.
        num_without_targets: rows that were left out because no token of theirs carries loss.
        num_masked: those rows without targets whose labels were all masked before any cut.
    """

    num_truncated: int = 0
    num_dropped_long: int = 0
    num_without_targets: int = 0
    num_masked: int = 0


class LengthLimit:
    """Applies a task's policy to rows that are too long, and counts what it does.

    Args:
        num_tokens: longest sequence that is kept whole.
        why: what sets that limit, for messages: `max_length` or the backbone's positions.
        policy: "truncate", "drop" or "error".
        cells: makes the error that names the row.
        counts: receives the numbers of rows cut and left out.
    """

    def __init__(self, num_tokens: int, why: str, policy: str, cells: RowCells, counts: RowCounts) -> None:
        """Keep the limit, its policy and where to count."""
        self.num_tokens = num_tokens
        self.why = why
        self.policy = policy
        self._cells = cells
        self._counts = counts

    def cut(self, ids: np.ndarray, labels: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return token ids and labels within the limit, or `None` where the row is left out.

        Raises:
            DataError: if the row is too long and the policy is "error".
        """
        if len(ids) <= self.num_tokens:
            return ids, labels
        if self.drops(index, len(ids)):
            return None
        # The beginning is kept, as TRL does.
        return ids[: self.num_tokens], labels[: self.num_tokens]

    def drops(self, index: int, length: int) -> bool:
        """Count a row that is too long as left out or as cut; return whether it is left out.

        Raises:
            DataError: if the policy is "error".
        """
        if self.policy == "error":
            raise self._cells.error(
                index,
                "input_ids",
                f"{length} tokens or more",
                f"at most {self.num_tokens} ({self.why}); shorten the row",
            )
        if self.policy == "drop":
            self._counts.num_dropped_long += 1
            return True
        self._counts.num_truncated += 1
        return False


CLASS_LABELS = "class_labels"
"""Row value with a number for each class, of multi-label classification and of regressions on several values."""

_BEYOND_CLASSES, _BEYOND_NUMBERS = 2**31, 2**63
_truncation = threading.Lock()
"""Held while a tokenizer cuts: the limit is a setting of the one tokenizer that the threads of all tasks share."""


class LabelledRows:
    """Turns rows with a class or a value into sequences.

    Args:
        cells: reads the cells of the rows.
        limit: what becomes of rows that are too long.
        tokenizer: a tokenizer of transformers; may be `None` for rows that are tokenised already.
        is_tokenised: whether rows have `input_ids` rather than `text`.
        num_labels: number of classes; 1 for regression, `None` where it is not known.
    """

    def __init__(
        self, cells: RowCells, limit: LengthLimit, tokenizer: Any, *, is_tokenised: bool, num_labels: int | None
    ) -> None:
        """Keep what every row is read with."""
        self.is_tokenised = is_tokenised
        self.num_labels = num_labels
        self._cells = cells
        self._limit = limit
        self._tokenizer = tokenizer
        # Of every row as of the first one; `None` before it, 0 where rows have one class or one value.
        self._num_values: int | None = None

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row with its label, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        column = next((name for name in LABEL_COLUMNS if row.get(name) is not None), None)
        if column is None:
            raise self._cells.error(index, "label", "no such column, or None", "a class (int) or a value (float)")
        encoded = self._token_ids(row, index) if self.is_tokenised else self._encoded_text(row, index)
        if encoded is None:
            return None
        ids, types = encoded
        ids = self._cells.checked_ids(ids, index, "input_ids")
        # Tokens carry no labels here, so the ids stand in for them.
        kept = self._limit.cut(ids, ids, index)
        if kept is None:
            return None
        # Rows are cut at their end, so the types are cut alike.
        types = None if types is None else types[: len(kept[0])]
        if isinstance(row[column], (list, tuple, np.ndarray)) and np.ndim(row[column]) > 0:
            values = {CLASS_LABELS: self._labels(row[column], index, column)}
            return TokenSequence(kept[0], kept[1], index, 0, types, row_values=values)
        if self._num_values:
            raise self._cells.error(
                index, column, repr(row[column]), f"a list of {self._num_values} numbers, as before"
            )
        self._num_values = 0
        return TokenSequence(kept[0], kept[1], index, self._label(row[column], index, column), types)

    def _labels(self, value: Any, index: int, column: str) -> np.ndarray:
        """Return the labels of a row that has one for each class: 0 to 1, or values of a regression."""
        if self._num_values == 0:
            raise self._cells.error(index, column, f"{value!r:.60}", "one class or one value, as before")
        with suppress(ValueError, TypeError):  # numpy's, of lists within lists and of None
            array = np.asarray(value, dtype=np.float32)
            count = self._num_values or self.num_labels or len(array)
            if array.ndim == 1 and len(array) == count and count > 1 and np.isfinite(array).all():
                self._num_values = count
                return array
        wanted = self._num_values or self.num_labels
        allowed = f"{wanted} finite numbers" if wanted else "finite numbers, at least two"
        raise self._cells.error(index, column, f"{value!r:.60}", f"a list of {allowed}, one for each class")

    def _token_ids(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray | None]:
        ids = self._cells.integers(row["input_ids"], index, "input_ids")
        keep = self._cells.attended(row, index, len(ids))
        if row.get("token_type_ids") is None:
            return ids[keep], None
        return ids[keep], self._cells.integers(row["token_type_ids"], index, "token_type_ids")[keep]

    def _encoded_text(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray | None] | None:
        pair = self._cells.text(row, "text_pair", index) if row.get("text_pair") is not None else None
        limit = self._limit.num_tokens
        text = self._cells.text(row, "text", index)
        with _truncation:
            # The tokenizer cuts, not we: it shortens the longer text of a pair and keeps the special tokens at the end.
            encoded = self._tokenizer(text, pair, truncation=True, max_length=limit)
            # Encoded once more without a limit, but only where the cut may have taken something.
            is_longer = len(encoded["input_ids"]) == limit and len(self._tokenizer(text, pair)["input_ids"]) > limit
        ids, types = np.asarray(encoded["input_ids"], dtype=np.int64), None
        # Zeros are what `None` stands for: streams without pairs carry no tensor of types.
        if encoded.get("token_type_ids") is not None and any(encoded["token_type_ids"]):
            types = np.asarray(encoded["token_type_ids"], dtype=np.int64)
        if is_longer and self._limit.drops(index, len(ids) + 1):
            return None
        return ids, types

    def _label(self, value: Any, index: int, column: str) -> int | float:
        # Rows in numpy format hold numpy's scalars, whose integers are no `int`.
        if isinstance(value, np.generic):
            value = value.item()
        classes = self.num_labels
        allowed = f"a class from 0 to {classes - 1}" if classes else "a class (int, at least 0) or a value (float)"
        if isinstance(value, float) and value == value and abs(value) != float("inf") and classes in (None, 1):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            # One class is a regression, where whole numbers are values, too.
            if classes == 1 and abs(value) < _BEYOND_NUMBERS:
                return float(value)
            if classes != 1 and 0 <= value < (classes or _BEYOND_CLASSES):
                return value
        raise self._cells.error(index, column, repr(value), allowed)


@dataclass(frozen=True, slots=True)
class RowTools:
    """What a reader reads the rows of one dataset with.

    Attributes:
        data_format: the format that was recognised.
        cells: reads single cells, and makes the error that names row and column.
        limit: what becomes of rows that are too long.
        counts: counts the rows that are left out.
        chat_rows: applies the chat template to lists of messages.
        tokenizer: a tokenizer of transformers; may be `None` for rows that are tokenised already.
        prompt_completion: returns the ids of a prompt with its completion, and masks of what carries loss, with TRL's
            meaning (`EOS` added, the completion begins where the tokens of the prompt alone end); given a mapping with
            `prompt` and `completion`, texts or messages, and the index of the row.
        num_labels: number of classes; 1 for regression, `None` where it is not known.
    """

    data_format: DataFormat
    cells: RowCells
    limit: LengthLimit
    counts: RowCounts
    chat_rows: ChatRows
    tokenizer: Any
    prompt_completion: Callable[[Mapping[str, Any], int], tuple[Sequence[int], list[np.ndarray]]]
    num_labels: int | None


class RowReader(Protocol):
    """Turns rows of one form into sequences."""

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        ...


RowReaderMaker = Callable[[RowTools], RowReader]
"""Makes the reader of one dataset."""


TAG_COLUMNS = ("labels", "ner_tags", "pos_tags", "chunk_tags", "tags", "label")
"""Columns that may hold the classes of words, in the order in which they are looked for."""


class TaggedRows:
    """Turns rows with a class for each token, or for each word, into sequences.

    Of a word that becomes several tokens the first alone has the class, as in the examples of transformers.

    Args:
        tools: what the rows of one dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools
        self._cells = tools.cells

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        is_tokenised = self._tools.data_format is DataFormat.TOKENIZED
        ids, labels = self._tokenised(row, index) if is_tokenised else self._words(row, index)
        ids = self._cells.checked_ids(ids, index, "input_ids")
        kept = self._tools.limit.cut(ids, labels, index)
        if kept is None:
            return None
        if not np.any(kept[1] != IGNORE_INDEX):
            self._tools.counts.num_without_targets += 1
            self._tools.counts.num_masked += not np.any(labels != IGNORE_INDEX)
            return None
        return TokenSequence(kept[0], kept[1], index, labels_itself=True)

    def _tokenised(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self._cells.integers(row["input_ids"], index, "input_ids")
        keep = self._cells.attended(row, index, len(ids))
        return ids[keep], self._classes(row, index, ("labels",), len(ids))[keep]

    def _words(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        words = row["tokens"]
        if not isinstance(words, (list, tuple)) or not words or not all(isinstance(word, str) for word in words):
            raise self._cells.error(index, "tokens", f"{words!r:.60}", "a list of words (strings), at least one")
        classes = self._classes(row, index, TAG_COLUMNS, len(words))
        if not getattr(self._tools.tokenizer, "is_fast", False):
            got = "words, with a tokenizer that does not tell which word a token is of"
            raise self._cells.error(index, "tokens", got, "a fast tokenizer, or rows with input_ids and labels")
        encoded = self._tools.tokenizer(list(words), is_split_into_words=True)
        labels, before = [], None
        for word in encoded.word_ids():
            labels.append(IGNORE_INDEX if word is None or word == before else int(classes[word]))
            before = word
        return np.asarray(encoded["input_ids"], dtype=np.int64), np.asarray(labels, dtype=np.int64)

    def _classes(self, row: Mapping[str, Any], index: int, columns: tuple[str, ...], count: int) -> np.ndarray:
        """Return the class of each token or word, checked."""
        column = next((name for name in columns if row.get(name) is not None), None)
        if column is None:
            raise self._cells.error(index, columns[0], "no such column, or None", f"{count} classes, one for each")
        labels = self._cells.integers(row[column], index, column)
        if len(labels) != count:
            raise self._cells.error(index, column, f"{len(labels)} classes", f"{count}, one for each")
        greatest = (self._tools.num_labels or 2**31) - 1
        wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels > greatest))
        if wrong.any():
            allowed = f"classes from 0{f' to {greatest}' if self._tools.num_labels else ''}, or -100 for none"
            raise self._cells.error(index, column, str(labels[wrong][0]), allowed)
        return labels


TAGGED_ROWS = RowForm((DataFormat.TOKENIZED, DataFormat.WORDS), has_token_labels=True, reader=TaggedRows)
"""Tokens or words with a class for each."""


_ROUNDING = 0.01
"""By how much a log-probability may exceed 0: half precision of another program rounds so."""


def read_columns(
    columns: Mapping[str, TokenColumn], row: Mapping[str, Any], index: int, keep: np.ndarray, cells: RowCells
) -> dict[str, np.ndarray]:
    """Return the token columns of a tokenised row, by name: float32 or int64, `[L]` or `[L, K]`.

    Args:
        columns: the columns that the loss reads.
        row: the row.
        index: index of the row.
        keep: bool, which of the row's `input_ids` are no padding; L of them.
        cells: makes the error that names row and column.

    Raises:
        DataError: naming the row and the column that cannot be read.
    """
    found: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if row.get(name) is None:
            if column.is_required:
                raise cells.error(index, name, "no such column, or None", "a number for each of input_ids")
            if column.beside and row.get(column.beside) is not None:
                raise cells.error(index, name, "no such column, or None", f'one beside "{column.beside}"')
            continue
        values = _array(name, column, row[name], index, len(keep), cells)[keep]
        _check_values(name, column, values, index, cells)
        found[name] = values
    for name in found:
        if columns[name].not_beside in found:
            raise cells.error(index, name, f'a value beside "{columns[name].not_beside}"', "one of the two")
        other = columns[name].beside
        if other and found[other].shape != found[name].shape:
            got = f"shape {list(found[name].shape)}"
            raise cells.error(index, name, got, f'{list(found[other].shape)}, as "{other}" has')
    return found


def with_given_targets(labels: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return labels of the tokens that are learnt: those whose weight, or weights of several targets, are not all 0.

    Several targets of a token are told by the first of them; a token that is ignored in the row stays so.

    Args:
        labels: `[L]`, of the row as it came.
        columns: token columns of the row; without `weights` or `target_ids` the labels stay as they are.
    """
    # Where no weight is above 0 nothing is learnt, so the position never meets the output head.
    if "weights" in columns:
        return np.where(columns["weights"] > 0, labels, IGNORE_INDEX)
    if "target_ids" not in columns:
        return labels
    is_target = (columns["target_weights"] > 0).any(axis=1)
    return np.where(is_target & (labels != IGNORE_INDEX), columns["target_ids"][:, 0], IGNORE_INDEX)


def _array(name: str, column: TokenColumn, value: Any, index: int, length: int, cells: RowCells) -> np.ndarray:
    shape = f"{length} lists of K numbers" if column.is_wide else f"{length} numbers"
    shape += ", one for each of input_ids" + (" (or one number for all)" if column.may_be_row else "")
    array = None
    with suppress(ValueError, TypeError):  # numpy's, of lists of unequal lengths and of None
        array = np.asarray(value, dtype=np.float64)
    if array is not None and array.ndim == 0 and column.may_be_row:
        array = np.full(length, array)
    if array is None or array.ndim != 1 + column.is_wide or len(array) != length or array.size == 0:
        got = f"{value!r:.60}" if array is None else f"shape {list(array.shape)}"
        raise cells.error(index, name, got, shape)
    return (
        array.astype(np.int64) if column.is_ids and np.array_equal(array, np.floor(array)) else array.astype(np.float32)
    )


def _check_values(name: str, column: TokenColumn, values: np.ndarray, index: int, cells: RowCells) -> None:
    if column.is_ids:
        if values.dtype != np.int64:
            raise cells.error(index, name, "numbers with fractions, or no numbers", "token ids")
        cells.checked_ids(values.reshape(-1), index, name, empty_allowed=True)
    elif not np.isfinite(values).all():
        raise cells.error(index, name, "a number that is not finite", "finite numbers")
    elif column.is_non_negative and values.size and float(values.min()) < 0:
        raise cells.error(index, name, str(values.min()), "numbers of at least 0")
    elif column.is_logprob and values.size and float(values.max()) > _ROUNDING:
        raise cells.error(index, name, str(values.max()), "natural logarithms of probabilities, at most 0")
