"""Rows from where they lie: files of JSON, CSV or Parquet, folders, datasets of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft_mux.data.encoding import encoding_fault
from peft_mux.errors import ConfigError, Fault, raise_faults

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
