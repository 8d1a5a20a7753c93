"""The set-ups: ordinary ways to turn texts into rows of a batch with common prefixes.

Texts are those of `../shared/data/text`, tokens GPT-2's. Where a data set has one answer a prompt, the rejected answers
of DPO and the other completions of GRPO are those of other prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paths import SHARED_DATA
from benchmarks.training.workloads import IGNORE_INDEX, gpt2_tokenizer

Row = dict[str, Any]
END = "<end>"
PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n"
)
SYSTEM = (
    "You are a careful assistant. Read the text below and do exactly what is asked. Answer in as few words as you can,"
    " in the language of the text, and never add an explanation, a greeting or a note of your own. If the text does not"
    " tell the answer, choose the one that is most likely.\n\n"
)
MAX_TOKENS = 900
"""Longer rows are left out, as trainers would cut them each in its way."""


class Text(NamedTuple):
    """A row as text; the loss is of the completion."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class SetUp:
    """A way to make batches.

    Attributes:
        name: what it is, for reports.
        batch_size: rows of a step.
        make: yields the batches of texts, one for each step, without end.
        objective: the loss.
        has_target: whether 85 % of the ideal gain were promised of it.
        num_tasks: tasks that train together; `None` for as many as are asked for.
    """

    name: str
    batch_size: int
    make: Callable[[], Iterator[list[Any]]]
    objective: str = "sft"
    has_target: bool = False
    num_tasks: int | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """The rows of some steps.

    Attributes:
        steps: the rows of each step, tokenised as peft_mux reads them.
        sequences: the token ids of each step's sequences, two of which are a row of DPO.
        vocabulary: number of different tokens; ids are below it.
    """

    steps: list[list[Row]]
    sequences: list[list[list[int]]]
    vocabulary: int = field(default=0)


@cache
def texts(name: str) -> list[Text]:
    """Return the rows of a data set."""
    path = next(file for end in (".train", ".segments", "") if (file := _folder() / f"{name}{end}.jsonl").is_file())
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [Text(row.get("prompt", ""), row.get("completion", row.get("text", ""))) for row in rows]


def _folder() -> Path:
    return SHARED_DATA / "text"


def batched(rows: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Yield rows of one batch after another, from the first again where they end."""
    for start in range(0, 10**9, size):
        yield [rows[(start + place) % len(rows)] for place in range(size)]


def plain(name: str, before: str = "") -> Iterator[list[Text]]:
    """Yield a data set's rows behind one text."""
    return batched([Text(before + row.prompt, row.completion) for row in _short(texts(name))], 8)


def few_shot(name: str, shots: int = 4) -> Iterator[list[Text]]:
    """Yield rows behind the same few solved ones."""
    solved = "".join(f"{row.prompt}{row.completion}\n\n" for row in texts(name)[:shots])
    return batched([Text(solved + row.prompt, row.completion) for row in texts(name)[shots:]], 8)


def few_shot_in_turn(num_tasks: int) -> Iterator[list[Text]]:
    """Yield batches of tasks that have one of three data sets each, for a step of all tasks after another."""
    sources = [few_shot(name) for name in ("openbookqa", "sst2", "rte")]
    while True:
        for task in range(num_tasks):
            yield next(sources[task % len(sources)])


def options(*, are_listed: bool) -> Iterator[list[Text]]:
    """Yield each question of OpenBookQA with each of its four answers."""
    all_texts = []
    for row in texts("openbookqa"):
        stem, *answers = re.split(r"\s*Answer\d: ?", row.prompt.removesuffix("Answer:").rstrip())
        prompt = row.prompt if are_listed else f"{stem}\nAnswer:"
        all_texts += [Text(prompt, f" {answer}") for answer in answers]
    return batched(all_texts, 16)


def pairs(name: str) -> Iterator[list[tuple[Text, Text]]]:
    """Yield a prompt with its own and the next row's completion."""
    rows = _short(texts(name))
    return batched([(row, Text(row.prompt, other.completion)) for row, other in zip(rows, rows[1:], strict=False)], 4)


def rollouts(name: str, times: int = 1, before: str = "") -> Iterator[list[Text]]:
    """Yield prompts with eight completions each, every one of them of `times` rows."""
    rows = _short(texts(name))
    all_texts = []
    for place, row in enumerate(rows):
        shots = [rows[(place + step) % len(rows)].completion for step in range(8 * times)]
        all_texts += [Text(before + row.prompt, "".join(shots[first::8])) for first in range(8)]
    return batched(all_texts, 8)


def turns(dialogues: Sequence[Sequence[str]], each: int) -> Iterator[list[Text]]:
    """Yield a row for each of the first turns of a dialogue: the loss is of that turn."""
    all_texts = []
    for dialogue in dialogues:
        if len(dialogue) >= each:
            all_texts += [Text("".join(dialogue[:turn]), dialogue[turn]) for turn in range(each)]
    return batched(all_texts, each)


def _plays() -> Iterator[list[Text]]:
    return turns([[f"{turn}\n\n" for turn in row.completion.split("\n\n")] for row in texts("tinyshakespeare")], 6)


def _chats() -> Iterator[list[Text]]:
    rows = _short(texts("instruct"), 250)
    chats = [
        [f"User: {row.prompt}\nAssistant:{row.completion}\n" for row in rows[at : at + 4]] for at in range(len(rows))
    ]
    return turns(chats[::4], 4)


def _meetings() -> Iterator[list[Text]]:
    return turns([row.prompt.splitlines(keepends=True) for row in _short(texts("qmsum"))], 14)


def _short(rows: Sequence[Text], tokens: int = MAX_TOKENS) -> list[Text]:
    encode = _encoder()
    # Encoding the longest only to leave them out would take most of the time.
    rows = [row for row in rows[:200] if len(row.prompt) < 8 * tokens]
    return [row for row in rows if len(encode(row.prompt)) + len(encode(row.completion)) < tokens]


SET_UPS: tuple[SetUp, ...] = (
    *(SetUp(f"as it is: {name}", 8, partial(plain, name)) for name in ("sst2", "openbookqa", "instruct")),
    *(SetUp(f"preamble: {name}", 8, partial(plain, name, PREAMBLE)) for name in ("sst2", "openbookqa", "instruct")),
    *(
        SetUp(f"system prompt: {name}", 8, partial(plain, name, SYSTEM), has_target=True)
        for name in ("sst2", "openbookqa", "instruct")
    ),
    *(SetUp(f"4-shot: {name}", 8, partial(few_shot, name), has_target=True) for name in ("sst2", "openbookqa", "rte")),
    SetUp("4-shot: eight tasks of these", 8, partial(few_shot_in_turn, 8), has_target=True, num_tasks=8),
    SetUp("options: stem only", 16, partial(options, are_listed=False)),
    SetUp("options: listed", 16, partial(options, are_listed=True)),
    *(SetUp(f"DPO: {name}", 4, partial(pairs, name), "dpo") for name in ("instruct", "humaneval", "pubmedqa", "qmsum")),
    SetUp("GRPO x8: instruct", 8, partial(rollouts, "instruct"), "policy"),
    SetUp("GRPO x8: instruct, 3x completions", 8, partial(rollouts, "instruct", 3), "policy"),
    SetUp("GRPO x8: pubmedqa", 8, partial(rollouts, "pubmedqa"), "policy", has_target=True),
    SetUp("GRPO x8: qmsum", 8, partial(rollouts, "qmsum"), "policy"),
    SetUp("a row a turn: Shakespeare, 6 turns", 6, _plays),
    SetUp("a row a turn: chats, 4 turns", 4, _chats),
    SetUp("a row a turn: qmsum, 14 turns", 14, _meetings),
)


def batches(set_up: SetUp, num_tasks: int, num_steps: int) -> list[Batches]:
    """Return the rows of each task, one batch after another; ids are renumbered so that no vocabulary is idle."""
    numbers: dict[int | str, int] = {END: 0}
    encode = _encoder()

    def ids(text: str) -> list[int]:
        return [numbers.setdefault(piece, len(numbers)) for piece in encode(text)]

    drawn = islice(set_up.make(), num_tasks * num_steps)
    steps = [[_tokenised(row, set_up.objective, place, ids) for place, row in enumerate(batch)] for batch in drawn]
    by_task = []
    for task in range(num_tasks):
        steps_of_task = steps[task::num_tasks]
        sequences = [[sequence for row in step for sequence in sequences_of(row)] for step in steps_of_task]
        by_task.append(Batches(steps_of_task, sequences, len(numbers)))
    return by_task


def _tokenised(row: Any, objective: str, place: int, ids: Callable[[str], list[int]]) -> Row:
    if objective == "dpo":
        chosen, rejected = row
        answers = {"chosen_ids": [*ids(chosen.completion), 0], "rejected_ids": [*ids(rejected.completion), 0]}
        return {"prompt_ids": ids(chosen.prompt), **answers}
    prompt, completion = ids(row.prompt), [*ids(row.completion), 0]
    # Of a row of a turn that has nothing before it, the first token is predicted by none.
    tokens, masked = [*prompt, *completion], max(len(prompt), 1)
    cells: Row = {"input_ids": tokens, "labels": [IGNORE_INDEX] * masked + tokens[masked:]}
    if objective == "policy":
        cells |= {"advantages": float(place % 8 - 3.5), "old_logprobs": [-8.0] * len(tokens)}
    return cells


def sequences_of(row: Row) -> list[list[int]]:
    """Return the token ids of a row's sequences."""
    if "input_ids" in row:
        return [row["input_ids"]]
    return [[*row["prompt_ids"], *row[answer]] for answer in ("chosen_ids", "rejected_ids")]


@cache
def _encoder() -> Callable[[str], list[int]]:
    tokenizer = gpt2_tokenizer()
    return lambda text: tokenizer.encode(text).ids
