"""Rows from where they lie: files of JSON, CSV or Parquet, folders, datasets of the Hub."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from peft_mux.data.encoding import encoding_fault
from peft_mux.errors import ConfigError, Fault, raise_faults, shown
from peft_mux.own_code import describe_error

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
