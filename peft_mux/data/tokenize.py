"""One row in, one `TokenSequence` out: templates, loss masks, truncation, and every check on a row.

Meanings are those of TRL's `SFTTrainer`: EOS is added to text and completions, the loss of `prompt`/`completion`
rows is on the completion unless `completion_only_loss=False`, and `assistant_only_loss` needs generation blocks in
the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_mux.data.formats import (
    ANSWER_FORMATS,
    LANGUAGE_ROWS,
    TOKENIZED_FORMATS,
    DataFormat,
    RowCells,
    RowForm,
    required_columns,
)
from peft_mux.data.rows import (
    ChatRows,
    LabelledRows,
    LengthLimit,
    RowCounts,
    RowReader,
    RowTools,
    read_columns,
    with_given_targets,
)
from peft_mux.data.task_batch import IGNORE_INDEX, Arrange, TokenSequence, with_virtual_tokens
from peft_mux.errors import ConfigError, DataError, PeftMuxError
from peft_mux.user_code import describe_error


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeOptions:
    """How the rows of one task become tokens; names as in `Task`.

    Attributes:
        task: name of the task, for messages.
        max_length: number of tokens to which rows are limited.
        overlong_policy: what becomes of longer rows: "truncate", "drop" or "error".
        completion_only_loss: whether only completions carry loss; `None` for yes wherever a row marks its completion.
        assistant_only_loss: whether only what the assistant says carries loss.
        chat_template: Jinja template for messages; `None` for that of the tokenizer.
        row_form: the form of rows that the task's loss reads.
        num_labels: number of classes; 1 for regression, `None` where it is not known.
        vocab_size: token ids must be below it; `None` for no check.
        max_positions: longest row that the backbone has positions for; `None` for no limit.
        virtual_labels: label of each virtual token that every row begins with; they count to no limit of a row.
        reference_columns: columns that every row has to bring, as there is no pass that would make up for them.
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

    @property
    def limit(self) -> int:
        """Longest sequence that is kept whole."""
        return self.max_length if self.max_positions is None else min(self.max_length, self.max_positions)

    @property
    def arrange(self) -> Arrange | None:
        """What makes the rows of a global batch of rows of the dataset; `None` where they are the same."""
        arrange, limit = self.row_form.arrange, self.limit
        return None if arrange is None else lambda rows: arrange(rows, limit)


class RowTokenizer:
    """Turns rows of one format into sequences, and counts what it leaves out.

    Args:
        options: how the rows of the task become tokens.
        tokenizer: a tokenizer of transformers; may be `None` for rows that are tokenised already.
        data_format: the format that the rows have.
        split: name of the dataset, for messages.

    Raises:
        ConfigError: if the options cannot apply to this format.
        DataError: if the format needs a tokenizer that is not there.
    """

    def __init__(
        self, options: TokenizeOptions, tokenizer: Any, data_format: DataFormat, split: str = "train_dataset"
    ) -> None:
        """Check that options, tokenizer and format fit together, and make what reads each form of row."""
        self.options = options
        self.tokenizer = tokenizer
        self.data_format = data_format
        self.where = f"tasks.{options.task}.{split}"
        self.counts = RowCounts()
        self._check()
        self._cells = RowCells(self.where, options.vocab_size)
        why = "max_length" if options.limit == options.max_length else "the backbone's positions"
        self._limit = LengthLimit(options.limit, why, options.overlong_policy, self._cells, self.counts)
        self._chat_rows = ChatRows(
            self._cells,
            tokenizer,
            task=options.task,
            chat_template=options.chat_template,
            assistant_only_loss=options.assistant_only_loss,
        )
        self._labelled_rows = LabelledRows(
            self._cells,
            self._limit,
            tokenizer,
            is_tokenised=data_format is DataFormat.TOKENIZED,
            num_labels=options.num_labels,
        )
        # Of the first row, by column: how many numbers there are of a token, `()` for one.
        self._column_widths: dict[str, tuple[int, ...]] | None = None
        self._reader = self._make_reader()

    def _make_reader(self) -> RowReader | None:
        """Return what reads the rows where their form has a reader of its own; `None` where it has none."""
        make = self.options.row_form.reader
        if make is None:
            return None
        return make(
            RowTools(
                data_format=self.data_format,
                cells=self._cells,
                limit=self._limit,
                counts=self.counts,
                chat_rows=self._chat_rows,
                tokenizer=self.tokenizer,
                prompt_completion=self._prompt_completion,
                num_labels=self.options.num_labels,
            )
        )

    def _check(self) -> None:
        options, task = self.options, f"tasks.{self.options.task}"
        if self.tokenizer is None and self.data_format not in TOKENIZED_FORMATS:
            raise DataError(
                f"{self.where}: got {self.data_format} rows without a tokenizer; allowed: tokenised rows, or a "
                "processing_class. Pass processing_class=AutoTokenizer.from_pretrained(...)."
            )
        if self.data_format in ANSWER_FORMATS and (
            options.completion_only_loss is not None or options.assistant_only_loss
        ):
            field = "assistant_only_loss" if options.assistant_only_loss else "completion_only_loss"
            raise ConfigError(
                f"{task}.{field}: got {getattr(options, field)} for {self.data_format} rows; allowed: none, as these "
                "rows say by themselves where the loss is."
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
        try:
            sequence = self._sequence(row, index)
            if sequence is None:
                return None
            self._check_references(sequence, index)
            return with_virtual_tokens(sequence, self.options.virtual_labels)
        except PeftMuxError:
            raise
        # Cells may be objects of any kind, which fail in ways of their own when they are read or shown.
        except Exception as error:
            got = describe_error(error)
            raise DataError(f"{self.where} row {index}: got {got}; allowed: a row that can be read.") from error

    def _check_references(self, sequence: TokenSequence, index: int) -> None:
        # A column may be there and hold nothing, which the names of columns do not tell.
        for name in self.options.reference_columns:
            if name not in sequence.token_columns and name not in sequence.row_values:
                allowed = "a value in every row, as a prompt has no backbone without adapters to compare with"
                raise self._cells.error(index, name, "no such column, or None", allowed)

    def _sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        for column in required_columns(self.data_format):
            if column not in row:
                raise self._cells.error(index, column, "no such column", "the same columns in every row")
        self._cells.refuse_media(row, index)
        if self._reader is not None:
            return self._reader.sequence(row, index)
        if self.options.row_form.needs_label:
            return self._labelled_rows.sequence(row, index)
        ids, labels = self._tokens_and_labels(row, index)
        columns = self._token_columns(row, index)
        labels = with_given_targets(labels, columns)
        # The first token is predicted by none, so its label does not count.
        if not np.any(labels[1:] != IGNORE_INDEX):
            self.counts.num_without_targets += 1
            self.counts.num_masked += 1
            return None
        kept = self._limit.cut(ids, labels, index)
        if kept is None:
            return None
        ids, labels = kept
        # Asked again, as the cut may have taken the last target away.
        if not np.any(labels[1:] != IGNORE_INDEX):
            self.counts.num_without_targets += 1
            return None
        # Cut at the end, as the tokens are.
        columns = {name: values[: len(ids)] for name, values in columns.items()}
        is_one_term = self.options.row_form.is_one_term
        return TokenSequence(ids, labels, index, is_one_term=is_one_term, token_columns=columns)

    def _token_columns(self, row: Mapping[str, Any], index: int) -> dict[str, np.ndarray]:
        """Return the numbers that a tokenised row has for each token, by column; the same columns in every row."""
        known = self.options.row_form.token_columns
        if not known:
            return {}
        if self.data_format is not DataFormat.TOKENIZED:
            self._refuse_columns(row, index)
            return {}
        columns: dict[str, np.ndarray] = {}
        if any(column.is_required or row.get(name) is not None for name, column in known.items()):
            # Only where there are some, as it reads ids and mask once more.
            length = len(self._cells.integers(row["input_ids"], index, "input_ids"))
            columns = read_columns(known, row, index, self._cells.attended(row, index, length), self._cells)
        widths = {name: values.shape[1:] for name, values in columns.items()}
        if self._column_widths is None:
            self._column_widths = widths
        for name in known:
            if (name in columns) != (name in self._column_widths):
                got = "no such column, or None" if name not in columns else "a value"
                raise self._cells.error(index, name, got, f'a value in all rows of "{self.where}" or in none')
            if name in columns and widths[name] != self._column_widths[name]:
                got, first = (*widths[name], *self._column_widths[name])
                raise self._cells.error(index, name, f"{got} numbers a token", f"{first}, as in the first row")
        return columns

    def _refuse_columns(self, row: Mapping[str, Any], index: int) -> None:
        for name, column in self.options.row_form.token_columns.items():
            if column.is_required or row.get(name) is not None:
                raise self._cells.error(
                    index, name, f"{self.data_format} rows", f'"input_ids" beside "{name}", which is a number a token'
                )

    def _tokens_and_labels(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        if self.data_format is DataFormat.TOKENIZED:
            return self._tokenised(row, index)
        masks: list[np.ndarray] = []
        if self.data_format is DataFormat.TEXT:
            ids = self._encode(self._with_eos(self._cells.text(row, "text", index)))
        elif self.data_format is DataFormat.MESSAGES:
            ids, mask = self._chat_rows.encode(self._chat_rows.messages(row, "messages", index), "messages", index)
            masks += [mask] if mask is not None else []
        else:
            ids, masks = self._prompt_completion(row, index)
        ids = self._cells.checked_ids(np.asarray(ids, dtype=np.int64), index, "input_ids")
        return ids, _masked(ids, masks)

    def _prompt_completion(self, row: Mapping[str, Any], index: int) -> tuple[Sequence[int], list[np.ndarray]]:
        masks = []
        if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
            prompt, completion = (self._chat_rows.messages(row, column, index) for column in ("prompt", "completion"))
            # Up to where the answer begins: the header of the assistant's turn belongs to the prompt.
            prompt_ids = self._chat_rows.encode_prompt(prompt, "prompt", index)
            ids, assistant = self._chat_rows.encode(prompt + completion, "completion", index)
            masks += [assistant] if assistant is not None else []
        else:
            prompt_text = self._cells.text(row, "prompt", index)
            completion_text = self._with_eos(self._cells.text(row, "completion", index))
            prompt_ids, ids = self._encode(prompt_text), self._encode(prompt_text + completion_text)
        if self.options.completion_only_loss is not False:
            # The prompt is encoded once more by itself, as its tokens may merge with those of the completion.
            start = common_prefix(prompt_ids, ids)
            masks.append(np.arange(len(ids)) >= start)
        return ids, masks

    def _tokenised(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self._cells.integers(row["input_ids"], index, "input_ids")
        keep = self._cells.attended(row, index, len(ids))
        # Padding goes: packed streams have none, and its tokens would move the positions of the others.
        ids = self._cells.checked_ids(ids[keep], index, "input_ids")
        if row.get("labels") is not None:
            labels = self._cells.integers(row["labels"], index, "labels")
            if len(labels) != len(keep):
                raise self._cells.error(
                    index, "labels", f"{len(labels)} labels", f"{len(keep)}, one for each of input_ids"
                )
            labels = labels[keep]
            self._cells.checked_ids(labels[labels != IGNORE_INDEX], index, "labels", empty_allowed=True)
            return ids, labels
        masks = []
        for column, applies in (
            ("completion_mask", self.options.completion_only_loss is not False),
            ("assistant_masks", True),
        ):
            if applies and row.get(column) is not None:
                mask = self._cells.integers(row[column], index, column)
                if len(mask) != len(keep):
                    raise self._cells.error(
                        index, column, f"{len(mask)} entries", f"{len(keep)}, one for each of input_ids"
                    )
                masks.append(mask[keep] != 0)
        return ids, _masked(ids, masks)

    def _with_eos(self, text: str) -> str:
        eos = getattr(self.tokenizer, "eos_token", None)
        # A text that ends in EOS gets no second one, as in TRL.
        return text if not eos or text.endswith(eos) else text + eos

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]


def _masked(ids: np.ndarray, masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the ids as labels, ignored wherever one of the masks is false."""
    # A copy, as the ids themselves are what the model reads.
    labels = ids.copy()
    for mask in masks:
        labels[~mask] = IGNORE_INDEX
    return labels


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens agree; where tokens merge across the border, the completion starts before it."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(differing[0]) if len(differing) else length
