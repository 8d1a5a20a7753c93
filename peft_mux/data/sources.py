"""Loads rows from JSON, CSV or Parquet files, folders and Hub datasets, and converts rows of other projects.

Alpaca and ShareGPT rows are converted by format name, with answers or feedback (chosen and rejected, or a label); other
columns by a mapping of names. Rows are converted when they are read, so nothing is copied and streams stay streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.data.formats import FOREIGN_FORMATS
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.user_code import describe_error

Row = Mapping[str, Any]
RowFormat = str | Mapping[str, str]
"""Name of a foreign format, or a mapping from our column names to those of the dataset: `{"prompt": "question"}`.

With the key `format`, a mapping from the names of the columns of that foreign format.
"""
FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Loaders of `datasets`, by file suffix."""
SOURCES = "a .jsonl, .json, .csv or .parquet file, a folder, or a hub id"


def load_rows(source: str | Path, split: str = "train", *, config: str | None = None) -> Any:
    """Return the rows of a file, a folder or a hub dataset, for `Task(train_dataset=...)` and `eval_dataset`.

    Args:
        source: path of a .jsonl, .json, .csv or .parquet file, of a folder (of such files, or written by
            `save_to_disk`), or else the id of a dataset on the Hub.
        split: name of the split, or a part of it such as "train[:90%]"; a file has only the split "train".
        config: name of the configuration of a hub dataset; `None` for its default.

    Returns:
        A `datasets.Dataset`.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    return rows_of(str(source), split, config, "load_rows")


def rows_of(source: str, split: str, config: str | None, where: str, field: str = "train_dataset") -> Any:
    """Return the rows of a file, a folder or a hub dataset.

    Args:
        source: path of a file or folder, or else a hub id.
        split: name of the split, or a part of it such as "train[:90%]".
        config: name of the configuration of a hub dataset; `None` for its default.
        where: dotted path of the task, for messages.
        field: name of the field that holds the source, for messages.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    from datasets import load_dataset, load_from_disk

    path, where_source = Path(source), f"{where}.{field}"
    try:
        if path.is_file():
            kind = FILE_KINDS.get(path.suffix, "")
            if not kind:
                raise_faults([Fault(where_source, repr(source), f"a file of type {', '.join(FILE_KINDS)}")])
            if not split.startswith("train"):
                allowed = "train, or a part of it such as train[:90%], because a single file has no other split"
                fix = "Put the held-out rows into a separate file and pass it as eval_dataset."
                raise_faults([Fault(f"{where}.split", f"{split!r} of {source!r}", allowed, fix)])
            if kind != "parquet":
                raise_faults(encoding_fault(path, where_source))
            return load_dataset(kind, data_files=str(path), split=split)
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = load_from_disk(str(path))
            return loaded[split] if hasattr(loaded, "keys") else loaded
        if not path.is_dir() and path.suffix in FILE_KINDS:
            raise_faults(
                [Fault(where_source, f"{source!r}, which does not exist", SOURCES, f"There is no {path.absolute()}.")]
            )
        return load_dataset(str(path) if path.is_dir() else source, config, split=split)
    except ConfigError:
        raise
    # `datasets` and the hub raise errors of many types, all of which mean that the rows cannot be loaded.
    except Exception as error:
        raise_faults(_content_fault(path, where_source))
        got = f"{source!r}, which cannot be loaded: {' '.join(str(error.__cause__ or error).split())}"
        raise_faults([Fault(where_source, got, SOURCES)])


def rows_named(source: str, field: str, where: str) -> Any:
    """Return the rows of a source given by name: the train split, or the test or validation split for `eval_dataset`.

    Args:
        source: path of a file or folder, or else a hub id.
        field: the field that holds it, `train_dataset` or `eval_dataset`.
        where: the task, for messages.

    Raises:
        ConfigError: if they cannot be loaded, or if there is no test or validation split.
    """
    if field == "train_dataset" or isfile(source):
        return rows_of(source, "train", None, where, field)
    for split in ("test", "validation"):
        with suppress(ConfigError):
            return rows_of(source, split, None, where, field)
    fix = f"Write load_rows({source!r}, split=...)."
    raise_faults([Fault(f"{where}.{field}", repr(source), "a file, or a dataset with a test or validation split", fix)])


def encoding_fault(path: Path, where: str) -> list[Fault]:
    """Return a fault that names the first line of a file that is not UTF-8; JSON and CSV readers do not name it.

    Args:
        path: path of a text file.
        where: dotted path of the field that names it, such as `tasks.sql.dataset`.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                got = f"{path.name} line {number}, byte 0x{line[error.start]:02x}"
                fix = f"If it is Latin-1: iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}"
                return [Fault(where, got, "UTF-8 text", fix)]
    return []


def _content_fault(path: Path, where: str) -> list[Fault]:
    """Return why a file has no rows, more precisely than its reader: it is empty, or a line is not valid JSON.

    Args:
        path: path that was given as a source; it may not be a file.
        where: dotted path of the field that names it.
    """
    if not isfile(path):  # which is false for a name that is too long, too
        return []
    is_empty = not path.stat().st_size
    if path.suffix != ".parquet":
        with path.open(encoding="utf-8") as file:  # white space, or the empty list of JSON
            is_empty = all(line.strip() in ("", "[]") for line in file)
    if is_empty:
        return [Fault(where, f"{path.name}, which is empty", "a file with at least one row")]
    num_rows = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file if path.suffix == ".jsonl" else (), start=1):
            if not line.strip():
                continue
            try:
                row, problem = json.loads(line), ""
            except (ValueError, RecursionError) as error:
                row, problem = None, f" ({error})"
            if not isinstance(row, dict):
                got = f"{path.name} line {number}, row {num_rows}: {shown(line.strip())}{problem}"
                return [Fault(where, got, "a JSON object on each line: {...}")]
            num_rows += 1
    return []


def dataset_faults(dataset: Any, where: str) -> list[Fault]:
    """Return why an object cannot be used as a dataset, as far as can be checked without reading a row.

    Args:
        dataset: any value.
        where: the field that it was given for.
    """
    allowed = "a datasets.Dataset or IterableDataset, or a list of dicts, with at least one row"
    # These also have a length and items, but the items are not rows: a dict of splits is a common mistake.
    if dataset is None or isinstance(dataset, (str, bytes, dict)):
        fix = "Pick one split, such as dataset['train']." if isinstance(dataset, dict) else ""
        return [Fault(where, type(dataset).__name__, allowed, fix)]
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        try:
            return [] if len(dataset) else [Fault(where, "an empty dataset", allowed)]
        except TypeError:  # an array without dimensions
            return [Fault(where, shown(dataset), allowed)]
        except Exception as error:  # raised by the user's dataset class
            return [Fault(where, f"a dataset whose length raises {describe_error(error)}", allowed)]
    fix = ""
    if hasattr(dataset, "__len__"):  # for example a set, which has no first row
        fix = "Pass the rows in a definite order, such as a list."
    elif hasattr(dataset, "__next__"):  # every epoch reads the rows from the start
        fix = "An iterator can be read only once; pass the iterable itself."
    elif hasattr(dataset, "__iter__"):
        return []
    return [Fault(where, type(dataset).__name__, allowed, fix)]


# ---------------------------------------------------------------------------------------------- rows of other projects

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bard", "bing", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""The role of each speaker in ShareGPT's `from`."""
_ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{context}### Response:\n"
)
"""The prompt with which Stanford Alpaca was trained."""
_LABELS = ("label", "kto_tag")
"""Columns that say whether an answer is good."""


def _alpaca_row(row: Row) -> dict[str, Any]:
    """Return `prompt` and `completion` of a row with `instruction`, `input` (may be empty) and `output`.

    The prompt is Stanford Alpaca's, which has a separate form for rows with an input.
    """
    context = str(row.get("input") or "")
    prompt = _ALPACA.format(
        more=", paired with an input that provides further context" if context else "",
        instruction=row["instruction"],
        context=f"### Input:\n{context}\n\n" if context else "",
    )
    return {"prompt": prompt, "completion": row["output"]}


def _alpaca_chat_row(row: Row) -> dict[str, Any]:
    """Return an Alpaca row as messages, for the tokenizer's chat template; `history` has earlier turns."""
    turns = [turn for pair in row.get("history") or () for turn in zip(("user", "assistant"), pair, strict=True)]
    asked = [str(text) for text in (row["instruction"], row.get("input")) if text]
    messages = [{"role": role, "content": text} for role, text in [*turns, ("user", "\n".join(asked))]]
    if row.get("chosen") is not None:
        return _with_feedback(row, messages)
    made = _with_feedback(row, [*messages, {"role": "assistant", "content": row["output"]}])
    whole = made.pop("messages", None)
    # Only the answer carries loss.
    return made if whole is None else {"prompt": whole[:-1], "completion": whole[-1:], **made}


def _sharegpt_row(row: Row) -> dict[str, Any]:
    """Return a row with `conversations` of `from` and `value` as messages."""
    return _with_feedback(row, [_message(turn) for turn in row["conversations"]])


def _with_feedback(row: Row, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `messages`; with feedback `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`.

    Args:
        row: its columns `system` and `tools` are read, too.
        messages: the whole conversation, without an answer if the row has `chosen` and `rejected`.
    """
    messages = [*([{"role": "system", "content": row["system"]}] if row.get("system") else []), *messages]
    labels = [row[name] for name in _LABELS if row.get(name) is not None]
    made: dict[str, Any] = {"messages": messages}
    if row.get("chosen") is not None:
        made = {"prompt": messages, "chosen": [_answer(row["chosen"])], "rejected": [_answer(row["rejected"])]}
    elif labels:
        made = {"prompt": messages[:-1], "completion": messages[-1:], "label": labels[0]}
    if row.get("tools"):
        tools = json.loads(row["tools"]) if isinstance(row["tools"], str) else row["tools"]
        # Rows of LLaMA-Factory have the bare functions.
        made["tools"] = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return made


def _answer(cell: Any) -> dict[str, Any]:
    """Return a chosen or rejected answer, which is a text, a turn, or a conversation that ends with it."""
    if isinstance(cell, str):
        return {"role": "assistant", "content": cell}
    return _message(cell if isinstance(cell, Mapping) else cell[-1])


def _message(turn: Row) -> dict[str, Any]:
    """Return the message of a turn with `from` and `value`, or with `role` and `content`.

    Raises:
        ValueError: if the speaker is unknown, or if a function call is not JSON.
    """
    speaker = turn.get("from") or turn.get("role")
    if speaker not in ROLES:
        raise ValueError(f"conversations from {shown(speaker)}, which is not one of {', '.join(ROLES)}")
    content: Any = turn.get("content") if turn.get("value") is None else turn["value"]
    # Columns of files fill missing keys with None.
    others = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    message = {**others, "role": ROLES[speaker], "content": content}
    if speaker == "function_call":
        try:
            parsed = json.loads(content)
            calls = parsed if isinstance(parsed, list) else [parsed]
            calls = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        except (ValueError, LookupError, TypeError) as error:
            wanted = '{"name": ..., "arguments": {...}} as JSON, or a list of these'
            raise ValueError(f"function_call {shown(content)}, which is not {wanted}") from error
        message |= {"content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    return message


_FEEDBACK = {"chosen": ["prompt", "chosen", "rejected"]} | {name: ["prompt", "completion", "label"] for name in _LABELS}
"""The columns that rows of chats become if they have one of these columns."""
_OF_CHATS = ("system", "tools", "rejected", *_FEEDBACK)


class _ForeignFormat(NamedTuple):
    """Rows of another project.

    Attributes:
        convert: returns one of our rows.
        required: the columns that rows must have; chats may have `chosen` and `rejected` in place of `output`.
        optional: the other columns that are read.
        columns: the columns of our rows, if the others have no feedback.
    """

    convert: Callable[[Row], dict[str, Any]]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    columns: list[str]


_ANSWERED, _CHAT = ["prompt", "completion"], ("input", "history", *_OF_CHATS)
_FORMATS = {
    "alpaca": _ForeignFormat(_alpaca_row, FOREIGN_FORMATS["alpaca"], ("input",), _ANSWERED),
    "alpaca_chat": _ForeignFormat(_alpaca_chat_row, FOREIGN_FORMATS["alpaca"], _CHAT, _ANSWERED),
    "sharegpt": _ForeignFormat(_sharegpt_row, FOREIGN_FORMATS["sharegpt"], _OF_CHATS, ["messages"]),
}
"""The formats of other projects by name."""


def _parsed(row_format: RowFormat) -> tuple[str, dict[str, str]]:
    """Return the name of a row format, "" for a mapping without one, and the dataset's names of columns by ours."""
    if isinstance(row_format, str):
        return row_format, {}
    names = {**row_format}
    return names.pop("format", ""), names


class MappedStream:
    """A stream that converts the rows of another stream; it can be iterated repeatedly.

    Args:
        rows: the rows.
        row_format: their format.

    Attributes:
        column_names: the columns of the converted rows; `None` if they are unknown.
    """

    def __init__(self, rows: Any, row_format: RowFormat) -> None:
        self._rows = rows
        name, theirs = _parsed(row_format)
        names = {column: ours for ours, column in theirs.items()}

        def rename(row: Row) -> dict[str, Any]:
            # A column that happens to have one of our names would otherwise be read as well.
            kept = {key: value for key, value in row.items() if key in names or key not in theirs}
            return {names.get(key, key): value for key, value in kept.items()}

        columns = _columns_of(rows)
        columns = None if columns is None else list(rename(dict.fromkeys(columns)))
        if name:
            foreign = _FORMATS[name]
            self._convert: Callable[[Row], dict[str, Any]] = lambda row: foreign.convert(rename(row))
            if columns is not None:
                read = [column for column in foreign.optional if column in columns]
                made = next((_FEEDBACK[column] for column in read if column in _FEEDBACK), foreign.columns)
                columns = [*made, *(column for column in read if column == "tools")]
        else:
            self._convert = rename
        self.column_names = columns

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all rows."""
        return map(self._convert, self._rows)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the stream if it has this method."""
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)


class MappedRows(MappedStream):
    """A dataset that converts the rows of another dataset when they are read."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        return self._convert(self._rows[index])


def mapped(rows: Any, row_format: RowFormat) -> Any:
    """Convert rows of a foreign format; rows that are mapped already are returned unchanged.

    Args:
        rows: a dataset or a stream.
        row_format: the format of its rows.
    """
    if isinstance(rows, MappedStream):
        return rows
    return (MappedRows if hasattr(rows, "__len__") else MappedStream)(rows, row_format)


def row_format_faults(row_format: object, rows: Any, where: str, field: str) -> list[Fault]:
    """Return the errors of a row format, or of rows that do not match it, judging by the first row.

    Args:
        row_format: the value of `Task.row_format`.
        rows: a dataset or a stream; the columns of a stream may be unknown.
        where: dotted path of the task.
        field: name of the dataset.
    """
    names, present = sorted(_FORMATS), _columns_of(rows)
    allowed = f'{", ".join(names)}, or a dict from peft_mux columns to your columns: {{"prompt": "question"}}'
    texts = [row_format] if isinstance(row_format, str) else []
    if isinstance(row_format, Mapping):
        texts = [*row_format, *row_format.values()]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        return [Fault(f"{where}.row_format", shown(row_format), allowed)]
    name, theirs = _parsed(row_format)  # type: ignore[arg-type]
    needed = list(theirs)
    if name or isinstance(row_format, str):
        if name not in _FORMATS:
            return [Fault(f"{where}.row_format", shown(name), allowed, closest(name, names))]
        foreign = _FORMATS[name]
        needed, known = [*foreign.required], (*foreign.required, *foreign.optional)
        if "chosen" in foreign.optional and theirs.get("chosen", "chosen") in (present or ()):
            needed = [*needed[:1], "chosen", "rejected"]
        faults = [
            Fault(f"{where}.row_format.{key}", "an unknown column", f"one of {', '.join(known)}", closest(key, known))
            for key in theirs
            if key not in known
        ]
        if faults:
            return faults
        needed += [column for column in theirs if column not in needed]
    missing = [theirs.get(column, column) for column in needed]
    missing = [column for column in missing if present is not None and column not in present]
    if not missing or isinstance(rows, MappedStream):
        return []
    got = f"columns {', '.join(present or ()) or 'none'}"
    wanted = ", ".join(theirs.get(column, column) for column in needed)
    # Suggest similar names only for the user's own mapping, which may have a typo; a named format has none.
    hint = "" if isinstance(row_format, str) else closest(missing[0], present or ())
    return [Fault(f"{where}.{field}", got, f"rows with {wanted}, as row_format requires", hint)]


def _columns_of(rows: Any) -> list[str] | None:
    """Return the columns of rows; `None` if they are unknown without reading a stream."""
    try:
        names = getattr(rows, "column_names", None)
        if isinstance(names, (list, tuple)):
            return [str(name) for name in names]
        first = rows[0] if hasattr(rows, "__len__") and len(rows) else None
        return [str(name) for name in first] if isinstance(first, Mapping) else None
    except Exception:  # raised by the dataset's own code; reported when rows are read
        return None
