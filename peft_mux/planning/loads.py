"""What the planner needs to know of a run's tasks: lengths of a typical batch, targets, adapters, sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from peft_mux.data.packing.passes import even_shares
from peft_mux.data.packing.prefixes import RowTrie
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.modeling.adapters.kind import AdapterKind, CutLayers, kind_of
from peft_mux.modeling.adapters.lora.layer import NAME as LORA
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.planner.values import TaskShare

SAMPLE_ROWS = 64
_SAMPLE_BATCHES = 3

ParameterShapes = Mapping[str, tuple[int, ...]]
"""Shapes of a task's whole parameters, by name."""


def whole_shapes(model: MultiTaskPeftModel, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a task's whole parameters, as far as a process has any part of them.

    Args:
        model: the model that holds the task, possibly a part of it.
        name: the name of the task.
    """
    return {key: tuple(piece.shape) for key, piece in model.registry.pieces_of(name).items()}


def task_load(
    run: TaskRun,
    shapes: ParameterShapes,
    num_layers: int,
    *,
    cut: CutLayers | None = None,
    chain_tokens: int | None = None,
    routed_share: float = 1.0,
    layer_elements: int | None = None,
) -> TaskLoad:
    """Return what the planner needs to know of a task.

    Args:
        run: the task; its rows are sampled.
        shapes: the shapes of the task's whole parameters, by name.
        num_layers: decoder layers of the backbone.
        cut: the layers that tensor parallelism cuts, and its adapters with them; none by default.
        chain_tokens: bound of a pass in tokens, where longer rows are cut into chains. The passes of a chain are held
            at once, and short rows fill them, so a row counts as that many whole passes.
        routed_share: part of the experts of a mixture that a token passes through.
        layer_elements: elements of the frozen matrices that a token is multiplied with in one layer; those that are
            adapted alone by default.
    """
    rows = run.loader.sample_lengths
    longest = max(rows, default=0)
    if chain_tokens is not None and longest > chain_tokens:
        # Rounded up to whole passes, which a chain holds all at once (M section 3.5).
        longest = -(-longest // chain_tokens) * chain_tokens
    kind = kind_of(run.task.peft_config)
    batch = _sharing_batch(run)
    lengths = typical_lengths(rows, run.hyper.train_batch_size) if batch is None else tuple(map(len, batch.sequences))
    trie = None if batch is None else batch.trie
    shared = _shared(lengths, trie)
    lowest = lowest_layer(shapes) if kind.name == LORA else 0
    # The head reads each row of the activations once, whatever the number of sequences that have it in common.
    targets = min(round(sum(lengths) * _share_of_targets(run)), sum(lengths) - sum(shared))
    return TaskLoad(
        name=run.name,
        lengths=lengths,
        num_targets=max(1, targets),
        adapters=_adapter_loads(kind, shapes, num_layers - lowest, cut or {}, routed_share),
        trainable_parameters=_num_elements(shapes),
        num_steps=run.num_steps,
        priority=run.task.priority,
        longest_row_tokens=longest,
        cut_parameters=_num_elements({name: shape for name, shape in shapes.items() if _is_cut(kind, name, cut or {})}),
        stays_whole=any(not sequence.can_be_split for sequence in run.loader.sample(1)),
        has_reference_forward=_has_reference_forward(run),
        has_batch_forward=run.resolved.objective.needs_batch_values(run.resolved.loss_args),
        shared=shared,
        trie=trie,
        lowest_layer=lowest,
        unmet_share=_unmet_share(shapes, layer_elements) if kind.name == LORA else 1.0,
    )


def _sharing_batch(run: TaskRun) -> TaskBatch | None:
    """Return a typical global batch of a task whose rows share tokens; `None` where they share none.

    Which rows meet in a batch decides what they share, which no quantiles of lengths tell.
    """
    if not run.loader.shares_prefixes:
        return None
    found = run.loader.sample_batches(_SAMPLE_BATCHES)
    ratios = [(_computed_share(batch), -number) for number, batch in enumerate(found)]
    middle = found[-sorted(ratios)[len(ratios) // 2][1]]
    return None if middle.trie is None else middle


def _computed_share(batch: TaskBatch) -> float:
    """Return which part of the tokens of a batch is computed."""
    if batch.trie is None:
        return 1.0
    return batch.trie.num_computed(range(len(batch.sequences))) / max(batch.num_tokens, 1)


def replica_loads(loads: Sequence[TaskLoad], num_replicas: int) -> list[list[TaskLoad]]:
    """Return what the tasks bring into a step of each of several equal replicas, divided as every step is.

    Args:
        loads: the loads of all tasks with their whole global batches, in the order of the stream.
        num_replicas: number of replicas that divide the rows of a step.
    """
    shares = even_shares([load.lengths for load in loads], num_replicas, tries=[load.trie for load in loads])
    return [[part_of(load, rows) for load, rows in zip(loads, share, strict=True)] for share in shares]


def part_of(load: TaskLoad, rows: Sequence[int]) -> TaskLoad:
    """Return the load of some rows of a task.

    Args:
        load: the load of its whole global batch.
        rows: indices of the rows.
    """
    lengths = tuple(load.lengths[row] for row in rows)
    trie = None if load.trie is None else load.trie.of_rows(rows)
    own = replace(load, lengths=lengths, shared=_shared(lengths, trie), trie=trie)
    targets = round(load.num_targets * own.tokens / max(load.tokens, 1))
    return replace(own, num_targets=max(1, targets) if lengths else 0)


def _shared(lengths: Sequence[int], trie: RowTrie | None) -> tuple[int, ...]:
    """Return how many tokens of each row others compute, where all are in one pass; nothing where none are shared."""
    if trie is None:
        return ()
    return tuple(
        length - computed for length, computed in zip(lengths, trie.computed(range(len(lengths))).values(), strict=True)
    )


def task_share(run: TaskRun, shapes: ParameterShapes) -> TaskShare:
    """Return what a task brings into a step of all replicas.

    Args:
        run: the task, with its loader and settings.
        shapes: the shapes of the task's whole parameters, by name.
    """
    return TaskShare(
        name=run.name,
        batch_size=run.hyper.train_batch_size,
        tokens_per_step=run.loader.tokens_per_step,
        num_steps=run.num_steps,
        adapter_parameters=_num_elements(shapes),
        computed_share=1.0 if (batch := _sharing_batch(run)) is None else _computed_share(batch),
    )


def typical_lengths(lengths: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Return the lengths of a typical global batch: evenly spaced quantiles of all lengths.

    Args:
        lengths: number of tokens of each row.
        batch_size: number of rows of a global batch.
    """
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    count = min(batch_size, len(ordered))
    if count == 0:
        return ()
    # The middle of each of `count` equal parts: drawn nowhere, so every process plans with the same lengths.
    places = ((np.arange(count) + 0.5) / count * len(ordered)).astype(np.int64)
    return tuple(int(length) for length in ordered[places])


def _share_of_targets(run: TaskRun) -> float:
    """Return for which share of a task's tokens its head is computed, from some of its rows."""
    sequences = run.loader.sample(SAMPLE_ROWS)
    tokens = sum(len(sequence) for sequence in sequences)
    # A loss with one term a row, such as DPO, is made of the words of the row all the same.
    is_of_words = run.resolved.head_kind.is_shared
    targets = sum(one.num_target_tokens if is_of_words else one.num_targets for one in sequences)
    return targets / max(tokens, 1)


def _has_reference_forward(run: TaskRun) -> bool:
    """Return whether a task's loss compares with the backbone alone, and its rows do not bring what that says."""
    if not run.resolved.needs_reference:
        return False
    wanted = run.resolved.objective.reference_columns
    brought = [{*one.token_columns, *one.row_values} for one in run.loader.sample(1)]
    return not (wanted and brought and brought[0].issuperset(wanted))


def _adapter_loads(
    kind: AdapterKind, shapes: ParameterShapes, num_adapted: int, cut: CutLayers, routed_share: float
) -> tuple[AdapterLoad, ...]:
    """Return the adapters of a mean one of the layers that they lie in, as a token passes through them."""
    found = Counter(
        (max(1, round(load.rank * (routed_share if load.is_routed else 1.0))), load.width, load.cut_width)
        for load in kind.loads(shapes, cut)
    )
    return tuple(
        AdapterLoad(rank, width, cut_width)
        for (rank, width, cut_width), count in sorted(found.items())
        # At least one: the adapters of a task that adapts few layers would else cost nothing.
        for _ in range(max(1, round(count / num_adapted)))
    )


def _unmet_share(shapes: ParameterShapes, layer_elements: int | None) -> float:
    """Return the part of a layer's frozen products that a backward is spared below the lowest adapter of a task's rows.

    It is spared in layers that some other task adapts; these are taken to be those that this task adapts above.
    """
    if not lowest_layer(shapes):
        return 1.0
    adapted = {
        name: (shape[1], shapes[name.replace(".lora_A.", ".lora_B.")][0])
        for name, shape in shapes.items()
        if ".lora_A." in name
    }
    num_layers = len({lowest_layer([name]) for name in adapted})
    elements = sum(num_inputs * num_outputs for num_inputs, num_outputs in adapted.values()) / num_layers
    return min(1.0, elements / layer_elements) if layer_elements else 1.0


def _is_cut(kind: AdapterKind, name: str, cut: CutLayers) -> bool:
    """Return whether tensor parallelism divides a parameter."""
    site = kind.site_of(name)
    ends = [is_row for end, is_row in cut.items() if site.endswith(f".{end}")]
    return any(kind.cut_dim(name, is_row=is_row) is not None for is_row in ends)


def _num_elements(shapes: ParameterShapes) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
