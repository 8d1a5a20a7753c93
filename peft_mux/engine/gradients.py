"""Sums of gradients over the processes that hold the same adapter weights.

Losses are divided by the number of targets of the global batch before rows are divided among replicas, so the sum over
replicas equals the result of one process. The all-reduce of a task starts as soon as its last backward pass on this
process has finished, while other tasks still compute; frozen weights are never sent::

    rank 0   pass of hTask 1 | pass of hTask 2 | ...
    all-reduce                 ~~ hTask 1 ~~~~~  ~~ hTask 2 ~~

Here every process holds the whole model, and a task's flat pages of gradients are summed in place. If processes hold
parts of the model, gradients are summed cell by cell (`peft_mux.parallel.cells`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.processes import Pending, Processes
from peft_mux.engine.work import StepResult, StepWork, pack, unpack
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import OWN


class GradientSync:
    """Sums the gradients and losses of all replicas while passes are still running.

    Args:
        model: the whole model; the gradients of its tasks are in flat pages.
        processes: the processes of the run.
        is_deferred: start all sums after the passes of this process. Needed if passes gather frozen weights: NCCL does
            not order collectives of different groups, so a sum on one process and an all-gather on another could wait
            for each other.
        reduce_dtype: dtype in which gradients are sent and summed; by default their own.

    Attributes:
        holds_parts: whether processes hold parts of the model, so that passes wait for other processes.
        num_replicas: number of copies of the model, among which rows are divided.
        is_leader: whether the losses of this process count; the processes of a replica have the same losses.
        num_bytes: bytes of the gradients, losses and norms that this process summed with others in the last step.
    """

    holds_parts = False

    def __init__(
        self,
        model: MultiTaskPeftModel,
        processes: Processes,
        *,
        is_deferred: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.processes, self.is_deferred, self.reduce_dtype = model, processes, is_deferred, reduce_dtype
        self.num_replicas, self.is_leader = processes.world_size, True
        self.num_bytes = 0
        # The tasks whose sums have not begun; none if this process is alone.
        self._order: list[str] = []
        self._passes_left: Counter[str] = Counter()
        # Each sum with the tensor that it replaces, the one that is sent, and what is called when it is complete.
        self._pending: list[tuple[Pending, torch.Tensor, torch.Tensor, Callable[[], None] | None]] = []

    def begin(self, work: StepWork) -> None:
        """Prepare every task of the step, including tasks without rows in this process, which contributes zeros.

        Raises:
            ProcessError: if the processes do not hold the tasks together.
        """
        self._passes_left = Counter(name for micro_batch in work.micro_batches for name in micro_batch.task_names)
        self._order, self._pending, self.num_bytes = [], [], 0
        if not self.processes.is_alone:
            self._order = list(work.sync_order or work.tasks)
        for name in self._order:
            # Includes tasks without rows here: all-reduces are collective, so this process contributes zeros.
            self.model.registry.slab_of(name).bind_gradients()

    def after_backward(self, micro_batch: MuxBatch) -> None:
        """Start the all-reduces of the tasks whose gradients are complete in this process.

        Args:
            micro_batch: the micro-batch whose backward has finished in all layers of this process.
        """
        self._passes_left.subtract(micro_batch.task_names)
        # In plan order regardless of which task completes first, because backends match collectives by the order in
        # which each process starts them, and processes finish tasks in different orders.
        while not self.is_deferred and self._order and self._passes_left[self._order[0]] == 0:
            self._begin_task(self._order.pop(0))

    def finish(self, result: StepResult) -> StepResult:
        """Wait for all all-reduces; return the losses over the rows of all replicas, the same bits on every process.

        Args:
            result: the result of this process, with the losses over the rows of its replica.

        Returns:
            The result with the losses over all rows, and with `gradient_norms`.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        while self._order:
            self._begin_task(self._order.pop(0))
        if self.processes.is_alone or not result.losses:
            return result
        figures = pack(result.losses, result.statistics)
        # All processes of a replica have the same losses, so only the leader counts them.
        if not self.is_leader:
            figures = torch.zeros_like(figures)
        # Started before the waits, so that it overlaps with the last gradients.
        self._begin_sum(figures, self.processes.all_reduce)
        for pending, tensor, sent, unpack_sum in self._pending:
            pending.wait()
            if sent is not tensor:
                tensor.copy_(sent)
            if unpack_sum is not None:
                unpack_sum()
        self._pending = []
        # After the waits, because norms are computed from sums.
        norms = self.gradient_norms(list(result.losses))
        losses, statistics = unpack(figures, result.losses, result.statistics)
        failures = result.loss_failures
        # Only a process with rows of a task can see its loss function fail, and all must report the same reason.
        if any(self.model.objectives.of(name).name == OWN for name in result.losses):
            failures = {}
            for failures_of_rank in self.processes.gather(result.loss_failures):
                failures = {**failures_of_rank, **failures}
        return replace(result, losses=losses, statistics=statistics, norms=norms, loss_failures=failures)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over replicas of values that are equal on all processes of a replica; all must call this.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        if self.processes.is_alone:
            return values
        summed = values.float().clone() if self.is_leader else torch.zeros_like(values, dtype=torch.float32)
        self.processes.all_reduce(summed).wait()
        return summed

    def gradient_norms(self, tasks: Sequence[str]) -> dict[str, torch.Tensor] | None:
        """Return the 2-norm of the whole gradient of each task, the same bits on every process; after the sums.

        `None` if every process has all gradients: then it computes norms when it steps the tasks.

        Args:
            tasks: names of the tasks, the same on every process; all processes call this.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        del tasks
        return None

    def gather(self, value: Any) -> list[Any]:
        """Gather a small plain value from every process, by rank; only this one's if every process holds everything.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        return [value]

    def _begin_task(self, name: str) -> None:
        """Start summing the gradients of a task."""
        for gradient in self._page_gradients(name):
            self._begin_sum(gradient, self.processes.all_reduce, dtype=self.reduce_dtype)

    def _begin_sum(
        self,
        tensor: torch.Tensor,
        begin: Callable[[torch.Tensor], Pending],
        unpack_sum: Callable[[], None] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Start summing a tensor over processes; `finish` waits for it.

        Args:
            tensor: the summand of this process, which the sum replaces.
            begin: begins the sum of what is sent.
            unpack_sum: called when the sum is complete.
            dtype: dtype in which the tensor is sent and summed; by default its own.
        """
        sent = tensor if dtype is None else tensor.to(dtype)
        self.num_bytes += sent.nbytes
        self._pending.append((begin(sent), tensor, sent, unpack_sum))

    def _page_gradients(self, name: str) -> list[torch.Tensor]:
        pages = self.model.registry.slab_of(name).pages
        return [page.values.grad for page in pages if page.values.grad is not None]
