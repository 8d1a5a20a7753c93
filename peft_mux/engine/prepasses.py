"""Passes before the passes of a step: what a loss needs to know before its own gradient can be taken.

Two things, both without gradient: log-probabilities of the backbone without adapters (the reference of DPO and others),
and numbers of the whole global batch (the estimate of KTO's divergence). What they give is written into the
micro-batches, so that the passes with gradient know nothing of it. A step without such losses has no such pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.language_head import token_outputs
from peft_mux.modeling.objectives.outputs import BATCH_VALUES, REFERENCE


class TermsExecutor(Protocol):
    """Runs forward passes that give the log-likelihoods of targets, on the part of the model that lies here."""

    @property
    def mux_model(self) -> MultiTaskPeftModel:
        """The model of this process, whole or a part of it."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        ...

    def forward_terms(self, micro_batches: Sequence[MuxBatch]) -> list[torch.Tensor | None]:
        """Return the negative log-likelihoods `[M]` of each; `None` where the output head lies elsewhere."""
        ...

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Return values that were computed where the output head lies, on every process of the replica."""
        ...


def prepared(
    executor: TermsExecutor,
    micro_batches: Sequence[MuxBatch],
    tasks: Sequence[str],
    *,
    total: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[MuxBatch, ...]:
    """Return micro-batches with all that the losses of their tasks need to know beforehand.

    Every process of a replica calls this, and where weights are sharded every process of the run.

    Args:
        executor: runs the passes.
        micro_batches: those of this process.
        tasks: names of the tasks of the step, the same on every process.
        total: sums numbers over the replicas; by default they are those of this replica alone, as in an evaluation.
    """
    objectives, ready = executor.mux_model.objectives, tuple(micro_batches)
    referring = [name for name in tasks if objectives.of(name).needs_reference(objectives.args_of(name))]
    if referring:
        ready = _with_references(executor, ready, referring)
    counting = [name for name in tasks if objectives.of(name).needs_batch_values(objectives.args_of(name))]
    if not counting:
        return ready
    ready = _with_batch_values(executor, ready, counting, total or (lambda values: values))
    return tuple(_sequences(executor.mux_model, one, counting, is_prepass=False) for one in ready)


def has_prepasses(model: MultiTaskPeftModel, tasks: Sequence[str]) -> bool:
    """Return whether a loss of some task needs passes before those of its step."""
    objectives = model.objectives
    needs = ((objectives.of(name), objectives.args_of(name)) for name in tasks)
    return any(one.needs_reference(args) or one.needs_batch_values(args) for one, args in needs)


def tasks_of(micro_batches: Sequence[MuxBatch]) -> list[str]:
    """Return the tasks that have rows in micro-batches, in the order in which they come first."""
    return list(dict.fromkeys(name for micro_batch in micro_batches for name in micro_batch.task_names))


def _with_references(
    executor: TermsExecutor, micro_batches: tuple[MuxBatch, ...], tasks: Sequence[str]
) -> tuple[MuxBatch, ...]:
    """Add the log-probabilities of the backbone alone, where rows do not bring them."""
    model = executor.mux_model
    chosen = [_lacking(model, micro_batch, tasks) for micro_batch in micro_batches]
    parts = [_only(micro_batch, own) for micro_batch, own in zip(micro_batches, chosen, strict=True) if own]
    was_training = model.training
    model.eval()  # a reference is a number of the row, on which no draw of a backbone's dropout may lie
    try:
        with model.stream.without_adapters():
            found = iter(executor.forward_terms(parts))
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


def _lacking(model: MultiTaskPeftModel, micro_batch: MuxBatch, tasks: Sequence[str]) -> list[int]:
    """Return the numbers of those tasks in a micro-batch whose rows bring no reference."""
    found = []
    for index, name in enumerate(micro_batch.task_names):
        brought = {*micro_batch.target_columns[index], *micro_batch.row_values[index]}
        wanted = model.objectives.of(name).reference_columns
        if name in tasks and not (wanted and brought.issuperset(wanted)):
            found.append(index)
    return found


def _only(micro_batch: MuxBatch, indices: Sequence[int]) -> MuxBatch:
    part = micro_batch.of_tasks(indices)
    # Rows of these losses are whole; parts of others' long rows, which lay beside them, are gone.
    return replace(part, parts=()) if all(one.is_whole for one in part.parts) else part


def _with_batch_values(
    executor: TermsExecutor,
    micro_batches: tuple[MuxBatch, ...],
    tasks: Sequence[str],
    total: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[MuxBatch, ...]:
    """Add sums over the global batch that the losses of tasks make of their targets."""
    objectives = executor.mux_model.objectives
    sums = {name: torch.zeros(objectives.of(name).num_batch_values, device=executor.device) for name in tasks}
    chosen = [[index for index, name in enumerate(one.task_names) if name in sums] for one in micro_batches]
    parts = [_only(micro_batch, own) for micro_batch, own in zip(micro_batches, chosen, strict=True) if own]
    parts = [_sequences(executor.mux_model, part, tasks, is_prepass=True) for part in parts]
    for part, nll_M in zip(parts, executor.forward_terms(parts), strict=True):
        for outputs in () if nll_M is None else token_outputs(nll_M, part.to(executor.device)):
            own = objectives.of(outputs.task).batch_values(outputs, objectives.args_of(outputs.task))
            sums[outputs.task] = sums[outputs.task] + own.detach()
    values = total(executor.shared(torch.cat(list(sums.values()))))
    found = dict(zip(sums, values.split([len(one) for one in sums.values()]), strict=True))
    ready = []
    for micro_batch, own in zip(micro_batches, chosen, strict=True):
        rows = list(micro_batch.row_values)
        for index in own:
            rows[index] = {**rows[index], BATCH_VALUES: found[micro_batch.task_names[index]]}
        ready.append(replace(micro_batch, row_values=tuple(rows)) if own else micro_batch)
    return tuple(ready)


def _sequences(model: MultiTaskPeftModel, micro_batch: MuxBatch, tasks: Sequence[str], *, is_prepass: bool) -> MuxBatch:
    """Return a micro-batch with those sequences of the rows of some tasks that one kind of pass reads.

    Args:
        model: knows the losses.
        micro_batch: the micro-batch; sequences of other tasks stay.
        tasks: names of the tasks whose losses have batch values.
        is_prepass: whether for the pass that makes these; otherwise for that of which the loss is taken.
    """
    kept: list[bool] = []
    for index, name in enumerate(micro_batch.task_names):
        first, last = micro_batch.row_offsets[index], micro_batch.row_offsets[index + 1]
        own = model.objectives.of(name).prepass_sequence if name in tasks else None
        for count in micro_batch.row_sequences[first:last]:
            kept += [own is None or (place == own) == is_prepass for place in range(count)]
    return micro_batch if all(kept) else micro_batch.of_sequences(kept)
