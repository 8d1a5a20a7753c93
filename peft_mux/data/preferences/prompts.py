"""Prompts and answers of rows that compare answers, where the prompt may be a column or the beginning of both answers.

Both texts and conversations are taken, with TRL's meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peft_mux.data.cells import RowCells
from peft_mux.data.rows.chat_rows import ChatRows

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
