"""`ShardedExecutor`: runs a step where the frozen weights are divided among the processes of the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.chains import chains_of
from peft_mux.engine.data_parallel import GradientSync
from peft_mux.engine.executor import Executor
from peft_mux.engine.sharded_backbone import ShardedBackbone
from peft_mux.engine.work import StepResult, StepWork


class ShardedSync(GradientSync):
    """Sums of gradients that begin when all passes of all processes are through.

    Between passes, one process would begin a sum while another gathers weights, and nothing orders the groups of NCCL
    among each other.

    Args:
        backbone: divided among the processes that sum.

    Attributes:
        agenda: how many passes the longest chain has at each place of the step that is still to come.
    """

    def __init__(self, backbone: ShardedBackbone) -> None:
        """Remember the backbone."""
        super().__init__(backbone.model, backbone.processes)
        self.agenda: deque[int] = deque()
        self._backbone = backbone
        self._ran: list[MuxBatch] = []

    def begin(self, work: StepWork) -> None:
        """Agree on the passes of all processes, before the first one gathers anything."""
        chains = chains_of(work.micro_batches)
        self.agenda = deque(self._backbone.agree([len(chain) for chain in chains]))
        self._ran = []
        super().begin(work)

    def passed(self, micro_batch: MuxBatch) -> None:
        """Remember a pass."""
        self._ran.append(micro_batch)

    def finish(self, result: StepResult) -> StepResult:
        """Take part in the passes of others, and then add up."""
        while self.agenda:
            num_passes = self.agenda.popleft()
            self._backbone.join_forwards(num_passes)
            self._backbone.join_backwards(num_passes)
        for micro_batch in self._ran:
            super().passed(micro_batch)
        return super().finish(result)


class ShardedExecutor(Executor):
    """An executor whose passes gather weights, so that every process has to take part in each of them.

    Args:
        backbone: divided; its model is on its device, in training mode.
        bf16: run under bfloat16 autocast.

    Attributes:
        backbone: as given.
    """

    def __init__(self, backbone: ShardedBackbone, *, bf16: bool = False) -> None:
        """Remember the backbone; passes are never captured, as gathered weights are not held for replays."""
        self._sharded_sync = ShardedSync(backbone)
        super().__init__(backbone.model, bf16=bf16, sync=self._sharded_sync)
        self.backbone = backbone

    def _passes(self, chain: Sequence[MuxBatch]) -> list[torch.Tensor]:
        """Run a chain, and take part in what other processes have more of at its place."""
        num_missing = self._sharded_sync.agenda.popleft() - len(chain)
        self.backbone.join_forwards(num_missing)
        losses = super()._passes(chain)
        self.backbone.join_backwards(num_missing)
        return losses

    def forward_losses(self, micro_batches: Sequence[MuxBatch]) -> dict[str, torch.Tensor]:
        """Return the loss of each task in a forward pass over this process's rows; every process must call this."""
        (most,) = self.backbone.agree([len(micro_batches)])
        losses = super().forward_losses(micro_batches)
        self.backbone.join_forwards(most - len(micro_batches))
        return losses
