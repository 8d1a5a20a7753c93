"""`MuxBatch`: the flat token stream that is the input of one multiplexed forward pass.

Shape letters: T tokens of the stream, S sequences, N tasks, U computed rows, M targets, P distinct pairs of a computed
row and a label.

A stream of two tasks, `a` with sequences of 3 and 2 tokens and `b` with one of 4 (T=9, S=3, N=2)::

    input_ids     a0 a0 a0 a1 a1 | b0 b0 b0 b0
    position_ids   0  1  2  0  1 |  0  1  2  3      restart at each sequence
    labels        a0 a0  x a1  x | b0 b0 b0  x      the token that a position predicts; x = -100
    token_places   0  1  2  3  4 |  0  1  2  3      place within the task's global batch
    cu_seqlens     0 3 5 9        task_offsets 0 5 9        sequence_offsets 0 2 3

Parts of a long sequence are in consecutive micro-batches (M §3.5, Figure 12c: chunks with KV reuse). A sequence of 11
tokens with at most 5 per pass and chunks of 2, and two short sequences::

    micro-batch m      | 0 1 2 3 | x      0 tokens before it
    micro-batch m + 1  | 4 5 6 7 | y      4, whose keys and values the layers still hold
    micro-batch m + 2  | 8 9 10  |        8

Positions, targets (3 predicts 4), loss weights and places are those of the unsplit sequence. Micro-batches that share
long sequences form a chain: forward passes run in order, backward passes in reverse.

If rows of a task share prefixes, `SharedRows` lists the computed tokens. The micro-batch still describes the whole
stream; activations have one row per computed token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from peft_mux.data.packing.passes import chained
from peft_mux.data.packing.prefixes import MIN_RUN_TOKENS, PrefixTree, build_prefix_tree

Columns = Mapping[str, torch.Tensor]
"""Tensors by column name."""


class SequencePart(NamedTuple):
    """The range of tokens of a row that a sequence of a stream holds.

    Attributes:
        task: name of the task.
        row: index of the row within the task's global batch; -1 for padding.
        start: first token within the row.
        end: one past the last token.
        num_tokens: number of tokens of the whole row.
    """

    task: str
    row: int
    start: int
    end: int
    num_tokens: int

    @property
    def sequence(self) -> tuple[str, int]:
        """Key of the row within the step."""
        return self.task, self.row

    @property
    def has_more(self) -> bool:
        """Whether the sequence continues in the next micro-batch."""
        return self.end < self.num_tokens

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole sequence."""
        return self.start == 0 and not self.has_more


class TargetPairs(NamedTuple):
    """The distinct pairs of a computed row and a label among the targets of a stream.

    Attributes:
        first: int64 `[P]`, for each pair the number of its first target among the M; sorted by task.
        of_target: int64 `[M]`, the pair of each target.
        offsets: offsets of each task's pairs, `N + 1` numbers.
    """

    first: torch.Tensor
    of_target: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Which tokens of a micro-batch are computed.

    Attributes:
        tree: the tree, on the host.
        computed: int64 `[U]`, index in the stream of each computed token.
        row_of_token: int64 `[T]`, the computed row of each token of the stream.
        task_offsets: offsets of each task's computed rows, `N + 1` numbers.
        may_share: for each of the N tasks whether its sequences may share tokens.
        min_tokens: minimum number of tokens of a shared run.
        target_rows: int64, the computed rows that have a target, ascending.
        target_offsets: offsets of each task among the target rows, `N + 1` numbers.
        pairs: the distinct pairs of computed row and label; `None` if all targets are distinct, or if some targets were
            removed.
    """

    tree: PrefixTree
    computed: torch.Tensor
    row_of_token: torch.Tensor
    task_offsets: tuple[int, ...]
    may_share: tuple[bool, ...]
    min_tokens: int
    target_rows: torch.Tensor
    target_offsets: tuple[int, ...]
    pairs: TargetPairs | None = None

    @property
    def num_rows(self) -> int:
        """Number U of computed rows."""
        return self.tree.num_rows


@dataclass(frozen=True, slots=True)
class MuxBatch:
    """Packed tokens of several tasks, sorted by task; batch dimension 1.

    Some tensors are repeated as host-side tuples, so that no code needs to copy device tensors back. The positions with
    a target are computed on the host as well, because finding them on a device would synchronise with it.

    Attributes:
        input_ids: int64 `[1, T]`, the token ids.
        position_ids: int64 `[1, T]`, restarting at each sequence; later parts of a sequence continue its positions.
        labels: int64 `[1, T]`, already shifted: position t predicts `labels[t]`. Targets never cross sequences, but
            they cross parts of one sequence.
        target_rows: int64 `[M]`, the positions that have a target.
        target_offsets: offsets of each task among the target rows, `N + 1` numbers.
        token_places: int64 `[T]`, place of the token within its task's global batch.
        cu_seqlens: int32 `[S + 1]`, cumulative sequence lengths.
        task_offsets: offsets of each task's tokens, `N + 1` numbers.
        sequence_offsets: offsets of each task's sequences, `N + 1` numbers.
        sequence_lengths: number of tokens of each of the S sequences.
        task_names: the N tasks, in stream order.
        task_seeds: seed of each of the N tasks.
        task_steps: index of each task's optimizer step, from 0.
        loss_weights: 1 / number of loss terms in the *global* batch of each task, so that the sum of a
            task's weighted losses over all its micro-batches is its mean loss (promise 1 of the design).
        num_padding_tokens: number of padding tokens (only if equal chunks were requested).
        class_labels: `[S]` int64 or float32 for sequence classification, else `None`.
        token_type_ids: int64 `[1, T]`, token types of text pairs; `None` for zeros.
        sequence_target_offsets: offsets of each sequence among the target rows, `S + 1` numbers.
        row_sequences: number of sequences of each row, in stream order.
        row_offsets: offsets of each task's rows, `N + 1` numbers.
        target_columns: for each task the token columns of its rows at its targets only, `[M_task, ...]`, by name.
        row_values: for each task the values of its rows, float32 `[R_task]` or `[R_task, C]`, by name.
        totals: for each task the sums over its global batch that losses use as divisors, by name (`batch_totals`).
        parts: the token range of each of the S sequences within its row; empty if all are whole.
        virtual_tokens: for each of the N tasks the number of virtual tokens in front of each sequence; empty if there
            are none.
        shared: the computed tokens, if sequences share prefixes; `None` if all tokens are computed.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    target_rows: torch.Tensor
    target_offsets: tuple[int, ...]
    token_places: torch.Tensor
    cu_seqlens: torch.Tensor
    task_offsets: tuple[int, ...]
    sequence_offsets: tuple[int, ...]
    sequence_lengths: tuple[int, ...]
    task_names: tuple[str, ...]
    task_seeds: tuple[int, ...]
    task_steps: tuple[int, ...]
    loss_weights: tuple[float, ...]
    num_padding_tokens: int = 0
    class_labels: torch.Tensor | None = None
    token_type_ids: torch.Tensor | None = None
    sequence_target_offsets: tuple[int, ...] = ()
    row_sequences: tuple[int, ...] = ()
    row_offsets: tuple[int, ...] = ()
    target_columns: tuple[Columns, ...] = ()
    row_values: tuple[Columns, ...] = ()
    totals: tuple[Mapping[str, float], ...] = ()
    parts: tuple[SequencePart, ...] = ()
    virtual_tokens: tuple[int, ...] = ()
    shared: SharedRows | None = None

    @property
    def has_more(self) -> bool:
        """Whether a sequence continues in the next micro-batch."""
        return any(part.has_more for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens T of the stream, including padding."""
        return self.task_offsets[-1]

    @property
    def num_sequences(self) -> int:
        """Number of sequences S."""
        return len(self.sequence_lengths)

    @property
    def num_computed(self) -> int:
        """Number U of rows of the activations: T, or fewer if sequences share prefixes."""
        return self.num_tokens if self.shared is None else self.shared.num_rows

    @property
    def computed_offsets(self) -> tuple[int, ...]:
        """Offsets of each task's rows in the activations, `N + 1` numbers."""
        return self.task_offsets if self.shared is None else self.shared.task_offsets

    def computed(self, values: torch.Tensor) -> torch.Tensor:
        """Select the values of computed tokens from values of all tokens, `[T]` or `[1, T]`."""
        return values if self.shared is None else values.index_select(-1, self.shared.computed)

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the row of the activations for each of some tokens of the stream, int64 of the same shape."""
        return tokens if self.shared is None else self.shared.row_of_token.index_select(0, tokens)

    def sharing(self, may_share: Sequence[bool], min_tokens: int = MIN_RUN_TOKENS) -> MuxBatch:
        """Return the same stream, with shared prefixes of a task's sequences computed once.

        Args:
            may_share: for each of the N tasks whether its sequences may share tokens.
            min_tokens: minimum number of tokens of a shared run.
        """
        if not any(may_share):
            return self
        input_ids, labels = (values[0].cpu().numpy() for values in (self.input_ids, self.labels))
        sequences = np.split(input_ids, list(accumulate(self.sequence_lengths))[:-1])
        groups: list[int | None] = []
        for task, (first, last) in enumerate(pairwise(self.sequence_offsets)):
            for part in self.parts[first:last] if self.parts else [None] * (last - first):
                # Parts of split sequences and padding are not shared.
                is_whole = part is None or (part.is_whole and part.row >= 0)
                groups.append(task if may_share[task] and is_whole else None)
        tree = build_prefix_tree(sequences, groups, min_tokens=min_tokens)
        if tree is None:
            return replace(self, shared=None)
        task_offsets = tree.row_offsets(self.task_offsets)
        rows_M = tree.row_of_token[self.target_rows.cpu().numpy()]
        target_rows, pairs = np.unique(rows_M), None
        if len(rows_M):
            # Sorted by row and therefore by task. Labels are token ids or token classes.
            labels_M = labels[self.target_rows.cpu().numpy()]
            keys = rows_M * (int(labels_M.max()) + 1) + labels_M
            distinct, first_P, pair_M = np.unique(keys, return_index=True, return_inverse=True)
            if len(distinct) < len(keys):
                offsets = tuple(np.searchsorted(rows_M[first_P], task_offsets).tolist())
                pairs = TargetPairs(torch.from_numpy(first_P), torch.from_numpy(pair_M), offsets)
        shared = SharedRows(
            tree=tree,
            computed=torch.from_numpy(tree.computed),
            row_of_token=torch.from_numpy(tree.row_of_token),
            task_offsets=task_offsets,
            may_share=tuple(may_share),
            min_tokens=min_tokens,
            target_rows=torch.from_numpy(target_rows),
            target_offsets=tuple(np.searchsorted(target_rows, task_offsets).tolist()),
            pairs=pairs,
        )
        return replace(self, shared=shared)

    def of_tasks(self, indices: Sequence[int]) -> MuxBatch:
        """Return the stream of some tasks, given by ascending index in `task_names`."""
        kept = [number for index in indices for number in range(*self.sequence_offsets[index : index + 2])]
        return self._select(indices, kept)

    def of_sequences(self, kept: Sequence[bool]) -> MuxBatch:
        """Return the stream of some sequences. Each task must keep at least one, and none may be padding.

        Args:
            kept: for each of the S sequences whether to keep it.
        """
        return self._select(range(len(self.task_names)), [number for number, stays in enumerate(kept) if stays])

    def _select(self, tasks: Sequence[int], sequences: Sequence[int]) -> MuxBatch:
        """Return the stream of some tasks and some of their sequences, both given by ascending index."""
        starts = (0, *accumulate(self.sequence_lengths))
        tokens = [(starts[number], starts[number + 1]) for number in sequences]
        targets = [self.sequence_target_offsets[number : number + 2] for number in sequences]
        kept = set(sequences)
        # For each sequence of the stream the number of kept sequences before it.
        places = (0, *accumulate(number in kept for number in range(self.num_sequences)))
        counts = [places[self.sequence_offsets[task + 1]] - places[self.sequence_offsets[task]] for task in tasks]
        sequence_offsets = (0, *accumulate(counts))
        bounds, target_bounds = (_offsets(pairs) for pairs in (tokens, targets))
        # Target rows are indices into the stream, so they move with their sequences.
        moved = [start - bound for (start, _), bound in zip(tokens, bounds, strict=False)]
        moved_M = np.repeat(np.asarray(moved, dtype=np.int64), np.diff(target_bounds))
        target_rows = _chosen(self.target_rows, targets)
        row_ends = [places[end] for end in accumulate(self.row_sequences)]
        of_rows = [end - start for start, end in pairwise((0, *row_ends))]
        rows = [self.row_offsets[task : task + 2] for task in tasks]
        columns = []
        for task, (first, last) in zip(tasks, pairwise(sequence_offsets), strict=True):
            chosen = [
                (start - self.target_offsets[task], end - self.target_offsets[task])
                for start, end in targets[first:last]
            ]
            columns.append({name: _chosen(values, chosen) for name, values in self.target_columns[task].items()})
        of_tasks: dict[str, Any] = {
            name: tuple(getattr(self, name)[task] for task in tasks if getattr(self, name)) for name in _OF_TASKS
        }
        part = MuxBatch(
            input_ids=_chosen(self.input_ids, tokens, dim=1),
            position_ids=_chosen(self.position_ids, tokens, dim=1),
            labels=_chosen(self.labels, tokens, dim=1),
            target_rows=target_rows - torch.from_numpy(moved_M).to(target_rows.device),
            target_offsets=tuple(target_bounds[offset] for offset in sequence_offsets),
            token_places=_chosen(self.token_places, tokens),
            cu_seqlens=torch.tensor(bounds, dtype=self.cu_seqlens.dtype, device=self.cu_seqlens.device),
            task_offsets=tuple(bounds[offset] for offset in sequence_offsets),
            sequence_offsets=sequence_offsets,
            sequence_lengths=tuple(self.sequence_lengths[number] for number in sequences),
            # Only the total is known, not how much padding each task has.
            num_padding_tokens=self.num_padding_tokens if len(tasks) == len(self.task_names) else 0,
            class_labels=None if self.class_labels is None else self.class_labels[list(sequences)],
            token_type_ids=None if self.token_type_ids is None else _chosen(self.token_type_ids, tokens, dim=1),
            sequence_target_offsets=target_bounds,
            row_sequences=tuple(count for start, end in rows for count in of_rows[start:end]),
            row_offsets=_offsets(rows),
            target_columns=tuple(columns),
            parts=tuple(self.parts[number] for number in sequences) if self.parts else (),
            **of_tasks,
        )
        if self.shared is None:
            return part
        return part.sharing([self.shared.may_share[task] for task in tasks], self.shared.min_tokens)

    def to(self, device: torch.device | str) -> MuxBatch:
        """Return the batch with its tensors on `device`; to a GPU through pinned memory, without waiting."""
        # Copies from pageable memory block the host. Torch reuses pinned memory only after the copy has finished.
        is_gpu = torch.device(device).type == "cuda"

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return (value.pin_memory() if is_gpu and not value.is_cuda else value).to(device, non_blocking=True)
            if isinstance(value, SharedRows):
                return replace(value, **{field.name: move(getattr(value, field.name)) for field in fields(value)})
            if isinstance(value, TargetPairs):
                return TargetPairs(*map(move, value))
            return value

        moved = {field.name: move(getattr(self, field.name)) for field in fields(self)}
        for name in ("target_columns", "row_values"):
            moved[name] = tuple({key: move(value) for key, value in columns.items()} for columns in getattr(self, name))
        return replace(self, **moved)


_OF_TASKS = "task_names task_seeds task_steps loss_weights row_values totals virtual_tokens".split()
"""Fields of `MuxBatch` with one value per task."""


def _chosen(tensor: torch.Tensor, bounds: Iterable[Sequence[int]], dim: int = 0) -> torch.Tensor:
    """Concatenate the slices of a tensor between ascending bounds; return the tensor itself if they cover all of it."""
    joined: list[list[int]] = []
    for start, end in bounds:
        if joined and joined[-1][1] == start:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    if joined == [[0, tensor.shape[dim]]]:
        return tensor
    return torch.cat([tensor.narrow(dim, start, end - start) for start, end in joined], dim=dim)


def _offsets(bounds: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the offsets of slices with the given bounds after concatenation."""
    return (0, *accumulate(end - start for start, end in bounds))


def chains_of(micro_batches: Sequence[MuxBatch]) -> list[tuple[MuxBatch, ...]]:
    """Return the chains; a micro-batch of whole sequences is its own chain.

    Args:
        micro_batches: the micro-batches of a step, in order.
    """
    chains = chained(micro_batch.has_more for micro_batch in micro_batches)
    return [tuple(micro_batches[number] for number in chain) for chain in chains]


def is_chained(micro_batches: Sequence[MuxBatch]) -> bool:
    """Whether micro-batches share sequences, so that backward passes must run in reverse order."""
    return any(micro_batch.parts for micro_batch in micro_batches)
