"""Passes without gradient before the passes of a step, for losses that need to know something beforehand.

There are two kinds: log-probabilities of a frozen model (the backbone without adapters, or with those that tasks began
from: the reference of DPO and others), and sums over the whole global batch (KTO's estimate of the KL divergence).
Their results are written into the micro-batches, so the passes with gradient need not know of them. A step without
such losses has no such pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.heads import token_outputs
from peft_mux.modeling.objectives.objective import BATCH_VALUES, REFERENCE

ForwardTerms = Callable[[Sequence[MuxBatch]], list[torch.Tensor | None]]
"""Returns the negative log-likelihoods `[M]` of each micro-batch; `None` if the output head lies elsewhere."""

Numbers = Callable[[torch.Tensor], torch.Tensor]
"""Returns numbers of other processes for those of this one."""


def needs_reference_passes(model: MultiTaskPeftModel, tasks: Sequence[str]) -> bool:
    """Return whether the loss of some task needs passes before those of its step."""
    objectives = model.objectives
    needs = ((objectives.of(name), objectives.args_of(name)) for name in tasks)
    return any(one.needs_reference(args) or one.needs_batch_values(args) for one, args in needs)


def with_reference_values(
    model: MultiTaskPeftModel,
    micro_batches: Sequence[MuxBatch],
    tasks: Sequence[str],
    *,
    forward_terms: ForwardTerms,
    shared: Numbers,
    total: Numbers | None,
) -> tuple[MuxBatch, ...]:
    """Return micro-batches with everything that the losses of their tasks need to know beforehand.

    Every process of a replica calls this; if weights are sharded, every process of the run.

    Args:
        model: the model of this process, whole or a part.
        micro_batches: the micro-batches of this process.
        tasks: names of the tasks of the step, the same on every process.
        forward_terms: runs the passes.
        shared: returns numbers that were computed with the output head, on every process of the replica.
        total: sums numbers over the replicas; `None` for those of this replica alone.
    """
    objectives, ready = model.objectives, tuple(micro_batches)
    referring = [name for name in tasks if objectives.of(name).needs_reference(objectives.args_of(name))]
    if referring:
        ready = _with_references(model, ready, referring, forward_terms)
    counting = [name for name in tasks if objectives.of(name).needs_batch_values(objectives.args_of(name))]
    if counting:
        ready = _with_batch_values(model, ready, counting, forward_terms, shared, total)
        ready = tuple(_of_pass(model, one, counting, is_reference_pass=False) for one in ready)
    return ready


def _with_references(
    model: MultiTaskPeftModel, micro_batches: tuple[MuxBatch, ...], tasks: Sequence[str], forward_terms: ForwardTerms
) -> tuple[MuxBatch, ...]:
    """Add the log-probabilities of the reference, for rows that do not bring them."""
    chosen = []
    for micro_batch in micro_batches:
        lacking = []
        for index, name in enumerate(micro_batch.task_names):
            brought = {*micro_batch.target_columns[index], *micro_batch.row_values[index]}
            wanted = model.objectives.of(name).reference_columns
            if name in tasks and not (wanted and brought.issuperset(wanted)):
                lacking.append(index)
        chosen.append(lacking)
    parts = [_of_tasks(micro_batch, own) for micro_batch, own in zip(micro_batches, chosen, strict=True) if own]
    was_training = model.training
    model.eval()  # a reference depends on the row alone, so no dropout of the backbone may be drawn
    try:
        own = [name for name in tasks if name in model.registry.references]
        with model.registry.reference_weights(own), model.stream.without_adapters(but=own):
            found = iter(forward_terms(parts))
    finally:
        model.train(was_training)
    ready = []
    for micro_batch, own in zip(micro_batches, chosen, strict=True):
        nll_M = next(found) if own else None
        if nll_M is not None:
            columns = list(micro_batch.target_columns)
            counts = [micro_batch.target_offsets[index + 1] - micro_batch.target_offsets[index] for index in own]
            for index, part in zip(own, nll_M.split(counts), strict=True):
                columns[index] = {**columns[index], REFERENCE: -part}
            micro_batch = replace(micro_batch, target_columns=tuple(columns))
        ready.append(micro_batch)
    return tuple(ready)


def _with_batch_values(
    model: MultiTaskPeftModel,
    micro_batches: tuple[MuxBatch, ...],
    tasks: Sequence[str],
    forward_terms: ForwardTerms,
    shared: Numbers,
    total: Numbers | None,
) -> tuple[MuxBatch, ...]:
    """Add the sums over the global batch that the losses of tasks make of their targets."""
    objectives = model.objectives
    sums = {name: torch.zeros(objectives.of(name).num_batch_values, device=model.device) for name in tasks}
    chosen = [[index for index, name in enumerate(one.task_names) if name in sums] for one in micro_batches]
    parts = [_of_tasks(micro_batch, own) for micro_batch, own in zip(micro_batches, chosen, strict=True) if own]
    parts = [_of_pass(model, part, tasks, is_reference_pass=True) for part in parts]
    for part, nll_M in zip(parts, forward_terms(parts), strict=True):
        for outputs in () if nll_M is None else token_outputs(nll_M, part.to(model.device)):
            own = objectives.of(outputs.task).batch_values(outputs, objectives.args_of(outputs.task))
            sums[outputs.task] = sums[outputs.task] + own.detach()
    values = shared(torch.cat(list(sums.values())))
    values = values if total is None else total(values)
    found = dict(zip(sums, values.split([len(one) for one in sums.values()]), strict=True))
    ready = []
    for micro_batch, own in zip(micro_batches, chosen, strict=True):
        rows = list(micro_batch.row_values)
        for index in own:
            rows[index] = {**rows[index], BATCH_VALUES: found[micro_batch.task_names[index]]}
        ready.append(replace(micro_batch, row_values=tuple(rows)) if own else micro_batch)
    return tuple(ready)


def _of_tasks(micro_batch: MuxBatch, indices: Sequence[int]) -> MuxBatch:
    part = micro_batch.of_tasks(indices)
    # Rows of these losses are whole; the parts of other tasks' long rows next to them are gone.
    return replace(part, parts=()) if all(one.is_whole for one in part.parts) else part


def _of_pass(
    model: MultiTaskPeftModel, micro_batch: MuxBatch, tasks: Sequence[str], *, is_reference_pass: bool
) -> MuxBatch:
    """Return a micro-batch with the sequences that one kind of pass reads of the rows of some tasks.

    Some losses (KTO) read one sequence of each row only in the reference pass, and the others only in the pass with
    gradient. Sequences of other tasks stay.
    """
    kept: list[bool] = []
    for index, name in enumerate(micro_batch.task_names):
        first, last = micro_batch.row_offsets[index], micro_batch.row_offsets[index + 1]
        own = model.objectives.of(name).prepass_sequence if name in tasks else None
        for count in micro_batch.row_sequences[first:last]:
            kept += [own is None or (place == own) == is_reference_pass for place in range(count)]
    return micro_batch if all(kept) else micro_batch.of_sequences(kept)
