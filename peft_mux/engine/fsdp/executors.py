"""`ShardedExecutor`: runs a step where the frozen weights are sharded over the processes of the run (FSDP2)."""

# MERGED: `ShardedPipelineExecutor`: a pipeline whose stages share their frozen weights with those of other replicas
# MERGED: (FSDP2).
# MERGED: For two replicas of two stages, each layer is gathered from the two processes that hold its stage::
# MERGED:     rank      0                    1                    2                    3
# MERGED:     replica   0                    0                    1                    1
# MERGED:     stage     0                    1                    0                    1
# MERGED:     holds     half of stage 0      half of stage 1      half of stage 0      half of stage 1
# MERGED: Gatherings are collective among the replicas of a stage. All replicas follow one template, so they come to
# MERGED: its actions
# MERGED: in one order; how many passes an action has differs from replica to replica. So the replicas tell each other
# MERGED: these
# MERGED: numbers before a step, and in each action every one gathers as often as the one that has most passes there:
# MERGED: behind its
# MERGED: own passes it takes part in the others' without computing anything. Nobody waits in a circle: an action
# MERGED: waits for
# MERGED: actions that are earlier in the template on other stages, and for the same action in other replicas.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch

from peft_mux.data.batch import MuxBatch, chains_of
from peft_mux.engine.executor import Executor
from peft_mux.engine.fsdp.backbone import PassPart, ShardedBackbone, gathering_mesh, shard_backbone
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.actions import Flight, StageActions
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan, forwards_only
from peft_mux.engine.pipeline.stage import StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepResult, StepSums, StepWork
from peft_mux.errors import PlanError
from peft_mux.modeling.model import MuxOutput
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot
from peft_mux.scheduler.plan import Plan


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


class ShardedActions(StageActions):
    """Actions that gather the weights of their layers, as often as the replica that has most passes in them.

    Args:
        model: the stage of this process, on its device.
        backbone: the frozen weights of that stage, sharded.
        bf16: run under bfloat16 autocast.

    Attributes:
        backbone: the frozen weights of the stage, sharded.
        most: number of passes of each micro-batch of the template in the replica that has most of them.
    """

    def __init__(self, model: StageModel, backbone: ShardedBackbone, *, bf16: bool = False) -> None:
        """Hold nothing in flight."""
        super().__init__(model, bf16=bf16)
        self.backbone = backbone
        self.most: dict[Slot, int] = {}

    def forward(self, action: Action) -> None:
        """Run the passes of an action forward, and take part in those that other replicas have beyond them."""
        super().forward(action)
        self.backbone.join_forwards(self._num_missing(action), self._virtual_stage(action))

    def backward(self, action: Action) -> None:
        """Run the passes of an action backward, and take part in those that other replicas have beyond them."""
        super().backward(action)
        self.backbone.join_backwards(self._num_missing(action), self._virtual_stage(action))

    def _goes_back(self, action: Action, number: int) -> bool:
        # All replicas gather the same layers, whether or not the tasks of each have adapters so far down.
        return True

    def _pass_backward(self, action: Action, flight: Flight, gradient: torch.Tensor) -> None:
        self.backbone.begin_backward(self._virtual_stage(action))
        super()._pass_backward(action, flight, gradient)

    def _num_missing(self, action: Action) -> int:
        """Return how many passes of an action another replica has that this one lacks."""
        return self.most[action.slot] - len(self.slots[action.slot])


class ShardedPipelineExecutor(PipelineExecutor):
    """Runs the micro-batches of a step through a pipeline that gathers the weights of its layers.

    Args:
        model: the stage of this process, on its device, in training mode.
        plan: the plan to follow, the same in all replicas.
        backbone: the frozen weights of that stage, sharded; see `shard_stage`.
        pipelines: global ranks of the stages of every pipeline of the run.
        bf16: run under bfloat16 autocast.
        sync: sums the gradients of all replicas once all passes are through.

    Attributes:
        backbone: the frozen weights of the stage, sharded.
    """

    def __init__(
        self,
        model: StageModel,
        plan: Plan | PipelinePlan,
        backbone: ShardedBackbone,
        *,
        pipelines: Sequence[Sequence[int]],
        bf16: bool = False,
        sync: DeferredSync,
    ) -> None:
        """Open the channels."""
        self._sharded = ShardedActions(model, backbone, bf16=bf16)
        super().__init__(model, plan, backbone.processes, pipelines=pipelines, sync=sync, actions=self._sharded)
        self.backbone = backbone
        self._compared: PipelineTemplate | None = None

    def forward_terms(self, micro_batches: Sequence[MuxBatch]) -> list[torch.Tensor | None]:
        """Return the negative log-likelihoods `[M]` of each on the last stage; every process of the run calls this.

        Raises:
            ProcessError: if another process fails, dies, or does not answer within the time limit.
        """
        num_missing = self._most_passes(len(micro_batches)) - len(micro_batches)
        found = super().forward_terms(micro_batches)
        for action in forwards_only(self.plan.template, num_missing).actions[self.model.stage]:
            self.backbone.join_forwards(1, self.model.layout.virtual_stage(action.stage, action.chunk))
        return found

    def _most_passes(self, num_passes: int) -> int:
        """Return the passes of the replica that has most of them; every process of the run calls this."""
        return max(count for (count,) in self.processes.exchange([num_passes]))

    def _execute(
        self,
        template: PipelineTemplate,
        slots: Mapping[Slot, list[MuxBatch]],
        num_tasks: Mapping[int, int] | None = None,
    ) -> None:
        """Execute this stage's list, when all processes have told how many passes they have in each slot of it."""
        if template is self.plan.template and template is not self._compared:
            self._compare(template)
        counts = self.processes.exchange([len(slots[slot]) for slot in sorted(slots)])
        self._sharded.most = dict(zip(sorted(slots), map(max, zip(*counts, strict=True)), strict=True))
        super()._execute(template, slots, num_tasks)

    def _compare(self, template: PipelineTemplate) -> None:
        """Require that all replicas follow one template; once for each plan, before anything is gathered by it."""
        found = [digest for (digest,) in self.processes.exchange([crc32(repr(template).encode())])]
        if len(set(found)) > 1:
            raise PlanError(
                f"processes follow different templates (their digests, by rank: {found}); allowed: one, as replicas"
                " gather the weights of a stage together. Start every process with the same tasks, rows and arguments."
            )
        self._compared = template


def shard_stage(stage: StageModel, processes: Processes, layout: ParallelLayout) -> ShardedBackbone:
    """Shard the frozen weights of a stage over the replicas, in place; every process of the run calls this.

    Args:
        stage: the stage of this process, on its device.
        processes: the processes of the run, connected.
        layout: which process holds which stage of which replica; replicas are alike, and have no tensor parallel ranks.

    Raises:
        ConfigError: if the weights are quantised, on no device, or divided already.
        UnsupportedModelError: if the decoder layers cannot be told.
    """
    of_stage, last = stage.layout, stage.layout.last_virtual_stage
    parts = {
        number: PassPart(of_stage.layers_of(number), is_first=number == 0, is_last=number == last)
        for number in stage.virtual_stages
    }
    mesh = gathering_mesh(processes, layout.stage_groups)
    return shard_backbone(stage.model, processes, mesh, parts)
