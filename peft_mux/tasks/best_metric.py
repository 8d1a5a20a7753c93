"""`BestMetric`: the best evaluation of a task so far, by which it is stopped, and whose adapter it ends with."""

from __future__ import annotations

import math
from typing import Any

from peft_mux.errors import ConfigError
from peft_mux.hyper_parameters import HyperParameters, greater_is_better
from peft_mux.task import Task


class BestMetric:
    """Follows the metric that a task's `early_stopping` or its `metric_for_best_model` names.

    Args:
        task: the task.
        hyper: its complete settings; `None` where `early_stopping` alone counts.

    Attributes:
        metric: key of the metric among those of an evaluation; `None` where none is followed.
        keeps_weights: whether the task ends with the adapter of the best evaluation.
        value: best value so far, or `None` before the first evaluation that gave a finite one.
        step: step of the task at which the best value was reached.
        bad_evaluations: number of evaluations since then without an improvement.
    """

    def __init__(self, task: Task, hyper: HyperParameters | None = None) -> None:
        """Start without any evaluation."""
        self.task, rule = task, task.early_stopping
        name = rule.metric if rule is not None else None if hyper is None else hyper.metric_for_best_model
        self.metric = name if name is None or name.startswith("eval_") else f"eval_{name}"
        given = rule.maximise if rule is not None else None if hyper is None else hyper.greater_is_better
        self._maximises = greater_is_better(name or "") if given is None else given
        self._min_delta = 0.0 if rule is None else rule.min_delta
        self._name = name
        self._field = "metric_for_best_model" if rule is None else "early_stopping.metric"
        self.keeps_weights = rule is not None or (hyper is not None and hyper.load_best_model_at_end)
        self.value: float | None = None
        self.step = 0
        self.bad_evaluations = 0

    def update(self, metrics: dict[str, float], step: int) -> bool:
        """Take an evaluation in; return whether it is the best so far.

        Raises:
            ConfigError: if the metric is not among those that the task produces.
        """
        if self.metric is None:
            return False
        if self.metric not in metrics:
            raise ConfigError(
                f'tasks.{self.task.name}.{self._field}: got "{self._name}", which the evaluation does not '
                f"produce; allowed: {', '.join(metrics)}. Let compute_metrics return it, or name one of these."
            )
        value = metrics[self.metric]
        if not math.isfinite(value):  # never the best, and no improvement
            self.bad_evaluations += 1
            return False
        gain = 0.0 if self.value is None else (value - self.value) * (1 if self._maximises else -1)
        # The first number is the best whatever it is; `min_delta` compares only later ones.
        if self.value is None or gain > self._min_delta:
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
