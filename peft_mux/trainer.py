"""`MultiTaskTrainer`: several PEFT tasks on one frozen backbone, trained together, each as if it were alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer_utils import TrainOutput

from peft_mux.arguments import MultiTaskTrainingArguments, require_arguments, task_arguments
from peft_mux.backbone import Backbone
from peft_mux.callbacks import TaskCallbacks, TaskFlowCallback
from peft_mux.checkpoint import RunFolder, open_run_folder, resume_tasks
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.allocator import keeping_freed_memory
from peft_mux.engine.dispatcher import Dispatcher
from peft_mux.engine.executor import Executor
from peft_mux.engine.isolation import LastGood
from peft_mux.interrupts import stop_at_signal
from peft_mux.membership import TaskMembership
from peft_mux.metrics import MetricsLog, read_metrics
from peft_mux.optim import TaskOptimizer
from peft_mux.planned_run import PlannedRun
from peft_mux.planning import Planner
from peft_mux.run_log import RunLog
from peft_mux.saving import Saver, describe_run
from peft_mux.scheduler.plan import Plan
from peft_mux.task import Task, TaskStatus
from peft_mux.task_evaluation import TaskEvaluator
from peft_mux.task_run import TaskEvent, TaskRun, TaskTable
from peft_mux.task_setup import class_count, make_task_runs
from peft_mux.team import Team
from peft_mux.trainer_inputs import (
    check_evaluation,
    check_processes,
    no_new_folder,
    refuse_trainer_arguments,
    task_list,
)
from peft_mux.ui.progress import make_progress
from peft_mux.ui.report import report_table


class MultiTaskTrainer(PlannedRun, TaskMembership, Trainer):
    """Trains many PEFT tasks at once; a `transformers.Trainer` whose one model serves them all.

    Args:
        model: hub id or folder of a transformers model (loaded when training begins), a `PreTrainedModel`, or a
            `MultiTaskPeftModel`.
        args: of the run; its hyper-parameters are the defaults of tasks that do not set their own.
        tasks: what to train. May be left out with a `MultiTaskPeftModel` and `train_dataset`.
        processing_class: tokenizer; by default that of `model` where it is a hub id or folder.
        train_dataset: short form for equal hyper-parameters: rows by task name, for a `MultiTaskPeftModel`.
        eval_dataset: held-out rows by task name, in the short form.
        callbacks: `TrainerCallback`s that see the run; those of a `Task` see the task.
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
        self.tasks = task_list(model, tasks, train_dataset, eval_dataset)
        source = Backbone(model, run_args, processing_class, dict(model_init_kwargs or {}))
        source.check(self.tasks)
        check_processes(run_args)
        check_evaluation(run_args, self.tasks)
        runs = make_task_runs(self.tasks, run_args, source.tokenizer, source.config)
        self._source = source
        self._class_counts = {run.name: count for run in runs if (count := class_count(run)) is not None}
        described = source.describe(self.tasks, self._class_counts)
        with no_new_folder(Path(run_args.output_dir or ".")):
            super().__init__(
                model=described,
                args=run_args,
                processing_class=source.tokenizer,
                callbacks=list(callbacks or ()),
                # Held-out rows are the tasks'; Trainer itself asks for some where eval_strategy is set.
                eval_dataset=[],  # type: ignore[arg-type]
            )
        for callback in (DefaultFlowCallback, PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(TaskFlowCallback())
        self.state = TrainerState()
        self.table = TaskTable()
        for run in runs:
            self.table.add(run)
        self._team = Team(run_args, self.table)
        self._mark_main(self.state)
        self._open_membership()
        self._collator = self._make_collator()
        self._log = RunLog(self.table, self.state, self._emit)
        self._saver = Saver(None, self.table, run_args, self._log)
        self._saver.is_writer = self._log.is_shown = self._team.processes.is_main
        self._executor: Executor | None = None
        self._dispatcher: Dispatcher | None = None
        self._planner = Planner(described, source, run_args, self._collator)
        self._evaluator: TaskEvaluator | None = None
        self._plan: Plan | None = None
        self._num_stream_tokens = 0
        self._has_trained = False

    # ------------------------------------------------------------- overview

    @property
    def task_states(self) -> dict[str, TrainerState]:
        """State of each task as Trainer keeps it: `global_step`, `epoch`, `log_history`."""
        return {run.name: run.state for run in self.table}

    @property
    def task_statuses(self) -> dict[str, TaskStatus]:
        """Where each task stands."""
        return {run.name: run.status for run in self.table}

    # ------------------------------------------------------------- training

    def train(self, resume_from_checkpoint: str | bool | None = None, **unsupported: Any) -> TrainOutput:
        """Train until every task has ended or is paused.

        Args:
            resume_from_checkpoint: `True` for the newest state in `output_dir`, or another run's folder. Every task
                goes on exactly where that state left it.
            **unsupported: Trainer's other arguments are refused.

        Returns:
            Number of run steps, mean of the tasks' last losses, and metrics with `task/metric` keys.

        Raises:
            CheckpointError: if there is nothing to resume from, or `output_dir` holds a run that is not resumed.
        """
        refuse_trainer_arguments(unsupported)
        resume = resume_from_checkpoint or self.args.resume_from_checkpoint
        with self._team.processes.together(), keeping_freed_memory(self.args.device):
            return self._train(resume)

    def _train(self, resume: str | bool | None) -> TrainOutput:
        self._begin(resume)
        started, first_token, first_step = time.perf_counter(), self._num_stream_tokens, self.state.global_step
        try:
            with stop_at_signal(self._request_stop, echo_s=0.0 if self._team.processes.is_alone else 2.0):
                self._run_steps()
        finally:
            self._log.progress.stop()
            self.is_in_train = False
            self._obey_commands()
        seconds = time.perf_counter() - started
        return self._finish(seconds, self._num_stream_tokens - first_token, self.state.global_step - first_step)

    def _run_steps(self) -> None:
        self._obey_commands()
        while self._goes_on():
            self._step()
            self._obey_commands()

    def _goes_on(self) -> bool:
        """Whether all processes take another step; what another process has stopped is stopped here."""
        wants_stop = self.control.should_training_stop
        goes_on = self._team.goes_on(self.state.global_step, self.model, wants_stop=wants_stop)
        for event in self.table.collect():
            self._on_event(event)
        return goes_on

    def _step(self) -> None:
        """Take one step of every running task."""
        assert self._dispatcher is not None, "train() begins before it steps"
        assert self._executor is not None, "train() begins before it steps"
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        for run in self.table.running:
            self._log.callbacks[run.name].step_begins()
        stepping = [run.name for run in self.table.running]
        started = time.perf_counter()
        work = self._dispatcher.next(self.table.running)
        result = self._executor.run(work)
        self.table.apply(result)
        # Each of several processes measures a time of its own, and all must make the same plan.
        if self._plan is not None and self._team.processes.world_size == 1:
            tokens = sum(result.num_tokens.values())
            self._planner_of_model().observe(self._plan, tokens, time.perf_counter() - started)
        self.state.global_step += 1
        self._num_stream_tokens += result.num_stream_tokens
        self._after_step(stepping)

    def _after_step(self, names: list[str]) -> None:
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        for name in names:
            if self.table[name].status is TaskStatus.RUNNING:
                self._log.callbacks[name].step_ends()
        self._log_if_due()
        self._evaluate_if_due(names)
        self._prove_finished()
        events = self.table.collect()
        for event in events:
            self._on_event(event)
        if any(event.status.is_final for event in events):
            self._replan()
        self._save_if_due(names)
        self._log.progress.advance(self.table)

    def _prove_finished(self) -> None:
        """Hold the last update of a task to the test of all others: the weights it left must give a finite loss."""
        assert self._executor is not None, "only called while training"
        ended = {run.name: run for run in self.table.running if run.step >= run.num_steps}
        if not ended:
            return
        batches = [run.loader.batch(run.step - 1) for run in ended.values()]
        micro_batches = self._collator.micro_batches(batches, max_tokens=self.args.max_tokens_per_micro_batch)
        for name in self._executor.non_finite_tasks(micro_batches):
            ended[name].quarantine(f"non_finite: loss after the last step, {ended[name].step - 1}")

    def _begin(self, resume: str | bool | None) -> None:
        """Load what must be loaded, start or restore the tasks, and open the run folder."""
        self._materialise()
        self._team.begin(self.model, resume=resume)
        root, is_writer = self._root, self._saver.is_writer
        if self._saver.folder is None and self.args.save_strategy != "no":
            self._saver.folder = open_run_folder(
                root, self.model, keep=self.args.save_total_limit, is_resumed=bool(resume), is_writer=is_writer
            )
        if is_writer:
            root.mkdir(parents=True, exist_ok=True)
            self._log.metrics = MetricsLog(root)
        self._log.progress = make_progress(
            enabled=not self.args.disable_tqdm, is_main_process=self.is_world_process_zero()
        )
        for run in self.table:
            if run.status is TaskStatus.WAITING and resume and not self._has_trained:
                self._start(run)
        if resume and not self._has_trained:
            self._resume(root if resume is True else Path(resume))
        self._has_trained = True
        plan = self._replan()
        if is_writer:
            describe_run(root, self.args, self.table, plan)
        self.is_in_train = True
        self.control.should_training_stop = False
        self._log.progress.start(self.table)
        self.table.collect()
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        for callbacks in self._log.callbacks.values():
            callbacks.call("on_train_begin")

    def _materialise(self) -> None:
        """Load the weights, if the model is still a description, and place the model."""
        if self._executor is not None:
            return
        self.model = self._source.load(self.model, self.tasks, self._class_counts)
        self.model_wrapped = self.callback_handler.model = self.model
        self.model.to(self.args.device)
        if self.args.uses_checkpointing:
            self.model.activation_checkpointing_enable(**self.args.checkpointing_kwargs)
        self.model.train()
        self._executor = Executor(
            self.model, bf16=self.args.bf16, cuda_graphs=self.args.cuda_graphs, processes=self._team.processes
        )
        self._evaluator = TaskEvaluator(
            self._executor, self._collator, self.args.max_tokens_per_micro_batch, self._log, self._saver
        )

    def _start(self, run: TaskRun) -> None:
        """Give a task its optimizer and let it take steps."""
        parameters = self.model.task_parameters(run.name)
        slab = self.model.task_slab(run.name)
        run.optimizer = TaskOptimizer(run.name, parameters, run.hyper, run.num_steps, self.args, slab)
        run.last_good = LastGood({f"page_{number}": page.values for number, page in enumerate(slab.pages)})
        run.status, run.reason = TaskStatus.RUNNING, ""
        self._mark_main(run.state)
        own_args = task_arguments(run.hyper, self.args)
        self._log.callbacks[run.name] = TaskCallbacks(run, own_args, self.model, self.processing_class)
        if self.is_in_train:
            self._log.callbacks[run.name].call("on_train_begin")

    def _resume(self, root: Path) -> None:
        folder = self._saver.folder
        if folder is None or root != folder.root:
            folder = RunFolder(root, self.model, is_writer=self._saver.is_writer)
        self._team.processes.wait_for_all()  # others read the folder when the first one has put it in order
        self.state.global_step = resume_tasks(folder, self.table, self._log.warn)
        self._log.metrics.truncate_after(self.state.global_step)

    def _finish(self, seconds: float, num_tokens: int, num_steps: int) -> TrainOutput:
        if not self._saver.is_current:
            self._save()
        records = self._team.finish(num_tokens, seconds)
        metrics: dict[str, float] = {
            "train_runtime": seconds,
            "train_tokens_per_second": sum(record.tokens for record in records) / max(seconds, 1e-9),
        }
        metrics["train_steps_per_second"] = num_steps / max(seconds, 1e-9)
        ratio = self._planner_of_model().time_ratio
        if ratio is not None:
            metrics["measured_over_planned_time"] = ratio
        for run in self.table:
            metrics[f"{run.name}/train_loss"] = run.last_loss
        self._log.event("run", **metrics)
        for record in records if len(records) > 1 else ():
            self._log.event("rank", **record._asdict())
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        for callbacks in self._log.callbacks.values():
            callbacks.call("on_train_end")
        finite = [run.last_loss for run in self.table if run.last_loss == run.last_loss]
        return TrainOutput(self.state.global_step, sum(finite) / max(len(finite), 1), metrics)

    # -------------------------------------------------- logging, evaluation

    def _log_if_due(self) -> None:
        step = self.state.global_step
        due = self.args.logging_strategy != "no" and (
            step % self.args.logging_steps == 0 or (self.args.logging_first_step and step == 1)
        )
        if due or self.control.should_log:
            self.control.should_log = False
            self._log.losses()

    def _emit(self, logs: dict[str, float]) -> None:
        """Hand `task/metric` numbers to the run's callbacks and integrations."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def _evaluate_if_due(self, names: list[str]) -> None:
        assert self._evaluator is not None, "only called while training"
        everybody = self.control.should_evaluate
        self.control.should_evaluate = False
        for name in names:
            run = self.table[name]
            if run.status is TaskStatus.RUNNING and run.eval_data is not None and (run.is_evaluation_due or everybody):
                logs = self._evaluator.evaluate(run)
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
            if run.status is TaskStatus.RUNNING and self._log.callbacks[name].control.should_training_stop:
                run.end(TaskStatus.STOPPED_EARLY, "stopped by a callback of the task")

    def evaluate(self, task: str | None = None, **unsupported: Any) -> dict[str, float]:  # type: ignore[override]
        """Evaluate one task, or all that have held-out rows.

        Args:
            task: name; by default all.
            **unsupported: Trainer's other arguments are refused.

        Returns:
            Metrics with `task/metric` keys.
        """
        refuse_trainer_arguments(unsupported)
        self._materialise()
        assert self._evaluator is not None, "made with the executor"
        names = [task] if task is not None else [run.name for run in self.table if run.eval_data is not None]
        results: dict[str, float] = {}
        for name in names:
            metrics = self._evaluator.metrics(self._run_of(name))
            results.update({f"{name}/{key}": value for key, value in metrics.items()})
        return results

    # ----------------------------------------------------- events and files

    def _on_event(self, event: TaskEvent) -> None:
        """Tell of a change, keep the adapter of a task that ended, and plan anew without it."""
        run = self.table[event.task]
        self._log.status(event, run.step)
        if not event.status.is_final:
            return
        if self.args.logging_strategy != "no":
            self._log.losses([run])
        if run.best.value is not None and event.status is not TaskStatus.FAILED:
            run.restore_best(self.model.task_parameters(event.task))
        self._saver.save_ended(run)
        if event.status is TaskStatus.FAILED and self.args.quarantine_policy == "stop":
            self._request_stop()
        self._replan()

    def _save_if_due(self, names: list[str]) -> None:
        if self._saver.is_due() or self.control.should_save:
            self.control.should_save = False
            self._save()
        else:
            self._saver.save_due_tasks(names)

    def _save(self) -> None:
        if self._saver.save_run():
            for run in self.table.running:
                self._log.callbacks[run.name].call("on_save")
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write every task's adapter, each at the root of its sub-folder, loadable by plain PEFT."""
        self._materialise()
        if not self._saver.is_writer:
            return
        folder = RunFolder(Path(output_dir or self._root), self.model)
        for run in self.table:
            folder.save_adapter(run.name)

    def plot_losses(self, path: str | Path | None = None) -> Path:
        """Draw the losses of all tasks from `metrics.jsonl` into a PNG (by default `losses.png` in `output_dir`)."""
        from peft_mux.ui.plots import plot_losses

        root = self._root
        image = Path(path or root / "losses.png")
        return plot_losses(read_metrics(root / "metrics.jsonl"), image) if self._saver.is_writer else image

    def report(self) -> str:
        """Return a table of all tasks: how each ended, its last losses, and where its adapter lies."""
        return report_table(self.table, None if self._saver.folder is None else self._root, self._team.records)

    # -------------------------------------------------------------- helpers

    @property
    def _root(self) -> Path:
        return Path(self.args.output_dir or "peft_mux_output")

    def _mark_main(self, state: TrainerState) -> None:
        """Tell callbacks whether this process is the one that writes."""
        state.is_world_process_zero = self.is_world_process_zero()
        state.is_local_process_zero = self.is_local_process_zero()

    def _request_stop(self) -> None:
        self.control.should_training_stop = True

    def _make_collator(self) -> ChunkPackingCollator:
        pad_token_id = getattr(self.processing_class, "pad_token_id", None)
        return ChunkPackingCollator(
            chunk_size=self.args.chunk_size,
            min_chunk_size=self.args.min_chunk_size,
            pad_to_chunks=self.args.pad_to_chunks,
            pad_token_id=pad_token_id or 0,
        )
