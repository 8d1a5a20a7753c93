"""Preference rows, with the same tokens, masks and order as in TRL's trainers.

* `PAIR_ROWS`: a prompt, a chosen and a rejected answer, as in `DPOTrainer`.
* `JOINED_ROWS`: the same columns, as in `CPOTrainer`: prompt and answer are joined as text after applying the chat
  template, and `BOS` and `EOS` are added as ids.
* `ODDS_ROWS`: the same rows as in `ORPOTrainer`: the whole chosen sequence carries loss, including its prompt.
* `SCORED_ROWS`: a better and a worse text, as in `RewardTrainer`.
* `SINGLE_ROWS`: a prompt, one answer and whether it is good, as in `KTOTrainer`; pairs are read as single answers in
  the order in which TRL unpairs them. `KTO_ROWS` also pairs each prompt with the answer to another one.

The prompt is a column or the common prefix of both answers. Texts and conversations are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from peft_mux.data.formats import DataFormat, RowForm
from peft_mux.data.row_cells import RowCells
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence
from peft_mux.data.tokenize import RowTokenizer, checked_row

REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns with precomputed log-probabilities of the answers under the reference model, in nats."""
_PAIRED = (DataFormat.TOKENIZED_PREFERENCE, DataFormat.PREFERENCE)
_BLOCK = 1000
"""Batch size of `datasets.Dataset.map` in TRL: in each batch the chosen answers come before the rejected ones."""


class Answer(NamedTuple):
    """A prompt and one answer to it.

    Attributes:
        ids: int64, token ids of both.
        start: number of tokens of the prompt.
    """

    ids: np.ndarray
    start: int

    def labels(self) -> np.ndarray:
        """Return the ids as labels, ignored in the prompt."""
        labels = self.ids.copy()
        labels[: self.start] = IGNORE_INDEX
        return labels

    @property
    def has_targets(self) -> bool:
        """Whether any token of the answer is predicted; the first token of a sequence never is."""
        return len(self.ids) > max(self.start, 1)


# ----------------------------------------------------------------------------------------------------- columns of a row


def _same_kind(
    reader: RowTokenizer, row: Mapping[str, Any], columns: Sequence[str], index: int, allowed: str
) -> list[Any]:
    """Return cells that must be all texts or all messages.

    Args:
        reader: reads texts and messages.
        row: the row.
        columns: the columns; the first one determines the type.
        index: index of the row.
        allowed: name of the reference cell in messages: "as {allowed} is".

    Raises:
        DataError: if a column is neither or has another type than the first, or if the row has a column that TRL passes
            to the chat template, which would change the tokens.
    """
    for column in ("tools", "chat_template_kwargs"):
        if row.get(column):
            raise reader.error(index, column, f"{row[column]!r:.60}", "empty", "Render the texts beforehand.")
    read = [
        reader.messages(row, column, index) if isinstance(row[column], list) else reader.text(row, column, index)
        for column in columns
    ]
    for column, cell in zip(columns, read, strict=True):
        if isinstance(cell, list) != isinstance(read[0], list):
            kind = "messages" if isinstance(read[0], list) else "a text"
            raise reader.error(index, column, type(row[column]).__name__, f"{kind}, as {allowed} is")
    return read


def _prompt_and_answers(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> tuple[Any, Any, Any]:
    """Return the prompt, the chosen and the rejected answer of a row: three texts, or three lists of messages.

    If there is no prompt, or a text prompt with conversations that repeat it, the prompt is their common prefix.
    """
    chosen, rejected = _same_kind(reader, row, ("chosen", "rejected"), index, "chosen")
    prompt = row.get("prompt")
    if prompt is not None:
        if isinstance(prompt, list) and not isinstance(chosen, list):
            reader.messages(row, "prompt", index)
            raise reader.error(index, "prompt", "messages", "a text, as chosen is")
        if isinstance(prompt, list) == isinstance(chosen, list):
            return _same_kind(reader, row, ("prompt",), index, "chosen")[0], chosen, rejected
        reader.text(row, "prompt", index)
    if not chosen or not rejected:
        column = "rejected" if chosen else "chosen"
        raise reader.error(index, column, "an empty text", "text that begins with the prompt")
    length = _shared_length(chosen, rejected)
    return chosen[:length], chosen[length:], rejected[length:]


def _shared_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return the number of leading characters or messages that two answers share, as in TRL's `extract_prompt`.

    At least one of the shorter answer remains, and a space before the first difference belongs to the answers.
    """
    place = 0
    for place in range(min(len(chosen), len(rejected))):
        if chosen[place] != rejected[place]:
            return place - 1 if place and chosen[place - 1] == " " else place
    return place


def _tokenised_answer(reader: RowTokenizer, row: Mapping[str, Any], column: str, index: int) -> Answer:
    """Return the ids of a column, preceded by `prompt_ids` if present."""
    given = row.get("prompt_ids")
    prompt = reader.integers([] if given is None else given, index, "prompt_ids")
    reader.checked_ids(prompt, index, "prompt_ids", empty_allowed=True)
    answer = reader.checked_ids(reader.integers(row[column], index, column), index, column)
    return Answer(np.concatenate((prompt, answer)), len(prompt))


def _encoded_answer(reader: RowTokenizer, prompt: Any, answer: Any, index: int) -> Answer:
    """Return the tokens of a prompt and its answer, both texts or both messages."""
    ids, (mask, *_) = reader.prompt_completion({"prompt": prompt, "completion": answer}, index)
    return Answer(np.asarray(ids, dtype=np.int64), int(np.count_nonzero(~mask)))


def _numbers(reader: RowTokenizer, names: Sequence[str], row: Mapping[str, Any], index: int) -> dict[str, float]:
    """Return columns with one number per row; each row of a dataset must have all of them, or each row none.

    Raises:
        DataError: if some are missing, or if a value is not a finite number.
    """
    are_there = reader.as_in_first_row(names[0], any(row.get(name) is not None for name in names))
    numbers: dict[str, float] = {}
    for name in [name for name in names if are_there or row.get(name) is not None]:
        value = row.get(name)
        if isinstance(value, np.generic):
            value = value.item()
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not are_there or not is_number:
            got = "no such column" if name not in row else repr(value)
            together = f", with {', '.join(names)}" if len(names) > 1 else ""
            raise reader.error(index, name, got, f"a finite number in every row, or in none{together}")
        numbers[name] = float(value)  # type: ignore[arg-type]
    return numbers


def _cut_answers(reader: RowTokenizer, answers: Sequence[Answer], index: int) -> list[Answer] | None:
    """Return answers truncated to the limit, or `None` if the row is dropped (and counted).

    Raises:
        DataError: if one is too long and the policy is "error", or if a token id is outside the vocabulary.
    """
    for answer in answers:
        reader.checked_ids(answer.ids, index, "input_ids")
    reader.report.num_equal_answers += len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids)
    longest, limit = max(len(answer.ids) for answer in answers), reader.options.limit
    is_masked = not all(answer.has_targets for answer in answers)
    if not is_masked and longest > limit and reader.drops(index, longest):
        return None
    kept = []
    for ids, start in answers:
        num_cut = 0 if reader.options.truncation_mode == "keep_start" else max(len(ids) - limit, 0)
        kept.append(Answer(ids[reader.options.kept], max(start - num_cut, 0)))
    if is_masked or not all(answer.has_targets for answer in kept):
        reader.count_without_targets(is_masked=is_masked)
        return None
    return kept


def _two_sequences(pair: Sequence[Answer], index: int, values: Mapping[str, float]) -> TokenSequence:
    """Return a row of two sequences, the chosen one first, each with loss on its answer."""
    ids = np.concatenate([answer.ids for answer in pair])
    labels = np.concatenate([answer.labels() for answer in pair])
    return TokenSequence(ids, labels, index, is_one_term=True, starts=(len(pair[0].ids),), row_values=values)


# ------------------------------------------------------------------------------------------------------- pairs (DPO)


def _tokenised_pair(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> list[Answer] | None:
    """Return both answers of a row of tokens; `None` for rows of texts and messages."""
    if reader.data_format is not DataFormat.TOKENIZED_PREFERENCE:
        return None
    return [_tokenised_answer(reader, row, column, index) for column in ("chosen_ids", "rejected_ids")]


def _read_pair(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> TokenSequence | None:
    """Return a row of a chosen and a rejected answer.

    `EOS` is appended to text answers. If the last tokens of the prompt merge with an answer, they belong to the answer.
    Row values are the numbers of tokens of the two answers, and the `REFERENCE_COLUMNS` if present.
    """
    pair = _tokenised_pair(reader, row, index)
    if pair is None:
        prompt, *texts = _prompt_and_answers(reader, row, index)
        pair = [_encoded_answer(reader, prompt, text, index) for text in texts]
        # Both answers use the shorter prompt, because tokens may merge in one of them only.
        start = min(answer.start for answer in pair)
        pair = [Answer(answer.ids, start) for answer in pair]
    values = _numbers(reader, REFERENCE_COLUMNS, row, index)
    kept = _cut_answers(reader, pair, index)
    if kept is None:
        return None
    for name, answer in zip(("chosen_tokens", "rejected_tokens"), kept, strict=True):
        # Includes the first token of an answer even if no token precedes it to predict it.
        values[name] = float(len(answer.ids) - answer.start)
    return _two_sequences(kept, index, values)


PAIR_ROWS = RowForm(
    _PAIRED, is_one_term=True, read=_read_pair, marks=("prompt", "chosen", "rejected"), trained_on="answers"
)
"""A prompt with a chosen and a rejected answer, with loss on both answers."""


# -------------------------------------------------------------------------------------------- joined texts (CPO, ORPO)


def _read_joined(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> TokenSequence | None:
    """Return a row of a chosen and a rejected answer, each tokenised as one text with the prompt."""
    pair = _tokenised_pair(reader, row, index)
    if pair is None:
        prompt, *texts = _prompt_and_answers(reader, row, index)
        if isinstance(prompt, list):
            prompt, texts = _rendered(reader, prompt, texts, index)
        pair = [
            _joined_answer(reader, prompt, text, index, column)
            for text, column in zip(texts, ("chosen", "rejected"), strict=True)
        ]
        prompts = [answer.ids[: answer.start] for answer in pair]
        differing = sum(a != b for a, b in zip(*prompts, strict=False))
        if differing > 1 or abs(len(prompts[0]) - len(prompts[1])) > 1:
            allowed = "a prompt of which at most the last token merges with an answer"
            raise reader.error(index, "prompt", f"prompts that differ in {differing} tokens", allowed)
    kept = _cut_answers(reader, pair, index)
    return None if kept is None else _two_sequences(kept, index, {})


def _read_odds(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> TokenSequence | None:
    """Return the same row, with loss on the prompt of the chosen answer as well.

    The token column `is_answer` is 1 for answer tokens and 0 for tokens of the prompt.
    """
    sequence = _read_joined(reader, row, index)
    if sequence is None:
        return None
    is_answer = (sequence.labels != IGNORE_INDEX).astype(np.float32)
    end = sequence.starts[0]
    labels = np.concatenate((sequence.input_ids[:end], sequence.labels[end:]))
    return replace(sequence, labels=labels, token_columns={"is_answer": is_answer})


def _rendered(reader: RowTokenizer, prompt: Any, answers: list[Any], index: int) -> tuple[str, list[str]]:
    """Render messages with the chat template; return the prompt text and the text of each answer."""
    last = prompt[-1]["role"]
    if last not in ("user", "tool", "assistant"):
        raise reader.error(index, "prompt", f"a last message of {last!r}", "user, tool or assistant as its role")
    # If the last message is the assistant's, the answer continues it.
    options = {"add_generation_prompt": last != "assistant", "continue_final_message": last == "assistant"}
    text = reader.apply_template(prompt, "prompt", index, tokenize=False, **options)
    whole = [
        reader.apply_template(prompt + answer, column, index, tokenize=False)
        for answer, column in zip(answers, ("chosen", "rejected"), strict=True)
    ]
    for full in whole:
        differing = (place for place, (char, other) in enumerate(zip(text, full, strict=False)) if char != other)
        text = text[: next(differing, min(len(text), len(full)))]
    return text, [full[len(text) :] for full in whole]


def _joined_answer(reader: RowTokenizer, prompt: str, answer: str, index: int, column: str) -> Answer:
    """Return the tokens of a prompt and an answer as one text, with `BOS` and `EOS` added as ids."""
    tokenizer = reader.tokenizer
    ids = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if len(ids) < len(prompt_ids):
        got = f"{len(ids)} tokens together with the prompt, which has {len(prompt_ids)} by itself"
        raise reader.error(index, column, got, "an answer whose tokens do not merge with the prompt")
    start = len(prompt_ids)
    # If the last token of the prompt merges with the answer, it belongs to the answer.
    if prompt_ids != ids[:start]:
        start -= 1
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    if first is not None and (start == 0 or ids[0] != first):
        ids, start = [first, *ids], start + 1
    if last is not None and (len(ids) == start or ids[-1] != last):
        ids = [*ids, last]
    return Answer(np.asarray(ids, dtype=np.int64), start)


JOINED_ROWS = RowForm(_PAIRED, is_one_term=True, read=_read_joined, trained_on="answers")
"""A prompt with a chosen and a rejected answer, tokenised as joined text, with loss on both answers."""
ODDS_ROWS = replace(JOINED_ROWS, read=_read_odds, trained_on="answers, and prompts of the chosen ones")
"""The same rows with loss also on the prompt of the chosen answer."""


# ---------------------------------------------------------------------------------------------------- scores (reward)


def _read_scored(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> TokenSequence | None:
    """Return a row of a chosen and a rejected text as two sequences, each scored as a whole.

    The prompt, if any, is prepended to both texts, and `EOS` is appended unless they are messages. As in TRL, rows are
    dropped if one of the texts is longer than the limit, because the score is read at the end of the text. The row
    value `margin` is set if the column is present.
    """
    names = ("chosen", "rejected")
    if reader.data_format is DataFormat.TOKENIZED_PREFERENCE:
        texts = [_tokenised_answer(reader, row, f"{name}_ids", index).ids for name in names]
    else:
        columns = names if row.get("prompt") is None else (*names, "prompt")
        chosen, rejected, *prompts = _same_kind(reader, row, columns, index, "chosen")
        texts = []
        for name, text in zip(names, (chosen, rejected), strict=True):
            if isinstance(text, list):
                ids, _ = reader.encode_chat([*(prompts[0] if prompts else ()), *text], name, index)
            else:
                ids = reader.tokenizer((prompts[0] if prompts else "") + reader.with_eos(text))["input_ids"]
            texts.append(np.asarray(ids, dtype=np.int64))
    values = _numbers(reader, ("margin",), row, index)
    for text in texts:
        reader.checked_ids(text, index, "input_ids")
    reader.report.num_equal_answers += np.array_equal(texts[0], texts[1])
    longest = max(len(text) for text in texts)
    if longest > reader.options.limit:
        if reader.options.overlong_policy == "error":
            reader.drops(index, longest)
        reader.report.num_dropped_long += 1
        return None
    ids = np.concatenate(texts)
    # There are no token labels, so the ids replace them. The class label 0.0 marks a classification row.
    return TokenSequence(ids, ids.copy(), index, 0.0, is_one_term=True, starts=(len(texts[0]),), row_values=values)


SCORED_ROWS = RowForm(_PAIRED, is_one_term=True, read=_read_scored, marks=("chosen", "rejected"), num_labels=1)
"""A better and a worse text, for reward models."""


# ------------------------------------------------------------------------------------------------- single answers (KTO)


class UnpairedRow(dict[str, Any]):
    """One answer of a pair.

    Attributes:
        origin: index of the pair in the original dataset.
        column: original column of the answer, `chosen` or `rejected`.
    """

    def __init__(self, row: Mapping[str, Any], origin: int, column: str) -> None:
        super().__init__(row)
        self.origin = origin
        self.column = column


def unpaired(rows: Iterator[Any], where: str) -> Iterator[Any]:
    """Split each pair into two rows with one answer; yield rows with a single answer unchanged.

    Pairs are split in blocks of `_BLOCK`; the chosen answers of a block come before its rejected ones.

    Args:
        rows: single answers, or rows with `chosen`, `rejected` and optionally `prompt`; the first row determines which.
        where: the dataset, for messages: `tasks.sql.train_dataset`.

    Raises:
        DataError: if a pair lacks an answer; the message names the row.
    """
    first = next(rows, None)
    if first is None:
        return
    rows = chain((first,), rows)
    if not isinstance(first, Mapping) or "completion" in first or not {"chosen", "rejected"} <= first.keys():
        yield from rows
        return
    numbered = enumerate(rows)
    while block := list(islice(numbered, _BLOCK)):
        for column in ("chosen", "rejected"):
            for origin, given in block:
                row = checked_row(given, origin, where)
                for name in ("chosen", "rejected"):
                    if not isinstance(row.get(name), (str, list)) or not row[name]:
                        got, allowed = f"{row.get(name)!r:.60}", "a text or a list of messages"
                        raise RowCells(where).error(origin, name, got, allowed)
                others = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
                prompt, answer = others.get("prompt"), row[column]
                if prompt is None or (isinstance(prompt, str) and isinstance(answer, list)):
                    length = _shared_length(row["chosen"], row["rejected"])
                    others["prompt"], answer = answer[:length], answer[length:]
                single = {**others, "completion": answer, "label": column == "chosen"}
                yield UnpairedRow(single, origin, column)


def _read_single(reader: RowTokenizer, row: Mapping[str, Any], index: int) -> TokenSequence | None:
    """Return a row of an answer and whether it is desirable, with loss on the answer.

    Row values are `desirable`, 1 or 0, and `ref_logps` if the column is present.
    """
    verdict = row["label"]
    if isinstance(verdict, np.generic):
        verdict = verdict.item()
    # Some file formats store booleans as 0 and 1. Other numbers are rejected, because they may be scores.
    if not isinstance(verdict, bool) and not (isinstance(verdict, int) and verdict in (0, 1)):
        raise reader.error(index, "label", f"{verdict!r:.60}", "True for a good answer, False for a bad one")
    values = {"desirable": float(verdict), **_numbers(reader, ("ref_logps",), row, index)}
    if reader.data_format is DataFormat.TOKENIZED_UNPAIRED:
        answer = _tokenised_answer(reader, row, "completion_ids", index)
    else:
        # Errors in unpaired rows name the original row and column.
        column, origin = (row.column, row.origin) if isinstance(row, UnpairedRow) else ("completion", index)
        named = {**row, column: row["completion"]}
        prompt, text = _same_kind(reader, named, ("prompt", column), origin, "the prompt")
        answer = _encoded_answer(reader, prompt, text, origin)
    kept = _cut_answers(reader, [answer], index)
    if kept is None:
        return None
    return TokenSequence(kept[0].ids, kept[0].labels(), index, is_one_term=True, row_values=values)


def with_mismatched(rows: tuple[TokenSequence, ...], limit: int) -> tuple[TokenSequence, ...]:
    """Add to each row of a global batch a second sequence: its prompt with the answer of the previous row.

    KTO uses these to estimate the KL divergence from the reference model. The first row gets the answer of the last, as
    in TRL's `KTOTrainer`, which rotates the answers of each batch by one. TRL joins the untruncated answers to their
    new prompts and truncates the result; here an answer that was truncated after its own prompt stays truncated.

    Args:
        rows: rows of one sequence, with labels on the answer only.
        limit: maximum number of tokens of a sequence.
    """
    starts = [int(np.argmax(row.labels != IGNORE_INDEX)) for row in rows]
    mismatched = []
    for number, row in enumerate(rows):
        other, start = rows[number - 1], starts[number]
        ids = np.concatenate((row.input_ids[:start], other.input_ids[starts[number - 1] :]))[:limit]
        labels = ids.copy()
        labels[:start] = IGNORE_INDEX
        ids, labels = np.concatenate((row.input_ids, ids)), np.concatenate((row.labels, labels))
        mismatched.append(replace(row, input_ids=ids, labels=labels, starts=(len(row),)))
    return tuple(mismatched)


SINGLE_ROWS = RowForm(
    (DataFormat.TOKENIZED_UNPAIRED, DataFormat.UNPAIRED_PREFERENCE),
    is_one_term=True,
    read=_read_single,
    marks=("prompt", "completion", "label"),
    view=unpaired,
    trained_on="answers",
)
"""An answer and whether it is good."""
KTO_ROWS = replace(SINGLE_ROWS, arrange=with_mismatched)
"""The same rows, with each prompt also paired with the answer to another one."""
