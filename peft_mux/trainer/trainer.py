"""Which methods of `transformers.Trainer` work for many tasks, and what to call in place of the others.

Trainer's own loops know one model with one loss, one optimizer and one set of rows. A method of theirs that were left
alone would do something else than its name says (`push_to_hub` would upload the adapters of every owner), so each is
either in `WORKING`, or replaced by one that raises.
"""

# MERGED: `MultiTaskTrainer`: several PEFT tasks on one frozen backbone, trained together, each as if it were alone.
# MERGED: The trainer makes the parts of a run and holds them; each of its methods asks one of them. Read `loop.py`
# MERGED: for a step,
# MERGED: `placement.py` for the model, `plan_follower.py` for what runs together.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from transformers import trainer as hf_trainer
from transformers.trainer_utils import TrainOutput

from peft_mux.arguments import MultiTaskTrainingArguments, require_arguments
from peft_mux.engine.allocator import keeping_freed_memory
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.tasks.resolved import resolve_tasks
from peft_mux.engine.tasks.setup import make_task_runs
from peft_mux.engine.tasks.task_run import TaskTable
from peft_mux.errors import ConfigError, Fault, raise_faults
from peft_mux.planning.deployment import report_deployment
from peft_mux.planning.profiling.backbone import profile_backbone
from peft_mux.planning.profiling.links import Shards, measure_link, overlap_among
from peft_mux.planning.replica_facts import LayerProfile
from peft_mux.reporting.callbacks import RunCallbacks, TaskFlowCallback
from peft_mux.reporting.page import run_html
from peft_mux.reporting.pass_report import PassReport
from peft_mux.reporting.report import RunReport
from peft_mux.reporting.screen import show_view
from peft_mux.reporting.trackers import without_shared_tracker
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.deployment.report import DeploymentReport
from peft_mux.scheduler.plan import Plan
from peft_mux.task import Task, TaskStatus
from peft_mux.trainer.inputs import (
    check_callbacks,
    check_evaluation,
    check_processes,
    refuse_trainer_arguments,
    require_tasks,
    task_list,
    without_empty_folder,
    without_hub,
)
from peft_mux.trainer.parts import make_parts
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import mark_main_process, open_run, output_folder
from peft_mux.trainer.world import World

WORKING = frozenset(
    # Written anew by `MultiTaskTrainer`.
    "train evaluate save_model push_to_hub log "
    # Callbacks of the run.
    "add_callback pop_callback remove_callback "
    # Numbers that a script prints or writes beside the run.
    "log_metrics metrics_format save_metrics save_state get_num_trainable_parameters get_optimizer_cls_and_kwargs "
    # Processes; the constructor of Trainer calls the last of them.
    "is_local_process_zero is_world_process_zero end create_accelerator_and_postprocess".split()
)
"""Methods that do what their name says."""

_STEPS = "train(), which packs the rows of all tasks into passes and steps each task by itself"
_OPTIMIZERS = "optim, learning_rate, lr_scheduler_type and weight_decay of a Task: each has an optimizer of its own"
_ROWS = "the datasets of a Task: trainer.table[name].loader yields the rows of each of its steps"
_SIZES = "args.tensor_parallel_size, args.pipeline_parallel_size and args.replicas, which say how processes share work"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "training_step compute_loss compute_loss_context_manager autocast_smart_context_manager get_batch_samples "
            "set_initial_training_values"
        ).split(),
        _STEPS,
    ),
    **dict.fromkeys(
        (
            "create_optimizer create_scheduler create_optimizer_and_scheduler get_decay_parameter_names "
            "get_optimizer_group"
        ).split(),
        _OPTIMIZERS,
    ),
    **dict.fromkeys("get_train_dataloader num_examples".split(), _ROWS),
    **dict.fromkeys("get_tp_size get_cp_size get_sp_size".split(), _SIZES),
    "get_total_train_batch_size": "trainer.table[name].hyper.train_batch_size, the global batch of one task",
    "get_learning_rates": "the log_history of trainer.task_states[name], which has the learning_rate of one task",
    "get_eval_dataloader": "eval_dataset of a Task, which evaluate(name) reads",
    "get_test_dataloader": "eval_dataset of a Task, which evaluate(name) reads",
    "predict": (
        "evaluate(name) for metrics on eval_dataset of a Task, or trainer.model.task_view(name), which generates and "
        "gives logits with the adapter of that task"
    ),
    "evaluation_loop": "evaluate(name), or evaluate() for all tasks",
    "prediction_step": "evaluate(name), or evaluate() for all tasks",
    "hyperparameter_search": "one Task for each setting: they train together, and each ends with its own metrics",
    "call_model_init": "the model, or its name, in the constructor",
    "create_model_card": "push_to_hub(name, repo_id=...), which writes the card of one task's adapter",
    "init_hf_repo": "push_to_hub(name, repo_id=...), which makes the repository of one task's adapter",
    "floating_point_ops": "plan(), which predicts the time of each pass",
    "store_flos": "plan(), which predicts the time of each pass",
}
"""Methods that cannot mean anything for many tasks, each with what to use instead."""

_Class = TypeVar("_Class", bound=type)


def refuse_methods_of_trainer(kind: _Class) -> _Class:
    """Let every method in `REFUSED` raise a `ConfigError`, and return the class.

    Args:
        kind: the class that inherits them.
    """
    for name, instead in REFUSED.items():
        setattr(kind, name, _refusing(name, instead))
    return kind


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise_faults([Fault(f"trainer.{name}", "a call", instead, "Trainer's own is for one task.")], ConfigError)

    refuse.__name__ = name
    refuse.__doc__ = f"Raise a `ConfigError`: use {instead}."
    return refuse


@refuse_methods_of_trainer
class MultiTaskTrainer(Trainer):
    """Trains many PEFT tasks at once; a `transformers.Trainer` whose one model serves them all.

    Args:
        model: hub id or folder of a transformers model (loaded when training begins), a `PreTrainedModel`, or a
            `MultiTaskPeftModel`.
        args: the arguments of the run; their hyper-parameters are the defaults of tasks that do not set their own.
        tasks: the tasks to train, at least one. May be left out with a `MultiTaskPeftModel` and `train_dataset`.
        processing_class: tokenizer; by default that of `model` where it is a hub id or folder.
        train_dataset: short form for equal hyper-parameters: rows by task name, for a `MultiTaskPeftModel`.
        eval_dataset: held-out rows by task name, in the short form.
        callbacks: `TrainerCallback`s that see the run, also what becomes of its tasks (`MultiTaskTrainerCallback`);
            those of a `Task` see the task.
        model_init_kwargs: for `from_pretrained` where `model` is a hub id or folder.
        **unsupported: Trainer's other arguments have no meaning for many tasks; they are refused.

    Raises:
        ConfigError: naming every setting that cannot be run.
        DataError: naming the rows that cannot be trained on.
        UnsupportedModelError: if packing would change the backbone's results.

    Example:
        >>> trainer = MultiTaskTrainer("Qwen/Qwen3-0.6B", args, tasks=[sst2, qa])  # doctest: +SKIP
        >>> print(trainer.plan())  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: MultiTaskTrainingArguments  # type: ignore[assignment]
    model: Any  # type: ignore[assignment]

    def __init__(
        self,
        model: Any,
        args: MultiTaskTrainingArguments | None = None,
        tasks: Sequence[Task] | None = None,
        *,
        processing_class: Any = None,
        train_dataset: Mapping[str, Any] | None = None,
        eval_dataset: Mapping[str, Any] | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> None:
        """Check everything that can be checked before the first step; load no weights."""
        refuse_trainer_arguments(unsupported)
        run_args = require_arguments(args or MultiTaskTrainingArguments(output_dir="peft_mux_output"))
        given = task_list(model, tasks, train_dataset, eval_dataset)
        source = BackboneSource(model, run_args, processing_class, model_init_kwargs or {})
        resolved = resolve_tasks(given, run_args)
        source.check(resolved)
        check_processes(run_args)
        check_evaluation(run_args, given)
        check_callbacks(callbacks or ())
        self.table = TaskTable(make_task_runs(resolved, run_args, source.tokenizer, source.config))
        described = source.describe([run.resolved for run in self.table])
        with without_empty_folder(output_folder(run_args)), without_hub(run_args), without_shared_tracker(run_args):
            super().__init__(
                model=described,
                args=run_args,
                processing_class=source.tokenizer,
                callbacks=list(callbacks or ()),
                # Held-out rows are the tasks'; Trainer itself asks for some where eval_strategy is set.
                eval_dataset=[],  # type: ignore[arg-type]
            )
        # The default is another one in notebooks, whose table has a single task in mind.
        for callback in (DefaultFlowCallback, PrinterCallback, ProgressCallback, hf_trainer.DEFAULT_PROGRESS_CALLBACK):
            self.remove_callback(callback)
        self.add_callback(TaskFlowCallback())
        self.state = TrainerState()
        mark_main_process(self.state, run_args)
        self._make_parts(source, described)

    def _make_parts(self, source: BackboneSource, described: Any) -> None:
        self._world = world = World(self.args, self.table)
        callbacks = RunCallbacks(self.callback_handler, self.args, self.state, self.control)
        self._run = run = open_run(callbacks, self.table, is_main=world.processes.is_main)
        self._placement = Placement(run, world, source, described)
        self._placement.subscribe(self._hand_out_model)
        parts = make_parts(run, world, self._placement, source, self.processing_class)
        self._plans, self._evaluator, self._membership = parts.plans, parts.evaluator, parts.membership
        self._relocation, self._reporter, self._opening = parts.relocation, parts.reporter, parts.opening
        self.control_channel, self._files, self._loop = parts.control, parts.files, parts.loop

    def _hand_out_model(self) -> None:
        """Hand the present model to the callbacks, the log and the saver, which hold the one before it."""
        self.model = self.model_wrapped = self.callback_handler.model = self._placement.model
        self._run.log.use_model(self.model)
        self._run.saver.use_model(self.model)

    # ------------------------------------------------------------- overview

    @property
    def is_in_train(self) -> bool:
        """Whether `train` is under way."""
        # Trainer's constructor runs before the parts are made.
        return "_run" in vars(self) and self._run.is_in_train

    @is_in_train.setter
    def is_in_train(self, value: bool) -> None:
        """Ignore the value: Trainer's constructor sets it, but `Run.is_in_train` is what counts."""

    @property
    def interrupted_by(self) -> int:
        """Number of the signal that ended the last training; 0 where none did."""
        return self._run.interrupted_by

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the run, in the order in which they came."""
        return [task.task for task in self._placement.tasks]

    @property
    def task_states(self) -> dict[str, TrainerState]:
        """State of each task as Trainer keeps it: `global_step`, `epoch`, `log_history`."""
        return {run.name: run.state for run in self.table}

    @property
    def task_statuses(self) -> dict[str, TaskStatus]:
        """Where each task stands."""
        return {run.name: run.status for run in self.table}

    @property
    def pass_reports(self) -> tuple[PassReport, ...]:
        """Planned against executed passes of each replica, from the last training; empty before it."""
        return self._reporter.pass_reports

    def report(self) -> RunReport:
        """Return a table of all tasks: how each ended, its losses, its time, and where its adapter lies; a string."""
        return self._reporter.report()

    def tell(self, line: str) -> None:
        """Print a line beside the progress, on the process that prints."""
        if self._run.log.is_shown:
            self._run.log.say(line)

    def prefer(self, task: str) -> None:
        """Have the last lines of the run suggest to merge this task's adapter, such as the best one of a sweep."""
        self._run.best_task = task

    def adapter_folder(self, task: str) -> Path | None:
        """Return the folder with a task's adapter as it is now; `None` where the disk has none, or an older one."""
        return self._run.saver.place(self._membership.run_of(task))

    def show(self) -> None:
        """Show the run as it stands: a table in a terminal; in a notebook with its curves, also after a reload.

        A trainer that has not trained shows what its `output_dir` has of a run, such as after the kernel was restarted.
        """
        show_view(self._reporter.view())

    def _repr_html_(self) -> str:
        """Return what a notebook shows of a trainer: the run as it stands."""
        return run_html(self._reporter.view())

    def plot_losses(self, path: str | Path | None = None) -> Path:
        """Draw the losses of all tasks from `metrics.jsonl` into a PNG (by default `losses.png` in `output_dir`)."""
        return self._reporter.plot_losses(path)

    # ------------------------------------------------------------- planning

    def plan(
        self, devices: str | None = None, *, num_stages: int | None = None, devices_per_stage: int | None = None
    ) -> Plan:
        """Return what would run together, in how many passes, how fast, and in how much memory; allocates nothing.

        Args:
            devices: plan for other devices than this machine's, such as "4xA100-80GB", as stages of a pipeline.
            num_stages: stages of the pipeline over `devices`; by default as the arguments ask, or one of all devices.
            devices_per_stage: devices that share each layer of a stage; by default as the arguments ask.

        Raises:
            ConfigError: if nothing fits into memory, naming the cheapest fixes; or for unknown devices.
        """
        stages = {"num_stages": num_stages, "devices_per_stage": devices_per_stage}
        return self._membership.queue.ask("plan", lambda: self._plans.plan(devices, **stages))

    def plan_deployment(self, devices: str | None = None, *, measured: LayerProfile | None = None) -> DeploymentReport:
        """Return the replicas that would train these tasks fastest (LobRA), and what stands beside them.

        Args:
            devices: such as "16xA100-40GB"; by default those that the run was started on.
            measured: times of one layer at several tensor parallel sizes, in place of a profile of one device.

        Raises:
            ConfigError: for unknown devices, no tasks, or tasks that no replica can hold.
        """
        return report_deployment(self._plans.planner, self._run.table.plannable, devices, measured=measured)

    def measure_profile(self, budget_s: float = 60.0, *, folder: Path | None = None, refresh: bool = False) -> Profile:
        """Measure how long the parts of a step take on this device, for `cost_profile`; reads and changes no weights.

        Where there are several processes, each must call this; the link between them is measured too, and
        what passes in turns hide.

        Args:
            budget_s: seconds that this may take; where tensor parallel ranks share layers, passes through cut layers
                may take a quarter of it more.
            folder: folder of stored profiles, from which one that fits is read instead; `None` to store nothing.
            refresh: measure although a stored profile fits.

        Raises:
            UnsupportedModelError: if the layers cannot be cut for the tensor parallel ranks that the run has.
        """
        device = self.args.device
        dtype = torch.bfloat16 if self.args.bf16 else self._placement.source.dtype
        shards = Shards(self._world.processes, self._world.layout.tensor_groups)
        with self._world.processes.together():
            return profile_backbone(
                self.model,
                device=device,
                dtype=dtype,
                budget_s=budget_s,
                folder=folder,
                refresh=refresh,
                link=measure_link(device),
                overlap=overlap_among(shards, self.model, device=device, dtype=dtype, budget_s=budget_s / 4),
            )

    # ------------------------------------------------------------- training

    def train(self, resume_from_checkpoint: str | bool | None = None, **unsupported: Any) -> TrainOutput:
        """Train until every task has ended or is paused.

        Args:
            resume_from_checkpoint: `True` for the newest state in `output_dir`, or another run's folder. Every task
                goes on exactly where that state left it, also in a trainer that has trained since.
            **unsupported: Trainer's other arguments are refused.

        Returns:
            Number of run steps, mean of the tasks' last losses, and metrics with `task/metric` keys. Where Ctrl-C or
            SIGTERM has ended the training, `interrupted_by` among the metrics is the number of the signal.

        Raises:
            CheckpointError: if there is nothing to resume from, or `output_dir` holds a run that is not resumed.
            ConfigError: if another thread trains.
        """
        refuse_trainer_arguments(unsupported)
        with self._world.processes.together(), keeping_freed_memory(self.args.device):
            return self._loop.train(resume_from_checkpoint)

    def evaluate(self, task: str | None = None, **unsupported: Any) -> dict[str, float]:  # type: ignore[override]
        """Evaluate one task, or all that have held-out rows; from another thread, after the step in progress.

        Args:
            task: name of the task; by default all.
            **unsupported: Trainer's other arguments are refused.

        Returns:
            Metrics with `task/metric` keys.

        Raises:
            ConfigError: for a name that no task has, or a task without held-out rows.
        """
        refuse_trainer_arguments(unsupported)
        label = "evaluate" if task is None else f"evaluate {task}"
        return self._membership.queue.ask(label, lambda: self._evaluate(task))

    def _evaluate(self, task: str | None) -> dict[str, float]:
        self._placement.materialise(self._plans.plan_stages)
        held_out = [run for run in self.table if run.eval_data is not None]
        runs = held_out if task is None else [self._membership.run_of(task)]
        answers = self._evaluator.generate(runs)
        return {
            f"{run.name}/{key}": value
            for run in runs
            for key, value in self._evaluator.metrics(run, answers.get(run.name)).items()
        }

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write every task's adapter, each at the root of its sub-folder, loadable by plain PEFT."""
        self._files.save(output_dir)

    def push_to_hub(self, task: str = "", *, repo_id: str = "", **options: Any) -> Any:  # type: ignore[override]
        """Upload one task's adapter as it is now, with a model card, and return what the Hub says; nothing else.

        Args:
            task: name of the task.
            repo_id: repository on the Hub, such as "me/sql-lora"; made where absent.
            **options: `token`, `private`, `revision` and `commit_message`, as `huggingface_hub` takes them.

        Raises:
            ConfigError: for a task that is not there or not trained, or where the Hub refuses.
        """
        return self._files.push(task, repo_id, options)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Have one more callback see the run.

        Raises:
            ConfigError: for one that belongs to a task, or with a misspelt event of tasks.
        """
        check_callbacks([callback])
        super().add_callback(callback)

    def log(self, logs: Mapping[str, float]) -> None:  # type: ignore[override]
        """Hand numbers of the run to its callbacks and loggers, under the present step."""
        self._run.callbacks.log(dict(logs))

    # ------------------------------------------------------------- while it trains

    def register_tasks(self, tasks: Sequence[Task]) -> Future[None]:
        """Add tasks; while `train` runs (this may be called from a callback or another thread) at the next step.

        Their configuration and rows are checked here, in the caller's thread.

        Returns:
            A future that tells when they have come in, or why not: what PEFT refuses only when it makes the adapter is
            also told as a warning and in `metrics.jsonl`. Of several processes, each has to ask.

        Raises:
            ConfigError: naming every setting that cannot be run; then none is added.
            DataError: naming the rows that cannot be trained on.
        """
        require_tasks(tasks)
        return self._membership.register(tasks)

    def remove_task(self, name: str, *, save: bool = True) -> Future[None]:
        """Take a task out at the next step boundary; its adapter is written first unless `save` is `False`.

        The future tells when it is out, here as in `pause_task` and `resume_task`.
        """
        return self._membership.remove(name, save=save)

    def pause_task(self, name: str) -> Future[None]:
        """Keep a task's exact state and take no steps of it until `resume_task`."""
        return self._membership.pause(name)

    def resume_task(self, name: str) -> Future[None]:
        """Let a paused task go on where it stopped."""
        return self._membership.resume(name)

    def redeploy(self, replicas: str) -> None:
        """Move the run to other replicas; while `train` runs, at the next step. Every process calls this alike.

        Args:
            replicas: as LobRA writes them, such as "<2,1>, <1,1>x2"; for as many processes as there are.

        Raises:
            ConfigError: if there are not as many processes, or the model cannot be read again.
        """
        self._membership.queue.ask(f"redeploy {replicas}", lambda: self._relocation.redeploy(replicas))
