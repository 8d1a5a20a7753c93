"""`metrics.jsonl`: what is measured while training, one flat JSON object per line.

If a record cannot be written, only that record is lost: the run continues, warns once, and counts lost records. Records
that cannot be read are left out and counted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from peft_mux.errors import CheckpointError
from peft_mux.storage import append_line, read_regular, write_file

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends records to `metrics.jsonl` of a run folder.

    Every record has `event` (`train`, `eval`, `run`, `status`, ...), `run_step` and `time` (seconds since 1970); those
    of a task have `task` and `step`. Non-finite numbers are written as strings, as JSON has none. After the disk
    refused some records, `records_lost` says how many are missing (`count`).

    Args:
        folder: the folder of the run; `None` writes nothing.

    Attributes:
        path: the file; `None` if nothing is written.
        num_lost: records that could not be written since the last one that was.
        warn: called for the first record that could not be written, and when records are written again.

    Raises:
        CheckpointError: if something other than a regular file stands there, such as a pipe.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = path = None if folder is None else folder / METRICS_NAME
        self.num_lost = 0
        self.warn: Callable[[str], None] = lambda line: None
        if path is not None and (path.is_symlink() or (path.exists() and not path.is_file())):
            kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a pipe or a device"
            raise CheckpointError(
                f"output_dir: {path} must be a regular file or absent, because the run appends to it, got {kind}. "
                "Remove it."
            )

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; if the disk refuses it, count it as lost."""
        if self.path is None:
            return
        finite = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        lost = {"event": "records_lost", "run_step": record.get("run_step", 0), "count": self.num_lost}
        try:
            # The file is opened for each record, so that no buffer is lost with the process.
            if self.num_lost:
                append_line(self.path, json.dumps(lost))
                self.warn(f"{self.path}: written again; {self.num_lost} records are missing")
                self.num_lost = 0
            append_line(self.path, json.dumps({**finite, "time": round(time.time(), 3)}, allow_nan=False))
        except OSError as error:
            if not self.num_lost:
                self.warn(f"{self.path}: could not be written ({error}); training continues; later records are missing")
            self.num_lost += 1

    def truncate_after(self, run_step: int) -> None:
        """Drop the records of steps that a resumed run takes again, a torn last line, and what cannot be read.

        Raises:
            CheckpointError: if the file cannot be read or written.
        """
        if self.path is None or not self.path.exists():
            return
        kept, num_unreadable = [], 0
        content = _content(self.path)
        for line, record in _records(content):
            if record is None:
                num_unreadable += 1
            elif record.get("run_step", 0) <= run_step:
                kept.append(line + b"\n")
        if (shorter := b"".join(kept)) != content:
            write_file(self.path, shorter)
        if num_unreadable:
            self.warn(f"{self.path}: {num_unreadable} records could not be read and were dropped")
            self.write({"event": "records_dropped", "run_step": run_step, "count": num_unreadable})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; lines that are not records are left out.

    Raises:
        CheckpointError: if there is no such file, or it cannot be read.
    """
    return [record for _, record in _records(_content(path)) if record is not None]


def _content(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} must be the metrics of a run, but cannot be read ({error}).") from error


def _records(content: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line that is not empty with its record, `None` if it is none; a torn last line is skipped."""
    # Split before decoding, so that a changed byte costs one line.
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = None
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict):
            run_step = values.get("run_step", 0)
            is_number = isinstance(run_step, (int, float)) and not isinstance(run_step, bool) and run_step == run_step
            words = (values.get(key) for key in ("event", "task", "status"))
            if is_number and not any(isinstance(word, (dict, list)) for word in words):
                record = values
        # A last line without a newline is torn, unless the record itself is complete.
        if record is not None or (line and number < len(lines)):
            yield line, record
