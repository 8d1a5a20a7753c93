"""Completions of held-out prompts: those of several tasks in mixed batches, and what each task makes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft_mux.engine.work import StepExecutor
from peft_mux.errors import MetricsError
from peft_mux.evaluation.evaluate import EvaluationShare
from peft_mux.generation.answers import mean_metric
from peft_mux.generation.completion import GenerationRequest
from peft_mux.generation.generate import generate
from peft_mux.hyper_parameters import metric_key
from peft_mux.own_code import Listener, OwnCodeError, nobody, own_code
from peft_mux.task import Task
from peft_mux.tasks.task_run import TaskRun

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
    task: Task, answers: Answers, *, share: EvaluationShare | None = None, listener: Listener = nobody
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
    error: OwnCodeError | None = None
    try:
        for metric in options.metrics:
            if isinstance(metric, str):
                metrics[f"eval_{metric}"] = mean_metric(metric, answers.completions, answers.references)
                continue
            with own_code(task.name, "eval_generate", listener):
                # Copies, which the function may change.
                own = metric(list(answers.prompts), list(answers.completions), list(answers.references))
                metrics |= {metric_key(key): float(value) for key, value in own.items()}
    except OwnCodeError as raised:
        error = raised
    return _agreed(metrics, error, share)


def _agreed(metrics: dict[str, float], error: OwnCodeError | None, share: EvaluationShare) -> dict[str, float]:
    """Return the metrics of the first process, or fail where one has failed."""
    failure = None if error is None else str(error)
    gathered = [(metrics, failure)] if share.num_replicas == 1 else share.gather((metrics, failure))
    failures = [text for _, text in gathered if text is not None]
    if failures:
        raise MetricsError(failures[0]) from (error.__cause__ if error is not None and len(gathered) == 1 else error)
    return gathered[0][0]
