"""Whether a file of rows is UTF-8, told by line: readers of JSON and CSV name neither the file nor the place."""

# MERGED: Rows from where they lie: files of JSON, CSV or Parquet, folders, datasets of the Hub.
# MERGED: Rows of other projects as rows of ours: Alpaca and ShareGPT by name, any other columns by a mapping of names.
# MERGED: A view makes each row when it is read, so that nothing is copied and a stream stays a stream.

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from peft_mux.data.formats import FOREIGN_FORMATS
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.user_code import describe_error

_CHUNK_BYTES = 2**20


def encoding_fault(path: Path, where: str) -> list[Fault]:
    """Return a fault that names the first line of a file which is not UTF-8; nothing where all are.

    Args:
        path: path of a text file.
        where: dotted path of the field that names it, such as `tasks.sql.dataset`.

    Raises:
        OSError: if the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            kept = decoder.getstate()[0]  # of a character that the chunk before ended in
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += (kept + chunk)[: error.start].count(b"\n")
                return [_fault(path, where, line, (kept + chunk)[error.start])]
            if not chunk:
                return []
            line += chunk.count(b"\n")


def _fault(path: Path, where: str, line: int, byte: int) -> Fault:
    return Fault(
        where,
        f"{path.name} line {line}, byte 0x{byte:02x}",
        "UTF-8",
        f"If it is Latin-1: iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}",
    )


FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Loaders of `datasets`, by the ending of a file."""
SOURCES = "a .jsonl, .json, .csv or .parquet file, a folder, or a hub id"


def load_rows(source: str | Path, split: str = "train", *, config: str | None = None) -> Any:
    """Return the rows of a file, a folder or a hub dataset, for `Task(train_dataset=...)` and `eval_dataset`.

    Args:
        source: path of a .jsonl, .json, .csv or .parquet file, of a folder (of such files, or written by
            `save_to_disk`), or else the id of a dataset on the Hub.
        split: name of the split, or a part of it such as "train[:90%]"; a file has no other than "train".
        config: name of the configuration of a hub dataset; `None` for its default.

    Returns:
        A `datasets.Dataset`.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    return rows_of(str(source), split, config, Path(), "load_rows")


def rows_of(source: str, split: str, config: str | None, folder: Path, where: str, field: str = "train_dataset") -> Any:
    """Return the rows of a file, a folder or a hub dataset.

    Args:
        source: path of a file or folder, relative to `folder`, or else a hub id.
        split: name of the split, or a part of it such as "train[:90%]".
        config: name of the configuration of a hub dataset; `None` for its default.
        folder: folder that relative paths begin at.
        where: dotted path of the task, for messages.
        field: name of the field that says where the rows lie, for messages.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    from datasets import load_dataset, load_from_disk

    path, where_source = folder / source, f"{where}.{field}"
    try:
        if path.is_file():
            return _rows_of_file(path, source, split, where, where_source)
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = load_from_disk(str(path))
            return loaded[split] if hasattr(loaded, "keys") else loaded
        if not path.is_dir() and path.suffix in FILE_KINDS:
            raise_faults([Fault(where_source, f"{source!r}, which is not there", SOURCES, "Check the path.")])
        return load_dataset(str(path) if path.is_dir() else source, config, split=split)
    except ConfigError:
        raise
    # `datasets` and the hub raise errors of many kinds, all of which mean that there are no rows.
    except Exception as error:
        told = " ".join(str(error).split())
        raise_faults([Fault(where_source, f"{source!r}, which cannot be loaded: {told}", SOURCES)])


def rows_named(source: str, field: str, where: str) -> Any:
    """Return the rows that a task names: of a dataset of several splits those to train on, or those held out.

    Args:
        source: path of a file or folder, or else a hub id.
        field: the field that names them, `train_dataset` or `eval_dataset`.
        where: names the task in messages.

    Raises:
        ConfigError: if they cannot be loaded, or there is no split of held-out rows.
    """
    if field == "train_dataset" or Path(source).is_file():
        return rows_of(source, "train", None, Path(), where, field)
    for split in ("test", "validation"):
        with suppress(ConfigError):
            return rows_of(source, split, None, Path(), where, field)
    fix = f"Write load_rows({source!r}, split=...)."
    raise_faults([Fault(f"{where}.{field}", repr(source), "a file, or a dataset with a split test or validation", fix)])


def dataset_faults(dataset: Any, where: str) -> list[Fault]:
    """Return why an object cannot be read as rows, as far as that shows without reading one.

    Args:
        dataset: whatever was given.
        where: the field that it was given for.
    """
    allowed = "a datasets.Dataset or IterableDataset, or a list of dicts, with at least one row"
    # These have a length and items as well, but not of rows: a dict of splits is a common slip.
    if dataset is None or isinstance(dataset, (str, bytes, dict)):
        fix = "Pick one split, such as dataset['train']." if isinstance(dataset, dict) else ""
        return [Fault(where, type(dataset).__name__, allowed, fix)]
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        try:
            return [] if len(dataset) else [Fault(where, "an empty dataset", allowed)]
        except TypeError:  # an array without dimensions
            return [Fault(where, shown(dataset), allowed)]
        except Exception as error:  # the dataset's own code, which its owner has to mend
            return [Fault(where, f"a dataset whose length raises {describe_error(error)}", allowed)]
    if hasattr(dataset, "__len__"):  # a set, say, which has no first row
        return [Fault(where, type(dataset).__name__, allowed, "Give its rows in an order, such as a list.")]
    # Every epoch reads the rows from the start, which an iterator has no way back to.
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__"):
        return []
    fix = "An iterator can be read only once; give the iterable itself." if hasattr(dataset, "__next__") else ""
    return [Fault(where, type(dataset).__name__, allowed, fix)]


def _rows_of_file(path: Path, source: str, split: str, where: str, where_source: str) -> Any:
    from datasets import load_dataset

    kind = FILE_KINDS.get(path.suffix, "")
    if not kind:
        raise_faults([Fault(where_source, repr(source), f"{', '.join(FILE_KINDS)} files")])
    if not split.startswith("train"):
        allowed = "train, or a part of it such as train[:90%], as a single file has no other"
        fix = "Put the held-out rows into a file of their own: eval_dataset."
        raise_faults([Fault(f"{where}.split", f"{split!r} of {source!r}", allowed, fix)])
    if kind != "parquet":
        raise_faults(encoding_fault(path, where_source))
    return load_dataset(kind, data_files=str(path), split=split)


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
