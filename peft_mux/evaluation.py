"""Evaluation of one task on its held-out rows, through the same packed forward pass as training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from peft_mux.data.batch import TaskBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.work import StepExecutor
from peft_mux.errors import ConfigError, MetricsError, closest
from peft_mux.own_metrics import OwnMetrics, told_of
from peft_mux.task import Task


@dataclass(frozen=True, slots=True)
class RowShare:
    """Which held-out rows the replica of this process evaluates: every so-many-th batch of them.

    Attributes:
        replica: number of it.
        num_replicas: that share the rows.
        gather: returns what every process gives it, by rank.
    """

    replica: int = 0
    num_replicas: int = 1
    gather: Callable[[Any], list[Any]] = field(default=lambda value: [value])

    def of(self, batches: Iterable[TaskBatch]) -> Iterator[tuple[int | None, TaskBatch]]:
        """Yield this replica's batches with their numbers.

        All replicas get equally many, as some executors need every process for every pass: where the last round has
        too few, the last batch is given out once more, without a number, and what comes of it is left out.
        """
        number, batch = -1, None
        for number, batch in enumerate(batches):
            if number % self.num_replicas == self.replica:
                yield number, batch
        num_left = (number + 1) % self.num_replicas
        if batch is not None and 0 < num_left <= self.replica:
            yield None, batch

    def whole(self, own: dict[int, Any]) -> dict[int, Any]:
        """Return what all replicas have found, by number of the batch and in that order; every process calls this."""
        found = [own] if self.num_replicas == 1 else self.gather(own)
        merged = {number: value for one in found for number, value in one.items()}
        return {number: merged[number] for number in sorted(merged)}


def evaluate_task(
    executor: StepExecutor,
    task: Task,
    dataset: Any,
    collator: ChunkPackingCollator,
    *,
    max_tokens: int,
    share: RowShare | None = None,
) -> dict[str, float]:
    """Return the metrics of one task on held-out rows.

    Args:
        executor: holds the model, its device and precision.
        task: whose adapter is evaluated.
        dataset: tokenised rows (`__len__`, `__getitem__`).
        collator: packs the rows.
        max_tokens: of one pass.
        share: of the rows that this process evaluates; by default all.

    Returns:
        `eval_loss` (mean over all target tokens, or over all rows of a classifier), `eval_perplexity` (language
        models) and what `compute_metrics` returns, each under a key that begins with `eval_`. Where there are several
        processes they all call this, and all get the same numbers.

    Raises:
        MetricsError: on all of these, if the task's own functions fail on one.
    """
    model, share = executor.mux_model, share or RowShare()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), executor.precision():
            metrics = _loss_metrics(executor, task, dataset, collator, max_tokens, share)
            if task.compute_metrics is None:
                found, error = metrics, None
            else:
                own, error = _own_metrics(executor, task, dataset, collator, max_tokens, share)
                found = None if own is None else {**metrics, **own}
    finally:
        model.train(was_training)
    return _of_all(executor, found, error)


def _loss_metrics(
    executor: StepExecutor, task: Task, dataset: Any, collator: ChunkPackingCollator, max_tokens: int, share: RowShare
) -> dict[str, float]:
    sums: dict[int, tuple[float, int]] = {}
    # A batch of several passes is packed better; where replicas share the rows, more batches are shared more evenly.
    limit = 8 * max_tokens if share.num_replicas == 1 else max_tokens
    for number, batch in share.of(_batches(task.name, dataset, limit)):
        micro_batches = collator.micro_batches([batch], max_tokens=max_tokens)
        loss = executor.forward_losses(micro_batches)[task.name].item()
        if number is not None:
            sums[number] = loss * batch.num_targets, batch.num_targets
    totals, counts = zip(*share.whole(sums).values(), strict=True)
    loss = sum(totals) / sum(counts)
    metrics = {"eval_loss": loss}
    if not executor.mux_model.is_classifier:
        metrics["eval_perplexity"] = math.exp(min(loss, 700.0))
    return metrics


def _own_metrics(
    executor: StepExecutor, task: Task, dataset: Any, collator: ChunkPackingCollator, max_tokens: int, share: RowShare
) -> tuple[dict[str, float] | None, Exception | None]:
    """Return what the task's `compute_metrics` gives, or what it raises; neither where this process has no logits."""
    own, has_logits = OwnMetrics(task), False
    for number, batch in share.of(_batches(task.name, dataset, max_tokens)):
        (micro_batch,) = collator.micro_batches([batch], max_tokens=batch.num_tokens)
        logits = executor.sequence_logits(micro_batch)
        has_logits = logits is not None
        if logits is not None and number is not None:
            own.add(number, logits, list(_labels(batch, micro_batch)))
    if share.num_replicas > 1:
        own.share(share.gather, keeps=has_logits)
    return own.result(), own.error


def _of_all(executor: StepExecutor, metrics: dict[str, float] | None, error: Exception | None) -> dict[str, float]:
    """Return the metrics of the first process that has them, or fail where one has failed."""
    told = executor.gather((metrics, told_of(error)))
    if len(told) == 1 and error is not None:
        raise error
    failure = next((failure for _, failure in told if failure is not None), None)
    if failure is not None:
        raise MetricsError(failure) from error
    return next(found for found, _ in told if found is not None)


def _labels(batch: TaskBatch, micro_batch: Any) -> Iterator[np.ndarray]:
    """Yield the labels of each sequence in the order of the stream; unshifted for language models, as in Trainer."""
    if micro_batch.class_labels is not None:
        yield from micro_batch.class_labels.cpu().numpy()
        return
    by_place, place = {}, 0
    for sequence in batch.sequences:
        by_place[place] = sequence.labels
        place += len(sequence)
    for start in micro_batch.cu_seqlens[:-1].tolist():
        yield by_place[int(micro_batch.token_places[start])]


def _batches(name: str, dataset: Any, limit: int) -> Iterator[TaskBatch]:
    """Yield the rows in order, in batches of at most `limit` tokens, or of one row."""
    sequences: list[Any] = []
    num_tokens = 0
    for row in range(len(dataset)):
        sequence = dataset[row]
        if sequences and num_tokens + len(sequence) > limit:
            yield TaskBatch(name, 0, 0, tuple(sequences))
            sequences, num_tokens = [], 0
        sequences.append(sequence)
        num_tokens += len(sequence)
    if sequences:
        yield TaskBatch(name, 0, 0, tuple(sequences))


class BestMetric:
    """Follows the metric that a task's `early_stopping` names.

    Attributes:
        value: best so far, or `None`.
        step: at which it was reached.
        bad_evaluations: since then.
    """

    def __init__(self, task: Task) -> None:
        """Start without any evaluation."""
        self.task = task
        self.value: float | None = None
        self.step = 0
        self.bad_evaluations = 0

    def update(self, metrics: dict[str, float], step: int) -> bool:
        """Take an evaluation in; return whether it is the best so far.

        Raises:
            ConfigError: if the metric is not among those that the task produces.
        """
        rule = self.task.early_stopping
        assert rule is not None, "only used for tasks with early_stopping"
        key = rule.metric if rule.metric.startswith("eval_") else f"eval_{rule.metric}"
        if key not in metrics:
            raise ConfigError(
                f'tasks.{self.task.name}.early_stopping.metric: got "{rule.metric}", which the evaluation does not '
                f"produce; allowed: {', '.join(metrics)}. {closest(key, metrics)}".rstrip()
            )
        value = metrics[key]
        if value != value:  # no number: never the best, and no improvement
            self.bad_evaluations += 1
            return False
        gain = 0.0 if self.value is None else (value - self.value) * (1 if rule.maximise else -1)
        if self.value is None or gain > rule.min_delta:
            self.value, self.step, self.bad_evaluations = value, step, 0
            return True
        self.bad_evaluations += 1
        return False

    @property
    def is_exhausted(self) -> bool:
        """Whether the task's patience has run out."""
        return self.task.early_stopping is not None and self.bad_evaluations >= self.task.early_stopping.patience

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"value": self.value, "step": self.step, "bad_evaluations": self.bad_evaluations}

    def load(self, state: dict[str, Any]) -> None:
        """Take up a state that `state` returned."""
        self.value, self.step, self.bad_evaluations = state["value"], state["step"], state["bad_evaluations"]
