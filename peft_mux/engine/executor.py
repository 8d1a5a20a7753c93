"""Spatial multiplexing on one device: all tasks of a micro-batch go through the backbone together (M §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.captured import CapturedPasses
from peft_mux.engine.data_parallel import GradientSync
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.model import MultiTaskPeftModel


class Executor:
    """Runs the micro-batches of a step, forward and backward.

    Args:
        model: on its device, in training mode.
        bf16: run under bfloat16 autocast.
        cuda_graphs: replay passes as graphs where they can be captured.
        processes: that share the rows of a step; by default this one is alone.
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        *,
        bf16: bool = False,
        cuda_graphs: bool = False,
        processes: Processes | None = None,
    ) -> None:
        """Remember the model and its device."""
        self.model = model
        self.device = model.device
        self.bf16 = bf16
        self.captured = CapturedPasses(model, self.precision) if cuda_graphs else None
        self.sync = GradientSync(model, processes or Processes())

    def run(self, work: StepWork) -> StepResult:
        """Compute the loss of every task and add its gradients to its parameters.

        A task's loss does not depend on how its global batch was split, as each part is already divided by the
        number of targets of the whole.
        """
        self.sync.begin(work)
        losses = {name: torch.zeros((), device=self.device) for name in work.tasks}
        for micro_batch in work.micro_batches:
            for name, loss in zip(micro_batch.task_names, self._pass(micro_batch).unbind(), strict=True):
                losses[name] = losses[name] + loss
            self.sync.passed(micro_batch)
        stream_tokens = sum(micro_batch.num_tokens for micro_batch in work.micro_batches)
        return self.sync.finish(StepResult(losses, work.num_tokens, stream_tokens, work.failures))

    def _pass(self, micro_batch: MuxBatch) -> torch.Tensor:
        """Run one micro-batch forward and backward; return its losses `[N]`."""
        replayed = None if self.captured is None else self.captured.run(micro_batch)
        if replayed is not None:
            return replayed
        with self.precision():
            output = self.model(micro_batch.to(self.device))
        output.losses.sum().backward()
        return output.losses.detach()

    def non_finite_tasks(self, micro_batches: Sequence[MuxBatch]) -> list[str]:
        """Return the tasks whose loss is not finite in a forward pass; no gradients, and nothing is changed."""
        with torch.no_grad(), self.precision():
            outputs = [self.model(micro_batch.to(self.device)) for micro_batch in micro_batches]
        names = [name for output in outputs for name in output.task_names]
        finite = torch.cat([output.losses for output in outputs]).isfinite().tolist()
        return sorted({name for name, is_finite in zip(names, finite, strict=True) if not is_finite})

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of the run."""
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
