"""What the planner needs to know of a run's tasks: lengths of a typical batch, targets, adapters, sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from peft_mux.adapters.bottleneck import NAME as BOTTLENECK
from peft_mux.data.packing.prefixes import RowTrie
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.modeling.adapters.kind import AdapterKind, kind_of
from peft_mux.modeling.adapters.lora.layer import NAME as LORA
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.tensor.cut import cut_dim
from peft_mux.planning.model_shape import CutLayers
from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad

SAMPLE_ROWS = 64
_SAMPLE_BATCHES = 3

ParameterShapes = Mapping[str, tuple[int, ...]]
"""Shapes of a task's whole parameters, by their PEFT names without the adapter id."""


def whole_shapes(model: MultiTaskPeftModel, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a task's whole parameters, as far as a process (of one stage) has a part of them."""
    return {key: tuple(piece.shape) for key, piece in model.registry.pieces_of(name).items()}


def task_load(
    run: ActiveTask,
    shapes: ParameterShapes,
    num_layers: int,
    *,
    cut: CutLayers | None = None,
    chain_tokens: int | None = None,
    routed_share: float = 1.0,
) -> TaskLoad:
    """Return what the planner needs to know of a task.

    Args:
        run: the task; its rows are sampled.
        shapes: the shapes of the task's whole parameters, by name.
        num_layers: decoder layers of the backbone.
        cut: the layers that tensor parallelism cuts, and its adapters with them; none by default.
        chain_tokens: bound of a pass in tokens, if longer rows are cut into chains. The passes of a chain are held at
            once, and short rows fill them, so a row counts as that many whole passes.
        routed_share: part of the experts of a mixture that a token passes through.
    """
    rows, cut = run.loader.sample_lengths, cut or {}
    longest = max(rows, default=0)
    if chain_tokens is not None and longest > chain_tokens:
        # Rounded up to whole passes: a chain holds all of them at once (M section 3.5).
        longest = -(-longest // chain_tokens) * chain_tokens
    batch = _sharing_batch(run)
    lengths = typical_lengths(rows, run.hyper.train_batch_size) if batch is None else tuple(map(len, batch.sequences))
    trie = None if batch is None else batch.trie
    shared = _shared(lengths, trie)

    resolved, sample = run.resolved, run.loader.sample(SAMPLE_ROWS)
    # A loss with one term per row, such as DPO, still reads all tokens of the row.
    targets = sum(row.num_target_tokens if resolved.head_kind.is_shared else row.num_targets for row in sample)
    target_share = targets / max(sum(map(len, sample)), 1)
    # A loss that compares with the backbone alone needs its forward pass, unless rows contain its results.
    has_reference_forward = resolved.needs_reference
    if has_reference_forward and resolved.objective.reference_columns and sample:
        brought = {*sample[0].token_columns, *sample[0].row_values}
        has_reference_forward = not brought.issuperset(resolved.objective.reference_columns)

    kind = kind_of(run.task.peft_config)
    lowest = lowest_layer(shapes) if kind.name == LORA else 0
    counts = Counter(
        (max(1, round(load.rank * (routed_share if load.is_routed else 1.0))), load.width, load.cut_width)
        for load in adapter_loads(kind, shapes, cut)
    )
    adapters: list[AdapterLoad] = []
    for (rank, width, cut_width), count in sorted(counts.items()):
        # At least one in a mean layer: the adapters of a task that adapts few layers would otherwise cost nothing.
        adapters += [AdapterLoad(rank, width, cut_width)] * max(1, round(count / (num_layers - lowest)))
    cut_shapes = {}
    for name, shape in shapes.items():
        site = kind.site_of(name)
        ends = [is_row for end, is_row in cut.items() if site.endswith(f".{end}")]
        if any(cut_dim(name, is_row=is_row) is not None for is_row in ends):
            cut_shapes[name] = shape
    return TaskLoad(
        name=run.name,
        lengths=lengths,
        # The head reads each row of the activations once, whatever the number of sequences that have it in common.
        num_targets=max(1, min(round(sum(lengths) * target_share), sum(lengths) - sum(shared))),
        adapters=tuple(adapters),
        trainable_parameters=_num_elements(shapes),
        num_steps=run.num_steps,
        priority=run.task.priority,
        longest_row_tokens=longest,
        cut_parameters=_num_elements(cut_shapes),
        stays_whole=any(not sequence.can_be_split for sequence in sample),
        has_reference_forward=has_reference_forward,
        # Routers are counted before a step too, unless one pass holds the whole batch, which is not known here.
        has_batch_forward=resolved.objective.num_batch_values(resolved.loss_args) > 0 or run.router_coefficient > 0,
        shared=shared,
        trie=trie,
        lowest_layer=lowest,
    )


def adapter_loads(kind: AdapterKind, shapes: ParameterShapes, cut: CutLayers) -> list[AdapterLoad]:
    """Return the cost of a task's adapters in a pass: one load for each adapted layer.

    Args:
        kind: the kind of the adapters.
        shapes: shapes of the task's parameters; those of heads are skipped.
        cut: layers that tensor parallelism cuts.
    """
    if kind.name == LORA:  # the rank and the width of every linear layer's adapter; embeddings only look rows up
        loads = []
        for name, a_shape in shapes.items():
            if ".lora_A." in name:
                site, b_shape = kind.site_of(name), shapes[name.replace(".lora_A.", ".lora_B.")]
                is_row = next((is_row for end, is_row in cut.items() if site.endswith(f".{end}")), None)
                # Of each pair one factor is cut, and the other lies whole on every shard.
                cut_width = 0 if is_row is None else a_shape[1] if is_row else b_shape[0]
                is_routed = site.replace(".base_layer", "").endswith(".experts")
                loads.append(AdapterLoad(a_shape[0], a_shape[1] + b_shape[0], cut_width, is_routed))
        return loads
    if kind.name == BOTTLENECK:  # as wide as `down` and `up` are; biases take hardly any time
        downs = [shape for name, shape in shapes.items() if ".bottleneck_down." in name and len(shape) == 2]
        return [AdapterLoad(size, 2 * width) for size, width in downs]
    # Others count as adapters of rank 1 that are as wide as they have elements.
    elements: Counter[str] = Counter()
    for name, shape in shapes.items():
        if kind.owns(name):
            elements[kind.site_of(name)] += torch.Size(shape).numel()
    # A type may leave nothing to be trained of a small layer.
    return [AdapterLoad(1, count) for count in elements.values() if count]


def part_of(load: TaskLoad, rows: Sequence[int]) -> TaskLoad:
    """Return the load of some rows of a task, given the load of its whole global batch."""
    lengths = tuple(load.lengths[row] for row in rows)
    trie = None if load.trie is None else load.trie.of_rows(rows)
    part = replace(load, lengths=lengths, shared=_shared(lengths, trie), trie=trie)
    targets = round(load.num_targets * part.tokens / max(load.tokens, 1))
    return replace(part, num_targets=max(1, targets) if lengths else 0)


def typical_lengths(lengths: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Return the lengths of a typical global batch: evenly spaced quantiles of the tokens of all rows."""
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    count = min(batch_size, len(ordered))
    if count == 0:
        return ()
    # The middle of each of `count` equal parts: not drawn, so every process plans with the same lengths.
    places = ((np.arange(count) + 0.5) / count * len(ordered)).astype(np.int64)
    return tuple(ordered[places].tolist())


def _sharing_batch(run: ActiveTask) -> TaskBatch | None:
    """Return a typical global batch of a task whose rows share tokens; `None` if they share none.

    What rows share depends on which of them are in a batch, so quantiles of lengths are not enough.
    """
    if not run.loader.shares_prefixes:
        return None
    batches = run.loader.sample_batches(_SAMPLE_BATCHES)
    # The part of the tokens that is computed; of equal ones the later batch comes first.
    shares = [
        1.0 if batch.trie is None else batch.trie.num_computed(range(len(batch.sequences))) / max(batch.num_tokens, 1)
        for batch in batches
    ]
    order = sorted(range(len(batches)), key=lambda number: (shares[number], -number))
    middle = batches[order[len(order) // 2]]
    return None if middle.trie is None else middle


def _shared(lengths: Sequence[int], trie: RowTrie | None) -> tuple[int, ...]:
    """Return how many tokens of each row others compute if all are in one pass; nothing if none are shared."""
    if trie is None:
        return ()
    computed = trie.computed(range(len(lengths))).values()
    return tuple(length - num_computed for length, num_computed in zip(lengths, computed, strict=True))


def _num_elements(shapes: ParameterShapes) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
