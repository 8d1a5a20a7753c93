"""Data parallelism over adapters: every replica takes its share of each global batch; gradients of a task add up.

Losses are divided by the number of targets of the global batch before anything is divided among replicas, so the sum
of what the replicas compute is what one process would. Frozen weights are never sent.

    rank 0   pass of hTask 1 | pass of hTask 2 | ...
    sums                       ~~ hTask 1 ~~~~~  ~~ hTask 2 ~~      each task: one flat buffer a page, or a bundle
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch, TaskBatch
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.part_sync import PartSum, PartSums
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
    """Adds the gradients and losses of all replicas up while passes are still running.

    Args:
        model: what of it lies in this process; its tasks' gradients lie in flat pages.
        processes: of the run.
        layout: of the run; by default each process holds the whole model.

    Attributes:
        num_tokens: that went through the backbone of this process, over all steps.
        num_bytes: of the gradients, losses and norms that this process summed with others in the last step; 0 for a
            process that is alone.
    """

    def __init__(self, model: MultiTaskPeftModel, processes: Processes, layout: ParallelLayout | None = None) -> None:
        """Remember both; speak with nobody yet."""
        self.model, self.processes = model, processes
        self.num_tokens, self.num_bytes = 0, 0
        self.parts = None
        if layout is not None and not layout.is_data_parallel:
            self.parts = PartSums(model, processes, layout)
        self._speaks = layout is None or processes.rank in layout.leaders
        self._order: list[str] = []
        self._left: Counter[str] = Counter()
        self._sums: list[Pending | PartSum] = []

    def begin(self, work: StepWork) -> None:
        """Make every task of the step ready, also those of which this process has no rows: it adds zeros.

        Raises:
            ProcessError: if the processes do not hold the tasks together.
        """
        self._left = Counter(name for micro_batch in work.micro_batches for name in micro_batch.task_names)
        self._order, self._sums, self.num_bytes = list(work.sync_order or work.tasks), [], 0
        if self.processes.is_alone:
            return
        if self.parts is not None:
            self.parts.learn(self._order)
        for name in self._order:
            self.model.task_slab(name).bind_gradients()

    def passed(self, micro_batch: MuxBatch) -> None:
        """Begin the sums of the tasks that are complete here.

        Sums begin in the order of the plan, the same on every process, whatever completes first.

        Args:
            micro_batch: whose backward is done in all layers that lie here.
        """
        self.num_tokens += micro_batch.num_tokens
        self._left.subtract(micro_batch.task_names)
        while self._order and self._left[self._order[0]] == 0:
            self._add_up(self._order.pop(0))

    def finish(self, result: StepResult) -> StepResult:
        """Wait for all sums; return the losses over the rows of all replicas, the same bits on every process.

        Args:
            result: with the losses of this process's replica.

        Returns:
            The result with losses of all; and with norms, where processes hold parts.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        while self._order:
            self._add_up(self._order.pop(0))
        if self.processes.is_alone or not result.losses:
            return result
        total_N = torch.stack([loss.float() for loss in result.losses.values()])
        if not self._speaks:  # the leader of the replica does
            total_N = torch.zeros_like(total_N)
        self._sum(total_N)
        for pending in self._sums:
            pending.wait()
        self._sums = []
        norms = None if self.parts is None else self.gradient_norms(list(result.losses))
        return replace(result, losses=dict(zip(result.losses, total_N.unbind(), strict=True)), norms=norms)

    @torch.no_grad()
    def gradient_norms(self, tasks: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the 2-norm of the whole gradient of each task, the same bits on every process; after `finish`.

        Args:
            tasks: the same on every process, which all call this.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        if self.parts is None or self.processes.is_alone or not tasks:
            return {name: nn.utils.get_total_norm(self._page_gradients(name)) for name in tasks}
        squares_N = self.parts.squared_norms(tasks)
        self.num_bytes += squares_N.nbytes
        self.processes.sum(squares_N).wait()
        return dict(zip(tasks, squares_N.sqrt().float().unbind(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """Return what every process has given, by rank, where processes hold parts; otherwise this one's alone.

        Args:
            value: small and plain.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        return [value] if self.parts is None else self.processes.gather(value)

    def bytes_per_step(self, tasks: Sequence[str]) -> int:
        """Return what `num_bytes` is after a step of these tasks and their norms.

        For each task the elements that this process holds together with others, in their dtype (of a page that is
        summed as it lies, all elements), 4 bytes for its loss, and 8 for its norm where processes hold parts.

        Args:
            tasks: that took part in a step before, where processes hold parts.
        """
        if self.processes.is_alone or not tasks:
            return 0
        if self.parts is not None:
            return sum(self.parts.of(name).num_bytes for name in tasks) + 12 * len(tasks)
        pages = [page for name in tasks for page in self.model.task_slab(name).pages]
        return sum(page.values.nbytes for page in pages) + 4 * len(tasks)

    def _add_up(self, name: str) -> None:
        if self.parts is None:
            for gradient in self._page_gradients(name):
                self._sum(gradient)
        elif not self.processes.is_alone:
            begun = self.parts.begin(name)
            self.num_bytes += sum(one.bundle.num_bytes for one in begun)
            self._sums += begun

    def _page_gradients(self, name: str) -> list[torch.Tensor]:
        pages = self.model.task_slab(name).pages
        return [page.values.grad for page in pages if page.values.grad is not None]

    def _sum(self, tensor: torch.Tensor) -> None:
        if self.processes.is_alone:
            return
        self.num_bytes += tensor.numel() * tensor.element_size()
        self._sums.append(self.processes.sum(tensor))
