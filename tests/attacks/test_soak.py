"""Thousands of steps, arrivals and departures: memory stays flat, and so do file descriptors and threads.

Each soak is a process of its own, which this file is the script of.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import COUNT, how_many, nano_task, rows
from tests.children import run_script

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc"),
]

NUM_SAMPLES = 40


class Endless:
    """A stream of rows, which a thread reads ahead."""

    def __iter__(self) -> Iterator[Any]:
        """Yield rows for ever."""
        while True:
            yield from rows(1)


class Sampler(TrainerCallback):
    """Writes down memory, file descriptors and threads every so many steps."""

    def __init__(self, every: int) -> None:
        """Take no sample yet."""
        self.every = every
        self.samples: list[tuple[int, int, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take a sample where it is time."""
        if state.global_step % self.every == 0:
            pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
            self.samples.append(
                (pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count())
            )


class ComesAndGoes(TrainerCallback):
    """Lets a guest come at every even step and go at the next one; every second guest reads a stream."""

    def __init__(self) -> None:
        """Know no trainer yet."""
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register or remove."""
        number, goes = divmod(state.global_step, 2)
        if goes:
            name = f"guest{number}"
            data = Endless() if number % 2 else rows(number)
            self.trainer.register_tasks([nano_task(name, number % 50, train_dataset=data, max_steps=100_000)])
        elif number:
            self.trainer.remove_task(f"guest{number - 1}", save=False)


def soak(kind: str, count: int) -> list[tuple[int, int, int]]:
    """Return the samples of a run of so many steps, or so many arrivals and departures."""
    num_steps = count if kind == "steps" else 2 * count + 1
    sampler = Sampler(max(1, num_steps // NUM_SAMPLES))
    tasks = [
        nano_task("rows", 1, max_steps=num_steps, eval_dataset=rows(3, 2), eval_steps=100),
        nano_task("stream", 2, max_steps=num_steps, train_dataset=Endless()),
    ]
    with tempfile.TemporaryDirectory() as folder:
        saving = {"save_strategy": "steps", "save_steps": 200, "save_total_limit": 2}
        logging = {"logging_strategy": "steps", "logging_steps": 20}
        trainer = attacks.make_trainer(tasks, Path(folder) / "run", watcher=sampler, **saving, **logging)
        if kind != "steps":
            visitors = ComesAndGoes()
            visitors.trainer = trainer
            trainer.add_callback(visitors)
        trainer.train()
        assert trainer.task_statuses["rows"] == trainer.task_statuses["stream"] == "succeeded"
    return sampler.samples


def assert_flat(samples: list[tuple[int, int, int]]) -> None:
    """Assert that after a warm-up memory grows by less than 2 %, and nothing else grows."""
    quarter = len(samples) // 4
    memory, descriptors, threads = (list(series) for series in zip(*samples, strict=True))
    early, late = mean(memory[quarter : 2 * quarter]), mean(memory[-quarter:])
    print(f"memory {early / 2**20:.1f} -> {late / 2**20:.1f} MiB, descriptors {descriptors[-1]}, threads {threads[-1]}")
    assert late <= 1.02 * early, f"memory grew by {late / early - 1:.1%}"
    assert max(descriptors[quarter:]) <= max(descriptors[:quarter]) + 1, descriptors
    assert max(threads[quarter:]) <= max(threads[:quarter]) + 1, threads


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("steps", how_many(usually=1_500, full=10_000)),
        ("arrivals and departures", how_many(usually=150, full=1_000)),
    ],
)
def test_a_long_run_holds_no_more_at_its_end(kind: str, count: int, record_property: Any) -> None:
    printed = run_script(__file__, kind, str(count), timeout_s=1400.0, MALLOC_ARENA_MAX="2")
    assert_flat(json.loads(printed.splitlines()[-1]))
    record_property(COUNT, count)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(json.dumps(soak(sys.argv[1], int(sys.argv[2]))))
