"""`Placement`: this process's part of the model, from a description without weights to what trains.

There are two models. `outline` is the whole model, possibly without weights, from which plans are made. `model` is what
trains on this process: a description until `load` reads the weights, and a part of the whole if processes share it. If
this process holds the whole model, both are one object. A move to other replicas releases the model and describes it
again.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.executor import Executor
from peft_mux.engine.model_part import ModelPart, begin_from_adapters, register_tasks
from peft_mux.engine.tasks.active_task import ActiveTask, ResolvedTask
from peft_mux.engine.tasks.optimizer import LastFiniteWeights, TaskOptimizer
from peft_mux.engine.tasks.setup import decide_sharing
from peft_mux.log.callbacks import TaskCallbacks
from peft_mux.modeling.model import MultiTaskPeftModel, reason_of_backbone
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.scheduler.plan import Plan
from peft_mux.task import TaskStatus, task_arguments
from peft_mux.trainer.run import Run, mark_main_process

MakePart = Callable[[BackboneSource, MultiTaskTrainingArguments, ParallelLayout, int], ModelPart]


class Placement:
    """Describes, loads, places and releases the model.

    Args:
        run: the present run.
        source: where the backbone comes from.
        described: the multi-task model of the run's tasks, possibly without weights.
        make_part: returns the part of the model that a process holds, by source, arguments, layout and rank.

    Attributes:
        source: where the backbone comes from.
        tasks: the tasks that the model holds, in the order in which they came.
        part: which part of the model this process holds.
        outline: the whole model, possibly without weights, from which plans are made; `None` while it is released.
        model: the model that trains, or its description before it is loaded; `None` while it is released.
        lock: held while adapters come and go, and by threads that look at them.
        target: the part that this process holds from the next step on; `None` if it keeps the present one.
        on_change: called after `model` or `outline` became another object.
        plan_stages: makes the plan that says how many layers each stage of a pipeline has.

    Raises:
        ConfigError: naming every task and field that the layout of the processes does not allow.
        UnsupportedModelError: if the architecture cannot be cut as the layout says.
    """

    def __init__(self, run: Run, source: BackboneSource, described: MultiTaskPeftModel, make_part: MakePart) -> None:
        """Check what the layout allows; load nothing."""
        self._run, self.source, self._make_part = run, source, make_part
        self.lock = threading.RLock()
        self.tasks = [task.resolved for task in run.table]
        self.model: Any = described
        self.outline: Any = described
        self.target: ModelPart | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.plan_stages: Callable[[], Plan | None] = lambda: None
        self.part = self.part_for_layout(run.layout)
        # Read now, as a stage later holds only some of the modules.
        self._unshared_reason = reason_of_backbone(described.backbone)
        decide_sharing(run.table, run.args, self._unshared_reason)
        self.outline = self.part.outline(described, self.tasks)
        begin_from_adapters(self.outline, self.tasks)

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are loaded."""
        return self.part.executor is not None

    @property
    def executor(self) -> Executor:
        """The executor, which runs passes through the model; only after `load`."""
        assert self.part.executor is not None, "the model is loaded before it is trained or evaluated"
        return self.part.executor

    def load(self) -> dict[str, str]:
        """Load the weights and place the model, if it is still a description; return digests of the frozen weights.

        Raises:
            ConfigError: if the weights cannot be loaded.
            ProcessError: if another process does not come.
        """
        with self.lock:
            if not self.is_loaded:
                processes = self._run.processes
                processes.connect()
                plan = None if self.part.num_stages == 1 else self.plan_stages()
                self.model = self.part.load(self.model, self.tasks, plan, processes, self._run.table)
                if self.part.is_whole:
                    self.outline = self.model  # a part has no shapes of whole parameters, which plans need
                self._run.saver.gather = self.part.gather_state
                self.on_change()
            return self.part.digests

    # ------------------------------------------------------------------ tasks

    def check(self, tasks: Sequence[ResolvedTask]) -> None:
        """Check new tasks against the model and the layout.

        Raises:
            ConfigError: naming every task and field that cannot be run.
        """
        self.source.check(tasks, against=self.outline)
        self.part.check(tasks, self.outline.backbone)

    def register(self, runs: Sequence[ActiveTask]) -> None:
        """Add tasks to the model and to its outline; neither the backbone nor any other task is touched (M §3.2).

        Raises:
            ConfigError: naming what PEFT refuses only when it injects the adapter; then none is added.
        """
        tasks = [task.resolved for task in runs]
        with self.lock:
            # The outline first: PEFT refuses there, before the part that trains is touched.
            if self.outline is not self.model:
                register_tasks(self.outline, tasks)
            self.part.register(self.model, tasks)
            decide_sharing(runs, self._run.args, self._unshared_reason)
            self.tasks = [*self.tasks, *tasks]

    def remove(self, name: str) -> None:
        """Take a task out of the model and of its outline."""
        with self.lock:
            self.tasks = [task for task in self.tasks if task.name != name]
            self.model.remove_tasks([name])
            if self.outline is not self.model:
                self.outline.remove_tasks([name])

    def start(self, task: ActiveTask) -> None:
        """Give a task its optimizer and callbacks, and let it take steps."""
        self.make_optimizer(task)
        task.status, task.reason = TaskStatus.RUNNING, ""
        mark_main_process(task.state, self._run.args)
        args = task_arguments(task.hyper, self._run.args)
        callbacks = TaskCallbacks(task, args, self.model, self.source.tokenizer)
        self._run.log.add_callbacks(task.name, callbacks)
        # Before training, `Opening` calls it for all tasks; this one comes later.
        if self._run.is_in_train:
            self._run.log.begin_rows(task)
            callbacks.call("on_train_begin")

    def make_optimizer(self, task: ActiveTask) -> None:
        """Give a task its optimizer, and the copy of its weights to which it falls back if a step is not finite."""
        parameters, slab = self.model.task_parameters(task.name), self.model.registry.slab_of(task.name)
        before, task.optimizer = task.optimizer, None
        optimizer = TaskOptimizer(task.name, parameters, task.hyper, task.num_steps, self._run.args, slab)
        self.part.assign_keeper(optimizer, before)
        task.optimizer = optimizer
        task.last_good = LastFiniteWeights({f"page_{number}": page.values for number, page in enumerate(slab.pages)})

    # ------------------------------------------------------------------ other replicas

    def part_for_layout(self, layout: ParallelLayout) -> ModelPart:
        """Return the part of the model that this process would hold in a layout.

        Raises:
            ConfigError: naming every task and field that the layout does not allow.
            UnsupportedModelError: if the architecture cannot be cut so.
        """
        part = self._make_part(self.source, self._run.args, layout, self._run.processes.rank)
        part.check(self.tasks, self.outline.backbone)
        return part

    def change_part(self, part: ModelPart) -> None:
        """Release the model and all optimizers, and describe another part of it that this process holds from now on.

        `load` reads it. All processes call this at the same time; the state of the tasks must be saved by then.
        """
        if self.is_loaded:
            self.part.close()
            self.model = self.outline = None
            # Every reference to the weights must go, or two models would have to fit into memory.
            for task in self._run.table:
                task.optimizer = task.last_good = None
            self.on_change()
            gc.collect()  # hooks and their modules refer to one another
        self.part, self._run.layout = part, part.layout
        self.model = self.source.describe(self.tasks)
        self.outline = self.part.outline(self.model, self.tasks)
        self.on_change()
