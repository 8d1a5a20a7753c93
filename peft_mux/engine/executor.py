"""Spatial multiplexing on one device: all tasks of a micro-batch go through the backbone together (M §3.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.chains import chains_of, is_chained
from peft_mux.engine.chain_pass import run_chain
from peft_mux.engine.cuda_graphs.passes import CapturedPasses
from peft_mux.engine.gradients.sync import GradientSync
from peft_mux.engine.pass_clock import PassClock
from peft_mux.engine.prepasses import prepared, tasks_of
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.step_sums import StepSums
from peft_mux.engine.tensor.interleaving import Chain, Interleaving
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.adapters.prompts.prompts import project_prompts
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.packed_forward import MuxOutput
from peft_mux.scheduler.plan import Plan


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
                self.model.packed.prepare(micro_batch.task_names)
                found.append(self.model.packed.target_losses(micro_batch.to(self.device)))
        return found

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Return values that were computed where the output head lies: here they are."""
        return values

    def sequence_logits(self, micro_batch: MuxBatch) -> list[torch.Tensor] | None:
        """Return the logits of every sequence: `[L, V]` for language models, `[C]` for classifiers."""
        with self.precision():
            return self.model.packed.sequence_logits(micro_batch.to(self.device))

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
