"""Chains: forward and backward over the parts of long sequences, with exact gradients (M §3.5, Figure 12c; TeraPipe).

Micro-batches that share a sequence form a chain. Their forwards run in order, their backwards in reverse::

    forward  0, forward 1, forward 2, backward 2, backward 1, backward 0

A later part reads the keys and values of the earlier ones; what it adds to their gradients enters the backward of the
pass that computed them, together with that pass's own losses (`peft_mux.modeling.stream`). So gradients are those
of the unsplit sequence, up to the order of sums.

What is held. From its forward to its backward, each pass of a chain holds its autograd graph, as every pass does; so a
chain holds the graphs of all its passes at its turning point, and frees them one by one from there. With activation
checkpointing that is, for each pass, the inputs of its layers and the keys and values of its parts, and the activations
of one layer of one pass while they are recomputed: much less than an unsplit sequence needs, whose recomputed layer
and whose logits are as long as itself. Without it, attention also holds, for each part, a copy of the keys and values
before it. Gradients of kept keys and values lie in the leaves from the first backward that reaches them to the
backward of their own pass.
"""

# MERGED: Passes before the passes of a step: what a loss needs to know before its own gradient can be taken.
# MERGED: Two things, both without gradient: log-probabilities of the backbone without adapters (the reference of DPO
# MERGED: and others),
# MERGED: and numbers of the whole global batch (the estimate of KTO's divergence). What they give is written into the
# MERGED: micro-batches, so that the passes with gradient know nothing of it. A step without such losses has no such
# MERGED: pass.
# MERGED: Spatial multiplexing on one device: all tasks of a micro-batch go through the backbone together (M §3.3).

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from peft_mux.data.batch import MuxBatch, chains_of, is_chained
from peft_mux.engine.cuda_graphs import CapturedPasses
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.processes import Processes
from peft_mux.engine.tensor.interleaving import Chain, Interleaving
from peft_mux.engine.work import PassClock, StepResult, StepSums, StepWork
from peft_mux.modeling.adapters.prompts.prompts import project_prompts
from peft_mux.modeling.model import MultiTaskPeftModel, MuxOutput
from peft_mux.modeling.objectives.heads import token_outputs
from peft_mux.modeling.objectives.objective import BATCH_VALUES, REFERENCE
from peft_mux.modeling.stream import Kept, KeyValueStore
from peft_mux.scheduler.plan import Plan


class _Precision(Protocol):
    def __call__(self) -> AbstractContextManager[object]: ...


def pass_backward(output: torch.Tensor, gradient: torch.Tensor | None, kept: Sequence[Kept]) -> None:
    """Run one backward from a pass's output and from the keys and values that later parts have read.

    Args:
        output: output of the pass: hidden states `[T, D]`, or losses `[N]`.
        gradient: gradient of the output; ones by default.
        kept: keys and values that the pass has kept for later parts.
    """
    roots: list[tuple[torch.Tensor, torch.Tensor]] = [root for one in kept for root in one.roots()]
    if output.requires_grad:
        roots.append((output, torch.ones_like(output) if gradient is None else gradient))
    if roots:
        # One call for all roots: the losses and the kept keys and values share a graph, which a backward frees.
        tensors, gradients = zip(*roots, strict=True)
        torch.autograd.backward(tensors, gradients)


def run_chain(model: MultiTaskPeftModel, chain: Sequence[MuxBatch], precision: _Precision) -> list[MuxOutput]:
    """Run the passes of a chain forward, and backward in reverse.

    Args:
        model: the model, on its device.
        chain: micro-batches that share sequences, from `peft_mux.data.batch.chains_of`.
        precision: returns the autocast context to compute in.

    Returns:
        What each pass gave, without its graph.
    """
    store = model.stream.key_values
    try:
        return _run(model, chain, precision, store)
    finally:
        store.clear()  # a pass that failed leaves its graph nowhere


def _run(
    model: MultiTaskPeftModel,
    chain: Sequence[MuxBatch],
    precision: _Precision,
    store: KeyValueStore,
) -> list[MuxOutput]:
    flights: list[tuple[MuxOutput, list[Kept]]] = []
    for micro_batch in chain:
        with store.recording() as kept, precision():
            flights.append((model(micro_batch.to(model.device)), kept))
    found = [output.detached() for output, _ in flights]
    while flights:
        # In reverse: later parts must have added to the gradients of kept keys and values before these go on (M section
        # 3.5).
        output, kept = flights.pop()
        pass_backward(output.losses, None, kept)
        store.release(kept)
    return found


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


class Executor:
    """Runs the micro-batches of a step, forward and backward.

    Args:
        model: the whole model, or a tensor parallel rank's part of it, on its device, in training mode.
        bf16: run under bfloat16 autocast.
        cuda_graphs: replay passes as graphs where they can be captured; "auto" where they are on a GPU and do not run
            in turns, and once a graph is proven to compute what the eager pass does.
        sync: sums the gradients of all processes; by default this one is alone.
        interleaving: runs chains of different tasks in turns, where layers wait for all-reduces
            (`peft_mux.engine.tensor.interleaving`); by default they run one after another.

    Raises:
        ValueError: for passes both replayed and in turns.
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        *,
        bf16: bool = False,
        cuda_graphs: bool | str = False,
        sync: GradientSync | None = None,
        interleaving: Interleaving | None = None,
    ) -> None:
        """Remember the model and its device."""
        if cuda_graphs is True and interleaving is not None:
            raise ValueError("cuda_graphs is True with interleaving; allowed: one of them, as a replay gives no turn.")
        self.model = self.mux_model = model
        self.device = model.device
        self.bf16 = bf16
        self.captured = self._captured_passes(cuda_graphs, is_in_turns=interleaving is not None)
        self.sync = sync or GradientSync(model, Processes())
        self.interleaving = interleaving
        self.clock = PassClock(self.device)

    def _captured_passes(self, cuda_graphs: bool | str, *, is_in_turns: bool) -> CapturedPasses | None:
        if cuda_graphs is True:
            return CapturedPasses(self.model, self.precision)
        if cuda_graphs == "auto" and self.device.type == "cuda" and not is_in_turns:
            return CapturedPasses(self.model, self.precision, plain=self._eager_pass)
        return None

    def follow(self, plan: Plan) -> None:
        """Follow the turns of a plan; the work of a step tells all else that it means on one stage."""
        if self.interleaving is not None:
            self.interleaving.follow(plan)

    def close(self) -> None:
        """Do nothing: the process groups in use outlive the run."""

    def run(self, work: StepWork) -> StepResult:
        """Compute the loss of every task and add its gradients to its parameters.

        A task's loss does not depend on how its global batch was split, as each part is already divided by the
        number of targets of the whole.

        Args:
            work: the micro-batches of this process.
        """
        project_prompts(self.model, work.tasks)
        micro_batches = prepared(self, work.micro_batches, work.tasks, total=self.sync.total)
        self.sync.begin(work)
        self.clock.start_step()
        # Also of tasks without rows here, as losses are summed over all replicas.
        sums = StepSums(self.model, work.tasks, self.device)
        for group in self._groups(chains_of(micro_batches)):
            with self.clock.timing([micro_batch for chain in group for micro_batch in chain], self._waited_s(group)):
                outputs = self._group_passes(group)
            for chain, passes in zip(group, outputs, strict=True):
                for micro_batch, output in zip(chain, passes, strict=True):
                    sums.add(output)
                    # At once, so that the sum of a task that is complete hides behind the passes that are left.
                    self.sync.after_backward(micro_batch)
        stream_tokens = sum(micro_batch.num_tokens for micro_batch in work.micro_batches)
        result = StepResult(sums.losses, work.num_tokens, stream_tokens, work.failures)
        failures = self.model.objectives.take_failures()
        return self.sync.finish(replace(result, statistics=sums.statistics, loss_failures=failures))

    def _waited_s(self, group: Sequence[Chain]) -> Callable[[], float] | None:
        """Return what tells how long this process has waited for sums, where it waits for each one at once."""
        if self.interleaving is None or len(group) > 1:
            return None
        return lambda: self.sync.processes.waited_s

    def _groups(self, chains: Sequence[Chain]) -> Sequence[Sequence[Chain]]:
        """Return the groups of chains that run together, in order."""
        return [(chain,) for chain in chains] if self.interleaving is None else self.interleaving.groups(chains)

    def _group_passes(self, group: Sequence[Chain]) -> list[list[MuxOutput]]:
        """Run the chains of a group; return what each pass gave."""
        if self.interleaving is None:
            return [self._passes(chain) for chain in group]
        return self.interleaving.run(group, lambda index: self._passes(group[index]))

    def _passes(self, chain: Sequence[MuxBatch]) -> list[MuxOutput]:
        """Run the micro-batches of a chain forward and backward; return what each gave."""
        if not is_chained(chain):
            return [self._pass(micro_batch) for micro_batch in chain]
        self.model.stream.key_values.clear()  # a step that failed may have left something
        return run_chain(self.model, chain, self.precision)

    def _pass(self, micro_batch: MuxBatch) -> MuxOutput:
        """Run one micro-batch forward and backward."""
        replayed = None if self.captured is None else self.captured.run(micro_batch)
        return self._eager_output(micro_batch) if replayed is None else MuxOutput(replayed, micro_batch.task_names)

    def _eager_pass(self, micro_batch: MuxBatch) -> torch.Tensor:
        """Run one micro-batch as it is; return its losses `[N]`."""
        return self._eager_output(micro_batch).losses

    def _eager_output(self, micro_batch: MuxBatch) -> MuxOutput:
        """Run one micro-batch as it is."""
        with self.precision():
            output = self.model(micro_batch.to(self.device))
        # One backward for all tasks: each loss reaches its own adapters alone, so no gradient mixes (M section 3.2).
        output.losses.sum().backward()
        return output.detached()

    def forward_losses(self, micro_batches: Sequence[MuxBatch]) -> dict[str, torch.Tensor]:
        """Return the loss of each task in a forward pass, summed over the micro-batches; nothing is changed."""
        return self.forward_sums(micro_batches).losses

    @torch.no_grad()
    def forward_sums(self, micro_batches: Sequence[MuxBatch]) -> StepSums:
        """Return losses and statistics of a forward pass, summed over the micro-batches; nothing is changed."""
        tasks = tasks_of(micro_batches)
        sums = StepSums(self.model, tasks, self.device)
        ready = prepared(self, micro_batches, tasks)
        with self.precision():
            for micro_batch in ready:
                sums.add(self.model(micro_batch.to(self.device)))
        return sums

    @torch.no_grad()
    def forward_terms(self, micro_batches: Sequence[MuxBatch]) -> list[torch.Tensor | None]:
        """Return the negative log-likelihoods `[M]` of the targets of each micro-batch, without gradient."""
        found: list[torch.Tensor | None] = []
        with self.precision():
            for micro_batch in micro_batches:
                self.model.prepare_pass(micro_batch.task_names)
                found.append(self.model.target_losses(micro_batch.to(self.device)))
        return found

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Return values that were computed where the output head lies: here they are."""
        return values

    def sequence_logits(self, micro_batch: MuxBatch) -> list[torch.Tensor] | None:
        """Return the logits of every sequence: `[L, V]` for language models, `[C]` for classifiers."""
        with self.precision():
            return self.model.sequence_logits(micro_batch.to(self.device))

    def gather(self, value: Any) -> list[Any]:
        """Return what every process of the run has given, by rank, where processes hold parts of the model."""
        return self.sync.gather(value)

    def non_finite_tasks(self, micro_batches: Sequence[MuxBatch]) -> list[str]:
        """Return the tasks whose loss is not finite in a forward pass; no gradients, and nothing is changed."""
        losses = self.forward_losses(micro_batches)
        # Stacked, as each loss that is asked for by itself would wait for the device once more.
        finite = torch.stack(list(losses.values())).isfinite().tolist() if losses else []
        return sorted(name for name, is_finite in zip(losses, finite, strict=True) if not is_finite)

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of the run."""
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
