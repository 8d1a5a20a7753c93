"""What evaluations generate (`eval_generate`): prompts of held-out rows, their completions, and metrics of these.

A prompt ends where the loss on the completion begins, as in training (`RowTokenizer`), so that a model continues from
just the tokens after which it has learnt to. Completions of several tasks are generated in mixed batches, which
replicas share (`HeldOutCompletions`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from peft_mux.data.formats import DataFormat, detect_format
from peft_mux.data.row_cells import RowCells
from peft_mux.data.tokenize import TokenizeOptions, common_prefix, own_tokenizer
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import DataError
from peft_mux.generation.decoding import generate
from peft_mux.generation.requests_and_completions import GenerationRequest
from peft_mux.modeling.sampling import GenerateOptions
from peft_mux.task import metric_key
from peft_mux.trainer.evaluation import Judge, agreed_metrics, merged
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run
from peft_mux.user_code import Listener, UserCodeError, guard_user_code

_BATCHES_OF_PASSES = 4
"""Tokens of a batch of completions, in passes: no activations are kept for a backward pass."""


# -------------------------------------------------------------------- prompts


class PromptRow(NamedTuple):
    """A prompt and the completion that its row has.

    Attributes:
        ids: the tokens of the prompt.
        prompt: the prompt as text; of messages as the chat template writes them.
        reference: the text that the row has as its completion.
    """

    ids: tuple[int, ...]
    prompt: str
    reference: str


def eval_prompts(
    generated: GenerateOptions, rows: Iterable[Any], options: TokenizeOptions, tokenizer: Any
) -> tuple[PromptRow, ...]:
    """Return the prompts that evaluations complete; warn about prompts that are too long.

    Args:
        generated: what the evaluations of the task generate.
        rows: its held-out rows.
        options: how its rows become tokens.
        tokenizer: a tokenizer of transformers.
    """
    room = None if options.max_positions is None else options.max_positions - generated.max_new_tokens
    prompts, num_too_long = read_prompts(
        rows, options, own_tokenizer(tokenizer), limit=generated.num_rows, max_tokens=room
    )
    if num_too_long:
        warnings.warn(
            f"tasks.{options.task}.eval_generate: {num_too_long:,} held-out prompts left out, because "
            f"{generated.max_new_tokens:,} new tokens do not fit after them. Lower max_new_tokens.",
            UserWarning,
            stacklevel=2,
        )
    return prompts


def read_prompts(
    rows: Iterable[Any], options: TokenizeOptions, tokenizer: Any, *, limit: int | None, max_tokens: int | None
) -> tuple[tuple[PromptRow, ...], int]:
    """Return the prompts of held-out rows, and how many were left out because they are too long.

    Args:
        rows: dicts of columns that were tokenised before without a fault.
        options: how the rows of the task become tokens.
        tokenizer: a tokenizer of transformers.
        limit: how many rows are read, from the first one on; `None` for all.
        max_tokens: longer prompts are left out; `None` for no limit.

    Raises:
        DataError: if there is no tokenizer or rows have no prompts, naming the row and column whose prompt cannot be
            read; or if all prompts are too long.
    """
    field = f"tasks.{options.task}.eval_generate"
    if tokenizer is None:
        raise DataError(
            f"{field} needs a processing_class, which turns completions into text. Pass "
            "processing_class=AutoTokenizer.from_pretrained(...)."
        )
    where = f"tasks.{options.task}.eval_dataset"
    cells = RowCells(where, options.vocab_size, tokenizer, options.chat_template)
    prompts: list[PromptRow] = []
    num_too_long = 0
    data_format: DataFormat | None = None
    for index, row in enumerate(rows):
        if index == limit:
            break
        data_format = data_format or detect_format(list(row), where=where, row_form=options.row_form)
        if data_format not in (DataFormat.MESSAGES, DataFormat.PROMPT_COMPLETION):
            raise DataError(
                f'{field} needs held-out rows with "prompt" and "completion", or "messages", got {data_format}, '
                "which have no prompts. Set eval_generate=None."
            )
        prompt = _read_prompt(row, index, data_format, cells, tokenizer)
        if max_tokens is not None and len(prompt.ids) > max_tokens:
            num_too_long += 1
        else:
            prompts.append(prompt)
    if not prompts:
        raise DataError(
            f"{field} needs held-out prompts that leave room for a completion, but the shortest has more than "
            f"{max_tokens} tokens. Lower max_new_tokens."
        )
    return tuple(prompts), num_too_long


def _read_prompt(row: Any, index: int, data_format: DataFormat, cells: RowCells, tokenizer: Any) -> PromptRow:
    if data_format is DataFormat.MESSAGES:
        column, messages = "messages", cells.messages(row, "messages", index)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            got = f"{len(messages)} messages, the last of them of {messages[-1]['role']!r:.60}"
            raise cells.error(index, column, got, "an answer of the assistant at the end, to be generated")
        prompt, answer = messages[:-1], messages[-1:]
    elif isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        column = "completion"
        prompt, answer = (cells.messages(row, name, index) for name in ("prompt", "completion"))
    else:
        text, reference = (cells.text(row, name, index) for name in ("prompt", "completion"))
        ids, whole = tokenizer(text)["input_ids"], tokenizer(text + reference)["input_ids"]
        kept = np.asarray(ids[: common_prefix(ids, whole)], dtype=np.int64)
        return PromptRow(tuple(cells.checked_ids(kept, index, "prompt").tolist()), text, reference)
    ids, _ = cells.encode_chat(prompt, column, index, is_prompt=True, row=row)
    whole, _ = cells.encode_chat(prompt + answer, column, index, row=row)
    # The tokens of the prompt that do not merge with those of the completion.
    kept = np.asarray(ids[: common_prefix(ids, whole)], dtype=np.int64)
    kept_ids = tuple(cells.checked_ids(kept, index, column).tolist())
    texts = []
    for message in answer:
        content = message["content"]  # None in a message that only calls tools
        texts.append(content if isinstance(content, str) else "".join(part["text"] for part in content or ()))
    return PromptRow(kept_ids, tokenizer.decode(kept_ids), "\n".join(texts))


# -------------------------------------------------------------------- metrics and completions


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
    metric = {"exact_match": exact_match, "contains": contains, "f1": f1}[name]
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
        all_texts = iter(merged(self._run.of_replicas(texts)).values())
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
        return agreed_metrics(self._run.of_replicas((metrics, None if error is None else str(error))), error)
