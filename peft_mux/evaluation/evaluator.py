"""`TaskEvaluator`: evaluates running tasks on their held-out rows and follows their early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from peft_mux.checkpoint.saver import Saver
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.work import StepExecutor
from peft_mux.errors import ConfigError, MetricsError, ProcessError
from peft_mux.evaluation.evaluate import EvaluationShare, evaluate_task
from peft_mux.evaluation.generated import Answers, answer_metrics, generate_answers
from peft_mux.own_code import Listener, OwnCodeError, describe_error, nobody
from peft_mux.reporting.run_log import RunLog
from peft_mux.task import TaskStatus
from peft_mux.tasks.task_run import TaskRun

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
            if raised is None or isinstance(raised, OwnCodeError):
                raise
        # Here and not above: within the handler it would get a context that it did not have.
        raise raised

    def _metrics(self, run: TaskRun, answers: Answers | None, listener: Listener = nobody) -> dict[str, float]:
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
