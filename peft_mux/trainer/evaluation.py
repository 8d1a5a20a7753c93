"""`TaskEvaluator`: evaluates tasks on their held-out rows between steps, and follows their early stopping.

Losses come from the same packed forward pass as in training. `compute_metrics` and `preprocess_logits_for_metrics` are
called as `Trainer` calls them. Replicas share the rows. Exceptions of a task's own functions are kept until all passes
are over, because other processes may be waiting for these passes, and fail only that task.

Shape letters: L tokens of a sequence, V words, C classes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakSet

import numpy as np
import torch
from transformers.trainer_utils import PredictionOutput, speed_metrics

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence, batch_totals, prefix_trie
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import ConfigError, MetricsError, ProcessError
from peft_mux.modeling.stream import in_mode
from peft_mux.task import Task, TaskStatus, metric_key
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run
from peft_mux.user_code import Listener, UserCodeError, describe_error, guard_user_code, ignore_timing, log_warning

Found = TypeVar("Found")
_logger = logging.getLogger(__name__)

Judge = Callable[[Listener], dict[str, float]]
"""Returns the metrics of a task's completions under keys that begin with `eval_`; every process calls it."""


def batches_of_replica(
    batches: Iterable[TaskBatch], replica: int, num_replicas: int
) -> Iterator[tuple[int | None, TaskBatch]]:
    """Yield the batches that a replica evaluates, one in every `num_replicas`, with their numbers.

    All replicas get the same number, as some executors need every process for every pass. If the last round has too
    few, the last batch is repeated without a number, and its results are ignored.

    Args:
        batches: all held-out rows of a task; the same on every replica.
        replica: number of the replica, from 0.
        num_replicas: number of replicas that share the rows.
    """
    number, batch = -1, None
    for number, batch in enumerate(batches):
        if number % num_replicas == replica:
            yield number, batch
    num_left = (number + 1) % num_replicas
    if batch is not None and 0 < num_left <= replica:
        yield None, batch


def merged(results: Iterable[Mapping[int, Any]]) -> dict[int, Any]:
    """Return the results of all processes by number of the batch, in the order of the rows, for the same bits in sums.

    Processes of one replica found the same; by number, each batch counts once.
    """
    by_number = {number: value for result in results for number, value in result.items()}
    return {number: by_number[number] for number in sorted(by_number)}


def held_out_batches(
    task: ActiveTask,
    dataset: Any,
    limit: int,
    totals: Mapping[str, float] | None = None,
    *,
    is_as_trained: bool = False,
) -> Iterator[TaskBatch]:
    """Yield held-out rows of a task in order, in batches of at most `limit` tokens, or of one row.

    Args:
        task: the task.
        dataset: the rows.
        limit: greatest number of tokens of a batch.
        totals: what its loss divides by, over all held-out rows.
        is_as_trained: whether rows are arranged as in training, in batches of as many rows if its loss needs that, and
            tokens that they share may be computed once.
    """
    arrange = task.loader.arrange if is_as_trained else None

    def batch_of(rows: Sequence[TokenSequence]) -> TaskBatch:
        sequences = tuple(rows) if arrange is None else arrange(tuple(rows))
        trie = prefix_trie(sequences) if is_as_trained and task.loader.shares_prefixes else None
        return TaskBatch(task.name, 0, 0, sequences, totals, trie=trie)

    rows: list[TokenSequence] = []
    num_tokens = 0
    for index in range(len(dataset)):
        row = dataset[index]
        is_full = num_tokens + len(row) > limit if arrange is None else len(rows) == task.hyper.train_batch_size
        if rows and is_full:
            yield batch_of(rows)
            rows, num_tokens = [], 0
        rows.append(row)
        num_tokens += len(row)
    yield batch_of(rows)


class _UserMetrics:
    """Collects predictions and labels of one evaluation, for a task's `compute_metrics` or for `predict`.

    Args:
        task: the task.
        prefix: begins the keys of its metrics.
        num_pairs: for rows of two answers, how many chosen ones come before their rejected ones, as in TRL; 0 for
            other rows.

    Attributes:
        predictions: predictions of all rows, after `result`.
        labels: their labels.
        error: exception of the task's functions; none of them is called after it.
        seconds: duration of these functions on this process.
    """

    def __init__(self, task: Task, prefix: str, num_pairs: int) -> None:
        self.task, self.prefix = task, prefix
        self.predictions: np.ndarray | None = None
        self.labels: np.ndarray | None = None
        self.error: UserCodeError | None = None
        self.seconds = 0.0
        self._num_pairs = num_pairs
        self._rows: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def _add_seconds(self, task: str, what: str, seconds: float) -> None:
        self.seconds += seconds

    def add(self, number: int, logits: Sequence[torch.Tensor], labels: Sequence[np.ndarray]) -> None:
        """Add the logits of a batch's sequences, `[L, V]` or `[C]` each, and their labels, `[L]` or a number."""
        if self.error is not None:
            return
        preprocess, predictions = self.task.preprocess_logits_for_metrics, []
        try:
            with guard_user_code(self.task.name, "compute_metrics", self._add_seconds):
                for prediction, row_labels in zip(logits, labels, strict=True):
                    if preprocess is not None:
                        # As a batch of one row, which is what Trainer passes to these functions.
                        prediction = preprocess(prediction[None], torch.as_tensor(row_labels)[None])[0]
                    # In fp32, as numpy has no bfloat16.
                    prediction = prediction.float() if prediction.is_floating_point() else prediction
                    predictions.append(prediction.cpu().numpy())
        except UserCodeError as error:
            # Kept, not raised: the passes that are left need every process.
            self.error = error
            return
        self._rows[number] = predictions, list(labels)

    def result(self, of_replicas: Callable[[Any], list[Any]], *, computes: bool) -> dict[str, float] | None:
        """Return the result of `compute_metrics` on the rows of all processes; `None` if it failed or without rows.

        Args:
            of_replicas: gathers a value from all replicas; all processes call this.
            computes: whether this process computes metrics; others only send their rows.
        """
        gathered = of_replicas((self._rows, None if self.error is None else str(self.error)))
        self._rows = merged(rows for rows, _ in gathered) if computes else {}
        failure = next((text for _, text in gathered if text is not None), None)
        if failure is not None and self.error is None:
            self.error = UserCodeError(failure)
        if not self._rows or self.error is not None:
            return None
        from transformers import EvalPrediction

        compute_metrics: Any = self.task.compute_metrics
        try:
            # Whether rows can be stacked depends on what these functions return, so that is guarded too.
            with guard_user_code(self.task.name, "compute_metrics", self._add_seconds):
                self.predictions = self._stack([row for rows, _ in self._rows.values() for row in rows])
                self.labels = self._stack([row for _, rows in self._rows.values() for row in rows])
                if compute_metrics is None:
                    return {}
                values = compute_metrics(EvalPrediction(predictions=self.predictions, label_ids=self.labels))
                return {metric_key(key, self.prefix): float(value) for key, value in values.items()}
        except UserCodeError as error:
            self.error = error
            return None

    def _stack(self, rows: list[np.ndarray]) -> np.ndarray:
        """Return one array, shorter rows filled with -100 at their end, as Trainer gathers them."""
        if self._num_pairs:
            starts = range(0, len(rows), 2 * self._num_pairs)
            blocks = [rows[start : start + 2 * self._num_pairs] for start in starts]
            rows = [row for block in blocks for answers in (block[::2], block[1::2]) for row in answers]
        if all(np.ndim(row) == 0 for row in rows):
            return np.asarray(rows)
        length = max(len(row) for row in rows)
        widths = [[(0, length - len(row))] + [(0, 0)] * (np.ndim(row) - 1) for row in rows]
        pairs = zip(rows, widths, strict=True)
        return np.stack([np.pad(row, width, constant_values=IGNORE_INDEX) for row, width in pairs])


def agreed_metrics(results: Sequence[tuple[Found | None, str | None]], error: UserCodeError | None) -> Found:
    """Return what the first process found that has found something.

    Args:
        results: what each process found, such as metrics, and why a function of the task's own failed there.
        error: that error, if it was raised on this process.

    Raises:
        MetricsError: on every process, if a function has failed on one. Its cause is what the function raised if the
            process is alone; several processes all raise the same.
    """
    failure = next((text for _, text in results if text is not None), None)
    if failure is not None:
        raise MetricsError(failure) from (error.__cause__ if error is not None and len(results) == 1 else error)
    return next(metrics for metrics, _ in results if metrics is not None)


def _of_user_code(evaluate: Callable[[], Found]) -> Found:
    """Return what a function returns; an exception of a task's own function is raised as that function raised it."""
    try:
        return evaluate()
    except MetricsError as error:
        raised = error.__cause__
        if raised is None or isinstance(raised, UserCodeError):
            raise
    # Here and not above: within the handler it would get a context that it did not have.
    raise raised


class TaskEvaluator:
    """Evaluates tasks between steps.

    Args:
        run: the present run.
        placement: the model of this process.
        max_tokens: returns how many tokens one pass may hold now.
        collator: packs held-out rows into micro-batches.
        complete: generates completions of held-out prompts, and returns what judges them by task, for tasks with
            `eval_generate`. Tasks share batches, so it is called once for all tasks that are about to be evaluated.
    """

    def __init__(
        self,
        run: Run,
        placement: Placement,
        max_tokens: Callable[[], int],
        collator: ChunkPackingCollator,
        complete: Callable[[Sequence[ActiveTask]], Mapping[str, Judge]],
    ) -> None:
        self._run, self._placement, self._max_tokens, self._collator = run, placement, max_tokens, collator
        self._complete = complete
        # By the loader, as another task may come under the same name; weakly, as tasks leave with their rows.
        self._evaluated: WeakSet[Any] = WeakSet()

    # ------------------------------------------------------------------ in training

    def evaluate_new(self) -> None:
        """Evaluate the tasks that are about to take their first step if they ask for that (`eval_on_start`)."""
        new = [task for task in self._run.table.running if task.step == 0 and task.hyper.eval_on_start]
        new = [task for task in new if task.eval_data and task.loader not in self._evaluated]
        self._evaluated.update(task.loader for task in new)
        judges = self._complete(new)
        for task in new:
            if task.status is TaskStatus.RUNNING:
                self._run.callbacks.call("on_evaluate", self.evaluate(task, judges.get(task.name)))

    def evaluate_if_due(self, names: Sequence[str]) -> None:
        """Evaluate the tasks that are due, and stop those whose callbacks ask for it.

        Args:
            names: the tasks that have just stepped.
        """
        tasks = [task for task in map(self._run.table.__getitem__, names) if task.status is TaskStatus.RUNNING]
        # Reset before callbacks are called, which may ask for the next one.
        is_asked = self._run.control.should_evaluate
        self._run.control.should_evaluate = False
        asking = {task.name for task in tasks if is_asked or self._run.log.callbacks[task.name].control.should_evaluate}
        due = {task.name for task in tasks if task.eval_data and (task.is_evaluation_due or task.name in asking)}
        # All tasks at once, before the first one is evaluated: their completions share batches.
        judges = self._complete([task for task in tasks if task.name in due])
        for task in tasks:
            # Checked again, as callbacks of the tasks before may have ended this one.
            if task.name in due and task.status is TaskStatus.RUNNING:
                self._run.callbacks.call("on_evaluate", self.evaluate(task, judges.get(task.name)))
            if task.status is TaskStatus.RUNNING and self._run.log.callbacks[task.name].control.should_training_stop:
                task.end(TaskStatus.STOPPED_EARLY, "stopped by a callback of the task")

    def quarantine_broken_endings(self) -> None:
        """Fail the tasks whose last update left weights without a finite loss.

        An update is judged by the loss of the step after it, which the last update does not have. If every token goes
        through all weights of a task, a finite loss of one row of the last batch is enough. Otherwise the whole batch
        decides, as some weights belong to single tokens or experts, and a loss may compare rows.
        """
        ended = {task.name: task for task in self._run.table.running if task.step >= task.num_steps}
        if not ended:
            return
        batches = {name: task.loader.batch(task.step - 1) for name, task in ended.items()}
        model = self._placement.model
        adapters = {name: model.adapter_of(name) for name in ended}
        of_all_tokens = {
            name
            for name, adapter in adapters.items()
            if any(maker.is_linear_only(adapter) for maker in model.stream.makers.values())
        }
        # A stage knows only its own layers.
        of_all_tokens = set.intersection(*self._run.processes.gather(of_all_tokens))
        rows: list[Sequence[int]] = []
        for name, batch in batches.items():
            # The shortest row that has a loss, or all rows if none has one.
            with_loss = [(len(row), index) for index, row in enumerate(batch.sequences) if row.num_targets]
            judges = name in of_all_tokens and with_loss
            rows.append([min(with_loss)[1]] if judges else range(len(batch.sequences)))
        broken = self._broken_losses(list(batches.values()), rows)
        in_doubt = [batches[name] for name, error in broken.items() if not error]
        if in_doubt:
            broken = {name: error for name, error in broken.items() if error} | self._broken_losses(in_doubt)
        for name, error in broken.items():
            ended[name].quarantine(error or f"non_finite: loss after the last step, {ended[name].step - 1}")

    def _broken_losses(
        self, batches: Sequence[TaskBatch], only: Sequence[Sequence[int]] | None = None
    ) -> dict[str, str]:
        """Return the tasks without a finite loss, with the error of their own loss, or ""; the same on all processes.

        Args:
            batches: rows of tasks.
            only: indices of the rows that are read, for each batch; by default all.
        """
        micro_batches = self._collator.micro_batches(batches, max_tokens=self._max_tokens(), only=only)
        broken_here = dict.fromkeys(self._placement.executor.non_finite_tasks(micro_batches), "")
        # Each process knows only of errors in its own rows.
        broken_here |= self._placement.model.objectives.take_failures()
        broken: dict[str, str] = {}
        for errors in self._run.processes.gather(broken_here):
            broken |= {name: error or broken.get(name, "") for name, error in errors.items()}
        return broken

    def evaluate(self, task: ActiveTask, judge: Judge | None) -> dict[str, float]:
        """Evaluate a running task, log the metrics, and stop the task if its early stopping says so.

        Exceptions of a task's own functions (`compute_metrics`, metrics of `eval_generate`) fail only that task.

        Args:
            task: the task.
            judge: judges what its adapter made of its held-out prompts, if it has `eval_generate`.

        Returns:
            Metrics under `task/metric` keys; empty if the evaluation failed.
        """
        log, best = self._run.log, task.best
        parts: list[tuple[dict[str, float], dict[str, float]]] = []
        try:
            for prefix, data in task.eval_data.items():
                parts.append(self._timed(task, data, prefix, judge, log.note_user_code))
            metrics = {key: value for part, _ in parts for key, value in part.items()}
            # As in Trainer, an evaluation before the first step does not count for the best one.
            is_best = task.step > 0 and best.update(metrics, task.step)
        except Exception as error:
            # Everything in an evaluation except this task's own functions serves all tasks, so a fault there is ours.
            may_be_of_user = task.task.has_own_metrics and not isinstance(error, ProcessError)
            if not may_be_of_user and not isinstance(error, MetricsError | ConfigError):
                raise
            log_warning(_logger, f'the evaluation of task "{task.name}" failed', error)
            reason = str(error) if isinstance(error, MetricsError) else describe_error(error)
            task.quarantine(f"evaluation failed: {reason}")
            return {}
        logs: dict[str, float] = {}
        for part, times in parts:
            logs |= log.evaluation(task, part, times)
            log.callbacks[task.name].call("on_evaluate", metrics={**part, **times})
        if task.step > 0 and self._run.is_in_train and task.optimizer is not None:
            task.optimizer.follow(metrics.get(best.metric or "", math.nan))
        if is_best:
            # After the callbacks, which compare with the best before this one.
            task.state.best_metric, task.state.best_global_step = best.value, task.step
            if self._run.is_in_train and self._run.args.save_strategy == "best":
                self._run.control.should_save = True
        if is_best and best.keeps_weights:
            # On the CPU, where they cost no device memory; cloned, since `cpu()` returns the parameter itself there.
            # Kept before they are saved: a failed write must not cost the best weights.
            parameters = self._placement.model.task_parameters(task.name)
            task.best_weights = {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
            self._run.saver.save_best(task)
        rule = task.task.early_stopping
        # A callback may have failed it meanwhile, and that is how it ended.
        if rule is None or best.bad_evaluations < rule.patience or task.status.is_final:
            return logs
        if best.value is not None:
            reason = f"{rule.metric} has not improved for {rule.patience} evaluations; best {best.value:.6g} at step"
            task.end(TaskStatus.STOPPED_EARLY, f"{reason} {best.step}")
        elif math.isfinite(loss := metrics[f"{next(iter(task.eval_data))}_loss"]):
            reason = f"{rule.metric} was no finite number in any of {best.bad_evaluations} evaluations"
            task.end(TaskStatus.STOPPED_EARLY, reason)
        else:  # keeps no weights that have diverged
            task.quarantine(f"non_finite: the loss of its evaluation is {loss} at step {task.step}")
        return logs

    # ------------------------------------------------------------------ metrics

    def metrics(self, task: ActiveTask, judge: Judge | None, rows: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Return a task's metrics and change nothing; exceptions of its own functions are raised unchanged.

        Args:
            task: the task.
            judge: judges what its adapter made of its held-out prompts, if it has `eval_generate`.
            rows: tokenised rows by the prefix of their metrics; by default the held-out rows of the task.

        Raises:
            ConfigError: if the task has no held-out rows.
            MetricsError: with several processes, if its own functions fail on one.
        """
        rows = task.eval_data if rows is None else rows
        if not rows:
            raise ConfigError(f"tasks.{task.name}.eval_dataset must be held-out rows, to evaluate the task, got None.")
        results = _of_user_code(lambda: [self._timed(task, data, prefix, judge)[0] for prefix, data in rows.items()])
        return {key: value for part in results for key, value in part.items()}

    def predict(self, task: ActiveTask, data: Any, prefix: str) -> PredictionOutput:
        """Return predictions and labels of tokenised rows, with their metrics and times; as `metrics` otherwise."""
        started = time.time()
        prediction, num_batches = _of_user_code(lambda: self._evaluate_rows(task, data, prefix, collects=True))
        times = speed_metrics(prefix, started, num_samples=len(data), num_steps=num_batches)
        return prediction._replace(metrics={**cast(Any, prediction.metrics), **times})

    def _timed(
        self,
        task: ActiveTask,
        data: Any,
        prefix: str,
        judge: Judge | None,
        listener: Listener = ignore_timing,
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the metrics of rows, those of completions included, and the times of this, under Trainer's names."""
        started = time.time()
        prediction, num_batches = self._evaluate_rows(task, data, prefix, listener)
        metrics = cast(dict[str, float], prediction.metrics)
        if judge is not None:
            metrics |= judge(listener)
        return metrics, speed_metrics(prefix, started, num_samples=len(data), num_steps=num_batches)

    def _evaluate_rows(
        self, task: ActiveTask, data: Any, prefix: str, listener: Listener = ignore_timing, *, collects: bool = False
    ) -> tuple[PredictionOutput, int]:
        """Return the metrics of a task, each under a key that begins with `prefix`; every process calls this.

        These are `eval_loss` (the mean over all terms of the task's loss), further metrics of its objective, and the
        results of its `compute_metrics`. With `collects`, also the predictions and labels. The number is that of the
        batches.
        """
        model, executor = self._placement.model, self._placement.executor
        is_paired = data[0].is_one_term and data[0].starts
        kept = _UserMetrics(task.task, prefix, self._run.args.per_device_eval_batch_size if is_paired else 0)
        with in_mode(model, training=False), torch.no_grad(), executor.precision():
            metrics, failure, num_batches = self._loss_metrics(task, data)
            metrics = {f"{prefix}{key.removeprefix('eval')}": value for key, value in metrics.items()}
            prediction: PredictionOutput | None = PredictionOutput(cast(Any, None), None, metrics)
            if task.task.compute_metrics is not None or collects:
                has_logits = False
                batches = held_out_batches(task, data, self._max_tokens())
                for number, batch in batches_of_replica(batches, self._run.replica, self._run.layout.num_replicas):
                    # One pass holds the whole batch, even if a single row is longer than a pass may be: logits
                    # need whole rows.
                    (micro_batch,) = self._collator.micro_batches([batch], max_tokens=batch.num_tokens)
                    logits = executor.sequence_logits(micro_batch)
                    has_logits = logits is not None
                    if logits is not None and number is not None:
                        kept.add(number, logits, list(model.objectives.of(task.name).head.labels(batch, micro_batch)))
                computed = kept.result(self._run.of_replicas, computes=has_logits)
                # As in Trainer, `compute_metrics` cannot set the loss.
                loss = {f"{prefix}_loss": metrics[f"{prefix}_loss"]}
                prediction = None if computed is None else prediction._replace(metrics={**metrics, **computed, **loss})
                if prediction is not None and collects:
                    prediction = prediction._replace(predictions=cast(Any, kept.predictions), label_ids=kept.labels)
        # After the passes: all processes have come through them, so none waits for the one that failed.
        error = kept.error if failure is None else UserCodeError(failure)
        gathered = executor.sync.gather((prediction, None if error is None else str(error), kept.seconds))
        agreed = agreed_metrics([(result, text) for result, text, _ in gathered], error)
        if task.task.compute_metrics is not None:
            listener(task.name, "compute_metrics", max(seconds for _, _, seconds in gathered))
        return agreed, num_batches

    def _loss_metrics(self, task: ActiveTask, dataset: Any) -> tuple[dict[str, float], str | None, int]:
        """Return the metrics of the objective from its mean loss over all rows, its failure, number of batches."""
        objectives, max_tokens = self._placement.model.objectives, self._max_tokens()
        objective, totals = objectives.of(task.name), None
        if objective.uses_totals or dataset[0].token_columns:
            totals = batch_totals(TaskBatch(task.name, 0, 0, tuple(dataset[row] for row in range(len(dataset)))))
        sums: dict[int, tuple[float, int, list[float]]] = {}
        # A batch of several passes is packed better; if replicas share the rows, more batches are shared more evenly.
        limit = 8 * max_tokens if self._run.layout.num_replicas == 1 else max_tokens
        batches = held_out_batches(task, dataset, limit, totals, is_as_trained=True)
        for number, batch in batches_of_replica(batches, self._run.replica, self._run.layout.num_replicas):
            micro_batches = self._collator.micro_batches([batch], max_tokens=max_tokens)
            result = self._placement.executor.forward_sums(micro_batches)
            self._run.processes.wait_for_device()
            loss = result.losses[task.name].item()
            if number is not None:
                # Sums, not means, are exchanged: batches have unequal numbers of terms. If losses divide by totals,
                # those are of all rows, and batches give parts of the mean already.
                count = batch.num_targets if totals is None else 1
                statistics = result.statistics.get(task.name, torch.zeros(0)) * count
                sums[number] = loss * count, count, statistics.tolist()
        failures = self._run.of_replicas(objectives.take_failures().get(task.name))
        losses, counts, parts = zip(*merged(self._run.of_replicas(sums)).values(), strict=True)
        terms = sum(counts) if totals is None else 1
        means = [sum(values) / terms for values in zip(*parts, strict=True)]
        statistics = dict(zip(objectives.statistic_names(task.name), means, strict=True))
        return objective.metrics(sum(losses) / terms, statistics), next(filter(None, failures), None), len(losses)
