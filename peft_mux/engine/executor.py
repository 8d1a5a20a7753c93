"""Spatial multiplexing on one device: all tasks of a micro-batch go through the backbone together (M §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.model import MultiTaskPeftModel


class Executor:
    """Runs the micro-batches of a step, forward and backward.

    Args:
        model: on its device, in training mode.
        bf16: run under bfloat16 autocast.
    """

    def __init__(self, model: MultiTaskPeftModel, *, bf16: bool = False) -> None:
        """Remember the model and its device."""
        self.model = model
        self.device = model.device
        self.bf16 = bf16

    def run(self, work: StepWork) -> StepResult:
        """Compute the loss of every task and add its gradients to its parameters.

        A task's loss does not depend on how its global batch was split, as each part is already divided by the
        number of targets of the whole.
        """
        losses = {name: torch.zeros((), device=self.device) for name in work.tasks}
        for micro_batch in work.micro_batches:
            with self.precision():
                output = self.model(micro_batch.to(self.device))
            output.losses.sum().backward()
            for name, loss in zip(output.task_names, output.losses.detach().unbind(), strict=True):
                losses[name] = losses[name] + loss
        stream_tokens = sum(micro_batch.num_tokens for micro_batch in work.micro_batches)
        return StepResult(losses, work.num_tokens, stream_tokens, work.failures)

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
