"""`ModelPart`: the part of a run's model that one process holds in a layout of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.backbone_source import BackboneSource, assign_settings, configs_of, seeds_of
from peft_mux.engine.layout_checks import check_layout
from peft_mux.engine.parallelize import ParallelModel, parallelize
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.replicas.layout import ParallelLayout, Place
from peft_mux.modeling.backbone.modules import is_meta
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.plan import Plan
from peft_mux.task import Task


class ModelPart:
    """The part of the model that one process holds in a layout: what is known of it before anything is loaded.

    Args:
        source: where the backbone comes from.
        args: the arguments of the run.
        layout: which process holds which part of which replica.
        rank: global rank of the process.

    Attributes:
        place: replica, stage and tensor parallel rank of the process.
    """

    def __init__(
        self, source: BackboneSource, args: MultiTaskTrainingArguments, layout: ParallelLayout, rank: int
    ) -> None:
        """Remember the run; load nothing."""
        self.source, self.args, self.layout = source, args, layout
        self.place: Place = layout.place(rank)

    @property
    def num_stages(self) -> int:
        """Pipeline stages of this process's replica."""
        return self.layout.replicas[self.place.replica].pp

    @property
    def tp_size(self) -> int:
        """Tensor parallel ranks of each stage of this process's replica."""
        return self.layout.replicas[self.place.replica].tp

    @property
    def is_whole(self) -> bool:
        """Whether this process holds the whole model."""
        return self.layout.replicas[self.place.replica].num_gpus == 1

    def check(self, tasks: Sequence[Task], backbone: Any) -> None:
        """Refuse what cannot be trained in the layout.

        Args:
            tasks: the tasks of the run, or those that are to join it.
            backbone: the transformers model, possibly without weights.

        Raises:
            ConfigError: naming every task and field.
            UnsupportedModelError: if the architecture cannot be cut.
        """
        check_layout(self.layout, source=self.source, args=self.args, tasks=tasks, backbone=backbone)

    def outline(self, described: MultiTaskPeftModel, tasks: Sequence[Task], counts: Mapping[str, int]) -> Any:
        """Return the whole model without weights, that plans are made with when `described` itself will be cut.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in the order in which they came.
            counts: number of classes of the tasks that have their own number, by name of the task.
        """
        if self.layout.is_data_parallel or is_meta(described.backbone):
            return described
        # Plans are of the whole model, and cutting uses `described` up.
        with torch.device("meta"):
            backbone = type(described.backbone)(described.backbone.config)
        model = MultiTaskPeftModel(
            backbone, configs_of(tasks), seeds=seeds_of(tasks, self.args), num_labels=dict(counts), verify=False
        )
        return assign_settings(model, tasks, self.args)

    def parallelize(
        self,
        described: MultiTaskPeftModel,
        tasks: Sequence[Task],
        counts: Mapping[str, int],
        plan: Plan | None,
        processes: Processes,
    ) -> ParallelModel:
        """Load this process's part and make what runs it: see `parallelize`.

        Args:
            described: the whole model, possibly without weights.
            tasks: the tasks of the run, in the order in which they came.
            counts: number of classes of the tasks that have their own number, by name of the task.
            plan: tells how many layers each stage has; may be `None` where there is one stage.
            processes: the processes of the run, connected.

        Raises:
            ConfigError: if the weights cannot be loaded.
            ProcessError: if another process does not come within the time limit.
        """
        return parallelize(
            described,
            source=self.source,
            tasks=tasks,
            counts=counts,
            args=self.args,
            layout=self.layout,
            plan=plan,
            processes=processes,
        )
