"""What losses read of rows beside their tokens: columns of numbers a token, values a row, and totals of the batch."""

# MERGED: `ChunkPackingCollator`: global batches of several tasks in, packed micro-batches out (M §3.5).

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from peft_mux.data.batch import Columns, MuxBatch, SequencePart
from peft_mux.data.formats import TARGET_COLUMNS, RowCells
from peft_mux.data.packing.passes import Member, PassRules, TaskRows, cut_into_passes, round_up
from peft_mux.data.rows import read_columns, with_given_targets
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence, batch_totals, with_virtual_tokens
from peft_mux.errors import ConfigError, DataError


class RowValues:
    """Collects, row by row and task by task, what a micro-batch tells losses of its rows."""

    def __init__(self) -> None:
        """Begin without a row."""
        self._row_sequences: list[int] = []
        self._row_offsets = [0]
        self._columns: list[Columns] = []
        self._values: list[Columns] = []
        self._totals: list[Mapping[str, float]] = []
        self._rows: list[tuple[TokenSequence, int, int]] = []

    def add_row(self, sequence: TokenSequence, start: int, end: int) -> None:
        """Add a row, or the tokens from `start` to `end` of one."""
        self._row_sequences.append(1 + len(sequence.starts))
        self._rows.append((sequence, start, end))

    def end_task(self, totals: Mapping[str, float]) -> None:
        """End the rows of a task; `totals` are the sums over its global batch."""
        rows, self._rows = self._rows, []
        self._row_offsets.append(len(self._row_sequences))
        self._totals.append(totals)
        names = rows[0][0].token_columns if rows else ()
        self._columns.append({name: _column(name, rows) for name in names})
        values = rows[0][0].row_values if rows else ()
        self._values.append({name: _values(name, rows) for name in values})

    def add_padding(self) -> None:
        """Count the padding of the last task as one more row, without targets and values."""
        self._row_sequences.append(1)
        self._row_offsets[-1] += 1

    def fields(self) -> dict[str, Any]:
        """Return these as fields of a `MuxBatch`."""
        return {
            "row_sequences": tuple(self._row_sequences),
            "row_offsets": tuple(self._row_offsets),
            "target_columns": tuple(self._columns),
            "row_values": tuple(self._values),
            "totals": tuple(self._totals),
        }


def _column(name: str, rows: list[tuple[TokenSequence, int, int]]) -> torch.Tensor:
    """Return a column at the targets of some rows, `[M, ...]`, in the order of the stream."""
    parts = []
    for sequence, start, end in rows:
        labels = sequence.labels.copy()
        labels[[first for first, _ in sequence.sequence_bounds]] = IGNORE_INDEX
        # What the positions from `start` to `end` predict: the tokens after them.
        parts.append(
            sequence.token_columns[name][np.flatnonzero(labels[start + 1 : end + 1] != IGNORE_INDEX) + start + 1]
        )
    return torch.from_numpy(np.concatenate(parts))


def _values(name: str, rows: list[tuple[TokenSequence, int, int]]) -> torch.Tensor:
    return torch.from_numpy(np.asarray([sequence.row_values[name] for sequence, _, _ in rows], dtype=np.float32))


class ChunkPackingCollator:
    """Packs each task's sequences within its global batch, and lays the packs of all tasks out in micro-batches.

    Args:
        chunk_size: tokens of a chunk; by default the rule of M §3.5 over the lengths at hand.
        min_chunk_size: least chunk size that the rule gives.
        pad_to_chunks: whether to fill each task's part of a stream up to a multiple of the chunk size.
        pad_token_id: token id that the part is filled up with.
        split_long_sequences: whether to lay sequences that are longer than a micro-batch out as parts in consecutive
            ones (see `peft_mux.data.batch`); by default they get a micro-batch of their own. Sequences with a class
            stay whole.
        virtual_labels: label of each virtual token that rows of a task begin with, by name of the task, for calls with
            rows (`MultiTaskPeftModel.virtual_labels`); `micro_batches` gets sequences that begin with them already.

    Example:
        >>> collator = ChunkPackingCollator()
        >>> batch = collator([{"task": "a", "input_ids": [5, 6, 7]}, {"task": "b", "input_ids": [8, 9]}])
        >>> batch.task_offsets
        (0, 3, 5)
    """

    def __init__(
        self,
        *,
        chunk_size: int | None = None,
        min_chunk_size: int = 64,
        pad_to_chunks: bool = False,
        pad_token_id: int = 0,
        split_long_sequences: bool = False,
        virtual_labels: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Keep how to pack and to pad."""
        self.rules = PassRules(split_long_sequences, chunk_size, min_chunk_size)
        self.pad_to_chunks = pad_to_chunks
        self.pad_token_id = pad_token_id
        self.virtual_labels = virtual_labels or {}

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> MuxBatch:
        """Collate rows of one or more tasks into one `MuxBatch`, for use in a plain `DataLoader`.

        Args:
            features: each with `input_ids`, and optionally `task` (name), `labels` (not shifted; by default the input),
                `weights` a token, several `target_ids` with `target_weights` a token, `label` (class), `seed` and
                `step`.

        Raises:
            DataError: if weights or targets cannot be read, or if some rows of a task have them and others do not.
        """
        grouped: dict[str, list[Mapping[str, Any]]] = {}
        for feature in features:
            grouped.setdefault(str(feature.get("task", "default")), []).append(feature)
        batches = [
            TaskBatch(
                name,
                int(rows[0].get("step", 0)),
                int(rows[0].get("seed", 0)),
                tuple(
                    with_virtual_tokens(_sequence(row, index), self.virtual_labels.get(name, ()))
                    for index, row in enumerate(rows)
                ),
            )
            for name, rows in grouped.items()
        ]
        for batch in batches:
            _check_alike(batch)
        (micro_batch,) = self.micro_batches(batches, max_tokens=sum(batch.num_tokens for batch in batches))
        return micro_batch

    def micro_batches(
        self,
        batches: Sequence[TaskBatch],
        *,
        max_tokens: int,
        only: Sequence[Sequence[int]] | None = None,
        num_passes: int | None = None,
    ) -> list[MuxBatch]:
        """Lay out the global batches of several tasks in micro-batches (`peft_mux.data.packing.passes`).

        A sequence longer than `max_tokens` is split into parts in consecutive micro-batches, or, where it shall not
        be, gets a micro-batch of its own.

        Args:
            batches: one global batch a task, in stream order.
            max_tokens: largest number of tokens of a micro-batch, before any padding to chunks.
            only: indices of the sequences to lay out, for each batch; by default all. Places and loss weights are
                those within the whole global batch either way.
            num_passes: the number of micro-batches that is meant; by default as few as packing finds.

        Returns:
            Micro-batches, each sorted by task, with only the tasks that have tokens in it.
        """
        # Over the whole step even where only some are laid out, so that all processes take one size.
        size = self.size([len(sequence) for batch in batches for sequence in batch.sequences])
        chosen = [None] * len(batches) if only is None else only
        rows = [task_rows(batch, own) for batch, own in zip(batches, chosen, strict=True)]
        members = cut_into_passes(rows, self.rules, bound=max_tokens, num_passes=num_passes)
        layout = _BatchPlaces(batches)
        shares = {batch.task: batch.trie is not None for batch in batches}
        streams = [self._build(batches, layout, part, size) for part in members]
        return [stream.sharing([shares[name] for name in stream.task_names]) for stream in streams]

    def size(self, lengths: Sequence[int]) -> int:
        """Return the chunk size for sequences of these lengths."""
        return self.rules.size(lengths)

    def _build(self, batches: Sequence[TaskBatch], layout: _BatchPlaces, members: list[Member], size: int) -> MuxBatch:
        stream = _MicroBatchBuilder()
        # Rows of a task lie side by side, so that adapters work on slices (Dispatch, M §3.2).
        for task in sorted({member.task for member in members}):
            batch = batches[task]
            chosen = [member for member in members if member.task == task]
            stream.add_task(batch, layout, task, chosen)
            if self.pad_to_chunks:
                self._pad(stream, batch, size)
        return stream.finish()

    def _pad(self, stream: _MicroBatchBuilder, batch: TaskBatch, size: int) -> None:
        if batch.sequences and batch.sequences[0].class_label is not None:
            raise ConfigError(
                "pad_to_chunks: got True for sequence classification; allowed: False, as padding has no label."
            )
        if batch.sequences and not batch.sequences[0].can_be_split:
            raise ConfigError(
                "pad_to_chunks: got True for a loss of whole sequences; allowed: False, as padding has no loss term."
            )
        # Places behind all real tokens, so that no token's dropout draws change with the padding.
        stream.pad_task(size, self.pad_token_id, first_place=batch.num_tokens)


class _BatchPlaces:
    """What a sequence owes to its whole global batch, whichever micro-batch it falls into.

    Attributes:
        places: for each task, where each sequence begins within the global batch, in data order.
        weights: for each task, 1 / number of loss terms of the global batch; 0 where it has none.
        totals: for each task, the sums over the global batch that losses divide by.
    """

    def __init__(self, batches: Sequence[TaskBatch]) -> None:
        self.places = []
        for batch in batches:
            # In data order and not in that of the stream, so that packing never moves a dropout draw.
            lengths = np.fromiter((len(sequence) for sequence in batch.sequences), dtype=np.int64)
            self.places.append(np.cumsum(lengths) - lengths)
        self.totals = [batch_totals(batch) for batch in batches]
        # By the global batch, so that the losses of micro-batches add up to its mean however they are cut.
        terms = [_num_terms(batch, totals) for batch, totals in zip(batches, self.totals, strict=True)]
        self.weights = [1.0 / count if count else 0.0 for count in terms]


def task_rows(batch: TaskBatch, only: Sequence[int] | None = None) -> TaskRows:
    """Return what cutting a global batch into passes depends on.

    Args:
        batch: the global batch of one task.
        only: indices of the rows that are to be cut; by default all.
    """
    whole = [not sequence.can_be_split for sequence in batch.sequences]
    return TaskRows([len(sequence) for sequence in batch.sequences], only, whole, batch.trie)


def _num_terms(batch: TaskBatch, totals: Mapping[str, float]) -> float:
    """Return the number of loss terms of a global batch; where each target is one, they are counted already."""
    if batch.totals is None and all(sequence.can_be_split for sequence in batch.sequences):
        return totals["num_target_tokens"]
    return batch.num_targets


class _MicroBatchBuilder:
    """Builds one micro-batch, task by task."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        self.types: list[np.ndarray | None] = []
        self.first_places: list[int] = []
        self.parts: list[SequencePart] = []
        self.next_labels: dict[int, int] = {}
        self.class_labels: list[int | float] = []
        self.batches: list[TaskBatch] = []
        self.weights: list[float] = []
        self.rows = RowValues()
        self.task_offsets, self.sequence_offsets = [0], [0]
        self.num_padding_tokens = 0

    def add_task(self, batch: TaskBatch, layout: _BatchPlaces, task: int, chosen: list[Member]) -> None:
        """Append the chosen sequences of a task, or parts of them."""
        for _, index, start, end, _ in chosen:
            sequence = batch.sequences[index]
            for first, last in sequence.sequence_bounds if sequence.starts else ((start, end),):
                self._add_sequence(sequence, first, last, int(layout.places[task][index]) + first)
            num_tokens = len(sequence)
            if sequence.starts:
                # Whole by themselves: rows of several sequences are never split, and positions begin at each anew.
                self.parts += [
                    SequencePart(batch.task, index, 0, last - first, last - first)
                    for first, last in sequence.sequence_bounds
                ]
            else:
                self.parts.append(SequencePart(batch.task, index, start, end, num_tokens))
            self.rows.add_row(sequence, start, end)
            if sequence.class_label is not None:
                self.class_labels += [sequence.class_label] * (1 + len(sequence.starts))
        self.rows.end_task(layout.totals[task])
        self.batches.append(batch)
        self.weights.append(layout.weights[task])
        self.sequence_offsets.append(len(self.ids))
        self.task_offsets.append(self.task_offsets[-1] + sum(member.num_tokens for member in chosen))

    def _add_sequence(self, sequence: TokenSequence, start: int, end: int, place: int) -> None:
        """Append tokens of a row as one sequence of the stream, the first of which has a place in the global batch."""
        types = sequence.token_type_ids
        if end < len(sequence) and not sequence.starts:
            # The target of a part's last token lies in the next micro-batch, whose labels this one does not see.
            self.next_labels[len(self.ids)] = int(sequence.labels[end])
        labels = sequence.labels[start:end]
        if sequence.labels_itself:
            # One place further, from where all labels are shifted back; such rows are never cut.
            self.next_labels[len(self.ids)] = int(labels[-1])
            labels = np.concatenate(([IGNORE_INDEX], labels[:-1]))
        self.ids.append(sequence.input_ids[start:end])
        self.labels.append(labels)
        self.types.append(None if types is None else types[start:end])
        self.first_places.append(place)

    def pad_task(self, size: int, pad_token_id: int, first_place: int) -> None:
        """Fill the last task's part up to whole chunks, as one sequence without targets."""
        tokens = self.task_offsets[-1] - self.task_offsets[-2]
        missing = round_up(tokens, size) - tokens
        if missing == 0:
            return
        self.ids.append(np.full(missing, pad_token_id, dtype=np.int64))
        self.labels.append(np.full(missing, IGNORE_INDEX, dtype=np.int64))
        self.types.append(None)
        self.first_places.append(first_place)
        # Row -1 is no row of the batch, so padding is never taken for a part of one.
        self.parts.append(SequencePart(self.batches[-1].task, -1, 0, missing, missing))
        self.rows.add_padding()
        self.task_offsets[-1] += missing
        self.sequence_offsets[-1] += 1
        self.num_padding_tokens += missing

    def finish(self) -> MuxBatch:
        """Return the micro-batch."""
        lengths = np.fromiter((len(ids) for ids in self.ids), dtype=np.int64)
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
        shifted = np.concatenate(self.labels)
        # Position t predicts label t + 1; a sequence's last one nothing, a part's last one the next part's first label.
        shifted = np.concatenate((shifted[1:], [IGNORE_INDEX]))
        shifted[bounds[1:] - 1] = IGNORE_INDEX
        for index, label in self.next_labels.items():
            shifted[bounds[index + 1] - 1] = label
        places = positions + np.repeat(np.asarray(self.first_places, dtype=np.int64), lengths)
        has_parts = not all(part.is_whole for part in self.parts)
        # Places, which dropout draws from, have the start of a part in them already; positions do not.
        if has_parts:
            positions += np.repeat(np.fromiter((part.start for part in self.parts), dtype=np.int64), lengths)
        target_rows = np.flatnonzero(shifted != IGNORE_INDEX)
        return MuxBatch(
            input_ids=_tensor(np.concatenate(self.ids))[None],
            position_ids=_tensor(positions)[None],
            labels=_tensor(shifted)[None],
            target_rows=_tensor(target_rows),
            target_offsets=tuple(np.searchsorted(target_rows, self.task_offsets).tolist()),
            token_places=_tensor(places),
            cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
            task_offsets=tuple(self.task_offsets),
            sequence_offsets=tuple(self.sequence_offsets),
            sequence_lengths=tuple(lengths.tolist()),
            task_names=tuple(batch.task for batch in self.batches),
            task_seeds=tuple(batch.seed for batch in self.batches),
            task_steps=tuple(batch.step for batch in self.batches),
            loss_weights=tuple(self.weights),
            num_padding_tokens=self.num_padding_tokens,
            class_labels=self._class_labels(),
            token_type_ids=self._token_types(),
            sequence_target_offsets=tuple(np.searchsorted(target_rows, bounds).tolist()),
            **self.rows.fields(),
            # Empty for whole sequences: that tells others that no micro-batches are chained.
            parts=tuple(self.parts) if has_parts else (),
            virtual_tokens=self._virtual_tokens(),
        )

    def _virtual_tokens(self) -> tuple[int, ...]:
        # One prompt for all rows of a task, so the first row tells it.
        counts = [batch.sequences[0].num_virtual_tokens if batch.sequences else 0 for batch in self.batches]
        return tuple(counts) if any(counts) else ()

    def _class_labels(self) -> torch.Tensor | None:
        if not self.class_labels:
            return None
        if len(self.class_labels) != len(self.ids):
            raise DataError("labels: got rows with and without a class; allowed: all sequences of a stream, or none.")
        is_value = any(isinstance(label, float) for label in self.class_labels)
        # One value makes all values: whole numbers of a regression may come as integers.
        return torch.tensor(self.class_labels, dtype=torch.float32 if is_value else torch.int64)

    def _token_types(self) -> torch.Tensor | None:
        if all(types is None for types in self.types):
            return None
        parts = [np.zeros(len(ids), np.int64) if t is None else t for ids, t in zip(self.ids, self.types, strict=True)]
        return _tensor(np.concatenate(parts))[None]


def _sequence(row: Mapping[str, Any], index: int) -> TokenSequence:
    ids = np.asarray(row["input_ids"], dtype=np.int64)
    labels = np.asarray(row.get("labels", ids), dtype=np.int64)
    columns = read_columns(TARGET_COLUMNS, row, index, np.ones(len(ids), dtype=bool), RowCells("features", None))
    labels = with_given_targets(labels, columns)
    return TokenSequence(ids, labels, index, class_label=row.get("label"), token_columns=columns)


def _check_alike(batch: TaskBatch) -> None:
    names = [
        ", ".join(f"{name} {['L', *values.shape[1:]]}" for name, values in sequence.token_columns.items()) or "none"
        for sequence in batch.sequences
    ]
    for row, own in enumerate(names):
        if own != names[0]:
            got = f"columns of tokens {own}, where the first row has {names[0]}"
            raise DataError(f"features of {batch.task!r} row {row}: got {got}; allowed: the same in all rows.")


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
