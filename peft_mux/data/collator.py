"""`ChunkPackingCollator`: packs the global batches of several tasks into micro-batches (M §3.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
            first_columns = ""
            for index, row in enumerate(rows):
                ids = np.asarray(row["input_ids"], dtype=np.int64)
                columns = cells.token_columns(TARGET_COLUMNS, row, index, np.ones(len(ids), dtype=bool))
                labels = with_given_targets(np.asarray(row.get("labels", ids), dtype=np.int64), columns)
                sequence = TokenSequence(ids, labels, index, class_label=row.get("label"), token_columns=columns)
                sequences.append(with_virtual_tokens(sequence, self.virtual_labels.get(name, ())))
                described = ", ".join(f"{key} {['L', *values.shape[1:]]}" for key, values in columns.items()) or "none"
                first_columns = first_columns or described
                if described != first_columns:
                    got = f"columns of tokens {described}, where the first row has {first_columns}"
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
        rows = list(map(TaskRows, lengths, chosen, stay_whole, [batch.trie for batch in batches]))
        passes = cut_into_passes(rows, self.rules, bound=max_tokens, num_passes=num_passes)
        # Computed from all rows even if only some are laid out, so that all processes use the same size.
        chunk_size = self.rules.size([length for rows in lengths for length in rows]) if self.pad_to_chunks else None
        totals = [batch_totals(batch) for batch in batches]
        weights = []
        for batch, counts, stays_whole in zip(batches, totals, stay_whole, strict=True):
            # Divided by the terms of the global batch, so that the losses of its micro-batches add up to its mean. If
            # each target is one term, `num_target_tokens` is their number.
            is_counted = batch.totals is None and not stays_whole
            terms = counts["num_target_tokens"] if is_counted else batch.num_targets
            weights.append(1.0 / terms if terms else 0.0)
        # In data order, not in stream order, so that packing does not change dropout masks.
        places = [np.cumsum([0, *rows]) for rows in lengths]
        micro_batches = []
        for members in passes:
            pieces: list[_Piece] = []
            row_sequences: list[int] = []
            columns: list[Columns] = []
            values: list[Columns] = []
            sequence_offsets, row_offsets = [0], [0]
            # The rows of a task are contiguous, so that adapters work on slices (Dispatch, M §3.2).
            tasks = sorted({member.task for member in members})
            for task in tasks:
                batch, of_task = batches[task], [member for member in members if member.task == task]
                rows_of_task = [(batch.sequences[member.index], member) for member in of_task]
                for sequence, member in rows_of_task:
                    of_row = _pieces(sequence, member, int(places[task][member.index]), batch.task)
                    pieces += of_row
                    row_sequences.append(len(of_row))
                if len({sequence.class_label is None for sequence, _ in rows_of_task}) > 1:
                    got = "rows with and without a class"
                    raise DataError(f"labels must be a class for all rows of {batch.task}, or for none, got {got}.")
                first = rows_of_task[0][0]
                columns.append({name: _column(name, rows_of_task) for name in first.token_columns})
                of_rows = {name: [row.row_values[name] for row, _ in rows_of_task] for name in first.row_values}
                values.append(
                    {name: torch.from_numpy(np.asarray(row, dtype=np.float32)) for name, row in of_rows.items()}
                )
                if chunk_size is not None:
                    padding = _padding(batch, pieces[sequence_offsets[-1] :], chunk_size, int(places[task][-1]))
                    pieces += padding
                    row_sequences += [1] * len(padding)
                sequence_offsets.append(len(pieces))
                row_offsets.append(len(row_sequences))
            of_batch = [batches[task] for task in tasks]
            # All rows of a task have the same prompt.
            virtual_tokens = tuple(batch.sequences[0].num_virtual_tokens for batch in of_batch)
            micro_batch = MuxBatch(
                **_tensors(pieces, sequence_offsets),
                sequence_offsets=tuple(sequence_offsets),
                task_names=tuple(batch.task for batch in of_batch),
                task_seeds=tuple(batch.seed for batch in of_batch),
                task_steps=tuple(batch.step for batch in of_batch),
                loss_weights=tuple(weights[task] for task in tasks),
                num_padding_tokens=sum(len(piece.ids) for piece in pieces if piece.part.row < 0),
                row_sequences=tuple(row_sequences),
                row_offsets=tuple(row_offsets),
                target_columns=tuple(columns),
                row_values=tuple(values),
                totals=tuple(totals[task] for task in tasks),
                virtual_tokens=virtual_tokens if any(virtual_tokens) else (),
            )
            micro_batches.append(micro_batch.sharing([batch.trie is not None for batch in of_batch]))
        return micro_batches


class _Piece(NamedTuple):
    """A sequence of a micro-batch, or a part of one.

    Attributes:
        ids: its token ids.
        labels: labels of its tokens, not shifted.
        types: its token types; `None` for zeros.
        first_place: place of its first token in the task's global batch.
        part: the tokens of its row that it holds.
        class_label: class or value of its row; `None` for losses of tokens.
        next_label: the label that its last token predicts.
    """

    ids: np.ndarray
    labels: np.ndarray
    types: np.ndarray | None
    first_place: int
    part: SequencePart
    class_label: int | float | None = None
    next_label: int = IGNORE_INDEX


def _pieces(sequence: TokenSequence, member: Member, first_place: int, task: str) -> list[_Piece]:
    """Return the sequences of a row, or the part of it, that a micro-batch holds."""
    # Rows with several sequences are never split; each sequence is whole, with positions from 0.
    bounds = sequence.sequence_bounds if sequence.starts else ((member.start, member.end),)
    pieces = []
    for start, end in bounds:
        labels, next_label = sequence.labels[start:end], IGNORE_INDEX
        if sequence.class_label is not None:  # the loss is not of its tokens
            labels = np.full_like(labels, IGNORE_INDEX)
        if end < len(sequence) and not sequence.starts:
            # The target of a part's last token is the first token of the next micro-batch.
            next_label = int(sequence.labels[end])
        if sequence.labels_itself:
            # Moved one place forward, because all labels are shifted back later. Such rows are never split.
            next_label = int(labels[-1])
            labels = np.concatenate(([IGNORE_INDEX], labels[:-1]))
        types = None if sequence.token_type_ids is None else sequence.token_type_ids[start:end]
        part = (0, end - start, end - start) if sequence.starts else (start, end, len(sequence))
        pieces.append(
            _Piece(
                sequence.input_ids[start:end],
                labels,
                types,
                first_place + start,
                SequencePart(task, member.index, *part),
                sequence.class_label,
                next_label,
            )
        )
    return pieces


def _padding(batch: TaskBatch, pieces: Sequence[_Piece], chunk_size: int, first_place: int) -> list[_Piece]:
    """Return a sequence without targets that pads a task's part of a stream to whole chunks; none if it is whole.

    It repeats the last token of the part. With a token that the task does not have, a NaN in the embedding of that
    token would reach the gradients of the task, as 0 * NaN.

    Args:
        batch: the task's global batch.
        pieces: the task's part of the stream.
        chunk_size: number of tokens per chunk.
        first_place: place of the first padding token, after all real ones, so that dropout masks do not change.

    Raises:
        ConfigError: if the loss has one term per sequence, because padding has no loss term.
    """
    first = batch.sequences[0]
    if first.class_label is not None or first.is_one_term or first.labels_itself:
        lacking, loss = "loss term", "a loss with one term per sequence"
        if first.class_label is not None:
            lacking, loss = "label", "sequence classification"
        raise ConfigError(f"pad_to_chunks must be False, because padding has no {lacking}, got True for {loss}.")
    tokens = sum(len(piece.ids) for piece in pieces)
    missing = round_up(tokens, chunk_size) - tokens
    if missing == 0:
        return []
    ids = np.full(missing, pieces[-1].ids[-1], dtype=np.int64)
    labels = np.full(missing, IGNORE_INDEX, dtype=np.int64)
    # Row -1 marks padding.
    return [_Piece(ids, labels, None, first_place, SequencePart(batch.task, -1, 0, missing, missing))]


def _tensors(pieces: Sequence[_Piece], sequence_offsets: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a `MuxBatch` that have a value for each token or sequence."""
    lengths = np.fromiter((len(piece.ids) for piece in pieces), dtype=np.int64)
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    task_offsets = bounds[sequence_offsets]
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    # Position t predicts label t + 1. The last position of a sequence predicts nothing; the last position of a part
    # predicts the first label of the next part.
    labels = np.concatenate((np.concatenate([piece.labels for piece in pieces])[1:], [IGNORE_INDEX]))
    labels[bounds[1:] - 1] = [piece.next_label for piece in pieces]
    places = positions + np.repeat(np.asarray([piece.first_place for piece in pieces], dtype=np.int64), lengths)
    has_parts = not all(piece.part.is_whole for piece in pieces)
    # Places already include the start of a part; positions do not.
    if has_parts:
        positions += np.repeat(np.asarray([piece.part.start for piece in pieces], dtype=np.int64), lengths)
    target_rows = np.flatnonzero(labels != IGNORE_INDEX)
    class_labels = token_types = None
    if any(piece.class_label is not None for piece in pieces):
        # If any label is a float, all are regression values; some of them may be stored as integers.
        is_value = any(isinstance(piece.class_label, float) for piece in pieces)
        # Sequences of tasks without classes have a 0, which nothing reads.
        numbers = [piece.class_label or 0 for piece in pieces]
        class_labels = torch.tensor(numbers, dtype=torch.float32 if is_value else torch.int64)
    if any(piece.types is not None for piece in pieces):
        types = [np.zeros(len(piece.ids), np.int64) if piece.types is None else piece.types for piece in pieces]
        token_types = _tensor(np.concatenate(types))[None]
    return {
        "input_ids": _tensor(np.concatenate([piece.ids for piece in pieces]))[None],
        "position_ids": _tensor(positions)[None],
        "labels": _tensor(labels)[None],
        "target_rows": _tensor(target_rows),
        "target_offsets": tuple(np.searchsorted(target_rows, task_offsets).tolist()),
        "token_places": _tensor(places),
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
        "task_offsets": tuple(task_offsets.tolist()),
        "sequence_lengths": tuple(lengths.tolist()),
        "class_labels": class_labels,
        "token_type_ids": token_types,
        "sequence_target_offsets": tuple(np.searchsorted(target_rows, bounds).tolist()),
        # Empty if all sequences are whole; then no micro-batches are chained.
        "parts": tuple(piece.part for piece in pieces) if has_parts else (),
    }


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
