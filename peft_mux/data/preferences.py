"""Two answers to one prompt as one row: cut to the limit, and side by side as two sequences."""

# MERGED: Prompts with answers to others: what KTO estimates on how far a model has moved from its reference.
# MERGED: Numbers of rows that compare answers: log-probabilities of a reference, and margins.
# MERGED: Prompts and answers of rows that compare answers, where the prompt may be a column or the beginning of both
# MERGED: answers.
# MERGED: Both texts and conversations are taken, with TRL's meaning.
# MERGED: Rows of a prompt, a chosen and a rejected answer, tokenised as TRL's `DPOTrainer` does.
# MERGED: Rows of a prompt, a chosen and a rejected answer, tokenised as TRL's `ORPOTrainer` does.
# MERGED: Other than for DPO, prompts and answers are joined as texts after the chat template, `BOS` and `EOS` are
# MERGED: added as ids,
# MERGED: and the whole chosen row carries loss, its prompt too.
# MERGED: Rows of a better and a worse text, tokenised as TRL's `RewardTrainer` does.
# MERGED: Pairs of answers as single answers with a verdict, in the order in which TRL unpairs them.
# MERGED: Rows of a prompt, one answer and whether it is good, tokenised as TRL's `KTOTrainer` does.
# MERGED: The forms of rows that losses of preferences read.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from peft_mux.data.formats import DataFormat, RowCells, RowForm
from peft_mux.data.rows import ChatRows, RowTools
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence
from peft_mux.errors import DataError


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
        """Whether a token of the answer is predicted; the first token of a sequence is by none."""
        return len(self.ids) > max(self.start, 1)


def cut_answers(answers: tuple[Answer, ...], index: int, tools: RowTools) -> tuple[Answer, ...] | None:
    """Return answers within the limit, or `None` where the row is left out (and counted).

    Args:
        answers: the answers of a row.
        index: index of the row.
        tools: what the rows of the dataset are read with.

    Raises:
        DataError: if one is too long and the policy is "error", or if a token id lies outside the vocabulary.
    """
    for answer in answers:
        tools.cells.checked_ids(answer.ids, index, "input_ids")
    longest, limit = max(len(answer.ids) for answer in answers), tools.limit.num_tokens
    if all(answer.has_targets for answer in answers):
        if longest > limit and tools.limit.drops(index, longest):
            return None
        # The beginning is kept, as TRL does.
        answers = tuple(Answer(answer.ids[:limit], answer.start) for answer in answers)
    else:
        tools.counts.num_masked += 1
    if all(answer.has_targets for answer in answers):
        return answers
    tools.counts.num_without_targets += 1
    return None


def pair_of(chosen: Answer, rejected: Answer, index: int, values: Mapping[str, float]) -> TokenSequence:
    """Return a row of two sequences, the chosen one first, each with loss on its answer.

    Args:
        chosen: prompt and chosen answer.
        rejected: prompt and rejected answer.
        index: index of the row.
        values: numbers of the row.
    """
    return TokenSequence(
        np.concatenate((chosen.ids, rejected.ids)),
        np.concatenate((chosen.labels(), rejected.labels())),
        index,
        is_one_term=True,
        starts=(len(chosen.ids),),
        row_values=values,
    )


def with_mismatched(rows: tuple[TokenSequence, ...], limit: int) -> tuple[TokenSequence, ...]:
    """Return the rows of a global batch, each with a second sequence: its prompt, and the answer of the row before.

    The first row gets the answer of the last, as in TRL's `KTOTrainer`, which rotates the answers of each batch of its
    dataset by one. TRL takes whole answers and cuts them to the limit behind their new prompt; here an answer that was
    cut to the limit behind its own prompt is no longer than that.

    Args:
        rows: rows of one sequence, with labels in the answer alone.
        limit: number of tokens to which sequences are cut.
    """
    answers = [rows[-1], *rows[:-1]]
    return tuple(_with_second(row, answer, limit) for row, answer in zip(rows, answers, strict=True))


def _with_second(row: TokenSequence, other: TokenSequence, limit: int) -> TokenSequence:
    prompt, answer = row.input_ids[: _start(row)], other.input_ids[_start(other) :]
    ids = np.concatenate((prompt, answer))[:limit]
    labels = ids.copy()
    labels[: len(prompt)] = IGNORE_INDEX
    return replace(
        row,
        input_ids=np.concatenate((row.input_ids, ids)),
        labels=np.concatenate((row.labels, labels)),
        starts=(len(row),),
    )


def _start(row: TokenSequence) -> int:
    """Return the place of the first token of the answer."""
    return int(np.argmax(row.labels != IGNORE_INDEX))


class RowNumbers:
    """Reads columns of one number a row, which all rows of a dataset have, or none.

    Args:
        names: the columns that may be there, all of them together or none.
        cells: makes the error that names row and column.
    """

    def __init__(self, names: Sequence[str], cells: RowCells) -> None:
        """Have seen no row yet."""
        self._names = tuple(names)
        self._cells = cells
        self._are_there: bool | None = None

    def read(self, row: Mapping[str, Any], index: int) -> dict[str, float]:
        """Return the numbers of a row, by column; nothing where the dataset has none.

        Raises:
            DataError: if one is missing where others are there, or is no finite number.
        """
        if self._are_there is None:
            self._are_there = any(row.get(name) is not None for name in self._names)
        return {name: self._number(row, name, index) for name in self._names if self._is_read(row, name)}

    def _is_read(self, row: Mapping[str, Any], name: str) -> bool:
        return bool(self._are_there) or row.get(name) is not None

    def _number(self, row: Mapping[str, Any], name: str, index: int) -> float:
        value = row.get(name)
        if isinstance(value, np.generic):
            value = value.item()
        if self._are_there and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        got = "no such column" if name not in row else repr(value)
        together = f", with {', '.join(self._names)}" if len(self._names) > 1 else ""
        raise self._cells.error(index, name, got, f"a finite number in every row, or in none{together}")


Said = str | list[dict[str, Any]]
"""A text or the messages of a conversation."""


def is_conversation(value: Any) -> bool:
    """Return whether a cell holds messages rather than a text."""
    return isinstance(value, list)


def read_said(row: Mapping[str, Any], column: str, index: int, cells: RowCells, chat_rows: ChatRows) -> Said:
    """Return a cell that must be a text or messages.

    Args:
        row: the row.
        column: the column to read.
        index: index of the row.
        cells: reads texts, and makes the error that names row and column.
        chat_rows: reads messages.

    Raises:
        DataError: if it is neither.
    """
    if is_conversation(row[column]):
        return chat_rows.messages(row, column, index)
    return cells.text(row, column, index)


def prompt_and_answers(
    row: Mapping[str, Any], index: int, cells: RowCells, chat_rows: ChatRows
) -> tuple[Any, Any, Any]:
    """Return the prompt, the chosen and the rejected answer of a row: three texts, or three lists of messages.

    Without a prompt, or with a text as prompt of conversations, which repeat it, the prompt is what both begin with.

    Args:
        row: a row with `chosen` and `rejected`, and perhaps `prompt`.
        index: index of the row.
        cells: reads texts, and makes the error that names row and column.
        chat_rows: reads messages.

    Raises:
        DataError: naming the column that is neither text nor messages, or that begins as no other does.
    """
    refuse_template_columns(row, index, cells)
    chosen, rejected = (read_said(row, column, index, cells, chat_rows) for column in ("chosen", "rejected"))
    if is_conversation(chosen) != is_conversation(rejected):
        kind = "messages" if is_conversation(chosen) else "a text"
        raise cells.error(index, "rejected", type(row["rejected"]).__name__, f"{kind}, as chosen is")
    if row.get("prompt") is not None:
        prompt = read_said(row, "prompt", index, cells, chat_rows)
        if is_conversation(prompt) == is_conversation(chosen):
            return prompt, chosen, rejected
        if is_conversation(prompt):
            raise cells.error(index, "prompt", "messages", "a text, as chosen is")
    if not chosen or not rejected:
        raise cells.error(
            index, "rejected" if chosen else "chosen", "an empty text", "text that begins with the prompt"
        )
    length = shared_length(chosen, rejected)
    return chosen[:length], chosen[length:], rejected[length:]


def shared_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return how many characters or messages two answers share at their beginning, as TRL's `extract_prompt` counts.

    One of the shorter answer is always left, and a space before the first difference belongs to the answers.
    """
    place = 0
    for place in range(min(len(chosen), len(rejected))):
        if chosen[place] != rejected[place]:
            return place - 1 if place and chosen[place - 1] == " " else place
    return place


def refuse_template_columns(row: Mapping[str, Any], index: int, cells: RowCells) -> None:
    """Refuse columns that TRL hands to the chat template, and that would change the tokens.

    Raises:
        DataError: naming the first that holds something.
    """
    for column in ("tools", "chat_template_kwargs"):
        if row.get(column):
            raise cells.error(index, column, f"{row[column]!r:.60}", "None or nothing; render the texts beforehand")


REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
"""Log-probabilities of the answers under the reference, in nats, where the rows bring them."""


class PairRows:
    """Turns rows with a chosen and a rejected answer into rows of two sequences.

    `EOS` is added to answers that are texts; where tokens of a prompt and an answer merge, the answer begins before.
    Row values are the numbers of tokens of the two answers, and the columns of `REFERENCE_COLUMNS` where there are any.

    Args:
        tools: what the rows of the dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools
        self._numbers = RowNumbers(REFERENCE_COLUMNS, tools.cells)

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        is_tokenised = self._tools.data_format is DataFormat.TOKENIZED_PREFERENCE
        answers = tokenised_pair(row, index, self._tools) if is_tokenised else self._encoded(row, index)
        values = self._numbers.read(row, index)
        kept = cut_answers(answers, index, self._tools)
        if kept is None:
            return None
        chosen, rejected = kept
        # Of the answers as they are, also where nothing comes before them that could predict their first token.
        values["chosen_tokens"] = float(len(chosen.ids) - chosen.start)
        values["rejected_tokens"] = float(len(rejected.ids) - rejected.start)
        return pair_of(chosen, rejected, index, values)

    def _encoded(self, row: Mapping[str, Any], index: int) -> tuple[Answer, Answer]:
        prompt, *answers = prompt_and_answers(row, index, self._tools.cells, self._tools.chat_rows)
        chosen, rejected = (encode_answer(prompt, answer, index, self._tools) for answer in answers)
        # One prompt for both, as the reader of one answer would not see where the other's tokens merge with it.
        start = min(chosen.start, rejected.start)
        return Answer(chosen.ids, start), Answer(rejected.ids, start)


def encode_answer(prompt: Any, answer: Any, index: int, tools: RowTools) -> Answer:
    """Return the tokens of a prompt with an answer to it, both texts or both messages.

    Args:
        prompt: what comes before.
        answer: what is learnt.
        index: index of the row.
        tools: what the rows of the dataset are read with.
    """
    ids, (mask, *_) = tools.prompt_completion({"prompt": prompt, "completion": answer}, index)
    return Answer(np.asarray(ids, dtype=np.int64), int(np.count_nonzero(~mask)))


def tokenised_pair(row: Mapping[str, Any], index: int, tools: RowTools) -> tuple[Answer, Answer]:
    """Return the chosen and the rejected answer of a row of ids, each after those in `prompt_ids`.

    Args:
        row: the row.
        index: index of the row.
        tools: what the rows of the dataset are read with.

    Raises:
        DataError: naming the row and the column that cannot be trained on.
    """
    chosen, rejected = (tokenised_answer(row, column, index, tools) for column in ("chosen_ids", "rejected_ids"))
    return chosen, rejected


def tokenised_answer(row: Mapping[str, Any], column: str, index: int, tools: RowTools) -> Answer:
    """Return the ids in a column after those in `prompt_ids`, which may be missing.

    Args:
        row: the row.
        column: the column of the answer.
        index: index of the row.
        tools: what the rows of the dataset are read with.

    Raises:
        DataError: if one of them is no list of token ids.
    """
    given = row.get("prompt_ids")
    prompt = tools.cells.integers([] if given is None else given, index, "prompt_ids")
    answer = tools.cells.integers(row[column], index, column)
    for name, ids in (("prompt_ids", prompt), (column, answer)):
        tools.cells.checked_ids(ids, index, name, empty_allowed=name == "prompt_ids")
    return Answer(np.concatenate((prompt, answer)), len(prompt))


class OddsRows:
    """Turns rows with a chosen and a rejected answer into rows of two sequences.

    Their token column `is_answer` is 1 for tokens of answers; the other targets are those of the chosen row's prompt.

    Args:
        tools: what the rows of the dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        is_tokenised = self._tools.data_format is DataFormat.TOKENIZED_PREFERENCE
        answers = tokenised_pair(row, index, self._tools) if is_tokenised else self._encoded(row, index)
        kept = cut_answers(answers, index, self._tools)
        if kept is None:
            return None
        chosen, rejected = kept
        pair = pair_of(chosen, rejected, index, {})
        is_answer = np.ones(len(pair), dtype=np.float32)
        for first, answer in ((0, chosen), (len(chosen.ids), rejected)):
            is_answer[first : first + answer.start] = 0.0
        labels = np.concatenate((chosen.ids, rejected.labels()))
        return replace(pair, labels=labels, token_columns={"is_answer": is_answer})

    def _encoded(self, row: Mapping[str, Any], index: int) -> tuple[Answer, Answer]:
        prompt, chosen, rejected = prompt_and_answers(row, index, self._tools.cells, self._tools.chat_rows)
        if is_conversation(chosen):
            prompt, chosen, rejected = self._rendered(prompt, chosen, rejected, index)
        pair = self._answer(prompt, chosen, index, "chosen"), self._answer(prompt, rejected, index, "rejected")
        prompts = [answer.ids[: answer.start] for answer in pair]
        differing = sum(a != b for a, b in zip(*prompts, strict=False))
        if differing > 1 or abs(len(prompts[0]) - len(prompts[1])) > 1:
            allowed = "a prompt whose tokens merge with those of an answer in its last one at most"
            raise self._tools.cells.error(index, "prompt", f"prompts that differ in {differing} tokens", allowed)
        return pair

    def _rendered(self, prompt: Any, chosen: Any, rejected: Any, index: int) -> tuple[str, str, str]:
        """Return messages as the texts that the chat template makes of them, the prompt up to where these differ."""
        render = self._tools.chat_rows.render
        text = render(prompt, "prompt", index, is_prompt=True)
        whole = [render(prompt + answer, name, index) for name, answer in (("chosen", chosen), ("rejected", rejected))]
        for full in whole:
            text = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, full, strict=False)))
        first, second = (full[len(text) :] for full in whole)
        return text, first, second

    def _answer(self, prompt: str, answer: str, index: int, column: str) -> Answer:
        tokenizer = self._tools.tokenizer
        ids = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if len(ids) < len(prompt_ids):
            got = f"{len(ids)} tokens with the prompt, which has {len(prompt_ids)} alone"
            raise self._tools.cells.error(index, column, got, "an answer whose tokens do not merge with the prompt")
        start = len(prompt_ids)
        # Where the last token of the prompt merges with the answer, the answer begins with it.
        if prompt_ids != ids[:start]:
            start -= 1
        first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
        if first is not None and (start == 0 or ids[0] != first):
            ids, start = [first, *ids], start + 1
        if last is not None and (len(ids) == start or ids[-1] != last):
            ids = [*ids, last]
        return Answer(np.asarray(ids, dtype=np.int64), start)


class ScoredRows:
    """Turns rows with a chosen and a rejected text into rows of two sequences, each scored as a whole.

    A prompt comes before both texts, and `EOS` after texts that are no messages. Rows of which one text is longer than
    the limit are left out, as in TRL: a score is read at the end, which a cut would take away. There is a row value
    `margin` where the column is.

    Args:
        tools: what the rows of the dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools
        self._numbers = RowNumbers(("margin",), tools.cells)

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        tools = self._tools
        is_tokenised = tools.data_format is DataFormat.TOKENIZED_PREFERENCE
        texts = self._tokenised(row, index) if is_tokenised else self._encoded(row, index)
        values = self._numbers.read(row, index)
        for text in texts:
            tools.cells.checked_ids(text, index, "input_ids")
        longest = max(len(text) for text in texts)
        if longest > tools.limit.num_tokens:
            if tools.limit.policy == "error":
                tools.limit.drops(index, longest)
            tools.counts.num_dropped_long += 1
            return None
        ids = np.concatenate(texts)
        # Tokens carry no labels here, so the ids stand in for them; and a value is what classifiers' rows have.
        return TokenSequence(ids, ids.copy(), index, 0.0, is_one_term=True, starts=(len(texts[0]),), row_values=values)

    def _tokenised(self, row: Mapping[str, Any], index: int) -> list[np.ndarray]:
        pair: list[Answer] = [
            tokenised_answer(row, name, index, self._tools) for name in ("chosen_ids", "rejected_ids")
        ]
        return [answer.ids for answer in pair]

    def _encoded(self, row: Mapping[str, Any], index: int) -> list[np.ndarray]:
        tools = self._tools
        refuse_template_columns(row, index, tools.cells)
        said = {
            name: read_said(row, name, index, tools.cells, tools.chat_rows)
            for name in ("prompt", "chosen", "rejected")
            if name != "prompt" or row.get(name) is not None
        }
        for name in ("rejected", "prompt"):
            if name in said and is_conversation(said[name]) != is_conversation(said["chosen"]):
                kind = "messages" if is_conversation(said["chosen"]) else "a text"
                raise tools.cells.error(index, name, type(row[name]).__name__, f"{kind}, as chosen is")
        return [np.asarray(self._ids(said, name, index), dtype=np.int64) for name in ("chosen", "rejected")]

    def _ids(self, said: Mapping[str, Any], name: str, index: int) -> list[int]:
        text = said[name]
        if is_conversation(text):
            return self._tools.chat_rows.encode([*said.get("prompt", ()), *text], name, index)[0]
        eos = getattr(self._tools.tokenizer, "eos_token", None)
        # A text that ends in EOS gets no second one, as in TRL.
        end = eos if eos and not text.endswith(eos) else ""
        return self._tools.tokenizer(said.get("prompt", "") + text + end)["input_ids"]


_BLOCK = 1000
"""Rows that `datasets.Dataset.map` hands to TRL at a time: their chosen answers come before their rejected ones."""


class UnpairedRow(dict[str, Any]):
    """One answer of a pair.

    Attributes:
        origin: index of the pair among the rows as they were.
        column: the column that the answer stood in.
    """

    def __init__(self, row: Mapping[str, Any], origin: int, column: str) -> None:
        """Keep where the answer comes from."""
        super().__init__(row)
        self.origin = origin
        self.column = column


class UnpairedRows:
    """A dataset of pairs read as one of single answers, twice as long.

    Args:
        dataset: rows with `chosen` and `rejected`, and perhaps `prompt`.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
    """

    def __init__(self, dataset: Any, where: str) -> None:
        """Keep the pairs."""
        self.dataset = dataset
        self.where = where

    def __len__(self) -> int:
        """Return the number of answers."""
        return 2 * len(self.dataset)

    def __iter__(self) -> Iterator[UnpairedRow]:
        """Yield the answers, the chosen ones of a block before its rejected ones.

        Raises:
            DataError: naming the pair that lacks an answer.
        """
        rows = iter(enumerate(islice(self.dataset, len(self.dataset))))
        while block := list(islice(rows, _BLOCK)):
            for column in ("chosen", "rejected"):
                for origin, row in block:
                    yield self._single(row, origin, column)

    def _single(self, row: Any, origin: int, column: str) -> UnpairedRow:
        cells = RowCells(self.where, None)
        if not isinstance(row, Mapping):
            raise DataError(f"{self.where} row {origin}: got {type(row).__name__}; allowed: a dict of columns.")
        for name in ("chosen", "rejected"):
            if row.get(name) is None or not isinstance(row[name], (str, list)) or not row[name]:
                raise cells.error(origin, name, f"{row.get(name)!r:.60}", "a text or a list of messages")
        others = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
        answer = row[column]
        if others.get("prompt") is None or (isinstance(others["prompt"], str) and isinstance(answer, list)):
            length = shared_length(row["chosen"], row["rejected"])
            others["prompt"], answer = answer[:length], answer[length:]
        return UnpairedRow({**others, "completion": answer, "label": column == "chosen"}, origin, column)


def unpaired(dataset: Any, where: str) -> Any:
    """Return a dataset of single answers; as it is where its first row is one.

    Args:
        dataset: rows that can be counted and read again.
        where: the dataset, for messages.
    """
    first = next(iter(dataset), None)
    is_paired = isinstance(first, Mapping) and "chosen" in first and "rejected" in first and "completion" not in first
    return UnpairedRows(dataset, where) if is_paired else dataset


class SingleRows:
    """Turns rows with an answer and a verdict into sequences, with loss on the answer.

    Row values are `desirable`, 1 or 0, and `ref_logps` where the column is there.

    Args:
        tools: what the rows of the dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools
        self._numbers = RowNumbers(("ref_logps",), tools.cells)

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        tools = self._tools
        desirable = self._verdict(row, index)
        values = {"desirable": desirable, **self._numbers.read(row, index)}
        if tools.data_format is DataFormat.TOKENIZED_UNPAIRED:
            answer = tokenised_answer(row, "completion_ids", index, tools)
        else:
            answer = encode_answer(*self._prompt_and_answer(row, index), index, tools)
        kept = cut_answers((answer,), index, tools)
        if kept is None:
            return None
        return TokenSequence(kept[0].ids, kept[0].labels(), index, is_one_term=True, row_values=values)

    def _prompt_and_answer(self, row: Mapping[str, Any], index: int) -> tuple[Any, Any]:
        cells = self._tools.cells
        # Of rows that were paired, errors name the row and the column as they were.
        column, index = (row.column, row.origin) if isinstance(row, UnpairedRow) else ("completion", index)
        refuse_template_columns(row, index, cells)
        named = {"prompt": row["prompt"], column: row["completion"]}
        prompt, answer = (read_said(named, name, index, cells, self._tools.chat_rows) for name in ("prompt", column))
        if is_conversation(prompt) != is_conversation(answer):
            kind = "messages" if is_conversation(prompt) else "a text"
            raise cells.error(index, column, type(row["completion"]).__name__, f"{kind}, as the prompt is")
        return prompt, answer

    def _verdict(self, row: Mapping[str, Any], index: int) -> float:
        value = row["label"]
        if isinstance(value, np.generic):
            value = value.item()
        # Files without booleans have 0 and 1; other numbers would be taken for scores.
        if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
            return float(value)
        raise self._tools.cells.error(index, "label", f"{value!r:.60}", "True for a good answer, False for a bad one")


_PAIRED = (DataFormat.TOKENIZED_PREFERENCE, DataFormat.PREFERENCE)

PAIR_ROWS = RowForm(_PAIRED, is_one_term=True, reader=PairRows, marks=("prompt", "chosen", "rejected"))
"""A chosen and a rejected answer, with loss on both."""
ODDS_ROWS = RowForm(_PAIRED, is_one_term=True, reader=OddsRows)
"""A chosen and a rejected answer, with loss on both and on the prompt of the chosen one."""
SINGLE_ROWS = RowForm(
    (DataFormat.TOKENIZED_UNPAIRED, DataFormat.UNPAIRED_PREFERENCE),
    is_one_term=True,
    reader=SingleRows,
    marks=("prompt", "completion", "label"),
    view=unpaired,
)
"""An answer and whether it is good."""
KTO_ROWS = replace(SINGLE_ROWS, arrange=with_mismatched)
"""The same, and each prompt with the answer to another."""
SCORED_ROWS = RowForm(_PAIRED, is_one_term=True, reader=ScoredRows, marks=("chosen", "rejected"), num_labels=1)
"""A better and a worse text, for classifiers."""
