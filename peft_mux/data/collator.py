"""`ChunkPackingCollator`: global batches of several tasks in, packed micro-batches out (M §3.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from peft_mux.data.batch import Columns, MuxBatch, SequencePart
from peft_mux.data.formats import TARGET_COLUMNS
from peft_mux.data.packing.passes import Member, PassRules, TaskRows, cut_into_passes, round_up
from peft_mux.data.rows import RowCells, with_given_targets
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence, batch_totals, with_virtual_tokens
from peft_mux.errors import ConfigError, DataError


class ChunkPackingCollator:
    """Packs each task's sequences within its global batch, and lays the packs of all tasks out in micro-batches.

    Args:
        chunk_size: tokens of a chunk; by default the rule of M §3.5 over the lengths at hand.
        min_chunk_size: smallest chunk size that the rule gives.
        pad_to_chunks: whether to fill each task's part of a stream up to a multiple of the chunk size.
        pad_token_id: token id of that padding.
        split_long_sequences: whether to lay sequences that are longer than a micro-batch out as parts in consecutive
            ones (see `peft_mux.data.batch`); by default they get a micro-batch of their own. Sequences with a class
            stay whole.
        virtual_labels: label of each virtual token that rows of a task begin with, by name of the task, for calls with
            rows (`MultiTaskPeftModel.virtual_labels`); sequences that `micro_batches` gets begin with them already.

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
        """Store how to pack and to pad."""
        self.rules = PassRules(split_long_sequences, chunk_size, min_chunk_size)
        self.pad_to_chunks = pad_to_chunks
        self.pad_token_id = pad_token_id
        self.virtual_labels = virtual_labels or {}

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> MuxBatch:
        """Collate rows of one or more tasks into one `MuxBatch`, for use in a plain `DataLoader`.

        Args:
            features: each with `input_ids`, and optionally `task` (name), `labels` (not shifted; by default the input),
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
                    ", ".join(f"{name} {['L', *values.shape[1:]]}" for name, values in one.token_columns.items())
                    for one in (sequences[-1], sequences[0])
                )
                if named != first:
                    got = f"columns of tokens {named or 'none'}, where the first row has {first or 'none'}"
                    raise DataError(f"features of {name!r} row {index}: got {got}; allowed: the same in all rows.")
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
            only: indices of the sequences to lay out, for each batch; by default all. Places and loss weights are
                those within the whole global batch either way.
            num_passes: the intended number of micro-batches; by default as few as packing finds.

        Returns:
            Micro-batches, each sorted by task, with only the tasks that have tokens in it.
        """
        chosen = [None] * len(batches) if only is None else only
        lengths = [[len(sequence) for sequence in batch.sequences] for batch in batches]
        stay_whole = [[not sequence.can_be_split for sequence in batch.sequences] for batch in batches]
        tries = [batch.trie for batch in batches]
        rows = list(map(TaskRows, lengths, chosen, stay_whole, tries))
        passes = cut_into_passes(rows, self.rules, bound=max_tokens, num_passes=num_passes)
        # Over the whole step even if only some are laid out, so that all processes take one size.
        chunk_size = self.rules.size([length for own in lengths for length in own]) if self.pad_to_chunks else None
        # In data order and not in that of the stream, so that packing never changes a dropout draw.
        places = [np.cumsum([0, *own]) for own in lengths]
        totals = [batch_totals(batch) for batch in batches]
        weights = []
        for batch, own, are_whole in zip(batches, totals, stay_whole, strict=True):
            # By the global batch, so that the losses of micro-batches add up to its mean however they are cut. Where
            # each target is one term, they are counted already.
            is_counted = batch.totals is None and not any(are_whole)
            terms = own["num_target_tokens"] if is_counted else batch.num_targets
            weights.append(1.0 / terms if terms else 0.0)
        micro_batches = []
        for members in passes:
            stream = _MicroBatchBuilder()
            # Rows of a task lie side by side, so that adapters work on slices (Dispatch, M §3.2).
            tasks = sorted({member.task for member in members})
            for task in tasks:
                own = [member for member in members if member.task == task]
                stream.add_task(batches[task], own, places[task], weights[task], totals[task])
                if chunk_size is not None:
                    stream.pad_task(chunk_size, self.pad_token_id, int(places[task][-1]))
            micro_batches.append(stream.finish().sharing([tries[task] is not None for task in tasks]))
        return micro_batches


class _MicroBatchBuilder:
    """Builds one micro-batch, task by task."""

    def __init__(self) -> None:
        # For each sequence of the stream; positions, labels and places follow from them at the end.
        self.ids: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []
        self.types: list[np.ndarray | None] = []
        self.first_places: list[int] = []
        self.parts: list[SequencePart] = []
        self.class_labels: list[int | float] = []
        self.next_labels: dict[int, int] = {}
        # For each row, and for each task.
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
            members: which tokens of its rows.
            places: where each of its rows begins within the global batch.
            weight: weight of each loss term.
            totals: the sums over the global batch that losses divide by.
        """
        rows = [(batch.sequences[member.index], member) for member in members]
        for sequence, member in rows:
            # Rows of several sequences are never cut; each of these is whole, with positions from 0.
            bounds = sequence.sequence_bounds if sequence.starts else ((member.start, member.end),)
            for start, end in bounds:
                labels = sequence.labels[start:end]
                if end < len(sequence) and not sequence.starts:
                    # The target of a part's last token is in the next micro-batch, whose labels this one does not see.
                    self.next_labels[len(self.ids)] = int(sequence.labels[end])
                if sequence.labels_itself:
                    # One place further, from where all labels are shifted back; such rows are never cut.
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
            if sequence.class_label is not None:
                self.class_labels += [sequence.class_label] * len(bounds)
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

    def pad_task(self, chunk_size: int, pad_token_id: int, first_place: int) -> None:
        """Fill the last task's part up to whole chunks, as one sequence without targets.

        Args:
            chunk_size: tokens of a chunk.
            pad_token_id: token id of the padding.
            first_place: place of its first token, after all real ones, so that no dropout draw changes with padding.

        Raises:
            ConfigError: for losses of whole sequences, which padding cannot take part in.
        """
        batch = self.batches[-1]
        if batch.sequences[0].class_label is not None:
            raise ConfigError(
                "pad_to_chunks: got True for sequence classification; allowed: False, as padding has no label."
            )
        if not batch.sequences[0].can_be_split:
            raise ConfigError(
                "pad_to_chunks: got True for a loss of whole sequences; allowed: False, as padding has no loss term."
            )
        tokens = self.task_offsets[-1] - self.task_offsets[-2]
        missing = round_up(tokens, chunk_size) - tokens
        if missing == 0:
            return
        self.ids.append(np.full(missing, pad_token_id, dtype=np.int64))
        self.labels.append(np.full(missing, IGNORE_INDEX, dtype=np.int64))
        self.types.append(None)
        self.first_places.append(first_place)
        # Row -1 is no row of the batch, so padding is never taken for a part of one.
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
        # Position t predicts label t + 1; a sequence's last one nothing, a part's last one the next part's first label.
        labels = np.concatenate((np.concatenate(self.labels)[1:], [IGNORE_INDEX]))
        labels[bounds[1:] - 1] = IGNORE_INDEX
        for index, label in self.next_labels.items():
            labels[bounds[index + 1] - 1] = label
        places = positions + np.repeat(np.asarray(self.first_places, dtype=np.int64), lengths)
        has_parts = not all(part.is_whole for part in self.parts)
        # Places, which dropout draws from, have the start of a part in them already; positions do not.
        if has_parts:
            positions += np.repeat(np.fromiter((part.start for part in self.parts), dtype=np.int64), lengths)
        target_rows = np.flatnonzero(labels != IGNORE_INDEX)
        class_labels = token_types = None
        if self.class_labels:
            if len(self.class_labels) != len(self.ids):
                got = "rows with and without a class"
                raise DataError(f"labels: got {got}; allowed: all sequences of a stream, or none.")
            # One value makes all values: whole numbers of a regression may come as integers.
            is_value = any(isinstance(label, float) for label in self.class_labels)
            class_labels = torch.tensor(self.class_labels, dtype=torch.float32 if is_value else torch.int64)
        if any(types is not None for types in self.types):
            pairs = zip(self.ids, self.types, strict=True)
            token_types = np.concatenate([np.zeros(len(ids), np.int64) if own is None else own for ids, own in pairs])
        # One prompt for all rows of a task, so the first row knows it.
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
            # Empty for whole sequences: then no micro-batches are chained.
            parts=tuple(self.parts) if has_parts else (),
            virtual_tokens=tuple(virtual_tokens) if any(virtual_tokens) else (),
        )


def _column(name: str, rows: list[tuple[TokenSequence, Member]]) -> torch.Tensor:
    """Return a column at the targets of some rows, `[M, ...]`, in the order of the stream."""
    found = []
    for sequence, member in rows:
        labels = sequence.labels.copy()
        labels[[first for first, _ in sequence.sequence_bounds]] = IGNORE_INDEX
        # The targets of the positions from `start` to `end` are the tokens after them.
        start, end = member.start + 1, member.end + 1
        found.append(sequence.token_columns[name][start:end][labels[start:end] != IGNORE_INDEX])
    return torch.from_numpy(np.concatenate(found))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
