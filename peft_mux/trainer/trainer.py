"""`MultiTaskTrainer`: several PEFT tasks on one frozen backbone, trained together, each as if it were alone.

The trainer makes the parts of a run; each of its methods asks one of them::

    Run                    what all parts share: arguments, tasks, state, log, saver, processes     run.py
    Placement              the model of this process                                                placement.py
    PlanFollower           owns the plan: which tasks share their passes, and the work of each step plan_follower.py
      .measured            what steps took, compared with their plan, and slow replicas             measurements.py
    Relocation             chooses replicas, and moves the run to others                            relocation.py
    Opening                begins and resumes a training                                            opening.py
    TrainingLoop           takes the steps of `train`, and does what is due between them            loop.py
      .membership          tasks that come, pause, end and leave                                    membership.py
      .evaluator           held-out rows, early stopping                                            evaluation.py
    Control                requests from other programs through the run folder                      control.py
    Reporter               the first lines, cards, the reports at the end                           reporter.py

Trainer's own loops know one model with one loss, one optimizer and one set of rows. Its public methods that would not
do here what their name says (`push_to_hub` would upload the adapters of all users) are refused.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

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
from transformers.trainer_utils import PredictionOutput, TrainOutput

from peft_mux.arguments import MultiTaskTrainingArguments, require_arguments
from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.data.dataset import TokenizedDataset
from peft_mux.engine.allocator import keeping_freed_memory, private_bytes
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.model_part import ModelPart
from peft_mux.engine.tasks.active_task import ActiveTask, ResolvedTask, TaskTable
from peft_mux.engine.tasks.setup import make_active_tasks, read_held_out, resolve_tasks
from peft_mux.errors import ConfigError, DataError, TaskFailedError, raise_faults
from peft_mux.generation.held_out_completions import HeldOutCompletions, eval_prompts
from peft_mux.log.callbacks import RunCallbacks, TaskFlowCallback
from peft_mux.log.recorders import PassReport
from peft_mux.parallel.cuda_graphs import CapturedPasses
from peft_mux.parallel.layout import layout_of, network_warning
from peft_mux.parallel.parallelize import ParallelPart
from peft_mux.planning.deployment import report_deployment
from peft_mux.planning.plan_follower import PlanFollower
from peft_mux.planning.planner import Planner
from peft_mux.planning.profiling.backbone import profile_backbone
from peft_mux.planning.profiling.measured_links import measure_link, overlap_of_layers
from peft_mux.planning.relocation import Relocation
from peft_mux.planning.replica_facts import LayerProfile
from peft_mux.reporting.control import Control
from peft_mux.reporting.hub import HubPushes, check_push, push_task
from peft_mux.reporting.page import run_html
from peft_mux.reporting.reporter import Reporter
from peft_mux.reporting.run_report import RunReport
from peft_mux.reporting.screen import make_progress, show_view
from peft_mux.reporting.trackers import LoggerRuns
from peft_mux.reporting.upload import FolderUpload
from peft_mux.scheduler.costs.hardware import Cluster
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.deployment.deployment_plan import DEFAULT_RESTART_S, DEFAULT_STORAGE_GB_PER_S
from peft_mux.scheduler.deployment.deployment_report import DeploymentReport
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.scheduler.plan_views import Plan
from peft_mux.storage import FolderLock
from peft_mux.task import Task, TaskStatus, opened_rows
from peft_mux.trainer.evaluation import TaskEvaluator
from peft_mux.trainer.inputs import (
    check_callbacks,
    check_evaluation,
    check_launch,
    make_collator,
    refuse_trainer_arguments,
    require_tasks,
    task_list,
    trainer_constructor,
)
from peft_mux.trainer.loop import TrainingLoop, stop_at_signal
from peft_mux.trainer.membership import Membership
from peft_mux.trainer.opening import Opening
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run, mark_main_process, output_folder
from peft_mux.user_code import watching_model

WORKING = frozenset(
    # Overridden by `MultiTaskTrainer`.
    "train evaluate predict save_model push_to_hub log "
    # Callbacks of the run.
    "add_callback pop_callback remove_callback "
    # Numbers that a script prints or writes next to the run.
    "log_metrics metrics_format save_metrics save_state get_num_trainable_parameters get_optimizer_cls_and_kwargs "
    # Processes; the constructor of Trainer calls the last of them.
    "is_local_process_zero is_world_process_zero end create_accelerator_and_postprocess".split()
)
"""Public methods of Trainer that do what their name says."""

_INSTEAD = {
    "training_step compute_loss": "train(), which packs the rows of all tasks and steps each task by itself",
    "create_optimizer create_scheduler create_optimizer_and_scheduler": (
        "optim, learning_rate, lr_scheduler_type and weight_decay of a Task: each has an optimizer of its own"
    ),
    "get_train_dataloader get_eval_dataloader get_test_dataloader": (
        "train_dataset and eval_dataset of a Task: trainer.table[name].loader yields the rows of each of its steps"
    ),
    "get_total_train_batch_size": "trainer.table[name].hyper.train_batch_size, the global batch of one task",
    "get_learning_rates": "the log_history of trainer.task_states[name], which has the learning_rate of one task",
    "evaluation_loop prediction_step": (
        "evaluate(name) or predict(name, rows), or trainer.model.task_view(name), which gives logits of a batch"
    ),
    "hyperparameter_search": "one Task for each setting: they train together, and each ends with its own metrics",
    "create_model_card init_hf_repo": "push_to_hub(name, repo_id=...), which uploads one task's adapter with a card",
}
REFUSED: dict[str, str] = {
    name: "train(), plan() and evaluate() of MultiTaskTrainer, which run all tasks together"
    for name, item in inspect.getmembers(Trainer, callable)
    if not name.startswith("_") and name not in WORKING
} | {name: instead for names, instead in _INSTEAD.items() for name in names.split()}
"""Public methods of Trainer that cannot mean anything for many tasks, each with what to use instead."""


class MultiTaskTrainer(Trainer):
    """Trains many PEFT tasks at once; a `transformers.Trainer` whose one model serves them all.

    Args:
        model: hub id or folder of a transformers model (loaded when training begins), a `PreTrainedModel`, or a
            `MultiTaskPeftModel`.
        args: the arguments of the run; their hyper-parameters are the defaults of tasks that do not set their own.
        tasks: the tasks to train, at least one. May be left out with a `MultiTaskPeftModel` and `train_dataset`.
        processing_class: tokenizer; by default that of `model` if it is a hub id or folder.
        train_dataset: short form for equal hyper-parameters: rows by task name, for a `MultiTaskPeftModel`.
        eval_dataset: held-out rows by task name, in the short form.
        callbacks: `TrainerCallback`s that see the run, also the events of its tasks (`MultiTaskTrainerCallback`);
            those of a `Task` see the task.
        model_init_kwargs: for `from_pretrained` if `model` is a hub id or folder.
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
        check_launch(run_args)
        check_evaluation(run_args, given)
        check_callbacks(callbacks or ())

        def make_tasks(tasks: Sequence[ResolvedTask]) -> list[ActiveTask]:
            return make_active_tasks(tasks, run_args, source.tokenizer, source.config, eval_prompts)

        self.table = TaskTable(make_tasks(resolved))
        described = source.describe([task.resolved for task in self.table])
        with trainer_constructor(run_args, output_folder(run_args)):
            super().__init__(
                model=described,
                args=run_args,
                processing_class=source.tokenizer,
                callbacks=list(callbacks or ()),
                # Held-out rows belong to tasks; Trainer itself requires some if eval_strategy is set.
                eval_dataset=[],  # type: ignore[arg-type]
            )
        # The default differs in notebooks, where Trainer shows a table for a single task.
        for callback in (DefaultFlowCallback, PrinterCallback, ProgressCallback, hf_trainer.DEFAULT_PROGRESS_CALLBACK):
            self.remove_callback(callback)
        self.add_callback(TaskFlowCallback())
        self.state = TrainerState()
        mark_main_process(self.state, run_args)

        layout = layout_of(run_args)
        run = Run(RunCallbacks(self.callback_handler, run_args, self.state, self.control), self.table, layout)
        if layout.is_tensor_parallel and (warning := network_warning(layout)):
            run.log.warn(warning)
        placement = Placement(run, source, described, _part_of)
        collator = make_collator(run_args)
        planner = Planner(placement.outline, source, run_args, collator, run.layout.num_replicas)
        plans = PlanFollower(run, placement, planner)
        self._run, self._placement, self._plans = run, placement, plans
        self._relocation = relocation = Relocation(run, placement, plans)
        self._opening = Opening(run, placement, plans, relocation.choose_replicas)
        self._complete = HeldOutCompletions(run, placement, plans.max_tokens)
        self._evaluator = TaskEvaluator(run, placement, plans.max_tokens, collator, self._complete)
        self._membership = Membership(run, placement, plans, make_tasks)
        self._loop = TrainingLoop(run, placement, plans, self._membership, self._evaluator, relocation.move_if_asked)
        self.control_channel, self._reporter = Control(run, self._membership), Reporter(run, placement, plans)
        # Cards first, which uploads take along.
        run.log.observers += [self._reporter]
        if run_args.report_per_task:
            run.log.observers += [LoggerRuns(run.log.note_user_code)]
        if run_args.push_to_hub and run.saver.is_writer:
            run.log.observers += [HubPushes(run_args, run.root, run.log.warn)]
        if run_args.upload_to and run.saver.is_writer:
            run.log.observers += [FolderUpload(run_args.upload_to, run.root, run.log.warn)]
        shows = {"enabled": not run_args.disable_tqdm, "device": run_args.device}
        run.log.make_progress = lambda: make_progress(**shows, is_main_process=run.log.is_shown)
        placement.on_change = self._use_model
        self._use_model()

    def _use_model(self) -> None:
        """Pass the present model to every part that has the previous one."""
        model = self.model = self.model_wrapped = self.callback_handler.model = self._placement.model
        self._run.log.use_model(model)
        if (folder := self._run.saver.folder) is not None:
            folder.model = model
        self._plans.follow_model()
        placement, graphs = self._placement, self.args.cuda_graphs
        # A run that is resumed captures other passes than before, which pad differently and so round differently.
        is_auto = graphs == "auto" and not self.args.full_determinism and self._run.processes.is_alone
        if placement.is_loaded and (graphs is True or (is_auto and self.args.device.type == "cuda")):
            executor = placement.executor
            executor.runner = CapturedPasses(executor.model, executor.precision, is_auto=is_auto)

    # ------------------------------------------------------------- overview

    @property
    def is_in_train(self) -> bool:
        """Whether `train` is running."""
        # Trainer's constructor reads it before the parts are made.
        return "_run" in vars(self) and self._run.is_in_train

    @is_in_train.setter
    def is_in_train(self, value: bool) -> None:
        """Ignore the value: Trainer's constructor sets it, but `Run.is_in_train` is what counts."""

    @property
    def interrupted_by(self) -> int:
        """Number of the signal that ended the last training; 0 if none did."""
        return self._reporter.interrupted_by

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the run, in the order in which they came."""
        return [task.task for task in self._placement.tasks]

    @property
    def task_states(self) -> dict[str, TrainerState]:
        """State of each task as Trainer keeps it: `global_step`, `epoch`, `log_history`."""
        return {task.name: task.state for task in self.table}

    @property
    def task_statuses(self) -> dict[str, TaskStatus]:
        """Status of each task."""
        return {task.name: task.status for task in self.table}

    @property
    def pass_reports(self) -> tuple[PassReport, ...]:
        """Planned and executed passes of each replica, from the last training; empty before it."""
        return self._reporter.pass_reports

    def report(self) -> RunReport:
        """Return a table of all tasks: how each ended, its losses, its time, and its adapter's folder; a string."""
        return self._reporter.report()

    def log_line(self, line: str) -> None:
        """Print a line above the progress table, on the process that prints."""
        if self._run.log.is_shown:
            self._run.log.progress.log(line)

    def set_best_task(self, task: str) -> None:
        """Suggest merging this task's adapter, such as the best one of a sweep, in the last lines of the run."""
        self._reporter.best_task = task

    def use_command(self, command: str, lock: FolderLock | None) -> None:
        """Suggest a shell command that resumes the run in its last lines, as `peft-mux train` does.

        Args:
            command: the command that resumes the run.
            lock: the lock of the run folder if the caller holds it already; `train` releases it at its end.
        """
        self._reporter.resume_command, self._run.saver.lock = command, lock

    def adapter_folder(self, task: str) -> Path | None:
        """Return the folder with a task's current adapter; `None` if the disk has none, or an older one."""
        return self._run.saver.place(self._membership.task_of(task))

    def show(self) -> None:
        """Show the present state of the run: a table in a terminal; in a notebook with its curves, also after a reload.

        A trainer that has not trained shows what its `output_dir` has of a run, such as after a restart of the kernel.
        """
        show_view(self._reporter.view())

    def _repr_html_(self) -> str:
        """Return the HTML of a trainer in a notebook: the present state of the run."""
        return run_html(self._reporter.view())

    def plot_losses(self, path: str | Path | None = None) -> Path:
        """Draw the losses of all tasks from `metrics.jsonl` into a PNG (by default `losses.png` in `output_dir`)."""
        return self._reporter.plot_losses(path)

    # ------------------------------------------------------------- planning

    def plan(
        self,
        devices: str | Cluster | None = None,
        *,
        num_stages: int | None = None,
        devices_per_stage: int | None = None,
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

    def plan_deployment(
        self,
        devices: str | Cluster | None = None,
        *,
        measured: LayerProfile | None = None,
        free_exchange: bool = False,
        failures_per_day: float | None = None,
        storage_gb_per_s: float = DEFAULT_STORAGE_GB_PER_S,
        restart_s: float = DEFAULT_RESTART_S,
    ) -> DeploymentReport:
        """Return the replicas that would train these tasks fastest (LobRA), and the alternatives.

        Args:
            devices: such as "16xA100-40GB", "4x4xA100-40GB" for 4 nodes of 4, or a `peft_mux.scheduler.Cluster` with
                its own links; by default those that the run was started on.
            measured: times of one layer at several tensor parallel sizes, in place of a profile of one device.
            free_exchange: whether the exchange of gradients between replicas takes no time, as LobRA assumes.
            failures_per_day: failures of any device in a day, for the overhead of checkpoints and restarts; more than
                0.
            storage_gb_per_s: speed at which checkpoints are written; more than 0.
            restart_s: seconds from a failure to the next step; more than 0.

        Raises:
            ConfigError: for unknown devices, numbers about failures that are not more than 0, no tasks, or tasks that
                no replica can hold.
        """
        return report_deployment(
            self._plans.planner,
            self._run.table.plannable,
            devices,
            measured=measured,
            free_exchange=free_exchange,
            failures_per_day=failures_per_day,
            storage_gb_per_s=storage_gb_per_s,
            restart_s=restart_s,
        )

    def measure_profile(self, budget_s: float = 60.0, *, folder: Path | None = None, refresh: bool = False) -> Profile:
        """Measure how long the parts of a step take on this device, for `cost_profile`; reads and changes no weights.

        If there are several processes, each must call this; the link between them is measured too, and how much of it
        passes in turns hide.

        Args:
            budget_s: seconds that this may take; if tensor parallel ranks share layers, passes through cut layers may
                take a quarter of it more.
            folder: folder of stored profiles, from which one that fits is read instead; `None` to store nothing.
            refresh: measure although a stored profile fits.

        Raises:
            UnsupportedModelError: if the layers cannot be cut for the tensor parallel ranks that the run has.
        """
        device, processes = self.args.device, self._run.processes
        dtype = torch.bfloat16 if self.args.bf16 else self._placement.source.dtype
        groups = self._run.layout.tensor_groups
        with processes.together():
            return profile_backbone(
                self.model,
                device=device,
                dtype=dtype,
                budget_s=budget_s,
                folder=folder,
                refresh=refresh,
                link=measure_link(device),
                overlap=lambda profile: overlap_of_layers(
                    profile, self.model, processes, groups, device=device, dtype=dtype, budget_s=budget_s / 4
                ),
            )

    # ------------------------------------------------------------- training

    def train(self, resume_from_checkpoint: str | bool | None = None, **unsupported: Any) -> TrainOutput:
        """Train until every task has ended or is paused.

        Args:
            resume_from_checkpoint: `True` for the newest state in `output_dir`, "auto" for the same if there is one, or
                another run's folder. Every task continues exactly where that state left it, also in a trainer that has
                trained since. Workers that torchrun or Slurm has restarted resume automatically.
            **unsupported: Trainer's other arguments are refused.

        Returns:
            Number of run steps, mean of the tasks' mean losses, and metrics with `task/metric` keys. The mean is NaN
            if no step was taken, or if tasks have failed, whose number is `failed_tasks` among the metrics. If Ctrl-C
            or SIGTERM has ended the training, `interrupted_by` among the metrics is the number of the signal.

        Raises:
            CheckpointError: if there is nothing to resume from, or `output_dir` holds a run that is not resumed.
            ConfigError: if another thread trains.
            TaskFailedError: at the end, if tasks have failed and `raise_on_failure` is set.
        """
        refuse_trainer_arguments(unsupported)
        with self._session(resume_from_checkpoint):
            while self._loop.step():
                pass
        failed = [f"{task.name} ({task.reason})" for task in self.table if task.status is TaskStatus.FAILED]
        if failed and self.args.raise_on_failure:
            raise TaskFailedError(f"tasks failed: {', '.join(failed)}. All others have ended and are saved.")
        return self._output

    @contextmanager
    def _session(self, resume: str | bool | None) -> Iterator[None]:
        """Open the run for the steps of the `with` block, under signals and requests; then save and report it."""
        run, loop, membership = self._run, self._loop, self._membership
        is_alone = run.processes.is_alone
        # A launcher repeats signals, and they do not reach all processes at once: none may end the last save.
        repeats_signals = not is_alone or "TORCHELASTIC_RUN_ID" in os.environ
        # With a sharded backbone memory counts more than the time of page faults.
        keeping = nullcontext() if self.args.shard_backbone else keeping_freed_memory(self.args.device)
        has_ended = False

        def stop(signal_number: int) -> None:
            if not has_ended:
                self._reporter.interrupted_by, run.control.should_training_stop = signal_number, True

        with (
            run.processes.together(),
            keeping,
            watching_model(lambda task, what: self._placement.model.shared.watch(task, what)),
            # From the start: requests of other threads wait for the first step while the model loads.
            membership.queue.training(membership.finish_commands),
            self._opening.opened(resume),
        ):
            # Timed from here on: loading and planning are not training.
            started, waited_before_s = time.perf_counter(), run.processes.waited_s
            self._reporter.interrupted_by = 0
            first_token, first_step = loop.num_stream_tokens, run.state.global_step
            private_before = private_bytes()
            with stop_at_signal(stop, echo_s=2.0 if repeats_signals else 0.0) as restore_signals:
                try:
                    self._opening.begin()
                    with self.control_channel.listening(is_alone=is_alone):
                        run.callbacks.begin_training(run.table)
                        loop.call_task_events()
                        yield
                except Exception:
                    for observer in run.log.observers:
                        observer.on_failure()
                    raise
                finally:
                    run.log.progress.stop()
                    run.is_in_train = False
                has_ended = True
                added_bytes = max(private_bytes() - private_before, 0)  # no freed memory was returned meanwhile
                if not repeats_signals:
                    restore_signals()
                seconds, waited_s = time.perf_counter() - started, run.processes.waited_s - waited_before_s
                membership.settle()
                # The last step need not be a multiple of `save_steps`.
                if not run.saver.is_current:
                    loop.save()
                for observer in run.log.observers:
                    observer.on_end()
                run.callbacks.call_task_events()
                num_tokens, num_steps = loop.num_stream_tokens - first_token, run.state.global_step - first_step
                self._output = self._reporter.finish(seconds, waited_s, num_tokens, num_steps, added_bytes)
                for observer in run.log.observers:
                    observer.on_close()

    def evaluate(  # type: ignore[override]
        self, task: str | None = None, eval_dataset: Any = None, **unsupported: Any
    ) -> dict[str, float]:
        """Evaluate one task, or all that have held-out rows; from another thread, after the step in progress.

        Args:
            task: name of the task; by default all.
            eval_dataset: rows in place of its held-out rows, if `task` is given; no completions are generated then.
            **unsupported: Trainer's other arguments are refused.

        Returns:
            Metrics with `task/metric` keys.

        Raises:
            ConfigError: for a name that no task has, or a task without held-out rows.
        """
        if task is None:
            unsupported = {"eval_dataset": eval_dataset, **unsupported}
        refuse_trainer_arguments(unsupported)
        rows = (
            None if task is None or eval_dataset is None else {"eval": self._read(task, eval_dataset, "eval_dataset")}
        )

        def evaluate() -> dict[str, float]:
            self._placement.load()
            held_out = [active for active in self.table if active.eval_data]
            runs = held_out if task is None else [self._membership.task_of(task)]
            judges = self._complete(runs, logs=False) if rows is None else {}
            return {
                f"{active.name}/{key}": value
                for active in runs
                for key, value in self._evaluator.metrics(active, judges.get(active.name), rows).items()
            }

        return self._membership.queue.ask("evaluate" if task is None else f"evaluate {task}", evaluate)

    def predict(self, task: str, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:  # type: ignore[override]
        """Return the predictions of a task's adapter for rows, as Trainer returns them; every process must call this.

        Args:
            task: name of the task.
            test_dataset: rows as `Task(eval_dataset=...)` takes them, with labels.
            metric_key_prefix: begins the keys of the metrics.

        Returns:
            Logits, `[rows, tokens, words]` or `[rows, classes]`, or what `preprocess_logits_for_metrics` makes of them;
            labels; both filled with -100; and the metrics of an evaluation.

        Raises:
            ConfigError: for a name that no task has, or a task whose loss has no logits.
            DataError: if rows cannot be read, or are left out, so that predictions would not fit the rows.
        """
        active = self._membership.task_of(task)
        if not active.resolved.objective.has_logits:
            raise ConfigError(f"tasks.{task}.objective must be one of rows with labels, to predict. Use evaluate().")
        data = self._read(task, test_dataset, "test_dataset")
        if len(data) != data.report.num_rows:
            raise DataError(
                f"tasks.{task}.test_dataset must have rows that all have labels and fit: {data.report.warning}"
            )

        def predict() -> PredictionOutput:
            self._placement.load()
            return self._evaluator.predict(active, data, metric_key_prefix)

        return self._membership.queue.ask(f"predict {task}", predict)

    def _read(self, task: str, rows: Any, field: str) -> TokenizedDataset:
        """Return the tokens of further rows of a task."""
        active = self._membership.task_of(task)
        rows, faults = opened_rows(active.task, rows, field, f"tasks.{task}")
        raise_faults(faults)
        return read_held_out(active.resolved, rows, active.held_out_options, self._placement.source.tokenizer, field)[1]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write every task's adapter with its card, each at the root of its sub-folder, loadable by plain PEFT."""

        def save() -> None:
            self._placement.load()
            folder, saver = Path(output_dir or self._run.root), self._run.saver
            for task in self.table:
                # On every process: if each holds a part of the adapter, the writer needs all of them.
                weights = saver.full_weights(task)
                if saver.is_writer:
                    RunFolder(folder, self._placement.model).save_adapter(task.name, weights)
                    self._reporter.write_task_files(task, folder / task.name)

        self._membership.queue.ask("save_model", save)

    def load_adapters(self, folder: str | Path) -> None:
        """Give every task the weights of its adapter in a folder that `save_model` or a run has written.

        Args:
            folder: has a sub-folder for each task.

        Raises:
            CheckpointError: if an adapter is missing, damaged or of another form.
        """

        def load() -> None:
            self._placement.load()
            for task in self.table:
                self.model.begin_from(task.name, Path(folder) / task.name)

        self._membership.queue.ask("load_adapters", load)

    def push_to_hub(self, task: str = "", *, repo_id: str = "", **options: Any) -> Any:  # type: ignore[override]
        """Upload one task's adapter as it is now, with a model card and nothing else; return the answer of the Hub.

        Args:
            task: name of the task.
            repo_id: repository on the Hub, such as "me/sql-lora"; made if absent.
            **options: `token`, `private`, `revision` and `commit_message`, as `huggingface_hub` takes them.

        Raises:
            ConfigError: for a task that does not exist or is not trained, or if the Hub refuses.
        """
        active, saver = self._membership.task_of(task), self._run.saver
        check_push(active, repo_id, options)

        def push() -> Any:
            weights = saver.full_weights(active)  # on every process, though one of them writes
            if not saver.is_writer:
                return None
            facts = {"folder": saver.place(active), "num_tasks": len(list(self.table))}
            return push_task(self._placement.model, active, weights, repo_id, options, **facts)

        return self._membership.queue.ask(f"push_to_hub {task}", push)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback to the run.

        Raises:
            ConfigError: for one that belongs to a task, or with a misspelt event of tasks.
        """
        check_callbacks([callback])
        super().add_callback(callback)

    def log(self, logs: Mapping[str, float]) -> None:  # type: ignore[override]
        """Pass numbers of the run to its callbacks and loggers, under the present step."""
        self._run.callbacks.log(dict(logs))

    # ------------------------------------------------------------- while it trains

    def register_tasks(self, tasks: Sequence[Task]) -> Future[None]:
        """Add tasks; while `train` runs (this may be called from a callback or another thread) at the next step.

        Their configuration and rows are checked here, in the caller's thread.

        Returns:
            A future that is done when they have been added or refused: what PEFT refuses only when it makes the adapter
            is also logged as a warning and in `metrics.jsonl`. With several processes, each must call this.

        Raises:
            ConfigError: naming every setting that cannot be run; then none is added.
            DataError: naming the rows that cannot be trained on.
        """
        require_tasks(tasks)
        return self._membership.register(tasks)

    def remove_task(self, name: str, *, save: bool = True) -> Future[None]:
        """Take a task out at the next step boundary; its adapter is written first unless `save` is `False`.

        The future is done when the task is out; likewise in `pause_task` and `resume_task`.
        """
        return self._membership.remove(name, save=save)

    def pause_task(self, name: str) -> Future[None]:
        """Pause a task, keeping its exact state, until `resume_task`."""
        return self._membership.set_paused(name, True)

    def resume_task(self, name: str) -> Future[None]:
        """Resume a paused task from the same step."""
        return self._membership.set_paused(name, False)

    def redeploy(self, replicas: str) -> None:
        """Move the run to other replicas; while `train` runs, at the next step. Every process must call this.

        Args:
            replicas: as LobRA writes them, such as "<2,1>, <1,1>x2"; for as many processes as there are.

        Raises:
            ConfigError: if there are not as many processes, or the model cannot be read again.
        """
        self._membership.queue.ask(f"redeploy {replicas}", lambda: self._relocation.redeploy(replicas))


def _part_of(source: BackboneSource, args: MultiTaskTrainingArguments, layout: ParallelLayout, rank: int) -> ModelPart:
    """Return the part of the model that a process holds: the whole model, if nothing asks for several processes."""
    asks = args.shard_backbone or args.shard_optimizer or args.redeploy or args.interleaved_passes not in ("auto", 1)
    return (ParallelPart if asks or layout.world_size > 1 else ModelPart)(source, args, layout, rank)


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_run" not in vars(self):  # called by Trainer's own constructor
            return getattr(Trainer, name)(self, *args, **kwargs)
        raise ConfigError(f"trainer.{name} is Trainer's method for one task. Use {instead}.")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise a `ConfigError`: use {instead}."
    return refuse


for _name, _instead in REFUSED.items():
    setattr(MultiTaskTrainer, _name, _refusing(_name, _instead))
