"""Executors: they run the micro-batches of a step on the part of the model that this process holds.

`Executor` runs processes that hold all layers; `PipelineExecutor` runs the stages of a pipeline. Both begin the sums of
gradients as soon as a task's last backward is done::

    StepWork --> Prepasses (engine/prepasses)     log-probabilities of a reference model, sums of KTO: no gradients
                   |
                   |--> Executor.run
                   |      ChainRunner               chains of micro-batches, in order; others are handed in:
                   |        CapturedPasses            (parallel/cuda_graphs) a pass is replayed as a CUDA graph
                   |        Interleaving              (parallel/tensor) in turns: one computes, sums of others travel
                   |        ShardedBackbone           (parallel/fsdp) weights gathered by layer; joins foreign passes
                   |      run_chain                 forward 0 .. n, backward n .. 0
                   |
                   |--> PipelineExecutor.run      (parallel/pipeline) actions F and B of the template of this stage
                   |      Traffic                   hidden states and gradients from and to other stages
                   |      StageModel                the layers of a virtual stage
                   |      BucketBarriers            ends steps of buckets in a window without flushes
                   v
                 GradientSync                     (engine/gradients) after each backward: all-reduces of complete tasks
                   |
                   v
                 StepResult

Micro-batches that share a long sequence form a chain (M section 3.5, Figure 12c; TeraPipe). Their forwards run in
order, their backwards in reverse::

    forward  0, forward 1, forward 2, backward 2, backward 1, backward 0

A later part reads the keys and values of the earlier ones; what it adds to their gradients enters the backward of the
pass that computed them, together with that pass's own losses (`peft_mux.modeling.stream`). So gradients are those of
the unsplit sequence, up to the order of sums. From its forward to its backward each pass of a chain holds its graph, so
a chain holds the graphs of all its passes at its turning point and frees them one by one from there. With activation
checkpointing a graph consists of the inputs of the layers, and of the keys and values of the parts; without it,
attention also holds a copy of the earlier keys and values for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from peft_mux.data.batch import MuxBatch, chains_of
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.prepasses import Prepasses
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import PassClock, StepResult, StepSums, StepWork
from peft_mux.errors import ConfigError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.task_objective import MuxOutput
from peft_mux.modeling.stream import Kept
from peft_mux.scheduler.plan import Plan

UpdateTasks = Callable[[int, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Collection[str]]
"""Steps tasks by their losses and gradient norms in a step of the window; returns those that step no more in it."""

RunChain = Callable[[Sequence[MuxBatch]], list[MuxOutput]]
"""Runs all forwards of a chain, then all its backwards; returns the output of each micro-batch."""


class ChainRunner:
    """Runs the chains of a step one after another; subclasses run them in other ways.

    Attributes:
        keeps_memory: whether it keeps memory that this class would not, which is given back if a pass finds none.
    """

    keeps_memory = False

    def follow(self, plan: Plan) -> None:
        """Follow another plan from the next step on."""

    def run_chains(
        self, chains: Sequence[Sequence[MuxBatch]], run_chain: RunChain, clock: PassClock
    ) -> Iterator[tuple[MuxBatch, MuxOutput]]:
        """Run the chains of this process; yield each micro-batch with its output, after its backward.

        Args:
            chains: the chains of the step, in order.
            run_chain: runs one of them.
            clock: times the passes.
        """
        for chain in chains:
            with clock.timing(chain):
                outputs = run_chain(chain)
            yield from zip(chain, outputs, strict=True)

    def joining(self, num_passes: int) -> AbstractContextManager[object]:
        """Return a context for so many forward passes, at whose end this process helps others with theirs."""
        del num_passes
        return nullcontext()


class Executor(Prepasses):
    """Runs the micro-batches of a step through all layers, forward and backward.

    Args:
        model: the whole model, or a tensor parallel rank's part of it, on its device, in training mode.
        bf16: run under bfloat16 autocast.
        sync: sums the gradients of all processes; by default this process is alone.
        runner: runs the chains of a step; by default one after another.

    Attributes:
        model: the model of this process.
        device: device of the model.
        runner: runs the chains of a step.
        clock: times the passes of a step.
        most_steps: number of steps that `run_window` can take at once.
    """

    most_steps = 1

    def __init__(
        self,
        model: MultiTaskPeftModel,
        *,
        bf16: bool = False,
        sync: GradientSync | None = None,
        runner: ChainRunner | None = None,
    ) -> None:
        self.model, self.device, self.bf16 = model, model.device, bf16
        self.sync = sync or GradientSync(model, Processes())
        self.runner = runner or ChainRunner()
        self.clock = PassClock(self.device)

    def follow(self, plan: Plan) -> None:
        """Follow another plan from the next step on; on one stage the work of a step holds almost all of it."""
        self.runner.follow(plan)

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of the run."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    def close(self) -> None:
        """Close the connections that only this executor uses; all processes call this at the same time."""

    # ------------------------------------------------------------------ steps

    def gains_by_windows(self, tasks: Sequence[str]) -> bool:
        """Return whether `run_window` is faster than steps of these tasks one by one; all processes call this."""
        del tasks
        return False

    def run_window(self, works: Sequence[StepWork], update: UpdateTasks) -> list[StepResult]:
        """Take several steps without a pause between them, where `gains_by_windows` is true."""
        raise NotImplementedError

    def run(self, work: StepWork, tolerating: AbstractContextManager[object] | None = None) -> StepResult:
        """Compute the loss of every task over all processes, and add its gradients to the parameters that lie here.

        A task's loss does not depend on how its global batch was split, as each part is already divided by the number
        of targets of the whole.

        Args:
            work: the micro-batches of this process.
            tolerating: the context of the passes. If it suppresses an error, the passes that are left are skipped, and
                this process still takes part in the sums of the step (`peft_mux.engine.memory_shortage`).

        Raises:
            ConfigError: if gradients are switched off.
        """
        require_gradients()
        micro_batches = self.with_reference_values(work.micro_batches, work.tasks, total=self.sync.total)
        self.sync.begin(work)
        self.clock.start_step()
        sums = StepSums(self.model, work.tasks, self.device)
        with tolerating or nullcontext(), self.model.unchanging_weights(work.tasks):
            for micro_batch, output in self.runner.run_chains(chains_of(micro_batches), self.run_chain, self.clock):
                sums.add(output)
                # At once, so that the sum of a complete task hides behind the passes that are left.
                self.sync.after_backward(micro_batch)
        failures = self.model.objectives.take_failures()
        return self.sync.finish(StepResult.of(work, sums, loss_failures=failures))

    def run_chain(self, chain: Sequence[MuxBatch]) -> list[MuxOutput]:
        """Run the forwards of a chain in order, and its backwards in reverse.

        Args:
            chain: micro-batches that share sequences, or a single one.

        Returns:
            The output of each pass, without its graph.
        """
        store = self.model.stream.key_values
        flights: list[tuple[MuxOutput, list[Kept]]] = []
        try:
            for micro_batch in chain:
                with store.recording() as kept, self.precision():
                    flights.append((self.model(micro_batch.to(self.device)), kept))
            outputs = [replace(output, losses=output.losses.detach()) for output, _ in flights]
            while flights:
                # In reverse: later parts must have added to the gradients of kept keys and values first.
                output, kept = flights.pop()
                pass_backward(output.losses, None, kept)
                store.release(kept)
        finally:
            store.clear()  # a pass that failed leaves its graph nowhere
        return outputs

    # ------------------------------------------------------------------ forward passes

    @torch.no_grad()
    def forward_sums(self, micro_batches: Sequence[MuxBatch]) -> StepSums:
        """Return losses and statistics of a forward pass, summed over the micro-batches; nothing is changed.

        If weights are sharded, every process calls this.
        """
        tasks = list(dict.fromkeys(name for micro_batch in micro_batches for name in micro_batch.task_names))
        sums = StepSums(self.model, tasks, self.device)
        ready = self.with_reference_values(micro_batches, tasks)
        with self.runner.joining(len(ready)), self.precision():
            for micro_batch in ready:
                sums.add(self.model(micro_batch.to(self.device)))
        return sums

    @torch.no_grad()
    def forward_terms(self, micro_batches: Sequence[MuxBatch]) -> list[torch.Tensor | None]:
        """Return the negative log-likelihoods `[M]` of each, without gradient; `None` if the head lies elsewhere."""
        terms: list[torch.Tensor | None] = []
        with self.runner.joining(len(micro_batches)), self.precision():
            for micro_batch in micro_batches:
                self.model.prepare_pass(micro_batch.task_names)
                terms.append(self.model.target_losses(micro_batch.to(self.device)))
        return terms

    def sequence_logits(self, micro_batch: MuxBatch) -> list[torch.Tensor] | None:
        """Return the logits of every sequence: `[L, V]` for language models, `[C]` for classifiers.

        They are `None` on processes that only help others to compute them.
        """
        with self.precision():
            return self.model.sequence_logits(micro_batch.to(self.device))

    @property
    def sees_whole_batches(self) -> bool:
        """Whether the passes of this process are all passes of each task, through all layers."""
        return self.sync.num_replicas == 1

    def non_finite_tasks(self, micro_batches: Sequence[MuxBatch]) -> list[str]:
        """Return the tasks whose loss is not finite in a forward pass; nothing is changed."""
        losses = self.forward_sums(micro_batches).losses
        # Stacked, as reading each loss by itself would wait for the device once more.
        finite = torch.stack(list(losses.values())).isfinite().tolist() if losses else []
        return sorted(name for name, is_finite in zip(losses, finite, strict=True) if not is_finite)


def require_gradients() -> None:
    """Require that gradients are switched on: without them steps would change nothing.

    Raises:
        ConfigError: if they are switched off.
    """
    if not torch.is_grad_enabled():
        raise ConfigError(
            "train must be called outside torch.no_grad() and torch.inference_mode(), because it needs gradients."
        )


def pass_backward(output: torch.Tensor, gradient: torch.Tensor | None, kept: Sequence[Kept]) -> None:
    """Run one backward from a pass's output and from the keys and values that later parts have read.

    One backward serves all tasks: each loss reaches its own adapters alone, so no gradient mixes (M section 3.2).

    Args:
        output: output of the pass: hidden states `[T, D]`, or losses `[N]`.
        gradient: gradient of the output; ones by default.
        kept: keys and values that the pass has kept for later parts.
    """
    roots: list[tuple[torch.Tensor, torch.Tensor]] = [root for layer in kept for root in layer.roots()]
    if output.requires_grad:
        roots.append((output, torch.ones_like(output) if gradient is None else gradient))
    if roots:
        # One call for all roots: the losses and the kept keys and values share a graph, which a backward frees.
        tensors, gradients = zip(*roots, strict=True)
        torch.autograd.backward(tensors, gradients)
