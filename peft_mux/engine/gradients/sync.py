"""Gradient sync over adapters: every replica takes its share of each global batch; gradients of a task are summed.

Losses are divided by the number of targets of the global batch before anything is divided among replicas, so the sum
of what the replicas compute is what one process would. Frozen weights are never sent.

    rank 0   pass of hTask 1 | pass of hTask 2 | ...
    all-reduce                 ~~ hTask 1 ~~~~~  ~~ hTask 2 ~~      each task: one flat buffer a page, or a bundle
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.gradients.all_reduce import BundledAllReduce, PendingBundle
from peft_mux.engine.processes.processes import Pending, Processes
from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.engine.step_sums import pack, unpack
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import OWN


class GradientSync:
    """Sums the gradients and losses of all replicas while passes are still running.

    Args:
        model: the model of this process, whole or a part; the gradients of its tasks lie in flat pages.
        processes: the processes of the run.
        layout: which process holds which part of which replica; by default each process holds the whole model.

    Attributes:
        num_tokens: tokens that went through the backbone of this process, over all steps.
        num_bytes: bytes of the gradients, losses and norms that this process summed with others in the last step; 0
            for a process that is alone.
        bundled: the all-reduces of a layout whose processes hold parts of the model; `None` where each holds all of it.
    """

    def __init__(self, model: MultiTaskPeftModel, processes: Processes, layout: ParallelLayout | None = None) -> None:
        """Remember the model and the processes; communicate with nobody yet."""
        self.model, self.processes = model, processes
        self.num_tokens, self.num_bytes = 0, 0
        self.bundled = None
        if layout is not None and not layout.is_data_parallel:
            self.bundled = BundledAllReduce(model, processes, layout)
        self._counts_losses = layout is None or processes.rank in layout.leaders
        self._order: list[str] = []
        self._passes_left: Counter[str] = Counter()
        self._pending: list[Pending | PendingBundle] = []

    def begin(self, work: StepWork) -> None:
        """Make every task of the step ready, also those of which this process has no rows: it adds zeros.

        Args:
            work: the step that is about to run.

        Raises:
            ProcessError: if the processes do not hold the tasks together.
        """
        self._passes_left = Counter(name for micro_batch in work.micro_batches for name in micro_batch.task_names)
        self._order, self._pending, self.num_bytes = list(work.sync_order or work.tasks), [], 0
        if self.processes.is_alone:
            return
        if self.bundled is not None:
            self.bundled.exchange_holdings(self._order)
        for name in self._order:
            # Also of tasks without rows here: all-reduces are collective, so this process takes part, with zeros.
            self.model.registry.slab_of(name).bind_gradients()

    def after_backward(self, micro_batch: MuxBatch) -> None:
        """Begin the all-reduces of the tasks whose gradients are complete in this process.

        Args:
            micro_batch: the micro-batch whose backward is done in all layers that lie here.
        """
        self.num_tokens += micro_batch.num_tokens
        self._passes_left.subtract(micro_batch.task_names)
        # In the order of the plan, whatever completes first: a backend matches collectives by the order in which each
        # process begins them, and processes finish their tasks in different orders.
        while self._order and self._passes_left[self._order[0]] == 0:
            self._begin_all_reduce(self._order.pop(0))

    def finish(self, result: StepResult) -> StepResult:
        """Wait for all all-reduces; return the losses over the rows of all replicas, the same bits on every process.

        Args:
            result: the result of this process, with the losses over the rows of its replica.

        Returns:
            The result with the losses over all rows; and with gradient norms, where processes hold parts of the model.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        while self._order:
            self._begin_all_reduce(self._order.pop(0))
        if self.processes.is_alone or not result.losses:
            return result
        figures = pack(result.losses, result.statistics)
        # All processes of a replica have the same losses, which must be counted once: by the leader.
        if not self._counts_losses:
            figures = torch.zeros_like(figures)
        # Begun before the waits, so that it travels beside the last gradients.
        self._sum(figures)
        for pending in self._pending:
            pending.wait()
        self._pending = []
        # After the waits, as norms are of sums. A process that holds all of a task takes them from its own pages later.
        norms = None if self.bundled is None else self.gradient_norms(list(result.losses))
        losses, statistics = unpack(figures, result.losses, result.statistics)
        failures = self._all_failures(result)
        return replace(result, losses=losses, statistics=statistics, norms=norms, loss_failures=failures)

    def _all_failures(self, result: StepResult) -> dict[str, str]:
        """Return why losses of tasks' own have failed on any process, the same on all."""
        # Only a process with rows of a task can see its function fail, and all must tell the same of it.
        if not any(self.model.objectives.of(name).name == OWN for name in result.losses):
            return result.loss_failures
        found: dict[str, str] = {}
        for own in self.processes.gather(result.loss_failures):
            found = {**own, **found}
        return found

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the replicas of values that all processes of a replica have alike; all call this.

        Args:
            values: numbers of this replica; not changed.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        if self.processes.is_alone:
            return values
        summed = values.float().clone() if self._counts_losses else torch.zeros_like(values, dtype=torch.float32)
        self.processes.all_reduce(summed).wait()
        return summed

    @torch.no_grad()
    def gradient_norms(self, tasks: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the 2-norm of the whole gradient of each task, the same bits on every process; after `finish`.

        Args:
            tasks: names of the tasks, the same on every process; all processes call this.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        if self.bundled is None or self.processes.is_alone or not tasks:
            return {name: nn.utils.get_total_norm(self._page_gradients(name)) for name in tasks}
        squares_N = self.bundled.squared_norms(tasks)
        self.num_bytes += squares_N.nbytes
        self.processes.all_reduce(squares_N).wait()
        return dict(zip(tasks, squares_N.sqrt().float().unbind(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """Return what every process has given, by rank, where processes hold parts; otherwise this one's alone.

        Args:
            value: a small plain value of this process.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        return [value] if self.bundled is None else self.processes.gather(value)

    def bytes_per_step(self, tasks: Sequence[str]) -> int:
        """Return what `num_bytes` is after a step of these tasks and their norms.

        For each task the elements that this process holds together with others, in their dtype (of a page that is
        summed as it lies, all elements), 4 bytes for its loss and for each of its statistics, and 8 for its norm where
        processes hold parts.

        Args:
            tasks: names of the tasks; where processes hold parts, of tasks that took part in a step before.
        """
        if self.processes.is_alone or not tasks:
            return 0
        if self.bundled is not None:
            return (
                sum(self.bundled.cells_of(name).num_bytes for name in tasks) + 12 * len(tasks) + self._statistics(tasks)
            )
        pages = [page for name in tasks for page in self.model.registry.slab_of(name).pages]
        return sum(page.values.nbytes for page in pages) + 4 * len(tasks) + self._statistics(tasks)

    def _statistics(self, tasks: Sequence[str]) -> int:
        """Return the bytes of what is logged beside the losses of tasks."""
        return 4 * sum(len(self.model.objectives.statistic_names(name)) for name in tasks)

    def _begin_all_reduce(self, name: str) -> None:
        """Begin to sum the gradients of a task, as pages or as bundles."""
        if self.bundled is None:
            for gradient in self._page_gradients(name):
                self._sum(gradient)
        elif not self.processes.is_alone:
            begun = self.bundled.begin(name)
            self.num_bytes += sum(one.bundle.num_bytes for one in begun)
            self._pending += begun

    def _page_gradients(self, name: str) -> list[torch.Tensor]:
        pages = self.model.registry.slab_of(name).pages
        return [page.values.grad for page in pages if page.values.grad is not None]

    def _sum(self, tensor: torch.Tensor) -> None:
        if self.processes.is_alone:
            return
        self.num_bytes += tensor.numel() * tensor.element_size()
        self._pending.append(self.processes.all_reduce(tensor))
