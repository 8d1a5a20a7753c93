"""`metrics.jsonl`: what cannot be written or read costs its own record and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peft_mux.errors import CheckpointError
from peft_mux.log.metrics_file import METRICS_NAME, MetricsLog, read_metrics
from peft_mux.reporting.page import plot_losses
from peft_mux.reporting.views import view_of_records


def log_of(folder: Path) -> tuple[MetricsLog, list[str]]:
    log, said = MetricsLog(folder), []
    log.warn = said.append
    return log, said


def record(step: int, **values: Any) -> dict[str, Any]:
    return {"event": "train", "run_step": step, "task": "a", "step": step, **values}


def steps(path: Path) -> list[int]:
    return [one["run_step"] for one in read_metrics(path)]


def test_a_full_disk_loses_records_says_so_once_and_says_how_many(
    tmp_path: Path, disk: Callable[[int | None], None]
) -> None:
    log, said = log_of(tmp_path)
    path = tmp_path / METRICS_NAME
    log.write(record(1))
    # Half of the next line fits: it must not be left there.
    disk(path.stat().st_size + 10)
    for step in (2, 3, 4):
        log.write(record(step))
    assert len(said) == 1
    assert METRICS_NAME in said[0]
    disk(None)
    log.write(record(5))
    log.write(record(6))
    assert "3 records are missing" in said[1]
    assert len(said) == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("time", None) is None for line in lines] == [False, True, False, False], "each has its time"
    assert lines == [
        record(1),
        {"event": "records_lost", "run_step": 5, "count": 3},
        record(5),
        record(6),
    ]


def test_a_flipped_bit_anywhere_costs_one_record_which_is_counted(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    log, _ = log_of(tmp_path)
    for step in range(4):
        log.write(record(step, loss=1.0))
    whole = path.read_bytes()
    third = whole.split(b"\n")[2]
    start = whole.index(third)
    for place in range(start, start + len(third)):
        changed = bytearray(whole)
        changed[place] ^= 0x80  # no longer UTF-8
        path.write_bytes(changed)
        log, said = log_of(tmp_path)
        log.truncate_after(9)
        assert "1 records could not be read and were dropped" in said[0]
        assert steps(path) == [0, 1, 3, 9]
        (*_, last) = read_metrics(path)
        assert last.pop("time") > 0
        assert last == {"event": "records_dropped", "run_step": 9, "count": 1}


@pytest.mark.parametrize(
    "line",
    [
        "5",
        "[]",
        "null",
        "nonsense",
        '{"run_step": "4"}',
        '{"run_step": NaN}',
        '{"task": ["a"]}',
        "[" * 9**5,
        "9" * 5000,
    ],
)
def test_a_line_that_is_no_record_is_dropped_and_passed_over(line: str, tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    path.write_text(f"{json.dumps(record(1))}\n{line}\n{json.dumps(record(2))}\n")
    assert steps(path) == [1, 2]
    log, said = log_of(tmp_path)
    log.truncate_after(1)
    assert len(said) == 1
    assert steps(path) == [1, 1]


def test_later_records_and_a_torn_last_line_are_dropped_in_silence(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    path.write_text(f'{json.dumps(record(1))}\n{json.dumps(record(2))}\n{{"event": "tr')
    log, said = log_of(tmp_path)
    log.truncate_after(1)
    assert steps(path) == [1]
    assert said == []


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    plant = {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "link": lambda: path.symlink_to(tmp_path / "x")}
    plant[kind]()
    with pytest.raises(CheckpointError, match=rf"{METRICS_NAME} must be a regular file .*, got a {kind}.*Remove it"):
        MetricsLog(tmp_path)
    with pytest.raises(CheckpointError, match=METRICS_NAME):
        read_metrics(path)


def test_losses_are_drawn_from_what_can_be_read_and_a_link_in_the_way_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outside, image = tmp_path / "outside", tmp_path / "losses.png"
    outside.write_bytes(b"precious")
    image.symlink_to(outside)
    broken = [
        {"task": "a", "loss": 1.0},
        {"task": ["a"], "step": 1, "loss": 1.0},
        record(2, loss="not a number at all"),
    ]
    assert plot_losses(view_of_records([record(1, loss=1.0), *broken, record(3, loss="nan")], {}), image) == image
    assert outside.read_bytes() == b"precious"
    assert image.read_bytes().startswith(b"\x89PNG")
