"""Passes without gradient that come before those of a step: what the losses of its tasks need to know beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.heads import token_outputs
from peft_mux.modeling.objectives.objective import BATCH_VALUES, REFERENCE, ROUTER_TOTALS
from peft_mux.modeling.stream import in_mode


class Prepasses:
    """What executors have in common: references, and sums over a step's whole batches.

    Attributes:
        model: the model of this process.
        sees_whole_batches: whether the passes of this process are all passes of each task, through all layers.
    """

    model: MultiTaskPeftModel
    sees_whole_batches: bool

    def forward_terms(self, micro_batches: Sequence[MuxBatch]) -> list[torch.Tensor | None]:
        """Return the negative log-likelihoods `[M]` of each, without gradient; `None` if the head lies elsewhere."""
        raise NotImplementedError

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Return values that were computed with the output head, on every process of the replica."""
        return values

    def summed_over_stages(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of values of each stage's own layers, on every process of the replica."""
        return values

    def with_reference_values(
        self,
        micro_batches: Sequence[MuxBatch],
        tasks: Sequence[str],
        *,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[MuxBatch, ...]:
        """Return micro-batches with everything that the losses of their tasks need to know beforehand.

        Log-probabilities of the backbone without adapters (the reference model of DPO and others), and sums over the
        whole global batch (KTO's estimate of the KL divergence, what routers did with its tokens), each from passes
        without gradient. The passes with gradient need not know of them; a step without such losses has no such pass.
        Every process of a replica calls this; if weights are sharded, every process of the run.

        Args:
            micro_batches: the micro-batches of this process.
            tasks: names of the tasks of the step, the same on every process.
            total: sums numbers over the replicas; by default they are those of this replica alone, as in an evaluation.
        """
        objectives, ready = self.model.objectives, tuple(micro_batches)
        referring = [name for name in tasks if objectives.args_of(name).needs_reference]
        if referring:
            ready = self._with_references(ready, referring)
        counting = [name for name in tasks if objectives.of(name).num_batch_values(objectives.args_of(name))]
        if counting:
            ready = self._with_batch_values(ready, counting, total)
            ready = tuple(_of_pass(self.model, micro_batch, counting, is_reference_pass=False) for micro_batch in ready)
        balanced = [name for name in tasks if self.model.adapter_of(name) in self.model.router_loss.coefficients]
        return self._with_router_totals(ready, balanced, total) if balanced and total is not None else ready

    def _with_references(self, micro_batches: tuple[MuxBatch, ...], tasks: Sequence[str]) -> tuple[MuxBatch, ...]:
        """Add the log-probabilities of the reference, for rows that do not bring them."""
        model, chosen, parts = self.model, [], []
        for micro_batch in micro_batches:
            lacking = []
            for index, name in enumerate(micro_batch.task_names):
                brought = {*micro_batch.target_columns[index], *micro_batch.row_values[index]}
                wanted = model.objectives.of(name).reference_columns
                if name in tasks and not (wanted and brought.issuperset(wanted)):
                    lacking.append(index)
            chosen.append(lacking)
            if lacking:
                parts.append(_of_tasks(micro_batch, lacking))
        referenced = [name for name in tasks if name in model.registry.references]
        # A reference depends on the row alone, so no dropout of the backbone may be drawn.
        evaluating, frozen = in_mode(model, training=False), model.stream.without_adapters(but=referenced)
        with evaluating, model.registry.reference_weights(referenced), frozen:
            terms = iter(self.forward_terms(parts))
        ready = []
        for micro_batch, indices in zip(micro_batches, chosen, strict=True):
            nll_M = next(terms) if indices else None
            if nll_M is not None:
                columns = list(micro_batch.target_columns)
                offsets = micro_batch.target_offsets
                counts = [offsets[index + 1] - offsets[index] for index in indices]
                for index, part in zip(indices, nll_M.split(counts), strict=True):
                    columns[index] = {**columns[index], REFERENCE: -part}
                micro_batch = replace(micro_batch, target_columns=tuple(columns))
            ready.append(micro_batch)
        return tuple(ready)

    def _with_batch_values(
        self,
        micro_batches: tuple[MuxBatch, ...],
        tasks: Sequence[str],
        total: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> tuple[MuxBatch, ...]:
        """Add the sums over the global batch that the losses of tasks make of their targets."""
        model, objectives = self.model, self.model.objectives
        counts = {name: objectives.of(name).num_batch_values(objectives.args_of(name)) for name in tasks}
        sums = {name: torch.zeros(count, device=model.device) for name, count in counts.items()}
        parts = [_of_pass(model, part, tasks, is_reference_pass=True) for part in _with_tasks(micro_batches, tasks)]
        for part, nll_M in zip(parts, self.forward_terms(parts), strict=True):
            for outputs in () if nll_M is None else token_outputs(nll_M, part.to(model.device)):
                batch_values = objectives.of(outputs.task).batch_values(outputs, objectives.args_of(outputs.task))
                sums[outputs.task] = sums[outputs.task] + batch_values.detach()
        values = self.shared(torch.cat(list(sums.values())))
        values = values if total is None else total(values)
        values_of_task = dict(zip(sums, values.split([len(task_sums) for task_sums in sums.values()]), strict=True))
        return _with_row_values(micro_batches, BATCH_VALUES, values_of_task)

    def _with_router_totals(
        self, micro_batches: tuple[MuxBatch, ...], tasks: Sequence[str], total: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[MuxBatch, ...]:
        """Add what routers do with the tokens of each task's global batch, unless one pass here holds all of them."""
        model, passes = self.model, Counter(name for micro_batch in micro_batches for name in micro_batch.task_names)
        tasks = [name for name in tasks if not self.sees_whole_batches or passes[name] > 1]
        if not tasks:
            return micro_batches
        with model.router_loss.counting() as counted:
            self.forward_terms(_with_tasks(micro_batches, tasks))
        none = torch.zeros(2, model.router_loss.num_experts, device=model.device)
        totals = torch.stack([counted.get(model.adapter_of(name), none) for name in tasks])
        totals_of_task = dict(zip(tasks, total(self.summed_over_stages(totals)).unbind(), strict=True))
        return _with_row_values(micro_batches, ROUTER_TOTALS, totals_of_task)


def _of_tasks(micro_batch: MuxBatch, indices: Sequence[int]) -> MuxBatch:
    if len(indices) == len(micro_batch.task_names):
        return micro_batch
    part = micro_batch.of_tasks(indices)
    # Rows of these losses are whole; the parts of other tasks' long rows next to them are gone.
    return replace(part, parts=()) if all(sequence_part.is_whole for sequence_part in part.parts) else part


def _with_tasks(micro_batches: Sequence[MuxBatch], tasks: Sequence[str]) -> list[MuxBatch]:
    """Return the parts of micro-batches with only some tasks; those with none of them are left out."""
    parts = []
    for micro_batch in micro_batches:
        indices = [index for index, name in enumerate(micro_batch.task_names) if name in tasks]
        if indices:
            parts.append(_of_tasks(micro_batch, indices))
    return parts


def _with_row_values(
    micro_batches: Sequence[MuxBatch], key: str, values: Mapping[str, torch.Tensor]
) -> tuple[MuxBatch, ...]:
    """Return micro-batches in which the rows of some tasks have another value, given by task."""
    ready = []
    for micro_batch in micro_batches:
        names = micro_batch.task_names
        pairs = zip(names, micro_batch.row_values or [{} for _ in names], strict=True)
        rows = tuple({**given, key: values[name]} if name in values else given for name, given in pairs)
        ready.append(replace(micro_batch, row_values=rows))
    return tuple(ready)


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
        read_place = model.objectives.of(name).prepass_sequence if name in tasks else None
        for count in micro_batch.row_sequences[first:last]:
            kept += [read_place is None or (place == read_place) == is_reference_pass for place in range(count)]
    return micro_batch if all(kept) else micro_batch.of_sequences(kept)
