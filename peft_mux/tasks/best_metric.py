"""The best value of the metric that a task is stopped by."""

from __future__ import annotations

import math
from typing import Any

from peft_mux.errors import ConfigError, closest
from peft_mux.task import Task


class BestMetric:
    """Follows the metric that a task's `early_stopping` names.

    Attributes:
        value: best value so far, or `None` before the first evaluation that gave a finite one.
        step: step of the task at which the best value was reached.
        bad_evaluations: number of evaluations since then without an improvement.
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
        if not math.isfinite(value):  # never the best, and no improvement
            self.bad_evaluations += 1
            return False
        gain = 0.0 if self.value is None else (value - self.value) * (1 if rule.maximise else -1)
        # The first number is the best whatever it is; `min_delta` compares only later ones.
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
