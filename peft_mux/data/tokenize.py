"""One row in, one `TokenSequence` out: templates, loss masks, truncation, and every check on a row.

Meanings are those of TRL's `SFTTrainer`: EOS is added to text and completions, the loss of `prompt`/`completion`
rows is on the completion unless `completion_only_loss=False`, and `assistant_only_loss` needs generation blocks in
the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_mux.data.batch import IGNORE_INDEX, TokenSequence
from peft_mux.data.formats import LABEL_COLUMNS, DataFormat, required_columns
from peft_mux.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeOptions:
    """How the rows of one task become tokens; names as in `Task`.

    Attributes:
        task: name, for messages.
        overlong_policy: "truncate", "drop" or "error".
        vocab_size: ids must be below it; `None` for no check.
        max_positions: longest sequence that the backbone knows; `None` for no limit.
    """

    task: str
    max_length: int
    overlong_policy: str = "truncate"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    chat_template: str | None = None
    is_classification: bool = False
    num_labels: int | None = None
    vocab_size: int | None = None
    max_positions: int | None = None

    @property
    def limit(self) -> int:
        """Longest sequence that is kept whole."""
        return self.max_length if self.max_positions is None else min(self.max_length, self.max_positions)


@dataclass(slots=True)
class RowCounts:
    """What became of the rows so far.

    Attributes:
        num_truncated: cut to the limit.
        num_dropped_long: left out for being longer.
        num_without_targets: left out because no token of theirs carries loss.
        num_masked: of these, rows whose labels were all masked before any cut.
    """

    num_truncated: int = 0
    num_dropped_long: int = 0
    num_without_targets: int = 0
    num_masked: int = 0


class RowTokenizer:
    """Turns rows of one format into sequences, and counts what it leaves out.

    Args:
        options: of the task.
        tokenizer: of transformers; may be `None` for tokenised rows.
        data_format: of the rows.
        split: name of the dataset, for messages.

    Raises:
        ConfigError: if the options cannot apply to this format.
        DataError: if the format needs a tokenizer or a template that is not there.
    """

    def __init__(
        self, options: TokenizeOptions, tokenizer: Any, data_format: DataFormat, split: str = "train_dataset"
    ) -> None:
        """Check that options, tokenizer and format fit together."""
        self.options = options
        self.tokenizer = tokenizer
        self.data_format = data_format
        self.where = f"tasks.{options.task}.{split}"
        self.counts = RowCounts()
        self._warned_prefix = False
        self._check()

    def _check(self) -> None:
        options, task = self.options, f"tasks.{self.options.task}"
        if self.tokenizer is None and self.data_format is not DataFormat.TOKENIZED:
            raise DataError(
                f"{self.where}: got {self.data_format} rows without a tokenizer; allowed: tokenised rows, or a "
                "processing_class. Pass processing_class=AutoTokenizer.from_pretrained(...)."
            )
        if options.completion_only_loss and self.data_format not in (
            DataFormat.PROMPT_COMPLETION,
            DataFormat.TOKENIZED,
        ):
            raise ConfigError(
                f"{task}.completion_only_loss: got True for {self.data_format} rows; allowed: True for "
                "prompt/completion rows (or tokenised rows with a completion_mask)."
            )
        if options.assistant_only_loss and self.data_format is DataFormat.TEXT:
            raise ConfigError(
                f"{task}.assistant_only_loss: got True for {self.data_format} rows; allowed: True for messages."
            )

    def __call__(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        for column in required_columns(self.data_format):
            if column not in row:
                raise self.error(index, column, "no such column", "the same columns in every row")
        if self.options.is_classification:
            return self._classified(row, index)
        ids, labels = self._tokens_and_labels(row, index)
        if not np.any(labels[1:] != IGNORE_INDEX):
            self.counts.num_without_targets += 1
            self.counts.num_masked += 1
            return None
        kept = self._limited(index, ids, labels)
        if kept is None:
            return None
        ids, labels = kept
        if not np.any(labels[1:] != IGNORE_INDEX):
            self.counts.num_without_targets += 1
            return None
        return TokenSequence(ids, labels, index)

    def error(self, index: int, column: str, got: str, allowed: str) -> DataError:
        """Return the error for one cell."""
        return DataError(f"{self.where} row {index} column {column}: got {got}; allowed: {allowed}.")

    # ------------------------------------------------------------ formats

    def _tokens_and_labels(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        if self.data_format is DataFormat.TOKENIZED:
            return self._tokenised(row, index)
        masks: list[np.ndarray] = []
        if self.data_format is DataFormat.TEXT:
            ids = self._encode(self._with_eos(self._text(row, "text", index)))
        elif self.data_format is DataFormat.MESSAGES:
            ids, mask = self._chat(self._messages(row, "messages", index), index)
            masks += [mask] if mask is not None else []
        else:
            ids, masks = self._prompt_completion(row, index)
        ids = self._checked_ids(np.asarray(ids, dtype=np.int64), index, "input_ids")
        return ids, _masked(ids, masks)

    def _prompt_completion(self, row: Mapping[str, Any], index: int) -> tuple[Sequence[int], list[np.ndarray]]:
        masks = []
        if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
            prompt, completion = (self._messages(row, column, index) for column in ("prompt", "completion"))
            prompt_ids, _ = self._chat(prompt, index, add_generation_prompt=True, return_mask=False)
            ids, assistant = self._chat(prompt + completion, index)
            masks += [assistant] if assistant is not None else []
        else:
            prompt_text = self._text(row, "prompt", index)
            completion_text = self._with_eos(self._text(row, "completion", index))
            prompt_ids, ids = self._encode(prompt_text), self._encode(prompt_text + completion_text)
        if self.options.completion_only_loss is not False:
            start = _common_prefix(prompt_ids, ids)
            masks.append(np.arange(len(ids)) >= start)
        return ids, masks

    def _tokenised(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self._integers(row["input_ids"], index, "input_ids")
        keep = self._attended(row, index, len(ids))
        ids = self._checked_ids(ids[keep], index, "input_ids")
        if row.get("labels") is not None:
            labels = self._integers(row["labels"], index, "labels")
            if len(labels) != len(keep):
                raise self.error(index, "labels", f"{len(labels)} labels", f"{len(keep)}, one for each of input_ids")
            labels = labels[keep]
            self._checked_ids(labels[labels != IGNORE_INDEX], index, "labels", empty_allowed=True)
            return ids, labels
        masks = []
        for column, applies in (
            ("completion_mask", self.options.completion_only_loss is not False),
            ("assistant_masks", True),
        ):
            if applies and row.get(column) is not None:
                mask = self._integers(row[column], index, column)
                if len(mask) != len(keep):
                    raise self.error(index, column, f"{len(mask)} entries", f"{len(keep)}, one for each of input_ids")
                masks.append(mask[keep] != 0)
        return ids, _masked(ids, masks)

    def _attended(self, row: Mapping[str, Any], index: int, length: int) -> np.ndarray:
        """Return which positions are no padding; a hole in the middle is refused."""
        if row.get("attention_mask") is None:
            return np.ones(length, dtype=bool)
        mask = self._integers(row["attention_mask"], index, "attention_mask") != 0
        if len(mask) != length:
            raise self.error(index, "attention_mask", f"{len(mask)} entries", f"{length}, one for each of input_ids")
        places = np.flatnonzero(mask)
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise self.error(index, "attention_mask", "a hole in the middle", "zeros at the ends only (padding)")
        return mask

    def _classified(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        column = next((name for name in LABEL_COLUMNS if row.get(name) is not None), None)
        if column is None:
            raise self.error(index, "label", "no such column, or None", "a class (int) or a value (float)")
        types = None
        if self.data_format is DataFormat.TOKENIZED:
            ids = self._integers(row["input_ids"], index, "input_ids")
            keep = self._attended(row, index, len(ids))
            ids = ids[keep]
            if row.get("token_type_ids") is not None:
                types = self._integers(row["token_type_ids"], index, "token_type_ids")[keep]
        else:
            pair = self._text(row, "text_pair", index) if row.get("text_pair") is not None else None
            encoded = self.tokenizer(
                self._text(row, "text", index), pair, truncation=True, max_length=self.options.limit
            )
            whole = len(encoded["input_ids"])
            ids = np.asarray(encoded["input_ids"], dtype=np.int64)
            if encoded.get("token_type_ids") is not None and any(encoded["token_type_ids"]):
                types = np.asarray(encoded["token_type_ids"], dtype=np.int64)
            is_longer = whole == self.options.limit and self._is_longer(row, pair)
            if is_longer and self._refused_length(index, whole + 1):
                return None
        ids = self._checked_ids(ids, index, "input_ids")
        kept = self._limited(index, ids, ids)
        if kept is None:
            return None
        types = None if types is None else types[: len(kept[0])]
        return TokenSequence(kept[0], kept[1], index, self._class(row[column], index, column), types)

    def _is_longer(self, row: Mapping[str, Any], pair: str | None) -> bool:
        return len(self.tokenizer(row["text"], pair)["input_ids"]) > self.options.limit

    def _class(self, value: Any, index: int, column: str) -> int | float:
        if isinstance(value, np.generic):
            value = value.item()
        classes = self.options.num_labels
        allowed = f"a class from 0 to {classes - 1}" if classes else "a class (int, at least 0) or a value (float)"
        if isinstance(value, float) and value == value and abs(value) != float("inf") and classes in (None, 1):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            if classes == 1:
                return float(value)
            if value >= 0 and (classes is None or value < classes):
                return value
        raise self.error(index, column, repr(value), allowed)

    # --------------------------------------------------------------- pieces

    def _text(self, row: Mapping[str, Any], column: str, index: int) -> str:
        value = row[column]
        if not isinstance(value, str):
            raise self.error(index, column, f"{value!r:.60} ({type(value).__name__})", "a string")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self.error(index, column, f"a lone surrogate at character {error.start}", "valid Unicode") from error
        if "\0" in value:
            raise self.error(index, column, f"a NUL character at {value.index(chr(0))}", "text without NUL")
        return value

    def _messages(self, row: Mapping[str, Any], column: str, index: int) -> list[dict[str, Any]]:
        value = row[column]
        allowed = 'a list of {"role": ..., "content": ...}'
        if not isinstance(value, list) or not value:
            raise self.error(index, column, f"{value!r:.60} ({type(value).__name__})", allowed)
        for message in value:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise self.error(index, column, f"{message!r:.60}", allowed)
            self._content(message, index, column)
        return [dict(message) for message in value]

    def _content(self, message: Mapping[str, Any], index: int, column: str) -> None:
        """Refuse a content that a template would turn into text of its own, such as `None` or 7."""
        content = message["content"]
        if isinstance(content, str):
            self._text(message, "content", index)
            return
        only_calls = content is None and bool(message.get("tool_calls"))
        is_parts = isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content)
        if not only_calls and not is_parts:
            got = f"content {content!r:.60} ({type(content).__name__})"
            raise self.error(index, column, got, "text, a list of parts, or None beside tool_calls")

    def _chat(
        self,
        messages: list[dict[str, Any]],
        index: int,
        *,
        add_generation_prompt: bool = False,
        return_mask: bool = True,
    ) -> tuple[list[int], np.ndarray | None]:
        template = self.options.chat_template or getattr(self.tokenizer, "chat_template", None)
        if template is None:
            raise DataError(
                f"{self.where}: got messages, but the tokenizer has no chat template; allowed: one with it, or "
                f"tasks.{self.options.task}.chat_template. Take an instruct model's tokenizer, or a Jinja template."
            )
        wants_mask = self.options.assistant_only_loss and return_mask
        if wants_mask and "generation" not in str(template):
            raise DataError(
                f"tasks.{self.options.task}.assistant_only_loss: got True, but the chat template has no "
                "{% generation %} block; allowed: a template that marks what the assistant says. Set "
                "assistant_only_loss=False, or give chat_template."
            )
        encoded = self.tokenizer.apply_chat_template(
            messages,
            chat_template=self.options.chat_template,
            add_generation_prompt=add_generation_prompt,
            return_dict=True,
            tokenize=True,
            return_assistant_tokens_mask=wants_mask,
        )
        if not wants_mask:
            return encoded["input_ids"], None
        mask = np.asarray(encoded["assistant_masks"], dtype=bool)
        return encoded["input_ids"], mask

    def _with_eos(self, text: str) -> str:
        eos = getattr(self.tokenizer, "eos_token", None)
        return text if not eos or text.endswith(eos) else text + eos

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def _integers(self, value: Any, index: int, column: str) -> np.ndarray:
        array = None
        if isinstance(value, (list, tuple, np.ndarray)) or hasattr(value, "__array__"):
            with suppress(ValueError):  # numpy's, of lists of unequal lengths
                array = np.asarray(value)
        if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
            raise self.error(index, column, f"{value!r:.60} ({type(value).__name__})", "a list of integers")
        return array.astype(np.int64)

    def _checked_ids(self, ids: np.ndarray, index: int, column: str, *, empty_allowed: bool = False) -> np.ndarray:
        vocabulary = self.options.vocab_size
        if len(ids) == 0:
            if empty_allowed:
                return ids
            raise self.error(index, column, "no tokens", "at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            limit = "" if vocabulary is None else f" to {vocabulary - 1}, the backbone's vocabulary"
            raise self.error(index, column, f"token id {low if low < 0 else high}", f"ids from 0{limit}")
        return ids

    def _limited(self, index: int, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        if len(ids) <= self.options.limit:
            return ids, labels
        if self._refused_length(index, len(ids)):
            return None
        return ids[: self.options.limit], labels[: self.options.limit]

    def _refused_length(self, index: int, length: int) -> bool:
        """Apply the policy to a row that is too long; return whether it is left out."""
        limit = self.options.limit
        if self.options.overlong_policy == "error":
            why = "max_length" if limit == self.options.max_length else "the backbone's positions"
            raise self.error(
                index, "input_ids", f"{length} tokens or more", f"at most {limit} ({why}); shorten the row"
            )
        if self.options.overlong_policy == "drop":
            self.counts.num_dropped_long += 1
            return True
        self.counts.num_truncated += 1
        return False


def _masked(ids: np.ndarray, masks: Sequence[np.ndarray]) -> np.ndarray:
    labels = ids.copy()
    for mask in masks:
        labels[~mask] = IGNORE_INDEX
    return labels


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens agree; where tokens merge across the border, the completion starts before it."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(differing[0]) if len(differing) else length
