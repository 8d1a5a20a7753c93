"""Rows of other projects as rows of ours: Alpaca and ShareGPT by name, any other columns by a mapping of names.

A view makes each row when it is read, so that nothing is copied and a stream stays a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peft_mux.data.formats import FOREIGN_FORMATS
from peft_mux.errors import Fault, closest, shown

Row = Mapping[str, Any]
RowFormat = str | Mapping[str, str]
"""Name of a format of another project, or the column of each of our columns: `{"prompt": "question"}`."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bard", "bing"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Whom ShareGPT's `from` stands for."""

_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{context}### Response:\n"
)
"""The prompt that Stanford Alpaca was trained with."""


def alpaca_row(row: Row) -> dict[str, Any]:
    """Return `prompt` and `completion` of a row with `instruction`, `input` (may be empty) and `output`.

    The prompt is that of Stanford Alpaca, with its second form where there is an input.
    """
    context = str(row.get("input") or "")
    prompt = _ALPACA.format(
        more=", paired with an input that provides further context" if context else "",
        instruction=row["instruction"],
        context=f"### Input:\n{context}\n\n" if context else "",
    )
    return {"prompt": prompt, "completion": row["output"]}


def alpaca_chat_row(row: Row) -> dict[str, Any]:
    """Return `messages` of such a row, for the chat template of the tokenizer."""
    context = str(row.get("input") or "")
    asked = f"{row['instruction']}\n{context}" if context else row["instruction"]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return {"messages": [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]}


def sharegpt_row(row: Row) -> dict[str, Any]:
    """Return `messages` of a row with `conversations` of `from` and `value`, and perhaps a column `system`.

    Raises:
        ValueError: if somebody speaks whose role is not known.
    """
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = []
    for turn in row["conversations"]:
        speaker = turn.get("from")
        if speaker not in _ROLES:
            raise ValueError(f"conversations from {shown(speaker)}, which is none of {', '.join(_ROLES)}")
        messages.append({"role": _ROLES[speaker], "content": turn.get("value")})
    return {"messages": [*system, *messages]}


_MAKERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Row], dict[str, Any]]]] = {
    "alpaca": (FOREIGN_FORMATS["alpaca"], ("prompt", "completion"), alpaca_row),
    "alpaca_chat": (FOREIGN_FORMATS["alpaca"], ("messages",), alpaca_chat_row),
    "sharegpt": (FOREIGN_FORMATS["sharegpt"], ("messages",), sharegpt_row),
}
"""By name: the columns that are read, those that are made, and what makes them."""


class MappedRows:
    """A dataset whose rows are made of those of another one.

    Args:
        rows: the rows, with a length and by number.
        row_format: what they are.

    Attributes:
        column_names: the columns of the rows that are made, as far as they are known.
        row_format: what the rows are.
    """

    def __init__(self, rows: Any, row_format: RowFormat) -> None:
        """Read no row yet."""
        self._rows, self.row_format = rows, row_format
        self.column_names = _columns(rows, row_format)
        self._make = row_maker(row_format)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        return self._make(self._rows[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all rows."""
        return map(self._make, self._rows)


class MappedStream:
    """A stream whose rows are made of those of another one; it can be read again and again."""

    def __init__(self, rows: Any, row_format: RowFormat) -> None:
        """Read no row yet."""
        self._rows, self.row_format = rows, row_format
        self.column_names = _columns(rows, row_format)
        self._make = row_maker(row_format)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all rows."""
        return map(self._make, self._rows)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch begins, where it wants to know."""
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)


def mapped(rows: Any, row_format: RowFormat) -> Any:
    """Return rows of a format as rows of ours; those that are already stay as they are.

    Args:
        rows: a dataset or a stream.
        row_format: what its rows are.
    """
    if isinstance(rows, (MappedRows, MappedStream)):
        return rows
    return (MappedRows if hasattr(rows, "__len__") else MappedStream)(rows, row_format)


def row_maker(row_format: RowFormat) -> Callable[[Row], dict[str, Any]]:
    """Return what makes our row of one of a format."""
    if isinstance(row_format, str):
        return _MAKERS[row_format][2]
    names = {theirs: ours for ours, theirs in row_format.items()}
    # What stands under one of our names without being meant would be read beside it.
    return lambda row: {
        names.get(key, key): value for key, value in row.items() if key in names or key not in row_format
    }


def row_format_faults(row_format: object, rows: Any, where: str, field: str) -> list[Fault]:
    """Return what is wrong with a format, or with rows that are not of it, as far as the first row tells.

    Args:
        row_format: as the task gives it.
        rows: a dataset or a stream; the columns of a stream may not be known.
        where: dotted path of the task.
        field: name of the dataset.
    """
    names = sorted(_MAKERS)
    if isinstance(row_format, str):
        if row_format not in _MAKERS:
            allowed = f'{", ".join(names)}, or a dict of our columns and theirs: {{"prompt": "question"}}'
            return [Fault(f"{where}.row_format", shown(row_format), allowed, closest(row_format, names))]
        needed = _MAKERS[row_format][0]
    elif isinstance(row_format, Mapping) and row_format and all(map(_is_pair, row_format.items())):
        needed = tuple(row_format.values())
    else:
        allowed = f'{", ".join(names)}, or a dict of our columns and theirs: {{"prompt": "question"}}'
        return [Fault(f"{where}.row_format", shown(row_format), allowed)]
    present = _names(rows)
    missing = [name for name in needed if present is not None and name not in present]
    if not missing or isinstance(rows, (MappedRows, MappedStream)):
        return []
    got, allowed = f"columns {', '.join(present or ()) or 'none'}", f"{', '.join(needed)}, as row_format says"
    # The columns of a named format are what they are: one that sounds alike is no slip of the pen.
    hint = "" if isinstance(row_format, str) else closest(missing[0], present or ())
    return [Fault(f"{where}.{field}", got, allowed, hint)]


def _is_pair(item: tuple[object, object]) -> bool:
    return all(isinstance(name, str) and name for name in item)


def _columns(rows: Any, row_format: RowFormat) -> list[str] | None:
    if isinstance(row_format, str):
        return list(_MAKERS[row_format][1])
    names = _names(rows)
    return None if names is None else list(row_maker(row_format)(dict.fromkeys(names)))


def _names(rows: Any) -> list[str] | None:
    """Return the columns of rows; `None` where they are not known without reading a stream."""
    try:
        names = getattr(rows, "column_names", None)
        if isinstance(names, (list, tuple)):
            return [str(name) for name in names]
        first = rows[0] if hasattr(rows, "__len__") and len(rows) else None
        return [str(name) for name in first] if isinstance(first, Mapping) else None
    except Exception:  # the dataset's own code, whose faults are told where rows are read
        return None
