"""`ShardedExecutor`: runs a step where the frozen weights are sharded over the processes of the run (FSDP2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.chains import chains_of
from peft_mux.engine.executor import Executor
from peft_mux.engine.fsdp.backbone import ShardedBackbone
from peft_mux.engine.gradients.sync import GradientSync
from peft_mux.engine.step_sums import StepSums
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.packed_forward import MuxOutput


class DeferredSync(GradientSync):
    """Sums of gradients that begin when all passes of this process are through.

    Between passes, one process would begin an all-reduce while another gathers weights, and NCCL does not order the
    collectives of one group among those of another: two processes could each wait for the other's.
    """

    def begin(self, work: StepWork) -> None:
        """Forget the passes of the step before.

        Args:
            work: the step that is about to run.
        """
        self._ran: list[MuxBatch] = []
        super().begin(work)

    def after_backward(self, micro_batch: MuxBatch) -> None:
        """Remember a micro-batch whose backward is done; its sums begin in `finish`.

        Args:
            micro_batch: the micro-batch whose backward is done.
        """
        self._ran.append(micro_batch)

    def finish(self, result: StepResult) -> StepResult:
        """Begin all sums, and wait for them.

        Args:
            result: the result of this process, with the losses over its own rows.
        """
        for micro_batch in self._ran:
            super().after_backward(micro_batch)
        return super().finish(result)


class ShardedSync(DeferredSync):
    """Sums of gradients that begin when all passes of all processes are through.

    Args:
        backbone: the frozen weights, sharded over the processes that sum.

    Attributes:
        backbone: the frozen weights, sharded.
        agenda: passes of the longest chain, over all processes, at each position of the step that is still to come.
    """

    def __init__(self, backbone: ShardedBackbone) -> None:
        """Remember the backbone."""
        super().__init__(backbone.model, backbone.processes)
        self.agenda: deque[int] = deque()
        self.backbone = backbone

    def begin(self, work: StepWork) -> None:
        """Agree on the passes of all processes, before the first one gathers anything.

        Args:
            work: the step that is about to run.
        """
        chains = chains_of(work.micro_batches)
        # First of all: a process that begins its passes must know that the others take part in as many gatherings.
        self.agenda = deque(self.backbone.agree_on_passes([len(chain) for chain in chains]))
        super().begin(work)

    def finish(self, result: StepResult) -> StepResult:
        """Take part in the passes that other processes have more of, and then sum.

        Args:
            result: the result of this process, with the losses over its own rows.
        """
        # Positions at which this process has no chain at all; the others' gatherings there still wait for it.
        while self.agenda:
            num_passes = self.agenda.popleft()
            self.backbone.join_forwards(num_passes)
            self.backbone.join_backwards(num_passes)
        return super().finish(result)


class ShardedExecutor(Executor):
    """An executor whose passes gather weights, so that every process has to take part in each of them.

    Args:
        backbone: the sharded weights; their model is on its device, in training mode.
        bf16: run under bfloat16 autocast.
        sync: sums the gradients of all processes; by default a new one over the processes of the backbone.

    Attributes:
        backbone: the sharded weights, with their model.
    """

    def __init__(self, backbone: ShardedBackbone, *, bf16: bool = False, sync: ShardedSync | None = None) -> None:
        """Remember the backbone; passes are never captured, as gathered weights are not held for replays."""
        self._sharded_sync = sync or ShardedSync(backbone)
        super().__init__(backbone.model, bf16=bf16, sync=self._sharded_sync)
        self.backbone = backbone

    def _passes(self, chain: Sequence[MuxBatch]) -> list[MuxOutput]:
        """Run a chain, and take part in the passes that other processes have more of at its position.

        Args:
            chain: micro-batches that run as one.
        """
        num_missing = self._sharded_sync.agenda.popleft() - len(chain)
        # Foreign forwards before its own and foreign backwards after them: so every process gathers the units in one
        # order, all forwards of the position and then all backwards.
        self.backbone.join_forwards(num_missing)
        losses = super()._passes(chain)
        self.backbone.join_backwards(num_missing)
        return losses

    def forward_sums(self, micro_batches: Sequence[MuxBatch]) -> StepSums:
        """Return losses and statistics of a forward pass over this process's rows; every process must call this.

        Args:
            micro_batches: micro-batches of this process, of the same tasks everywhere; others may have more or fewer.
        """
        with self._joined(len(micro_batches)):
            return super().forward_sums(micro_batches)

    def forward_terms(self, micro_batches: Sequence[MuxBatch]) -> list[torch.Tensor | None]:
        """Return the negative log-likelihoods `[M]` of this process's micro-batches; every process must call this."""
        with self._joined(len(micro_batches)):
            return super().forward_terms(micro_batches)

    @contextmanager
    def _joined(self, num_passes: int) -> Iterator[None]:
        """Take part in the forward passes that other processes have more of, after those of the `with` block."""
        (most,) = self.backbone.agree_on_passes([num_passes])
        yield
        self.backbone.join_forwards(most - num_passes)
