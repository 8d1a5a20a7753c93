"""`ChunkPackingCollator`: packs the global batches of several tasks into micro-batches (M §3.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from peft_mux.data.batch import Columns, MuxBatch, SequencePart
from peft_mux.data.formats import TARGET_COLUMNS
from peft_mux.data.packing.passes import Member, PassRules, TaskRows, cut_into_passes, round_up
from peft_mux.data.row_cells import RowCells, with_given_targets
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence, batch_totals, with_virtual_tokens
from peft_mux.errors import ConfigError, DataError


class ChunkPackingCollator:
    """Packs each task's sequences within its global batch, and combines the packs of all tasks into micro-batches.

    Args:
        chunk_size: number of tokens per chunk; by default computed from the sequence lengths by the rule of M §3.5.
        min_chunk_size: minimum chunk size of this rule.
        pad_to_chunks: whether to pad each task's part of a stream to a multiple of the chunk size.
        split_long_sequences: whether to split sequences that are longer than a micro-batch into parts in consecutive
            micro-batches (see `peft_mux.data.batch`); by default each gets its own micro-batch. Sequences with a class
            label are never split.
        virtual_labels: for each task name, the labels of the virtual tokens to put in front of its rows
            (`MultiTaskPeftModel.virtual_labels`). Used by `__call__` only; the sequences that `micro_batches` receives
            already start with virtual tokens.

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
        split_long_sequences: bool = False,
        virtual_labels: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.rules = PassRules(split_long_sequences, chunk_size, min_chunk_size)
        self.pad_to_chunks = pad_to_chunks
        self.virtual_labels = virtual_labels or {}

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> MuxBatch:
        """Collate rows of one or more tasks into one `MuxBatch`, for use in a plain `DataLoader`.

        Args:
            features: rows with `input_ids`, and optionally `task` (name), `labels` (not shifted; default: `input_ids`),
                `weights` per token, several `target_ids` with `target_weights` per token, `label` (class), `seed` and
                `step`.

        Raises:
            DataError: if weights or targets cannot be read, or if only some rows of a task have them.
        """
        grouped: dict[str, list[Mapping[str, Any]]] = {}
        for feature in features:
            grouped.setdefault(str(feature.get("task", "default")), []).append(feature)
        cells, batches = RowCells("features"), []
        for name, rows in grouped.items():
            sequences: list[TokenSequence] = []
            for index, row in enumerate(rows):
                ids = np.asarray(row["input_ids"], dtype=np.int64)
                columns = cells.token_columns(TARGET_COLUMNS, row, index, np.ones(len(ids), dtype=bool))
                labels = with_given_targets(np.asarray(row.get("labels", ids), dtype=np.int64), columns)
                sequence = TokenSequence(ids, labels, index, class_label=row.get("label"), token_columns=columns)
                sequences.append(with_virtual_tokens(sequence, self.virtual_labels.get(name, ())))
                named, first = (
                    ", ".join(f"{name} {['L', *values.shape[1:]]}" for name, values in compared.token_columns.items())
                    for compared in (sequences[-1], sequences[0])
                )
                if named != first:
                    got = f"columns of tokens {named or 'none'}, where the first row has {first or 'none'}"
                    raise DataError(
                        f"features of {name!r} row {index} must have the token columns of the first row, got {got}."
                    )
            step, seed = int(rows[0].get("step", 0)), int(rows[0].get("seed", 0))
            batches.append(TaskBatch(name, step, seed, tuple(sequences)))
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

        A sequence longer than `max_tokens` is split into parts in consecutive micro-batches, or gets a micro-batch of
        its own if it may not be split.

        Args:
            batches: one global batch per task, in stream order.
            max_tokens: largest number of tokens of a micro-batch, before any padding to chunks.
            only: indices of the sequences to lay out, for each batch; by default all. Places and loss weights always
                refer to the whole global batch.
            num_passes: the intended number of micro-batches; by default as few as packing finds.

        Returns:
            Micro-batches, each sorted by task, containing only tasks that have tokens in it.
        """
        chosen = [None] * len(batches) if only is None else only
        lengths = [[len(sequence) for sequence in batch.sequences] for batch in batches]
        stay_whole = [not all(sequence.can_be_split for sequence in batch.sequences) for batch in batches]
        tries = [batch.trie for batch in batches]
        rows = list(map(TaskRows, lengths, chosen, stay_whole, tries))
        passes = cut_into_passes(rows, self.rules, bound=max_tokens, num_passes=num_passes)
        # Computed from all rows even if only some are laid out, so that all processes use the same size.
        chunk_size = self.rules.size([length for rows in lengths for length in rows]) if self.pad_to_chunks else None
        # In data order, not in stream order, so that packing does not change dropout masks.
        places = [np.cumsum([0, *rows]) for rows in lengths]
        totals = [batch_totals(batch) for batch in batches]
        weights = []
        for batch, counts, stays_whole in zip(batches, totals, stay_whole, strict=True):
            # Divided by the terms of the global batch, so that the losses of its micro-batches add up to its mean. If
            # each target is one term, `num_target_tokens` is their number.
            is_counted = batch.totals is None and not stays_whole
            terms = counts["num_target_tokens"] if is_counted else batch.num_targets
            weights.append(1.0 / terms if terms else 0.0)
        micro_batches = []
        for members in passes:
            stream = _MicroBatchBuilder()
            # The rows of a task are contiguous, so that adapters work on slices (Dispatch, M §3.2).
            tasks = sorted({member.task for member in members})
            for task in tasks:
                of_task = [member for member in members if member.task == task]
                stream.add_task(batches[task], of_task, places[task], weights[task], totals[task])
                if chunk_size is not None:
                    stream.pad_task(chunk_size, int(places[task][-1]))
            micro_batches.append(stream.finish().sharing([tries[task] is not None for task in tasks]))
        return micro_batches


class _MicroBatchBuilder:
    """Builds one micro-batch, task by task."""

    def __init__(self) -> None:
        # Per sequence of the stream; `finish` derives positions, labels and places from them.
        self.ids: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        self.types: list[np.ndarray | None] = []
        self.first_places: list[int] = []
        self.parts: list[SequencePart] = []
        self.class_labels: list[int | float | None] = []
        self.next_labels: dict[int, int] = {}
        # Per row, then per task.
        self.row_sequences: list[int] = []
        self.batches: list[TaskBatch] = []
        self.weights: list[float] = []
        self.totals: list[Mapping[str, float]] = []
        self.columns: list[Columns] = []
        self.values: list[Columns] = []
        self.task_offsets, self.sequence_offsets, self.row_offsets = [0], [0], [0]
        self.num_padding_tokens = 0

    def add_task(
        self, batch: TaskBatch, members: list[Member], places: np.ndarray, weight: float, totals: Mapping[str, float]
    ) -> None:
        """Append the chosen sequences of a task, or parts of them.

        Args:
            batch: the global batch.
            members: which tokens of its rows to append.
            places: the place of each row's first token in the global batch.
            weight: weight of each loss term.
            totals: sums over the global batch, used as divisors by losses.
        """
        rows = [(batch.sequences[member.index], member) for member in members]
        for sequence, member in rows:
            # Rows with several sequences are never split; each sequence is whole, with positions from 0.
            bounds = sequence.sequence_bounds if sequence.starts else ((member.start, member.end),)
            for start, end in bounds:
                labels = sequence.labels[start:end]
                if sequence.class_label is not None:  # the loss is not of its tokens
                    labels = np.full_like(labels, IGNORE_INDEX)
                if end < len(sequence) and not sequence.starts:
                    # The target of a part's last token is the first token of the next micro-batch.
                    self.next_labels[len(self.ids)] = int(sequence.labels[end])
                if sequence.labels_itself:
                    # Moved one place forward, because `finish` shifts all labels back. Such rows are never split.
                    self.next_labels[len(self.ids)] = int(labels[-1])
                    labels = np.concatenate(([IGNORE_INDEX], labels[:-1]))
                self.ids.append(sequence.input_ids[start:end])
                self.labels.append(labels)
                types = sequence.token_type_ids
                self.types.append(None if types is None else types[start:end])
                self.first_places.append(int(places[member.index]) + start)
                part = (0, end - start, end - start) if sequence.starts else (start, end, len(sequence))
                self.parts.append(SequencePart(batch.task, member.index, *part))
            self.row_sequences.append(len(bounds))
            self.class_labels += [sequence.class_label] * len(bounds)
        if len({sequence.class_label is None for sequence, _ in rows}) > 1:
            got = "rows with and without a class"
            raise DataError(f"labels must be a class for all rows of {batch.task}, or for none, got {got}.")
        first = batch.sequences[members[0].index]
        self.columns.append({name: _column(name, rows) for name in first.token_columns})
        self.values.append(
            {
                name: torch.from_numpy(np.asarray([row.row_values[name] for row, _ in rows], dtype=np.float32))
                for name in first.row_values
            }
        )
        self.batches.append(batch)
        self.weights.append(weight)
        self.totals.append(totals)
        self.sequence_offsets.append(len(self.ids))
        self.row_offsets.append(len(self.row_sequences))
        self.task_offsets.append(self.task_offsets[-1] + sum(member.num_tokens for member in members))

    def pad_task(self, chunk_size: int, first_place: int) -> None:
        """Pad the last task's part to whole chunks with one sequence without targets.

        It repeats the last token of the part. With a token that the task does not have, a NaN in the embedding of that
        token would reach the gradients of the task, as 0 * NaN.

        Args:
            chunk_size: number of tokens per chunk.
            first_place: place of the first padding token, after all real ones, so that dropout masks do not change.

        Raises:
            ConfigError: if the loss has one term per sequence, because padding has no loss term.
        """
        batch = self.batches[-1]
        if batch.sequences[0].class_label is not None:
            raise ConfigError(
                "pad_to_chunks must be False, because padding has no label, got True for sequence classification."
            )
        if batch.sequences[0].is_one_term or batch.sequences[0].labels_itself:
            raise ConfigError(
                "pad_to_chunks must be False, because padding has no loss term, got True for a loss with one term "
                "per sequence."
            )
        tokens = self.task_offsets[-1] - self.task_offsets[-2]
        missing = round_up(tokens, chunk_size) - tokens
        if missing == 0:
            return
        self.ids.append(np.full(missing, self.ids[-1][-1], dtype=np.int64))
        self.labels.append(np.full(missing, IGNORE_INDEX, dtype=np.int64))
        self.types.append(None)
        self.class_labels.append(None)
        self.first_places.append(first_place)
        # Row -1 marks padding.
        self.parts.append(SequencePart(batch.task, -1, 0, missing, missing))
        self.row_sequences.append(1)
        self.task_offsets[-1] += missing
        self.sequence_offsets[-1] += 1
        self.row_offsets[-1] += 1
        self.num_padding_tokens += missing

    def finish(self) -> MuxBatch:
        """Return the micro-batch."""
        lengths = np.fromiter((len(ids) for ids in self.ids), dtype=np.int64)
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
        # Position t predicts label t + 1. The last position of a sequence predicts nothing; the last position of a part
        # predicts the first label of the next part.
        labels = np.concatenate((np.concatenate(self.labels)[1:], [IGNORE_INDEX]))
        labels[bounds[1:] - 1] = IGNORE_INDEX
        for index, label in self.next_labels.items():
            labels[bounds[index + 1] - 1] = label
        places = positions + np.repeat(np.asarray(self.first_places, dtype=np.int64), lengths)
        has_parts = not all(part.is_whole for part in self.parts)
        # Places already include the start of a part; positions do not.
        if has_parts:
            positions += np.repeat(np.fromiter((part.start for part in self.parts), dtype=np.int64), lengths)
        target_rows = np.flatnonzero(labels != IGNORE_INDEX)
        class_labels = token_types = None
        if any(label is not None for label in self.class_labels):
            # If any label is a float, all are regression values; some of them may be stored as integers.
            is_value = any(isinstance(label, float) for label in self.class_labels)
            # Sequences of tasks without classes have a 0, which nothing reads.
            filled = [label or 0 for label in self.class_labels]
            class_labels = torch.tensor(filled, dtype=torch.float32 if is_value else torch.int64)
        if any(types is not None for types in self.types):
            pairs = zip(self.ids, self.types, strict=True)
            token_types = np.concatenate(
                [np.zeros(len(ids), np.int64) if given is None else given for ids, given in pairs]
            )
        # All rows of a task have the same prompt.
        virtual_tokens = [batch.sequences[0].num_virtual_tokens for batch in self.batches]
        return MuxBatch(
            input_ids=_tensor(np.concatenate(self.ids))[None],
            position_ids=_tensor(positions)[None],
            labels=_tensor(labels)[None],
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
            class_labels=class_labels,
            token_type_ids=None if token_types is None else _tensor(token_types)[None],
            sequence_target_offsets=tuple(np.searchsorted(target_rows, bounds).tolist()),
            row_sequences=tuple(self.row_sequences),
            row_offsets=tuple(self.row_offsets),
            target_columns=tuple(self.columns),
            row_values=tuple(self.values),
            totals=tuple(self.totals),
            # Empty if all sequences are whole; then no micro-batches are chained.
            parts=tuple(self.parts) if has_parts else (),
            virtual_tokens=tuple(virtual_tokens) if any(virtual_tokens) else (),
        )


def _column(name: str, rows: list[tuple[TokenSequence, Member]]) -> torch.Tensor:
    """Return the values of a column at the targets of some rows, `[M, ...]`, in stream order."""
    parts = []
    for sequence, member in rows:
        if sequence.labels_itself:  # never split
            parts.append(sequence.token_columns[name][sequence.labels != IGNORE_INDEX])
            continue
        labels = sequence.labels.copy()
        labels[[first for first, _ in sequence.sequence_bounds]] = IGNORE_INDEX
        # The targets of the positions from `start` to `end` are the tokens after them.
        start, end = member.start + 1, member.end + 1
        parts.append(sequence.token_columns[name][start:end][labels[start:end] != IGNORE_INDEX])
    return torch.from_numpy(np.concatenate(parts))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
