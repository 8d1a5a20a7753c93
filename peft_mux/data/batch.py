"""Parts of a long sequence that lie in consecutive micro-batches (M §3.5, Figure 12c: chunks with KV reuse).

A sequence of 11 tokens, at most 5 in a pass, chunks of 2; and two short ones::

    micro-batch m      | 0 1 2 3 | x      0 tokens before it
    micro-batch m + 1  | 4 5 6 7 | y      4, whose keys and values the layers still hold
    micro-batch m + 2  | 8 9 10  |        8

Positions, targets (3 predicts 4), loss weights and places are those of the unsplit sequence.
"""

# MERGED: `SharedRows`: the prefix tree of a micro-batch, as its passes read it.
# MERGED: The micro-batch goes on describing the whole stream; activations have a row for each of the tokens that are
# MERGED: computed.
# MERGED: Shape letters: T tokens of the stream, U computed rows, M targets, P different pairs of a computed row and a
# MERGED: label, N
# MERGED: tasks.
# MERGED: `MuxBatch`: the flat token stream that one multiplexed forward pass reads.
# MERGED: Shape letters: T tokens of the stream, S sequences, N tasks.
# MERGED: A stream of two tasks, `a` with sequences of 3 and 2 tokens and `b` with one of 4 (T=9, S=3, N=2)::
# MERGED:     input_ids     a0 a0 a0 a1 a1 | b0 b0 b0 b0
# MERGED:     position_ids   0  1  2  0  1 |  0  1  2  3      restart at each sequence
# MERGED:     labels        a0 a0  x a1  x | b0 b0 b0  x      the token that a position predicts; x = -100
# MERGED:     token_places   0  1  2  3  4 |  0  1  2  3      place within the task's global batch
# MERGED:     cu_seqlens     0 3 5 9        task_offsets 0 5 9        sequence_offsets 0 2 3
# MERGED: Chains: consecutive micro-batches that share long sequences; forwards in order, backwards in reverse.
# MERGED: micro-batch        0        1        2        3
# MERGED: holds              a1 x     a2 y     b1       b2 z
# MERGED: chains           (a1 x,     a2 y)   (b1,      b2 z)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from peft_mux.data.packing.prefixes import MIN_RUN_TOKENS, PrefixTree, build_prefix_tree


class SequencePart(NamedTuple):
    """Which tokens of a row of a task's global batch a sequence of a stream is.

    Attributes:
        task: name of the task.
        row: index of the row within the task's global batch; -1 for padding.
        start: first token within the row, which is the number of tokens before it.
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
        """Which sequence of the step it is a part of."""
        return self.task, self.row

    @property
    def has_more(self) -> bool:
        """Whether more of the sequence follows in the next micro-batch."""
        return self.end < self.num_tokens

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its sequence."""
        return self.start == 0 and not self.has_more


class TargetPairs(NamedTuple):
    """The targets of a stream, each pair of a computed row and a label once.

    Attributes:
        first: int64 `[P]`, for each pair the number of its first target among the M; sorted by task.
        of_target: int64 `[M]`, the pair that each target is.
        offsets: where each task's pairs begin, `N + 1` numbers.
    """

    first: torch.Tensor
    of_target: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Which tokens of a micro-batch are computed.

    Attributes:
        tree: the tree, on the host.
        computed: int64 `[U]`, the token of the stream that each computed row is.
        row_of_token: int64 `[T]`, the computed row that stands for each token of the stream.
        task_offsets: where each task's computed rows begin, `N + 1` numbers.
        may_share: for each of the N tasks whether its sequences may share tokens.
        min_tokens: least tokens that are shared.
        target_rows: int64, the computed rows that predict something, ascending.
        target_offsets: where each task's begin among those, `N + 1` numbers.
        pairs: the targets, each pair of a computed row and a label once; `None` where no two are the same, or where
            some of the targets were left out.
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

    def without_pairs(self) -> SharedRows:
        """Return the same tree for a micro-batch some of whose targets were left out."""
        return replace(self, pairs=None)

    def to(self, move: Callable[[torch.Tensor], torch.Tensor]) -> SharedRows:
        """Return it with its tensors moved; `move` moves one."""
        pairs = self.pairs and TargetPairs(move(self.pairs.first), move(self.pairs.of_target), self.pairs.offsets)
        moved = {name: move(getattr(self, name)) for name in ("computed", "row_of_token", "target_rows")}
        return replace(self, **moved, pairs=pairs)


class StreamTokens(NamedTuple):
    """What a tree is made of: tokens of a stream and its bounds, on the host.

    Attributes:
        input_ids: int64 `[T]`.
        lengths: tokens of each sequence.
        sequence_offsets: where each task's sequences begin, `N + 1` numbers.
        task_offsets: where each task's tokens begin, `N + 1` numbers.
        labels: int64 `[T]`, already shifted.
        target_rows: int64 `[M]`, the tokens that predict something.
        target_offsets: where each task's targets begin, `N + 1` numbers.
    """

    input_ids: np.ndarray
    lengths: Sequence[int]
    sequence_offsets: Sequence[int]
    task_offsets: Sequence[int]
    labels: np.ndarray
    target_rows: np.ndarray
    target_offsets: Sequence[int]


def shared_rows(
    tokens: StreamTokens,
    may_share: Sequence[bool],
    *,
    whole: Sequence[bool] | None = None,
    min_tokens: int = MIN_RUN_TOKENS,
) -> SharedRows | None:
    """Return which tokens of a stream are computed; `None` where all are.

    Args:
        tokens: the stream.
        may_share: for each of the N tasks whether its sequences may share tokens.
        whole: whether each sequence is a whole one, no part of a longer one and no padding; by default all are. Others
            share nothing.
        min_tokens: least tokens that are shared.
    """
    if not any(may_share):
        return None
    bounds = np.cumsum([0, *tokens.lengths])
    sequences = [tokens.input_ids[start:end] for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    groups: list[int | None] = []
    for task, (first, last) in enumerate(zip(tokens.sequence_offsets[:-1], tokens.sequence_offsets[1:], strict=True)):
        groups += [task if may_share[task] and (whole is None or whole[one]) else None for one in range(first, last)]
    tree = build_prefix_tree(sequences, groups, min_tokens=min_tokens)
    if tree is None:
        return None
    task_offsets, target_rows = tree.row_offsets(tokens.task_offsets), np.unique(tree.row_of_token[tokens.target_rows])
    return SharedRows(
        tree=tree,
        computed=torch.from_numpy(tree.computed),
        row_of_token=torch.from_numpy(tree.row_of_token),
        task_offsets=task_offsets,
        target_rows=torch.from_numpy(target_rows),
        target_offsets=tuple(np.searchsorted(target_rows, task_offsets).tolist()),
        may_share=tuple(may_share),
        min_tokens=min_tokens,
        pairs=_pairs(tokens, tree),
    )


def _pairs(tokens: StreamTokens, tree: PrefixTree) -> TargetPairs | None:
    """Return the targets, each pair of a computed row and a label once; `None` where no two are the same."""
    if not len(tokens.target_rows):
        return None
    rows, labels = tree.row_of_token[tokens.target_rows], tokens.labels[tokens.target_rows]
    # Ordered by row and so by task; labels are token ids, or classes of tokens.
    keys = rows * (int(labels.max()) + 1) + labels
    found, first, of_target = np.unique(keys, return_index=True, return_inverse=True)
    if len(found) == len(keys):
        return None
    offsets = np.searchsorted(rows[first], tree.row_offsets(tokens.task_offsets))
    return TargetPairs(torch.from_numpy(first), torch.from_numpy(of_target), tuple(offsets.tolist()))


Columns = Mapping[str, torch.Tensor]
"""Tensors by the name of the column that they were read from."""


@dataclass(frozen=True, slots=True)
class MuxBatch:
    """Packed tokens of several tasks, sorted by task; batch dimension 1.

    Host-side tuples repeat what the tensors say, so that no code has to read a device tensor back.
    What predicts something is listed here, where the labels are at hand: finding it on a device would wait for it.

    Attributes:
        input_ids: int64 `[1, T]`, the token ids.
        position_ids: int64 `[1, T]`, restarting at each sequence; a later part of one goes on counting.
        labels: int64 `[1, T]`, already shifted: what position t predicts, never across sequences, but across parts.
        target_rows: int64 `[M]`, the positions that predict something.
        target_offsets: where each task's positions begin among the target rows, `N + 1` numbers.
        token_places: int64 `[T]`, place of the token within its task's global batch.
        cu_seqlens: int32 `[S + 1]`, cumulative sequence lengths.
        task_offsets: where each task's tokens begin, `N + 1` numbers.
        sequence_offsets: where each task's sequences begin, `N + 1` numbers.
        sequence_lengths: number of tokens of each of the S sequences.
        task_names: the N tasks, in stream order.
        task_seeds: seed of each of the N tasks.
        task_steps: index of each task's optimizer step, from 0.
        loss_weights: 1 / number of loss terms in the *global* batch of each task, so that the sum of a
            task's weighted losses over all its micro-batches is its mean loss (promise 1 of the design).
        num_padding_tokens: number of tokens that belong to no row (only where equal chunks were asked for).
        class_labels: `[S]` int64 or float32 for sequence classification, else `None`.
        token_type_ids: int64 `[1, T]`, which text of a pair each token is of; `None` for zeros.
        sequence_target_offsets: where each sequence's positions begin among the target rows, `S + 1` numbers.
        row_sequences: number of sequences of each row, in stream order.
        row_offsets: where each task's rows begin among the rows, `N + 1` numbers.
        target_columns: for each task the token columns of its rows at its targets alone, `[M_task, ...]`, by name.
        row_values: for each task the values of its rows, float32 `[R_task]` or `[R_task, C]`, by name.
        totals: for each task the sums over its global batch that losses divide by, by name (`batch_totals`).
        parts: which tokens of a row each of the S sequences is; empty where all are whole.
        virtual_tokens: virtual tokens in front of each sequence, for each of the N tasks; empty where there are none.
        shared: which of the tokens are computed, where sequences begin alike; `None` where each token is.
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
        """Whether a sequence goes on in the next micro-batch."""
        return any(part.has_more for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens T of the stream, padding included."""
        return self.task_offsets[-1]

    @property
    def num_sequences(self) -> int:
        """Number of sequences S."""
        return len(self.sequence_lengths)

    @property
    def num_computed(self) -> int:
        """Number U of rows that activations have: T, or fewer where sequences begin alike."""
        return self.num_tokens if self.shared is None else self.shared.num_rows

    @property
    def computed_offsets(self) -> tuple[int, ...]:
        """Where each task's rows begin in the activations, `N + 1` numbers."""
        return self.task_offsets if self.shared is None else self.shared.task_offsets

    def computed(self, values: torch.Tensor) -> torch.Tensor:
        """Return those of the values of all tokens, `[T]` or `[1, T]`, that belong to the rows of the activations."""
        return values if self.shared is None else values.index_select(-1, self.shared.computed)

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the activations that stand for some tokens of the stream, int64 of the same shape."""
        return tokens if self.shared is None else self.shared.row_of_token.index_select(0, tokens)

    def sharing(self, may_share: Sequence[bool], min_tokens: int = MIN_RUN_TOKENS) -> MuxBatch:
        """Return the same stream, in which what sequences of a task begin with alike is computed once.

        Args:
            may_share: for each of the N tasks whether its sequences may share tokens.
            min_tokens: least tokens that are shared.
        """
        if not any(may_share):
            return self
        input_ids, labels = (values[0].cpu().numpy() for values in (self.input_ids, self.labels))
        tokens = StreamTokens(
            input_ids,
            self.sequence_lengths,
            self.sequence_offsets,
            self.task_offsets,
            labels,
            self.target_rows.cpu().numpy(),
            self.target_offsets,
        )
        whole = [part.is_whole and part.row >= 0 for part in self.parts] if self.parts else None
        return replace(self, shared=shared_rows(tokens, may_share, whole=whole, min_tokens=min_tokens))

    def _sharing_as(self, other: MuxBatch, tasks: Sequence[int] | None = None) -> MuxBatch:
        """Return the same stream, sharing as one that it is a part of; `tasks` are its tasks there, by default all."""
        if other.shared is None:
            return self
        may_share = other.shared.may_share
        own = may_share if tasks is None else [may_share[index] for index in tasks]
        return replace(self, shared=None).sharing(own, other.shared.min_tokens)

    def of_tasks(self, indices: Sequence[int]) -> MuxBatch:
        """Return the stream of some of the tasks.

        Args:
            indices: numbers of those tasks within `task_names`, ascending.
        """
        tokens, sequences, targets = (
            [(offsets[index], offsets[index + 1]) for index in indices]
            for offsets in (self.task_offsets, self.sequence_offsets, self.target_offsets)
        )
        task_offsets, sequence_offsets, target_offsets = (_offsets(pairs) for pairs in (tokens, sequences, targets))
        # Rows and bounds are counted within the stream, in which tasks move up to the front.
        moved = [start - new for (start, _), new in zip(tokens, task_offsets, strict=False)]
        lengths = [self.cu_seqlens[start + 1 : end + 1] for start, end in sequences]
        bounds = [part - by for part, by in zip(lengths, moved, strict=True)]
        rows = [self.target_rows[start:end] - by for (start, end), by in zip(targets, moved, strict=True)]
        classes = self.class_labels
        part = MuxBatch(
            **self._tokens_between(tokens),
            target_rows=torch.cat(rows),
            target_offsets=target_offsets,
            cu_seqlens=torch.cat([self.cu_seqlens[:1], *bounds]),
            task_offsets=task_offsets,
            sequence_offsets=sequence_offsets,
            sequence_lengths=tuple(length for start, end in sequences for length in self.sequence_lengths[start:end]),
            task_names=tuple(self.task_names[index] for index in indices),
            task_seeds=tuple(self.task_seeds[index] for index in indices),
            task_steps=tuple(self.task_steps[index] for index in indices),
            loss_weights=tuple(self.loss_weights[index] for index in indices),
            # A total: which part of it belongs to which task is not noted.
            num_padding_tokens=self.num_padding_tokens if len(indices) == len(self.task_names) else 0,
            class_labels=None if classes is None else _chosen(classes, sequences),
            **self._values_of(indices, sequences, targets),
            parts=tuple(part for start, end in sequences for part in self.parts[start:end]),
            virtual_tokens=tuple(self.virtual_tokens[index] for index in indices if self.virtual_tokens),
        )
        return part._sharing_as(self, indices)

    def _tokens_between(self, bounds: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return what is noted of each token between some bounds, by field."""
        types = self.token_type_ids
        return {
            "input_ids": _chosen(self.input_ids, bounds, dim=1),
            "position_ids": _chosen(self.position_ids, bounds, dim=1),
            "labels": _chosen(self.labels, bounds, dim=1),
            "token_places": _chosen(self.token_places, bounds),
            "token_type_ids": None if types is None else _chosen(types, bounds, dim=1),
        }

    def _values_of(
        self, indices: Sequence[int], sequences: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return what losses read of the rows of some tasks, by field; nothing for a batch that has none of it."""
        if not self.row_offsets:
            return {}
        counts = [
            end - start
            for first, last in sequences
            for start, end in pairwise(self.sequence_target_offsets[first : last + 1])
        ]
        assert sum(counts) == sum(end - start for start, end in targets), "sequences have the targets of their task"
        rows = [(self.row_offsets[index], self.row_offsets[index + 1]) for index in indices]
        return {
            "sequence_target_offsets": (0, *accumulate(counts)),
            "row_sequences": tuple(count for start, end in rows for count in self.row_sequences[start:end]),
            "row_offsets": _offsets(rows),
            "target_columns": tuple(self.target_columns[index] for index in indices),
            "row_values": tuple(self.row_values[index] for index in indices),
            "totals": tuple(self.totals[index] for index in indices),
        }

    def of_sequences(self, kept: Sequence[bool]) -> MuxBatch:
        """Return the stream of some of the sequences; each task keeps at least one, and none of them is padding.

        Args:
            kept: for each of the S sequences whether it stays.
        """
        numbers = [number for number, stays in enumerate(kept) if stays]
        starts = (0, *accumulate(self.sequence_lengths))
        tokens, targets = (
            [(offsets[number], offsets[number + 1]) for number in numbers]
            for offsets in (starts, self.sequence_target_offsets)
        )
        bounds, sequence_targets = _offsets(tokens), _offsets(targets)
        # Before which sequence, of those that stay, each of the stream's would lie.
        places = (0, *accumulate(map(int, kept)))
        sequence_offsets = tuple(places[offset] for offset in self.sequence_offsets)
        rows = [
            self.target_rows[start:end] - (first - bounds[place])
            for place, ((start, end), (first, _)) in enumerate(zip(targets, tokens, strict=True))
        ]
        row_bounds = [places[end] for end in accumulate(self.row_sequences)]
        columns = tuple(
            _chosen_columns(
                own, self.target_offsets[index], targets[sequence_offsets[index] : sequence_offsets[index + 1]]
            )
            for index, own in enumerate(self.target_columns)
        )
        classes = self.class_labels
        part = replace(
            self,
            **self._tokens_between(tokens),
            target_rows=torch.cat(rows),
            target_offsets=tuple(sequence_targets[offset] for offset in sequence_offsets),
            cu_seqlens=torch.tensor(bounds, dtype=self.cu_seqlens.dtype),
            task_offsets=tuple(bounds[offset] for offset in sequence_offsets),
            sequence_offsets=sequence_offsets,
            sequence_lengths=tuple(self.sequence_lengths[number] for number in numbers),
            class_labels=None if classes is None else classes[numbers],
            sequence_target_offsets=sequence_targets,
            row_sequences=tuple(end - start for start, end in pairwise((0, *row_bounds))),
            target_columns=columns,
            parts=tuple(self.parts[number] for number in numbers) if self.parts else (),
        )
        return part._sharing_as(self)

    def to(self, device: torch.device | str) -> MuxBatch:
        """Return the batch with its tensors on `device`; to a GPU through pinned memory, without waiting."""
        # Copies from pageable memory would make the host wait; torch reuses pinned memory only after the copy.
        is_gpu = torch.device(device).type == "cuda"

        def move(value: torch.Tensor) -> torch.Tensor:
            return (value.pin_memory() if is_gpu and not value.is_cuda else value).to(device, non_blocking=True)

        moved: dict[str, Any] = {
            field.name: move(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        for name in ("target_columns", "row_values"):
            tasks: tuple[Columns, ...] = getattr(self, name)
            moved[name] = tuple({key: move(value) for key, value in columns.items()} for columns in tasks)
        moved["shared"] = self.shared and self.shared.to(move)
        return replace(self, **moved)


def _chosen(tensor: torch.Tensor, bounds: Sequence[tuple[int, int]], dim: int = 0) -> torch.Tensor:
    """Return the parts of a tensor between some bounds, one after another."""
    return torch.cat([tensor.narrow(dim, start, end - start) for start, end in bounds], dim=dim)


def _chosen_columns(columns: Columns, first: int, targets: Sequence[tuple[int, int]]) -> Columns:
    """Return a task's columns at some targets, numbered within the stream; `first` is the number of its first one."""
    bounds = [(start - first, end - first) for start, end in targets]
    return {name: _chosen(values, bounds) for name, values in columns.items()}


def _offsets(bounds: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return where parts between some bounds begin and end when they lie one after another, from 0."""
    return (0, *accumulate(end - start for start, end in bounds))


def chains_of(micro_batches: Sequence[MuxBatch]) -> list[tuple[MuxBatch, ...]]:
    """Return the chains; a micro-batch of whole sequences is one by itself.

    Args:
        micro_batches: the micro-batches of a step, in the order in which they were laid out.
    """
    chains: list[list[MuxBatch]] = []
    has_more = False
    for micro_batch in micro_batches:
        # A sequence goes on in the very next micro-batch, so chains are runs of the list.
        if has_more:
            chains[-1].append(micro_batch)
        else:
            chains.append([micro_batch])
        has_more = micro_batch.has_more
    for chain in chains:
        _check(chain)
    return [tuple(chain) for chain in chains]


def _check(chain: Sequence[MuxBatch]) -> None:
    """Assert that every later part follows the one before it."""
    ends: dict[tuple[str, int], int] = {}
    for micro_batch in chain:
        for part in micro_batch.parts:
            assert part.is_whole or ends.get(part.sequence, 0) == part.start, f"{part} does not follow the part before"
        assert ends.keys() <= {part.sequence for part in micro_batch.parts}, "a part is missing"
        ends = {part.sequence: part.end for part in micro_batch.parts if part.has_more}
    assert not ends, f"the last parts of {sorted(ends)} are missing"


def is_chained(micro_batches: Sequence[MuxBatch]) -> bool:
    """Whether micro-batches share sequences, so that backwards have to run in reverse."""
    return any(micro_batch.parts for micro_batch in micro_batches)
