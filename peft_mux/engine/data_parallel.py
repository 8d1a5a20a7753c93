"""Data parallelism over adapters: every process takes its share of each global batch; gradients of a task add up.

Losses are divided by the number of targets of the global batch before anything is divided among processes, so the sum
of what the processes compute is what one process would. Frozen weights are never sent.

    rank 0   pass of hTask 1 | pass of hTask 2 | ...
    sums                       ~~ hTask 1 ~~~~~  ~~ hTask 2 ~~      each task: one flat buffer a page
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from peft_mux.data.batch import MuxBatch, TaskBatch
from peft_mux.engine.processes import Pending, Processes
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.model import MultiTaskPeftModel


class RowShares:
    """Divides the rows of one step among processes, evenly by tokens: longest first, each to whoever has least.

    Args:
        world_size: number of processes.

    Example:
        >>> shares = RowShares(2)
        >>> [[len(rows) for rows in share] for share in shares.divide([])]
        [[], []]
    """

    def __init__(self, world_size: int) -> None:
        """Start with nobody having anything."""
        self.num_tokens = [0] * world_size

    def divide(self, batches: Sequence[TaskBatch]) -> list[list[list[int]]]:
        """Divide global batches; what earlier calls left uneven is made up for.

        Args:
            batches: of the tasks that share their passes.

        Returns:
            For each process and each batch, the indices of its sequences, ascending.
        """
        lengths = sorted(
            (-len(sequence), task, index)
            for task, batch in enumerate(batches)
            for index, sequence in enumerate(batch.sequences)
        )
        shares: list[list[list[int]]] = [[[] for _ in batches] for _ in self.num_tokens]
        for length, task, index in lengths:
            rank = self.num_tokens.index(min(self.num_tokens))
            self.num_tokens[rank] -= length
            shares[rank][task].append(index)
        return [[sorted(rows) for rows in share] for share in shares]


class GradientSync:
    """Adds the gradients and losses of all processes up while passes are still running.

    Args:
        model: whose tasks' gradients lie in flat pages.
        processes: of the run.

    Attributes:
        num_tokens: that went through the backbone of this process, over all steps.
        num_bytes: of the gradients and losses that were added up in the last step; 0 for a process that is alone.
    """

    def __init__(self, model: MultiTaskPeftModel, processes: Processes) -> None:
        """Remember both."""
        self.model, self.processes = model, processes
        self.num_tokens, self.num_bytes = 0, 0
        self._order: list[str] = []
        self._left: Counter[str] = Counter()
        self._sums: list[Pending] = []

    def begin(self, work: StepWork) -> None:
        """Make every task of the step ready, also those of which this process has no rows: it adds zeros."""
        self._left = Counter(name for micro_batch in work.micro_batches for name in micro_batch.task_names)
        self._order, self._sums, self.num_bytes = list(work.sync_order or work.tasks), [], 0
        if not self.processes.is_alone:
            for name in self._order:
                self.model.task_slab(name).bind_gradients()

    def passed(self, micro_batch: MuxBatch) -> None:
        """Begin the sums of the tasks that are complete here.

        Sums begin in the order of the plan, the same on every process, whatever completes first.
        """
        self.num_tokens += micro_batch.num_tokens
        self._left.subtract(micro_batch.task_names)
        while self._order and self._left[self._order[0]] == 0:
            self._add_up(self._order.pop(0))

    def finish(self, result: StepResult) -> StepResult:
        """Wait for all sums; return the losses over the rows of all processes."""
        while self._order:
            self._add_up(self._order.pop(0))
        if self.processes.is_alone or not result.losses:
            return result
        total_N = torch.stack([loss.float() for loss in result.losses.values()])
        self._sum(total_N)
        for pending in self._sums:
            pending.wait()
        return replace(result, losses=dict(zip(result.losses, total_N.unbind(), strict=True)))

    def _add_up(self, name: str) -> None:
        for page in self.model.task_slab(name).pages:
            if page.values.grad is not None:
                self._sum(page.values.grad)

    def _sum(self, tensor: torch.Tensor) -> None:
        if self.processes.is_alone:
            return
        self.num_bytes += tensor.numel() * tensor.element_size()
        self._sums.append(self.processes.sum(tensor))
