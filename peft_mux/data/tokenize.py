"""Converts a row into a `TokenSequence`: chat template, loss mask, truncation, and all checks on a row.

Follows TRL's `SFTTrainer`: EOS is appended to texts and completions, the loss of `prompt`/`completion` rows is on the
completion unless `completion_only_loss=False`. `assistant_only_loss` needs no generation blocks in the template.
Also here: rows with a class or a value (`LABELLED_ROWS`), and rows with a class for each token or word (`TAGGED_ROWS`).
Preference rows are in `preferences`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from peft_mux.data.formats import (
    ANSWER_FORMATS,
    LABEL_COLUMNS,
    LANGUAGE_ROWS,
    REQUIRED_COLUMNS,
    TOKENIZED_FORMATS,
    DataFormat,
    RowForm,
)
from peft_mux.data.row_cells import RowCells, with_given_targets
from peft_mux.data.task_batch import IGNORE_INDEX, Arrange, TokenSequence, with_virtual_tokens
from peft_mux.errors import ConfigError, DataError, PeftMuxError
from peft_mux.user_code import describe_error

Value = TypeVar("Value")

MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios", "pixel_values")
"""Columns of vision and audio models in TRL. Rows with a value in them are rejected, because it would be ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeOptions:
    """How the rows of one task become tokens; names as in `Task`.

    Attributes:
        task: name of the task, for messages.
        max_length: number of tokens to which rows are limited.
        overlong_policy: what happens to longer rows: "truncate", "drop" or "error".
        completion_only_loss: whether only completions carry loss; `None` means yes if a row marks its completion.
        assistant_only_loss: whether only the assistant's messages carry loss.
        chat_template: Jinja template for messages; `None` for the tokenizer's own.
        row_form: the form of rows that the task's loss reads.
        num_labels: number of classes; 1 for regression, `None` if unknown.
        vocab_size: token ids must be below it; `None` for no check.
        max_positions: number of positions of the backbone; `None` for no limit.
        virtual_labels: label of each virtual token at the start of a row; they do not count towards the limit.
        reference_columns: reference values that every row must contain, because the backbone cannot compute them.
        truncation_mode: "keep_start", or "keep_end" to cut longer rows at their start.
        packing: whether rows are packed, as in TRL: those without targets take room in packs, too.
    """

    task: str
    max_length: int
    overlong_policy: str = "truncate"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    chat_template: str | None = None
    row_form: RowForm = LANGUAGE_ROWS
    num_labels: int | None = None
    vocab_size: int | None = None
    max_positions: int | None = None
    virtual_labels: tuple[int, ...] = ()
    reference_columns: tuple[str, ...] = ()
    truncation_mode: str = "keep_start"
    packing: bool = False

    @property
    def kept(self) -> slice:
        """The part of a sequence that truncation keeps."""
        return slice(self.limit) if self.truncation_mode == "keep_start" else slice(-self.limit, None)

    @property
    def limit(self) -> int:
        """Maximum number of tokens of a sequence; longer ones are truncated, dropped or rejected."""
        return self.max_length if self.max_positions is None else min(self.max_length, self.max_positions)

    @property
    def arrange(self) -> Arrange | None:
        """A function from the rows of a global batch to the rows that the loss reads; `None` if they are the same."""
        arrange, limit = self.row_form.arrange, self.limit
        return None if arrange is None else lambda rows: arrange(rows, limit)


ROW_COUNTS = {
    "num_truncated": ("cut to {limit} tokens", "Raise max_length to train on them whole."),
    "num_dropped_long": (
        "longer than {limit} left out",
        'Raise max_length to train on them whole, or set overlong_policy="truncate" to train on their beginning.',
    ),
    "num_without_targets": (
        "without targets",
        "Check labels, prompts and max_length: a row needs a token that carries loss.",
    ),
    "num_unread_labels": (
        "with a label that is not read",
        'For classification, set task_type="SEQ_CLS" in peft_config; language models are trained on the text alone.',
    ),
    "num_empty_completions": (
        "with an empty completion",
        "Check the column completion: they teach the model to answer with nothing.",
    ),
    "num_equal_answers": ("with equal answers", "Check the columns chosen and rejected: they teach no preference."),
}
"""Counts of a `DataReport` that are worth a remark: its text and the advice."""
ALL_TURNS = "all turns"


@dataclass(slots=True)
class DataReport:
    """What happened to a dataset's rows.

    Attributes:
        where: the dataset, such as `tasks.sql.train_dataset`.
        data_format: the format that was recognised.
        num_rows: number of rows that were read.
        num_kept: number of rows that are trained on.
        num_truncated: number of rows that were cut to the limit.
        limit: number of tokens to which longer rows were cut.
        num_dropped_long: number of rows that were dropped because they are too long.
        num_without_targets: number of rows that were dropped because none of their tokens carries loss.
        num_tokens: number of tokens in the rows that are trained on.
        num_target_tokens: number of tokens that carry loss.
        num_unread_labels: number of rows of texts with a label, which a language model does not read.
        num_empty_completions: number of rows whose completion is empty.
        num_equal_answers: number of rows whose chosen and rejected answers are equal.
        trained_on: which tokens carry loss, in words; "" if the loss is not one of tokens.
    """

    where: str
    data_format: DataFormat
    num_rows: int = 0
    num_kept: int = 0
    num_truncated: int = 0
    limit: int = 0
    num_dropped_long: int = 0
    num_without_targets: int = 0
    num_tokens: int = 0
    num_target_tokens: int = 0
    num_unread_labels: int = 0
    num_empty_completions: int = 0
    num_equal_answers: int = 0
    trained_on: str = ""

    @property
    def split(self) -> str:
        """Name of the dataset, such as `train_dataset`."""
        return self.where.split(".", 2)[-1]

    @property
    def remarks(self) -> list[str]:
        """At most one line for the user: how many rows were truncated, dropped, or teach less than they seem to."""
        words = [
            f"{count:,} of {self.num_rows:,} rows {what.format(limit=f'{self.limit:,}')}"
            for name, (what, _) in ROW_COUNTS.items()
            if (count := getattr(self, name))
        ]
        return [f"{self.where}: {', '.join(words)}"] if words else []

    @property
    def warning(self) -> str:
        """The remark with advice, in one line; "" if there is none."""
        fixes = [fix for name, (_, fix) in ROW_COUNTS.items() if getattr(self, name)]
        return f"{self.remarks[0]}. {' '.join(fixes)}" if fixes else ""

    @property
    def targets_text(self) -> str:
        """How many tokens carry loss, and what restricts them further; "" if the loss is not one of tokens."""
        text = f"loss on {self.num_target_tokens:,} of {self.num_tokens:,} tokens ({self.trained_on})"
        hint = "; assistant_only_loss=True restricts it" if self.trained_on == ALL_TURNS else ""
        return text + hint if self.trained_on else ""


def checked_row(row: Any, index: int, where: str) -> Mapping[str, Any]:
    """Return a row that must be a dict of columns.

    Raises:
        DataError: if it is anything else.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where} row {index} must be a dict of columns, got {type(row).__name__}.")
    return row


def own_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer with the same tokens whose state no other reader, thread or user code can change.

    A call with `truncation=True` leaves its limit in a fast tokenizer, and all calls encode by that state. The copy
    shares the vocabulary, so it takes no memory and less than a millisecond; slow tokenizers are copied whole.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return copy.deepcopy(tokenizer)
    shared = tokenizer.backend_tokenizer
    backend = Tokenizer(shared.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(shared, part) is not None:
            setattr(backend, part, getattr(shared, part))
    backend.encode_special_tokens = shared.encode_special_tokens
    for _, token in sorted(shared.get_added_tokens_decoder().items()):  # by id, so that each gets its id again
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    copied = copy.copy(tokenizer)
    vars(copied).update({name: copy.copy(it) for name, it in vars(copied).items() if isinstance(it, (dict, list, set))})
    copied._tokenizer = backend
    return copied


class RowTokenizer(RowCells):
    """Converts rows of one format into sequences, and counts the rows that it drops.

    Args:
        options: how the rows of the task become tokens.
        tokenizer: a tokenizer of transformers, which is copied; may be `None` for rows that are tokenised already.
        data_format: the format that the rows have.
        split: name of the dataset, for messages.

    Attributes:
        report: what happened to the rows so far.
        num_masked: number of rows without targets whose labels were all masked before truncation.

    Raises:
        ConfigError: if the options do not apply to this format.
        DataError: if the format needs a tokenizer and there is none.
    """

    def __init__(
        self, options: TokenizeOptions, tokenizer: Any, data_format: DataFormat, split: str = "train_dataset"
    ) -> None:
        where = f"tasks.{options.task}.{split}"
        super().__init__(where, options.vocab_size, own_tokenizer(tokenizer), options.chat_template)
        self.options = options
        self.data_format = data_format
        turns = "assistant turns" if options.assistant_only_loss else ALL_TURNS
        completions = "completions" if options.completion_only_loss is not False else "prompts and completions"
        trained_on = {
            DataFormat.TEXT: "all tokens",
            DataFormat.MESSAGES: turns,
            DataFormat.PROMPT_COMPLETION: f"{turns} of {completions}" if options.assistant_only_loss else completions,
        }.get(data_format, "labels and masks of the rows")
        if options.row_form.read is not None:
            trained_on = options.row_form.trained_on
        self.report = DataReport(self.where, data_format, limit=options.limit, trained_on=trained_on)
        self.num_masked = 0
        self._first_row: dict[str, Any] = {}
        if tokenizer is None and data_format not in TOKENIZED_FORMATS:
            raise DataError(
                f"{self.where} has {data_format} rows, which need a tokenizer. Pass "
                "processing_class=AutoTokenizer.from_pretrained(...), or give tokenised rows."
            )
        allowed = ""
        field = "assistant_only_loss" if options.assistant_only_loss else "completion_only_loss"
        if data_format in ANSWER_FORMATS and (options.completion_only_loss is not None or options.assistant_only_loss):
            allowed = "left out, because the format already determines which tokens carry loss"
        elif options.completion_only_loss and data_format not in (DataFormat.PROMPT_COMPLETION, DataFormat.TOKENIZED):
            field = "completion_only_loss"
            allowed = "True for prompt/completion rows (or tokenised rows with a completion_mask)"
        elif options.assistant_only_loss and data_format is DataFormat.TEXT:
            allowed = "True for messages"
        if allowed:
            got = f"{getattr(options, field)} for {data_format} rows"
            raise ConfigError(f"tasks.{options.task}.{field} must be {allowed}, got {got}.")

    def __call__(self, row: Any, index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` if the row is dropped (and counted).

        Raises:
            DataError: if the row cannot be trained on; the message names the row and the column.
        """
        row = checked_row(row, index, self.where)
        self.report.num_rows += 1
        try:
            for column in REQUIRED_COLUMNS[self.data_format]:
                if column not in row:
                    raise self.error(index, column, "no such column", "in every row")
            for column in MEDIA_COLUMNS:
                value = row.get(column)
                # Empty cells are allowed, because mixed datasets have them.
                if value is not None and not (isinstance(value, (list, tuple, str)) and not value):
                    allowed = "empty, because only text is trained on: no images, videos or sounds, on any backbone"
                    raise self.error(index, column, type(value).__name__, allowed)
            read = self.options.row_form.read
            sequence = self._read(row, index) if read is None else read(self, row, index)
            if sequence is None:
                return None
            # A column may exist and be empty, so its name alone is not enough.
            for name in self.options.reference_columns:
                if name not in sequence.token_columns and name not in sequence.row_values:
                    allowed = "a value in every row, because prompt learning tasks cannot compute reference values"
                    raise self.error(index, name, "no such column, or None", allowed)
            sequence = with_virtual_tokens(sequence, self.options.virtual_labels)
        except PeftMuxError:
            raise
        # Cells may be any objects, which may raise any exception when they are read or printed.
        except Exception as error:
            got = describe_error(error)
            raise DataError(f"{self.where} row {index} cannot be read: {got}.") from error
        self.report.num_kept += 1
        self.report.num_tokens += len(sequence)
        self.report.num_target_tokens += sequence.num_target_tokens
        return sequence

    def as_in_first_row(self, key: str, value: Value) -> Value:
        """Return the value of the first row for this key; the first call for a key stores `value`."""
        return self._first_row.setdefault(key, value)

    def drops(self, index: int, length: int) -> bool:
        """Count an overlong row as dropped or truncated; return whether it is dropped.

        Raises:
            DataError: if the policy is "error".
        """
        options = self.options
        if options.overlong_policy == "error":
            why = "max_length" if options.limit == options.max_length else "the backbone's positions"
            allowed = f"at most {options.limit} tokens ({why})"
            raise self.error(index, "input_ids", f"{length} or more", allowed, "Shorten the row.")
        if options.overlong_policy == "drop":
            self.report.num_dropped_long += 1
            return True
        self.report.num_truncated += 1
        return False

    def cut(self, ids: np.ndarray, labels: np.ndarray, index: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return token ids and labels truncated to the limit, or `None` if the row is dropped.

        Raises:
            DataError: if the row is too long and the policy is "error".
        """
        kept = self.options.kept
        return None if len(ids) > self.options.limit and self.drops(index, len(ids)) else (ids[kept], labels[kept])

    def cut_with_targets(
        self, ids: np.ndarray, labels: np.ndarray, index: int, first: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what `cut` does, or `None` if no token is left that carries loss.

        Args:
            ids: token ids of the row.
            labels: its labels.
            index: index of the row.
            first: first token that can carry loss.
        """
        is_masked = not np.any(labels[first:] != IGNORE_INDEX)
        kept = None if is_masked and not self.options.packing else self.cut(ids, labels, index)
        if is_masked or (kept is not None and not np.any(kept[1][first:] != IGNORE_INDEX)):
            self.count_without_targets(is_masked=is_masked)
            return kept if self.options.packing else None
        return kept

    def count_without_targets(self, *, is_masked: bool) -> None:
        """Count a row that is dropped because it has no targets, before (`is_masked`) or after truncation."""
        self.report.num_without_targets += 1
        self.num_masked += is_masked

    def with_eos(self, text: str) -> str:
        """Append EOS to a text unless it already ends with it, as TRL does."""
        eos = getattr(self.tokenizer, "eos_token", None)
        return text if not eos or text.endswith(eos) else text + eos

    def prompt_completion(self, row: Mapping[str, Any], index: int) -> tuple[Sequence[int], list[np.ndarray]]:
        """Return the ids of a prompt and its completion, and the masks of tokens that carry loss, as in TRL.

        EOS is appended. The completion starts after the tokens of the prompt tokenised by itself.

        Args:
            row: has `prompt` and `completion`, texts or messages.
            index: index of the row.
        """
        masks = []
        if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
            prompt, completion = (self.messages(row, column, index) for column in ("prompt", "completion"))
            # The header of the assistant's turn belongs to the prompt.
            prompt_ids, _ = self.encode_chat(prompt, "prompt", index, is_prompt=True, row=row)
            wants_mask = self.options.assistant_only_loss
            ids, assistant = self.encode_chat(prompt + completion, "completion", index, wants_mask=wants_mask, row=row)
            if assistant is not None:
                masks.append(assistant)
        else:
            prompt_text = self.text(row, "prompt", index)
            completion_text = self.with_eos(self.text(row, "completion", index))
            prompt_ids = self.tokenizer(prompt_text)["input_ids"]
            ids = self.tokenizer(prompt_text + completion_text)["input_ids"]
        if self.options.completion_only_loss is not False:
            # Compared token by token, because tokens of prompt and completion may merge.
            masks.append(np.arange(len(ids)) >= common_prefix(prompt_ids, ids))
        return ids, masks

    def _read(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a language modeling row: text, messages, prompt/completion or tokens."""
        columns: dict[str, np.ndarray] = {}
        if self.data_format is DataFormat.TOKENIZED:
            ids, labels, columns = self._tokenized(row, index)
            if row.get("seq_lengths") is not None:  # sequences that TRL has packed into one row
                lengths = self.integers(row["seq_lengths"], index, "seq_lengths")
                limit = self.options.limit
                fits = lengths.sum() == len(ids) and 0 < lengths.min() <= lengths.max() <= limit
                if not fits or self.options.row_form.is_one_term:
                    allowed = f"lengths of 1 to {limit} tokens, {len(ids)} in all, and a loss of single tokens"
                    raise self.error(index, "seq_lengths", f"{lengths.tolist()!r:.60}", allowed, "Pack the rows again.")
                starts = tuple(np.cumsum(lengths)[:-1].tolist())
                return TokenSequence(ids, labels, index, starts=starts, token_columns=columns)
        else:
            masks: list[np.ndarray] = []
            if self.data_format is DataFormat.TEXT:
                self.report.num_unread_labels += any(row.get(name) is not None for name in LABEL_COLUMNS)
                ids = self.tokenizer(self.with_eos(self.text(row, "text", index)))["input_ids"]
            elif self.data_format is DataFormat.MESSAGES:
                messages, wants_mask = self.messages(row, "messages", index), self.options.assistant_only_loss
                ids, mask = self.encode_chat(messages, "messages", index, wants_mask=wants_mask, row=row)
                if mask is not None:
                    masks.append(mask)
            else:
                ids, masks = self.prompt_completion(row, index)
                answer = row["completion"]
                said = [answer] if isinstance(answer, str) else [m["content"] or m.get("tool_calls") for m in answer]
                self.report.num_empty_completions += not any(str(part or "").strip() for part in said)
            ids = self.checked_ids(np.asarray(ids, dtype=np.int64), index, "input_ids")
            labels = _masked(ids, masks)
            for name, column in self.options.row_form.token_columns.items():
                if column.is_required or row.get(name) is not None:
                    allowed = 'used with "input_ids", because it has one number per token'
                    raise self.error(index, name, f"{self.data_format} rows", allowed)
        kept = self.cut_with_targets(ids, labels, index, first=1)  # the first token is never predicted
        if kept is None:
            return None
        ids, labels = kept
        columns = {name: values[self.options.kept] for name, values in columns.items()}
        is_one_term = self.options.row_form.is_one_term
        return TokenSequence(ids, labels, index, is_one_term=is_one_term, token_columns=columns)

    def _tokenized(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return the ids of a tokenised row without padding, its labels, and its token columns by name.

        Its labels are its `labels`, or else its ids where its masks are true. Every row must have the same columns.
        """
        ids, keep = self.attended_ids(row, index)
        if row.get("labels") is not None:
            items = "labels, one for each of input_ids"
            labels = self.integers(row["labels"], index, "labels", len(keep), items)[keep]
            self.checked_ids(labels[labels != IGNORE_INDEX], index, "labels", empty_allowed=True)
        else:
            names = ["completion_mask", "assistant_masks"]
            if self.options.completion_only_loss is False:
                names.remove("completion_mask")
            masks = [
                self.integers(row[name], index, name, len(keep))[keep] != 0
                for name in names
                if row.get(name) is not None
            ]
            labels = _masked(ids, masks)
        known = self.options.row_form.token_columns
        columns = self.token_columns(known, row, index, keep)
        # Shape per token: `()` for one number.
        widths = {name: values.shape[1:] for name, values in columns.items()}
        first = self.as_in_first_row("token_columns", widths)
        for name in known:
            if (name in widths) != (name in first):
                got = "no such column, or None" if name not in columns else "a value"
                raise self.error(index, name, got, f'a value in all rows of "{self.where}" or in none')
            if name in widths and widths[name] != first[name]:
                got, wanted = (*widths[name], *first[name])
                raise self.error(index, name, str(got), f"{wanted} numbers per token, as in the first row")
        return ids, with_given_targets(labels, columns), columns


def _masked(ids: np.ndarray, masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the ids as labels, with `IGNORE_INDEX` where any mask is false."""
    labels = ids.copy()
    for mask in masks:
        labels[~mask] = IGNORE_INDEX
    return labels


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix; it is shorter than the prompt if prompt and completion tokens merge."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(differing[0]) if len(differing) else length


# ----------------------------------------------------------------------------------------- rows with a class or a value

CLASS_LABELS = "class_labels"
"""Row value with a number for each class, for multi-label classification and multi-output regression."""
_BEYOND_CLASSES, _BEYOND_NUMBERS = 2**31, 2**63


def _read_labelled(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> TokenSequence | None:
    """Return the sequence of a row of sequence classification or regression: tokens, a text or a pair, and a label."""
    column = next((name for name in LABEL_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise reader.error(index, "label", "no such column, or None", "a class (int) or a value (float)")
    types: np.ndarray | None = None
    if reader.data_format is DataFormat.TOKENIZED:
        ids, keep = reader.attended_ids(row, index)
        if row.get("token_type_ids") is not None:
            types = reader.integers(row["token_type_ids"], index, "token_type_ids", len(keep))[keep]
    else:
        texts = [reader.text(row, "text", index)]
        if row.get("text_pair") is not None:
            texts.append(reader.text(row, "text_pair", index))
        limit, tokenizer = reader.options.limit, reader.tokenizer
        # The tokenizer truncates: it shortens the longer text of a pair and keeps the special tokens at the end.
        encoded = tokenizer(*texts, truncation=True, max_length=limit)
        # Encode again without a limit only if truncation may have happened.
        is_longer = len(encoded["input_ids"]) == limit and len(tokenizer(*texts)["input_ids"]) > limit
        ids = reader.checked_ids(np.asarray(encoded["input_ids"], dtype=np.int64), index, "input_ids")
        # `None` means all zeros: batches without text pairs need no tensor of types.
        if encoded.get("token_type_ids") is not None and any(encoded["token_type_ids"]):
            types = np.asarray(encoded["token_type_ids"], dtype=np.int64)
        if is_longer and reader.drops(index, len(ids) + 1):
            return None
    # Tokens carry no labels here, so the ids replace them.
    kept = reader.cut(ids, ids, index)
    if kept is None:
        return None
    types = None if types is None else types[: len(kept[0])]
    value = row[column]
    is_list = isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value) > 0
    # Length of the list, the same in every row; 0 for a single class or value.
    num_values = reader.as_in_first_row("num_values", max(len(value), 1) if is_list else 0)
    if is_list:
        if num_values == 0:
            raise reader.error(index, column, f"{value!r:.60}", "one class or one value, as in the first row")
        count, array = reader.options.num_labels or num_values, None
        with suppress(ValueError, TypeError):  # raised by numpy for nested lists and None
            array = np.asarray(value, dtype=np.float32)
        if array is None or array.shape != (count,) or count < 2 or not np.isfinite(array).all():
            allowed = f"{count} finite numbers" if count > 1 else "finite numbers, at least two"
            raise reader.error(index, column, f"{value!r:.60}", f"a list of {allowed}, one for each class")
        return TokenSequence(*kept, index, 0, types, row_values={CLASS_LABELS: array})
    if num_values:
        raise reader.error(index, column, repr(value), f"a list of {num_values} numbers, as in the first row")
    # Rows in numpy format hold numpy scalars, and numpy integers are not `int`.
    number: Any = value.item() if isinstance(value, np.generic) else value
    classes = reader.options.num_labels
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    # `num_labels=1` means regression, which also accepts integers.
    if is_whole and classes == 1 and abs(number) < _BEYOND_NUMBERS:
        number = float(number)
    is_class = is_whole and classes != 1 and 0 <= number < (classes or _BEYOND_CLASSES)
    is_value = isinstance(number, float) and np.isfinite(number) and classes in (None, 1)
    if not is_class and not is_value:
        allowed = f"a class from 0 to {classes - 1}" if classes else "a class (int, at least 0) or a value (float)"
        raise reader.error(index, column, repr(number), allowed)
    return TokenSequence(*kept, index, number, types)


LABELLED_ROWS = RowForm(
    (DataFormat.TOKENIZED, DataFormat.TEXT), needs_label=True, is_one_term=True, read=_read_labelled
)
"""Text with a class or a value."""


# ---------------------------------------------------------------------------- rows with a class for each token or word

TAG_COLUMNS = ("labels", "ner_tags", "pos_tags", "chunk_tags", "tags", "label")
"""Columns that may hold the classes of words, in order of precedence."""


def _read_tagged(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> TokenSequence | None:
    """Return the sequence of a row of token classification: token ids or words, and a class for each.

    If a word has several tokens, only the first one has the class, as in the examples of transformers.
    """
    if reader.data_format is DataFormat.TOKENIZED:
        ids, keep = reader.attended_ids(row, index)
        labels = _classes(reader, row, index, ("labels",), len(keep))[keep]
    else:
        words = row["tokens"]
        if not isinstance(words, (list, tuple)) or not words or not all(isinstance(word, str) for word in words):
            raise reader.error(index, "tokens", f"{words!r:.60}", "a list of words (strings), at least one")
        classes = _classes(reader, row, index, TAG_COLUMNS, len(words))
        if not getattr(reader.tokenizer, "is_fast", False):
            got = "words with a slow tokenizer, which does not map tokens to words"
            raise reader.error(index, "tokens", got, "a fast tokenizer, or rows with input_ids and labels")
        encoded = reader.tokenizer(list(words), is_split_into_words=True)
        tags, before = [], None
        for word in encoded.word_ids():
            tags.append(IGNORE_INDEX if word is None or word == before else int(classes[word]))
            before = word
        labels = np.asarray(tags, dtype=np.int64)
        ids = reader.checked_ids(np.asarray(encoded["input_ids"], dtype=np.int64), index, "input_ids")
    kept = reader.cut_with_targets(ids, labels, index, first=0)
    if kept is None:
        return None
    return TokenSequence(*kept, index, labels_itself=True)


def _classes(
    reader: RowTokenizer, row: Mapping[str, Any], index: int, columns: Sequence[str], count: int
) -> np.ndarray:
    """Return the class of each token or word, checked."""
    column = next((name for name in columns if row.get(name) is not None), None)
    if column is None:
        raise reader.error(index, columns[0], "no such column, or None", f"{count} classes, one for each token or word")
    labels = reader.integers(row[column], index, column, count, "classes, one for each token or word")
    num_labels = reader.options.num_labels
    wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= (num_labels or _BEYOND_CLASSES)))
    if wrong.any():
        allowed = f"classes from 0{f' to {num_labels - 1}' if num_labels else ''}, or -100 for none"
        raise reader.error(index, column, str(labels[wrong][0]), allowed)
    return labels


TAGGED_ROWS = RowForm((DataFormat.TOKENIZED, DataFormat.WORDS), has_token_labels=True, read=_read_tagged)
"""Tokens or words with a class for each."""
