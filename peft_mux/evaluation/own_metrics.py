"""`OwnMetrics`: a task's `compute_metrics` and `preprocess_logits_for_metrics`, called as `Trainer` calls them.

What they raise is kept until all passes of the evaluation are over: other processes may be waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.hyper_parameters import metric_key
from peft_mux.own_code import OwnCodeError, own_code
from peft_mux.task import Task


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
        self.error: OwnCodeError | None = None
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
        except OwnCodeError as error:
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
            self.error = OwnCodeError(failure)

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
        except OwnCodeError as error:
            self.error = error
            return None

    def _guard(self) -> AbstractContextManager[None]:
        return own_code(self.task.name, "compute_metrics", self._add_seconds)

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
