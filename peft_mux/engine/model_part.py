"""`ModelPart`: what one process holds of a run's model, with the executor that runs it; here the whole model.

`peft_mux.parallel.parallelize` divides a model among several processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.allocator import use_expandable_segments
from peft_mux.engine.backbone_source import BackboneSource, assign_settings
from peft_mux.engine.executor import Executor
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import ResolvedTask, TaskTable
from peft_mux.engine.tasks.optimizer import TaskOptimizer
from peft_mux.engine.tasks.setup import adapters_of
from peft_mux.engine.work import StepResult
from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.kernels.availability import runs_kernels
from peft_mux.modeling.backbone.digests import weight_digests
from peft_mux.modeling.backbone.liger import fuse_layers, has_liger
from peft_mux.modeling.backbone.recompute import keep_inputs, recompute_inputs
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.scheduler.plan import Plan


class ModelPart:
    """The whole model in one process. Subclasses hold a part of it, or share it with other processes.

    Args:
        source: where the backbone comes from.
        args: the arguments of the run.
        layout: which process holds which part of which replica.
        rank: global rank of the process.

    Attributes:
        place: replica, stage and tensor parallel rank of the process.
        num_stages: pipeline stages of this process's replica.
        tp_size: tensor parallel ranks of this process's replica.
        is_whole: whether this process holds the whole model.
        has_keepers: whether each task is stepped by one process alone, its keeper.
        gather_state: `gather_state(task, only_weights=False)` returns the whole state of a task on the first process
            and `None` on the others; `None` if each process holds all of every task.
        executor: runs the passes of this process; `None` before `load`.
        digests: digests of this process's frozen weights by name.
    """

    def __init__(
        self, source: BackboneSource, args: MultiTaskTrainingArguments, layout: ParallelLayout, rank: int
    ) -> None:
        self.source, self.args, self.layout = source, args, layout
        self.place = layout.place(rank)
        replica = layout.replicas[self.place.replica]
        self.num_stages, self.tp_size, self.is_whole = replica.pp, replica.tp, replica.num_gpus == 1
        self.has_keepers = False
        self.gather_state: Callable[..., Any] | None = None
        self.executor: Executor | None = None
        self.digests: dict[str, str] = {}

    @property
    def runs_whole_model(self) -> bool:
        """Whether this process alone has all weights that its passes need."""
        return True

    def check(self, tasks: Sequence[ResolvedTask], backbone: Any) -> None:
        """Reject settings that the layout does not support.

        Args:
            tasks: the tasks of the run, or those that are to join it.
            backbone: the transformers model, possibly without weights.

        Raises:
            ConfigError: if there are any; the message names every task and field.
            UnsupportedModelError: if the architecture cannot be partitioned.
        """

    def outline(self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> MultiTaskPeftModel:
        """Return the whole model, possibly without weights, from which plans are made.

        Args:
            described: the whole model, possibly without weights; `load` may cut it.
            tasks: the tasks of the run, in registration order.
        """
        del tasks
        return described

    def load(
        self,
        described: MultiTaskPeftModel,
        tasks: Sequence[ResolvedTask],
        plan: Plan | None,
        processes: Processes,
        table: TaskTable,
    ) -> MultiTaskPeftModel:
        """Return the model of this process with its weights, on its device, in training mode; make the executor.

        All processes of the run must call this, as most steps are collective.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in registration order.
            plan: determines the layers of each stage, and is the first plan of a pipeline; may be `None` if the replica
                of this process has one stage.
            processes: the processes of the run, connected.
            table: the same tasks with their states.

        Raises:
            ConfigError: if the weights cannot be loaded.
            ProcessError: if another process does not join within the time limit.
        """
        args = self.args
        model = self._read_weights(described, tasks, plan)
        self.digests = weight_digests(model.backbone)  # as they were saved: later steps leave only parts of them
        if args.device.type == "cuda":
            use_expandable_segments()
        self._divide(model, processes)
        model.to(args.device)  # only now, so that no device ever holds what it does not keep
        if self.runs_whole_model:
            # Packing is verified on the device and in the precision of the passes. A CPU runs the same code in
            # every precision, so the model's own is enough there.
            is_autocast = args.bf16 and args.device.type == "cuda"
            keep_inputs(model.backbone)
            with torch.autocast(args.device.type, dtype=torch.bfloat16) if is_autocast else nullcontext():
                self._fuse_layers(model)
                model.verify_once()
            if args.selective_recompute:
                recompute_inputs(model.backbone)
        begin_from_adapters(model, tasks)
        if args.uses_checkpointing:
            model.activation_checkpointing_enable(**args.checkpointing_kwargs)
        model.train()
        self.executor = self._make_executor(model, plan, processes, table)
        if plan is not None:
            self.executor.follow(plan)
        return model

    def _read_weights(
        self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask], plan: Plan | None
    ) -> MultiTaskPeftModel:
        del plan
        return self.source.load(described, tasks)

    def _divide(self, model: MultiTaskPeftModel, processes: Processes) -> None:
        """Keep this process's part of the weights, in place."""

    def _make_executor(
        self, model: MultiTaskPeftModel, plan: Plan | None, processes: Processes, table: TaskTable
    ) -> Executor:
        del plan, table
        return Executor(model, bf16=self.args.bf16, sync=GradientSync(model, processes))

    def _fuse_layers(self, model: MultiTaskPeftModel) -> None:
        """Let the backbone compute by Liger's kernels if the arguments ask for it or leave it open.

        Raises:
            ConfigError: if it was asked for and cannot be done.
        """
        wanted = self.args.use_liger_kernel
        if wanted is False or (wanted == "auto" and not (has_liger() and runs_kernels(model.device))):
            return
        reason = fuse_layers(model, self.args.liger_kernel_config)
        if reason and wanted is True:
            raise ConfigError(f"args.use_liger_kernel must be False for this model, got True: {reason}.")
        if reason:
            warnings.warn(f"norms, RoPE and MLPs are not fused, because {reason}.", stacklevel=2)

    def register(self, model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> None:
        """Add tasks to the model of this process; see `register_tasks`."""
        register_tasks(model, tasks)

    def assign_keeper(self, optimizer: TaskOptimizer, before: TaskOptimizer | None) -> None:
        """Set which process steps a task by an optimizer; by default each process does.

        Args:
            optimizer: the new optimizer of the task.
            before: the one that it replaces.
        """

    def apply(self, table: TaskTable, result: StepResult) -> None:
        """Step every task with the gradients of a step, here or on its keeper; see `TaskTable.apply`."""
        table.apply(result)

    def close(self) -> None:
        """Let go of the model and close connections that only this part uses; all processes call this together."""
        if self.executor is not None:
            self.executor.close()
        self.executor = None


def register_tasks(model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> None:
    """Add tasks to a whole model.

    Args:
        model: the model, with or without weights.
        tasks: the new tasks.

    Raises:
        ConfigError: if there are errors; the message names all of them for every new task, and no task is added.
    """
    model.register_tasks(**adapters_of(tasks))
    complete_tasks(model, tasks)


def complete_tasks(model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> None:
    """Give new tasks of a model their settings and initial adapters.

    Raises:
        ConfigError: if an initial adapter does not fit; then the tasks are removed again.
    """
    assign_settings(model, tasks)
    try:
        begin_from_adapters(model, tasks)
    except ConfigError:
        model.remove_tasks([task.name for task in tasks])
        raise


def begin_from_adapters(model: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> None:
    """Load the initial adapters of tasks; for a model without weights, only compare the tensors.

    Raises:
        ConfigError: if a tensor is missing, unexpected or has another shape; the message names the task and the first
            such tensor.
    """
    for task in tasks:
        if (folder := task.task.init_adapter) is None:
            continue
        try:
            model.begin_from(task.name, str(folder), keeps_reference=task.has_adapter_reference)
        except CheckpointError as error:
            raise ConfigError(f"tasks.{task.name}.init_adapter: {error}") from error
