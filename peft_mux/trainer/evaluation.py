"""`OwnMetrics`: a task's `compute_metrics` and `preprocess_logits_for_metrics`, called as `Trainer` calls them.

What they raise is kept until all passes of the evaluation are over: other processes may be waiting for them.
"""

# MERGED: Evaluation of one task on its held-out rows, through the same packed forward pass as training.
# MERGED: Completions of held-out prompts: those of several tasks in mixed batches, and what each task makes of its own.
# MERGED: `TaskEvaluator`: evaluates running tasks on their held-out rows and follows their early stopping.

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from peft_mux.checkpoint.saver import Saver
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX, Arrange, TaskBatch, batch_totals, prefix_trie
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.engine.work import StepExecutor
from peft_mux.errors import ConfigError, MetricsError, ProcessError
from peft_mux.modeling.generation.decoding import generate
from peft_mux.modeling.generation.options import GenerationRequest, mean_metric
from peft_mux.reporting.run_log import RunLog
from peft_mux.task import Task, TaskStatus, metric_key
from peft_mux.user_code import Listener, UserCodeError, describe_error, guard_user_code, ignore_timing


class OwnMetrics:
    """Collects predictions and labels of one evaluation.

    Args:
        task: the task whose functions are called.

    Attributes:
        error: that the functions have raised something, its cause; none of them is called after it.
        seconds: how long the functions took here.
    """

    def __init__(self, task: Task) -> None:
        """Start without rows."""
        self.task = task
        self.error: UserCodeError | None = None
        self.seconds = 0.0
        self._rows: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def add(self, number: int, logits: Sequence[torch.Tensor], labels: Sequence[np.ndarray]) -> None:
        """Take in the logits of a batch's sequences, `[L, V]` or `[C]` each, and their labels, `[L]` or a number.

        Args:
            number: number of the batch in the order of the rows.
            logits: the logits of each sequence.
            labels: the labels of each sequence, in the same order.
        """
        if self.error is not None:
            return
        try:
            with self._guard():
                predictions = [self._prediction(*row) for row in zip(logits, labels, strict=True)]
        except UserCodeError as error:
            # Kept, not raised: the passes that are left need every process.
            self.error = error
            return
        self._rows[number] = predictions, list(labels)

    def gather(self, gather: Callable[[Any], list[Any]], *, computes: bool) -> None:
        """Take in the rows and the error of all processes; every one of them calls this.

        Args:
            gather: returns the values that all processes call it with.
            computes: whether this process computes metrics; others only give what they have.
        """
        gathered = gather((self._rows, None if self.error is None else str(self.error)))
        self._rows = {number: rows for one, _ in gathered for number, rows in one.items()} if computes else {}
        failure = next((text for _, text in gathered if text is not None), None)
        if failure is not None and self.error is None:
            self.error = UserCodeError(failure)

    def result(self) -> dict[str, float] | None:
        """Return what `compute_metrics` makes of them; `None` where it has failed, or no row came."""
        if not self._rows or self.error is not None:
            return None
        from transformers import EvalPrediction

        compute_metrics = self.task.compute_metrics
        assert compute_metrics is not None, "only made for tasks with compute_metrics"
        try:
            # What these functions make of the rows decides whether they can be stacked, so that is guarded, too.
            with self._guard():
                batches = [self._rows[number] for number in sorted(self._rows)]
                predictions = _stack([row for rows, _ in batches for row in rows])
                labels = _stack([row for _, rows in batches for row in rows])
                found = compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels))
                return {metric_key(key): float(value) for key, value in found.items()}
        except UserCodeError as error:
            self.error = error
            return None

    def _guard(self) -> AbstractContextManager[None]:
        return guard_user_code(self.task.name, "compute_metrics", self._add_seconds)

    def _add_seconds(self, task: str, what: str, seconds: float) -> None:
        self.seconds += seconds

    def _prediction(self, logits: torch.Tensor, labels: np.ndarray) -> np.ndarray:
        preprocess = self.task.preprocess_logits_for_metrics
        if preprocess is not None:
            # As a batch of one row, which is what Trainer hands to these functions.
            logits = preprocess(logits[None], torch.as_tensor(labels)[None])[0]
        # In fp32, as numpy has no bfloat16.
        return logits.float().cpu().numpy() if logits.is_floating_point() else logits.cpu().numpy()


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    """Return one array, shorter rows filled with -100 at their end, as Trainer gathers them."""
    if all(np.ndim(row) == 0 for row in rows):
        return np.asarray(rows)
    length = max(len(row) for row in rows)
    padded = []
    for row in rows:
        widths = [(0, length - len(row))] + [(0, 0)] * (np.ndim(row) - 1)
        padded.append(np.pad(row, widths, constant_values=IGNORE_INDEX))
    return np.stack(padded)


@dataclass(frozen=True, slots=True)
class EvaluationShare:
    """Which batches of held-out rows the replica of this process evaluates: one in every `num_replicas`.

    Attributes:
        replica: number of the replica, from 0.
        num_replicas: number of replicas that share the rows.
        gather: returns the values that all processes call it with, by rank.
    """

    replica: int = 0
    num_replicas: int = 1
    gather: Callable[[Any], list[Any]] = field(default=lambda value: [value])

    def own_batches(self, batches: Iterable[TaskBatch]) -> Iterator[tuple[int | None, TaskBatch]]:
        """Yield this replica's batches with their numbers.

        All replicas get equally many, as some executors need every process for every pass: where the last round has
        too few, the last batch is given out once more, without a number, and what comes of it is left out.

        Args:
            batches: all held-out rows of a task; the same on every replica.
        """
        number, batch = -1, None
        for number, batch in enumerate(batches):
            if number % self.num_replicas == self.replica:
                yield number, batch
        num_left = (number + 1) % self.num_replicas
        if batch is not None and 0 < num_left <= self.replica:
            yield None, batch

    def merged(self, own: dict[int, Any]) -> dict[int, Any]:
        """Return what all replicas have found, by number of the batch and in that order; every process calls this.

        Args:
            own: what this replica has found, by number of the batch.
        """
        found = [own] if self.num_replicas == 1 else self.gather(own)
        # Processes of one replica found the same; by number, each batch counts once.
        merged = {number: value for one in found for number, value in one.items()}
        # In the order of the rows, so that every process adds up alike, to the same bits.
        return {number: merged[number] for number in sorted(merged)}


def evaluate_task(
    executor: StepExecutor,
    task: Task,
    dataset: Any,
    collator: ChunkPackingCollator,
    *,
    max_tokens: int,
    share: EvaluationShare | None = None,
    listener: Listener = ignore_timing,
    arrange: Arrange | None = None,
    arranged_rows: int = 1,
    shares_prefixes: bool = False,
) -> dict[str, float]:
    """Return the metrics of one task on held-out rows.

    Args:
        executor: holds the model, its device and precision.
        task: the task whose adapter is evaluated.
        dataset: tokenised rows (`__len__`, `__getitem__`).
        collator: packs the rows into micro-batches.
        max_tokens: greatest number of tokens of one pass.
        share: which of the rows this process evaluates; by default all.
        listener: told how long the task's own functions took, on the process where they took longest.
        arrange: makes the rows of a batch of rows of the dataset; `None` where they are the same.
        arranged_rows: number of rows of each batch where they are arranged.
        shares_prefixes: whether what rows begin with alike may be computed once.

    Returns:
        `eval_loss`, the mean over all terms of the task's loss, what else its objective makes of that, and what
        `compute_metrics` returns, each under a key that begins with `eval_`. Where there are several processes they
        all call this, and all get the same numbers.

    Raises:
        MetricsError: on all of these, if the task's own functions, its loss among them, fail on one. Its cause is what
            `compute_metrics` raised where the process is alone.
    """
    model, share = executor.mux_model, share or EvaluationShare()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), executor.precision():
            batches = _batches if arrange is None else partial(_arranged_batches, arrange, arranged_rows)
            batches = partial(_sharing_batches, batches) if shares_prefixes else batches
            metrics, failure = _loss_metrics(executor, task, dataset, collator, max_tokens, share, batches)
            own, found = None, metrics
            if task.compute_metrics is not None:
                own = _own_metrics(executor, task, dataset, collator, max_tokens, share)
                computed = own.result()
                # As in Trainer, whose loss nobody else may set.
                found = None if computed is None else {**metrics, **computed, "eval_loss": metrics["eval_loss"]}
    finally:
        model.train(was_training)
    # Outside of the passes: all processes have come through them, so nobody waits for the one that failed.
    agreed, seconds = _agreed(executor, found, own, failure)
    if own is not None:
        listener(task.name, "compute_metrics", seconds)
    return agreed


def _loss_metrics(
    executor: StepExecutor,
    task: Task,
    dataset: Any,
    collator: ChunkPackingCollator,
    max_tokens: int,
    share: EvaluationShare,
    batches: Callable[..., Iterator[TaskBatch]],
) -> tuple[dict[str, float], str | None]:
    """Return what the task's objective makes of its mean loss over all held-out rows; and why it failed, if it did."""
    objectives = executor.mux_model.objectives
    objective, totals = objectives.of(task.name), _totals(executor, task, dataset)
    sums: dict[int, tuple[float, int, list[float]]] = {}
    # A batch of several passes is packed better; where replicas share the rows, more batches are shared more evenly.
    limit = 8 * max_tokens if share.num_replicas == 1 else max_tokens
    for number, batch in share.own_batches(batches(task.name, dataset, limit, totals)):
        micro_batches = collator.micro_batches([batch], max_tokens=max_tokens)
        found = executor.forward_sums(micro_batches)
        loss = found.losses[task.name].item()
        if number is not None:
            # Sums, not means, travel between replicas: batches have unequal numbers of terms. Where losses divide by
            # totals, those are of all rows, and what batches give is parts of the mean already.
            count = batch.num_targets if totals is None else 1
            statistics = found.statistics.get(task.name, torch.zeros(0)) * count
            sums[number] = loss * count, count, statistics.tolist()
    own = objectives.take_failures().get(task.name)
    failures = [own] if share.num_replicas == 1 else share.gather(own)
    losses, counts, parts = zip(*share.merged(sums).values(), strict=True)
    terms = sum(counts) if totals is None else 1
    means = [sum(own) / terms for own in zip(*parts, strict=True)]
    statistics = dict(zip(objectives.statistic_names(task.name), means, strict=True))
    return objective.metrics(sum(losses) / terms, statistics), next(filter(None, failures), None)


def _totals(executor: StepExecutor, task: Task, dataset: Any) -> Mapping[str, float] | None:
    """Return what the task's loss divides by, over all held-out rows; `None` where it is the number of terms alone."""
    if not executor.mux_model.objectives.of(task.name).uses_totals and not dataset[0].token_columns:
        return None
    return batch_totals(TaskBatch(task.name, 0, 0, tuple(dataset[row] for row in range(len(dataset)))))


def _own_metrics(
    executor: StepExecutor,
    task: Task,
    dataset: Any,
    collator: ChunkPackingCollator,
    max_tokens: int,
    share: EvaluationShare,
) -> OwnMetrics:
    """Return the metrics of the task's own functions, with all rows; none of them where this process has no logits."""
    own, has_logits = OwnMetrics(task), False
    for number, batch in share.own_batches(_batches(task.name, dataset, max_tokens)):
        # One pass holds the whole batch, even where a single row is longer than a pass may be: logits need whole rows.
        (micro_batch,) = collator.micro_batches([batch], max_tokens=batch.num_tokens)
        logits = executor.sequence_logits(micro_batch)
        has_logits = logits is not None
        if logits is not None and number is not None:
            own.add(number, logits, list(executor.mux_model.objectives.head.labels(batch, micro_batch)))
    if share.num_replicas > 1:
        # Every process, also one without logits: gathering is collective.
        own.gather(share.gather, computes=has_logits)
    return own


def _agreed(
    executor: StepExecutor, metrics: dict[str, float] | None, own: OwnMetrics | None, loss_failure: str | None
) -> tuple[dict[str, float], float]:
    """Return the metrics of the first process that has them, or fail where one has failed, its own loss among that.

    Returns:
        The metrics, and the seconds that the task's own functions took on the slowest process.
    """
    error = None if own is None else own.error
    error = error if loss_failure is None else UserCodeError(loss_failure)
    gathered = executor.gather((metrics, None if error is None else str(error), 0.0 if own is None else own.seconds))
    failure = next((text for _, text, _ in gathered if text is not None), None)
    if failure is not None:
        # Alone, a process has what the function raised; where there are several, all raise one and the same error.
        raise MetricsError(failure) from (error.__cause__ if error is not None and len(gathered) == 1 else error)
    return next(found for found, _, _ in gathered if found is not None), max(seconds for _, _, seconds in gathered)


def _batches(name: str, dataset: Any, limit: int, totals: Mapping[str, float] | None = None) -> Iterator[TaskBatch]:
    """Yield the rows in order, in batches of at most `limit` tokens, or of one row."""
    sequences: list[Any] = []
    num_tokens = 0
    for row in range(len(dataset)):
        sequence = dataset[row]
        if sequences and num_tokens + len(sequence) > limit:
            yield TaskBatch(name, 0, 0, tuple(sequences), totals)
            sequences, num_tokens = [], 0
        sequences.append(sequence)
        num_tokens += len(sequence)
    if sequences:
        yield TaskBatch(name, 0, 0, tuple(sequences), totals)


def _sharing_batches(batches: Callable[..., Iterator[TaskBatch]], *arguments: Any) -> Iterator[TaskBatch]:
    """Yield the same batches with what their rows begin with alike."""
    for batch in batches(*arguments):
        yield replace(batch, trie=prefix_trie(batch.sequences))


def _arranged_batches(
    arrange: Arrange, num_rows: int, name: str, dataset: Any, limit: int, totals: Mapping[str, float] | None
) -> Iterator[TaskBatch]:
    """Yield the rows in order, in batches of so many rows, arranged as in training, whatever a pass may hold."""
    for start in range(0, len(dataset), num_rows):
        rows = tuple(dataset[row] for row in range(start, min(start + num_rows, len(dataset))))
        yield TaskBatch(name, 0, 0, arrange(rows), totals)


_BATCHES_OF_PASSES = 4
"""Tokens of a batch of completions, in passes: no activations are kept for a backward pass."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Held-out prompts of a task, what its adapter made of them, and what the rows ask for; texts in one order."""

    prompts: list[str]
    completions: list[str]
    references: list[str]


def generate_answers(
    executor: StepExecutor,
    runs: Sequence[TaskRun],
    tokenizer: Any,
    *,
    max_tokens: int,
    share: EvaluationShare | None = None,
) -> dict[str, Answers]:
    """Return the answers of each task that has prompts; all of them are generated together.

    Args:
        executor: holds the model, whole, its device and precision.
        runs: the tasks; those without prompts are passed over.
        tokenizer: reads completions as text.
        max_tokens: greatest number of tokens of one pass.
        share: which of the rows this process generates for; by default all. Where there are several processes they
            all call this, with the same tasks, and all get the same answers.
    """
    share = share or EvaluationShare()
    runs = [run for run in runs if run.eval_prompts]
    if not runs:
        return {}
    numbered = list(enumerate(_requests(runs)))[share.replica :: share.num_replicas]
    with executor.precision():
        found = generate(
            executor.mux_model,
            [request for _, request in numbered],
            processing_class=tokenizer,
            max_batch_tokens=_BATCHES_OF_PASSES * max_tokens,
        )
    texts = share.merged({number: one.text for (number, _), one in zip(numbered, found, strict=True)})
    completions = iter(texts.values())
    return {
        run.name: Answers(
            [row.prompt for row in run.eval_prompts],
            [next(completions) for _ in run.eval_prompts],
            [row.reference for row in run.eval_prompts],
        )
        for run in runs
    }


def _requests(runs: Sequence[TaskRun]) -> list[GenerationRequest]:
    """Return all prompts in order, with seeds that do not depend on which process they go to."""
    requests = []
    for run in runs:
        options = run.task.generate_options
        assert options is not None, "tasks have prompts where they generate"
        requests += [
            GenerationRequest(task=run.name, prompt=row.ids, options=options, seed=options.seed + number)
            for number, row in enumerate(run.eval_prompts)
        ]
    return requests


def answer_metrics(
    task: Task, answers: Answers, *, share: EvaluationShare | None = None, listener: Listener = ignore_timing
) -> dict[str, float]:
    """Return the metrics of a task's answers, each under a key that begins with `eval_`.

    Args:
        task: the task, which says which metrics.
        answers: its answers, the same on every process.
        share: tells of other processes, all of which call this; by default there is none.
        listener: told how long functions of the task's own took here.

    Raises:
        MetricsError: on every process, if a function of the task's own fails on one. Its cause is what was raised where
            the process is alone.
    """
    options, share = task.generate_options, share or EvaluationShare()
    assert options is not None, "only asked of tasks that generate"
    metrics: dict[str, float] = {}
    error: UserCodeError | None = None
    try:
        for metric in options.metrics:
            if isinstance(metric, str):
                metrics[f"eval_{metric}"] = mean_metric(metric, answers.completions, answers.references)
                continue
            with guard_user_code(task.name, "eval_generate", listener):
                # Copies, which the function may change.
                own = metric(list(answers.prompts), list(answers.completions), list(answers.references))
                metrics |= {metric_key(key): float(value) for key, value in own.items()}
    except UserCodeError as raised:
        error = raised
    return _agreed_generated(metrics, error, share)


def _agreed_generated(
    metrics: dict[str, float], error: UserCodeError | None, share: EvaluationShare
) -> dict[str, float]:
    """Return the metrics of the first process, or fail where one has failed."""
    failure = None if error is None else str(error)
    gathered = [(metrics, failure)] if share.num_replicas == 1 else share.gather((metrics, failure))
    failures = [text for _, text in gathered if text is not None]
    if failures:
        raise MetricsError(failures[0]) from (error.__cause__ if error is not None and len(gathered) == 1 else error)
    return gathered[0][0]


_logger = logging.getLogger(__name__)


class TaskEvaluator:
    """Evaluates one task at a time, between steps.

    Args:
        collator: packs held-out rows into micro-batches.
        log: takes the metrics of each evaluation.
        saver: writes the best adapters.
        executor: returns what runs passes through the model as it is placed now.
        max_tokens: returns how many tokens one pass may hold now.
        share: returns which held-out rows this process evaluates now.
        tokenizer: reads completions as text; `None` where no task generates.
    """

    def __init__(
        self,
        collator: ChunkPackingCollator,
        log: RunLog,
        saver: Saver,
        *,
        executor: Callable[[], StepExecutor],
        max_tokens: Callable[[], int],
        share: Callable[[], EvaluationShare],
        tokenizer: Any = None,
    ) -> None:
        """Evaluate nothing yet."""
        self._collator, self._log, self._saver, self._tokenizer = collator, log, saver, tokenizer
        self._executor, self._max_tokens, self._share = executor, max_tokens, share

    def generate(self, runs: Sequence[TaskRun]) -> dict[str, Answers]:
        """Return what the tasks among `runs` that have `eval_generate` answer to their held-out prompts, by name.

        They share batches, so it is called once for all tasks that are about to be evaluated.
        """
        if not any(run.eval_prompts for run in runs):
            return {}
        return generate_answers(
            self._executor(), runs, self._tokenizer, max_tokens=self._max_tokens(), share=self._share()
        )

    def metrics(self, run: TaskRun, answers: Answers | None = None) -> dict[str, float]:
        """Return a task's metrics and change nothing; what its own functions raise comes out as it is.

        Args:
            run: the task.
            answers: what it answers to its held-out prompts, where it has `eval_generate`; generated where `None`.

        Raises:
            ConfigError: if the task has no held-out rows.
            MetricsError: where there are several processes, if its own functions fail on one.
        """
        try:
            return self._metrics(run, answers)
        except MetricsError as error:
            raised = error.__cause__
            if raised is None or isinstance(raised, UserCodeError):
                raise
        # Here and not above: within the handler it would get a context that it did not have.
        raise raised

    def _metrics(self, run: TaskRun, answers: Answers | None, listener: Listener = ignore_timing) -> dict[str, float]:
        if run.eval_data is None:
            raise ConfigError(f"tasks.{run.name}.eval_dataset: got None; allowed: held-out rows, to evaluate the task.")
        metrics = evaluate_task(
            self._executor(),
            run.task,
            run.eval_data,
            self._collator,
            max_tokens=self._max_tokens(),
            share=self._share(),
            listener=listener,
            arrange=run.loader.arrange,
            arranged_rows=run.hyper.train_batch_size,
            shares_prefixes=run.loader.shares_prefixes,
        )
        if not run.eval_prompts:
            return metrics
        answers = answers or self.generate([run])[run.name]
        return {**metrics, **answer_metrics(run.task, answers, share=self._share(), listener=listener)}

    def evaluate(self, run: TaskRun, answers: Answers | None = None) -> dict[str, float]:
        """Evaluate a running task, log what came out, and stop it where its early stopping says so.

        What a task's own functions raise (`compute_metrics`, metrics of `eval_generate`) fails that task and no other.

        Args:
            run: the task.
            answers: what it answers to its held-out prompts, where it has `eval_generate`; generated where `None`.

        Returns:
            Metrics under `task/metric` keys; empty where the evaluation failed.
        """
        try:
            metrics = self._metrics(run, answers, self._log.delays.note)
            # What was there before the first step is none of the evaluations that are compared, as in Trainer.
            is_best = run.step > 0 and run.best.update(metrics, run.step)
        except Exception as error:
            # Everything of the evaluation but this task's own functions serves all tasks; a fault there is ours.
            is_own = run.task.has_own_metrics and not isinstance(error, ProcessError)
            is_own = is_own or isinstance(error, MetricsError)
            if not is_own and not isinstance(error, ConfigError):
                raise
            _logger.warning('the evaluation of task "%s" failed', run.name, exc_info=True)
            reason = str(error) if isinstance(error, MetricsError) else describe_error(error)
            run.quarantine(f"evaluation failed: {reason}")
            return {}
        logs = self._log.evaluation(run, metrics)
        if answers is not None:
            self._log_answers(run, answers)
        self._log.callbacks[run.name].call("on_evaluate", metrics=dict(metrics))
        if is_best:
            # Behind the callbacks, which compare with the best before this one.
            run.state.best_metric, run.state.best_global_step = run.best.value, run.step
        if is_best and run.best.keeps_weights:
            # Kept before it is saved: a failed write must not cost the best weights.
            run.keep_best(self._executor().mux_model.task_parameters(run.name))
            self._saver.save_best(run)
        # A callback may have failed it meanwhile, and that is how it ended.
        if run.best.is_exhausted and not run.status.is_final:
            _stop_early(run, metrics["eval_loss"])
        return logs

    def _log_answers(self, run: TaskRun, answers: Answers) -> None:
        """Show and write down the first few answers."""
        options = run.task.generate_options
        assert options is not None, "tasks have answers where they generate"
        texts = zip(answers.prompts, answers.completions, answers.references, strict=True)
        for prompt, completion, reference in islice(texts, options.num_logged):
            self._log.say(f"{run.name}: ...{prompt[-60:]!r} -> {completion[:60]!r} (wanted: {reference[:60]!r})")
            row = {"prompt": prompt, "completion": completion, "reference": reference}
            self._log.event("completion", task=run.name, step=run.step, **row)


def _stop_early(run: TaskRun, loss: float) -> None:
    """End a task whose patience has run out; one that never had a usable value keeps no weights that have diverged."""
    rule = run.task.early_stopping
    assert rule is not None, "patience runs out only where early stopping is set"
    if run.best.value is not None:
        best = f"best {run.best.value:.6g} at step {run.best.step}"
        reason = f"{rule.metric} has not improved for {rule.patience} evaluations; {best}"
        run.end(TaskStatus.STOPPED_EARLY, reason)
    elif math.isfinite(loss):
        reason = f"{rule.metric} was no finite number in any of {run.best.bad_evaluations} evaluations"
        run.end(TaskStatus.STOPPED_EARLY, reason)
    else:
        run.quarantine(f"non_finite: the loss of its evaluation is {loss} at step {run.step}")
