"""Evaluation of one task on its held-out rows, through the same packed forward pass as training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import Arrange, TaskBatch, batch_totals, prefix_trie
from peft_mux.engine.work import StepExecutor
from peft_mux.errors import MetricsError
from peft_mux.evaluation.own_metrics import OwnMetrics
from peft_mux.own_code import Listener, OwnCodeError, nobody
from peft_mux.task import Task


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
    listener: Listener = nobody,
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
    error = error if loss_failure is None else OwnCodeError(loss_failure)
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
