"""A task's rows as tokens, in flat arrays, with a report of what was cut and left out."""

# MERGED: The order of a task's rows: a pure function of its own seed and step, which no other task influences.
# MERGED: Because the global batch of any step can be computed from the step alone, resuming and pausing need no saved
# MERGED: position.

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from peft_mux.data.formats import DataFormat, detect_format
from peft_mux.data.rows import CLASS_LABELS
from peft_mux.data.task_batch import Arrange, TaskBatch, TokenSequence, prefix_trie
from peft_mux.data.tokenize import RowTokenizer, TokenizeOptions
from peft_mux.errors import DataError, PeftMuxError
from peft_mux.user_code import describe_error

_MAX_ERRORS = 10
_ROW_NUMBER = re.compile(r" row (\d+)")
_VALUE = re.compile(r"got [^;]{1,62} \((int|float|bool)\);")
"""A number where none belongs; that others have other numbers is no other fault."""
_Extras = tuple[tuple[int, ...], Mapping[str, np.ndarray], Mapping[str, float | np.ndarray]]
"""What few rows have: `starts`, `token_columns` and `row_values` of `TokenSequence`."""
_NO_EXTRAS: _Extras = ((), {}, {})


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of a dataset's rows.

    Attributes:
        where: the dataset, such as `tasks.sql.train_dataset`.
        data_format: the format that was recognised.
        num_rows: number of rows that were given.
        num_kept: number of rows that are trained on.
        num_truncated: number of rows that were cut to the limit.
        limit: number of tokens that longer rows were cut to.
        num_dropped_long: number of rows that were left out for their length.
        num_without_targets: number of rows that were left out because no token of theirs carries loss.
        num_tokens: number of tokens of the rows that are trained on.
        num_target_tokens: number of tokens that carry loss.
    """

    where: str
    data_format: DataFormat
    num_rows: int
    num_kept: int
    num_truncated: int
    limit: int
    num_dropped_long: int
    num_without_targets: int
    num_tokens: int
    num_target_tokens: int

    @property
    def remarks(self) -> list[str]:
        """What the owner should know in at most one line: rows cut and left out."""
        counts = [
            (self.num_truncated, f"cut to {self.limit:,} tokens"),
            (self.num_dropped_long, f"longer than {self.limit:,} left out"),
            (self.num_without_targets, "without targets left out"),
        ]
        words = [f"{count:,} of {self.num_rows:,} rows {what}" for count, what in counts if count]
        return [f"{self.where}: {', '.join(words)}"] if words else []

    @property
    def warning(self) -> str:
        """The remark with what to do about it, in one line; "" where there is none."""
        fixes = []
        if self.num_truncated or self.num_dropped_long:
            fixes.append("Raise max_length to train on them whole.")
        if self.num_dropped_long:
            fixes.append('Set overlong_policy="truncate" to train on the beginning of longer ones.')
        if self.num_without_targets:
            fixes.append("Check labels, prompts and max_length: a row needs a token that carries loss.")
        return f"{self.remarks[0]}. {' '.join(fixes)}" if fixes else ""

    def summary(self) -> str:
        """Return the report in one line."""
        share = 100 * self.num_target_tokens / max(self.num_tokens, 1)
        rows = f"{self.num_kept:,} of {self.num_rows:,} rows ({self.data_format})"
        head = f"{self.where}: {rows}, {self.num_tokens:,} tokens"
        return "; ".join([f"{head}, {share:.0f} % trained on", *self.remarks])


class TokenizedDataset:
    """Rows as tokens, in flat int32 arrays.

    Args:
        sequences: the tokenised rows, in dataset order.
        report: what became of the dataset's rows.

    Attributes:
        report: what became of the dataset's rows.
        lengths: int64, number of tokens of each row.
        num_targets: int64, number of loss terms of each row.
    """

    def __init__(self, sequences: list[TokenSequence], report: DataReport) -> None:
        """Lay the rows out one after another."""
        self.report = report
        self.lengths = np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))
        self.num_targets = np.fromiter((s.num_targets for s in sequences), dtype=np.int64, count=len(sequences))
        self._offsets = np.concatenate(([0], np.cumsum(self.lengths)))
        # int32 is enough for any vocabulary, and half as large as what torch wants, which is made row by row.
        self._ids = np.concatenate([s.input_ids for s in sequences]).astype(np.int32)
        self._labels = np.concatenate([s.labels for s in sequences]).astype(np.int32)
        self._rows = np.fromiter((s.row for s in sequences), dtype=np.int64, count=len(sequences))
        self._classes = [s.class_label for s in sequences]
        self._types = [s.token_type_ids for s in sequences]
        # By number of the row; most datasets have none, and three empty things a row are 200 bytes.
        self._extras: dict[int, _Extras] = {
            number: (s.starts, s.token_columns, s.row_values)
            for number, s in enumerate(sequences)
            if s.starts or s.token_columns or s.row_values
        }
        # One loss for all rows of a dataset, so one flag for all.
        self._is_one_term = any(s.is_one_term for s in sequences)
        self._num_virtual_tokens = max((s.num_virtual_tokens for s in sequences), default=0)
        self._labels_itself = any(s.labels_itself for s in sequences)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSequence:
        """Return a tokenised row."""
        part = slice(self._offsets[index], self._offsets[index + 1])
        ids, labels = self._ids[part].astype(np.int64), self._labels[part].astype(np.int64)
        row, label, types = int(self._rows[index]), self._classes[index], self._types[index]
        starts, columns, values = self._extras.get(index, _NO_EXTRAS)
        return TokenSequence(
            ids,
            labels,
            row,
            label,
            types,
            is_one_term=self._is_one_term,
            starts=starts,
            token_columns=columns,
            row_values=values,
            labels_itself=self._labels_itself,
            num_virtual_tokens=self._num_virtual_tokens,
        )

    def num_classes(self) -> int:
        """Return how many classes the labels of the rows, or of their tokens, need; 1 for a regression."""
        several = self._extras.get(0, _NO_EXTRAS)[2].get(CLASS_LABELS)
        if several is not None:
            return len(np.atleast_1d(several))
        labels = [label for label in self._classes if label is not None]
        if any(isinstance(label, float) for label in labels):
            return 1
        return int(max(labels) if labels else self._labels.max()) + 1

    @property
    def fingerprint(self) -> str:
        """Digest of all tokens and labels, by which a resumed run knows its data again."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self._offsets, self._ids, self._labels):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(repr(self._classes).encode())
        # Plain rows keep the digest that they had before there was more to a row.
        for starts, columns, values in self._extras.values():
            digest.update(
                repr((starts, [(name, np.asarray(values[name]).tolist()) for name in sorted(values)])).encode()
            )
            for name in sorted(columns):
                digest.update(name.encode() + np.ascontiguousarray(columns[name]).tobytes())
        return digest.hexdigest()


def tokenize_dataset(
    dataset: Any, *, options: TokenizeOptions, tokenizer: Any, split: str = "train_dataset"
) -> TokenizedDataset:
    """Tokenise all rows of a dataset.

    Args:
        dataset: a `datasets.Dataset` or a list of dicts.
        options: how the rows of the task become tokens.
        tokenizer: a tokenizer of transformers; may be `None` for rows that are tokenised already.
        split: name of the dataset, for messages.

    Raises:
        DataError: naming up to ten rows that cannot be trained on, or why none is left.
    """
    where = f"tasks.{options.task}.{split}"
    row_tokenizer: RowTokenizer | None = None
    sequences, errors = [], []
    num_rows, more = 0, ""
    view = options.row_form.view
    for index, row in enumerate(_rows(dataset if view is None else view(dataset, where), where)):
        if len(errors) == _MAX_ERRORS:
            more = " (and perhaps more)"
            break
        num_rows += 1
        try:
            row = checked_row(row, index, where)
            if row_tokenizer is None:
                row_tokenizer = open_rows(row, options=options, tokenizer=tokenizer, split=split)
            sequence = row_tokenizer(row, index)
        # Gone on with after a fault, so that owners see several at a time.
        except DataError as error:
            errors.append(str(error))
            # Without a format there is nothing to read the other rows by.
            if row_tokenizer is None:
                break
            continue
        if sequence is not None:
            sequences.append(sequence)
    if errors:
        raise DataError("\n".join(_told_once(errors)) + more)
    if row_tokenizer is None:
        raise DataError(f"{where}: got no rows; allowed: at least one.")
    if not sequences:
        raise DataError(_nothing_left(where, num_rows, row_tokenizer))
    report = data_report(
        row_tokenizer,
        num_rows=num_rows,
        num_kept=len(sequences),
        num_tokens=sum(len(sequence) for sequence in sequences),
        num_target_tokens=sum(num_target_tokens(sequence) for sequence in sequences),
    )
    return TokenizedDataset(sequences, report)


def open_rows(
    first: Mapping[str, Any], *, options: TokenizeOptions, tokenizer: Any, split: str = "train_dataset"
) -> RowTokenizer:
    """Return what turns the rows of a dataset into sequences.

    Args:
        first: the first row, whose columns tell the format.
        options: how the rows of the task become tokens.
        tokenizer: a tokenizer of transformers; may be `None` for rows that are tokenised already.
        split: name of the dataset, for messages.

    Raises:
        DataError: if the columns are of no format.
        ConfigError: if the options cannot apply to it.
    """
    where = f"tasks.{options.task}.{split}"
    return RowTokenizer(options, tokenizer, detect_format(list(first), where=where, row_form=options.row_form), split)


def checked_row(row: Any, index: int, where: str) -> Mapping[str, Any]:
    """Return a row that must be a dict of columns.

    Raises:
        DataError: if it is anything else.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where} row {index}: got {type(row).__name__}; allowed: a dict of columns.")
    return row


def _rows(dataset: Any, where: str) -> Iterator[Any]:
    """Yield the rows of a dataset, as many as it says that it has.

    Raises:
        DataError: naming the row, for whatever the dataset's own code raises.
    """
    index = 0
    try:
        # Bounded, as datasets that compute their rows need not know where to stop.
        for row in islice(dataset, len(dataset)):
            yield row
            index += 1
    except PeftMuxError:
        raise
    # Ctrl-C while rows are read is the user's, and passes.
    except (Exception, SystemExit) as error:
        raise DataError(
            f"{where} row {index}: got {describe_error(error)}; allowed: a row that can be read."
        ) from error


def _told_once(errors: list[str]) -> list[str]:
    """Return errors without those that say of other rows what one before them says; it names these rows."""
    rows: dict[str, list[str]] = {}
    firsts: dict[str, str] = {}
    for error in errors:
        number, kind = _ROW_NUMBER.search(error), _VALUE.sub(r"\1", _ROW_NUMBER.sub("", error, count=1))
        firsts.setdefault(kind, error)
        rows.setdefault(kind, []).extend([number[1]] if number else [])
    return [
        f"{first} The same in row{'s' if len(rows[kind]) > 2 else ''} {', '.join(rows[kind][1:])}."
        if len(rows[kind]) > 1
        else first
        for kind, first in firsts.items()
    ]


def num_target_tokens(sequence: TokenSequence) -> int:
    """Return how many tokens of a row are predicted and carry loss."""
    return sequence.num_target_tokens


def data_report(
    row_tokenizer: RowTokenizer, *, num_rows: int, num_kept: int, num_tokens: int, num_target_tokens: int
) -> DataReport:
    """Return what became of rows, from what their tokenizer has counted and what the caller has."""
    counts = row_tokenizer.counts
    return DataReport(
        where=row_tokenizer.where,
        data_format=row_tokenizer.data_format,
        num_rows=num_rows,
        num_kept=num_kept,
        num_truncated=counts.num_truncated,
        limit=row_tokenizer.options.limit,
        num_dropped_long=counts.num_dropped_long,
        num_without_targets=counts.num_without_targets,
        num_tokens=num_tokens,
        num_target_tokens=num_target_tokens,
    )


def _nothing_left(where: str, num_rows: int, row_tokenizer: RowTokenizer) -> str:
    counts, limit = row_tokenizer.counts, row_tokenizer.options.limit
    if counts.num_masked:
        cause = f"all labels are masked (-100) in {counts.num_masked} of them"
        fix = "Check the labels, the completion or the generation blocks of the chat template"
    elif counts.num_dropped_long:
        cause, fix = f"{counts.num_dropped_long} are longer than {limit} tokens", "Raise max_length or truncate"
    else:
        cause = f"cut to {limit} tokens, {counts.num_without_targets} of them keep no target"
        fix = "Raise max_length, or shorten the prompts"
    return f"{where}: got {num_rows} rows of which none can be trained on ({cause}); allowed: at least one. {fix}."


_ORDER_STREAM = 0x0DE7  # keeps these draws apart from others that begin with the task's seed


class TaskLoader:
    """Global batches of one task from tokenised rows.

    Every epoch visits each row once; its last batch may be smaller.

    Args:
        dataset: the tokenised rows of the task.
        task: name of the task.
        batch_size: number of rows of a global batch.
        seed: the task's seed, which fixes the order of its rows.
        shuffle: whether each epoch has an order of its own, rather than that of the dataset.
        arrange: makes the rows of a global batch of rows of the dataset; `None` where they are the same.

    Attributes:
        shares_prefixes: whether what the sequences of a batch begin with alike may be computed once.
    """

    shares_prefixes = False

    def __init__(
        self,
        dataset: TokenizedDataset,
        *,
        task: str,
        batch_size: int,
        seed: int,
        shuffle: bool,
        arrange: Arrange | None = None,
    ) -> None:
        """Keep what the order of rows follows from."""
        self.dataset = dataset
        self.task = task
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.arrange = arrange
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def report(self) -> DataReport:
        """What became of the rows."""
        return self.dataset.report

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch."""
        return -(-len(self.dataset) // self.batch_size)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a global batch."""
        return float(self.dataset.lengths.sum()) / self.steps_per_epoch

    def sample(self, num_rows: int) -> tuple[TokenSequence, ...]:
        """Return at most so many rows, in dataset order."""
        return tuple(self.dataset[row] for row in range(min(len(self.dataset), num_rows)))

    @property
    def sample_lengths(self) -> list[int]:
        """Lengths of the rows."""
        return self.dataset.lengths.tolist()

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in the order in which they are trained on."""
        # One epoch is kept: its batches are asked for one after another.
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._drawn_order(epoch))
        return self._order[1]

    def _drawn_order(self, epoch: int) -> np.ndarray:
        rows = np.arange(len(self.dataset))
        if self.shuffle:
            # From seed and epoch alone: a resumed run, or any process, finds the same order.
            rows = np.random.default_rng([_ORDER_STREAM, self.seed, epoch]).permutation(rows)
        return rows

    def sample_batches(self, num_batches: int) -> list[TaskBatch]:
        """Return at most so many global batches, the first ones, for plans; nothing of the training changes by it."""
        # Drawn anew: the epoch that is kept may be in use by a thread that reads ahead.
        order, count = self._drawn_order(0), min(num_batches, self.steps_per_epoch)
        return [
            self._batch(step, order[step * self.batch_size : (step + 1) * self.batch_size]) for step in range(count)
        ]

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of an optimizer step, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = self.order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        return self._batch(step, rows)

    def _batch(self, step: int, rows: np.ndarray) -> TaskBatch:
        sequences = tuple(self.dataset[int(row)] for row in rows)
        arranged = sequences if self.arrange is None else self.arrange(sequences)
        trie = prefix_trie(arranged) if self.shares_prefixes else None
        return TaskBatch(self.task, step, self.seed, arranged, trie=trie)
