"""`OptimizerShards`: each task's optimizer state is kept by one of the processes only (ZeRO-1, by whole tasks).

With data parallelism every process would hold the same moments of all tasks, 8 bytes for each adapter parameter with
AdamW. Here each task has a *keeper*, the process that had least to keep when the task started::

    gradients of a task    reduced to its keeper, instead of to all processes
    norm                   computed by the keeper, and sent to all, so that all reach the same verdict
    optimizer step         taken by the keeper
    weights                sent by the keeper to all

A reduction and a broadcast send as much as the all-reduce that they replace. Whole tasks need no rule for how an
optimizer may be cut, so any `optim` works; there should be at least as many tasks as processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import TaskTable
from peft_mux.engine.work import StepResult
from peft_mux.modeling.model import MultiTaskPeftModel


class OptimizerShards:
    """Assigns tasks to processes, and sends what keepers compute.

    Args:
        processes: the processes of the run, each of which holds the whole model.
        table: all tasks of the run.
        model: the model of this process.
    """

    def __init__(self, processes: Processes, table: TaskTable, model: MultiTaskPeftModel) -> None:
        self.processes, self.table, self.model = processes, table, model

    def choose_keeper(self) -> int:
        """Return the rank that keeps the fewest parameters now; the same on all processes."""
        kept = Counter(dict.fromkeys(range(self.processes.world_size), 0))
        for run in self.table:
            if run.optimizer is not None:
                kept[run.optimizer.keeper] += sum(item.numel() for item in run.optimizer.parameters)
        return min(kept, key=lambda rank: (kept[rank], rank))

    def keeper_of(self, name: str) -> int:
        """Return the rank of a running task's keeper."""
        optimizer = self.table[name].optimizer
        assert optimizer is not None, "a running task has an optimizer"
        return optimizer.keeper

    def apply(self, result: StepResult) -> None:
        """Step every task on its keeper, as `TaskTable.apply` does, and send the new weights to all processes.

        Args:
            result: the step, with the norms that keepers have computed.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        assert result.norms is not None, "KeeperSync sends the norms of keepers to all"
        outcomes = self.table.update(result.losses, [result.norms[name] for name in result.losses])
        # An optimizer raises on its keeper alone, and all processes must end its task in this step.
        errors_here = {name: outcome.error for name, outcome in outcomes.items() if outcome.error}
        errors: dict[str, str] = {}
        if any(count for (count,) in self.processes.exchange([len(errors_here)])):
            for errors_of_rank in self.processes.gather(errors_here):
                errors |= errors_of_rank
        keepers = {name: self.keeper_of(name) for name in outcomes}
        self.table.count(
            result, {name: replace(outcome, error=errors.get(name, "")) for name, outcome in outcomes.items()}
        )
        # Also of tasks that have just failed: their keepers have the weights that they go back to.
        with torch.no_grad():
            pending = [
                self.processes.broadcast(page.values.detach(), rank)
                for name, rank in keepers.items()
                for page in self.model.registry.slab_of(name).pages
            ]
        for broadcast in pending:
            broadcast.wait()


class KeeperSync(GradientSync):
    """Sums the gradients of each task for its keeper alone, and sends the norms that keepers compute to all.

    Args:
        model: the model of this process.
        processes: the processes of the run, each of which holds the whole model.
        shards: knows the keepers.
        is_deferred: start all sums after the passes of this process; see `GradientSync`.
        reduce_dtype: dtype in which gradients are sent and summed; by default their own.
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        processes: Processes,
        shards: OptimizerShards,
        *,
        is_deferred: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, processes, is_deferred=is_deferred, reduce_dtype=reduce_dtype)
        self._keeper_of = shards.keeper_of

    @torch.no_grad()
    def gradient_norms(self, tasks: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the 2-norm of the whole gradient of each task; see `GradientSync.gradient_norms`."""
        norms_N = torch.zeros(len(tasks), device=self.processes.device)
        for index, name in enumerate(tasks):
            if self._keeper_of(name) == self.processes.rank:  # no other process has its gradient
                norms_N[index] = nn.utils.get_total_norm(self._page_gradients(name))
        self.num_bytes += norms_N.nbytes
        self.processes.all_reduce(norms_N).wait()
        return dict(zip(tasks, norms_N.unbind(), strict=True))

    def _begin_task(self, name: str) -> None:
        """Start summing the gradients of a task for its keeper."""
        begin = partial(self.processes.reduce, target=self._keeper_of(name))
        for gradient in self._page_gradients(name):
            self._begin_sum(gradient, begin, dtype=self.reduce_dtype)
