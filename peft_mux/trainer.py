"""`MultiTaskTrainer`: several PEFT tasks on one frozen backbone, trained together, each as if it were alone."""

from __future__ import annotations

import sys
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
from peft_mux.deployed_run import DeployedRun
from peft_mux.engine.allocator import keeping_freed_memory
from peft_mux.engine.batches_ahead import BatchesAhead
from peft_mux.engine.dispatcher import Dispatcher
from peft_mux.engine.work import StepExecutor
from peft_mux.interrupts import stop_at_signal
from peft_mux.membership import TaskMembership
from peft_mux.metrics import MetricsLog
from peft_mux.model_part import ModelPart
from peft_mux.planned_run import PlannedRun, StepTime
from peft_mux.planning import Planner
from peft_mux.reported_run import ReportedRun
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


class MultiTaskTrainer(PlannedRun, DeployedRun, ReportedRun, TaskMembership, Trainer):
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
        self._part = ModelPart(source, run_args, self._team.layout, self._team.processes.rank)
        self._part.check(self.tasks, described.backbone)
        if run_args.redeploy:
            self._check_can_move()
        self._outline = self._part.outline(described, self.tasks, self._class_counts)
        self._mark_main(self.state)
        self._open_membership()
        self._collator = self._make_collator()
        self._log = RunLog(self.table, self.state, self._emit)
        self._saver = Saver(None, self.table, run_args, self._log)
        self._saver.is_writer = self._log.is_shown = self._team.processes.is_main
        self._ahead = BatchesAhead()
        self._executor: StepExecutor | None = None
        self._dispatcher: Dispatcher | None = None
        self._planner = Planner(
            self._outline, source, run_args, self._collator, num_replicas=self._team.layout.num_replicas
        )
        self._evaluator: TaskEvaluator | None = None
        self._plan: Plan | None = None
        self._num_stream_tokens = 0
        self._last_step: StepTime | None = None
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
        self._team.processes.waited_s = 0.0
        started, first_token, first_step = time.perf_counter(), self._num_stream_tokens, self.state.global_step
        try:
            with stop_at_signal(self._request_stop, echo_s=0.0 if self._team.processes.is_alone else 2.0):
                self._run_steps()
        finally:
            self._log.progress.stop()
            self.is_in_train = False
            # Others may be stuck in the step that failed here, and answer nothing.
            if self._team.processes.is_alone or sys.exc_info()[0] is None:
                self._obey_commands()
        seconds = time.perf_counter() - started
        self._team.waited_s = self._team.processes.waited_s
        return self._finish(seconds, self._num_stream_tokens - first_token, self.state.global_step - first_step)

    def _run_steps(self) -> None:
        self._obey_commands()
        while self._goes_on():
            self._step()
            self._obey_commands()

    def _goes_on(self) -> bool:
        """Whether all processes take another step; what another process has stopped is stopped here."""
        wants_stop = self.control.should_training_stop
        goes_on = self._team.goes_on(
            self.state.global_step,
            self.model,
            wants_stop=wants_stop,
            replicas=self._replicas_to_move_to,
            last_step_s=0.0 if self._last_step is None else self._last_step.seconds,
        )
        self._learn(self._team.slowest_s)  # each process has a time of its own, and all must make the same plan
        self._take_note()
        if goes_on and self._moves():
            self._replan()
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
        self._dispatcher.prepare(self.table.running)
        result = self._executor.run(work)
        self.table.apply(result)
        self._last_step = StepTime(self._plan, sum(result.num_tokens.values()), time.perf_counter() - started)
        if self._team.processes.is_alone:
            self._learn(self._last_step.seconds)
        self.state.global_step += 1
        self._num_stream_tokens += result.num_stream_tokens
        self._after_step(stepping)

    def _after_step(self, names: list[str]) -> None:
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        for name in names:
            if self.table[name].status is TaskStatus.RUNNING:
                self._log.callbacks[name].step_ends()
        self._settle()
        self._log_if_due()
        self._evaluate_if_due(names)
        self._settle()
        self._prove_finished()
        self._take_note()
        self._save_if_due(names)
        self._log.progress.advance(self.table)

    def _settle(self) -> None:
        """Bring what callbacks did on single processes to all, where what follows needs every one of them."""
        if self._acts_alone:
            return
        asked = self.control.should_save, self.control.should_evaluate
        self.control.should_save, self.control.should_evaluate = self._team.settle(self.state.global_step, asked)

    def _take_note(self) -> None:
        """Tell of every change since the last time, and plan anew without the tasks that have ended."""
        events = self.table.collect()
        for event in events:
            self._on_event(event)
        if any(event.status.is_final for event in events):
            self._replan()

    def _prove_finished(self) -> None:
        """Hold the last update of a task to the test of all others: the weights it left must give a finite loss."""
        assert self._executor is not None, "only called while training"
        ended = {run.name: run for run in self.table.running if run.step >= run.num_steps}
        if not ended:
            return
        batches = [run.loader.batch(run.step - 1) for run in ended.values()]
        micro_batches = self._collator.micro_batches(batches, max_tokens=self._max_tokens)
        for name in self._executor.non_finite_tasks(micro_batches):
            ended[name].quarantine(f"non_finite: loss after the last step, {ended[name].step - 1}")

    def _begin(self, resume: str | bool | None) -> None:
        """Load what must be loaded, start or restore the tasks, and open the run folder."""
        self._team.begin(resume=resume)
        self._materialise()
        self._fingerprint = self._team.fingerprint(type(self.model.backbone).__name__, self._part.samples)
        root, is_writer = self._root, self._saver.is_writer
        if self._saver.folder is None and self.args.save_strategy != "no":
            self._saver.folder = open_run_folder(
                root,
                self.model,
                keep=self.args.save_total_limit,
                is_resumed=bool(resume),
                is_writer=is_writer,
                fingerprint=self._fingerprint,
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

    def _start(self, run: TaskRun) -> None:
        """Give a task its optimizer and let it take steps."""
        self._equip(run)
        run.status, run.reason = TaskStatus.RUNNING, ""
        self._mark_main(run.state)
        own_args = task_arguments(run.hyper, self.args)
        self._log.callbacks[run.name] = TaskCallbacks(run, own_args, self.model, self.processing_class)
        if self.is_in_train:
            self._log.callbacks[run.name].call("on_train_begin")

    def _resume(self, root: Path) -> None:
        folder = self._folder_to_read(root)
        self._team.processes.wait_for_all()  # others read the folder when the first one has put it in order
        self.state.global_step = resume_tasks(folder, self.table, self._log.warn)
        if folder is not self._saver.folder:  # what has ended elsewhere is part of what this folder is resumed from
            for run in self.table:
                if run.status.is_final:
                    self._saver.save_ended(run)
        self._log.metrics.truncate_after(self.state.global_step)

    # ----------------------------------------------------- events and files

    def _on_event(self, event: TaskEvent) -> None:
        """Tell of a change, and keep the adapter of a task that ended."""
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
        for run in self.table:
            weights = self._saver.whole_weights(run)
            if self._saver.is_writer:
                RunFolder(Path(output_dir or self._root), self.model).save_adapter(run.name, weights)

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
            split_long_sequences=self.args.split_long_sequences,
        )
