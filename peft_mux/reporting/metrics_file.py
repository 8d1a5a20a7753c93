"""`metrics.jsonl`: what is measured while training, one flat object a record.

A record that cannot be written costs nothing but itself: the run goes on, says so once, and counts what is lost. A
record that cannot be read is left out and counted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.errors import CheckpointError
from peft_mux.storage import append_line, read_regular, write_file

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends records to `metrics.jsonl` of a run folder.

    Every record has `event` (`train`, `eval`, `run`, `status`), `run_step` and `time` (seconds since 1970); a task's
    records have `task` and `step`.
    Non-finite numbers are written as strings, as JSON has none. After a time in which the disk took nothing, a record
    `records_lost` says how many are missing (`count`).

    Args:
        folder: the folder of the run; `None` writes nothing.

    Attributes:
        path: the file; `None` where nothing is written.
        num_lost: records that could not be written since the last one that was.
        warn: told of the first record that could not be written, and when records are written again.

    Raises:
        CheckpointError: if anything but a regular file stands there, such as a pipe, which would hang the run.
    """

    def __init__(self, folder: Path | None) -> None:
        """Remember where to write."""
        self.path = None if folder is None else folder / METRICS_NAME
        self.num_lost = 0
        self.warn: Callable[[str], None] = _ignore
        if self.path is not None:
            _require_plain(self.path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; where the disk does not take it, count it and go on."""
        if self.path is None:
            return
        record = {**record, "time": round(time.time(), 3)}
        lost = {"event": "records_lost", "run_step": record.get("run_step", 0), "count": self.num_lost}
        try:
            # Opened for each record, so that no buffer is lost with the process.
            if self.num_lost:
                append_line(self.path, _line(lost))
                self.warn(f"{self.path}: written again; {self.num_lost} records are missing")
                self.num_lost = 0
            append_line(self.path, _line(record))
        except OSError as error:
            if not self.num_lost:
                self.warn(
                    f"{self.path}: could not be written ({error}); training goes on, records are missing from now"
                )
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
            elif record.run_step <= run_step:
                kept.append(line + b"\n")
        if (shorter := b"".join(kept)) != content:
            write_file(self.path, shorter)
        if num_unreadable:
            self.warn(f"{self.path}: {num_unreadable} records could not be read and were dropped")
            self.write({"event": "records_dropped", "run_step": run_step, "count": num_unreadable})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; lines that are none are left out.

    Raises:
        CheckpointError: if there is no such file, or it is none that can be read.
    """
    return [dict(record.values) for _, record in _records(_content(path)) if record is not None]


_WORDS = ("event", "task", "status")


class _Record(NamedTuple):
    """One readable record."""

    values: Mapping[str, Any]
    run_step: int | float


def _records(content: bytes) -> Iterator[tuple[bytes, _Record | None]]:
    """Yield each line that is not empty with its record; `None` for one that is none. A torn last line is passed over.

    Lines are told apart before they are decoded, so that a changed byte costs one line.
    """
    *lines, torn = content.split(b"\n")
    for line in lines:
        if line:
            yield line, _record(line)
    if (last := _record(torn)) is not None:
        yield torn, last  # whole but for its end


def _record(line: bytes) -> _Record | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or any(isinstance(values.get(key), (dict, list)) for key in _WORDS):
        return None
    run_step = values.get("run_step", 0)
    is_number = isinstance(run_step, (int, float)) and not isinstance(run_step, bool) and run_step == run_step
    return _Record(values, run_step) if is_number else None


def _content(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path}: got no readable file ({error}); allowed: the metrics of a run.") from error


def _require_plain(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a pipe or a device"
        raise CheckpointError(
            f"output_dir: got {path}, which is {kind}; allowed: a regular file or none, as the run appends to it."
            " Remove it."
        )


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({key: _json_number(value) for key, value in record.items()}, allow_nan=False)


def _json_number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _ignore(line: str) -> None:
    del line


def training_seconds(records: Iterable[Mapping[str, Any]]) -> float:
    """Return for how long the last training went on, or has gone on so far, as far as records tell."""
    begun: dict[str, float] = {}
    seconds = last = 0.0
    is_over = True
    for record in records:
        time_s, runtime_s = record.get("time"), record.get("train_runtime")
        last = float(time_s) if isinstance(time_s, (int, float)) and math.isfinite(time_s) else last
        # All tasks tell of their rows when a training begins, those that come later when they come, streams at its end.
        if record.get("event") == "data":
            begun[str(record.get("task"))] = last
        elif record.get("event") == "train":
            is_over = False
        elif isinstance(runtime_s, (int, float)):
            seconds, is_over = float(runtime_s), True
            begun.clear()
        elif record.get("status") == "removed":
            begun.pop(str(record.get("task")), None)
    return seconds if is_over or not begun else max(last - min(begun.values()), 0.0)


def steps_at_ends(records: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the steps at which each task changed its status, or stood at an interruption."""
    found: dict[str, list[int]] = {}
    for record in records:
        event, steps = record.get("event"), record.get("steps")
        if event == "status":
            steps = {record.get("task"): record.get("step")}
        if event in ("status", "interrupted") and isinstance(steps, Mapping):
            for name, step in steps.items():
                if isinstance(name, str) and isinstance(step, int):
                    found.setdefault(name, []).append(step)
    return found
