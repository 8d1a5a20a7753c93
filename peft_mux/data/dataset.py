"""A task's rows as tokens in flat arrays, and its global batches in their order.

The order of a task's rows is a pure function of its seed and step, which no other task influences. Because the global
batch of any step can be computed from the step alone, resuming and pausing need no saved position.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from peft_mux.data.formats import detect_format
from peft_mux.data.packing.passes import best_fit_decreasing
from peft_mux.data.task_batch import Arrange, TaskBatch, TokenSequence, joined, prefix_trie
from peft_mux.data.tokenize import CLASS_LABELS, DataReport, RowTokenizer, TokenizeOptions, checked_row
from peft_mux.errors import DataError, PeftMuxError
from peft_mux.user_code import describe_error

_MAX_ERRORS = 10
_ROWS_PACKED_TOGETHER = 1000
"""TRL packs the rows of each batch of `datasets.Dataset.map`, which has 1,000 of them."""
_ROW_NUMBER = re.compile(r" row (\d+)")
_VALUE = re.compile(r"got [^;]{1,62} \((int|float|bool)\)\.")
"""A number where another type is expected. Rows that differ only in this number have the same fault."""
_ORDER_STREAM = 0x0DE7  # separates these random numbers from others that are seeded with the task's seed
_Extras = tuple[tuple[int, ...], Mapping[str, np.ndarray], Mapping[str, float | np.ndarray]]
"""Fields of `TokenSequence` that most rows leave empty: `starts`, `token_columns` and `row_values`."""
_NO_EXTRAS: _Extras = ((), {}, {})


class TokenizedDataset:
    """Rows as tokens, in flat int32 arrays.

    Args:
        sequences: the tokenised rows, in dataset order.
        report: what happened to the dataset's rows.

    Attributes:
        report: what happened to the dataset's rows.
        lengths: int64, number of tokens of each row.
        num_targets: int64, number of loss terms of each row.
    """

    def __init__(self, sequences: list[TokenSequence], report: DataReport) -> None:
        self.report = report
        self.lengths = np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))
        self.num_targets = np.fromiter((s.num_targets for s in sequences), dtype=np.int64, count=len(sequences))
        self._offsets = np.concatenate(([0], np.cumsum(self.lengths)))
        # int32 is enough for any vocabulary and half as large as the int64 that torch expects; rows are converted when
        # they are read.
        self._ids = np.concatenate([s.input_ids for s in sequences]).astype(np.int32)
        self._labels = np.concatenate([s.labels for s in sequences]).astype(np.int32)
        self._rows = np.fromiter((s.row for s in sequences), dtype=np.int64, count=len(sequences))
        self._classes = [s.class_label for s in sequences]
        self._types = [s.token_type_ids for s in sequences]
        # By row number. Most datasets have none, and three empty containers per row would take 200 bytes.
        self._extras: dict[int, _Extras] = {
            number: (s.starts, s.token_columns, s.row_values)
            for number, s in enumerate(sequences)
            if s.starts or s.token_columns or s.row_values
        }
        # All rows of a dataset have the same loss and the same learnt prompt, so their other fields are equal.
        self._first = sequences[0]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSequence:
        """Return a tokenised row."""
        part = slice(self._offsets[index], self._offsets[index + 1])
        starts, columns, values = self._extras.get(index, _NO_EXTRAS)
        return TokenSequence(
            self._ids[part].astype(np.int64),
            self._labels[part].astype(np.int64),
            int(self._rows[index]),
            self._classes[index],
            self._types[index],
            is_one_term=self._first.is_one_term,
            starts=starts,
            token_columns=columns,
            row_values=values,
            labels_itself=self._first.labels_itself,
            num_virtual_tokens=self._first.num_virtual_tokens,
        )

    def num_classes(self) -> int:
        """Return the number of classes in the labels of the rows or of their tokens; 1 for regression."""
        several = self._extras.get(0, _NO_EXTRAS)[2].get(CLASS_LABELS)
        if several is not None:
            return len(np.atleast_1d(several))
        labels = [label for label in self._classes if label is not None]
        if any(isinstance(label, float) for label in labels):
            return 1
        return int(max(labels) if labels else self._labels.max()) + 1

    def has_tokens_of(self, other: TokenizedDataset) -> bool:
        """Whether the rows of both have the same tokens, in any order and however they are packed."""
        return len(self._ids) == len(other._ids) and np.array_equal(np.sort(self._ids), np.sort(other._ids))

    @property
    def fingerprint(self) -> str:
        """Digest of all tokens and labels, with which a resumed run checks that its data is unchanged."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self._offsets, self._ids, self._labels):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(repr(self._classes).encode())
        # Rows without these fields keep the digest of older checkpoints.
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
        DataError: if rows cannot be trained on (the message names up to ten), or if no row is left.
    """
    where = f"tasks.{options.task}.{split}"
    reader: RowTokenizer | None = None
    sequences: list[TokenSequence] = []
    errors: list[str] = []
    more = ""
    rows, view = _rows(dataset, where), options.row_form.view
    for index, row in enumerate(rows if view is None else view(rows, where)):
        if len(errors) == _MAX_ERRORS:
            more = " (and perhaps more)"
            break
        try:
            reader = reader or open_rows(row, options=options, tokenizer=tokenizer, split=split)
            sequence = reader(row, index)
        # Reading continues after an error, so that users see several at a time.
        except DataError as error:
            errors.append(str(error))
            # The other rows cannot be read if the format is unknown.
            if reader is None:
                break
            continue
        if sequence is not None:
            sequences.append(sequence)
    if errors:
        raise DataError("\n".join(_without_repeats(errors)) + more)
    if reader is None:
        raise DataError(f"{where} must have at least one row, got none.")
    if not any(sequence.num_targets for sequence in sequences):
        report, limit = reader.report, options.limit
        if reader.num_masked:
            cause = f"all labels are masked (-100) in {reader.num_masked} of them"
            fix = "Check the labels, the completion or the generation blocks of the chat template"
        elif report.num_dropped_long:
            cause, fix = f"{report.num_dropped_long} are longer than {limit} tokens", "Raise max_length or truncate"
        else:
            cause = f"cut to {limit} tokens, {report.num_without_targets} of them keep no target"
            fix = "Raise max_length, or shorten the prompts"
        got = f"{report.num_rows} rows, none of which can be trained on ({cause})"
        raise DataError(f"{where} must have at least one row, got {got}. {fix}.")
    return TokenizedDataset(packed(sequences, options.max_length) if options.packing else sequences, reader.report)


def packed(sequences: Sequence[TokenSequence], max_length: int) -> list[TokenSequence]:
    """Return rows of up to `max_length` tokens that consist of whole sequences, as the strategy "bfd" of TRL packs."""
    rows = []
    for start in range(0, len(sequences), _ROWS_PACKED_TOGETHER):
        block = sequences[start : start + _ROWS_PACKED_TOGETHER]
        lengths = [len(row) - row.num_virtual_tokens for row in block]
        packs = best_fit_decreasing(lengths, max_length, in_order_of_placing=True)
        rows += [joined([block[index] for index in pack]) for pack in packs]
    return rows


def open_rows(first: Any, *, options: TokenizeOptions, tokenizer: Any, split: str = "train_dataset") -> RowTokenizer:
    """Return a `RowTokenizer` for the rows of a dataset.

    Args:
        first: the first row, whose columns decide the format.
        options: how the rows of the task become tokens.
        tokenizer: a tokenizer of transformers; may be `None` for rows that are tokenised already.
        split: name of the dataset, for messages.

    Raises:
        DataError: if the columns match no format.
        ConfigError: if the options do not apply to the format.
    """
    where = f"tasks.{options.task}.{split}"
    columns = list(checked_row(first, 0, where))
    return RowTokenizer(options, tokenizer, detect_format(columns, where=where, row_form=options.row_form), split)


def _rows(dataset: Any, where: str) -> Iterator[Any]:
    """Yield the first `len(dataset)` rows of a dataset.

    Raises:
        DataError: if the dataset's own code raises; the message names the row.
    """
    index = 0
    try:
        # Bounded, because datasets that compute their rows may iterate without end.
        for row in islice(dataset, len(dataset)):
            yield row
            index += 1
    except PeftMuxError:
        raise
    # KeyboardInterrupt is not caught.
    except (Exception, SystemExit) as error:
        got = describe_error(error)
        raise DataError(f"{where} row {index} cannot be read: {got}.") from error


def _without_repeats(errors: list[str]) -> list[str]:
    """Merge errors that differ only in the row: the first one lists the other rows."""
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


class RowLoader:
    """Base class of `TaskLoader` and `StreamLoader`, which return the global batches of one task.

    Args:
        task: name of the task.
        batch_size: number of rows of a global batch.
        seed: the task's seed, which fixes the order of its rows and its dropout.
        arrange: converts the rows of a global batch into the rows that the loss reads; `None` if they are the same.

    Attributes:
        shares_prefixes: whether shared prefixes of the sequences of a batch may be computed once.
    """

    def __init__(self, *, task: str, batch_size: int, seed: int, arrange: Arrange | None = None) -> None:
        self.task = task
        self.batch_size = batch_size
        self.seed = seed
        self.arrange = arrange
        self.shares_prefixes = False

    def _task_batch(self, step: int, sequences: tuple[TokenSequence, ...]) -> TaskBatch:
        arranged = sequences if self.arrange is None else self.arrange(sequences)
        trie = prefix_trie(arranged) if self.shares_prefixes else None
        return TaskBatch(self.task, step, self.seed, arranged, trie=trie)


class TaskLoader(RowLoader):
    """Global batches of one task from tokenised rows.

    Every epoch visits each row once; its last batch may be smaller.

    Args:
        dataset: the tokenised rows of the task.
        shuffle: whether to shuffle the rows in each epoch; otherwise they keep the order of the dataset.
            "group_by_length" shuffles so that a batch has rows of similar length, as Trainer does.
        drops_last: whether each epoch leaves out its last batch if it is smaller.
        **settings: arguments of `RowLoader`.
    """

    def __init__(
        self, dataset: TokenizedDataset, *, shuffle: bool | str, drops_last: bool = False, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.dataset = dataset
        self.shuffle = shuffle
        self.drops_last = drops_last
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def report(self) -> DataReport:
        """What happened to the rows."""
        return self.dataset.report

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches in an epoch."""
        return len(self.dataset) // self.batch_size if self.drops_last else -(-len(self.dataset) // self.batch_size)

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens of a global batch."""
        num_left_out = len(self.dataset) % self.batch_size if self.drops_last else 0
        tokens = float(self.dataset.lengths.sum())
        return (tokens - num_left_out * tokens / len(self.dataset)) / self.steps_per_epoch

    @property
    def sample_lengths(self) -> list[int]:
        """Lengths of the rows."""
        return self.dataset.lengths.tolist()

    def sample(self, num_rows: int) -> tuple[TokenSequence, ...]:
        """Return the first `num_rows` rows in dataset order, or fewer if there are fewer."""
        return tuple(self.dataset[row] for row in range(min(len(self.dataset), num_rows)))

    def sample_batches(self, num_batches: int) -> list[TaskBatch]:
        """Return the first `num_batches` global batches of the first epoch, or fewer if there are fewer, for plans."""
        return [self.batch(step) for step in range(min(num_batches, self.steps_per_epoch))]

    def order(self, epoch: int) -> np.ndarray:
        """Return the row numbers of an epoch in training order."""
        # The order of one epoch is cached. Another thread may read another epoch meanwhile, so the cache is one tuple.
        kept = self._order
        if kept is None or kept[0] != epoch:
            rows = np.arange(len(self.dataset))
            if self.shuffle == "group_by_length":
                seed = int(np.random.default_rng([_ORDER_STREAM, self.seed, epoch]).integers(2**63))
                generator = torch.Generator().manual_seed(seed)
                rows = np.asarray(get_length_grouped_indices(self.sample_lengths, self.batch_size, generator=generator))
            elif self.shuffle:
                # Depends only on seed and epoch, so a resumed run and all processes get the same order.
                rows = np.random.default_rng([_ORDER_STREAM, self.seed, epoch]).permutation(rows)
            kept = self._order = (epoch, rows)
        return kept[1]

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of an optimizer step, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = self.order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        return self._task_batch(step, tuple(self.dataset[int(row)] for row in rows))
