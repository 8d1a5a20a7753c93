"""`Placement`: this process's part of the model, from its description to what runs it.

A model starts as a description without weights, from which plans are made. `materialise` loads the weights and places
them; from then on `placed` is what trains. Moving to other replicas lets go of it and describes the model anew.

There are three names for it. `outline` is the whole model, possibly without weights, from which plans are made;
`placed` is this process's part of it, with weights and executor; `model` is what callbacks, log and saver are shown:
the description at first, `placed.model` once it is loaded.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

from peft_mux.checkpoint.task_state import TaskState, gather_task, split_state, take_snapshot
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.model_part import ModelPart
from peft_mux.engine.parallelize import ParallelModel, register_tasks
from peft_mux.engine.tasks.optimizer import LastGood, TaskOptimizer
from peft_mux.engine.tasks.resolved import ResolvedTask
from peft_mux.engine.tasks.task_run import TaskRun, decide_sharing
from peft_mux.modeling.model import MultiTaskPeftModel, reason_of_backbone
from peft_mux.reporting.callbacks import TaskCallbacks
from peft_mux.scheduler.plan import Plan
from peft_mux.task import TaskStatus, task_arguments
from peft_mux.trainer.evaluation import EvaluationShare
from peft_mux.trainer.run import Run, mark_main_process
from peft_mux.trainer.world import World


class Placement:
    """Describes, loads, places and lets go of the model.

    Args:
        run: the run under way.
        world: all processes of the run.
        source: where the backbone comes from.
        described: the multi-task model of these tasks, possibly without weights.

    Attributes:
        source: where the backbone comes from.
        tasks: what the model is made of now, in the order in which the tasks came.
        part: which part of the model this process holds.
        outline: the whole model, possibly without weights, from which plans are made; `None` while it is let go of.
        lock: held while adapters come and go, and by threads that look at them.

    Raises:
        ConfigError: naming every task and field that the layout of the processes does not allow.
        UnsupportedModelError: if the architecture cannot be cut as the layout says.
    """

    def __init__(self, run: Run, world: World, source: BackboneSource, described: MultiTaskPeftModel) -> None:
        """Check what the layout allows; load nothing."""
        self.source = source
        self.lock = threading.RLock()
        self.tasks = [own.resolved for own in run.table]
        self._run, self._world = run, world
        self._described: MultiTaskPeftModel | None = described
        self._placed: ParallelModel | None = None
        self._listeners: list[Callable[[], None]] = []
        self.part = ModelPart(source, run.args, world.layout, world.processes.rank)
        self.part.check(self.tasks, described.backbone)
        # Read now, as a stage later holds only some of the modules.
        self._unshared_reason = reason_of_backbone(described.backbone)
        decide_sharing(run.table, run.args, self._unshared_reason)
        self.outline: Any = self._make_outline(described)

    # ------------------------------------------------------------------ what is there

    @property
    def is_placed(self) -> bool:
        """Whether the weights are loaded."""
        return self._placed is not None

    @property
    def placed(self) -> ParallelModel:
        """What this process trains with; only after `materialise`."""
        assert self._placed is not None, "the model is materialised before it is trained or evaluated"
        return self._placed

    @property
    def model(self) -> Any:
        """The model as it is now: a description, what this process trains with, or `None` while it is let go of."""
        return self._described if self._placed is None else self._placed.model

    @property
    def row_share(self) -> EvaluationShare:
        """Which held-out rows the replica of this process evaluates."""
        layout, processes = self._world.layout, self._world.processes
        return EvaluationShare(layout.place(processes.rank).replica, layout.num_replicas, processes.gather)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` now, and whenever `model` or `outline` have become others.

        Args:
            listener: called without arguments; it reads what it needs from this object.
        """
        self._listeners.append(listener)
        listener()

    def check(self, tasks: Sequence[ResolvedTask]) -> None:
        """Check new tasks against the model and the layout.

        Raises:
            ConfigError: naming every task and field that cannot be run.
        """
        self.source.check(tasks, against=self.outline)
        self.part.check(tasks, self.outline.backbone)

    # ------------------------------------------------------------------ loading

    def materialise(self, plan_stages: Callable[[], Plan]) -> ParallelModel:
        """Load the weights and place the model, if it is still a description.

        Args:
            plan_stages: makes the plan that tells how many layers each stage of a pipeline has; called where there are
                several stages.

        Raises:
            ConfigError: if the weights cannot be loaded.
            ProcessError: if another process does not come.
        """
        with self.lock:
            if self._placed is None:
                self._placed = self._load(plan_stages)
                self._described = None
                self._set_up_saver()
                self._notify_listeners()
            return self._placed

    def _load(self, plan_stages: Callable[[], Plan]) -> ParallelModel:
        """Load this process's part of what is described; the plan says how the layers are cut into stages."""
        processes = self._world.processes
        assert self._described is not None, "described before it is loaded"
        processes.connect()
        plan = None if self.part.num_stages == 1 else plan_stages()
        placed = self.part.parallelize(self._described, self.tasks, plan, processes)
        # A part has no shapes of whole parameters, so plans go on being made from the description.
        if placed.is_whole:
            self.outline = placed.model
        return placed

    def _set_up_saver(self) -> None:
        """Tell the saver how a task is made full where processes hold parts of it."""
        if self._world.layout.is_data_parallel:
            self._run.saver.use_parts(None)
        else:
            self._run.saver.use_parts(self._gather, self._have_all_saved)

    def _make_outline(self, described: MultiTaskPeftModel) -> Any:
        """Return the model that plans are made from, which stays whole when the described one is cut."""
        return self.part.outline(described, self.tasks)

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    # ------------------------------------------------------------------ tasks

    def note_own_losses(self) -> None:
        """Add the time that losses of tasks' own have taken to what their own code takes."""
        own_seconds = self.placed.model.objectives.own_seconds
        for name, seconds in own_seconds.items():
            self._run.log.delays.note(name, "objective", seconds)
        own_seconds.clear()

    def start(self, run: TaskRun) -> None:
        """Give a task its optimizer and callbacks, and let it take steps."""
        self.make_optimizer(run)
        run.status, run.reason = TaskStatus.RUNNING, ""
        mark_main_process(run.state, self._run.args)
        own_args = task_arguments(run.hyper, self._run.args)
        callbacks = TaskCallbacks(run, own_args, self.placed.model, self.source.tokenizer)
        self._run.log.add_callbacks(run.name, callbacks)
        # Before training `Opening` calls it for all tasks; this one comes later.
        if self._run.is_in_train:
            self._run.log.rows.begin(run)
            callbacks.call("on_train_begin")

    def make_optimizer(self, run: TaskRun) -> None:
        """Give a task its optimizer, and the copy of its weights to which it falls back where a step is not finite."""
        model = self.placed.model
        parameters, slab = model.task_parameters(run.name), model.registry.slab_of(run.name)
        run.optimizer = TaskOptimizer(run.name, parameters, run.hyper, run.num_steps, self._run.args, slab)
        run.last_good = LastGood({f"page_{number}": page.values for number, page in enumerate(slab.pages)})

    def register(self, runs: Sequence[TaskRun]) -> None:
        """Add tasks to the model and to its outline; neither the backbone nor any other task is touched (M §3.2).

        Raises:
            ConfigError: naming what PEFT refuses as late as at its injection; then none is added.
        """
        tasks = [run.resolved for run in runs]
        with self.lock:
            # The outline first: what PEFT refuses it refuses there, before the part that trains is touched.
            if self.outline is not self.model:
                register_tasks(self.outline, tasks, is_whole=True, tensor_parallel=None)
            if self._placed is not None:
                self._placed.register(tasks)
            else:
                register_tasks(self.model, tasks, is_whole=self.part.is_whole, tensor_parallel=None)
            decide_sharing(runs, self._run.args, self._unshared_reason)
            self.tasks = [*self.tasks, *tasks]

    def remove(self, name: str) -> None:
        """Take a task out of the model and of its outline."""
        with self.lock:
            self.tasks = [task for task in self.tasks if task.name != name]
            # One object where the process holds the whole model, which must be asked only once.
            for model in {id(own): own for own in (self.model, self.outline)}.values():
                model.remove_tasks([name])

    # ------------------------------------------------------------------ other replicas

    def part_for_layout(self, layout: ParallelLayout) -> ModelPart:
        """Return the part of the model that this process would hold in another layout.

        Raises:
            ConfigError: naming every task and field that the layout does not allow.
            UnsupportedModelError: if the architecture cannot be cut so.
        """
        part = ModelPart(self.source, self._run.args, layout, self._world.processes.rank)
        part.check(self.tasks, self.outline.backbone)
        return part

    def release_model(self) -> None:
        """Let go of the model and of all optimizers before the next model comes; all processes call this at one time.

        What the tasks have learnt must be saved by then.
        """
        self.placed.executor.close()
        self.placed.close()
        self._placed = self._described = self.outline = None
        # All that refers to the weights lets go of them, or two models would have to fit into memory.
        for run in self._run.table:
            run.optimizer = run.last_good = None
        self._notify_listeners()
        gc.collect()  # hooks and their modules refer to one another

    def describe_part(self, part: ModelPart) -> None:
        """Describe the model for another part of it, which this process is to hold from now on.

        Args:
            part: the part, which `materialise` loads.
        """
        self.part, self._placed = part, None
        self._described = self.source.describe(self.tasks)
        self.outline = self._make_outline(self._described)
        self._notify_listeners()

    # ------------------------------------------------------------------ full states of parts

    def _have_all_saved(self, saved: bool) -> bool:
        return all(self._world.processes.gather(saved))

    def _gather(self, run: TaskRun, *, only_weights: bool = False) -> TaskState | None:
        """Return a task's state out of the parts of the first replica, on the first process; `None` on the others."""
        # Replicas hold equal adapters after every step, so one of them is enough.
        if self.part.place.replica > 0:
            return None
        model = self.placed.model
        if only_weights:
            own = TaskState(split_state(model.task_parameters(run.name), None).weights, {}, {}, {})
        else:
            own = take_snapshot(run, model)
        return gather_task(self._world.processes, self._world.layout, model.registry.pieces_of(run.name), own)
