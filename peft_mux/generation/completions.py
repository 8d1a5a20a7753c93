"""`HeldOutCompletions`: what adapters make of held-out prompts (`eval_generate`), generated and judged at evaluations.

Completions of several tasks are generated in mixed batches, which replicas share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.generation.decoding import generate
from peft_mux.generation.requests import GenerationRequest
from peft_mux.modeling.sampling import ANSWER_METRICS
from peft_mux.task import metric_key
from peft_mux.trainer.evaluation import Judge, agreed_metrics, merged, of_replicas
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run
from peft_mux.user_code import Listener, UserCodeError, guard_user_code

_BATCHES_OF_PASSES = 4
"""Tokens of a batch of completions, in passes: no activations are kept for a backward pass."""


def normalised(text: str) -> str:
    """Return a text normalised for comparison: lower case, single spaces, no full stop at the end.

    Signs and articles stay, as "-5" is not "5", and "A" may be the letter of a choice.
    """
    return " ".join(text.casefold().split()).removesuffix(".")


def exact_match(completion: str, reference: str) -> float:
    """Return 1 if a completion is the reference, both normalised; else 0."""
    return float(normalised(completion) == normalised(reference))


def contains(completion: str, reference: str) -> float:
    """Return 1 if a completion contains the reference, both normalised; else 0."""
    return float(normalised(reference) in normalised(completion))


def f1(completion: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of a completion's words, as SQuAD defines it."""
    got, wanted = normalised(completion).split(), normalised(reference).split()
    if not got or not wanted:
        return float(got == wanted)
    shared = sum((Counter(got) & Counter(wanted)).values())
    return 2 * shared / (len(got) + len(wanted))


def mean_metric(name: str, completions: Sequence[str], references: Sequence[str]) -> float:
    """Return the mean of a metric of `ANSWER_METRICS` over rows; at least one row."""
    metric = dict(zip(ANSWER_METRICS, (exact_match, contains, f1), strict=True))[name]
    return sum(map(metric, completions, references)) / len(references)


class HeldOutCompletions:
    """Completes held-out prompts of tasks, and judges the completions.

    Args:
        run: the present run.
        placement: the model of this process.
        max_tokens: returns how many tokens one pass may hold now.
    """

    def __init__(self, run: Run, placement: Placement, max_tokens: Callable[[], int]) -> None:
        self._run, self._placement, self._max_tokens = run, placement, max_tokens

    def __call__(self, tasks: Sequence[ActiveTask], *, logs: bool = True) -> dict[str, Judge]:
        """Return what judges the completions of each task that has `eval_generate`, by name.

        Tasks share batches, so it is called once for all tasks that are about to be evaluated. With several processes
        all call this with the same tasks, and all get the same texts.

        Args:
            tasks: the tasks.
            logs: whether some completions of each task are shown and written to `metrics.jsonl`.
        """
        tasks = [task for task in tasks if task.eval_prompts]
        if not tasks:
            return {}
        requests = []
        for task in tasks:
            options: Any = task.task.generate_options
            # With seeds that do not depend on which process they go to.
            requests += [
                GenerationRequest(task=task.name, prompt=row.ids, options=options, seed=options.seed + number)
                for number, row in enumerate(task.eval_prompts)
            ]
        layout = self._run.layout
        numbered = list(enumerate(requests))[layout.place(self._run.processes.rank).replica :: layout.num_replicas]
        with self._placement.executor.precision():
            completed = generate(
                self._placement.model,
                [request for _, request in numbered],
                processing_class=self._placement.source.tokenizer,
                max_batch_tokens=_BATCHES_OF_PASSES * self._max_tokens(),
            )
        texts = {number: completion.text for (number, _), completion in zip(numbered, completed, strict=True)}
        all_texts = iter(merged(of_replicas(self._run, texts)).values())
        judges: dict[str, Judge] = {}
        for task in tasks:
            completions = [next(all_texts) for _ in task.eval_prompts]
            if logs:
                self._log(task, completions)
            judges[task.name] = partial(self._metrics, task, completions)
        return judges

    def _log(self, task: ActiveTask, completions: Sequence[str]) -> None:
        log, options = self._run.log, task.task.generate_options
        rows = zip(task.eval_prompts, completions, strict=True)
        for row, text in islice(rows, options.num_logged if options else 0):
            log.say(f"{task.name}: ...{row.prompt[-60:]!r} -> {text[:60]!r} (wanted: {row.reference[:60]!r})")
            facts = {"prompt": row.prompt, "completion": text, "reference": row.reference}
            log.event("completion", task=task.name, step=task.step, **facts)

    def _metrics(self, task: ActiveTask, completions: Sequence[str], listener: Listener) -> dict[str, float]:
        """Return the metrics of a task's completions under keys that begin with `eval_`; every process calls this."""
        references = [row.reference for row in task.eval_prompts]
        options: Any = task.task.generate_options
        metrics: dict[str, float] = {}
        error: UserCodeError | None = None
        try:
            for metric in options.metrics:
                if isinstance(metric, str):
                    metrics[f"eval_{metric}"] = mean_metric(metric, completions, references)
                    continue
                with guard_user_code(task.name, "eval_generate", listener):
                    # Copies, which the function may change.
                    values: Mapping[str, float] = metric(
                        [row.prompt for row in task.eval_prompts], list(completions), list(references)
                    )
                    metrics |= {metric_key(key): float(value) for key, value in values.items()}
        except UserCodeError as raised:
            error = raised
        return agreed_metrics(of_replicas(self._run, (metrics, None if error is None else str(error))), error)
